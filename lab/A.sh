mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c && tar xJf .lab/trees.txz -C /tmp; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
nvidia-smi -L | head -2
t() { timeout $1 python -m pytest $2 -q -x -p no:cacheprovider -p no:benchmark -p insta -k "$3" 2>&1 | tail -3 | cut -c1-300; echo "== $2 $3 rc $? $(date +%T)"; }
t 60 tests/kernel/test_latent.py "clusters and few"
t 100 tests/kernel/test_latent.py "clusters"
t 60 tests/kernel/test_records.py "clusters and 65"
t 100 tests/kernel/test_records.py "clusters"
grep failed /tmp/insta.txt
b() { timeout 90 python -m perf.bench --quick --peers "" --out /tmp/rec/$2 $1 --kernel attn_mla > /tmp/b-$2.txt 2>&1; echo "== $2 rc $? $(date +%T)"; grep "us:" /tmp/b-$2.txt | sed 's/no peer *us://; s/ causal//; s#d576/512##' | cut -c1-130; tail -1 /tmp/b-$2.txt | cut -c1-100; }
b "--set mla-records --configs attn_mla:cluster=False" records
b "--set mla-decode --configs attn_mla:cluster=False" decode
b "--set mla-long --configs attn_mla:cluster=False" long
L=$PWD; for v in nf np; do cd /tmp/trees/$v; PYTHONPATH=. b "--set mla-records" $v; cd $L; done
for tool in memcheck racecheck; do for f in "test_latent.py:clusters and few" "test_records.py:clusters_have_the_bits_of_blocks_apart_in_steps and 65"; do timeout 70 compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 7 python -m pytest tests/kernel/${f%%:*} -q -x -p no:cacheprovider -p no:benchmark -k "${f#*:}" > /tmp/san.txt 2>&1; echo "== $tool $f rc $? $(date +%T)"; grep -E "=====|passed|failed" /tmp/san.txt | tail -5 | cut -c1-200; done; done
cd /tmp && tar cJf $OUT/rec.txz rec b-*.txt insta.txt

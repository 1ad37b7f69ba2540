# First launches of issue 34: intervals, blocks, triangle; then all tests of them, then speeds.
mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
nvidia-smi -L | head -2
s() { t=$1; shift; timeout -k 3 $t python -m pytest -q -x --maxfail 1 -p no:cacheprovider -p no:benchmark -p insta "$@" > /tmp/s.txt 2>&1; echo "rc $? $(date +%T) $*" | cut -c1-150; tail -25 /tmp/s.txt | grep -E "^E |passed|failed|rror" | cut -c1-250 | head -8; }
s 15 tests/kernel/test_intervals.py -k "test_forward and documents"
s 15 tests/kernel/test_intervals.py -k "test_backward and documents"
s 15 tests/kernel/test_blocks.py -k "test_forward" 
s 15 tests/kernel/test_blocks.py -k "test_backward"
s 15 tests/kernel/test_triangle.py -k "test_triangle and bfloat16 and True"
a() { t=$1; shift; rm -f /tmp/insta.txt; timeout $t python -m pytest -q -p no:cacheprovider -p no:benchmark -p insta -p twogpu -n 30 "$@" > /tmp/a.txt 2>&1; echo "== all rc $? $(date +%T)"; grep -c passed /tmp/insta.txt; grep failed /tmp/insta.txt | cut -c1-230 | head -40; tail -2 /tmp/a.txt | cut -c1-200; cp /tmp/a.txt /tmp/insta.txt $OUT/; }
a ${A:-150} tests/kernel/test_intervals.py tests/kernel/test_blocks.py tests/kernel/test_triangle.py tests/integrations/test_pair_bias.py tests/kernel/test_listed.py -m "gpu and not slow and not matrix"
b() { n=$1; t=$2; shift 2; timeout $t python -m perf.bench --quick --out /tmp/rec "$@" > /tmp/b-$n.txt 2>&1; echo "== $n rc $? $(date +%T)"; grep -E "us:|ours|built_in|rror" /tmp/b-$n.txt | cut -c1-230 | head -${H:-30}; }
b tri 60 --set triangle --peers efficient --protocol burst
b blk 60 --set blocks,blocks-bwd --peers "" --protocol burst
b int 60 --set intervals,intervals-bwd --peers "" --protocol burst
bash .lab/race.sh
cd /tmp && tar cJf $OUT/rec.txz rec r-*.txt b-*.txt

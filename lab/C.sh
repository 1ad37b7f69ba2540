mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab; cp .lab/passed.txt $OUT/passed.txt; chmod u+w $OUT/passed.txt; echo "start $(date +%T)"
p() { timeout $1 python -m pytest $2 -m "gpu and not slow and not matrix" -q -p no:cacheprovider -p no:benchmark -p insta -p twogpu -n 30 --resume $OUT/passed.txt > $OUT/$3.txt 2>&1; echo "$3 rc $? $(date +%T)"; grep ^failed /tmp/insta.txt | sort -u | cut -c1-200 | head -20; tail -1 $OUT/$3.txt | cut -c1-200; wc -l < $OUT/passed.txt; }
p 110 "tests/kernel/test_latent.py tests/kernel/test_records.py tests/kernel/test_wide_heads.py" wide
p 120 tests rest
timeout 60 python -m perf.gate --no-tests > /tmp/gate.txt 2>&1; echo "gate rc $? $(date +%T)"; tail -45 /tmp/gate.txt | cut -c1-150
cp /tmp/insta.txt /tmp/gate.txt $OUT/

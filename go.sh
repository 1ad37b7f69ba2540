python3 -m pip install -q --upgrade --no-index --no-deps --target /tmp/site ../../.whl/*.whl
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 RAWATTN_CACHE=/tmp/rc
timeout 240 python3 -m perf.bench --set paper,small --kernel attn_fwd_mma --peers fa2 --out $OUT/rec > $OUT/bench.log 2>&1; tail -75 $OUT/bench.log
timeout 60 python3 -m perf.bench --set fp32 --peers efficient,math --out $OUT/rec > $OUT/fp32.log 2>&1; tail -30 $OUT/fp32.log
(timeout 200 python3 -m pytest -q -p no:cacheprovider tests/kernel/test_attn_fwd_simt.py > $OUT/simt.log 2>&1; tail -5 $OUT/simt.log) &
(timeout 200 python3 -m pytest -q -p no:cacheprovider tests/kernel/test_attn_fwd.py -k "attn_fwd_mma" > $OUT/mma.log 2>&1; tail -3 $OUT/mma.log) &
wait

python3 -m pip install -q --upgrade --no-index --no-deps --target /tmp/site ../../.whl/*.whl
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 RAWATTN_CACHE=$PWD/rc
timeout 120 python3 scratch/mma_sweep.py run > $OUT/sweep.log 2>&1
tail -1 $OUT/sweep.log
export RAWATTN_CACHE=/tmp/rc
(timeout 330 python3 -m pytest -q -x --maxfail=30 -p no:cacheprovider tests/kernel/test_attn_fwd.py -k "attn_fwd_mma" > $OUT/mma.log 2>&1; tail -3 $OUT/mma.log) &
(timeout 330 python3 -m pytest -q --maxfail=30 -p no:cacheprovider tests/kernel/test_attn_fwd_simt.py > $OUT/simt.log 2>&1; tail -3 $OUT/simt.log) &
for k in attn_fwd_mma attn_fwd_simt; do
 (python3 scratch/san.py $k; python3 scratch/san.py $k s
  S=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  echo memcheck $k; timeout 250 $S --tool memcheck --error-exitcode 7 python3 scratch/san.py $k 2>&1 | tail -4
  echo racecheck $k; timeout 250 $S --tool racecheck --error-exitcode 7 python3 scratch/san.py $k s 2>&1 | tail -4
  echo synccheck $k; timeout 250 $S --tool synccheck --error-exitcode 7 python3 scratch/san.py $k s 2>&1 | tail -4
 ) > $OUT/san_$k.log 2>&1 &
done
wait; tail -n 12 $OUT/san_*.log

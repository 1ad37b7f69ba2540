python3 -m pip install -q --upgrade --no-index --no-deps --target /tmp/site ../../.whl/*.whl
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 RAWATTN_CACHE=$PWD/rc
timeout 200 python3 scratch/mma_sweep.py run > $OUT/sweep.log 2>&1
tail -3 $OUT/sweep.log
timeout 100 python3 scratch/scratch_race_mma.py simtsweep 64 128 > $OUT/simt.log 2>&1
tail -3 $OUT/simt.log

# The whole GPU suite; on nvidia-h200-x2 with -n 30 and -p twogpu (two GPUs, 32 cores). Cache in .lab/gpucache.txz.
mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
timeout ${T:-420} python -m pytest tests -m "gpu and not slow and not matrix" -q -p no:cacheprovider -p no:benchmark -p insta -p twogpu -n ${N:-30} --record --resume $OUT/passed.txt > $OUT/suite.txt 2>&1
cp /tmp/insta.txt $OUT/; grep -c passed /tmp/insta.txt; grep failed /tmp/insta.txt | cut -c1-240 | head -40; tail -3 $OUT/suite.txt; cp perf/record/h200/tests.json $OUT/ 2>/dev/null

# The rest of the suite on two GPUs, then the gate.
mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
cp .lab/passed.txt $OUT/passed.txt; nvidia-smi -L | head -2; date +%T
timeout ${T:-430} python -m pytest tests -m "gpu and not slow and not matrix" -q -p no:cacheprovider -p no:benchmark -p insta -p twogpu -n ${N:-30} --record --resume $OUT/passed.txt > $OUT/suite.txt 2>&1
echo "suite rc $? $(date +%T)"; cp /tmp/insta.txt $OUT/; grep -c passed /tmp/insta.txt; grep failed /tmp/insta.txt | cut -c1-240 | head -30; tail -3 $OUT/suite.txt | cut -c1-300; cp perf/record/*/tests*.json $OUT/ 2>/dev/null; ls perf/record/h200 | grep tests; wc -l $OUT/passed.txt
mkdir -p /tmp/gaterec; cp perf/record/h200/gate.json /tmp/gaterec/; timeout 110 python -m perf.gate --no-tests --update --out /tmp/gaterec > /tmp/gate.txt 2>&1; echo "gate rc $? $(date +%T)"; tail -70 /tmp/gate.txt | cut -c1-150
cd /tmp && tar cJf $OUT/gate.txz gaterec gate.txt

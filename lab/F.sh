mkdir -p /tmp/c /tmp/rec && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
cp .lab/passed.txt $OUT/passed.txt; date +%T
(CUDA_VISIBLE_DEVICES=0 timeout 80 python .lab/tri_dbg.py > $OUT/dbg.txt 2>&1) &
for t in memcheck racecheck; do (CUDA_VISIBLE_DEVICES=1 timeout 100 compute-sanitizer --tool $t --report-api-errors no --kernel-regex kns=triangle python .lab/tri_dbg.py one > $OUT/$t.txt 2>&1) & done
timeout ${T:-110} python -m pytest tests -m "gpu and not slow and not matrix" -q -p no:cacheprovider -p no:benchmark -p insta -p twogpu -n 26 --resume $OUT/passed.txt > /tmp/suite.txt 2>&1
echo "suite rc $? $(date +%T)"; cp /tmp/insta.txt $OUT/; grep -c ^passed /tmp/insta.txt; grep ^failed /tmp/insta.txt | sort -u | cut -c1-200 | head -30; tail -2 /tmp/suite.txt | cut -c1-200; tail -90 /tmp/suite.txt > $OUT/suite.txt
cat $OUT/dbg.txt | cut -c1-420 | head -20; grep -v "^=*$" $OUT/memcheck.txt | tail -4 | cut -c1-200; tail -3 $OUT/racecheck.txt | cut -c1-200
b() { n=$1; t=$2; shift 2; timeout $t python -m perf.bench --quick --peers "" --protocol burst --out /tmp/rec/$n "$@" > /tmp/b-$n.txt 2>&1; echo "== $n rc $? $(date +%T)"; grep -E "us:|rror" /tmp/b-$n.txt | cut -c1-330 | head -12; cp /tmp/b-$n.txt $OUT/; }
b blk 32 --cases .lab/blk.json --configs attn_bwd:heads_together=2,attn_bwd:heads_together=4,attn_bwd:heads_together=8,attn_bwd:order=at_once,attn_bwd:store=unordered+deterministic=False
r() { timeout 30 python -m perf.map --seed $1 --case $2 --ours attn_fwd --peers cudnn --seconds 16 --out /tmp/rec/race$1 > /tmp/r-$1.txt 2>&1; echo "== race $1 rc $? $(date +%T)"; python - $1 <<'P'
import json,sys
for r in json.load(open(f"/tmp/rec/race{sys.argv[1]}/map-seed-{sys.argv[1]}.json"))["rows"]: print(r["label"][:60], {k:round(v,1) for k,v in r["us"].items()})
P
}
r 11 3,12,17,27,58,73,150,181
r 12 1,8,50,151,158,162,196,205
b int 30 --cases .lab/int.json --configs attn_fwd/128x128s2q2,attn_fwd/128x64s4q2,attn_fwd/192x64s4q2,attn_fwd/128x64s8q2,attn_fwd/128x128s4q2

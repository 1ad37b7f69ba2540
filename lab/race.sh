L=$PWD/.lab; mkdir -p /tmp/c /tmp/trees && tar xJf .lab/race.txz -C /tmp/c && tar xJf .lab/trees.txz -C /tmp/trees; export RAWATTN_CACHE=/tmp/c/gpucache
r() { v=$1; c=$2; cd /tmp/trees/$v; PYTHONPATH=. timeout 30 python -m perf.bench --quick --peers "" --out /tmp/rec/$v --cases $L/$c.json --kernel attn_mla > /tmp/r-$v-$c.txt 2>&1; echo "== $v $c rc $? $(date +%T)"; grep "us:" /tmp/r-$v-$c.txt | sed 's/no peer *us://; s/ causal//; s#d576/512##' | cut -c1-100; tail -1 /tmp/r-$v-$c.txt | cut -c1-60; }
r dev decode; r main decode; r c2 decode; r dev rows; r np rows; r npil rows; r npnf rows; r recnw rec
cd /tmp && tar cJf $OUT/rec.txz rec r-*.txt

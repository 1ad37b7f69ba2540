L=$PWD/.lab; mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c && tar xJf .lab/trees.txz -C /tmp; export RAWATTN_CACHE=/tmp/c/gpucache
b() { cd /tmp/trees/$1; PYTHONPATH=. timeout 40 python -m perf.bench --quick --peers "" --out /tmp/rec/$1 --cases $L/$2.json --kernel attn_mla > /tmp/b-$1-$2.txt 2>&1; echo "== $1 $2 rc $? $(date +%T)"; grep "us:" /tmp/b-$1-$2.txt | sed 's/no peer *us://; s/ causal//; s#d576/512##' | cut -c1-90; tail -1 /tmp/b-$1-$2.txt | cut -c1-60; }
b asks2 rec; b asks2 rows; b asks rows; b fp5 rows; b asks2 decode
cd /tmp && tar cJf $OUT/rec.txz rec b-*.txt

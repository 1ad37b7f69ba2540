mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
I="--warp-sampling-interval 0"; ncu --help | grep -q -- --warp-sampling-interval || I=""
ncu --help | grep -A3 -- "--print-source" | head -4
n() { timeout 50 ncu --kernel-name attn_mla --launch-skip 2 --launch-count 1 --section SourceCounters --section WarpStateStats --section SpeedOfLight --section MemoryWorkloadAnalysis $I -f -o /tmp/$1 python .lab/lab/one.py $2 $3 attn_mla > /tmp/n-$1.txt 2>&1; echo "== $1 rc $? $(date +%T)"; tail -2 /tmp/n-$1.txt | cut -c1-200; timeout 20 ncu -i /tmp/$1.ncu-rep --page details 2>&1 | grep -E "Duration|Elapsed Cycles|L2 Cache Throughput|DRAM Throughput|Mem Pipes|L1/TEX Hit|Issued Warp" | tr -s " " | paste -sd";" ; timeout 20 ncu -i /tmp/$1.ncu-rep --page source --csv --print-source sass > /tmp/$1.csv 2>/tmp/$1.err || timeout 20 ncu -i /tmp/$1.ncu-rep --page source --csv > /tmp/$1.csv 2>>/tmp/$1.err; head -c 300 /tmp/$1.csv; wc /tmp/$1.csv | head -1; head -2 /tmp/$1.err; }
n rec128 mla-records 0
n rec16 mla-records 3
n list128 mla-sparse 0
n page1 mla-pages 0
n page1h mla-pages 2
n dec16 mla-decode 4
cd /tmp && tar cJf $OUT/ncu.txz rec128.* rec16.* list128.* page1.* dec16.* page1h.* n-*.txt

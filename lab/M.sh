# The map beside FA3, two seeds, the gate, the price of invariant steps.
mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c; export RAWATTN_CACHE=/tmp/c/gpucache PYTHONPATH=.:.lab/lab
cp .peers/libcudart.so.12 /tmp/; xz -T8 -dkc .peers/fa3.so.xz > /tmp/fa3.so; export LD_LIBRARY_PATH=/tmp:$LD_LIBRARY_PATH
nvidia-smi -L | head -2
m() { n=$1; t=$2; shift 2; timeout $t python -m perf.map --fa3 /tmp/fa3.so --out /tmp/rec/$n "$@" > /tmp/m-$n.txt 2>&1; echo "== $n rc $? $(date +%T)"; }
m seed11 110 --seed 11 --seconds 90
tail -c 700 /tmp/m-seed11.txt
m map 230 --seconds 200
m gate 60 --gate --update --seconds 50

m inv 70 --set caches --ours :invariant=True --peers read --seconds 55
m seed12 110 --seed 12 --seconds 90
for n in seed11 map gate seed12 inv; do tail -45 /tmp/m-$n.txt | cut -c1-240; done | tail -c 9000
cd /tmp && tar cJf $OUT/rec.txz rec m-*.txt

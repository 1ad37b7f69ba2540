# Speeds of issue 33's and 32's new forms, in one run.
set -u
export RAWATTN_CACHE=/tmp/c/gpucache
b() { echo "== $*"; timeout 200 python -m perf.bench --quick --peers "" "$@" 2>&1 | tail -30; }
timeout 120 python -m perf.launches wide-bwd/0 ours:attn_bwd_wide/128x32 ours:attn_bwd_wide/64x32 ours:attn_bwd_wide/256x32 ours:attn_bwd_wide/128x32pai1 ours:attn_bwd_wide/128x32pai2
b --set wide-bwd --configs attn_bwd_wide/128x32,attn_bwd_wide/128x32pai1,attn_bwd_wide/128x32pai2
b --set wide --configs attn_fwd_wide/64x64,attn_fwd_wide/128x64,attn_fwd_wide/256x64
b --set mla-decode,mla-decode-even,mla-decode-splits,mla-long
b --set mla-sparse,mla-pages --kernel attn_mla
timeout 200 python -m perf.bench --set few-bwd --protocol burst --quick --fa3 .peers/fa3.so.xz --peers fa3 2>&1 | tail -30
cp -r perf/record/* $OUT/ 2>/dev/null

# The first run of new kernels, under a time limit each; $OUT gets what they say. A cache lies in .lab/gpucache.txz.
set -u
mkdir -p /tmp/c && tar xJf .lab/gpucache.txz -C /tmp/c 2>/dev/null; export RAWATTN_CACHE=/tmp/c/gpucache
T="python -m pytest -q -p no:cacheprovider"
one() { echo "== $*"; timeout "$1" $T "${@:2}" > /tmp/o.txt 2>&1; echo "rc $?"; tail -4 /tmp/o.txt; cat /tmp/o.txt >> $OUT/first.txt; }
one 60 tests/kernel/test_latent.py -x --watchdog 2 -k "16 and auto"
one 60 tests/kernel/test_latent.py -x --watchdog 2 -k "128 and auto"
one 60 tests/kernel/test_latent.py -x --watchdog 2 -k "long and even"
one 60 tests/kernel/test_latent.py -x --watchdog 2 -k "test_lists and few"
one 60 tests/kernel/test_latent.py -x --watchdog 2 -k "test_small_pages"
one 150 tests/kernel/test_latent.py -n 8
one 60 tests/kernel/test_wide_heads.py -x --watchdog 2 -k "clusters or many_times"
one 120 tests/kernel/test_wide_heads.py -n 8 -k "gradients"
one 60 tests/kernel/test_attn_bwd.py -x --watchdog 2 -k "along_the_diagonal or works_that_are_chosen"
one 60 tests/kernel/test_attn_bwd.py -n 8 -k "parts_of_a_group or orders_and_parts"
[ -f tests/kernel/test_records.py ] && one 120 tests/kernel/test_records.py -n 8

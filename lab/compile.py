"""python lab/compile.py PROCESSES FILE.pkl|set:NAME[=CONFIG,CONFIG] ...: compiles what pickles of sources (lab/precompile.py) and sets of perf.bench need,
into RAWATTN_CACHE, what is missing first. For kernels of sm_90a; no GPU is needed."""
import pickle, sys, time
from perf.lib import ours, sets
from perf.lib.compiling import Pool
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:]:
        if name.startswith("set:"):
            name, _, configs = name[4:].partition("=")
            for s in ours.sources({c: configs.split(",") if configs else ["ours"] for c in sets.SETS[name]}, TYPICAL["sm_90a"]): found[s.key] = s
        else: found |= pickle.load(open(name, "rb"))
    missing = {k: s for k, s in found.items() if compiler._read(compiler._find_folder(), s) is None}
    print(len(found), "sources,", len(missing), "to compile", flush=True)
    begin, failed = time.time(), 0
    with Pool(int(sys.argv[1])) as pool:
        pool.submit(missing.values())
        for n, (key, binary) in enumerate(pool.results(), 1):
            if isinstance(binary, Exception): failed += 1; print("refused", found[key].name, str(binary)[:200], flush=True)
            if n % 50 == 0: print(n, round(time.time() - begin), "s", flush=True)
    print("done", round(time.time() - begin), "s,", failed, "refused")

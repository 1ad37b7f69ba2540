"""pack.py OUT FILE.pkl|set:...: packs what of RAWATTN_CACHE these need."""
import pickle, sys, subprocess, pathlib
from perf.lib import ours, sets
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
found={}
for name in sys.argv[2:]:
    if name.startswith("set:"):
        name,_,configs=name[4:].partition("=")
        for s in ours.sources({c: configs.split(",") if configs else ["ours"] for c in sets.SETS[name]}, TYPICAL["sm_90a"]): found[s.key]=s
    else: found|=pickle.load(open(name,"rb"))
folder=compiler._find_folder()
have=[compiler._find_entry(folder,s).name for s in found.values() if compiler._find_entry(folder,s).exists()]
print(len(found),len(have), sum((folder/n).stat().st_size for n in have)>>20,"MB")
pathlib.Path("/tmp/list.txt").write_text("\n".join(sorted("gpucache/"+n for n in have)))
subprocess.run(["tar","-C","/tmp","-T","/tmp/list.txt","-I","xz -T2 -6","-cf",sys.argv[1]],check=True)

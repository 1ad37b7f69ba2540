"""python one.py SET NUMBER KERNEL [CONFIG]: a few runs of one case, for ncu."""
import sys, torch
from perf.lib import sets, steps
case = sets.SETS[sys.argv[1]][int(sys.argv[2])]
task = steps.Caches(case)
call = steps.prepare("ours" + "".join(":" + c for c in sys.argv[4:]), task, sys.argv[3])
with call.context():
    for _ in range(4): call.run()
torch.cuda.synchronize()
print(sets.label(case), "ran", flush=True)

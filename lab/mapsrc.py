"""mapsrc.py OUT.pkl: the sources that perf.map compiles: its sets map, gate and caches and seeds 11 and 12, and with invariant steps."""
import pickle, sys
from perf import map as m
from perf.lib import ours, surface
from rawattn.driver import device as devices
d = devices.board("h200"); found = {}
every = [*surface.SETS["map"](), *surface.SETS["gate"](), *surface.SETS["caches"](), *surface.drawn(11), *surface.drawn(12)]
cases = [s.case for s in every]
for s in ours.sources({c: ours.our_names(c, "", d) for c in cases}, d): found[s.key] = s
dec = [s.case for s in every if s.axis[:3] == "dec"]
try:
    for s in ours.sources({c: ours.our_names(c, ":invariant=True", d) for c in dec}, d): found[s.key] = s
except Exception as e: print(repr(e)[:300])
pickle.dump(found, open(sys.argv[1], "wb")); print(len(found))

import sys; sys.argv=["x","zzz"]
exec(open("/tmp/war/check.py").read())
import dataclasses
for name,n in (("scores-bwd",1),):
    c=sets.SETS[name][n]
    for y in ours.sources({c:["ours"]},d):
        if y.name.startswith("attn_bwd.cu"): show(y,(name,n))

import sys; sys.argv=["x","zzz"]
exec(open("/tmp/war/check.py").read())
from rawattn.runtime.select import KERNELS_OF, KERNELS
seen=0
for name,n in (("scores-bwd",1),("masks-bwd",0)):
    c=sets.SETS[name][n]
    op=ours._asked(c, ours.our_options(c,"ours",None,d))
    k=ours.kernels_of(c)["attn_bwd"]
    cfgs=[x for x in k.candidates(op,d) if x.elements]
    print(name,len(cfgs),flush=True)
    for x in cfgs[:1]:
        for y in ours.launched(k,op,x,d):
            if y.name=="attn_bwd.cu": show(y,(name,n,ours.config_name(x)))
for spec in ("kinds:2","kinds:8","scores:1"):
    pass

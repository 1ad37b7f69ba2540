import sys,os,re,time
sys.path.insert(0,"/tmp/war")
import batch,flight
from perf.lib import ours, sets
from rawattn.driver import device as devices
from rawattn.compile import compiler
from rawattn.runtime.select import select
d=devices.board("h200")
want=sys.argv[1]
def show(s,label):
    b=compiler.compile(s)
    p=f"/tmp/war/chk.cubin"; open(p,"wb").write(b.cubin)
    out=[]
    for F in (True,False):
        flight.FENCES=F
        ins,found=batch.run(p)
        fl=set()
        for k,f in found:
            if ins[k].op.startswith(("SYNCS.ARRIVE","BAR","UCGABAR")):
                for x in f:
                    l=batch.line(ins[x].chain)
                    if re.match(r"kv_producer|attn_fwd.cu:28|told_tiles|attn_bwd_dq.cu:22",l): continue
                    fl.add((ins[x].op,l,ins[k].op.split('.')[0]+" "+batch.line(ins[k].chain)))
        out.append(sorted(fl))
    nl=sum(i.op.startswith("LDSM") for i in ins); nf=sum(i.op.startswith("FENCE.VIEW") for i in ins)
    conf="".join(t for k,t in s.headers if k=="config.cuh")
    opts=re.findall(r"using (Softmax|Ahead|Elements|DqStore|StepOrder|Weight) = (\w+)",conf)
    print(s.name,s.key[:8],label,opts,"regs",b.registers,"spill",b.spill_bytes,b.advisories,"ins",len(ins),"LDSM",nl,"fences",nf,flush=True)
    print("    open:",out[0]); 
    if out[1]!=out[0]: print("    fenced:",[x for x in out[1] if x not in out[0]],flush=True)
seen=set()
for spec in sys.argv[2:]:
    name,_,idx=spec.partition(":")
    for n,c in enumerate(sets.SETS[name]):
        if idx and n not in map(int,idx.split(",")): continue
        try:
            for s in ours.sources({c:["ours"]},d):
                if s.key in seen or not re.match(want,s.name): continue
                seen.add(s.key); show(s,(name,n,sets.label(c)))
        except Exception as e: print(name,n,repr(e)[:200],flush=True)

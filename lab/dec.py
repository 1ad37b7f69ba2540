import sys,os,subprocess,collections
sys.path.insert(0,"/tmp/war")
import flight,batch
from perf.lib import ours, sets
from rawattn.driver import device as devices
from rawattn.compile import compiler
from rawattn.runtime.select import select
import rawattn; print(rawattn.__file__)
d=devices.board("h200")
out=sys.argv[1]; os.makedirs(out,exist_ok=True)
S=sets.step
cs=[S((4096,)*16,64),S((4096,)*16,1)]
for n,c in enumerate(cs):
    try:
        op=ours._asked(c, ours.our_options(c,"ours",None,d))
        s=select(op,d,None,None)
        for y in ours.launched(s.kernel,op,s.config,d):
            if not y.name.startswith("attn_decode.cu"): print(n,y.name); continue
            b=compiler.compile(y)
            open(f"{out}/{n}.cubin","wb").write(b.cubin)
            ins,found=batch.run(f"{out}/{n}.cubin")
            fl=[(ins[k].addr,len(f),sorted({batch.line(ins[x].chain) for x in f})) for k,f in found if f and ins[k].op.startswith("SYNCS.ARRIVE") and any(ins[x].op.startswith("LDSM") for x in f)]
            kv=[l for l in y.text.splitlines() if "Kv =" in l] + [l for k,t in y.headers if k.startswith("config") for l in t.splitlines() if "Kv" in l and "using" in l]
            print(n,ours.config_name(s.config),kv[:1],"regs",b.registers,"spill",b.spill_bytes,"ins",len(ins),"tma",any(i.op.startswith("UTMALDG") for i in ins),"in flight:",fl,flush=True)
    except Exception as e: print(n,repr(e)[:300],flush=True)

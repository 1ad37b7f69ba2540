import pickle,time,os,sys,itertools
from perf.lib import ours, sets
from rawattn.driver import device as devices
from rawattn.compile import compiler
d=devices.board("h200")
have=set(os.listdir("/tmp/gpucache"))
f={};lab={}
t=time.time()
for name,cases in sets.SETS.items():
    for c in cases:
        try:
            for s in ours.sources({c:["ours"]}, d):
                if s.key not in f: f[s.key]=s; lab[s.key]=(name,sets.label(c))
        except Exception as e: print(name,c,repr(e)[:200])
    print(name,len(cases),len(f),round(time.time()-t),flush=True)
pickle.dump((f,lab),open("/tmp/war/sources.pkl","wb"))
import collections
n=collections.Counter();m=collections.Counter()
for k,s in f.items():
    p=f"{s.name.removesuffix('.cu')}-{k}.cubin"
    n[s.name]+=1; m[s.name]+= p in have
for k in n: print(k,n[k],"cached",m[k])

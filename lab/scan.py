import sys,glob,random,collections,os,pickle,re
sys.path.insert(0,"/tmp/war")
import flight,batch
kern,n,mode=sys.argv[1],int(sys.argv[2]),sys.argv[3]
fs=sorted(glob.glob(f"/tmp/gpucache/{kern}-"+"[0-9a-f]"*64+".cubin"))
keys=pickle.load(open("/tmp/war/keys.pkl","rb"))
cur=[f for f in fs if f[-70:-6] in keys]
random.seed(2); rest=[f for f in fs if f not in set(cur)]; random.shuffle(rest)
pick=(cur if mode!="rest" else [])+rest[:max(0,n-len(cur))]
tot=collections.Counter(); ex={}; tma=0
GEN=re.compile(r'^(kv_producer.cuh|told_tiles|publish)')
for f in pick:
    ins,found=batch.run(f)
    has=any(i.op.startswith(('UTMALDG','UBLKCP','STAS')) for i in ins); tma+=has
    if not has and mode!="all": continue
    seen=set()
    for k,fl in found:
        i=ins[k]
        if not i.op.startswith(('SYNCS','BAR','UCGABAR','LDGSTS')): continue
        for x in fl:
            s=(batch.line(ins[x].chain),batch.line(i.chain),ins[x].op.split('.')[0],i.op.split('.')[0])
            if GEN.match(s[0]): continue
            seen.add(s); ex.setdefault(s,(f[-70:-58],ins[x].addr,i.addr))
    for s in seen: tot[s]+=1
print("##",kern,len(fs),"cached,",len(cur),"current;",len(pick),"read,",tma,"with TMA/bulk",flush=True)
for s,c in tot.most_common(80): print(f"  {c:3} {s[2]:5} {s[0]}  ||at|| {s[3]} {s[1]}   {ex[s]}",flush=True)

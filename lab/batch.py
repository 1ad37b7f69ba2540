import sys,glob,random,collections,subprocess,os,pickle
sys.path.insert(0,"/tmp/war")
import flight
def run(path):
    t=subprocess.run([flight.ND,"-gi","-hex","-c",path],capture_output=True,text=True).stdout
    return flight.analyse(t)
def line(c):
    # innermost own-source frames: drop ptx wrappers at the head
    k=[x for x in c if x[0] not in('mbarrier.cuh','ldmatrix.cuh','cluster.cuh','barrier.cuh','bulk.cuh','load_shared.cuh','base.cuh')]
    return '<'.join(f"{a}:{b}" for a,b in (k or c)[:3])
if __name__=="__main__":
    kern,n=sys.argv[1],int(sys.argv[2]); ops=sys.argv[3] if len(sys.argv)>3 else "SYNCS,BAR"
    cur=None
    if os.path.exists("/tmp/war/keys.pkl"): cur=pickle.load(open("/tmp/war/keys.pkl","rb"))
    fs=sorted(glob.glob(f"/tmp/gpucache/{kern}-"+"[0-9a-f]"*64+".cubin"))
    if cur: fs=[f for f in fs if f[-70:-6] in cur]
    random.seed(1); random.shuffle(fs)
    tot=collections.Counter(); ex={}
    for f in fs[:n]:
        ins,found=run(f)
        seen=set()
        for k,fl in found:
            i=ins[k]
            if not i.op.startswith(tuple(ops.split(','))): continue
            for x in fl:
                seen.add((line(ins[x].chain), line(i.chain), ins[x].op.split('.')[0], i.op.split('.')[0]))
                ex.setdefault((line(ins[x].chain), line(i.chain), ins[x].op.split('.')[0], i.op.split('.')[0]),(f[-70:-58],ins[x].addr,i.addr))
        for s in seen: tot[s]+=1
    print(kern,len(fs),"forms,",min(n,len(fs)),"looked at")
    for s,c in tot.most_common(60): print(f"  {c:3} {s[2]:5} {s[0]}  ||at|| {s[3]} {s[1]}   {ex[s]}")

"""Loads of shared memory that may be in flight where a barrier is arrived at: data flow over scoreboards in machine code."""
import re,subprocess,sys,collections
ND="/work/venvs/a/lib/python3.11/site-packages/nvidia/cu13/bin/nvdisasm"
INS=re.compile(r'\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/')
HI=re.compile(r'\s*/\* 0x([0-9a-f]{16}) \*/')
LAB=re.compile(r'^(\.L_x_\d+|[\w$.]+):')
FILE=re.compile(r'//## File "([^"]+)", line (\d+)(?: inlined at)?')
class I: pass
def parse(text):
    funcs={};cur=None;labels={};ins=[];chain=();fresh=[]
    inchain=False
    for l in text.splitlines():
        m=FILE.search(l)
        if m:
            if not inchain: fresh=[]
            inchain=True
            fresh.append((m[1].split('/')[-1],int(m[2]))); continue
        m=INS.match(l)
        if m:
            if inchain: chain=tuple(fresh); inchain=False
            i=I(); i.addr=m[1]; i.t=m[2]; i.lo=int(m[3],16); i.hi=None; i.chain=chain; ins.append(i); continue
        m=HI.match(l)
        if m and ins and ins[-1].hi is None: ins[-1].hi=int(m[1],16); continue
        m=LAB.match(l.strip())
        if m: labels[m[1]]=len(ins)
    for i in ins:
        c=(i.hi>>41)&0x1fffff
        i.wr=(c>>5)&7; i.rd=(c>>8)&7; i.wait=(c>>11)&63
        m=re.match(r'(@!?U?P\w+)?\s*([A-Z][\w.]*)(.*)',i.t); i.pred=m[1]; i.op=m[2]; i.args=m[3]
    return ins,labels
def succ(ins,labels,bssy):
    S=[]
    for n,i in enumerate(ins):
        m=re.search(r'`\((\.L_x_\d+|[\w$.]+)\)',i.args)
        tgt=labels.get(m[1]) if m else None
        o=i.op.split('.')[0]; s=[]
        if o in('BRA','JMP'):
            if tgt is not None and tgt<len(ins): s.append(tgt)
            if i.pred or re.search(r'\bU?P\d',i.args) or '.DIV' in i.op or '.CONV' in i.op: s.append(n+1)
        elif o in('EXIT','RET','BPT','KILL'):
            if i.pred: s.append(n+1)
        elif o=='CALL':
            s.append(n+1)
            if tgt is not None and tgt<len(ins): s.append(tgt)
        elif o in('BRX','JMX','BRXU'):
            s=list(set(labels.values()))
        else:
            s.append(n+1)
        S.append([x for x in s if x<len(ins)])
    return S
FENCES=True
def analyse(text):
    ins,labels=parse(text)
    S=succ(ins,labels,None)
    N=len(ins)
    loads=[n for n,i in enumerate(ins) if re.match(r'(LDS|LDSM|LD)(\.|$)',i.op) ]
    nxt=7
    for n in reversed(loads):
        if ins[n].wr==7: ins[n].wr=nxt
        else: nxt=ins[n].wr
    bit={n:1<<k for k,n in enumerate(loads)}
    sb=[0]*6
    for n in loads:
        if ins[n].wr<6: sb[ins[n].wr]|=bit[n]
    keep=[];gen=[];wk=[]
    ALL=(1<<len(loads))-1
    for n,i in enumerate(ins):
        w=0
        for k in range(6):
            if i.wait>>k&1: w|=sb[k]
        wk.append(ALL&~w)
        k2=ALL&~w
        if i.op.startswith('DEPBAR'):
            d=re.search(r'SB(\d), 0x0',i.args)
            if d: k2&=~sb[int(d[1])]
        if FENCES and i.op.startswith(('FENCE.VIEW.ASYNC','MEMBAR')): k2=0
        keep.append(k2); gen.append(bit.get(n,0))
    IN=[0]*N; work=collections.deque(range(N)); q=[True]*N
    while work:
        n=work.popleft(); q[n]=False
        out=(IN[n]&keep[n])|gen[n]
        for s in S[n]:
            if out&~IN[s]:
                IN[s]|=out
                if not q[s]: work.append(s); q[s]=True
    found=[]
    for n,i in enumerate(ins):
        if re.match(r'SYNCS\.(ARRIVE|ATOM)|BAR\.|FENCE|UCGABAR_ARV|UBLKCP|UTMALDG|LDGSTS|ARRIVES',i.op):
            m=IN[n]&wk[n]
            found.append((n,{x for k,x in enumerate(loads) if m>>k&1} if m else set()))
    return ins,found
def sh(c,k=5): return '<'.join(f"{a}:{b}" for a,b in c[:k])
if __name__=='__main__':
    for f in sys.argv[1:]:
        t=subprocess.run([ND,"-gi","-hex","-c",f],capture_output=True,text=True).stdout
        ins,found=analyse(t)
        print("==",f,len(ins),"instr;",len(found),"points")
        for n,fl in found:
            i=ins[n]
            if fl and not i.op.startswith(('FENCE','UBLKCP','UTMALDG','LDGSTS')):
                print(f"  {i.addr} {i.t[:60]:60} [{sh(i.chain)}]")
                by=collections.defaultdict(list)
                for x in sorted(fl): by[sh(ins[x].chain)].append(x)
                for c,xs in by.items(): print(f"       {len(xs)}x {ins[xs[0]].addr} {ins[xs[0]].t[:40]} sb{ins[xs[0]].wr} [{c}]")

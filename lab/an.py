import re
new='''
def analyse(text):
    ins,labels=parse(text)
    S=succ(ins,labels,None)
    N=len(ins)
    loads=[n for n,i in enumerate(ins) if re.match(r'(LDS|LDSM|LD)(\\.|$)',i.op) and i.wr!=7]
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
            d=re.search(r'SB(\\d), 0x0',i.args)
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
        if re.match(r'SYNCS\\.(ARRIVE|ATOM)|BAR\\.|FENCE|UCGABAR_ARV|UBLKCP|UTMALDG|LDGSTS|ARRIVES',i.op):
            m=IN[n]&wk[n]
            found.append((n,{x for k,x in enumerate(loads) if m>>k&1} if m else set()))
    return ins,found
'''
s=open("flight.py").read()
a=s.index("def analyse"); b=s.index("def sh(")
open("flight.py","w").write(s[:a]+"FENCES=True"+new+s[b:])

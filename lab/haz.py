import re,sys
def regs(tok):
    m=re.findall(r'\bR(\d+)(?:\.64|\.128)?',tok); return [int(x) for x in m]
W={'.64':2,'.128':4}
lines=[re.sub(r'/\*.*?\*/','',l).strip() for l in open(sys.argv[1])]
groups=[];cur=[]
for n,l in enumerate(lines,1):
    if 'HGMMA' in l:
        m=re.match(r'(?:@!?\S+ )?HGMMA\S* (R\d+), (?:(R\d+), )?gdesc',l)
        shp=re.search(r'64x(\d+)x16',l); N=int(shp.group(1))
        d=int(m.group(1)[1:]); D=set(range(d,d+N//2)); A=set(range(int(m.group(2)[1:]),int(m.group(2)[1:])+4)) if m.group(2) else set()
        cur.append((n,D,A))
        # check D of in-flight as A
        for g in groups:
            for (k,D2,A2) in g:
                if A & D2: print(n,'A reads in-flight D of',k)
                if D & A2: print(n,'D overwrites in-flight A of',k,sorted(D&A2)[:4])
        if 'gsb0' in l: groups.append(cur); cur=[]
        continue
    m=re.search(r'WARPGROUP.DEPBAR.LE gsb0, 0x(\d)',l)
    if m:
        k=int(m.group(1)); groups=groups[-k:] if k else []
        continue
    if not l or l.startswith('.'): 
        continue
    fl=[x for g in groups+[cur] for x in g]
    if fl:
        body=l.split(' ',1)
        used=set(regs(l))
        ops=l
        dest=re.match(r'(?:@!?\S+ )?(\S+) (?:P\d, )?(R\d+)',l)
        d=set()
        if dest:
            op=dest.group(1); r=int(dest.group(2)[1:]); w=4 if '.128' in op else 2 if '.64' in op or 'WIDE' in op else 1
            d=set(range(r,r+w))
        for (k,D,A) in fl:
            bad=(used&D)|(d&D)|(d&A)
            if bad: print(n,l[:90],'touches',k,sorted(bad))

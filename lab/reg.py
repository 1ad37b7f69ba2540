import csv,sys,collections
f=sys.argv[1]; cuts=[int(x) for x in sys.argv[2].split(",")]
rows=list(csv.reader(open(f))); h=rows[1]
A=h.index("Source"); S=h.index("# Samples"); X=h.index("Instructions Executed")
stall=[i for i,n in enumerate(h) if n.startswith("stall_") and "Not" not in n]
body=[r for r in rows[2:] if len(r)>S and r[S].strip().isdigit()]
tot=sum(int(r[S]) for r in body)
for a,b in zip(cuts,cuts[1:]):
    c=collections.Counter()
    for r in body[a:b]:
        for j in stall:
            if r[j].strip().isdigit(): c[h[j][6:]]+=int(r[j])
    s=sum(int(r[S]) for r in body[a:b]); n=sum(int(r[X]) for r in body[a:b])
    print(f"{a}-{b}: {s/tot*100:.1f}% instr {n}", [(k,f"{v/tot*100:.1f}") for k,v in c.most_common(5)])

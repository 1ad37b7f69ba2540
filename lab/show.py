import csv,sys
f=sys.argv[1]; top=int(sys.argv[2]) if len(sys.argv)>2 else 40
rows=list(csv.reader(open(f)))
h=rows[1]
A=h.index("Source"); S=h.index("# Samples"); X=h.index("Instructions Executed")
stall=[i for i,n in enumerate(h) if n.startswith("stall_") and "Not" not in n]
body=[r for r in rows[2:] if len(r)>S and r[S].strip().isdigit()]
tot=sum(int(r[S]) for r in body)
print(len(body),"instr",tot,"samples")
for i,r in sorted(sorted(enumerate(body),key=lambda t:-int(t[1][S]))[:top]):
    st=sorted(((int(r[j] or 0),h[j]) for j in stall if r[j].strip().isdigit()),reverse=True)[:2]
    print(i, f"{int(r[S])/tot*100:.1f}%", r[X], r[A][:90], st)

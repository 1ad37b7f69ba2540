import re,sys,subprocess
f=sys.argv[1]
L=subprocess.run(["/work/venvs/a/lib/python3.11/site-packages/nvidia/cu13/bin/nvdisasm","-hex","-c",f],capture_output=True,text=True).stdout.splitlines()
ins=[]
for l in L:
    m=re.match(r'\s*/\*([0-9a-f]{4,})\*/\s+(.*?);?\s*/\* 0x([0-9a-f]{16}) \*/',l)
    if m: ins.append([m.group(1),m.group(2),int(m.group(3),16),None])
    else:
        m=re.match(r'\s*/\* 0x([0-9a-f]{16}) \*/',l)
        if m and ins and ins[-1][3] is None: ins[-1][3]=int(m.group(1),16)
def ctl(hi):
    c=(hi>>41)&0x1fffff
    return "wr%d rd%d wait%s stall%d"%((c>>5)&7,(c>>8)&7,format((c>>11)&63,'06b'),c&15)
for a,t,lo,hi in ins:
    if re.search(r'LDS|FENCE|MEMBAR|WARPSYNC|SYNCS.ARRIVE|DEPBAR|PHASECHK|UBLKCP|UTMALDG|HGMMA.*gsb0',t): print(a,t[:64].ljust(64),ctl(hi))

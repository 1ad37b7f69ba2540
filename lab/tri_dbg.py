import torch, sys, math
sys.path.insert(0,".")
import rawattn
from rawattn.kernel.attn_bwd_triangle import AttnBwdTriangleConfig as B
def run(N,H,S,D,cfg=None,Sk=None,dt=torch.bfloat16):
    g=torch.Generator("cuda").manual_seed(0); Sk=Sk or S
    q,k,v,do=(torch.randn(N,x,H,D,device="cuda",generator=g).to(dt) for x in (S,Sk,Sk,S))
    pairs=torch.randn(H,S,Sk,device="cuda",generator=g)
    score=lambda s,b,h,i,j: s+pairs[h,i,j]
    o,lse=rawattn.attention(q,k,v,score=score,return_lse=True,kernel="attn_fwd_triangle")
    ref=rawattn.attention_backward(do,q,k,v,o,lse,score=score,wrt=(pairs,),kernel="attn_bwd_mma")
    o2,lse2=rawattn.attention(q,k,v,score=score,return_lse=True,kernel="attn_fwd_mma")
    out=[f"o {float((o-o2).abs().max()):.3g} lse {float((lse-lse2).abs().max()):.3g}"]
    a=rawattn.attention_backward(do,q,k,v,o,lse,score=score,wrt=(pairs,),kernel="attn_bwd_triangle",config=cfg)
    b=rawattn.attention_backward(do,q,k,v,o,lse,score=score,wrt=(pairs,),kernel="attn_bwd_triangle",config=cfg)
    for n,x,y,z in zip(("dq","dk","dv","db"),a,b,ref):
        d=(x.double()-z.double()).abs(); bad=d>0.05*z.double().abs().max()
        s=f"{n} err {float(d.max()/z.double().abs().max()):.2g} bits {torch.equal(x,y)} bad {int(bad.sum())}"
        if bad.any():
            idx=bad.nonzero(); s+=f" min {idx.min(0).values.tolist()} max {idx.max(0).values.tolist()} first {idx[:3].tolist()}"
        out.append(s)
    print(f"N{N} H{H} S{S}x{Sk} D{D} {cfg}:", "; ".join(out), flush=True)
if __name__=="__main__":
    if len(sys.argv)>1: run(6,2,129,64); sys.exit()
    for a in [(6,2,129,32),(6,2,129,64),(6,2,129,48),(6,2,64,64),(2,1,64,64,B(1,1,2,2,1)),(6,2,129,64,B(1,1,2,2,2)),(6,2,129,64,B(1,2,2,2,2)),(6,2,129,64,B(1,1,3,3,1)),(6,2,129,40),(6,2,256,64),(6,2,129,32,B(1,2,3,3,2)),(6,2,64,64,None,128),(6,2,128,64,None,64)]:
        try: run(*a)
        except Exception as e: print(a, repr(e)[:200], flush=True)

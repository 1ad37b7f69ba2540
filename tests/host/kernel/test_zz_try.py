from tests.host.kernel.test_attn_decode_wide import *
from rawattn.kernel.attn_mla import AttnMlaConfig
class MlaRunner(Runner):
    kernel="attn_mla"
@pytest.fixture
def run(monkeypatch,tmp_path): return MlaRunner(monkeypatch,tmp_path)
ONE, TWO = AttnMlaConfig(1), AttnMlaConfig(2)
BASE=Cached(((1,70),(1,200),(1,0)),page_size=64,dtype="bf16",heads=16,kv_heads=1,head_dim=576,head_dim_v=512,pool="shared",whole=True,ragged=False)
CASES={
 "splits one block": (of(BASE,lengths=((1,1300),(1,600))),ONE,1),
 "splits 3 blocks": (of(BASE,lengths=((1,1300),(1,600))),ONE,3),
 "splits many": (of(BASE,lengths=((1,1300),(1,600))),ONE,7),
 "page 16": (of(BASE,page_size=16,lengths=((1,75),(1,128))),ONE,2),
 "page 8 indptr": (of(BASE,page_size=8,form="indptr",lengths=((1,75),(1,128))),ONE,2),
 "page 32, 256": (of(BASE,page_size=32,lengths=((1,70),(1,97))),ONE,2),
 "page 256": (of(BASE,page_size=256,lengths=((1,70),(1,300))),ONE,2),
 "dense": (of(BASE,form="dense",page_size=301,lengths=((1,70),(1,300))),ONE,2),
 "pairs": (of(BASE,heads=126,lengths=((1,70),(1,100)),sinks=True),TWO,4),
 "ragged": (of(BASE,heads=9,ragged=True,lengths=((9,70),(0,7),(3,2),(20,130)),sinks=True,softcap=5.0),TWO,4),
 "window": (of(BASE,heads=9,lengths=((9,700),(9,100)),window=(300,0)),TWO,4),
 "each": (of(BASE,heads=9,ragged=True,lengths=((9,700),(9,100)),causal=(0,1)),ONE,4),
 "fp16": (of(BASE,dtype="fp16"),ONE,4),
}
@pytest.mark.parametrize("name",CASES)
def test_case(name,run):
    run.check(*CASES[name])
MORE={
 "begins": (of(BASE,heads=9,ragged=True,whole=False,lengths=((9,70),(3,200),(1,5),(2,130)),begins=(33,129,0,70)),ONE,3),
 "begins small pages": (of(BASE,heads=9,page_size=16,ragged=True,whole=False,lengths=((9,70),(3,200),(1,5),(2,130)),begins=(33,129,0,70)),ONE,3),
 "even": (of(BASE,lengths=((1,700),(1,70),(1,0),(1,1000))),ONE,7,dict(split="even")),
 "even pairs": (of(BASE,heads=126,ragged=True,lengths=((1,300),(2,70),(1,0))),TWO,6,dict(split="even")),
}
@pytest.mark.parametrize("name",MORE)
def test_more(name,run):
    case,config,grid,*o=MORE[name]
    run.check(case,config,grid,**(o[0] if o else {}))

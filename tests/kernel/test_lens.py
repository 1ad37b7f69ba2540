"""q_lens and kv_lens: padded batches, of which each sequence uses a part. The lengths lie on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import rawattn
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.testing import Case, expect
from tests.calls import attend, poisoned_memory

pytestmark = pytest.mark.gpu("any")
torch = pytest.importorskip("torch")

KERNELS = [pytest.param(ATTN_FWD, marks=pytest.mark.gpu), ATTN_FWD_MMA, ATTN_FWD_SIMT]
CASES = [
    Case(batch=4, q_len=200, kv_len=333, heads=4, kv_heads=2),
    Case(batch=4, q_len=200, kv_len=333, heads=4, kv_heads=2, head_dim=128, head_dim_v=128, causal=True, sinks=True),
    Case(batch=4, q_len=300, kv_len=300, heads=2, kv_heads=2, head_dim=128, head_dim_v=128, window=(100, None), dtype="fp16"),
    Case(batch=4, q_len=3, kv_len=700, heads=8, kv_heads=2, causal=True),  # heads of a key head share tiles elsewhere
    Case(batch=4, q_len=64, kv_len=3000, heads=1, kv_heads=1, head_dim=128, head_dim_v=128),  # keys are split elsewhere
    Case(batch=4, q_len=200, kv_len=333, heads=4, kv_heads=2, causal=True, softcap=5.0),
    Case(batch=4, q_len=200, kv_len=333, heads=4, kv_heads=2, softcap=50.0),  # weights have no reference
    Case(lengths=((70, 200), (1, 5), (129, 129), (64, 40)), heads=2, kv_heads=2, causal=True),
]
WHICH = [("q_lens", "kv_lens"), ("kv_lens",), ("q_lens",)]


def used(case: Case, which: tuple[str, ...]) -> dict[str, Any]:
    """Of the four sequences one uses all, one nothing, and the others a part."""
    pairs = case.lengths if case.lengths is not None else ((case.q_len, case.kv_len),) * 4
    shares = {"q_lens": (1.0, 0.3, 0.0, 0.61), "kv_lens": (0.7, 1.0, 0.5, 0.0)}
    lens = {
        name: [int(share * pair[i]) for share, pair in zip(shares[name], pairs, strict=True)] for i, name in enumerate(shares)
    }
    return {name: torch.tensor(lens[name], dtype=torch.int32, device="cuda") for name in which}


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("which", WHICH, ids="-".join)
def test_against_the_reference(case: Case, kernel: Any, which: tuple[str, ...]) -> None:
    """Each sequence is as if it had the used rows alone; queries behind them keep no key."""
    q, k, v, *starts = case.inputs("torch", "cuda")
    lens = used(case, which)
    o, lse = attend(case, q, k, v, *starts, kernel=kernel, **lens)
    sinks = {"sinks": case.sink_logits("torch", "cuda")} if case.sinks else {}
    for i in range(4):
        rows, keys, at = (slice(i, i + 1),) * 3
        if case.lengths is not None:
            rows, keys = (slice(*x[i : i + 2].tolist()) for x in starts)
            at = (None, slice(None), rows)
        of = [x[part][None] if case.lengths is not None else x[part] for x, part in ((q, rows), (k, keys), (v, keys), (o, rows))]
        n, m = (int(lens[name][i]) if name in lens else of[j].shape[1] for j, name in enumerate(("q_lens", "kv_lens")))
        found_o, found_lse = of[3], lse[at]
        wanted = expect(of[0][:, :n], of[1][:, :m], of[2][:, :m], **{**case.options, **sinks})
        wanted.check(found_o[:, :n], found_lse[..., :n])
        assert not found_o[:, n:].any()
        behind = found_lse[..., n:]
        assert torch.equal(
            behind, sinks["sinks"][None, :, None].expand_as(behind) if sinks else torch.full_like(behind, -torch.inf)
        )


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    "case", [CASES[1], CASES[3], dataclasses.replace(CASES[0], layout="heads_first")], ids=lambda case: case.name
)
def test_keys_behind_do_not_matter(case: Case, kernel: Any) -> None:
    """Keys and values that are not used may be NaN, and a graph reads the lengths when it runs."""
    q, k, v = case.inputs("torch", "cuda")
    lens = used(case, ("q_lens", "kv_lens"))
    options = {**case.options, "kernel": kernel.name, **lens}
    options |= {"sinks": case.sink_logits("torch", "cuda")} if case.sinks else {}
    for i, n in enumerate(lens["kv_lens"].tolist()):
        k[i, n:] = v[i, n:] = float("nan")
    with poisoned_memory():
        wanted = rawattn.attention(q, k, v, **options)
    assert not wanted.isnan().any()
    right = {name: x.clone() for name, x in lens.items()}
    for x in lens.values():
        x.zero_()
    out, graph = torch.empty_like(wanted), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rawattn.attention(q, k, v, **options, out=out)
    for name, x in lens.items():
        x.copy_(right[name])
    graph.replay()
    assert torch.equal(out, wanted)

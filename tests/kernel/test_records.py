"""Records of 656 bytes on a GPU: steps and lists against attention over what they say, bits, graphs and hostile pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import FP8_DS_MLA
from rawattn.kernel.attn_mla import AttnMlaConfig
from rawattn.testing import _move
from tests.caches import Recorded
from tests.kernel.test_kvcache import attend, check
from tests.kernel.test_listed import attend as attend_listed
from tests.key_lists import ListedStep, Lists, to_numpy

torch = pytest.importorskip("torch")
from rawattn.integrations import flash_mla  # noqa: E402
from rawattn.reference.records import dequantize, quantize  # noqa: E402

pytestmark = pytest.mark.gpu("any")
of = dataclasses.replace
LENGTHS = ((1, 700), (1, 0), (1, 65), (1, 1), (1, 5000), (1, 64), (1, 300))
ONE = Recorded(LENGTHS, False, page_size=64, heads=128, whole=True, device="cuda")
PACKED = of(ONE, ragged=True, heads=16, lengths=((4, 700), (1, 0), (0, 65), (3, 1), (2, 5000), (9, 64), (256, 300)))
BEGINS = (643, 7, 64, 0, 4097, 64, 128)
CASES = {
    "small": of(ONE, lengths=((1, 40),), heads=16),
    "128 heads": ONE,
    **{f"{n} heads": of(ONE, heads=n) for n in (1, 3, 16, 64, 65)},
    **{f"pages of {n}": of(ONE, page_size=n) for n in (1, 2, 16, 256)},
    "dense": of(ONE, form="dense", page_size=5001),
    "end to end": of(PACKED, form="indptr", page_size=16),
    "packed": PACKED,
    "packed, sinks": of(PACKED, sinks=True, softcap=5.0, dtype="fp16"),
    "full": of(PACKED, causal=False),
    "window": of(PACKED, window=(500, 0)),
    "begins": of(PACKED, begins=BEGINS, whole=False),
    "causal for some": of(PACKED, causal=(0, 1, 1, 0, 1, 0, 7)),
    "many": of(ONE, lengths=tuple((1, 37 * i % 3000) for i in range(150))),
}
STEPS = {
    "rows, 128 heads": ListedStep(of(ONE, lengths=((2, 3000), (2, 90))), Lists(300, counts=True, empty=True), physical=True),
    "rows, pages of 61": ListedStep(of(PACKED, lengths=((3, 900), (1, 70)), page_size=61), Lists(576), physical=True),
    "table": ListedStep(PACKED, Lists(70, counts=True, wrong=0.05)),
    "blocks": ListedStep(of(PACKED, sinks=True), Lists(3, heads=1, block_q=2, block_kv=64)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str) -> None:
    """Rows that do not count, and memory that nobody wrote, are NaN."""
    check(CASES[name], attend(CASES[name], kernel="attn_fwd_mma"))
    assert rawattn.violations() == ()


@pytest.mark.parametrize("name", STEPS)
def test_lists(name: str) -> None:
    step = STEPS[name]
    step.check(*map(to_numpy, attend_listed(step, kernel="attn_fwd_mma")), 2e-2)
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["keys"] * (step.lists.wrong > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_steps_by_attn_mla(name: str) -> None:
    """A Hopper GPU chooses it."""
    check(CASES[name], attend(CASES[name]))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in STEPS if name != "blocks"])
def test_lists_by_attn_mla(name: str) -> None:
    step = STEPS[name]
    step.check(*map(to_numpy, attend_listed(step)), 2e-2)
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["keys"] * (step.lists.wrong > 0)


@pytest.mark.gpu
def test_even_splits_by_attn_mla() -> None:
    for case in (ONE, PACKED):
        check(case, attend(case, kernel="attn_mla", split="even"))


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


CLUSTERED = ("128 heads", "65 heads", "pages of 1", "dense", "packed, sinks", "window", "begins", "many")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLUSTERED)
def test_clusters_have_the_bits_of_blocks_apart_in_steps(name: str) -> None:
    """Again and again, and however keys are cut."""
    for options in ({}, {"split": "even"}, {"split": 512}):
        given: dict[str, Any] = {"kernel": "attn_mla", **options}
        wanted = attend(CASES[name], config=AttnMlaConfig(2), **given)
        for _ in range(5):
            assert equal(attend(CASES[name], config=AttnMlaConfig(2, cluster=True), **given), wanted), options


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in STEPS if name != "blocks"])
def test_clusters_have_the_bits_of_blocks_apart_over_lists(name: str) -> None:
    wanted = attend_listed(STEPS[name], kernel="attn_mla", config=AttnMlaConfig(2))
    for _ in range(5):
        assert equal(attend_listed(STEPS[name], kernel="attn_mla", config=AttnMlaConfig(2, cluster=True)), wanted)
    rawattn.violations()


@pytest.mark.parametrize("kernel", ["attn_fwd_mma", pytest.param("attn_mla", marks=pytest.mark.gpu)])
def test_bits(kernel: str) -> None:
    """Of any pages, of a sequence alone, of q as a pair, and again and again."""
    options: dict[str, Any] = {"invariant": True, "kernel": kernel}
    wanted = attend(ONE, **options)
    assert all(equal(attend(of(ONE, page_size=n), **options), wanted) for n in (1, 16, 64, 64, 64))
    assert equal(attend(of(ONE, form="dense", page_size=5001), **options), wanted)
    q, cache, step = _move(ONE.rows(128, 576, 1), "torch", "cuda"), ONE.cache("torch"), ONE.step("torch")
    pair = q[..., :512].contiguous(), q[..., 512:].contiguous()
    assert equal(rawattn.attention_kvcache(pair, cache, step, return_lse=True, **options), wanted)
    for i in range(len(LENGTHS)):
        alone = rawattn.Step(step.kv_lens[i : i + 1], step.page_table[i : i + 1])
        found = rawattn.attention_kvcache(q[i : i + 1], cache, alone, return_lse=True, **options)
        assert equal(found, [x[i : i + 1] for x in wanted]), i


def test_a_graph_replays_other_lengths() -> None:
    whole = of(ONE, lengths=((1, 5000),) * len(LENGTHS))
    q, cache, table = _move(ONE.rows(128, 576, 1), "torch", "cuda"), whole.cache("torch"), whole.step("torch").page_table
    lengths = [torch.tensor([kv for _, kv in each], dtype=torch.int32, device="cuda") for each in (LENGTHS, LENGTHS[::-1])]
    wanted = [rawattn.attention_kvcache(q, cache, rawattn.Step(n, table), return_lse=True) for n in lengths]
    live = lengths[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rawattn.attention_kvcache(q, cache, rawattn.Step(live, table), return_lse=True)
    for n in (0, 1, 0):
        live.copy_(lengths[n])
        graph.replay()
        assert equal(found, wanted[n])


def test_hostile_pages_are_said() -> None:
    q, cache, step = _move(ONE.rows(128, 576, 1), "torch", "cuda"), ONE.cache("torch"), ONE.step("torch")
    wanted, table = attend(ONE), step.page_table.clone()
    for entry in (-1, 2147480000, cache.pages):
        table[0, 0] = entry
        found = rawattn.attention_kvcache(q, cache, rawattn.Step(step.kv_lens, table), return_lse=True)
        assert "page" in str(rawattn.violations())
        assert equal([x[1:] for x in found], [x[1:] for x in wanted])


def test_what_append_wrote_is_read() -> None:
    """A row that append stored is what attention to it alone gives, by the format's precision."""
    rows = torch.randn(5, 1, 576, device="cuda", dtype=torch.bfloat16)
    cache = rawattn.KVCache.records(torch.full((2, 64, 656), 255, dtype=torch.uint8, device="cuda"))
    lens = torch.tensor([5], dtype=torch.int32, device="cuda")
    step = rawattn.Step(lens, torch.tensor([[1]], dtype=torch.int32, device="cuda"), torch.tensor([0, 5], device="cuda").int())
    rawattn.append(cache, step, rows, None)
    step = rawattn.Step(None, None, keys=rawattn.TopK(torch.arange(64, 69, device="cuda").int()[:, None], physical=True))
    o = rawattn.attention_kvcache(torch.zeros(5, 1, 16, 576, device="cuda", dtype=torch.bfloat16), cache, step)
    error = (o[:, 0].float() - rows[:, :, :512].float()).abs()
    assert float((error / (rows[:, :, :512].float().abs() + 0.1)).max()) < 0.08


@pytest.mark.parametrize("topk", [1, 64, 2048])
def test_flash_mla(topk: int) -> None:
    """Its adapter with indices, as sparse decoding calls it, on pages that lie apart, with sinks."""
    rng = np.random.default_rng(0)
    stored = quantize(FP8_DS_MLA, rng.standard_normal((40, 64, 576)).astype(np.float32) / 10)
    pages = torch.empty(40, 65, 656, dtype=torch.uint8, device="cuda")[:, :64]
    pages[:] = torch.from_numpy(stored).cuda()
    latent = torch.from_numpy(dequantize(FP8_DS_MLA, stored)).cuda().flatten(0, 1)
    q = torch.randn(4, 2, 128, 576, device="cuda", dtype=torch.bfloat16)
    indices, sink = torch.randint(-1, 2560, (4, 2, topk), device="cuda").int(), torch.randn(128, device="cuda")
    more = {"indices": indices, "attn_sink": sink, "is_fp8_kvcache": True}
    given = pages[:, :, None].view(torch.float8_e4m3fn)
    out, lse = flash_mla.flash_mla_with_kvcache(q, given, None, None, 512, flash_mla.get_mla_metadata()[0], **more)
    k = latent[indices.clamp(min=0).long()]
    logits = torch.einsum("bqhd,bqkd->bqhk", q.double(), k) * 576**-0.5
    logits = logits.masked_fill((indices < 0)[:, :, None], -torch.inf)
    wanted = logits.logsumexp(-1)
    o = torch.einsum("bqhk,bqkd->bqhd", (logits - wanted[..., None]).exp().nan_to_num(0), k[..., :512])
    o = o * torch.sigmoid(wanted - sink.double())[..., None]
    assert torch.allclose(out.double(), o, atol=3e-3, rtol=2e-2)
    assert torch.allclose(lse.double(), wanted.masked_fill(wanted == -torch.inf, torch.inf).transpose(1, 2), atol=2e-3)

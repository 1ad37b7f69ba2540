"""attn_mla on a GPU against its definition, and its bits: alone, in a batch, for any pages, in graphs, and again and again."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn.kernel.attn_mla import AttnMlaConfig
from rawattn.testing import _move
from tests.caches import Cached
from tests.kernel.test_kvcache import attend, check
from tests.key_lists import ListedStep, Lists, to_numpy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
LENGTHS = ((1, 700), (1, 0), (1, 65), (1, 1), (1, 5000), (1, 64), (1, 300))
LATENT: dict[str, Any] = {"kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "pool": "shared", "whole": True, "device": "cuda"}
ONE = Cached(LENGTHS, False, page_size=64, dtype="bf16", heads=128, **LATENT)
of = dataclasses.replace
DRAFT = of(ONE, lengths=tuple((4, kv) for _, kv in LENGTHS), heads=16)
PACKED = of(DRAFT, ragged=True, lengths=((4, 700), (1, 0), (0, 65), (3, 1), (2, 5000), (9, 64), (256, 300)))
BEGINS = (643, 7, 64, 0, 4097, 64, 128)
CASES = {
    "128 heads": ONE,
    **{f"{n} heads": of(ONE, heads=n) for n in (1, 3, 9, 16, 63, 64, 65, 126)},
    **{f"pages of {n}": of(ONE, page_size=n) for n in (8, 16, 32, 128, 256)},
    "dense": of(ONE, form="dense", page_size=5001),
    "end to end": of(DRAFT, form="indptr", layout="HND", page_size=16),
    "draft": DRAFT,
    "packed": PACKED,
    "packed, pages of 16": of(PACKED, page_size=16, causal=False),
    "packed, sinks": of(PACKED, sinks=True, softcap=5.0, dtype="fp16"),
    "full": of(DRAFT, causal=False),
    "window": of(DRAFT, window=(500, 0)),
    "begins": of(DRAFT, begins=BEGINS, whole=False),
    "begins, pages of 16": of(DRAFT, begins=BEGINS, whole=False, page_size=16),
    "causal for some": of(DRAFT, causal=(0, 1, 1, 0, 1, 0, 7)),
    "many": of(ONE, lengths=tuple((1, 37 * i % 9000) for i in range(150)), page_size=128),
    "long": of(ONE, lengths=((1, 33000), (1, 9000)), page_size=256),
    "long, few rows": of(ONE, lengths=((1, 33000), (1, 9000)), heads=16),
}


@pytest.mark.parametrize("split", ["auto", "even"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name: str, split: str) -> None:
    """Rows that do not count, and memory that nobody wrote, are NaN."""
    check(CASES[name], attend(CASES[name], split=split, kernel="attn_mla"))
    assert rawattn.violations() == ()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_step(data: Any) -> None:
    """In few kinds, since each is a kernel of its own."""
    lengths = st.tuples(st.integers(0, 4), st.sampled_from((0, 1, 63, 64, 65, 2047, 2048, 2049, 4097)) | st.integers(0, 5000))
    case = of(
        CASES[data.draw(st.sampled_from(("packed", "packed, sinks", "packed, pages of 16")))],
        lengths=tuple(data.draw(st.lists(lengths, min_size=1, max_size=6))),
        seed=data.draw(st.integers(0, 2**32 - 1)), heads=data.draw(st.sampled_from((1, 3, 8, 16, 63, 64, 65, 126, 128))),
    )  # fmt: skip
    check(case, attend(case, split=data.draw(st.sampled_from(("auto", "even", 512))), kernel="attn_mla"))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_small_pages_have_the_bits_of_larger_ones(page_size: int, heads: int) -> None:
    case = of(ONE, heads=heads, page_size=page_size)
    found = attend(case, kernel="attn_mla")
    check(case, found)
    assert equal(found, attend(of(case, page_size=64))) and rawattn.violations() == ()
    begins = of(DRAFT, heads=heads, begins=BEGINS, whole=False, page_size=page_size)
    check(begins, attend(begins, kernel="attn_mla"))


FIVE = of(PACKED, lengths=((3, 700), (1, 0), (0, 65), (2, 5000), (9, 64)), page_size=64)
LISTED = {
    "few": ListedStep(of(ONE, lengths=((1, 70), (1, 1))), Lists(65)),
    "128 heads": ListedStep(of(ONE, lengths=((1, 700), (1, 5000))), Lists(2048, counts=True)),
    "packed, causal": ListedStep(FIVE, Lists(576, counts=True, empty=True, same=0.5)),
    "rows, pages of 69": ListedStep(of(FIVE, page_size=69, heads=128), Lists(576), physical=True),
    "dense, fp16": ListedStep(
        of(ONE, lengths=((1, 900), (1, 300)), form="dense", page_size=901, dtype="fp16", sinks=True), Lists(65)
    ),
    "window, pages of 1": ListedStep(of(FIVE, window=(500, 0), form="indptr", page_size=1), Lists(300)),
    "begins": ListedStep(of(FIVE, begins=(643, 0, 64, 4097, 9), causal=(0, 1, 1, 0, 1)), Lists(300)),
}


def attend_listed(step: ListedStep, **options: Any) -> Any:
    case, sinks = step.case, step.case.sink_logits()
    options |= {"window": case.window, "sinks": None if sinks is None else _move(sinks, "torch", "cuda"), "return_lse": True}
    q, made = _move(case.rows(case.heads, 576, 1), "torch", "cuda"), step.step(lambda x: _move(x, "torch", "cuda"), "torch")
    return rawattn.attention_kvcache(q, step.cache("torch"), made, kernel="attn_mla", **options)


@pytest.mark.parametrize("name", LISTED)
def test_lists(name: str) -> None:
    """Rows that no list names are NaN. The same bits again and again, and by blocks alone and in pairs."""
    found = attend_listed(LISTED[name])
    LISTED[name].check(*map(to_numpy, found), 2e-2)
    assert all(equal(attend_listed(LISTED[name]), found) for _ in range(20))
    assert all(equal(attend_listed(LISTED[name], config=AttnMlaConfig(n)), found) for n in (1, 2))
    LISTED[name].check(*map(to_numpy, attend_listed(LISTED[name], split="even")), 2e-2)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("heads", [16, 128])
def test_lists_of_all_keys_have_the_bits_of_the_plain_step(heads: int) -> None:
    case = of(ONE, lengths=((1, 5000), (1, 5000)), heads=heads)
    q, every = (
        _move(case.rows(heads, 576, 1), "torch", "cuda"),
        torch.arange(5000, dtype=torch.int32, device="cuda").expand(2, 5000),
    )
    step = case.step("torch", keys=rawattn.TopK(every))
    assert equal(rawattn.attention_kvcache(q, case.cache("torch"), step, kernel="attn_mla", return_lse=True), attend(case))


def test_wrong_numbers_are_said() -> None:
    step = ListedStep(FIVE, Lists(576, wrong=0.05))
    step.check(*map(to_numpy, attend_listed(step)), 2e-2)
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["keys"]


def test_sparse_prefill() -> None:
    """Each of 1,000 queries has its own 2,048 of 20,000 keys; some are compared."""
    latent = torch.randn(1, 20000, 1, 576, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(1, 1000, 128, 576, dtype=torch.bfloat16, device="cuda")
    numbers = torch.randint(-1, 20000, (1000, 2048), dtype=torch.int32, device="cuda")
    cache, step = rawattn.KVCache(latent, latent[..., :512]), rawattn.Step(None, None, keys=rawattn.TopK(numbers, physical=True))
    o = rawattn.attention_kvcache(q, cache, step, kernel="attn_mla")
    for row in range(0, 1000, 111):
        k = latent[:, numbers[row][numbers[row] >= 0].long()]
        wanted = rawattn.reference.attention(q[:, row : row + 1], k, k[..., :512])
        assert torch.allclose(o[:, row : row + 1].double(), wanted, atol=2e-2)


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("case", [ONE, DRAFT, CASES["many"]], ids=["128 heads", "draft", "many"])
def test_bits_follow_from_the_sequence(case: Cached) -> None:
    wanted = attend(case)
    for n in (8, 16, 256):
        assert equal(attend(of(case, page_size=n)), wanted), n
    assert equal(attend(of(case, form="dense", page_size=9001)), wanted)
    assert all(equal(attend(case), wanted) for _ in range(20))
    for config in (AttnMlaConfig(1), AttnMlaConfig(2), AttnMlaConfig(2, 9)):
        assert equal(attend(case, config=config, kernel="attn_mla"), wanted), config
    q, cache, step = (_move(case.rows(case.heads, 576, 1), "torch", "cuda"), case.cache("torch"), case.step("torch"))
    for i in range(min(8, len(case.lengths))):
        alone = rawattn.Step(step.kv_lens[i : i + 1], step.page_table[i : i + 1])
        found = rawattn.attention_kvcache(q[i : i + 1], cache, alone, return_lse=True)
        assert equal(found, (wanted[0][i : i + 1], wanted[1][i : i + 1])), i


@pytest.mark.parametrize("name", ["few", "128 heads", "65 heads", "dense", "draft", "packed", "window", "begins", "many", "long"])
def test_clusters_have_the_bits_of_blocks_apart(name: str) -> None:
    """Again and again, and however keys are cut."""
    case = CASES.get(name, of(ONE, lengths=ONE.lengths[:3]))
    case = of(case, heads=40) if name in ("draft", "packed", "window", "begins") else case
    for options in ({}, {"split": "even"}, {"split": 512}):
        wanted = attend(case, config=AttnMlaConfig(2), kernel="attn_mla", **options)
        for _ in range(5):
            assert equal(attend(case, config=AttnMlaConfig(2, cluster=True), kernel="attn_mla", **options), wanted), options


def test_a_graph_replays_other_lengths() -> None:
    case, other = of(ONE, page_size=16), of(ONE, page_size=16, lengths=LENGTHS[::-1])
    whole = of(case, lengths=((1, 5000),) * len(LENGTHS))
    q, cache, table = _move(case.rows(128, 576, 1), "torch", "cuda"), whole.cache("torch"), whole.step("torch").page_table
    lengths = [torch.tensor([kv for _, kv in each.lengths], dtype=torch.int32, device="cuda") for each in (case, other)]
    wanted = [rawattn.attention_kvcache(q, cache, rawattn.Step(n, table), return_lse=True) for n in lengths]
    live = lengths[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rawattn.attention_kvcache(q, cache, rawattn.Step(live, table), return_lse=True)
    for n in (0, 1, 0, 1):
        live.copy_(lengths[n])
        graph.replay()
        assert equal(found, wanted[n])


def test_pairs_of_q() -> None:
    q, cache, step = (_move(ONE.rows(128, 576, 1), "torch", "cuda"), ONE.cache("torch"), ONE.step("torch"))
    parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
    assert equal(rawattn.attention_kvcache(parts, cache, step, return_lse=True), attend(ONE))


def test_hostile_pages_are_said() -> None:
    q, cache, step = (_move(ONE.rows(128, 576, 1), "torch", "cuda"), ONE.cache("torch"), ONE.step("torch"))
    wanted, table = attend(ONE), step.page_table.clone()
    for entry in (-1, 2147480000, cache.pages):
        table[0, 0] = entry
        found = rawattn.attention_kvcache(q, cache, rawattn.Step(step.kv_lens, table), return_lse=True)
        assert "page" in str(rawattn.violations())
        assert equal([x[1:] for x in found], [x[1:] for x in wanted])
    rawattn.violations()


def test_keys_that_are_masked_may_be_anything() -> None:
    """Infinite keys behind a causal query's own do not reach it, nor does what a window leaves out by whole tiles."""
    case = of(DRAFT, window=(500, 0), lengths=((1, 3000), (1, 1000)))
    cache, step = case.cache("torch"), case.step("torch")
    for i, (_, kv) in enumerate(case.lengths):
        cache.k[step.page_table[i, : (kv - 504) // 64].long()] = np.nan
    check(case, attend(case, cache=cache))

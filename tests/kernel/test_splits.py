"""Few queries over many keys: the keys are split over blocks, and combine.cu folds what they find."""

from __future__ import annotations

from typing import Any

import pytest

import rawattn
from rawattn.driver import context
from rawattn.driver.device import TYPICAL
from rawattn.kernel import few_rows, tiling
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.runtime.select import select
from rawattn.testing import Case
from tests.calls import check, poisoned_memory

pytestmark = pytest.mark.gpu("any")

KEYS = tiling.SPLIT_KEYS
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": "fp16"},
    "causal": {"causal": True},
    "window": {"window": (700, 0)},  # most splits keep no key
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True, "causal": True},
    "unequal heads": {"head_dim": 80, "head_dim_v": 72},
    "negative scale": {"scale": -0.1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_len, heads, kv_heads", [(1, 8, 2), (1, 3, 3), (7, 8, 1), (64, 2, 2)])
@pytest.mark.parametrize("kv_len", [2 * KEYS - 1, 2 * KEYS, 2 * KEYS + 1, 5000])
def test_against_the_reference(kind: str, q_len: int, heads: int, kv_heads: int, kv_len: int) -> None:
    sizes = {"batch": 2, "q_len": q_len, "kv_len": kv_len, "heads": heads, "kv_heads": kv_heads}
    check(Case(**{**sizes, "head_dim": 64, "head_dim_v": 64, **KINDS[kind]}), kernel=ATTN_FWD_MMA)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [AttnFwdConfig(64, 64, 2, 1, True, 5), AttnFwdConfig(128, 64, 2, 1, True), AttnFwdConfig(192, 64, 2, 1, kv_splits=16)],
)
@pytest.mark.parametrize("q_len, kv_len", [(1, 5000), (16, 4097), (70, 900), (300, 255)])
def test_attn_fwd_against_the_reference(kind: str, config: AttnFwdConfig, q_len: int, kv_len: int) -> None:
    """With heads that share tiles, and without."""
    sizes = {"batch": 2, "q_len": q_len, "kv_len": kv_len, "heads": 8, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64}
    check(Case(**{**sizes, **KINDS[kind]}), kernel=ATTN_FWD, config=config)


CHOSEN = [  # batch, queries, keys, heads, key heads, head_dim: rows of a tile that an H200 gets
    ((1, 48, 16384, 32, 8, 128), 192),  # heads share tiles
    ((1, 192, 4096, 16, 16, 64), 192),
    ((1, 192, 4096, 24, 8, 128), 192),
    ((1, 48, 8192, 6, 2, 64), 64),  # groups that divide no tile
    ((1, 48, 8192, 6, 2, 128), 64),
    ((1, 16, 8192, 28, 4, 64), 64),
    ((1, 24, 8192, 40, 8, 128), 64),
    ((64, 96, 96, 16, 16, 128), 128),
    ((64, 100, 77, 16, 4, 96), 128),
    ((32, 250, 250, 16, 16, 128), 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, tile_q", CHOSEN, ids=str)
@pytest.mark.parametrize("more", [{}, {"softcap": 30.0}, {"sinks": True}], ids=str)
def test_attn_fwd_in_what_is_chosen(sizes: tuple[int, ...], tile_q: int, more: dict[str, Any]) -> None:
    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
    case = Case(**dict(zip(names, sizes, strict=True)), head_dim_v=sizes[-1], causal=True, **more)
    config = select(case.op, TYPICAL["sm_90a"], "attn_fwd").config
    assert config.tile_q == tile_q
    check(case, kernel=ATTN_FWD, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": (200, 9)}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("config", [AttnFwdConfig(192, 128, 5, 2), AttnFwdConfig(256, 64, 8, 2, kv_splits=0)], ids=str)
def test_attn_fwd_in_uneven_waves(config: AttnFwdConfig, more: dict[str, Any]) -> None:
    check(Case(batch=2, q_len=700, kv_len=3000, heads=2, kv_heads=1, **more), kernel=ATTN_FWD, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_len, kv_len, heads", [(600, 8200, 32), (1000, 8200, 20)])
def test_attn_fwd_in_uneven_waves_as_chosen(q_len: int, kv_len: int, heads: int, head_dim: int, causal: bool) -> None:
    """Whole tiles of 192 rows, or splits, whichever ends first."""
    case = Case("bf16", 1, q_len, kv_len, heads, heads, head_dim, head_dim, causal=causal)
    assert few_rows.are_uneven(case.op)
    check(case, kernel=ATTN_FWD, config=select(case.op, TYPICAL["sm_90a"], "attn_fwd").config)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attn_fwd_in_as_many_splits_as_sizes_suggest(head_dim: int) -> None:
    """Repeats are equal, and a graph replays."""
    import torch

    case = Case(batch=2, q_len=33, kv_len=9000, heads=32, kv_heads=8, head_dim=head_dim, head_dim_v=head_dim, causal=True)
    config = AttnFwdConfig(64, 64, 2, 1, True, 0)
    check(case, kernel=ATTN_FWD, config=config)
    q, k, v = case.inputs("torch", "cuda")
    call = lambda: rawattn.attention(q, k, v, causal=True, kernel="attn_fwd", config=config)  # noqa: E731
    wanted = call()
    assert all((call() == wanted).all() for _ in range(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    q.neg_()
    wanted = call()
    graph.replay()
    assert (o == wanted).all()


@pytest.mark.parametrize(("batch", "q_len"), [(0, 5), (2, 0)])
def test_no_row(batch: int, q_len: int) -> None:
    """Over keys that would be split."""
    torch = pytest.importorskip("torch")
    q, k = (torch.empty(batch, n, heads, 64, dtype=torch.bfloat16, device="cuda") for n, heads in ((q_len, 8), (5000, 2)))
    o, lse = rawattn.attention(q, k, k, return_lse=True)
    assert o.shape == q.shape and lse.shape == (batch, 8, q_len)
    assert [x.shape for x in rawattn.attention_backward(q, q, k, k, o, lse)] == [q.shape, k.shape, k.shape]


def test_the_library_splits() -> None:
    """At (1, 1, 8192) with grouped heads there are two launches; where keys are few there is one."""
    device = context.device(0)
    for kv_len, launches in ((8192, 2), (2 * KEYS - 1, 1)):
        op = Case(q_len=1, kv_len=kv_len, heads=32, kv_heads=8, head_dim=128, head_dim_v=128).op
        selection = select(op, device)
        assert len(selection.kernel.lower(op, selection.config, device).launches) == launches


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    case = Case(batch=9, q_len=1, kv_len=3000, heads=8, kv_heads=2, head_dim=128, head_dim_v=128, causal=True)
    q, k, v = case.inputs("torch", "cuda")
    with poisoned_memory():
        together, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
        for i in range(case.batch):
            o, alone = rawattn.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=True, return_lse=True)
            assert (o == together[i : i + 1]).all() and (alone == lse[i : i + 1]).all()


def test_repeats_are_equal_and_graphs_replay() -> None:
    import torch

    case = Case(batch=2, q_len=1, kv_len=4096, heads=32, kv_heads=8, head_dim=128, head_dim_v=128)
    q, k, v = case.inputs("torch", "cuda")
    wanted = rawattn.attention(q, k, v)
    assert all((rawattn.attention(q, k, v) == wanted).all() for _ in range(50))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rawattn.attention(q, k, v)
    for seed in (1, 2):
        other = Case(**{**case.__dict__, "seed": seed}).inputs("torch", "cuda")
        for to, new in zip((q, k, v), other, strict=True):
            to.copy_(new)
        graph.replay()
        assert (o == rawattn.attention(*other)).all()

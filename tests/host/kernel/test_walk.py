"""Kernels over lists of key tiles with holes, on the CPU: hand-written masks against their definition; masks whose tiles are an
interval, which must have the same bits either way; and what NVRTC makes of lists."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest

from perf.lib import sets
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.errors import UnsupportedError
from rawattn.kernel import attn_fwd
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.base import MOST_TRIED, without_spills
from rawattn.runtime.select import config_set, select
from rawattn.variant.element import BF16
from rawattn.variant.mask import And, Causal, Full, Window
from tests import lists, traced, zoo
from tests.host.kernel import test_forward as emulated
from tests.host.kernel.test_forward import Array, Case
from tests.operations import forward
from tests.options import Fading, HeadWindow


def kept(case: Case, mask: Any, arrays: tuple[Array, ...], batch: int, head: int) -> Array:
    """The pairs that a mask keeps in a sequence's head."""
    q_at, kv_at = case.offsets or (0, 0)
    q, kv = np.arange(case.q_len)[:, None] + q_at, np.arange(case.kv_len)[None] + kv_at
    found = mask.keep(arrays, batch, head, q, kv)
    if case.lens is not None:
        found = found & (np.arange(case.q_len)[:, None] < case.lens[0][batch]) & (np.arange(case.kv_len) < case.lens[1][batch])
    return found


def check(case: Case, name: str, folder: pathlib.Path) -> None:
    arrays = lists.arrays(name, 2, case.heads, max(case.q_len, case.kv_len) + max(case.offsets or (0,)))
    mask = lists.on_host(name, arrays)
    case = dataclasses.replace(case, mask=mask)
    o, lse = emulated.run(case, folder)
    q, k, v = (x.astype(np.float64) for x in emulated.arrays(case))
    for batch in range(2):
        for head in range(case.heads):
            kv_head = head // (case.heads // case.kv_heads)
            dots = case.scale * q[batch, :, head] @ k[batch, :, kv_head].T
            i, j = np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None]
            s = case.op.spec.placed_score.logit(np, dots, batch, head, i, j)
            with np.errstate(all="ignore"):
                s = np.where(kept(case, mask, arrays, batch, head), s, -np.inf)
                top = np.maximum(s.max(1, keepdims=True), -1e300)
                p = np.exp(s - top)
                total = p.sum(1, keepdims=True)
                p = np.where(total > 0, p / total, 0) * emulated.dropped(case, batch, head, i, j)
                wanted = p @ v[batch, :, kv_head]
                np.testing.assert_allclose(lse[batch, head], (top + np.log(total))[:, 0], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(o[batch, :, head], wanted, rtol=1.2e-2, atol=1.2e-2)


KERNELS = ("attn_fwd", "attn_fwd_mma", "attn_fwd_simt")
DOCUMENTS, TABLE, BOARD = lists.MASKS
LONG = {"q_len": 130, "kv_len": 260, "heads": 1}
CASES = [
    *((Case(name, **LONG), mask) for name in KERNELS for mask in lists.MASKS),
    *((Case(name, q_len=40, kv_len=100, heads=4, kv_heads=4, offsets=(90, 40)), TABLE) for name in KERNELS),
    *((Case(name, q_len=70, kv_len=97, heads=1, offsets=(3, 50)), DOCUMENTS) for name in KERNELS),
    *((Case(name, q_len=70, kv_len=130, kv_heads=2, lens=((40, 0), (130, 13))), DOCUMENTS) for name in KERNELS),
    *(
        (Case(name, q_len=40, kv_len=100, kv_heads=2, lens=((40, 35), (33, 100)), score=emulated.ALIBI), BOARD)
        for name in KERNELS
    ),
    *((Case(name, q_len=40, kv_len=200, heads=1, split_keys=64), mask) for name in KERNELS for mask in (DOCUMENTS, BOARD)),
    *((Case(name, q_len=40, kv_len=100, offsets=(7, 30), dropout=0.3), DOCUMENTS) for name in KERNELS),
    (Case("attn_fwd_mma", q_len=5, kv_len=300, heads=4, dropout=0.3), TABLE),
    (Case("attn_fwd_mma", q_len=5, kv_len=300, heads=4), TABLE),
    (Case("attn_fwd_mma", q_len=33, kv_len=200, heads=3, score=emulated.ALIBI), BOARD),
    (Case("attn_fwd_mma", q_len=3, kv_len=300, heads=4, split_keys=96, offsets=(60, 5)), TABLE),
]


@pytest.mark.parametrize(("case", "mask"), CASES, ids=lambda x: emulated.name_of(x) if isinstance(x, Case) else x)
def test_list(case: Case, mask: str, tmp_path: pathlib.Path) -> None:
    check(case, mask, tmp_path)


INTERVALS = [Full(), Causal(), Window(33, 5, "top_left"), And(Causal(), Window(40))]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mask", INTERVALS, ids=str)
def test_an_interval_as_a_list_has_the_same_bits(mask: Any, name: str, tmp_path: pathlib.Path) -> None:
    case = Case(name, q_len=150, kv_len=130, heads=1, mask=mask)
    results = []
    for way in (mask, lists.Listed(mask)):
        (tmp_path / type(way).__name__).mkdir()
        results.append(emulated.run(dataclasses.replace(case, mask=way), tmp_path / type(way).__name__))
    for found, wanted in zip(*results, strict=True):
        assert np.array_equal(found, wanted)


LISTS = (lists.BlockTable(0, 0, 1, 1, 1), lists.Listed(Causal()))
CHOSEN = [
    ("attn_fwd", "sm_90a", 128), *(pytest.param("attn_fwd", "sm_90a", size, marks=pytest.mark.slow) for size in (64, 256)),
    ("attn_fwd_mma", "sm_80", 128), ("attn_fwd_simt", "sm_75", 64),
]  # fmt: skip
SPILLED = {("attn_fwd_mma", lists.BlockTable, "13.0"): 16}  # bytes, the least of those that are tried; later ones spill none


@pytest.mark.parametrize(("kernel", "arch", "head_dim"), CHOSEN)
def test_a_configuration_without_spills_is_chosen(kernel: str, arch: str, head_dim: int) -> None:
    for mask in LISTS:
        op = forward(BF16, 2, 4096, 4096, 16, 16, head_dim, head_dim, mask=mask)
        selection = select(op, TYPICAL[arch], kernel)
        (launch,) = selection.kernel.lower(op, selection.config, TYPICAL[arch]).launches
        binary = compiler.compile(launch.source)
        least = SPILLED.get((kernel, type(mask), binary.nvrtc), 0)
        assert binary.spill_bytes <= least and not binary.advisories, (mask, selection.config, binary)


def test_candidates_of_functions() -> None:
    """Lists have up to three warpgroups, but two where queries keep keys by blocks; one ring for each tile."""
    device = TYPICAL["sm_90a"]
    for name, longest in (("documents", 192), ("causal", 192), ("blocks", 128)):
        (case,) = sets.of_functions((name,), (4096,), (128,))
        found = ATTN_FWD.candidates(sets.operation(case), device)
        assert max(c.tile_q for c in found) == longest and {c.tile_kv for c in found} >= {64, 128}
        assert len({(c.tile_q, c.tile_kv) for c in found}) == len(found)
    (case,) = sets.of_functions(("alibi",), (4096,), (64,))
    assert max(c.tile_q for c in ATTN_FWD.candidates(sets.operation(case), device)) == 256
    assert ATTN_FWD.is_tried(sets.operation(case)) and not ATTN_FWD.is_tried(sets.operation(sets.dense(1, 64, 1, 64, True)))
    foreign = (
        {"score": Fading(0.1)},
        {"score": Fading(0.1), "q_offset": 3},
        {"mask": HeadWindow(5, 2)},
        {"mask": And(Causal(), HeadWindow(5, 2))},
    )
    assert all(ATTN_FWD.is_tried(forward(BF16, 1, 64, 64, 1, 1, 64, 64, **each)) for each in foreign)


def test_the_next_configuration_is_tried() -> None:
    """The next one is chosen if the cheapest spills, but for masks whose registers are known; if all spill, the one that spills
    least."""
    op, device = forward(BF16, 2, 4096, 4096, 16, 16, 64, 64, mask=LISTS[0]), TYPICAL["sm_90a"]
    plain = dataclasses.replace(op, spec=dataclasses.replace(op.spec, mask=Causal()))
    large, small = attn_fwd.AttnFwdConfig(256, 64, 4, 2), attn_fwd.AttnFwdConfig(128, 128, 2, 1)
    for asked, configs, best in ((op, [large, small], small), (plain, [large, small], large), (op, [large], large)):
        config_set.cache_clear()
        with (
            mock.patch.object(ATTN_FWD, "candidates", lambda op, device, configs=configs: configs),
            mock.patch.object(ATTN_FWD, "cost", lambda config, op, device: config is small),
        ):
            assert config_set(ATTN_FWD, (asked,), device)[0].config == best
    config_set.cache_clear()


def tried(shapes: list[list[tuple[float, int]]], small: int = 0, known: bool = True) -> tuple[list[int], list[list[int]]]:
    """The configurations that are chosen among some with these costs and spills, and those of each round of compilations.
    Each has a pass whose spills do not count."""
    rounds: list[list[int]] = []

    def compile_all(sources: Any) -> dict[Any, Any]:
        rounds.append([source.key for source in sources if source.key in costs])
        spills = {key: costs[key][1] for key in rounds[-1]} | {"pass": 500}
        return {key: mock.Mock(spill_bytes=spill) for key, spill in spills.items()} if known else {}

    def launch(key: Any) -> Any:
        return mock.Mock(source=mock.Mock(key=key))

    costs = dict(enumerate(each for shape in shapes for each in shape))
    kernel: Any = mock.Mock(cost=lambda config, op, device: costs[config][0], small_spill=lambda op: small)
    kernel.counts_spills = lambda launch: launch.source.key != "pass"
    kernel.lower = lambda op, config, device: mock.Mock(launches=[launch(config), launch("pass")])
    numbers = iter(costs)
    asked = [(i, [next(numbers) for _ in shape]) for i, shape in enumerate(shapes)]
    with mock.patch.object(compiler, "compile_all", compile_all):
        return without_spills(kernel, asked, TYPICAL["sm_90a"]), [each for each in rounds if each]


def test_two_rounds_of_compilations() -> None:
    """One configuration of each shape, and where it spills those after it, all at once; no more where it does not."""
    many = [(10.0 + i, 99) for i in range(9)]
    assert tried([[(1, 0), (2, 0)], [(3, 0)], []]) == ([0, 2, None], [[0, 2]])
    assert tried([[(1, 64), (2, 8), (3, 0), (3, 0)], [(1, 0), (2, 0)]]) == ([2, 4], [[0, 4], [1, 2, 3]])
    assert tried([many]) == ([0], [[0], list(range(1, MOST_TRIED))])
    assert tried([[(1, 64), (2, 8), (3, 12)]]) == ([1], [[0], [1, 2]])
    assert tried([many, [(1, 0)]], known=False)[0] == [0, 9], "without NVRTC the first"


def test_a_small_spill_costs_less_than_a_small_tile() -> None:
    """As 16 bytes of a table of biases do; but not where another tile is as good."""
    assert tried([[(100, 16), (107, 84), (109, 0)]], small=16) == ([0], [[0]])
    assert tried([[(100, 16), (107, 84), (109, 0)]]) == ([2], [[0], [1, 2]])
    assert tried([[(100, 16), (102, 0), (109, 0)]], small=16) == ([1], [[0], [1, 2]])
    assert tried([[(100, 24), (102, 16), (120, 0)]], small=16) == ([1], [[0], [1, 2]])
    (alibi, documents) = (sets.operation(sets.of_functions((name,), (4096,), (128,))[0]) for name in ("alibi", "documents"))
    assert (ATTN_FWD.small_spill(alibi), ATTN_FWD.small_spill(documents)) == (16, 0)


def test_blocks_of_queries_and_keys_have_the_largest_tile() -> None:
    """A table of them as bits keeps all in registers there, though a cut tile asks for 64 elements."""
    mask, _ = traced.function(zoo.top_blocks(np.random.default_rng(0), 2048, 2048), "mask", (2, 16, 2048, 2048))
    op, config = forward(BF16, 2, 2048, 2048, 16, 16, 128, 128, mask=mask), attn_fwd.AttnFwdConfig(128, 128, 2, 2)
    (launch,) = (each for each in ATTN_FWD.lower(op, config, TYPICAL["sm_90a"]).launches if each.entry == "attn_fwd")
    binary = compiler.compile(launch.source)
    assert mask.by_blocks and not binary.spill_bytes and not binary.advisories


def test_kernels_are_compiled_at_once() -> None:
    """Each once, in threads that wait for each other here; what cannot be compiled is missing."""
    meeting, seen = threading.Barrier(3, timeout=20), []

    def run(source: Any) -> Any:
        seen.append(source.text)
        if source.text == "none":
            raise UnsupportedError("no NVRTC")
        meeting.wait()
        return compiler.Binary(b"", "", "13.5", 0.1, "compiled", source.key)

    sources = [compiler.Source("a.cu", text, (), "sm_90a") for text in ("one", "two", "three", "none")]
    with mock.patch.object(compiler, "_run_nvrtc", run), mock.patch.object(compiler, "_find_folder", lambda: None):
        for _ in range(2):
            found = compiler.compile_all(sources)
            assert {*found} == {source.key for source in sources[:3]}
    assert sorted(seen) == ["none", "none", "one", "three", "two"]

"""This module compares attn_mla.cu, run thread by thread on the CPU, with its definition, and its bits."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, UnsupportedError
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_mla, render
from rawattn.kernel.attn_mla import ATTN_MLA, AttnMlaConfig
from rawattn.operation import AttentionKVCache
from rawattn.operation.kvcache import EVEN
from rawattn.operation.spec import Spec
from rawattn.runtime.select import select
from rawattn.testing import _move
from rawattn.variant.element import BF16, E4M3, FP16
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests import emulator
from tests.caches import Cached
from tests.host.kernel.test_attn_decode_wide import Runner, same

HOPPER = TYPICAL["sm_90a"]
ONE, TWO = AttnMlaConfig(1), AttnMlaConfig(2)
CLUSTER = AttnMlaConfig(2, cluster=True)
LATENT: dict[str, Any] = {"dtype": "bf16", "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "pool": "shared", "whole": True}
SAME = Cached(((1, 70), (1, 200), (1, 0)), page_size=64, heads=16, ragged=False, **LATENT)
RAGGED = dataclasses.replace(SAME, heads=9, ragged=True, lengths=((9, 70), (0, 7), (3, 2), (20, 130)))
of = dataclasses.replace


class MlaRunner(Runner):
    """The same, of this kernel."""

    kernel = "attn_mla"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> MlaRunner:
    return MlaRunner(monkeypatch, tmp_path)


CASES: dict[str, tuple[Any, ...]] = {
    "table": (SAME, ONE, 2),
    "a tile each": (of(SAME, lengths=((1, 3), (1, 64), (1, 7), (1, 1))), ONE, 2),
    "splits, one block": (of(SAME, lengths=((1, 1300), (1, 600))), ONE, 1),
    "splits, cut": (of(SAME, lengths=((1, 1300), (1, 600))), ONE, 3),
    "pages of 8, end to end": (of(SAME, page_size=8, form="indptr", layout="HND", lengths=((1, 75), (1, 128))), ONE, 2),
    "pages of 16": (of(SAME, page_size=16, lengths=((1, 75), (1, 128))), ONE, 2),
    "pages of 32": (of(SAME, page_size=32, lengths=((1, 70), (1, 97))), ONE, 2),
    "pages of 256": (of(SAME, page_size=256, lengths=((1, 70), (1, 300))), ONE, 2),
    "dense": (of(SAME, form="dense", page_size=301, lengths=((1, 70), (1, 300))), ONE, 2),
    "pairs of blocks": (of(SAME, heads=126, lengths=((1, 70), (1, 100)), sinks=True), TWO, 4),
    "ragged": (of(RAGGED, sinks=True, softcap=5.0), TWO, 4),
    "window": (of(SAME, heads=9, lengths=((9, 700), (9, 100)), window=(300, 0)), TWO, 4),
    "full": (of(SAME, causal=False, heads=3), ONE, 1),
    "causal for some": (of(SAME, heads=9, ragged=True, lengths=((9, 700), (9, 100)), causal=(0, 1)), ONE, 4),
    "half precision": (of(SAME, dtype="fp16"), ONE, 4),
    "begins": (of(RAGGED, whole=False, lengths=((9, 70), (3, 200), (1, 5), (2, 130)), begins=(33, 129, 0, 70)), ONE, 3),
    "begins in small pages": (of(RAGGED, page_size=16, whole=False, lengths=((9, 70), (3, 200)), begins=(33, 129)), ONE, 3),
}
FEW = ("table", "a tile each", "splits, cut", "pages of 16", "pairs of blocks", "begins")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in CASES])
def test_public_call(name: str, run: MlaRunner) -> None:
    """torch tensors on the CPU stand for those on a GPU. Rows behind a sequence's end are NaN, and before its first key."""
    run.check(*CASES[name])


@st.composite
def drawn(draw: Any) -> tuple[Any, ...]:
    """Sequences as servers have them, of which every number may be at an edge."""
    heads, ragged = draw(st.sampled_from((1, 3, 8, 16, 63, 64, 65, 126, 128))), draw(st.booleans())
    batch, form = draw(st.integers(1, 3)), draw(st.sampled_from(("table", "dense", "indptr")))
    q_lens = draw(st.lists(st.integers(0 if ragged else 1, 4), min_size=batch, max_size=batch))
    q_lens = q_lens if ragged else q_lens[:1] * batch
    kv_lens = draw(st.lists(st.sampled_from((0, 1, 63, 64, 65, 127, 200)), min_size=batch, max_size=batch))
    some = {
        "page_size": 201 if form == "dense" else draw(st.sampled_from((8, 16, 64, 128))), "causal": draw(st.booleans()),
        "sinks": draw(st.booleans()), "softcap": draw(st.none() | st.just(5.0)), "window": draw(st.none() | st.just((70, 0))),
        "dtype": draw(st.sampled_from(("bf16", "fp16"))), "layout": draw(st.sampled_from(("NHD", "HND"))),
        "seed": draw(st.integers(0, 999)), "lengths": tuple(zip(q_lens, kv_lens, strict=True)),
    }  # fmt: skip
    case = of(SAME, heads=heads, ragged=ragged, form=form, **some)
    return case, draw(st.sampled_from((ONE, TWO))), 2 * draw(st.integers(1, 3)), draw(st.sampled_from(("auto", 64, "even")))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_drawn(run: MlaRunner, given: tuple[Any, ...]) -> None:
    case, config, grid, split = given
    run.check(case, config, grid, split=split)


def test_bits_follow_from_the_sequence(run: MlaRunner) -> None:
    """On any grid, in any order of blocks, alone or in pairs, and for pages of any size."""
    case = of(SAME, heads=40, lengths=((2, 700), (2, 7), (2, 390)))
    wanted = run.check(case, ONE, 1, split=128)
    for grid in (2, 7):
        same(run(case, ONE, grid, split=128), wanted)
    same(run(case, TWO, 4, split=128), wanted)
    same(run(case, ONE, 3, split=128, order=lambda n: range(n)[::-1]), wanted)
    same(run(of(case, page_size=16), ONE, 3, split=128), wanted)
    same(run(of(case, form="dense", page_size=701), TWO, 6, split=128), wanted)


@pytest.mark.slow
def test_bits_do_not_follow_from_the_batch(run: MlaRunner) -> None:
    """Each sequence alone, its last query alone, and heads alone."""
    case = of(SAME, heads=9, lengths=((3, 700), (3, 40)))
    o, lse, _ = run(case, ONE, 4, split=128)
    q, cache, step = (_move(case.rows(9, 576, 1), "torch", "cpu"), case.cache("torch"), case.step("torch"))
    options: dict[str, Any] = {"kernel": "attn_mla", "config": ONE, "return_lse": True, "split": 128}
    for i in range(2):
        alone = rawattn.Step(step.kv_lens[i : i + 1], step.page_table[i : i + 1])
        for n in (3, 1):
            found = rawattn.attention_kvcache(q[i : i + 1, -n:].contiguous(), cache, alone, **options)
            assert found[0].equal(o[i : i + 1, -n:]) and found[1].equal(lse[i : i + 1, :, -n:])
    some = rawattn.attention_kvcache(q[:, :, 4:6], cache, step, **options)
    assert some[0].equal(o[:, :, 4:6]) and some[1].equal(lse[:, 4:6])


def test_even_splits(run: MlaRunner) -> None:
    """They cut works anywhere, and leave one state at each cut: a share may end one work and begin another, or have nothing."""
    for lengths, grid in (((700, 70, 0, 400), 7), ((640, 640), 3), ((1000, 40), 30)):
        run.check(of(SAME, lengths=tuple((1, n) for n in lengths)), ONE, grid, split="even")
    run.check(of(RAGGED, heads=126, lengths=((1, 300), (2, 70), (0, 5))), TWO, 6, split="even")


def test_q_as_a_pair(run: MlaRunner) -> None:
    """The same bits as of one array, wherever the two lie."""
    case = of(RAGGED, lengths=((5, 130), (2, 3)))
    wanted = run.check(case, ONE, 2)
    q, cache, step = (_move(case.rows(9, 576, 1), "torch", "cpu"), case.cache("torch"), case.step("torch"))
    rope = q.new_zeros(*q.shape[:2], 72)[..., 8:]
    rope[:] = q[..., 512:]
    options: dict[str, Any] = {"kernel": "attn_mla", "config": ONE, "return_lse": True}
    same(rawattn.attention_kvcache((q[..., :512], rope), cache, step, **options), wanted)


@pytest.mark.parametrize("late", [3, 37, 69, 130, 170, 290, 350])
def test_a_late_lane_finds_its_phase(late: int, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the warps that find works, load, and multiply by values, and of others beside them; works are short."""
    case = of(SAME, heads=5, lengths=((1, 70), (1, 3), (1, 64), (1, 1), (1, 200)))
    wanted = run(case, ONE, 1)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, ONE, 1), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("late", [5, 69, 130, 170, 290, 350])
def test_a_late_lane_folds(late: int, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage that a split ends with is loaded anew, and the next split ends, while it still stores."""
    case = of(SAME, heads=40, lengths=((1, 450), (1, 3), (1, 200)))
    wanted = run.check(case, ONE, 2, split=64), run.check(case, TWO, 2, split=128)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, ONE, 2, split=64), wanted[0])
    same(run(case, TWO, 2, split=128), wanted[1])


def test_violated_bounds_are_said_and_cut(run: MlaRunner) -> None:
    wanted = run(SAME, ONE, 2)

    def edit(**changes: Any) -> Any:
        return lambda given: [given[name].__setitem__(at, x) for name, (at, x) in changes.items()]

    for changes, said in (
        ({"kv_lens": (0, 1 << 30)}, 1 | 4),
        ({"kv_lens": (0, -5)}, 1),
        ({"page_table": ((0, 0), 2147480000)}, 4),
        ({"page_table": ((0, 0), -1)}, 4),
    ):
        o, lse, word = run(SAME, ONE, 2, edit=edit(**changes))
        assert word & said == word and word
        assert o[1:].equal(wanted[0][1:]) and lse[1:].equal(wanted[1][1:])


def op_of(q_len: int = 1, heads: int = 128, page: int = 64, **changes: Any) -> AttentionKVCache:
    names = {"mask": Causal(), "score": Scale(), "scale": 0.07, "return_lse": True, "invariant": False}
    spec = Spec(**{name: changes.pop(name, default) for name, default in names.items()})  # type: ignore[arg-type]
    sizes = changes.pop("batch", 64), q_len, changes.pop("kv_len", 8192), heads, 1, 576, 512, 1000, page
    given = {"form": "table", "table": 200, "latent": True} | changes
    return AttentionKVCache(given.pop("element", BF16), *sizes, spec, **given)


WINDOW = And(Causal(), Window(100, 0))
OPTIONS: dict[str, dict[str, Any]] = {
    "table": {},
    "dense, negative scale": {"form": "dense", "page": 5000, "mask": Full(), "return_lse": False, "scale": -0.3},
    "small pages": {"page": 16, "split_keys": EVEN},
    "pair of q": {"q_rope": True, "kv_begin": True},
    "ragged": {"ragged": True, "total_q": 64, "mask": WINDOW, "score": Softcap(30.0), "sinks": True, "element": FP16},
    "end to end": {"form": "indptr", "causal_each": True, "mask": Full()},
}
MOST_SPILLED = 192  # bytes: where works are found and states folded, and some loads a tile


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", OPTIONS)
def test_spills(name: str, heads: int) -> None:
    """Products are not serialised, and next to nothing is spilled."""
    op = op_of(heads=heads, **OPTIONS[name])
    config, *_ = ATTN_MLA.candidates(op, HOPPER)
    binary = compiler.compile(ATTN_MLA.render(op, config, "sm_90a"))
    assert binary.spill_bytes <= MOST_SPILLED and not binary.advisories
    folds = compiler.compile(ATTN_MLA.render_fold(op, config, "sm_90a")[0])
    assert folds.spill_bytes == 0


def test_smem_is_all_that_a_block_may_have(tmp_path: pathlib.Path) -> None:
    source = ATTN_MLA.render(op_of(), TWO, "sm_90a")
    facts = ctypes.c_uint32.in_dll(emulator.library(source, tmp_path), "facts")
    assert facts.value == attn_mla.SMEM_BYTES == HOPPER.smem_bytes


def test_who_is_chosen() -> None:
    """Any heads and rows over latent caches of one head; clusters of two blocks where rows fill more than one."""
    for heads, q_len in ((1, 1), (16, 1), (16, 5), (64, 1), (65, 1), (128, 1), (128, 256)):
        selection = select(op_of(q_len, heads), HOPPER)
        assert selection.kernel is ATTN_MLA and selection.config == (CLUSTER if heads * q_len > 64 else ONE)
        assert select(op_of(q_len, heads, split_keys=EVEN, q_rope=True), HOPPER).kernel is ATTN_MLA
    with pytest.raises(ProblemError, match="split is 'even' beside invariant=True"):
        op_of(split_keys=EVEN, invariant=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "v elsewhere": ({"latent": False}, "it takes latent caches, whose v is the first 512 columns of a k of 576 with one head"),
    "sizes": ({"head_dim": 320, "head_dim_v": 256}, "it takes latent caches"),
    "pages": ({"pages": 0}, "the cache has no pages"),
    "eight bits": ({"kv_element": E4M3}, "it takes caches in the format of q, bf16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(UnsupportedError, match=said):
        select(of(op_of(), **changes), HOPPER, "attn_mla")
    with pytest.raises(UnsupportedError, match="it needs a Hopper GPU"):
        select(op_of(), TYPICAL["sm_80"], "attn_mla")
    with pytest.raises(ProblemError, match="attn_mla cannot run here: members is 3"):
        select(op_of(), HOPPER, "attn_mla", AttnMlaConfig(3))


def test_even_splits_are_refused_by_others() -> None:
    op = of(op_of(), latent=False, head_dim=128, head_dim_v=128, split_keys=EVEN)
    with pytest.raises(UnsupportedError, match="split is 'even'; its bits do not follow from the batch"):
        select(op, HOPPER)


RULES = (  # queries, heads, invariant, and the binary logarithms of the fewest keys and the most splits
    (1, 16, False, (9, 6)),
    (2, 16, False, (9, 5)),
    (1, 64, False, (9, 4)),
    (5, 16, False, (12, 5)),
    (5, 16, True, (9, 4)),
    (1, 128, True, (12, 5)),
)


def test_keys_of_a_split() -> None:
    """They follow from the model and the most rows, never from the batch; with ``invariant`` from the model alone."""
    for q_len, heads, invariant, wanted in RULES:
        for batch in (1, 200):
            op = op_of(q_len, heads, batch=batch, invariant=invariant)
            values = ATTN_MLA.lower(op, ATTN_MLA.candidates(op, HOPPER)[0], HOPPER).launches[0].values
            assert (values["split_keys_log2"], values["most_splits_log2"]) == wanted
            assert values["long_keys"] == (16384 if wanted[0] == 12 else attn_mla.LONGEST)


def test_long_sequences_have_shorter_splits(run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits follow from each sequence's own length: one that is longer than ``long_keys`` has a quarter as long ones."""
    case = of(SAME, lengths=((1, 1300), (1, 600), (1, 1000)))
    long, short = run.check(case, ONE, 3, split=128), run.check(case, ONE, 3, split=512)
    monkeypatch.setattr(attn_mla, "split_rule", lambda op: (512, 16))
    monkeypatch.setattr(attn_mla, "long_keys", lambda op: 1000)
    o, lse = run.check(case, ONE, 3)
    assert o[:1].equal(long[0][:1]) and o[1:].equal(short[0][1:]) and not o[:1].equal(short[0][:1])
    assert lse[:1].equal(long[1][:1]) and lse[1:].equal(short[1][1:])


def test_workspace() -> None:
    """It is bounded, whatever the batch and the lengths are, and leaves each multiprocessor a block."""
    for heads, q_len, batch, room in itertools.product(
        (1, 16, 20, 48, 64, 65, 128), (1, 3, 256), (1, 300), (4096, 1 << 15, 1 << 20)
    ):
        for split in (0, EVEN):
            op = op_of(q_len, heads, batch=batch, kv_len=room, split_keys=split)
            program = ATTN_MLA.lower(op, ATTN_MLA.candidates(op, HOPPER)[0], HOPPER)
            assert program.scratch_bytes <= attn_mla.MOST_BYTES + 20_000_000
            assert program.launches[0].grid == HOPPER.sm_count or batch == 1, (heads, q_len, room, split)


SHARES = """#include "config.cuh"
#include "tile/facts.cuh"
#include "tile/range.cuh"
extern "C" __device__ Facts facts = {64, sizeof(Args), 32, 0};
extern "C" __global__ void shares(const __grid_constant__ Args args) {
    Scheduler scheduler(args, nullptr);
    for (i32 i = 0;; ++i) {
        const auto [run, rows] = scheduler.next(args);
        if (run.is_last()) return;
        const Cut cut = scheduler.cut(run, Walk::span(args, rows, run, rows.q_len), blockIdx.x / cfg::members);
        const TileRange own = run.splits.clip(cut.tiles, cut.split, cut.split_end);
        i32* const to = reinterpret_cast<i32*>(args.parked) + (blockIdx.x * 64 + i) * 8;
        if (threadIdx.x > 0) continue;
        to[0] = own.end - own.begin, to[1] = cut.split, to[2] = cut.split_end, to[3] = cut.begin, to[4] = cut.end;
        to[5] = cut.border, to[6] = cut.owned, to[7] = run.batch * 64 + run.work + 1;
    }
}
"""


def shares(op: AttentionKVCache, lens: Any, folder: pathlib.Path) -> tuple[Any, Any]:
    """The launch, and what each of its shares computes of works, in eight numbers; the last one is 0 behind them."""
    config, *_ = ATTN_MLA.candidates(op, HOPPER)
    launch = ATTN_MLA.lower(op, config, HOPPER).launches[0]
    source = of(launch.source, name="shares.cu", text=SHARES)
    found = np.zeros((launch.grid, 64, 8), np.int32)
    formats, known = render.layout(launch.fields).formats, {**launch.values, "parked": found, "kv_lens": np.array(lens, np.int32)}
    values = {name: known.get(name, b"" if form.endswith("s") else 0) for name, form in formats.items()}
    emulator.Kernel(source, launch.fields, folder)(launch.grid, values)
    return launch, found[:: config.members]


LONGEST = {  # (sequences, queries, heads, keys): cuts, and the tiles of the longest share; in pairs of blocks above 64 rows
    (64, 1, 128, 4096): (0, 64),
    (64, 1, 128, 8192): (0, 128),
    (128, 1, 128, 8192): (0, 256),
    (128, 2, 128, 4096): (0, 256),
    (64, 1, 16, 4096): (64, 32),
    (128, 1, 16, 8192): (0, 128),
    (16, 1, 128, 32768): (48, 128),
    (1, 1, 128, 32768): (31, 16),
    (64, 1, 128, 32768): (0, 512),
    (1, 1, 16, 8192): (15, 8),
}


@pytest.mark.parametrize("shape", LONGEST, ids=str)
def test_shares(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """Works are cut where that makes the longest share shorter, and nowhere else."""
    batch, q_len, heads, kv_len = shape
    _, found = shares(op_of(q_len, heads, batch=batch, kv_len=kv_len, page=64), [kv_len] * batch, tmp_path)
    assert ((found[:, :, 1] > 0).sum(), found[:, :, 0].sum(1).max()) == LONGEST[shape]


SOME = np.random.default_rng(7)
BATCHES = {  # keys of each sequence
    "one": [32768],
    "two works and a half": [32768] * 27,
    "cut in the midst": [32768] * 44,
    "cut anywhere": [32700] * 70,
    "one long": [131072, *[4096] * 50],
    "few long": [131072] * 3 + [40000] * 5,
    **{f"any, {n}": SOME.integers(0, 70000, n).tolist() for n in (2, 9, 33, 40, 80, 130)},
}


@pytest.mark.parametrize(
    "q_len, heads, split",
    [
        (1, 16, 0),
        (1, 128, 0),
        (3, 128, EVEN),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 128, 0), (1, 16, EVEN))),
    ],
)
@pytest.mark.parametrize("name", BATCHES)
def test_states_have_places(name: str, q_len: int, heads: int, split: int, tmp_path: pathlib.Path) -> None:
    """Every split is computed once, and each state that is left has a place of its own, as attn_decode_fold.cu finds it. Of even
    splits the parts of a work are numbered, and a state of each is left."""
    lens = BATCHES[name]
    op = op_of(q_len, heads, batch=len(lens), kv_len=max(lens), page=64, split_keys=split)
    launch, found = shares(op, lens, tmp_path)
    slots, borders, seen, splits = launch.values["slots"], launch.values["borders"], set[float](), dict[int, list[Any]]()
    for _, split, split_end, begin, end, border, owned, work in (row for row in found.reshape(-1, 8).tolist() if row[7]):
        splits.setdefault(work, [end - begin]).extend(range(split - begin, split_end - begin))
        if split > begin:
            places = [border * slots + end - each for each in range(split, split_end)]
        else:
            places = [border * slots] if split_end < end else []
            assert split_end - begin == owned
        assert not seen.intersection(places) and all(0 <= place < borders * slots for place in places)
        seen.update(places)
    assert all(sorted(own) == list(range(count)) for count, *own in splits.values())
    assert len(splits) == len(lens) * -(-q_len * heads // (128 if heads > 64 else 64))

"""This module compares attn_decode_wide.cu, run thread by thread on the CPU, with its definition, and its bits."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ProblemError, UnsupportedError
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_decode_fold, attn_decode_wide, render
from rawattn.kernel.attn_decode_wide import ATTN_DECODE_WIDE, AttnDecodeWideConfig
from rawattn.operation import AttentionKVCache
from rawattn.operation.spec import Spec
from rawattn.runtime.select import select
from rawattn.testing import _move
from rawattn.variant.element import E4M3, FP16, FP32
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests import emulator
from tests.caches import Cached
from tests.decode import Decode
from tests.emulator import gpu
from tests.host.kernel import test_attn_fwd_kvcache as many

HOPPER = TYPICAL["sm_90a"]
AROUND, SEAL = 1 << 14, 0x7FC0FFEE  # words on either side of the states of splits, all a NaN of their own
ONE, TWO = AttnDecodeWideConfig(64, 64, 3, 2), AttnDecodeWideConfig(128, 64, 2, 1)
LENGTHS = ((8, 2500), (8, 0), (8, 65), (8, 1), (8, 1100))
SAME = Cached(LENGTHS, page_size=16, dtype="bf16", heads=8, kv_heads=2, head_dim=32, head_dim_v=32, whole=True, ragged=False)
RAGGED = dataclasses.replace(SAME, ragged=True, lengths=((31, 2300), (0, 7), (3, 2200), (17, 40), (1, 0), (5, 3)))
of = dataclasses.replace


class Runner:
    """Runs steps: on any grid, with blocks in any order, and states in memory that is looked at."""

    kernel = "attn_decode_wide"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder

    def __call__(
        self, case: Cached, config: Any = ONE, grid: int = 5, order: Any = None, tear: Any = None, **options: Any
    ) -> tuple[Any, Any, int]:
        """o, lse and the word of violations. ``tear`` comes before the launches, and the fold after it: it gets the number of
        blocks, and a function that runs some of them with other pointers."""
        word, launches = gpu.stand_in(self.monkeypatch, self.folder, sm_count=grid), list[Any]()

        def run(launch: Any) -> None:
            main, *folds = launches[:] = [*launches, launch]
            offsets = render.layout(main.kernel.fields).offsets
            numbers = (int.from_bytes(main.args[offsets[name] :][:4], "little") for name in ("slots", "strips", "borders"))
            (slots, strips, borders), even = numbers, options.get("split") == "even"
            if not folds and (slots > 1 or even) and borders > even:
                return  # the fold comes, too
            words = max(1, borders) * slots * strips * (16 * case.head_dim_v + 32)
            states = np.full(words + 2 * AROUND, SEAL, np.uint32)

            def some(blocks: Any, which: Any = main, **pointers: int) -> None:
                args, at = bytearray(which.args), render.layout(which.kernel.fields).offsets
                for name, pointer in (pointers | {"partials": states[AROUND:].ctypes.data}).items():
                    args[at[name] : at[name] + 8] = pointer.to_bytes(8, "little")
                which.args = bytes(args)
                for block in blocks if order is not None else ():
                    which.kernel.launch(which.grid, which.args, range(block, block + 1))
                if order is None:
                    which.kernel.launch(which.grid, which.args, blocks)

            if tear is not None:
                tear(main.grid, some, int.from_bytes(main.args[offsets["kv_lens"] :][:8], "little"))
            for each in [*folds * (tear is not None), *launches]:
                some(range(each.grid) if order is None else order(each.grid), each)
            launches.clear()
            assert (states[:AROUND] == SEAL).all() and (states[AROUND + words :] == SEAL).all(), "states lie in their memory"

        self.monkeypatch.setattr(gpu.Launch, "__call__", run)
        o, lse = many.attend(case, kernel=self.kernel, config=config, **options)[:2]
        return o, lse, int(word[0])

    def check(self, case: Cached, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Compares with the definition."""
        o, lse, word = self(case, *args, **options)
        many.check(case, o, lse)
        assert word == 0
        return o, lse


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Runner:
    return Runner(monkeypatch, tmp_path)


def same(found: Any, wanted: Any) -> None:
    assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])


WIDE = of(SAME, lengths=((8, 1100), (8, 70)), heads=4, kv_heads=1)
CASES: dict[str, tuple[Any, ...]] = {
    "same lengths": (SAME, ONE, 5),
    "more blocks than splits": (SAME, ONE, 40),
    "one block": (SAME, ONE, 1),
    "ragged, two warpgroups": (RAGGED, TWO, 7),
    "two blocks of rows": (of(RAGGED, heads=10, lengths=((14, 1500), (2, 40))), ONE, 3),
    "end to end": (of(RAGGED, form="indptr", layout="HND", sinks=True), TWO, 5),
    "dense": (of(SAME, form="dense", page_size=2501, pool="interleaved", window=(1700, 0)), ONE, 6),
    "pages of 8": (of(WIDE, page_size=8, head_dim=80, head_dim_v=96, softcap=5.0), ONE, 3),
    "pages of 1": (of(SAME, page_size=1), ONE, 5),
    "pages of 4": (of(WIDE, page_size=4, head_dim=80, head_dim_v=144), AttnDecodeWideConfig(64, 32, 3, 1), 3),
    "begins, pages of 2": (of(RAGGED, page_size=2, form="indptr", whole=False, begins=(1131, 5, 9, 39, 0, 1)), TWO, 5),
    "pages of 128, odd group": (of(WIDE, page_size=128, heads=3, lengths=((30, 1300), (30, 40)), pool="shared"), TWO, 3),
    "small pages at once": (of(WIDE, head_dim=128, head_dim_v=128), AttnDecodeWideConfig(64, 64, 5, 2), 2),
    "small pages of 192 and 128": (of(WIDE, head_dim=192, head_dim_v=128), AttnDecodeWideConfig(64, 32, 3, 1), 2),
    "columns 256": (of(WIDE, head_dim=256, head_dim_v=256, page_size=64), AttnDecodeWideConfig(64, 32, 4, 1), 2),
    "columns 192": (of(WIDE, head_dim=192, head_dim_v=192, page_size=64), AttnDecodeWideConfig(64, 64, 3, 1), 2),
    "full": (of(SAME, causal=False, page_size=32), ONE, 6),
    "begins": (of(RAGGED, whole=False, begins=(1131, 5, 9, 39, 0, 1), sinks=True), TWO, 5),
    "causal for some": (of(RAGGED, causal=(0, 1, 1, 0, 1, 0), window=(None, 1)), ONE, 5),
    "window in one tile": (of(SAME, window=(5, 0), sinks=True), ONE, 5),
}
SLOW = ("pages of 8", "small pages of 192 and 128", "columns 192", "causal for some", "end to end")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_public_call(name: str, run: Runner) -> None:
    """torch tensors on the CPU stand for those on a GPU: from the call to the bytes that the kernel gets, and its results."""
    run.check(*CASES[name])


def test_bits_follow_from_the_sequence(run: Runner) -> None:
    """On any grid, in any order of blocks, for both tiles of rows and rings of any depth."""
    case = of(SAME, lengths=((8, 4500), (8, 7), (8, 2300)), page_size=64)
    wanted = run.check(case, ONE, 1)
    for grid in (2, 3, 7, 18):
        same(run(case, ONE, grid), wanted)
    for order in (lambda n: range(n)[::-1], lambda n: np.random.default_rng(3).permutation(n).tolist()):
        same(run(case, ONE, 7, order=order), wanted)
    for last in range(3):
        same(run(case, ONE, 3, order=lambda n, last=last: sorted(range(n), key=lambda block: block == last)), wanted)
    same(run(case, AttnDecodeWideConfig(64, 64, 2, 1), 4), wanted)
    same(run(case, TWO, 3), wanted)
    same(run(of(case, page_size=16), ONE, 4), wanted)
    same(run(of(case, page_size=1), ONE, 4), wanted)
    same(run(of(case, form="dense", page_size=4501), ONE, 4), wanted)


def test_more_states_than_a_fold_brings_at_once(run: Runner) -> None:
    """Up to 32 of a work, which one block has, a few or many."""
    case = of(SAME, lengths=((5, 2040), (5, 1500)), heads=10, kv_heads=2, page_size=64)
    wanted = run.check(case, ONE, 1, split=64)
    for grid in (2, 6, 40):
        same(run.check(case, ONE, grid, split=64), wanted)


def test_keys_of_a_split() -> None:
    """They never follow from the batch; what the call says goes first, and makes no other kernel."""
    for kv_heads, rows, size, wanted in (
        (1, 32, 128, 32),
        (4, 64, 128, 32),
        (4, 64, 192, 16),
        (4, 65, 128, 16),
        (2, 17, 256, 16),
        (5, 33, 64, 16),
    ):
        for batch in (1, 100):
            op = op_of(rows, size, batch=batch, kv_len=1 << 20, heads=kv_heads, kv_heads=kv_heads, page=64)
            config, *_ = ATTN_DECODE_WIDE.candidates(op, HOPPER)
            found, told = (ATTN_DECODE_WIDE.lower(each, config, HOPPER) for each in (op, of(op, split_keys=128)))
            numbers = [[launch.values[f"{name}_log2"] for name in ("split_keys", "most_splits")] for launch in found.launches]
            assert numbers == [[9, wanted.bit_length() - 1]] * 2 and found.launches[0].values["slots"] == wanted
            assert told.launches[0].values["split_keys_log2"] == 7
            assert [x.source.key for x in told.launches] == [x.source.key for x in found.launches]


def test_who_folds() -> None:
    """A launch behind, but where no work can be cut: a sequence has one split, or there is one block."""
    for changes, folds in (({}, True), ({"kv_len": 512}, False), ({"kv_len": 513}, True)):
        op = op_of(**{"batch": 4, "kv_len": 8192, **changes})
        program = ATTN_DECODE_WIDE.lower(op, ATTN_DECODE_WIDE.candidates(op, HOPPER)[0], HOPPER)
        assert [launch.entry for launch in program.launches] == ["attn_decode_wide", "attn_decode_fold"][: 1 + folds]
        selection = select(op, HOPPER, "attn_decode_wide")
        assert len({launch.source.key for program in selection.programs(op, HOPPER) for launch in program.launches}) == 2
        one = ATTN_DECODE_WIDE.lower(op, ATTN_DECODE_WIDE.candidates(op, HOPPER)[0], of(HOPPER, sm_count=1))
        assert len(one.launches) == 1


def test_bits_do_not_follow_from_the_batch(run: Runner) -> None:
    """Each sequence alone, and its last query alone."""
    case = of(SAME, lengths=((6, 2300), (6, 1200), (6, 40)), page_size=64)
    o, lse, _ = run(case, ONE, 4)
    q, cache, step = (_move(case.rows(8, 32, 1), "torch", "cpu"), case.cache("torch"), case.step("torch"))
    options: dict[str, Any] = {"kernel": "attn_decode_wide", "config": ONE, "return_lse": True}
    for i in range(3):
        alone = rawattn.Step(step.kv_lens[i : i + 1], step.page_table[i : i + 1])
        for n in (6, 1):
            found = rawattn.attention_kvcache(q[i : i + 1, -n:].contiguous(), cache, alone, **options)
            assert found[0].equal(o[i : i + 1, -n:]) and found[1].equal(lse[i : i + 1, :, -n:])


@pytest.mark.parametrize("late", [31, 63, 128, 159, 383])
def test_a_late_lane_finds_its_phase(late: int, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the warp that loads keys, of the one that loads queries, and of consumers."""
    case = of(RAGGED, page_size=64)
    wanted = run(case, TWO, 2)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, TWO, 2), wanted)


def test_violated_bounds_are_said_and_cut(run: Runner) -> None:
    wanted = run(SAME)

    def edit(**changes: Any) -> Any:
        return lambda given: [given[name].__setitem__(at, x) for name, (at, x) in changes.items()]

    for changes, said in (
        ({"kv_lens": (2, 1 << 30)}, 1 | 4),
        ({"kv_lens": (2, -5)}, 1),
        ({"page_table": ((2, 0), 2147480000)}, 4),
    ):
        o, lse, word = run(SAME, edit=edit(**changes))
        assert word & said == word and word and (said == 5 or np.isfinite(o[2].float().numpy()).all()), "a longer one reads NaN"
        others = [i for i in range(5) if i != 2]
        assert o[others].equal(wanted[0][others]) and lse[others].equal(wanted[1][others])
    wanted = run(RAGGED, TWO)
    o, lse, word = run(RAGGED, TWO, edit=edit(cu_seqlens_q=(6, 200)))
    assert word == 2
    same((o, lse), wanted)


SHORT, LONG = (700, 3, 0, 4000), (65, 4000, 333, 10)  # lengths of sequences, before another stream changes them and after
TORN = of(SAME, lengths=tuple((8, n) for n in LONG), form="dense", page_size=4001)


def test_torn_lengths_are_said_and_mended(run: Runner) -> None:
    """Some blocks of a launch see other lengths than others. The next launch is right, whatever that has left."""
    said, wanted = 0, run(TORN, ONE, 7)
    assert wanted[2] == 0

    def tear(others: Any, first: int, grid: int, some: Any, kv_lens: int) -> None:
        changed = np.array(others, np.int32)
        for blocks, early in ((range(first), first % 2), (range(first, grid), 1 - first % 2)):
            some(blocks, kv_lens=changed.ctypes.data if early else kv_lens)
        some(range(0), kv_lens=kv_lens)

    for others, first in itertools.product((SHORT, (0,) * 4), (1, 3, 4, 6)):
        found = run(TORN, ONE, 7, tear=functools.partial(tear, others, first))
        same(found, wanted)
        said += found[2] >> 6
        assert found[2] in (0, 64)
    assert said


def test_lengths_that_change_while_a_block_looks_write_nowhere_else(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares follow from lengths, and works from those that are read later. Memory around the states stays as it was."""
    file, plain, count = "variant/scheduler/stream_k.cuh", gpu.emulated, len(TORN.lengths)
    old = "const Rows rows(args, batch, Read{});\n            const Sequence sequence(args, rows, batch);\n            if (work"
    late = f"Args late = args;\n            late.kv_lens += {count};\n            " + old.replace("(args", "(late")
    wanted = run(TORN, ONE, 7)

    def changing(launch: Any, *args: Any) -> Any:
        headers = dict(launch.source.headers)
        if launch.source.name == attn_decode_fold.FILE:
            return plain(launch, *args)
        assert headers[file].count(old) == 1
        headers[file] = headers[file].replace(old, late)
        source = dataclasses.replace(launch.source, headers=tuple(headers.items()))
        return plain(launch._replace(source=source), *args)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "emulated", changing)
        for before, after in itertools.permutations((SHORT, LONG, (1100,) * 4), 2):
            lengths = np.array([*before, *after], np.int32)

            def tear(grid: int, some: Any, kv_lens: int, lengths: Any = lengths) -> None:
                some(range(grid), kv_lens=lengths.ctypes.data)
                lengths[:] = [*LONG, *LONG]

            same(run(TORN, ONE, 7, tear=tear), wanted)


def op_of(q_len: int = 8, size: int = 128, size_v: int = 0, **changes: Any) -> AttentionKVCache:
    given = {name: changes.pop(name) for name in ("kv_begin", "causal_each", "form") if name in changes}
    step = Decode(q_len=q_len, head_dim=size, head_dim_v=size_v or size, **{"page": 16, **changes})
    return dataclasses.replace(step.operation, **given)


OPTIONS: dict[str, dict[str, Any]] = {
    "small pages": {},
    "pages of 1": {"page": 1},
    "pages of 1, begins": {"page": 1, "varlen": True, "kv_begin": True, "form": "indptr", "sinks": True},
    "dense, negative scale": {"page": 0, "scale": -0.3},
    "ragged": {"mask": And(Causal(), Window(100, 0)), "score": Softcap(30.0), "sinks": True, "varlen": True, "element": FP16},
    "begins": {"mask": Full(), "score": Softcap(30.0), "varlen": True, "kv_begin": True, "causal_each": True, "form": "indptr"},
}


@pytest.mark.parametrize("sizes", [(64,), (128,), (192, 128), (192,), (256,)], ids=str)
@pytest.mark.parametrize("q_len", [8, 32])
def test_no_spills(q_len: int, sizes: tuple[int, ...]) -> None:
    for name, changes in OPTIONS.items():
        op = op_of(q_len, *sizes, **changes)
        config, *_ = ATTN_DECODE_WIDE.candidates(op, HOPPER)
        for source in (ATTN_DECODE_WIDE.render(op, config, "sm_90a"), ATTN_DECODE_WIDE.render_fold(op, config, "sm_90a")[0]):
            binary = compiler.compile(source)
            assert binary.spill_bytes == 0 and not binary.advisories, (name, source.name)


def test_configurations() -> None:
    """As much of the ring as fits; 128 rows at once where there are more than 64, but of wide heads."""
    for op, wanted in (
        (op_of(8), AttnDecodeWideConfig(64, 64, 5, 2)),
        (op_of(32), AttnDecodeWideConfig(128, 64, 4, 1)),
        (op_of(32, 192, 128), AttnDecodeWideConfig(128, 32, 5, 1)),
        (op_of(32, 256), AttnDecodeWideConfig(64, 32, 4, 1)),
    ):
        assert ATTN_DECODE_WIDE.candidates(op, HOPPER) == [wanted]
    for config, said in (
        ({"tile_q": 192}, "tile_q is 192"),
        ({"tile_kv": 128}, "tile_kv 128"),
        ({"stages": 1}, "stages is 1"),
        ({"stages": 9}, "bytes of shared memory"),
    ):
        assert said in str(ATTN_DECODE_WIDE.legal(AttnDecodeWideConfig(**config), op_of(), HOPPER))
    assert "it must be 64" in str(ATTN_DECODE_WIDE.legal(TWO, op_of(32, 192), HOPPER))


@pytest.mark.parametrize("op", [op_of(8, 80), op_of(32, 192, 128)], ids=["80", "192 and 128"])
def test_smem_of_configurations(op: AttentionKVCache, tmp_path: pathlib.Path) -> None:
    """The host expects the bytes that the kernel says, or a little more."""
    config, *_ = ATTN_DECODE_WIDE.candidates(op, HOPPER)
    source = ATTN_DECODE_WIDE.render(op, config, "sm_90a")
    facts = ctypes.c_uint32.in_dll(emulator.library(source, tmp_path), "facts")
    assert 0 <= attn_decode_wide.smem_bytes(op, config) - facts.value < 1024


def test_who_is_chosen() -> None:
    """More than 32 rows, or more than 16 of one or two key heads, whatever the batch; what it refuses attn_decode takes."""
    for q_len, size in itertools.product((1, 4, 5, 8, 9, 64), (64, 128, 192, 256)):
        for kv_heads, batch in itertools.product((1, 2, 3, 8), (1, 100)):
            op = dataclasses.replace(
                op_of(q_len, size), kv_heads=kv_heads, heads=4 * kv_heads, batch=batch, total_q=batch * q_len
            )
            is_wide = q_len > 8 or (q_len > 4 and kv_heads <= 2)
            assert select(op, HOPPER).kernel.name == ("attn_decode_wide" if is_wide else "attn_decode")
            assert select(op, HOPPER, "attn_decode_wide").kernel is ATTN_DECODE_WIDE
            assert select(dataclasses.replace(op, split_keys=512), HOPPER).kernel.name == "attn_decode"
    op = dataclasses.replace(op_of(64), kv_heads=8, heads=32, spec=dataclasses.replace(op_of().spec, invariant=True))
    assert select(op, HOPPER).kernel.name == "attn_decode"
    assert select(op_of(64), TYPICAL["sm_80"]).kernel.name == "attn_decode"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head_dim": ({"head_dim": 40}, "head_dim is 40; it takes multiples of 16"),
    "rows": ({"q_len": 100}, "a sequence may have 400 rows; it takes up to 256"),
    "format": ({"element": FP32, "kv_element": FP32}, "it takes bf16 and fp16, not fp32"),
    "eight bits": ({"kv_element": E4M3}, "it takes caches in the format of q, bf16, not e4m3"),
    "invariant": ({"spec": Spec.of(causal=True, invariant=True)}, "invariant calls have one configuration"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(UnsupportedError, match=said):
        select(dataclasses.replace(op_of(), **changes), HOPPER, "attn_decode_wide")
    with pytest.raises(ProblemError, match="attn_decode_wide cannot run here: stages is 1"):
        select(op_of(), HOPPER, "attn_decode_wide", AttnDecodeWideConfig(stages=1))


def test_workspace() -> None:
    """It is bounded, whatever the batch and the lengths are."""
    for size, kv_heads, q_len, batch, room in itertools.product((64, 128, 256), (1, 2, 8), (8, 60), (1, 300), (8192, 1 << 20)):
        op = op_of(q_len, size, batch=batch, heads=4 * kv_heads, kv_heads=kv_heads, kv_len=room)
        program = ATTN_DECODE_WIDE.lower(op, ATTN_DECODE_WIDE.candidates(op, HOPPER)[0], HOPPER)
        assert sum(buffer.bytes for buffer in program.scratch) <= attn_decode_wide.MOST_BYTES
        if batch > 1:
            assert program.launches[0].grid == HOPPER.sm_count

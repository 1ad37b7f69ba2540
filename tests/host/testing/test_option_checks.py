"""``rawattn.testing.check_option`` as a project of its own calls it: right options pass, and each planted fault is told of."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any, ClassVar

import numpy as np
import pytest

from rawattn import ProblemError, UnsupportedError
from rawattn.compile import compiler
from rawattn.testing import check_option, option_checks
from rawattn.variant import Option
from rawattn.variant.field import Field, Fields
from rawattn.variant.mask import And, Causal, Ints
from tests import native
from tests.lists import Checkerboard
from tests.options import Alibi, Fading, HeadWindow

CHUNK = """\
#pragma once
// A query keeps the keys of its own chunk, up to itself.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct Mine {
    i32 chunk, shift, offset, q_len, kv_len;
    __device__ Mine(const Args& args, const Rows& rows, const WorkTile&)
        : chunk(args.mine_chunk), shift(rows.shift(1)), offset(rows.kv_offset), q_len(rows.q_len), kv_len(rows.kv_len) {}
    __device__ i32 first(i32 q) const { return max(max(q + shift + offset, 0) / chunk * chunk - offset, 0); }
    __device__ i32 end(i32 kv) const { return (kv + offset) / chunk * chunk + chunk - offset - shift; }  // of queries
    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        return TileRange::of_keys(first(q_begin), first(q_end - 1), min(q_begin + shift + 1, kv_len), min(q_end + shift, kv_len));
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        if (kv_begin >= kv_len) return {0, 0, 0, 0};
        const i32 last = min(kv_end, kv_len) - 1, full_end = kv_end <= kv_len ? end(kv_begin) : 0;
        return TileRange::of_queries(kv_begin - shift, last - shift, full_end, end(last), q_len);
    }
    __device__ KeptKeys row(i32 q, i32 from) const { return {first(q) - from, min(q + shift + 1, kv_len) - from}; }
};
"""


@dataclasses.dataclass(frozen=True)
class Mine(Option):
    chunk: int
    type: ClassVar[str] = "Mine"

    @property
    def fields(self) -> Fields:
        return (Field("mine_chunk", "i32"),)

    @property
    def values(self) -> dict[str, float]:
        return {"mine_chunk": self.chunk}

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        at = q + kv_len - q_len
        return np.maximum(at, 0) // self.chunk * self.chunk, np.clip(at + 1, 0, kv_len)


@pytest.fixture(autouse=True)
def has_compiler() -> None:
    native.needs_compiler()


def of_file(folder: pathlib.Path, text: str) -> Mine:
    """The mask whose CUDA is this text, in a file of a project."""
    (folder / "mine.cuh").write_text(text)
    found: Mine = type("Mine", (Mine,), {"source": str(folder / "mine.cuh")})(7)
    return found


def test_a_mask_of_a_project(tmp_path: pathlib.Path) -> None:
    """From a file anywhere: the pairs, the tiles from both sides, and kernels with it."""
    check_option(of_file(tmp_path, CHUNK), "sm_89")


FAULTS = {
    "other keys": (("min(q + shift + 1, kv_len) - from", "min(q + shift, kv_len) - from"), "other keys than interval says"),
    "too few tiles": (("min(q_end + shift, kv_len)", "min(q_begin + shift, kv_len)"), "lies in a tile that is not visited"),
    "positions": (("offset(rows.kv_offset)", "offset(0)"), r"offsets \(3, 5\), head 0: a query keeps other keys"),
    "too many": (("min(q_end + shift, kv_len)", "kv_len"), "a tile is visited in vain"),
    "full": (("min(q_begin + shift + 1, kv_len)", "min(q_end + shift, kv_len)"), "a tile is taken for full that is not"),
    "inverse": (("end(last), q_len", "q_len, q_len"), "a tile is visited in vain"),
    "C++": (("rows.shift(1)", "rows.shifted(1)"), r"refused the CUDA file as C\+\+ for the host:[^$]*no member named"),
    "of_head": (("i32 chunk, shift,", "static constexpr bool of_head = true; i32 chunk, shift,"), "of_head is in CUDA alone"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_mask(name: str, tmp_path: pathlib.Path) -> None:
    (before, after), told = FAULTS[name]
    assert CHUNK.count(before) == 1
    with pytest.raises(ProblemError if name == "C++" else AssertionError, match=told):
        check_option(of_file(tmp_path, CHUNK.replace(before, after)), None)


@dataclasses.dataclass(frozen=True)
class Board(Checkerboard):
    """Its ``keep`` has the arguments of a mask without arrays."""

    def keep(self, xp: Any, batch: int, head: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:  # type: ignore[override]
        return super().keep((), batch, head, q, kv)


@dataclasses.dataclass(frozen=True)
class OtherBoard(Board):
    def keep(self, *given: Any) -> Any:
        return super().keep(*given) | (given[3] == given[4])


@dataclasses.dataclass(frozen=True)
class Inherited(HeadWindow):
    """Its heads are said to be alike."""

    of_head: ClassVar[Any] = None


@dataclasses.dataclass(frozen=True)
class Slope(Fading):
    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return super().slope(xp, s, batch, 0, q, kv)


def test_others() -> None:
    for option in (Board(5), HeadWindow(5, 17), And(HeadWindow(5, 17), Causal()), Alibi(1.0), Fading(0.1)):
        check_option(option, None)
    with pytest.raises(AssertionError, match=r"q_len \d.*: a query keeps other keys than keep says"):
        check_option(OtherBoard(5), None)
    with pytest.raises(AssertionError, match="of_head is in CUDA alone; both say that heads differ"):
        check_option(Inherited(5, 17), None)
    with pytest.raises(AssertionError, match=r"number fp32, head 1, scale .*: logits differ from those of logit"):
        check_option(Slope(0.1), None)


def test_kernels_that_spill(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    spilled = dataclasses.replace(compiler.Binary(b"", "", "", 0.0, "memory", ""), log="12 bytes spill stores")
    monkeypatch.setattr(compiler, "compile", lambda source: spilled)
    with pytest.raises(AssertionError, match=r"attn_fwd_mma for Forward .* on sm_89 spills 12 bytes of registers"):
        check_option(Alibi(0.5), "sm_89")


def test_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProblemError, match=r"option is .*lambda.*; it must be a mask or a score with a CUDA type"):
        check_option(lambda b, h, q, kv: q >= kv)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"arch is 'h100'; it must be None or one of 'sm_75'"):
        check_option(Alibi(2.0), "h100")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    option_checks._compile.cache_clear()
    with pytest.raises(UnsupportedError, match=r"a C\+\+ compiler for the host is needed"):
        check_option(HeadWindow(1, 1), None)

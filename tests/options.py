"""Masks and scores that tests run beside the library's: an entry here runs in host tests and on the GPU.

A mask or a score of one's own needs a CUDA file, a class with its definition, and an entry of ``MASKS`` or ``SCORES``: a strategy
for its run-time values. Values that divide no tile find the most faults.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from rawattn import testing
from rawattn.variant import Option
from rawattn.variant.field import Field, Fields
from rawattn.variant.mask import And, Causal, Ints, Mask, Window, kept_pairs, of_head
from rawattn.variant.score import Score


@dataclasses.dataclass(frozen=True)
class Alibi(Option):
    """Attention with linear biases (arXiv 2108.12409): head h has the slope 2^(-step (h + 1)); step is 8 / heads there."""

    step: float
    type: ClassVar[str] = "Alibi"
    source: ClassVar[str] = "../tests/host/alibi.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("alibi_step", "Number"),)

    @property
    def values(self) -> dict[str, float]:
        return {"alibi_step": self.step}

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        slope = xp.asarray(2 ** (-self.step * (head + 1)), dtype=s.dtype)  # torch makes float32 of a float and integers
        return s + slope * (kv - q)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class Fading(Option):
    """Dot products that fade with distance, faster in each head. The derivative is that of a pair."""

    step: float
    type: ClassVar[str] = "Fading"
    source: ClassVar[str] = "../tests/host/fading.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("fading_step", "Number"),)

    @property
    def values(self) -> dict[str, float]:
        return {"fading_step": self.step}

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s * self.slope(xp, s, batch, head, q, kv)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 1 / (1 + xp.asarray(self.step * (head + 1), dtype=s.dtype) * abs(q - kv))


@dataclasses.dataclass(frozen=True)
class HeadWindow(Option):
    """A window to the left that is longer in each head: of first + step h keys before the query's own position."""

    first: int
    step: int
    type: ClassVar[str] = "HeadWindow"
    source: ClassVar[str] = "../tests/host/head_window.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("head_window_first", "i32"), Field("head_window_step", "i32"))

    @property
    def values(self) -> dict[str, float]:
        return {"head_window_first": self.first, "head_window_step": self.step}

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return Window().interval(q, q_len, kv_len)

    def of_head(self, head: int) -> Window:
        return Window(left=self.first + self.step * head)


@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """A query keeps the keys up to its own position whose distance to it is a multiple of ``step``."""

    step: int
    type: ClassVar[str] = "Dilated"
    source: ClassVar[str] = "../tests/host/dilated.cuh"
    lists: ClassVar[bool] = True  # type: ignore[assignment,misc]

    @property
    def fields(self) -> Fields:
        return (Field("dilated_step", "i32"),)

    @property
    def values(self) -> dict[str, float]:
        return {"dilated_step": self.step}

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return Causal().interval(q, q_len, kv_len)

    def keep(self, xp: Any, batch: int, head: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
        distance = q + kv_len - q_len - kv
        return (distance >= 0) & (distance % self.step == 0)


HEAD_WINDOW = st.builds(HeadWindow, st.sampled_from([0, 1, 5, 31, 61, 127, 130]), st.sampled_from([0, 1, 17, 65, 97]))
MASKS: dict[str, st.SearchStrategy[Mask]] = {
    "head window": HEAD_WINDOW,
    "head window, causal": st.builds(And, HEAD_WINDOW, st.builds(Causal)),
}
SCORES: dict[str, st.SearchStrategy[Score]] = {
    "alibi": st.builds(Alibi, st.sampled_from([0.5, 1.0, 8 / 3])),
    "fading": st.builds(Fading, st.sampled_from([0.01, 0.1])),
}


def cases(*dtypes: Any, **options: Any) -> st.SearchStrategy[testing.Case]:
    """``rawattn.testing.cases`` with these entries."""
    return testing.cases(*dtypes, masks=MASKS, scores=SCORES, **options)


def example(strategy: st.SearchStrategy[Any]) -> Any:
    """Returns one value of a strategy, the same in every run: the last of some draws, as the first are the simplest; of masks
    that of which 40 queries keep nearest to half of 70 keys."""
    drawn: list[Any] = []

    @settings(max_examples=20, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    is_mask = drawn[0].interval is not None
    return min(drawn, key=lambda mask: abs(kept_pairs(of_head(mask, 0), 40, 70) - 1400)) if is_mask else drawn[-1]


# One value of each entry by its name, and the argument of a call that it is: whole kernels are emulated with them.
EXAMPLES = [
    *((name, {"mask": example(strategy)}) for name, strategy in MASKS.items()),
    *((name, {"score": example(strategy)}) for name, strategy in SCORES.items()),
    ("dilated", {"mask": Dilated(7)}),
]


def run_time_values(draw: Any, case: testing.Case, longest: int) -> dict[str, Any]:
    """Other heads, lengths and numbers of a case's options, for which the compiled kernels are the same."""
    length = st.integers(0, longest) | st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 384])
    few, many = st.integers(1, 16), st.integers(longest, 8 * longest)
    pair = length.map(lambda n: (n, n)) | st.tuples(length, length) | st.tuples(few, many) | st.tuples(many, few)
    side = st.none() | st.integers(0, longest)
    kv_heads = draw(st.integers(1, 3))
    changes: dict[str, Any] = {"heads": kv_heads * draw(st.sampled_from((1, 1, 2, 5, 16, 40))), "kv_heads": kv_heads}
    if case.lengths is None:
        changes["batch"], (changes["q_len"], changes["kv_len"]) = draw(st.integers(1, 3)), draw(pair)
    else:
        changes["lengths"] = tuple(draw(st.lists(pair, max_size=6)))
    if case.window is not None:
        changes["window"] = draw(st.tuples(side, side))
    if isinstance(case.mask, Window):
        changes["mask"] = Window(draw(side), draw(side), case.mask.align)
    if isinstance(case.mask, And):
        changes["mask"] = And(case.mask.a, Window(draw(side), draw(side)))
    if case.softcap is not None:
        changes["softcap"] = draw(st.sampled_from((0.3, 4.0, 50.0)))
    return changes

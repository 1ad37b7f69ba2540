"""Gradients of captured arrays: what they must be for given o and lse, and how much they may err."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from rawattn.operation import captures
from rawattn.operation.spec import Options
from rawattn.reference.formula import INF, Formula, Tile, cast, make_formula, to_numpy
from rawattn.trace.formulas import FORMULAS

Array = npt.NDArray[Any]
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LEAST = {"float64": 0.0, "float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}  # rounding takes numbers below it
LEAST_WEIGHT = 2.0**-126  # below it a weight is 0 in float32, and what it would have added is lost


def dtype_of(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class Sizes(Formula):
    """The formula on the sizes of its terms: the sums of p |d| (|do| |v| + sum |do o|), each times 1 and the sizes of the logit
    and of lse, whose difference is in an exponent, and what an error in tanh adds to the logit, in units of eps (``OfTanh``).
    ``known`` has sum |do o| in the place of delta. With ``flat`` each weight counts as 1."""

    flat: bool = False
    is_double: bool = False

    def weights_backward(
        self, do: Any, q: Any, k: Any, v: Any, dlse: Any, sink: float, place: tuple[int, int], tile: Tile, known: Any = None
    ) -> tuple[Any, ...]:
        _, _, dot, s = self.weights(q, k, sink, place, tile)
        lse, delta = known
        with mock.patch.dict(FORMULAS, {} if self.is_double else {"tanh": lambda xp, x: xp.tanh(x) + 2.0**-21}):
            of_tanh = abs(self.weights(q, k, sink, place, tile)[3] - s) / EPS["float32"]
        finite = tile.kept & self.xp.isfinite(lse)
        rounded = self.xp.exp(s - lse) * (1 + abs(s) + abs(lse) + of_tanh)
        p = self.xp.where(finite, self.xp.ones_like(s) if self.flat else rounded, 0.0)
        size = p * (self.dropped(abs(do) @ abs(v).T, place, tile) + delta)
        self.gather(size, dot, place, tile)
        return p, size, lse[:, 0], delta[:, 0]

    def scatter(self, sums: Array, indices: tuple[Any, ...], parts: Any) -> None:
        super().scatter(sums, indices, abs(parts))


class OfTanh(Sizes):
    """The squares of what an error in tanh adds to the terms: kernels take it as 1 - 2 / (1 + exp 2x), so that it errs by 2^-21,
    however small it is itself."""

    def gather(self, gradients: Any, dot: Any, place: tuple[int, int], tile: Tile) -> None:
        score = self.score.of_lengths(*tile.lengths)
        exact = [*score.element_gradients(self.xp, dot, *place, tile.q, tile.kv)]
        with mock.patch.dict(FORMULAS, {"tanh": lambda xp, x: xp.tanh(x) + 2.0**-21}):
            moved = [*score.element_gradients(self.xp, dot, *place, tile.q, tile.kv)]
        for (i, indices, a), (_, _, b) in zip(exact, moved, strict=True):
            if i in self.sums:
                self.scatter(self.sums[i], indices, self.xp.where(tile.kept, (gradients * (b - a)) ** 2, 0.0))


class Expected(NamedTuple):
    """The gradients of some arrays, and the error that each number of them may have."""

    gradients: list[Array]
    errors: list[Array]

    def check(self, found: Sequence[Any]) -> None:
        assert len(found) == len(self.gradients)
        for i, (x, wanted, allowed) in enumerate(zip(found, self.gradients, self.errors, strict=True)):
            error = np.abs(to_numpy(x) - wanted)
            assert error.shape == wanted.shape
            worst = np.unravel_index(np.argmax(error - allowed), error.shape) if error.size else ()
            assert (error <= allowed).all(), (
                f"wrt[{i}]{worst}: {error[worst]:.3g} off {wanted[worst]:.3g}, {allowed[worst]:.3g} allowed"
            )


def expect(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, wrt: Sequence[Any], *, dlse: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None, score: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, operations: int = 0,
    **options: Any,
) -> Expected:  # fmt: skip
    """Returns what ``attention_backward`` must give for these arrays, from the o and lse that are given: these are rounded, but
    what is computed of them is not, so that an error is that of the sums, of the exponent, and of weights too small to be
    numbers. Each of the ``operations`` of a derivative that has many rounds, too, and each tanh in it errs (``OfTanh``)."""
    starts = cu_seqlens_q, cu_seqlens_kv
    seed = options.pop("seed", None)
    formula = make_formula(q, k, Options(**options, score=score), seed, starts=starts)
    own, captured = captures.take({"score": score})
    numbers = [int(name.rpartition("_")[2]) for name in captures.named_in(own, captured, tuple(wrt))]
    exact, size, reach, of_tanh = ({i: np.zeros(tuple(x.shape)) for i, x in zip(numbers, wrt, strict=True)} for _ in range(4))
    fields = {field.name: getattr(formula, field.name) for field in dataclasses.fields(Formula)}
    given = do, q, k, v, o, lse, dlse, starts, (q_lens, kv_lens)
    _add(dataclasses.replace(formula, sums=exact), *given, abs_delta=False)
    is_double = dtype_of(q) == "float64"
    _add(Sizes(**fields | {"sums": size, "is_double": is_double}), *given, abs_delta=True)
    _add(Sizes(**fields | {"sums": reach, "flat": True, "is_double": is_double}), *given, abs_delta=True)
    if operations and not is_double:
        _add(OfTanh(**fields | {"sums": of_tanh}), *given, abs_delta=True)
    eps, lost = (EPS["float64"], 0.0) if is_double else (EPS["float32"], LEAST_WEIGHT)
    rounds = (4 + operations / 2) * eps
    errors = [
        rounds * size[i] + 4 * of_tanh[i] ** 0.5 + lost * reach[i] + EPS[dtype_of(x)] * abs(exact[i]) + LEAST[dtype_of(x)]
        for i, x in zip(numbers, wrt, strict=True)
    ]
    return Expected([exact[i] for i in numbers], errors)


def _add(
    formula: Formula, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any, starts: Any, lens: Any, *, abs_delta: bool
) -> None:  # fmt: skip
    """Adds to the formula's sums the gradients of all sequences."""
    numbers = [cast(x, formula.dtype) for x in (do, o, lse)]
    own_dlse = 0 * numbers[2] if dlse is None else cast(dlse, formula.dtype)
    product = (abs(numbers[0] * numbers[1]) if abs_delta else numbers[0] * numbers[1]).sum(-1)
    delta = product.swapaxes(-1, -2) + (abs(own_dlse) if abs_delta else -own_dlse)
    with np.errstate(all="ignore"):
        for batch, rows, keys in formula._find_sequences(q, *starts):
            at = rows if isinstance(rows, int) else (slice(None), rows)
            n, m = (slice(None if each is None else int(each[batch])) for each in lens)
            inputs = do[rows][n], q[rows][n], k[keys][m], v[keys][m], own_dlse[at][:, n], [-INF] * q.shape[-2]
            outputs = [formula.xp.zeros(x.shape, dtype=formula.dtype, **formula.device) for x in inputs[1:4]]
            formula.backward_sequence((batch, 0), *inputs, *outputs, None, (numbers[2][at][:, n], delta[at][:, n]))


def floats(function: Any) -> tuple[Any, ...]:
    """The float arrays that a function captured, those of the functions that it calls with them."""
    own, captured = captures.take({"score": function})
    elements = [element for element, _ in own["score"].traced.code.arrays]
    return tuple(x for element, x in zip(elements, captured, strict=True) if element in captures.FLOATS)

"""This module tests kernels: a ``Case`` makes inputs, ``expect`` says what must come out, ``cases`` draws cases with Hypothesis.
``check_option`` tests a mask or a score of your own that is written in CUDA.

>>> @hypothesis.given(rawattn.testing.cases(dtypes=("bf16", "fp16"), layouts=("contiguous", "packed")))
... def test_mine(case):
...     inputs = case.inputs("torch", "cuda")
...     rawattn.testing.expect(*inputs, **case.options).check(mine(*inputs, **case.options))

Only ``cases`` needs Hypothesis.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import reference
from ..operation import Forward, functions
from ..operation.spec import Options, Spec
from ..reference.formula import Formula, Tile, make_formula
from ..variant import mask as masks
from ..variant import score as scores
from ..variant.element import ELEMENTS
from ..variant.mask import Mask
from ..variant.score import Score
from .option_checks import check_option as check_option

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Array = npt.NDArray[Any]
LAYOUTS = ("contiguous", "heads_first", "packed", "padded", "expanded", "reversed")
_OPTIONS = ("causal", "window", "mask", "softcap", "score", "scale", "q_offset", "kv_offset", "dropout")
MARGIN = 64  # elements of NaN before and after an array


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention operation with its data.

    ``lengths`` are (q_len, kv_len) of sequences that are packed end to end; they stand for batch, q_len and kv_len. ``layout`` is
    the order of q, k and v in memory, where all between and around their elements is NaN:

    - contiguous: (batch, length, heads, dim)
    - heads_first: (batch, heads, length, dim), transposed
    - packed: the middle of three times as many heads, as q, k and v are slices of one projection
    - padded: the first elements of rows that are 8 longer
    - expanded: all heads of k and v are one, repeated with a stride of 0
    - reversed: the rows backwards, with a negative stride; NumPy and CuPy only

    ``sinks`` says whether each query head has a sink. ``lens`` are q_lens and kv_lens, a number for each sequence, or None in
    place of either. ``seed`` is the seed of the data, and of dropout.
    """

    dtype: str = "bf16"
    batch: int = 1
    q_len: int = 128
    kv_len: int = 128
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: masks.Mask | None = None
    softcap: float | None = None
    score: scores.Score | None = None
    scale: float | None = None
    q_offset: int | None = None
    kv_offset: int | None = None
    dropout: float = 0.0
    sinks: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None
    layout: str = "contiguous"
    seed: int = 0
    lens: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)

    @property
    def name(self) -> str:
        """Returns what differs from the defaults, as a test's id."""
        changed = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{name}={value}" for name, value in changed) or "default"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``rawattn.attention``, ``attention_varlen`` and the reference that are not defaults. Sinks and
        the rows in use are NumPy arrays."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        options["sinks"] = self.sink_logits() if self.sinks else None
        options |= {"dropout": self.dropout, "seed": self.seed} if self.dropout else {"dropout": None}
        named = {name: value for name, value in options.items() if value is not None and value is not False}
        return named | self.used()

    @property
    def op(self) -> Forward:
        """The operation that ``rawattn.attention`` or ``attention_varlen`` makes of these arrays and options, with lse."""
        pairs = [(self.q_len, self.kv_len)] * self.batch if self.lengths is None else self.lengths
        q_lens, kv_lens = [q for q, _ in pairs], [kv for _, kv in pairs]
        packed = self.lengths is not None
        options = {name: value for name, value in self.options.items() if name in _OPTIONS}
        spec = Spec.of(**options, return_lse=True)
        return Forward(
            element=ELEMENTS[self.dtype], batch=len(pairs),
            q_len=max(q_lens, default=0) if packed else self.q_len, kv_len=max(kv_lens, default=0) if packed else self.kv_len,
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v, spec=spec,
            varlen=packed, total_q=sum(q_lens), total_kv=sum(kv_lens), sinks=self.sinks,
            q_lens=self.lens[0] is not None, kv_lens=self.lens[1] is not None,
        )  # fmt: skip

    def inputs(self, library: str = "numpy", device: Any = None) -> tuple[Any, ...]:
        """Makes q, k, v of N(0, 1), and cu_seqlens_q and cu_seqlens_kv, int32, where sequences are packed.

        ``library`` is "numpy", "torch" or "cupy", ``device`` torch's name of a device or CuPy's number. The numbers are the same
        everywhere.
        """
        rng, element = np.random.default_rng(self.seed), ELEMENTS[self.dtype]
        inputs = []
        sizes = ("q", self.heads, self.head_dim), ("k", self.kv_heads, self.head_dim), ("v", self.kv_heads, self.head_dim_v)
        dtype = np.float64 if self.dtype == "fp64" else np.float32
        for name, heads, dim in sizes:
            numbers = rng.standard_normal((*self._count_rows(name), heads, dim), dtype)
            inputs.append(place(numbers.astype(element.dtype), self._choose_layout(name), library, device))
        if self.lengths is not None:
            for lengths in zip(*self.lengths, strict=True) if self.lengths else ((), ()):
                inputs.append(_move(np.cumsum([0, *lengths], dtype=np.int32), library, device))
        return tuple(inputs)

    def sink_logits(self, library: str = "numpy", device: Any = None) -> Any:
        """Makes the sinks of N(0, 1) for each head of q, (heads,), in the dtype of lse."""
        numbers = np.random.default_rng((self.seed, 1)).standard_normal(self.heads, np.float32)
        return _move(numbers.astype(ELEMENTS[self.dtype].lse_dtype), library, device)

    def used(self, library: str = "numpy", device: Any = None) -> dict[str, Any]:
        """Returns q_lens and kv_lens, int32, where they are not None."""
        named = zip(("q_lens", "kv_lens"), self.lens, strict=True)
        return {name: _move(np.array(x, np.int32), library, device) for name, x in named if x is not None}

    def poison(self, of_q: Sequence[Any] = (), of_kv: Sequence[Any] = (), of_lse: Sequence[Any] = ()) -> None:
        """Writes NaN to all rows that are not used: of arrays with q's rows, with k's, and with lse's."""
        pairs = [(self.q_len, self.kv_len)] * self.batch if self.lengths is None else self.lengths
        for side, arrays in ((0, (*of_q, *(x.swapaxes(-1, -2) for x in of_lse))), (1, of_kv)):
            for i, used in enumerate(self.lens[side] or ()):
                start = 0 if self.lengths is None else sum(pair[side] for pair in pairs[:i])
                rows = slice(start + used, start + pairs[i][side])
                for x in arrays:
                    (x[i] if self.lengths is None else x)[rows] = float("nan")

    def output_gradients(self, library: str = "numpy", device: Any = None) -> tuple[Any, Any]:
        """Makes do in the layout of q, and dlse (batch, heads, q_len) or (heads, total_q) in the dtype of lse, of N(0, 1)."""
        rng, element, rows = np.random.default_rng((self.seed, 2)), ELEMENTS[self.dtype], self._count_rows("q")
        do = rng.standard_normal((*rows, self.heads, self.head_dim_v)).astype(element.dtype)
        dlse = rng.standard_normal((*rows[:-1], self.heads, rows[-1])).astype(element.lse_dtype)
        return place(do, self._choose_layout("q"), library, device), _move(dlse, library, device)

    def out(self, library: str = "numpy", device: Any = None) -> Any:
        """Makes memory for o, all NaN, in the layout of q."""
        nan = np.full((*self._count_rows("q"), self.heads, self.head_dim_v), np.nan, ELEMENTS[self.dtype].dtype)
        return place(nan, self._choose_layout("q"), library, device)

    def _count_rows(self, name: str) -> tuple[int, ...]:
        if self.lengths is not None:
            return (sum(pair[name != "q"] for pair in self.lengths),)
        return (self.batch, self.q_len if name == "q" else self.kv_len)

    def _choose_layout(self, name: str) -> str:
        return "contiguous" if self.layout == "expanded" and name == "q" else self.layout


def place(numbers: Array, layout: str, library: str = "numpy", device: Any = None) -> Any:
    """Places ``numbers`` (..., length, heads, dim) in an array of a library, in one of ``LAYOUTS``, with NaN in memory around."""
    *rows, heads, dim = numbers.shape
    stored: tuple[int, ...] = {
        "heads_first": (*rows[:-1], heads, rows[-1], dim),
        "packed": (*rows, 3 * heads, dim),
        "padded": (*rows, heads, dim + 8),
        "expanded": (*rows, 1, dim),
    }.get(layout, numbers.shape)

    def view(flat: Any) -> Any:
        body = flat[MARGIN : MARGIN + math.prod(stored)].reshape(stored)
        if layout == "heads_first":
            return body.swapaxes(-2, -3)
        if layout == "packed":
            return body[..., heads : 2 * heads, :]
        if layout == "padded":
            return body[..., :dim]
        return body[..., ::-1, :, :] if layout == "reversed" else body

    flat = np.full(2 * MARGIN + math.prod(stored), np.nan, numbers.dtype)
    view(flat)[...] = numbers[..., :1, :] if layout == "expanded" else numbers
    x = view(_move(flat, library, device))
    return sys.modules[library].broadcast_to(x, numbers.shape) if layout == "expanded" else x


def _move(x: Array, library: str, device: Any) -> Any:
    """Moves ``x``, contiguous, into an array of a library on a device."""
    if library == "torch":
        import torch

        dtype = getattr(torch, x.dtype.name) if x.dtype.isbuiltin == 2 else None  # a type of ml_dtypes
        bits = x if dtype is None else x.view(f"int{8 * x.itemsize}")
        return (torch.from_numpy(bits) if dtype is None else torch.from_numpy(bits).view(dtype)).to(device)
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(device):
            return cupy.asarray(x)
    return x


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results that attention must give: o and lse of the reference, and the largest error allowed in each: o_error (..., 1)
    in each row, lse_error in each number."""

    o: Array
    lse: Array
    o_error: Array
    lse_error: Array

    def check(self, o: Any, lse: Any = None) -> None:
        """Raises AssertionError where a result has NaN or inf in other places than the reference, or errs by more."""
        _check("o", o, self.o, self.o_error)
        if lse is not None:
            _check("lse", lse, self.lse, self.lse_error)


@dataclasses.dataclass(frozen=True)
class ExpectedBackward:
    """The results that a backward must give: the gradients of the reference by name, and the largest error allowed in each row of
    dq, dk and dv, (..., 1), and in each number of dsinks."""

    gradients: dict[str, Array]
    errors: dict[str, Array]

    def check(self, dq: Any, dk: Any, dv: Any, dsinks: Any = None) -> None:
        """Raises AssertionError where a gradient has NaN or inf in other places than the reference, or errs by more."""
        results = {"dq": dq, "dk": dk, "dv": dv} | ({} if dsinks is None else {"dsinks": dsinks})
        for name, result in results.items():
            _check(name, result, self.gradients[name], self.errors[name])


def _check(name: str, result: Any, wanted: Array, allowed: Array) -> None:
    result = _to_float64(result)
    assert result.shape == wanted.shape, f"{name} has shape {result.shape}; it must have {wanted.shape}"
    same = (result == wanted) | (np.isnan(result) & np.isnan(wanted)) | (np.isfinite(result) & np.isfinite(wanted))
    assert same.all(), _describe_error(name, result, wanted, ~same)
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(result - wanted))
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = error[wrong].max(), np.broadcast_to(allowed, error.shape)[wrong][error[wrong].argmax()]
        raise AssertionError(f"{_describe_error(name, result, wanted, wrong)}: off by {worst[0]:.3g}, allowed {worst[1]:.3g}")


def _describe_error(name: str, result: Array, wanted: Array, wrong: Array) -> str:
    first = tuple(np.argwhere(wrong)[0].tolist())
    return f"{name}{list(first)} is {result[first]}, not {wanted[first]} ({wrong.sum()} of {wrong.size} are wrong)"


@dataclasses.dataclass(frozen=True)
class _Sizes(Formula):
    """The formula on the sizes of its terms: each sum is the n-th root of the sum of its terms' n-th powers, in float64.

    A sum of terms that are each rounded errs in proportion to this with n = 2, since roundings are as often up as down, and one
    whose partial sums are rounded, with n = 1. ``gradients`` and ``sink_gradient`` give the n-th powers, as these are what adds
    up.
    """

    power: int = 2
    of_cap: bool = False  # in place of all terms, what an error of 2^-20 in tanh(s / cap) takes from them

    def attend(self, q: Any, k: Any, v: Any, sink: float, batch_head: tuple[int, int], tile: Tile) -> tuple[Any, Any]:
        """Computes the size of o, and in place of lse the mean size of the logits, the sink's with them."""
        p, lse, _, s = self.weights(q, k, sink, batch_head, tile)
        s = self.xp.where(self.xp.isfinite(s), abs(s), 0.0)
        s_size = self.xp.sum(p * s, axis=-1) + (self.xp.exp(sink - lse) * abs(sink) if math.isfinite(sink) else 0.0)
        p = self.dropped(p, batch_head, tile)
        return self._take_root(self.total(p**self.power, abs(v) ** self.power, tile.kept)), s_size

    def gradients(
        self, do: Any, q: Any, k: Any, v: Any, dlse: Any, sink: float, batch_head: tuple[int, int], tile: Tile,
        known: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        n, kept = self.power, tile.kept
        p, lse, dot, s = self.weights(q, k, sink, batch_head, tile)
        if n == 1:  # the exponent s - lse is rounded, and lse was when it was stored
            finite = kept & self.xp.isfinite(lse[:, None])
            p = self.xp.where(finite, p * (1 + (abs(s) + abs(lse[:, None])) / 4), 0.0)
        dropped = self.dropped(p, batch_head, tile)
        q_n, k_n, v_n, do_n, o_n = (abs(x) ** n for x in (q, k, v, do, self.total(dropped, v, kept)))
        delta = self._take_root(self.xp.sum(do_n * o_n, axis=-1, keepdims=True)) + abs(dlse)
        slope = self.slope(dot, batch_head, tile)
        if self.of_cap:
            slope = 2 * (1 - slope) * 2.0**-20  # 1 - t^2 errs by 2 t^2 times t's relative error, however small it is itself
        elif n == 1 and self.has_cap:
            slope = slope + 2 * (1 - slope)
        ds = self.scale * p * (self.dropped(self._take_root(do_n @ v_n.T), batch_head, tile) + delta)
        ds_n = self.xp.where(kept, abs(ds if slope is None else ds * slope) ** n, 0.0)
        dq, dk, dv = self.total(ds_n, k_n, kept), self.total(ds_n.T, q_n, kept.T), self.total((dropped**n).T, do_n, kept.T)
        return dq, dk, dv, lse, delta[:, 0]

    @property
    def has_cap(self) -> bool:
        return isinstance(getattr(self.score, "base", self.score), scores.Softcap)

    def sink_gradient(self, p: Any, delta: Any) -> Any:
        return self.xp.sum(abs(p * delta) ** self.power)

    def _take_root(self, x: Any) -> Any:
        return x ** (1 / self.power)


@dataclasses.dataclass(frozen=True)
class _Added(Formula):
    """The formula with the largest number that a score adds to a logit of the row, in place of lse."""

    def attend(self, q: Any, k: Any, v: Any, sink: float, batch_head: tuple[int, int], tile: Tile) -> tuple[Any, Any]:
        _, _, dot, s = self.weights(q, k, sink, batch_head, tile)
        added = self.xp.where(self.xp.isfinite(s), abs(s - dot), 0.0)
        return 0.0, self.xp.amax(added, axis=-1)


@dataclasses.dataclass(frozen=True)
class _Dots(Formula):
    """The formula with the mean size of the row's scaled dot products in place of lse, or of its logits where those are smaller,
    as under a cap. What a score adds to them is no sum of many terms, nor is a sink."""

    def attend(self, q: Any, k: Any, v: Any, sink: float, batch_head: tuple[int, int], tile: Tile) -> tuple[Any, Any]:
        p, _, dot, s = self.weights(q, k, sink, batch_head, tile)
        s, dot = abs(s), abs(dot)
        size = self.xp.where(s < dot, s, dot)
        return 0.0, self.xp.sum(p * self.xp.where(self.xp.isfinite(size), size, 0.0), axis=-1)


@dataclasses.dataclass(frozen=True)
class _Subnormal(Formula):
    """The formula on what is lost where weights, p and ds, are rounded to fp16 below its normal numbers: it gives the variances
    of dq, dk and dv.

    Such a weight w is rounded to a multiple of 2^-24. Its error is uniform within 2^-25, of variance 2^-50 / 3, and no more than
    |w| where w is lost whole."""

    def gradients(
        self, do: Any, q: Any, k: Any, v: Any, dlse: Any, sink: float, batch_head: tuple[int, int], tile: Tile,
        known: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        p, ds, lse, delta = self.weights_backward(do, q, k, v, dlse, sink, batch_head, tile, known)
        factor = 1.0 if self.dropout is None else self.dropout.option.factor  # after p is rounded
        p_variance, ds_variance = (
            self.xp.where(abs(x) < 2.0**-14 * a, self.xp.clip(x**2, 0.0, a * a * 2.0**-50 / 3), 0.0)
            for x, a in ((p, factor), (ds, 1.0))
        )
        ds_variance = ds_variance * self.scale**2
        total, kept = self.total, tile.kept
        return total(ds_variance, k**2, kept), total(ds_variance.T, q**2, kept.T), total(p_variance.T, do**2, kept.T), lse, delta


def expect(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, **options: Any) -> Expected:
    """Computes the reference's results for these arrays, and the error that is allowed, in the maximum norm of each row.

    The yardstick is the plain formula with logits and probabilities rounded to q's dtype. The largest ratio of its error in a row
    to the row's size, the root of the sum of its squared terms p |v|, is the same for all rows but for chance: o may err by twice
    this ratio times the row's size, and by 2 eps of the dtype times the row's largest element. In float32 and float64 the size is
    the sum of p |v|, for the rounding of the sums themselves, and it may err by 2 eps times this. The ratio counts there as at
    least 1.5 times what a dot product errs by if its n terms are added one after the other, as the plain formula may sum by
    blocks: sqrt(n / 24) eps times the root of the sum of their squares, 1 at least, or sqrt(n / 36) eps times the dot product
    where its partial sums drift.

    lse may err twice as much as the plain formula in float32, measured as for o, and by sqrt(head_dim) eps times its size:
    itself, the mean size of the row's logits, half the root of the sum of a dot product's squared terms, or 1. Under a score,
    16-bit formats have logits to 2^-18 of themselves, a hundredth of what rounding them takes. A score that is a function adds
    terms to logits, and may make a key's from another's, as slope * kv from slope * first: a logit may err by an eps of the
    row's largest. For float64 the plain formula is
    computed in float32 and its error scaled, and counts twice, as the reference errs like it. ``options`` are those of
    ``rawattn.attention``.
    """
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    tolerance = _Tolerance(q)
    o, lse = map(_to_float64, reference.attention(q, k, v, **options, return_lse=True))
    plain_o = _to_float64(reference.attention(q, k, v, **options, rounded=True))
    single = [x.float() if hasattr(x, "float") else x.astype("float32") for x in (q, k, v)]
    plain_lse = _to_float64(reference.attention(*single, **options, return_lse=True, rounded=True)[1])
    inputs = q, k, v, *_read_arrays(options), options.get("rows")
    o_size, s_size = map(_to_float64, _make_sizes(q, k, options, tolerance.power).forward(*inputs))
    lse_size = np.maximum(1.0, np.maximum(_keep_finite(np.abs(lse)), _keep_finite(s_size)))
    lse_error = 2 * tolerance.ratio(plain_lse, lse, lse_size) * lse_size
    dot_size = _measure_dots(q, k, options)
    # A dot product of n terms has n roundings, each uniform within 2^-24 of a partial sum. Partial sums grow like a random walk
    # to the root of the sum of squared terms (the size), and their squares add up to n / 2 of its square: the standard deviation
    # of the error is sqrt(n / 6) 2^-24 of the size. Half a 2^-23 is 2.4 of these. It counts where a row's weight is on one key.
    lse_error += q.shape[-1] ** 0.5 * 2.0**-23 * tolerance.scaled * np.maximum(lse_size, 0.5 * dot_size)
    if tolerance.is_16_bit and (options.get("softcap") is not None or options.get("score") is not None):
        lse_error += 2.0**-18 * np.abs(_keep_finite(s_size))
    if functions.is_function(options.get("score")):
        added = _Added(**_read_fields(_make_sizes(q, k, options, 1))).forward(*inputs)[1]
        lse_error += 2.0**-23 * tolerance.scaled * _keep_finite(_to_float64(added))
    least: Any = 0.0
    if not tolerance.is_16_bit:
        # As above, where partial sums do not drift to the dot product; else their squares add up to n / 3 of its square. A row
        # of o errs most where two keys with opposite values have half of its weight each: by 0.71 of a logit's deviation.
        # Three of these are allowed, which one such row of 45,000 surpasses.
        formula, logits = _make_sizes(q, k, options, 1), s_size
        if options.get("sinks") is not None or not isinstance(formula.score, scores.Scale):
            logits = _to_float64(_Dots(**_read_fields(formula)).forward(*inputs)[1])
        drift = np.maximum(np.maximum(1.0, dot_size), (2 / 3) ** 0.5 * _keep_finite(logits))
        least = 1.5 * (q.shape[-1] / 24) ** 0.5 * np.swapaxes(drift, -1, -2)[..., None]
    return Expected(o, lse, tolerance.rows(plain_o, o, o_size, least), lse_error)


def expect_backward(
    do: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *, dlse: Any = None, **options: Any
) -> ExpectedBackward:
    """Computes the reference's gradients for these arrays, and the error that is allowed, in the maximum norm of each row.

    As for o in ``expect``: twice the largest ratio of the plain rounded formula's error to a row's size, times the row's size,
    and 2 eps times its largest element. A global norm would assert nothing for most rows: under a causal mask the first rows of
    dk and dv are many times the last. The terms of dq and dk, whose sizes count, are p (|do.v| + |delta|), where |do.v| stands
    for the size of that sum; the difference cancels in them, but its error does not, so the ratio counts as half an eps at least.
    dsinks has no rows: each may err twice as much as in the plain formula and by eps times its size.

    Two errors do not shrink with what they are added to, and have terms of their own:

    - In fp16, p and ds below 2^-14, the least normal number, are rounded to multiples of 2^-24 (``_Subnormal``). Long rows,
      peaked ones and saturated caps have many. A gradient, their sum with do, k or q, may err by five standard deviations of the
      sum of these errors, which one of two million numbers surpasses. What they take from the plain formula counts in no ratio.
    - A cap's slope 1 - t^2, with t = tanh(s / cap), cancels near saturation: t errs by an eps of itself in float32 and float64,
      by 2^-20 in 16 bits (host/variant/test_contracts.py), and the slope by 2 t^2 times that, however small it is. In float32 and
      float64 2 t^2 is added to the slope's size; in 16 bits dq and dk may err by the size of these errors besides.
    """
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, "dlse": dlse}
    tolerance = _Tolerance(q)
    exact = [_to_float64(x) for x in reference.attention_backward(do, q, k, v, **options)]
    plain = [_to_float64(x) for x in reference.attention_backward(do, q, k, v, **options, rounded=True)]
    formula, names = _make_sizes(q, k, options, tolerance.power), ("dq", "dk", "dv", "dsinks")
    arguments = (do, q, k, v, dlse, *_read_arrays(options), (None, ()), (options.get("q_lens"), options.get("kv_lens")))
    sizes = [_to_float64(x) ** (1 / tolerance.power) for x in formula.backward(*arguments)]
    lost = [np.zeros(())] * 3
    if tolerance.is_fp16:
        subnormal = _Subnormal(**_read_fields(formula))
        lost = [5 * np.sqrt(_to_float64(x)) for x in subnormal.backward(*arguments)[:3]]
    if tolerance.is_16_bit and formula.has_cap:
        of_cap = dataclasses.replace(formula, of_cap=True).backward(*arguments)
        lost = [lost[i] + np.sqrt(_to_float64(of_cap[i])) for i in range(2)] + lost[2:]
    errors = {name: tolerance.rows(plain[i], exact[i], sizes[i], 0.5, lost[i]) for i, name in enumerate(names[:3])}
    if len(exact) > 3:
        errors["dsinks"] = (2 * tolerance.ratio(plain[3], exact[3], sizes[3]) + tolerance.eps) * sizes[3]
    return ExpectedBackward(dict(zip(names, exact, strict=False)), errors)


def _read_arrays(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    return options.get("sinks"), options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")


def _measure_dots(q: Any, k: Any, options: dict[str, Any]) -> Array:
    """Measures the root of the sum of the squared terms of scale q.k, in the mean over the keys; in the shape of lse. Numbers
    that are not finite count as 0: a mask may keep other rows from them."""
    scale = options.get("scale")
    rows = slice(None) if options.get("rows") is None else options["rows"]
    of_q, of_k = _keep_finite(_to_float64(q)[..., rows, :, :]) ** 2, _keep_finite(_to_float64(k)) ** 2
    keys = np.repeat(of_k.sum(-3, keepdims=True) / max(k.shape[-3], 1), q.shape[-2] // k.shape[-2], axis=-2)
    size = np.sqrt((of_q * keys).sum(-1))
    return abs(q.shape[-1] ** -0.5 if scale is None else scale) * np.swapaxes(size, -1, -2)


def _make_sizes(q: Any, k: Any, options: dict[str, Any], power: int) -> _Sizes:
    chosen = Options(**{name: options[name] for name in Options._fields if name in options})
    starts = options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")
    formula = make_formula(q, k, chosen, options.get("seed"), starts=starts)
    return _Sizes(**_read_fields(formula), power=power)


def _read_fields(formula: Formula) -> dict[str, Any]:
    return {field.name: getattr(formula, field.name) for field in dataclasses.fields(Formula)}


class _Tolerance:
    """The errors that the dtype of q allows."""

    def __init__(self, q: Any) -> None:
        dtype = str(q.dtype).rpartition(".")[2]
        self.eps = float(ml_dtypes.finfo(dtype).eps)
        self.least = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2  # what rounding takes from numbers below the normal
        self.is_16_bit, self.is_fp16 = "16" in dtype, dtype == "float16"
        self.power = 2 if self.is_16_bit else 1
        self.scaled = 2 * 2.0**-29 if dtype == "float64" else 1.0  # what the plain formula's error, in float32, counts

    def ratio(self, plain: Array, exact: Array, size: Array, lost: Any = 0.0) -> float:
        """Returns the largest error of the plain formula beyond ``lost``, in units of the size."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self.scaled * np.maximum(np.abs(plain - exact) - lost, 0.0) / size
        return float(ratio[np.isfinite(ratio)].max(initial=0.0))

    def rows(self, plain: Array, exact: Array, size: Array, least: Any = 0.0, lost: Any = 0.0) -> Array:
        """Returns how much each row of o or of a gradient may err; the ratio counts as at least ``least`` eps. ``lost`` is an
        error that no ratio tells."""
        size, lost = (_keep_finite(np.asarray(x)).max(-1, keepdims=True, initial=0.0) if np.ndim(x) else x for x in (size, lost))
        ratio = np.maximum(self.ratio(plain, exact, size, lost), least * self.eps)
        largest = _keep_finite(np.abs(exact)).max(-1, keepdims=True, initial=0.0) if self.is_16_bit else size
        return 2 * ratio * size + 2 * self.eps * largest + self.least + lost


def _keep_finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)


def _to_float64(x: Any) -> Array:
    if hasattr(x, "detach"):
        return x.detach().double().cpu().numpy()
    return (x.get() if hasattr(x, "get") else x).astype(np.float64)


def _draw_kinds(kinds: dict[str, dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    """Draws one of the kinds of keyword arguments, each as often as another."""
    from hypothesis import strategies as st

    strategies = {name: st.fixed_dictionaries(arguments) for name, arguments in kinds.items()}
    return st.sampled_from(list(strategies)).flatmap(strategies.__getitem__)


def _list_mask_kinds(side: SearchStrategy[int | None]) -> dict[str, dict[str, Any]]:
    """Lists strategies of the library's masks, by kind."""
    from hypothesis import strategies as st

    causal, window = st.just(True), st.tuples(side, side)
    top_left, band = st.just(masks.Causal("top_left")), st.builds(masks.Window, side, side, st.just("top_left"))
    return {
        "full": {}, "causal": {"causal": causal}, "top left": {"mask": top_left}, "window": {"window": window},
        "window, top left": {"mask": band}, "both": {"causal": causal, "window": window},
        "both, top left": {"mask": st.builds(masks.And, top_left, band)},
        "both, two alignments": {"mask": st.builds(masks.And, st.just(masks.Causal()), band)},
    }  # fmt: skip


def parts(pairs: Sequence[tuple[int, int]]) -> SearchStrategy[tuple[tuple[int, ...] | None, tuple[int, ...] | None]]:
    """Makes a Hypothesis strategy for ``Case.lens`` of sequences of these lengths: in half of the cases there are none."""
    from hypothesis import strategies as st

    sides = [st.tuples(*(st.sampled_from((0, n)) | st.integers(0, n) for n in side)) for side in zip(*pairs, strict=True)]
    q_lens, kv_lens = sides or (st.just(()), st.just(()))
    none: SearchStrategy[Any] = st.none()
    some = st.tuples(q_lens, kv_lens) | st.tuples(q_lens, none) | st.tuples(none, kv_lens)
    return st.booleans().flatmap(lambda is_cut: some if is_cut else st.just((None, None)))


AWKWARD = (0, 1, 5, 31, 37, 61, 65, 97, 127, 131)  # they divide no tile


def cases(
    dtypes: Sequence[str] = tuple(ELEMENTS), longest: int = 300, layouts: Sequence[str] = LAYOUTS,
    head_dims: Sequence[int] = (1, 8, 17, 33, 64, 72, 80, 96, 112, 128, 192, 256), packed: bool | None = None,
    sinks: bool | None = False, masks: Mapping[str, SearchStrategy[Mask]] = {}, scores: Mapping[str, SearchStrategy[Score]] = {},
    lens: bool = False,
) -> SearchStrategy[Case]:  # fmt: skip
    """Makes a Hypothesis strategy for cases over all that attention takes: lengths from 0 to ``longest``, equal or not, many of
    them of 16 at most, grouped heads, up to 128 for a key head where queries are few, all masks, softcap, scales of either sign,
    positions of the first rows. Each kind of mask and of score has an equal share. ``packed`` says whether sequences are packed
    and ``sinks`` whether heads have sinks, None for both. With ``lens`` half of the cases use a part of their rows. ``masks``
    and ``scores`` are masks and scores of your own, a strategy for each kind."""
    from hypothesis import strategies as st

    length = st.sampled_from(
        [n for n in (0, 1, 2, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257) if n <= longest]
    )
    length = length | st.integers(0, longest) | st.integers(0, min(16, longest))
    side = st.none() | st.integers(0, longest) | st.sampled_from([n for n in AWKWARD if n <= longest])
    mask = _draw_kinds({name: {"mask": kind} for name, kind in masks.items()} | _list_mask_kinds(side))
    score = _draw_kinds(
        {name: {"score": kind} for name, kind in scores.items()} | {"none": {}, "cap": {"softcap": st.floats(0.5, 50.0)}}
    )
    position = st.integers(0, longest)
    offsets = st.just({}) | st.just({}) | st.fixed_dictionaries({"q_offset": position, "kv_offset": position})

    @st.composite
    def case(draw: Any) -> Case:
        is_packed = draw(st.booleans()) if packed is None else packed
        same = draw(st.booleans())  # lengths of q and k
        pair = length.map(lambda n: (n, n)) if same else st.tuples(length, length)
        lengths = tuple(draw(st.lists(pair, min_size=0, max_size=4))) if is_packed else None
        q_len, kv_len = (128, 128) if is_packed else draw(pair)
        kv_heads, head_dim = draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from(head_dims))
        batch = 1 if is_packed else draw(st.integers(1, 2))
        pairs = [(q_len, kv_len)] * batch if lengths is None else lengths
        return Case(
            dtype=draw(st.sampled_from(dtypes)), batch=batch, q_len=q_len, kv_len=kv_len,
            lens=draw(parts(pairs)) if lens else (None, None),
            heads=kv_heads * draw(st.sampled_from((1, 1, 2, 3, 4) + (8, 33, 128) * (sum(q for q, _ in pairs) <= 16))),
            kv_heads=kv_heads, head_dim=head_dim, head_dim_v=draw(st.sampled_from(head_dims)),
            scale=draw(st.none() | st.sampled_from((-1.0, -0.5, 0.0, 0.5)).map(lambda x: x / head_dim**0.5)),
            lengths=lengths, layout=draw(st.sampled_from(layouts)), sinks=draw(st.booleans()) if sinks is None else sinks,
            seed=draw(st.integers(0, 2**32 - 1)), **draw(mask), **draw(score), **draw(offsets),
        )  # fmt: skip

    return case()

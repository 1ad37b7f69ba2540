"""Problems to test with: a ``Case`` makes inputs, ``expect`` says what must come out, ``cases`` draws cases with Hypothesis.

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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from . import reference
from .operation import Forward
from .spec import Spec
from .variant import mask as masks
from .variant.element import ELEMENTS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Array = npt.NDArray[Any]
LAYOUTS = ("contiguous", "heads_first", "packed", "padded", "expanded", "reversed")
MARGIN = 64  # elements of NaN before and after an array


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem with its data.

    ``lengths`` are (q_len, kv_len) of sequences that are packed end to end; they stand for batch, q_len and kv_len. ``layout`` is
    how q, k and v lie in memory, where all that lies between and beside their elements is NaN:

    - contiguous: (batch, length, heads, dim)
    - heads_first: (batch, heads, length, dim), transposed
    - packed: the middle of three times as many heads, as q, k and v are slices of one projection
    - padded: the first elements of rows that are 8 longer
    - expanded: all heads of k and v are one, repeated with a stride of 0
    - reversed: the rows backwards, with a negative stride; NumPy and CuPy only
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
    scale: float | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    layout: str = "contiguous"
    seed: int = 0

    @property
    def name(self) -> str:
        """What differs from the defaults, as a test's id."""
        changed = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{name}={value}" for name, value in changed) or "default"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``rawattn.attention``, ``attention_varlen`` and the reference; those that are not defaults."""
        options = {name: getattr(self, name) for name in ("causal", "window", "mask", "softcap", "scale")}
        return {name: value for name, value in options.items() if value is not None and value is not False}

    @property
    def op(self) -> Forward:
        """The operation that ``rawattn.attention`` or ``attention_varlen`` makes of these arrays and options, with lse."""
        pairs = [(self.q_len, self.kv_len)] * self.batch if self.lengths is None else self.lengths
        q_lens, kv_lens = [q for q, _ in pairs], [kv for _, kv in pairs]
        packed = self.lengths is not None
        spec = Spec.of(**self.options, return_lse=True)
        return Forward(
            element=ELEMENTS[self.dtype], batch=len(pairs),
            q_len=max(q_lens, default=0) if packed else self.q_len, kv_len=max(kv_lens, default=0) if packed else self.kv_len,
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v, spec=spec,
            varlen=packed, total_q=sum(q_lens), total_kv=sum(kv_lens),
        )  # fmt: skip

    def inputs(self, library: str = "numpy", device: Any = None) -> tuple[Any, ...]:
        """q, k, v of N(0, 1), and cu_seqlens_q and cu_seqlens_kv, int32, where sequences are packed.

        ``library`` is "numpy", "torch" or "cupy", ``device`` torch's name of a device or CuPy's number. The numbers are the same
        everywhere.
        """
        rng, element = np.random.default_rng(self.seed), ELEMENTS[self.dtype]
        found = []
        for name, heads, dim in (
            ("q", self.heads, self.head_dim),
            ("k", self.kv_heads, self.head_dim),
            ("v", self.kv_heads, self.head_dim_v),
        ):
            numbers = rng.standard_normal((*self._rows(name), heads, dim), np.float64 if self.dtype == "fp64" else np.float32)
            found.append(place(numbers.astype(element.dtype), self._layout(name), library, device))
        if self.lengths is not None:
            for lengths in zip(*self.lengths, strict=True) if self.lengths else ((), ()):
                found.append(_moved(np.cumsum([0, *lengths], dtype=np.int32), library, device))
        return tuple(found)

    def out(self, library: str = "numpy", device: Any = None) -> Any:
        """Memory for o, all NaN, in the layout of q."""
        nan = np.full((*self._rows("q"), self.heads, self.head_dim_v), np.nan, ELEMENTS[self.dtype].dtype)
        return place(nan, self._layout("q"), library, device)

    def _rows(self, name: str) -> tuple[int, ...]:
        if self.lengths is not None:
            return (sum(pair[name != "q"] for pair in self.lengths),)
        return (self.batch, self.q_len if name == "q" else self.kv_len)

    def _layout(self, name: str) -> str:
        return "contiguous" if self.layout == "expanded" and name == "q" else self.layout


def place(numbers: Array, layout: str, library: str = "numpy", device: Any = None) -> Any:
    """``numbers`` (..., length, heads, dim) as an array of a library, in one of ``LAYOUTS``, with NaN in the memory around."""
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
    found = view(_moved(flat, library, device))
    return sys.modules[library].broadcast_to(found, numbers.shape) if layout == "expanded" else found


def _moved(x: Array, library: str, device: Any) -> Any:
    """``x``, contiguous, as an array of a library on a device."""
    if library == "torch":
        import torch

        bf16 = x.dtype == ELEMENTS["bf16"].dtype
        return (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if bf16 else torch.from_numpy(x)).to(device)
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(device):
            return cupy.asarray(x)
    return x


@dataclasses.dataclass(frozen=True)
class Expected:
    """What attention must give: o and lse of the reference, and the largest error allowed in each, anywhere."""

    o: Array
    lse: Array
    o_error: float
    lse_error: float

    def check(self, o: Any, lse: Any = None) -> None:
        """Raises AssertionError where a result has NaN or inf in other places than the reference, or errs by more."""
        for name, found, wanted, allowed in (("o", o, self.o, self.o_error), ("lse", lse, self.lse, self.lse_error)):
            if found is None:
                continue
            found = _float64(found)
            assert found.shape == wanted.shape, f"{name} has shape {found.shape}; it must have {wanted.shape}"
            same = (found == wanted) | (np.isnan(found) & np.isnan(wanted)) | (np.isfinite(found) & np.isfinite(wanted))
            assert same.all(), _at(name, found, wanted, ~same)
            with np.errstate(invalid="ignore"):
                error = np.nan_to_num(np.abs(found - wanted))
            assert (error <= allowed).all(), (
                f"{_at(name, found, wanted, error > allowed)}: off by {error.max():.3g}, allowed {allowed:.3g}"
            )


def _at(name: str, found: Array, wanted: Array, wrong: Array) -> str:
    first = tuple(np.argwhere(wrong)[0].tolist())
    return f"{name}{list(first)} is {found[first]}, not {wanted[first]} ({wrong.sum()} of {wrong.size} are wrong)"


def expect(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, **options: Any) -> Expected:
    """The reference for these arrays, and the error that is allowed, in the maximum norm.

    o may err twice as much as the plain formula with logits and probabilities rounded to q's dtype, and by 2 eps of that dtype
    times its largest element (in float32 and float64 times the largest sum of p |v|, for the rounding of the sums themselves);
    lse twice as much as the plain formula in float32, and by sqrt(head_dim) eps times its largest element, softcap, or 1. For
    float64 the plain formula is computed in float32 and its error scaled, and counts twice, as the reference errs like it.
    ``options`` are those of ``rawattn.attention``.
    """
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, "return_lse": True}
    single = [x.float() if hasattr(x, "float") else x.astype("float32") for x in (q, k, v)]
    o, lse = map(_float64, reference.attention(q, k, v, **options))
    plain_o = _float64(reference.rounded(q, k, v, **options)[0])
    size, plain_lse = map(_float64, reference.rounded(single[0], single[1], abs(single[2]), **options))
    dtype = str(q.dtype).rpartition(".")[2]
    ratio = 2 * 2.0**-29 if dtype == "float64" else 1.0
    with np.errstate(invalid="ignore"):
        o_error = 2 * ratio * _norm(plain_o - o) + 2 * float(ml_dtypes.finfo(dtype).eps) * _norm(o if "16" in dtype else size)
        lse_error = 2 * ratio * _norm(plain_lse - lse) + q.shape[-1] ** 0.5 * 2.0**-23 * ratio * max(
            1.0, _norm(lse), options.get("softcap") or 0.0
        )
    return Expected(o, lse, o_error, lse_error)


def _norm(x: Array) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _float64(x: Any) -> Array:
    if hasattr(x, "detach"):
        return x.detach().double().cpu().numpy()
    return (x.get() if hasattr(x, "get") else x).astype(np.float64)


def cases(
    dtypes: Sequence[str] = tuple(ELEMENTS), longest: int = 300, layouts: Sequence[str] = LAYOUTS,
    head_dims: Sequence[int] = (1, 8, 17, 33, 64, 72, 80, 96, 112, 128, 192, 256), packed: bool | None = None,
) -> SearchStrategy[Case]:  # fmt: skip
    """A Hypothesis strategy for cases over everything that attention takes: lengths from 0 to ``longest``, equal or not, grouped
    heads, all masks, softcap, scales of either sign. ``packed`` says whether sequences are packed, None for both."""
    from hypothesis import strategies as st

    length = st.sampled_from(
        [n for n in (0, 1, 2, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257) if n <= longest]
    )
    length = length | st.integers(0, longest)
    side = st.none() | st.integers(0, longest)
    window = st.tuples(side, side)
    top_left, band = st.just(masks.Causal("top_left")), st.builds(masks.Window, side, side, st.just("top_left"))
    shorthand = st.fixed_dictionaries({}, optional={"causal": st.just(True), "window": window})
    mask = shorthand | st.fixed_dictionaries({"mask": top_left | band | st.builds(masks.Both, top_left, band)})

    @st.composite
    def case(draw: Any) -> Case:
        is_packed = draw(st.booleans()) if packed is None else packed
        same = draw(st.booleans())  # lengths of q and k
        pair = length.map(lambda n: (n, n)) if same else st.tuples(length, length)
        lengths = tuple(draw(st.lists(pair, min_size=0, max_size=4))) if is_packed else None
        q_len, kv_len = (128, 128) if is_packed else draw(pair)
        kv_heads, head_dim = draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from(head_dims))
        return Case(
            dtype=draw(st.sampled_from(dtypes)), batch=1 if is_packed else draw(st.integers(1, 2)), q_len=q_len, kv_len=kv_len,
            heads=kv_heads * draw(st.sampled_from((1, 1, 2, 3, 4))), kv_heads=kv_heads, head_dim=head_dim,
            head_dim_v=draw(st.sampled_from(head_dims)), softcap=draw(st.none() | st.floats(0.5, 50.0)),
            scale=draw(st.none() | st.sampled_from((-1.0, -0.5, 0.0, 0.5)).map(lambda x: x / head_dim**0.5)),
            lengths=lengths, layout=draw(st.sampled_from(layouts)), seed=draw(st.integers(0, 2**32 - 1)), **draw(mask),
        )  # fmt: skip

    return case()

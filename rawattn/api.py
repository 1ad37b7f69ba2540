"""The public calls: each reads its arrays, finds or makes the plan, and runs it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

from . import arrays
from . import plan as plans
from .arrays import Array
from .errors import ProblemError, SlowKernelWarning
from .plan import Bound, Inputs, Plan
from .problem import Problem, make_mask, make_scale, make_score
from .select import Selection, select
from .tma import tma_unsupported_reason, unaligned_reason
from .variant.element import ELEMENTS
from .variant.mask import Mask
from .variant.score import Score

Window = tuple[int | None, int | None]
KEPT_PLANS = 4096
_plans: dict[Any, Plan] = {}
_bounds: dict[Any, Bound] = {}


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window | None = None, softcap: float | None = None,
    scale: float | None = None, mask: Mask | None = None, score: Score | None = None, out: Any = None, return_lse: bool = False,
    constant_time: bool = False, kernel: str | None = None, config: Any = None,
) -> Any:  # fmt: skip
    """softmax(mask(score(q k^T))) v, for each batch and head.

    >>> o = rawattn.attention(q, k, v, causal=True)

    Args:
        q: (batch, q_len, heads, head_dim), bf16, fp16, fp32 or fp64: a torch tensor, CuPy, NumPy or Numba array, or anything with
            ``__dlpack__``. The last dimension is contiguous; the other strides are free. Nothing is copied or converted.
        k: (batch, kv_len, kv_heads, head_dim); heads is a multiple of kv_heads, query head h reads head h // (heads / kv_heads).
        v: (batch, kv_len, kv_heads, head_dim_v).
        causal: keep keys up to the query's own position, the last query standing at the last key, as in flash-attn; for torch's
            alignment give ``mask=rawattn.mask.Causal(align="top_left")``.
        window: (left, right), keys kept before and after the query's own position; None for unbounded.
        softcap: cap of the logits, softcap * tanh(logit / softcap).
        scale: factor on q.k; 1 / sqrt(head_dim) by default.
        mask, score: choices from ``rawattn.mask`` and ``rawattn.score`` instead of the shorthands above.
        out: receives the result; of q's library, dtype and device, (batch, q_len, heads, head_dim_v), apart from the inputs.
        return_lse: give (o, lse) with the natural logarithm of each row's sum of exponentials.
        constant_time: take kernels that execute the same instructions whatever the numbers in q, k and v are: no branch and no
            address depends on one. For bf16, fp16 and fp32 on a GPU; 11 to 22 % slower at length 4096 on an H200, more with
            softcap.
            The time still follows from shapes, strides, masks and other options, and with packed sequences from their lengths.
            Not covered: a score of your own, and what the chip does by itself, namely power, which constants such as 0 save, the
            clock rate that follows it, and the state of the L2 cache. ``perf.prove`` tests the time.
        kernel, config: instead of the choice that ``rawattn.explain`` shows.

    Returns:
        o, (batch, q_len, heads, head_dim_v), in q's dtype and library, on its device and the library's current stream; with
        ``return_lse`` also lse, float32 (float64 for fp64 inputs), (batch, heads, q_len).

    A query that keeps no key gives o = 0 and lse = -inf. NaN or inf beyond a sequence's end, or in k where the mask keeps no key,
    reaches no result; a non-finite v that is masked for a query may reach it if a query in the same tile keeps keys near it
    (0 x NaN is NaN). The same inputs give the same bits on every run.

    Raises:
        ProblemError: an argument is wrong; the message names it and what is needed.
        UnsupportedError: no kernel computes this on the arrays' device; the message has every kernel's reason.

    The formula is equation 1 of arXiv 1706.03762, computed as in FlashAttention 3 (arXiv 2407.08608); the specification in array
    operations is ``rawattn.reference.attention``.
    """
    options = (causal, window, softcap, scale, mask, score, return_lse, constant_time, kernel, config)
    return _run((q, k, v), None, options, out)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, max_seqlen_q: int, max_seqlen_kv: int, *, causal: bool = False,
    window: Window | None = None, softcap: float | None = None, scale: float | None = None, mask: Mask | None = None,
    score: Score | None = None, out: Any = None, return_lse: bool = False, constant_time: bool = False, kernel: str | None = None,
    config: Any = None,
) -> Any:  # fmt: skip
    """``attention`` on sequences of different lengths, packed end to end.

    >>> o = rawattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)

    Args:
        q: (total_q, heads, head_dim). k: (total_kv, kv_heads, head_dim). v: (total_kv, kv_heads, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,), in q's library and on its device: sequence i has query rows cu_seqlens_q[i] to
            cu_seqlens_q[i + 1]. Starts with 0 and never falls; sequences may be empty. Rows past its last value are left as they
            are in o. On a GPU the values are not checked, since that would wait for the device.
        cu_seqlens_kv: the same for the rows of k and v.
        max_seqlen_q, max_seqlen_kv: the longest lengths, or any bound on them; they guide the choice of tiles, no result depends
            on them.
        The rest as in ``attention``.

    Returns:
        o, (total_q, heads, head_dim_v); with ``return_lse`` also lse, (heads, total_q). Each sequence's result is what
        ``attention`` gives for it alone.
    """
    options = (causal, window, softcap, scale, mask, score, return_lse, constant_time, kernel, config)
    return _run((q, k, v, cu_seqlens_q, cu_seqlens_kv), (max_seqlen_q, max_seqlen_kv), options, out)


def plan(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *, causal: bool = False, window: Window | None = None, softcap: float | None = None,
    scale: float | None = None, mask: Mask | None = None, score: Score | None = None, return_lse: bool = False,
    constant_time: bool = False, kernel: str | None = None, config: Any = None, on_compile: Callable[[], None] | None = None,
) -> Plan:  # fmt: skip
    """The plan for arrays like these, compiled and loaded: ``plan.run(q, k, v)`` then costs the least a call can cost.

    >>> p = rawattn.plan(q, k, v, causal=True)
    >>> o = p.run(q, k, v)

    Arguments as in ``attention`` and, where ``cu_seqlens_q`` is given, ``attention_varlen`` (the maximal lengths default to the
    total rows). ``on_compile`` is called before NVRTC runs, which takes about a second; a cached kernel does not need it.
    """
    options = (causal, window, softcap, scale, mask, score, return_lse, constant_time, kernel, config)
    return _plan(*_inputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv), options, on_compile)


def explain(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *, causal: bool = False, window: Window | None = None, softcap: float | None = None,
    scale: float | None = None, mask: Mask | None = None, score: Score | None = None, return_lse: bool = False,
    constant_time: bool = False, kernel: str | None = None, config: Any = None,
) -> Explanation:  # fmt: skip
    """What ``attention`` would run for these arrays, and why, without compiling or running it. Print the result.

    >>> print(rawattn.explain(q, k, v, causal=True))
    """
    inputs, lengths = _inputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    options = (causal, window, softcap, scale, mask, score, return_lse, constant_time, kernel, config)
    problem = make_problem(inputs, lengths, *options[:8])
    device = plans.device_of(inputs.q)
    return Explanation(problem, device.name, select(problem, device, kernel, config))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A problem and the choice that was made for it; ``str`` of it is for people."""

    problem: Problem
    device: str
    choice: Selection

    def __str__(self) -> str:
        problem, choice = self.problem, self.choice
        lines = [f"problem  {problem}", f"device   {self.device}", f"kernel   {choice.kernel.name}"]
        lines += [f"  not {name}: {reason}" for name, reason in choice.refusals]
        lines += [f"config   {choice.config}", f"  {choice.why}"]
        lines += [f"work     {problem.flops:.4g} FLOP, at least {problem.bytes:.4g} bytes"]
        return "\n".join(lines)


def make_problem(
    inputs: Inputs, lengths: tuple[int, int] | None, causal: bool, window: Window | None, softcap: float | None,
    scale: float | None, mask: Mask | None, score: Score | None, return_lse: bool, constant_time: bool,
) -> Problem:  # fmt: skip
    """The problem that arrays and options pose. Raises ProblemError where they contradict each other."""
    q, k, v = inputs[:3]
    rank = 3 if lengths is not None else 4
    order = "(total, heads, head_dim)" if rank == 3 else "(batch, length, heads, head_dim)"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != rank:
            raise ProblemError(f"{name} has {len(array.shape)} dimensions, {tuple(array.shape)}; it must have {rank}, {order}.")
        _check_like(name, array, q)
        if array.dtype not in ELEMENTS:
            raise ProblemError(f"{name} has dtype {array.dtype}; it must be bf16, fp16, fp32 or fp64.")
        if array.dtype != q.dtype:
            raise ProblemError(f"{name} has dtype {array.dtype} but q has {q.dtype}; they must be the same.")
        if array.shape[-1] > 1 and array.strides[-1] != 1 and 0 not in array.shape:
            raise ProblemError(f"{name} has a stride of {array.strides[-1]} in its last dimension; it must be 1 (contiguous).")
    *_, heads, head_dim = q.shape
    if k.shape[-1] != head_dim:
        raise ProblemError(f"k has head_dim {k.shape[-1]} but q has {head_dim}; give k head_dim {head_dim}.")
    if v.shape[:-1] != k.shape[:-1]:
        raise ProblemError(f"v has shape {tuple(v.shape)} but k {tuple(k.shape)}; all but the last dimension must be the same.")
    if rank == 4 and k.shape[0] != q.shape[0]:
        raise ProblemError(f"k has batch {k.shape[0]} but q has {q.shape[0]}; they must be the same.")
    batch, q_len, kv_len = (q.shape[0], q.shape[1], k.shape[1]) if lengths is None else (_batch(inputs), *_lengths(lengths))
    element = ELEMENTS[q.dtype]
    named = (("q", q), ("k", k), ("v", v))
    places = [(n, x.shape, x.strides, element.itemsize, x.pointer) for n, x in named if x.device != arrays.CPU]
    for option, value in (("return_lse", return_lse), ("constant_time", constant_time)):
        if not isinstance(value, bool):
            raise ProblemError(f"{option} is {value!r}; it must be True or False.")
    return Problem(
        element=element, batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=k.shape[-2], head_dim=head_dim,
        head_dim_v=v.shape[-1], scale=make_scale(scale, head_dim), mask=make_mask(causal, window, mask),
        score=make_score(softcap, score), varlen=lengths is not None, total_q=q.shape[0], total_kv=k.shape[0],
        return_lse=return_lse, constant_time=constant_time, tma_unsupported_reason=next(filter(None, (tma_unsupported_reason(*x) for x in places)), None),
        unaligned_reason=next(filter(None, (unaligned_reason(*x) for x in places)), None),
    )  # fmt: skip


def _check_like(name: str, array: Array, q: Array) -> None:
    if array.library != q.library:
        raise ProblemError(f"{name} is a {array.library} array but q a {q.library} one; give all arrays from one library.")
    if array.device != q.device:
        places = ["the CPU" if x.device == arrays.CPU else f"GPU {x.device}" for x in (array, q)]
        raise ProblemError(f"{name} is on {places[0]} but q is on {places[1]}; put all arrays on one device.")


def _batch(inputs: Inputs) -> int:
    """The number of packed sequences."""
    sizes = []
    for name, array in (("cu_seqlens_q", inputs.cu_seqlens_q), ("cu_seqlens_kv", inputs.cu_seqlens_kv)):
        assert array is not None
        _check_like(name, array, inputs.q)
        if array.dtype != "int32":
            raise ProblemError(f"{name} has dtype {array.dtype}; it must be int32.")
        if len(array.shape) != 1 or array.shape[0] < 1:
            raise ProblemError(f"{name} has shape {tuple(array.shape)}; it must be (batch + 1,).")
        if array.shape[0] > 1 and array.strides[0] != 1:
            raise ProblemError(f"{name} has a stride of {array.strides[0]}; it must be contiguous.")
        sizes.append(array.shape[0] - 1)
    if sizes[0] != sizes[1]:
        raise ProblemError(f"cu_seqlens_q is for {sizes[0]} sequences but cu_seqlens_kv for {sizes[1]}; they must be as many.")
    return sizes[0]


def _lengths(lengths: tuple[int, int]) -> tuple[int, int]:
    for name, length in zip(("max_seqlen_q", "max_seqlen_kv"), lengths, strict=True):
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise ProblemError(f"{name} is {length!r}; it must be an int >= 0.")
        if length < 0:
            raise ProblemError(f"{name} is {length}; it must be >= 0.")
    return int(lengths[0]), int(lengths[1])


def _inputs(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, max_seqlen_q: int | None, max_seqlen_kv: int | None
) -> tuple[Inputs, tuple[int, int] | None]:
    found = Inputs(arrays.read(q, "q"), arrays.read(k, "k"), arrays.read(v, "v"))
    if cu_seqlens_q is None and cu_seqlens_kv is None:
        if max_seqlen_q is not None or max_seqlen_kv is not None:
            raise ProblemError("max_seqlen_q or max_seqlen_kv was given without cu_seqlens_q and cu_seqlens_kv.")
        return found, None
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if value is None:
            raise ProblemError(f"{name} is missing; packed sequences need cu_seqlens_q and cu_seqlens_kv.")
    found = found._replace(
        cu_seqlens_q=arrays.read(cu_seqlens_q, "cu_seqlens_q"), cu_seqlens_kv=arrays.read(cu_seqlens_kv, "cu_seqlens_kv")
    )
    longest = [x.shape[0] if len(x.shape) else 0 for x in found[:2]]
    return found, (longest[0] if max_seqlen_q is None else max_seqlen_q, longest[1] if max_seqlen_kv is None else max_seqlen_kv)


def _key(options: tuple[Any, ...], lengths: tuple[int, int] | None) -> Any:
    """What tells options from others, with their types: True, 1 and 1.0 are equal, but not all of them are right."""
    window = options[1]
    if isinstance(window, (tuple, list)):
        options = (options[0], (*window, *map(type, window)), *options[2:])
    return options, tuple(map(type, options)), lengths and (lengths, *map(type, lengths))


def _plan(
    inputs: Inputs, lengths: tuple[int, int] | None, options: tuple[Any, ...], on_compile: Callable[[], None] | None = None
) -> Plan:
    if arrays.requires_grad(*(x.object for x in inputs[:3])):
        raise ProblemError(plans.NO_GRAD)
    try:
        # What the plan binds of each array; strides and alignment decide only whether a kernel refuses.
        key: Any = (_key(options, lengths), *[x and (*x[:5], x.pointer % 16) for x in inputs])
        found = _plans.get(key)
    except TypeError:  # an option that cannot be hashed is a wrong one
        found, key = None, None
    if found is None:
        *rest, kernel, config = options
        problem = make_problem(inputs, lengths, *rest)
        device = plans.device_of(inputs.q)
        choice = select(problem, device, kernel, config)
        if choice.slow is not None:
            _warn_once(choice.slow)
        found = Plan(problem, device, choice, inputs.q.library, on_compile)
        if key is not None:
            plans.keep(_plans, key, found, KEPT_PLANS)
    return found


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, SlowKernelWarning, stacklevel=5)


def _run(given: tuple[Any, ...], lengths: tuple[int, int] | None, options: tuple[Any, ...], out: Any) -> Any:
    signatures = plans.signatures(given)
    try:
        key: Any = (signatures, _key(options, lengths))
        bound = _bounds.get(key)
    except TypeError:  # as above
        key, bound = None, None
    if bound is None:
        inputs = Inputs(*map(arrays.read, given, plans.INPUTS))
        bound = _plan(inputs, lengths, options).bind(inputs)
        if bound.lasts and key is not None and None not in signatures:
            plans.keep(_bounds, key, bound, KEPT_PLANS)
    return bound(given[0], out)

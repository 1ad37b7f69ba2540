"""The public calls: each reads its arrays, finds or makes the plan, and runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import arguments, arrays, driver, functions
from .arguments import Nothing, Unpack
from .arrays import Array
from .device import Device
from .eager import eager
from .errors import LayoutWarning, ProblemError, brief
from .operation import Backward, Forward, Operation, from_json
from .operation.forward import layout_doubt
from .plans import NO_GRAD, CpuCall, GpuCall, Numbered, Plan, cache_put, device_of, load_all, one_or_all, spared_capture
from .program import Program
from .select import Selection, select, warn_once
from .spec import Window, is_int, make_dropout
from .tile_classes import TileClasses, count
from .variant.mask import Mask
from .variant.score import Score
from .variant.walk import lists

MaskLike = Mask | Callable[..., Any]
ScoreLike = Score | Callable[..., Any]
KEPT_PLANS, KEPT_CALLS, KEPT_ASKED = 4096, 1024, 1024
OPTIONS = (
    "causal", "window", "softcap", "scale", "mask", "score", "return_lse", "constant_time", "deterministic", "q_offset",
    "kv_offset", "dropout", "invariant",
)  # fmt: skip
_WINDOW, _MASK, _SCORE = map(OPTIONS.index, ("window", "mask", "score"))  # a call's options are a tuple: it is its key
NO_LENGTHS = (None, None)
_plans: dict[Any, Plan] = {}
_families: dict[Any, GpuCall] = {}
_layouts: dict[Any, Any] = {}  # GpuCall, and CpuCall where there are no functions
_calls: dict[Any, Any] = {}
_logged: set[Any] = set()
_torch_op: Any = None  # the module torch_op, from the first call on where torch is loaded


def attention(
    q: Any, k: Any, v: Any, *beyond: Unpack[tuple[()]], causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None,
    alibi: Any = None, bias: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, out: Any = None,
    return_lse: bool = False, constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None,
    kv_offset: int | None = None, dropout: float = 0, seed: Any = None, invariant: bool = False, kernel: str | None = None,
    config: Any = None, **unknown: Unpack[Nothing],
) -> Any:  # fmt: skip
    """softmax(mask(score(q k^T))) v, for each batch and head (arXiv 1706.03762, equation 1); ``rawattn.reference`` specifies it.

    >>> o = rawattn.attention(q, k, v, causal=True)

    Args:
        q: (batch, q_len, heads, head_dim), bf16, fp16, fp32 or fp64: a torch tensor, CuPy, NumPy or Numba array, or anything with
            ``__dlpack__``. The last dimension is contiguous; the other strides are free. Nothing is copied or converted.
        k, v: (batch, kv_len, kv_heads, head_dim), v with head_dim_v; query head h reads head h // (heads / kv_heads) of them.
            More of them than q and k have rows look like torch's order: above 128, or with causal above 31 where q has more rows
            than k, a ``LayoutWarning`` says so once.
        causal: keep keys up to the query's own position, the last query at the last key (at the first: ``Causal("top_left")``).
        window: (left, right), keys kept before and after the query's own position; None or -1 for unbounded.
        softcap, scale: numbers: softcap * tanh(logit / softcap), None or 0.0 for none; scale * q.k, else by 1 / sqrt(head_dim).
        mask, score: of ``rawattn.mask`` and ``rawattn.score``, or functions: ``mask(b, h, q, kv)`` says whether a key is kept,
            ``score(s, b, h, q, kv)`` makes a logit of scale * q.k. Arrays that they captured are read in place at every call.
        alibi, bias: slopes, (heads,) or (batch, heads), of which the distance of a key makes a bias; a bias that broadcasts to
            (batch, heads, q_len, kv_len). Both are as arrays that a score captured, beside softcap.
        sinks: (heads,), float32 (float64 for fp64 inputs), of q's library and device: a logit for each head that joins the sum of
            exponentials and lse but has no value (gpt-oss; arXiv 2309.17453, section 3.3). -inf is no sink.
        q_lens, kv_lens: int32, (batch,): how many rows each sequence uses, from its first one on. Queries behind them keep no
            key, no query keeps a key behind them, and masks see these lengths. Rows behind may hold NaN; their gradients are 0.
        out: receives the result; like o, apart from the inputs. Not where autograd follows, or torch traces, transforms or casts.
        return_lse: give (o, lse) with the natural logarithm of each row's sum of exponentials.
        constant_time: take kernels in which no branch and no address depends on the numbers in q, k and v, for bf16, fp16 and
            fp32 on a GPU. Not covered: a score of your own, power, which constants such as 0 save, clocks, and the L2 cache.
        deterministic: results are always the same bits, and so are gradients, unless it is False (``attention_backward``).
        q_offset, kv_offset: positions, ints >= 0, of the first rows of q and k in sequences of which these are parts. All options
            then see positions, and no alignment applies. Where one is given the other is 0.
        dropout: probability, from 0.0 up and less than 1.0, with which a weight is dropped: it becomes 0 after the softmax, and
            the others are divided by 1 - dropout. lse is of all. It is rounded to a multiple of 2^-15, to neither 0 nor 1.
        seed: an int of 64 bits, an int64 array (1,) that is read when kernels run, or None, where torch's generator draws it.
        invariant: a row's bits follow from its own q, the keys that it keeps, the numbers of heads, the options and the GPU, not
            from the batch, q_len or other rows; of finite values. Not with dropout; gradients are as without it.
        kernel, config: instead of what ``rawattn.explain`` shows. Not where torch traces, transforms or casts the call.

    Returns o, (batch, q_len, heads, head_dim_v), in q's dtype and library, on its device and the library's current stream; with
    ``return_lse`` also lse, float32 (float64 for fp64 inputs), (batch, heads, q_len). torch's autograd follows them, once.

    A query that keeps no key gives o = 0 and lse = -inf (with sinks its sink). NaN or inf beyond a sequence's end, or in a masked
    key, reaches no result; in a masked v it may, if a query in the tile keeps keys near it. Sums of v overflow before they are
    divided: of bf16 above 2^96, of others near the largest / kv_len. Raises ProblemError for a wrong argument, UnsupportedError
    where no kernel computes the call, with every kernel's reason.
    """
    if beyond or unknown:
        arguments.refuse(attention, unknown, beyond)
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    seed, given = _seed(q, dropout, seed), (q, k, v)
    if sinks is not None or seed is not None or q_lens is not None or kv_lens is not None:
        given = given_of(q, k, v, None, None, sinks, q_lens, kv_lens, seed)
    return forward(given, (causal, window, softcap, scale, mask, score, return_lse, constant_time, deterministic, q_offset,
                           kv_offset, dropout, invariant), NO_LENGTHS, kernel, config, out)  # fmt: skip


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *beyond: Unpack[tuple[()]], causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None,
    alibi: Any = None, bias: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, out: Any = None,
    return_lse: bool = False, constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None,
    kv_offset: int | None = None, dropout: float = 0, seed: Any = None, invariant: bool = False, kernel: str | None = None,
    config: Any = None, **unknown: Unpack[Nothing],
) -> Any:  # fmt: skip
    """``attention`` on sequences of different lengths, packed end to end.

    >>> o = rawattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)

    Args:
        q: (total_q, heads, head_dim). k: (total_kv, kv_heads, head_dim). v: (total_kv, kv_heads, head_dim_v).
        cu_seqlens_q: int32, (batch + 1,), in q's library and on its device: sequence i has query rows cu_seqlens_q[i] to
            cu_seqlens_q[i + 1]. Starts with 0 and never falls; sequences may be empty. Rows past its last value are left as they
            are in o. On a GPU sequences from the first on that lies outside of the rows are left out, and ``violations`` says so.
        cu_seqlens_kv: the same for the rows of k and v.
        max_seqlen_q, max_seqlen_kv: the longest lengths, or None where they are not known. They are hints, by which a GPU's tiles
            are chosen: wrong ones, too small ones too, make no result wrong, but other tiles round otherwise, so last bits may
            differ. With ``invariant`` they choose nothing.
        The rest as in ``attention``; q_offset and kv_offset are the positions of every sequence's first rows.

    Returns:
        o, (total_q, heads, head_dim_v); with ``return_lse`` also lse, (heads, total_q). Each sequence's result is what
        ``attention`` gives for it alone.
    """
    if beyond or unknown:
        arguments.refuse(attention_varlen, unknown, beyond)
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    options = (causal, window, softcap, scale, mask, score, return_lse, constant_time, deterministic, q_offset, kv_offset,
               dropout, invariant)  # fmt: skip
    given = given_of(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, _seed(q, dropout, seed))
    for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if array is None:
            raise ProblemError(f"{name} is missing; packed sequences need cu_seqlens_q and cu_seqlens_kv.")
    return forward(given, options, (max_seqlen_q, max_seqlen_kv), kernel, config, out)


def attention_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None,
    causal: bool = False, window: Window | None = None, softcap: float | None = None, scale: float | None = None,
    mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None, bias: Any = None,
    constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None, kv_offset: int | None = None,
    dropout: float = 0.0, seed: Any = None, wrt: Any = (), out: Any = None, kernel: str | None = None, config: Any = None,
    **unknown: Unpack[Nothing],
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of a loss by q, k, v and the sinks, from those by the results of ``attention`` or ``attention_varlen``.

    >>> o, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = rawattn.attention_backward(do, q, k, v, o, lse, causal=True)

    Args:
        do: the loss's gradient by o, in o's shape, dtype and library. It is copied first where its last dimension is not
            contiguous, one is expanded, as in ``sum().backward()``, or rows begin elsewhere than at 16 bytes; dlse alone is, too.
        q, k, v, sinks, q_lens, kv_lens: what the forward was given.
        o, lse: what it gave for them, with ``return_lse=True``: lse is contiguous, (batch, heads, q_len) or (heads, total_q), in
            float32 (float64 for fp64 inputs).
        dlse: the loss's gradient by lse, where it depends on lse; of lse's shape and dtype, copied where it is not contiguous.
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: as in ``attention_varlen``, for packed sequences.
        causal, window, softcap, scale, mask, score, alibi, bias, q_offset, kv_offset: the options of the forward. A score of your
            own, written in CUDA, needs ``slope`` in Python and ``derivative`` in CUDA, its derivative.
        dropout, seed: those of the forward; the seed is needed where dropout is not 0.
        wrt: float arrays that score captured, or alibi and bias, whose gradients are wanted besides: a tuple of these arrays.
        constant_time: refused where True: no kernel of the backward is shown to take the same time for all numbers.
        deterministic: True for the same bits on every run, the default. False allows configurations that give others:
            ``attn_bwd_mma``, for fp32 and GPUs other than Hopper, then adds parts of dq as they come; else ``config`` must ask.
        out: a tuple of arrays that receive the results, as many as there are, None for one to be made; one array receives dq.
        kernel, config: instead of what ``rawattn.explain_backward`` shows.

    Returns:
        (dq, dk, dv), like q, k and v, where sinks are given dsinks, and the gradients of the arrays in ``wrt``, in its order.
        Keys and values that query heads share get the sum of the gradients, and so does an element that is read several times.

    A query that keeps no key has dq = 0 and adds nothing to dk and dv; its dlse reaches the sink. A key that no query keeps has
    dk = dv = 0. Rows of no sequence have gradients of 0. So have those that q_lens and kv_lens leave unused, and nothing that do,
    q, k, v, o, lse and dlse hold there, NaN for instance, reaches another gradient or a sink's. With a NaN or inf in an input
    elsewhere, gradients of rows that lie near it in a sequence may be NaN, even where the mask keeps them apart (0 x NaN is NaN).

    Raises:
        ProblemError: an argument is wrong; the message names it and what is needed.
        UnsupportedError: no kernel computes this on the arrays' device; the message has every kernel's reason.

    The formula is that of FlashAttention-2 (arXiv 2307.08691, algorithm 2), with dlse and sinks besides; the specification in
    array operations is ``rawattn.reference.attention_backward``.
    """
    if unknown:
        arguments.refuse(attention_backward, unknown)
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score,
        "return_lse": False, "constant_time": constant_time, "deterministic": deterministic, "q_offset": q_offset,
        "kv_offset": kv_offset, "dropout": dropout, "invariant": False,
    }  # fmt: skip
    seed = _seed(q, dropout, seed, "give that of the forward")
    given = (do, q, k, v, o, lse, *given_of(dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed))
    return backward(given, options, (max_seqlen_q, max_seqlen_kv), wrt, kernel, config, out)


def backward(
    given: tuple[Any, ...], options: dict[str, Any], lengths: tuple[Any, Any], wrt: Any, kernel: str | None, config: Any, out: Any
) -> tuple[Any, ...]:
    """Computes ``attention_backward``, by way of torch's operator where torch must see one. Dynamo passes over it where a graph
    broke."""
    options, captured = functions.taken(options, wrt)
    found: tuple[Any, ...]
    if _load_torch_op() and _torch_op.way(given, casts=False) is _torch_op.attention:
        found = _torch_op.attention_backward(given, options, lengths, kernel, config, out, captured)
    else:
        found = run(given, options, lengths, kernel, config, out, Backward, captured=captured)
    return found


def plan_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, sinks: Any = None, q_lens: Any = None,
    kv_lens: Any = None, seed: Any = None, wrt: Any = (), kernel: str | None = None, config: Any = None,
    on_compile: Callable[[], None] | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """``plan`` for ``attention_backward``: ``plan.run(do, q, k, v, o, lse)`` gives the gradients.

    A plan copies nothing: the last dimension of do is contiguous, and dlse is, whole.
    """
    given = (do, q, k, v, o, lse, dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, _stand_in(q, options, seed))
    found, asked = _named(plan_backward, Backward, given, options, wrt)
    return _plan(asked_of(Backward, asked, (max_seqlen_q, max_seqlen_kv), kernel, config), found, on_compile)


def explain_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, sinks: Any = None, q_lens: Any = None,
    kv_lens: Any = None, seed: Any = None, wrt: Any = (), kernel: str | None = None, config: Any = None, **options: Any,
) -> Explanation:  # fmt: skip
    """``explain`` for ``attention_backward``. It says what would be copied, too."""
    given = (do, q, k, v, o, lse, dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, _stand_in(q, options, seed))
    dense = Backward.dense(given)
    found = _explain(Backward, dense, options, (max_seqlen_q, max_seqlen_kv), kernel, config, wrt)
    copied = tuple(name for name, x, y in zip(Backward.names, given, dense, strict=True) if x is not y)
    return dataclasses.replace(found, copied=copied)


def plan(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, seed: Any = None,
    kernel: str | None = None, config: Any = None, on_compile: Callable[[], None] | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """Makes the plan for arrays like these, compiled and loaded: ``plan.run(q, k, v)`` then costs the least a call can cost.

    >>> p = rawattn.plan(q, k, v, causal=True)
    >>> o = p.run(q, k, v)

    Arguments as in ``attention`` and, where ``cu_seqlens_q`` is given, ``attention_varlen``. ``on_compile`` is called before
    NVRTC runs, which takes about a second; a cached kernel does not need it, and on the CPU, where NVRTC compiles nothing, it is
    never called. With ``dropout`` the last input of ``run`` is the seed, an array, before those that functions captured; here it
    may be left out.
    """
    given = (q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, _stand_in(q, options, seed))
    found, asked = _named(plan, Forward, given, options)
    return _plan(asked_of(Forward, asked, (max_seqlen_q, max_seqlen_kv), kernel, config), found, on_compile)


def explain(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, seed: Any = None,
    kernel: str | None = None, config: Any = None, **options: Any,
) -> Explanation:  # fmt: skip
    """Says what ``attention`` would run for these arrays, and why, without compiling or running it. Print the result.

    >>> print(rawattn.explain(q, k, v, causal=True))
    """
    given = (q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, _stand_in(q, options, seed))
    lengths = (max_seqlen_q, max_seqlen_kv)
    return _explain(Forward, given, options, lengths, kernel, config)


def _explain(
    operation: type[Operation], given: tuple[Any, ...], options: Mapping[str, Any], lengths: tuple[Any, ...],
    kernel: str | None, config: Any, wrt: Any = (),
) -> Explanation:  # fmt: skip
    caller = explain if operation is Forward else explain_backward
    found, options = _named(caller, operation, given, dict(options), wrt)
    op = operation.of_call(found, options, lengths)
    made = explain_operation(op, device_of(next(iter(found.values()))), kernel, config)
    if next(iter(found.values())).is_cpu and made.has_list:
        names = Forward.names + functions.names(options)
        return dataclasses.replace(made, tiles=made.count_tiles(**{name: x.object for name, x in found.items() if name in names}))
    return made


def explain_operation(op: Operation, device: Device, kernel: str | None = None, config: Any = None) -> Explanation:
    """``explain`` of an operation on a device, which need not be here."""
    selection = select(op, device, kernel, config)
    program = None if device.is_cpu else selection.kernel.lower(op, selection.config, device)
    return Explanation(op, device, selection, program)


def warm_up(operations: Iterable[Operation] | str | os.PathLike[str], device: int = 0) -> int:
    """Compiles and loads all that these operations need on a GPU, so that nothing compiles when they are called; gives their
    number.

    >>> rawattn.warm_up("operations.jsonl")

    Args:
        operations: operations such as ``rawattn.Forward``, or the path of a file that RAWATTN_LOG named in an earlier run.
        device: the number of the GPU.

    Raises:
        ProblemError: a line of the file is no operation.
        UnsupportedError: no kernel computes one of them on the device.
    """
    found, where = operations_of(operations), driver.device(device)
    for op in found:
        load_all(op, select(op, where), where)
    return len(found)


def operations_of(given: Iterable[Operation] | str | os.PathLike[str]) -> list[Operation]:
    """Operations, or those of a file. Raises ProblemError where a line of it is no operation."""
    if not isinstance(given, (str, os.PathLike)):
        found = list(given) if isinstance(given, Iterable) else [given]
        if wrong := [x for x in found if not isinstance(x, Operation)]:
            raise ProblemError(f"operations has {brief(wrong[0])}; it must have operations such as rawattn.Forward.")
        return found
    try:
        lines = pathlib.Path(given).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ProblemError(
            f"operations is {os.fspath(given)!r}, which is no text ({error}); name a file of RAWATTN_LOG."
        ) from None
    return [_from_line(line) for line in lines]


def _from_line(line: str) -> Operation:
    try:
        return from_json(json.loads(line))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ProblemError(f"operations has the line {line[:80]!r}, which is no operation ({reason}).") from None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """An operation and what was selected for it; ``str`` of it is for people. ``program`` is None on the CPU. ``copied`` are the
    arrays that do not lie as is needed, and are copied before. ``tiles`` are the shares of tiles that a function as a mask
    leaves out, keeps whole and cuts, where that can be seen without waiting: on the CPU. ``count_tiles`` gives them for a GPU's
    arrays."""

    op: Operation
    device: Device
    selection: Selection
    program: Program | None
    copied: tuple[str, ...] = ()
    tiles: TileClasses | None = None

    @property
    def has_list(self) -> bool:
        """Says whether the mask is a function, whose tiles may have holes between them."""
        return lists(getattr(self._forward, "mask", None))

    @property
    def generated(self) -> dict[str, str]:
        """The CUDA C that was written for functions, by the name of the file that it stands for."""
        options = (getattr(self._forward, name, None) for name in functions.ROLES)
        return {name: text for option in options for name, text in getattr(option, "texts", {}).items()}

    def count_tiles(self, **given: Any) -> TileClasses:
        """The shares of tiles for these arrays by name: those that the mask captured, mask_0 and so on, and those that say how
        long sequences are. It copies a GPU's to the host. Raises ProblemError where one is missing, or is another."""
        op = self._forward
        if not self.has_list or not isinstance(op, Forward):
            raise ProblemError(
                f"count_tiles counts for a mask that is a function, and this operation is {op}; give its mask as a function."
            )
        config = None if self.device.is_cpu else self.selection.config
        names = {each.name for each in op.mask.arrays} | {"cu_seqlens_q", "cu_seqlens_kv", "q_lens", "kv_lens"}
        needed = {each.name: each for each in op.inputs if each.name in names}
        takes = ", ".join(f"{name} ({each.title.rstrip(',')})" if each.label else name for name, each in needed.items())
        found = arrays.named(tuple(given), tuple(given.values()))
        for name in found.keys() - {each.name for each in op.inputs}:
            raise ProblemError(f"count_tiles was given {name}; it takes {takes or 'no arrays'}.")
        for name, each in needed.items():
            if name not in found:
                raise ProblemError(f"{name} is missing; count_tiles takes {takes}.")
            each.check(found[name], *found[name][:2])
        views = {name: arrays.on_host(found[name]) for name in needed}
        return count(op, views, *(getattr(config, name, 128) for name in ("tile_q", "tile_kv")))

    @property
    def _forward(self) -> Any:
        return getattr(self.op, "forward", self.op)

    def _functions(self) -> Iterator[str]:
        for role in functions.ROLES:
            option: Any = getattr(self._forward, role, None)
            if option is None or not option.is_function:
                continue
            yield f"{role:8} {str(option).partition('(')[2][:-1]}"
            yield from (f"  {each}" for each in option.notes)
            if role == "mask" and isinstance(self._forward, Forward):
                yield from (f"  {each}" for each in option.intervals(self._forward.limits))
            if role == "mask" and self.tiles is not None:
                yield f"  tiles of {self.tiles}"

    def __str__(self) -> str:
        op, selection = self.op, self.selection
        lines = [f"op       {op}", *self._functions(), f"device   {self.device.name}", f"kernel   {selection.kernel.name}"]
        lines += [f"  not {name}: {reason}" for name, reason in selection.refusals]
        lines += [f"config   {selection.config}", f"  {selection.why}"]
        if self.program is not None:
            lines += [f"launch   {launch}" for launch in self.program.launches]
            lines += [f"scratch  {self.program.scratch_bytes} bytes"] if self.program.scratch_bytes else []
        if isinstance(op, Backward):
            kept = [each for each in op.inputs if each.name in ("q", "k", "v", "o", "lse")]
            lines += [f"kept     {sum(each.bytes for each in kept)} bytes, q, k, v, o and lse, from the forward on"]
        lines += [f"copied   {name}, which is expanded, not contiguous, or has rows that begin anywhere" for name in self.copied]
        lines += [f"work     {op.flops:.4g} FLOP, at least {op.bytes:.4g} bytes"]
        return "\n".join(lines)


def options_of(
    *, causal: bool = False, window: Window | None = None, softcap: float | None = None, scale: float | None = None,
    mask: MaskLike | None = None, score: ScoreLike | None = None, return_lse: bool = False, constant_time: bool = False,
    deterministic: bool = True, q_offset: int | None = None, kv_offset: int | None = None, dropout: float = 0.0,
    invariant: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The options of a call by name, in one order."""
    return {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score,
        "return_lse": return_lse, "constant_time": constant_time, "deterministic": deterministic, "q_offset": q_offset,
        "kv_offset": kv_offset, "dropout": dropout, "invariant": invariant,
    }  # fmt: skip


class Asked:
    """This is what a call asks for beside its arrays. Calls that ask for the same share one object, which is found and compared
    quickly. ``is_kept`` is False for one that nothing else finds. ``followed`` is what ``torch_op`` makes of it where autograd
    follows, by the captured arrays to which it does."""

    def __init__(
        self, operation: type[Operation], options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None, config: Any,
        is_kept: bool = True,
    ) -> None:  # fmt: skip
        self.operation, self.options, self.lengths, self.kernel, self.config = operation, options, lengths, kernel, config
        self.is_kept, self.has_functions = is_kept, bool(functions.among(options))
        self.followed: dict[tuple[str, ...], Any] = {}

    @functools.cached_property
    def numbers(self) -> tuple[functions.Numbers, functions.Numbers] | None:
        """Returns what ``without_numbers`` lacks: the numbers of the mask, and of the score. None where it is the same."""
        if self.without_numbers is self:
            return None
        own, left = self.options, self.without_numbers.options
        found = [() if own[role] == left[role] else own[role].numbers for role in functions.ROLES]  # equals may be two objects
        return found[0], found[1]

    @functools.cached_property
    def without_numbers(self) -> Asked:
        """Returns what calls ask for whose functions captured any numbers, where no number makes a built-in option of them."""
        found = functions.without_numbers(self.options)
        return self if found is self.options else asked_of(self.operation, found, self.lengths, self.kernel, self.config)

    @functools.cached_property
    def of_family(self) -> Asked:
        """Returns what calls of one family ask for."""
        coarse = self.operation.coarse(self.options)
        return self if coarse is self.options else asked_of(self.operation, coarse, self.lengths, self.kernel, self.config)


def asked_of(
    operation: type[Operation], options: Mapping[str, Any] | tuple[Any, ...], lengths: tuple[Any, ...] = NO_LENGTHS,
    kernel: str | None = None, config: Any = None,
) -> Asked:  # fmt: skip
    """Returns what a call asks for, by its options in the order of ``OPTIONS``, and for gradients ``wrt`` behind them. Their
    types count too: True, 1 and 1.0 are equal, but not all of them are right."""
    values: tuple[Any, ...] = options if type(options) is tuple else tuple(options.values())  # type: ignore[union-attr]
    types: tuple[Any, ...] = ()
    if lengths is not NO_LENGTHS or values[_WINDOW] is not None:
        types = tuple(map(type, lengths))
        if isinstance(window := values[_WINDOW] if values else None, (tuple, list)):
            values = (*values[:_WINDOW], tuple(window), *values[_WINDOW + 1 :])
            types = (*types, *map(type, window))
    try:
        return _asked(operation, kernel, config, lengths, types, *values)
    except TypeError:  # what cannot be hashed is wrong
        return Asked(operation, dict(zip((*OPTIONS, "wrt"), values, strict=False)), lengths, kernel, config, is_kept=False)


@functools.lru_cache(maxsize=KEPT_ASKED, typed=True)
def _asked(
    operation: type[Operation], kernel: str | None, config: Any, lengths: tuple[Any, ...], types: Any, *values: Any
) -> Asked:
    """Raises TypeError where something is an array, or a function that may hold some, which may not be kept."""
    window = values[_WINDOW] if len(values) > _WINDOW and isinstance(values[_WINDOW], tuple) else ()
    for value in (kernel, config, *lengths, *values, *window):
        if hasattr(value, "__dlpack__") or (value is not None and functions.is_function(value)):
            raise TypeError
    return Asked(operation, dict(zip((*OPTIONS, "wrt"), values, strict=False)), lengths, kernel, config)


def given_of(*arrays: Any) -> tuple[Any, ...]:
    """The arrays of a call, without what is None at the end."""
    count = len(arrays)
    while count and arrays[count - 1] is None:
        count -= 1
    return arrays[:count]


def _seed(q: Any, dropout: Any, seed: Any, missing: str = "") -> Any:
    """The seed of a call as an array, which is made where an int is given, or for torch tensors nothing; None without dropout.
    ``missing`` says what to do where there is none and none may be drawn."""
    if seed is not None:
        _check_seed(seed)
    if type(dropout) is int and dropout == 0:  # the default; an int, since torch.compile would follow a float's value
        return None
    if not make_dropout(dropout):
        return None
    if _load_torch_op() and _torch_op.is_tensor(q):
        return _torch_op.seed_of(q, seed, missing)
    if seed is None:
        way = missing or "give an int, or one int64 in an array of q's library: there is no generator that it may be drawn from"
        raise ProblemError(f"seed is None, and dropout is {dropout}; {way}.")
    return arrays.one_int64(q, seed) if is_int(seed) else seed


def _check_seed(seed: Any) -> None:
    """Raises ProblemError for what is no seed, also where there is no dropout that it would be for."""
    if not is_int(seed) and (tuple(seed.shape) != (1,) or str(seed.dtype).rpartition(".")[2] != "int64"):
        raise ProblemError(
            f"seed is {seed.dtype} of shape {tuple(seed.shape)}; it must be an int, or one int64 in an array of shape (1,)."
        )


def _stand_in(q: Any, options: Mapping[str, Any], seed: Any) -> Any:
    """A seed for a plan or an explanation, which read none."""
    return _seed(q, options.get("dropout", 0.0), 0 if seed is None else seed)


def forward(
    given: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any
) -> Any:
    """Computes ``attention`` and ``attention_varlen``: by way of torch's operator where torch must see one, and of an autograd
    Function where autograd follows. Dynamo passes over it where a graph broke."""
    captured: tuple[Any, ...] = ()
    key = asked = numbers = None
    if values[_MASK] is not None or values[_SCORE] is not None:
        mask, score, captured, numbers = functions.parted(values[_MASK], values[_SCORE])
        values = (*values[:_MASK], mask, score, *values[_SCORE + 1 :])
    if _load_torch_op():
        is_plain = _torch_op.is_plain()
        if is_plain and (key := _key(given, captured)) is not None:
            asked = asked_of(Forward, values, lengths, kernel, config)
            call = _calls.get((asked, key))
            if call is not None and numbers is None:
                return one_or_all(call(given[0], out, captured))
            if call is not None and (own := call.numbered(numbers)) is not None:
                return one_or_all(call(given[0], out, captured, (), own))
        if numbers is not None:
            values, asked = _whole(values, numbers), None
        compute = (_torch_op.way_of_tensors if is_plain else _torch_op.way)(given + captured)
        if compute is not None:
            if compute is _torch_op.differentiable:
                return compute(given, asked_of(Forward, values, lengths, kernel, config), out, captured)
            return compute(given, dict(zip(OPTIONS, values, strict=True)), lengths, kernel, config, out, captured=captured)
    elif numbers is not None:
        values = _whole(values, numbers)
    asked = asked or asked_of(Forward, values, lengths, kernel, config)
    return _first(given, captured, key if key is not None else _key(given, captured), asked, out)


def _whole(values: tuple[Any, ...], numbers: tuple[functions.Numbers, functions.Numbers]) -> tuple[Any, ...]:
    """The options of which ``functions.parted`` took these numbers."""
    return (*values[:_MASK], *map(functions.whole, values[_MASK : _SCORE + 1], numbers), *values[_SCORE + 1 :])


def _named(
    caller: Callable[..., Any], operation: type[Operation], given: tuple[Any, ...], options: dict[str, Any], wrt: Any = ()
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a call by name, with those that its functions captured, and its options. Raises TypeError for an option that
    ``caller`` does not have, as any call does."""
    known = (*OPTIONS, "alibi", "bias")
    if unknown := options.keys() - set(known):
        arguments.refuse(caller, unknown, options=known)
    options = dict(options)
    shorthands = options.pop("alibi", None), options.pop("bias", None)
    if any(x is not None for x in shorthands):
        options["score"] = functions.biased(options.pop("softcap", None), options.get("score"), *shorthands)
    options, captured = functions.taken(options_of(**options), wrt)
    return arrays.named(operation.input_names(len(given)), given) | functions.read(options, captured), options


def _load_torch_op() -> bool:
    """Imports torch_op once torch is loaded, and tells whether it is there."""
    global _torch_op
    if _torch_op is None and sys.modules.get("torch") is not None:
        from . import torch_op as _torch_op
    return _torch_op is not None


# Dynamo calls it while it traces, so that the import is done when it reads _torch_op and guards on it.
_load_torch_op._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run(
    given: tuple[Any, ...], options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None = None, config: Any = None,
    out: Any = None, operation: type[Operation] = Forward, asked: Asked | None = None, captured: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Computes a call on arrays that have memory, which are those of ``operation.input_names``, and ``captured``, those of the
    functions among its options; ``options`` and ``lengths`` are what its ``of_call`` takes, for attention what ``options_of``
    gives, with functions ``taken``. ``asked`` is what ``asked_of`` gives for all this, where the caller keeps it."""
    asked, key = asked or asked_of(operation, options, lengths, kernel, config), _key(given, captured)
    call = None if key is None else _calls.get((asked, key))
    return _first(given, captured, key, asked, out) if call is None else one_or_all(call(given[0], out, captured))


def _key(given: tuple[Any, ...], captured: tuple[Any, ...]) -> Any:
    """All of a call's torch tensors that it depends on, (signatures, forms of what functions captured); None for other arrays,
    and for tensors that must be looked at."""
    signatures = arrays.plain_signatures(given)
    forms = arrays.forms(captured) if captured else ()
    return None if signatures is None or forms is None else (signatures, forms)


@eager
def _first(given: tuple[Any, ...], captured: tuple[Any, ...], key: Any, asked: Asked, out: Any) -> Any:
    """Computes a call on arrays that it was not made for yet. The first of these that applies serves it: a call of a copy that is
    made or of other numbers, a call on arrays that lie so in other places, one of its family, resized, and a plan of its own."""
    call: Any = None
    numbers = None
    dense = asked.operation.dense(given)
    if dense is not given:
        given, key = dense, _key(dense, captured)
    if key is not None:
        call, numbers = _kept(_calls, asked, key)
        if call is None:
            call, numbers = _known(given, captured, key, asked)
    if call is None:
        found = arrays.named(asked.operation.input_names(len(given)), given) | functions.read(asked.options, captured)
        plan = _plan(asked, found)
        call = plan.bind(found)
        captured = tuple([found[each.name].object for each in plan.op.captured])
        if isinstance(call, GpuCall) and key is not None:
            family = _family(key, asked)
            if family is not None:
                cache_put(_families, family, call, KEPT_PLANS)
            _keep(key, asked, call)
        elif key is not None and not asked.has_functions:
            _keep(key, asked, call)
    return one_or_all(call(given[0], out, captured) if numbers is None else call(given[0], out, captured, (), numbers))


def _keep(key: Any, asked: Asked, call: GpuCall | CpuCall) -> None:
    """Keeps a call for its tensors, and for those that lie so; where it takes other numbers, for all of them."""
    if asked.is_kept:
        owner = asked.without_numbers if call.op.takes_numbers else asked
        cache_put(_calls, (owner, key), call, KEPT_CALLS)
        is_gpu = isinstance(call, GpuCall)  # a CPU's configurations are for one length
        if asked.has_functions or not is_gpu:
            cache_put(_layouts, (owner, _layout(key, asked)), call, KEPT_CALLS)
        if is_gpu and (not asked.has_functions or call.op.holds_in_steps(asked.options)):
            cache_put(_layouts, (owner, _layout_in_steps(key, asked)), call, KEPT_CALLS)


def _kept(calls: Mapping[Any, GpuCall], asked: Asked, key: Any) -> tuple[GpuCall | None, Numbered | None]:
    """The call that is kept under a key, and the numbers that it is to take, where they are not its own."""
    if asked.numbers is not None:
        call = calls.get((asked.without_numbers, key))
        numbers = None if call is None else call.numbered(asked.numbers)
        if numbers is not None:
            return call, numbers
    return calls.get((asked, key)), None


def call_of(given: tuple[Any, ...], asked: Asked) -> GpuCall | None:
    """The call that is kept for these tensors of a GPU; None where there is none."""
    key = _key(given, ())
    call = None if key is None else _calls.get((asked, key))
    return call if isinstance(call, GpuCall) else None


def kept_at(place: tuple[Any, ...]) -> GpuCall | None:
    """The call that a door keeps under a key of its own; None where there is none."""
    found: GpuCall | None = _calls.get(place)
    return found


def keep_at(place: tuple[Any, ...], call: GpuCall) -> None:
    """Keeps a call under a door's key, which begins with what is asked for and has more parts than those of ``attention``."""
    cache_put(_calls, place, call, KEPT_CALLS)


def _layout(key: Any, asked: Asked) -> tuple[Any, ...]:
    """A key of tensors of these lengths that lie so, wherever."""
    return (Operation.layout_key(key[0], asked.options), key[1])


def _layout_in_steps(key: Any, asked: Asked) -> tuple[Any, ...]:
    """A key of all for which the same program serves; functions are to be proved for all lengths of which the same is lowered."""
    return (asked.operation.layout_key(key[0], asked.options), key[1], "in steps")


def _family(key: Any, asked: Asked) -> Any:
    """The key of a family of calls; None where there is none. Its functions have the same code and arrays of the same form."""
    if not asked.is_kept or (asked.has_functions and asked.operation is not Forward):
        return None
    family = asked.operation.family(key[0], asked.options)
    return family and (family, key[1], asked.of_family)


def moved(like: GpuCall, signatures: tuple[Any, ...], asked: Asked) -> GpuCall:
    """The call for tensors that lie as those of another one, in other places, by their signatures."""
    found = dict(zip(like.names, arrays.of_signatures(signatures), strict=False))
    call = like.moved(found)
    if not call.has_lengths_of(like) and is_logging():
        log_operation(like.op.resized_to(found, asked.options))
    return call


def _known(given: tuple[Any, ...], captured: tuple[Any, ...], key: Any, asked: Asked) -> tuple[GpuCall | None, Numbered | None]:
    """The call on tensors that lie as those of another call in other places, with the numbers that it is to take; or one whose
    lengths or offsets are others: a call of the same family, resized."""
    if not arrays.have_memory(given, key[0]):
        return None, None
    like, numbers = None, None
    if not (asked.has_functions and is_logging()):  # to which each new operation goes
        like, numbers = _kept(_layouts, asked, _layout_in_steps(key, asked))
    if like is None:
        like, numbers = _kept(_layouts, asked, _layout(key, asked))
    if like is not None:
        call = moved(like, key[0], asked)
        cache_put(_calls, (asked if numbers is None else asked.without_numbers, key), call, KEPT_CALLS)
        return call, numbers
    like = _families.get(_family(key, asked))
    if like is None:
        return None, None
    found = dict(zip(like.names, arrays.of_signatures(key[0]), strict=False))
    if asked.has_functions:
        found |= functions.read(asked.options, captured)
    op = like.op.resized_to(found, asked.options)
    if op is None:
        return None, None
    call = like.resized(op, found)
    if op is not like.op:
        log_operation(op)
    _keep(key, asked, call)
    return call, None


def _plan(asked: Asked, found: dict[str, Array], on_compile: Callable[[], None] | None = None) -> Plan:
    """The plan for these arrays, found or made."""
    if arrays.requires_grad(*(array.object for array in found.values())):
        raise ProblemError(NO_GRAD)
    # All that a plan depends on: strides and alignment decide whether a kernel refuses.
    key = (asked, *[(*array[:5], array.pointer % 16) for array in found.values()], *found)
    plan = _plans.get(key)
    if plan is None:
        first = next(iter(found.values()), None)
        op = asked.operation.of_call(found, asked.options, asked.lengths)
        assert first is not None, "of_call raises where there is no array"
        device = device_of(first)
        with spared_capture(first):
            selection = select(op, device, asked.kernel, asked.config)
            if selection.slow is not None:
                warn_once(selection.slow)
            causal = asked.options.get("causal") is True
            if asked.operation is Forward and (doubt := layout_doubt(found["q"].shape, found["k"].shape, causal)):
                warn_once(doubt, LayoutWarning, LayoutWarning)
            log_operation(op)
            plan = Plan(op, device, selection, first.library, on_compile)
        if asked.is_kept:
            cache_put(_plans, key, plan, KEPT_PLANS)
    return plan


def is_logging() -> bool:
    """Says whether new operations are written to a file."""
    return "RAWATTN_LOG" in os.environ and bool(os.environ["RAWATTN_LOG"])  # a third of what ``get`` takes where there is none


def log_operation(op: Operation, key: Any = None) -> None:
    """Appends the operation to the file that the environment variable RAWATTN_LOG names: once, or the first of those with this
    ``key``."""
    path = os.environ.get("RAWATTN_LOG")
    if not path or (key is not None and (path, key) in _logged):
        return
    line = json.dumps(op.to_json())
    if (path, key or line) not in _logged:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{_line_break(path)}{line}\n")
        except OSError as error:
            raise ProblemError(
                f"RAWATTN_LOG is {path!r}, where no operation can be written ({error}); name a file that can be, or unset it."
            ) from error
        _logged.add((path, key or line))


def _line_break(path: str) -> str:
    """A newline where the last line of a file has none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # it is empty, or a pipe
        file.seek(-1, os.SEEK_END)
        return "" if file.read(1) == b"\n" else "\n"  # not all: a device such as /dev/full has no end
    return ""


_load_torch_op()  # torch.ops.rawattn: compiled and saved programs may name it before any call

"""The public calls: each reads its arrays, finds or makes the plan, and runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ProblemError
from ..operation import Backward, Forward, Operation, arguments, captures, functions
from ..operation.arguments import Nothing, Unpack
from ..operation.inputs import BackwardInputs, ForwardInputs
from ..operation.keys import Blocks, TopK, parted
from ..operation.spec import MaskLike, Options, ScoreLike, Window, named
from ..runtime import front_end
from ..runtime.calls import call_on, forward, run
from ..runtime.explain import Explanation, explain_operation
from ..runtime.plan import Plan, device_of
from ..runtime.request import NO_LENGTHS, arrays_and_options, request_for, seed_array, stand_in_seed

OPTIONS = arguments.with_options(Options, "alibi", "bias")


def attention(
    q: Any, k: Any, v: Any, *beyond: Unpack[tuple[()]], causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None,
    alibi: Any = None, bias: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, out: Any = None,
    return_lse: bool = False, constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None,
    kv_offset: int | None = None, dropout: float = 0, seed: Any = None, invariant: bool = False,
    keys: TopK | Blocks | None = None, kernel: str | None = None, config: Any = None, **unknown: Unpack[Nothing],
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
        dropout: probability, from 0.0 up, with which a weight is dropped: it becomes 0 after the softmax, and the others are
            divided by 1 - dropout. lse is of all. It is rounded to a multiple of 2^-8; what that makes 0 or 1 is refused.
        seed: an int of 64 bits, an int64 array (1,) that is read when kernels run, or None, where torch's generator draws it.
        invariant: a row's bits follow from its own q, the keys that it keeps, the numbers of heads, the options and the GPU, not
            from the batch, q_len or other rows; of finite values. Not with dropout; gradients are as without it.
        keys: a ``rawattn.TopK`` or ``rawattn.Blocks``, lists of each query's keys; without dropout and offsets.
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
    inputs = ForwardInputs(q, k, v, None, None, sinks, q_lens, kv_lens, seed_array(q, dropout, seed), *parted(keys)[:2])
    options = Options(causal, window, softcap, scale, mask, score, return_lse, constant_time, deterministic, q_offset, kv_offset,
                      dropout, invariant, None if keys is None else keys.lists)  # fmt: skip
    return forward(inputs, options, NO_LENGTHS, kernel, config, out)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *beyond: Unpack[tuple[()]], causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None,
    alibi: Any = None, bias: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, out: Any = None,
    return_lse: bool = False, constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None,
    kv_offset: int | None = None, dropout: float = 0, seed: Any = None, invariant: bool = False,
    keys: TopK | Blocks | None = None, kernel: str | None = None, config: Any = None, **unknown: Unpack[Nothing],
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
    rest = q_lens, kv_lens, seed_array(q, dropout, seed), *parted(keys)[:2]
    inputs = ForwardInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, *rest)
    options = Options(causal, window, softcap, scale, mask, score, return_lse, constant_time, deterministic, q_offset, kv_offset,
                      dropout, invariant, None if keys is None else keys.lists)  # fmt: skip
    for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if array is None:
            raise ProblemError(f"{name} is missing; packed sequences need cu_seqlens_q and cu_seqlens_kv.")
    return forward(inputs, options, (max_seqlen_q, max_seqlen_kv), kernel, config, out)


def attention_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None,
    causal: bool = False, window: Window | None = None, softcap: float | None = None, scale: float | None = None,
    mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None, bias: Any = None,
    constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None, kv_offset: int | None = None,
    dropout: float = 0.0, seed: Any = None, wrt: Any = (), keys: TopK | Blocks | None = None, out: Any = None,
    kernel: str | None = None, config: Any = None, **unknown: Unpack[Nothing],
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
        keys: the lists of the forward; on a GPU ``Blocks`` of 64 or 128 queries and keys, or multiples of them.
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
    *lists, kind = parted(keys)
    options = Options(causal, window, softcap, scale, mask, score, False, constant_time, deterministic, q_offset, kv_offset,
                      dropout, keys=kind)  # fmt: skip
    rest = seed_array(q, dropout, seed, "give that of the forward"), *lists
    inputs = BackwardInputs(do, q, k, v, o, lse, dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, *rest)
    return backward(inputs, named(options), (max_seqlen_q, max_seqlen_kv), wrt, kernel, config, out)


def backward(
    inputs: BackwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], wrt: Any, kernel: str | None, config: Any, out: Any
) -> tuple[Any, ...]:
    """Computes ``attention_backward``, by way of torch's operator where torch must see one. Dynamo passes over it where a graph
    broke."""
    options, captured = captures.take(options, wrt)
    gradients: tuple[Any, ...]
    if front_end.load_torch() and front_end.torch.dispatch(inputs, casts=False) is front_end.torch.attention:
        gradients = front_end.torch.attention_backward(inputs, options, lengths, kernel, config, out, captured)
    else:
        gradients = run(inputs, request_for(Backward, options, lengths, kernel, config), out, captured)
    return gradients


@OPTIONS
def plan_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, sinks: Any = None, q_lens: Any = None,
    kv_lens: Any = None, seed: Any = None, wrt: Any = (), kernel: str | None = None, config: Any = None,
    on_compile: Callable[[], None] | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """``plan`` for ``attention_backward``: ``plan.run(do, q, k, v, o, lse)`` gives the gradients.

    A plan copies nothing: the last dimension of do is contiguous, and dlse is, whole.
    """
    seed = stand_in_seed(q, options, seed)
    inputs = BackwardInputs(do, q, k, v, o, lse, dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    arrays, options = arrays_and_options(plan_backward, Backward, inputs, options, wrt)
    return call_on(request_for(Backward, options, (max_seqlen_q, max_seqlen_kv), kernel, config), arrays, on_compile).plan


@OPTIONS
def explain_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, sinks: Any = None, q_lens: Any = None,
    kv_lens: Any = None, seed: Any = None, wrt: Any = (), kernel: str | None = None, config: Any = None, **options: Any,
) -> Explanation:  # fmt: skip
    """``explain`` for ``attention_backward``. It says what would be copied, too."""
    seed = stand_in_seed(q, options, seed)
    inputs = BackwardInputs(do, q, k, v, o, lse, dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    dense = Backward.dense(inputs)
    explanation = _explain(Backward, dense, options, (max_seqlen_q, max_seqlen_kv), kernel, config, wrt)
    copied = tuple(name for name, x, y in zip(Backward.names, inputs, dense, strict=True) if x is not y)
    return dataclasses.replace(explanation, copied=copied)


@OPTIONS
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
    seed = stand_in_seed(q, options, seed)
    inputs = ForwardInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    arrays, options = arrays_and_options(plan, Forward, inputs, options)
    return call_on(request_for(Forward, options, (max_seqlen_q, max_seqlen_kv), kernel, config), arrays, on_compile).plan


@OPTIONS
def explain(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, *, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, seed: Any = None,
    kernel: str | None = None, config: Any = None, **options: Any,
) -> Explanation:  # fmt: skip
    """Says what ``attention`` would run for these arrays, and why, without compiling or running it. Print the result.

    >>> print(rawattn.explain(q, k, v, causal=True))
    """
    seed = stand_in_seed(q, options, seed)
    inputs = ForwardInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    lengths = (max_seqlen_q, max_seqlen_kv)
    return _explain(Forward, inputs, options, lengths, kernel, config)


def _explain(
    operation: type[Operation], inputs: tuple[Any, ...], options: Mapping[str, Any], lengths: tuple[Any, ...],
    kernel: str | None, config: Any, wrt: Any = (),
) -> Explanation:  # fmt: skip
    caller = explain if operation is Forward else explain_backward
    arrays, options = arrays_and_options(caller, operation, inputs, dict(options), wrt)
    op = operation.of_call(arrays, options, lengths)
    explanation = explain_operation(op, device_of(next(iter(arrays.values()))), kernel, config)
    if next(iter(arrays.values())).is_cpu and explanation.has_list:
        names = Forward.names + captures.names(options)
        objects = {name: x.object for name, x in arrays.items() if name in names}
        return dataclasses.replace(explanation, tiles=explanation.count_tiles(**objects))
    return explanation

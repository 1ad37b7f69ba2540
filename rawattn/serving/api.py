"""The public calls over caches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..array import arrays, memory
from ..array.arrays import Array
from ..driver import counters
from ..errors import ProblemError, brief
from ..kernel.attn_fwd_mma import packs
from ..kernel.paging import over_tensors
from ..operation import Append, AttentionKVCache, Combine, arguments, functions
from ..operation.append import rows_of
from ..operation.arguments import Nothing, Unpack
from ..operation.kvcache import table_of
from ..operation.operand import check_output
from ..operation.spec import MaskLike, ScoreLike, Spec, Window
from ..runtime import front_end
from ..runtime.explain import Explanation, explain_operation
from ..runtime.plans import (
    CpuCall,
    GpuCall,
    Plan,
    addresses_of,
    device_of,
    find,
    keep,
    one_or_all,
    spared_capture,
    to_libraries,
)
from ..runtime.record import log_operation
from ..runtime.request import KEPT_REQUESTS
from ..runtime.select import select
from ..trace.proofs import Limits
from ..variant.element import ELEMENTS
from ..variant.mask import causal_and
from ..variant.store import MOST_ARRAYS
from .cache import KVCache
from .rotary import Rotary
from .step import Step

NO_GRADIENT = (
    "an input requires grad, and calls over caches and merge_states have no gradient; call under torch.no_grad(), or detach the "
    "inputs yourself. Nothing is detached silently."
)


def attention_kvcache(
    q: Any, cache: KVCache, step: Step, *beyond: Unpack[tuple[()]], window: Window | None = None, softcap: float | None = None,
    scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None,
    bias: None = None, sinks: Any = None, split: str | int = "auto", out: Any = None, return_lse: bool = False, lse: Any = None,
    invariant: bool = False, dropout: float = 0, kernel: str | None = None, config: Any = None, **unknown: Unpack[Nothing],
) -> Any:  # fmt: skip
    """softmax(mask(score(q k^T))) v for each sequence and head, where k and v are the sequence's keys in a cache.

    >>> o = rawattn.attention_kvcache(q, cache, step)

    Args:
        q: (batch, q_len, heads, head_dim), or (total_q, heads, head_dim) where the step has cu_seqlens_q; in the cache's dtype,
            library and device. heads is a multiple of the cache's kv_heads, query head h reads head h // (heads / kv_heads).
        cache: a ``rawattn.KVCache``; its pages are read where they lie.
        step: a ``rawattn.Step``: how long the sequences are, which pages they have, and whether they are causal. The last query
            of a sequence stands at its last key.
        window, softcap, scale, score, alibi, sinks: as in ``rawattn.attention``. bias, dropout: refused; a score captures a bias.
        mask: a mask instead of ``window``; functions see positions in the sequence. Of a causal step keys count that both keep.
        split: the keys that a block of ``attn_decode`` takes before results are folded; "auto" follows the sequence's length.
        out, lse: receive the results; of q's library and device, apart from the inputs. ``lse`` goes with ``return_lse``.
        return_lse: give (o, lse) with the natural logarithm of each row's sum of exponentials.
        invariant, kernel, config: say what chooses kernels, see below; a kernel and a configuration instead of the chosen ones.

    Returns:
        o, q's shape with head_dim_v columns; with ``return_lse`` also lse, float32 (float64 for fp64), (batch, heads, q_len) or
        (heads, total_q). Rows of q that belong to no sequence are left as they are.

    A query that keeps no key, so any in a sequence of length 0, or before the first key of a causal one, has o = 0 and lse = -inf
    (with sinks its sink). What lies in pages and rows behind a sequence's length, or before the first key that a query keeps,
    reaches no result, and page_table's entries for it are not read. On a GPU this begins up to 63 keys before the first that a
    window keeps, 127 where ``attn_fwd`` computes, which must be the sequence's own; with ``kv_begin`` at that key itself.

    On a GPU the bound on the rows of a sequence chooses the kernel. Rows are the queries of all heads that share a key head; q's
    shape and ``Step.max_q_len`` bound them. ``attn_decode`` takes up to 256. Where there may be more, as in chunked prefill,
    ``attn_fwd`` computes all sequences of the call, those with few rows too, on Hopper over pages of 8 keys or more;
    ``attn_fwd_mma`` does so elsewhere. It is one launch each time, which a graph replays with any lengths. With ``attn_decode`` a
    row has the same bits in any batch whose bound is as its own, up to 16 rows or above; with the others they follow from the
    configuration too, which shapes and bounds choose.

    With ``invariant=True`` a row's bits follow from its q, its sequence's keys and numbers of keys and rows, the heads, the
    options and the GPU, not from batch, neighbours, bounds, grid or pages; but on Hopper pages below 8 keys give sequences above
    256 rows other bits. Each sequence goes to the kernel of its own rows, in two launches where some may have up to 256 and
    others more. Bits differ between these, and those of ``attention`` are others: a decoded token is not that of a long prefill.

    Raises:
        ProblemError: an argument is wrong. On the CPU so are lengths that a bound or the pages do not allow; on a GPU they are
            on the device, where nothing beyond the cache is read. UnsupportedError: no kernel computes this there.
    The pages are those of PagedAttention (arXiv 2309.06180, section 4.1). ``rawattn.reference.attention_kvcache`` specifies it.
    """
    if beyond or unknown:
        arguments.refuse(attention_kvcache, unknown, beyond)
    score, softcap = with_slopes(softcap, score, alibi, bias, dropout)
    options = {"window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score, "invariant": invariant}
    if front_end.load_torch() and front_end.torch.dispatch((q,)) is front_end.torch.attention:
        _refuse_where_traced(out=out, lse=lse, kernel=kernel, config=config)
        o, total = front_end.torch.caches.attention_kvcache(q, cache, step, options, sinks, split)
        return (o, total) if return_lse else o
    check_objects(cache, step)
    request = request_of(step, options, return_lse, split, kernel, config)
    return one_or_all(attend(q, cache, step, request, sinks, out, lse))


def with_slopes(softcap: Any, score: Any, alibi: Any, bias: Any, dropout: Any) -> tuple[Any, Any]:
    """The score and the softcap, which is in the score where there are slopes. Raises ProblemError for a bias and for dropout."""
    if bias is not None:
        raise ProblemError(
            "bias was given, whose keys would be those of one length, and sequences in a cache grow; capture it in a score of "
            "positions: score=lambda s, b, h, q, kv: s + bias[b, h, q, kv]."
        )
    if dropout:
        raise ProblemError(f"dropout is {dropout!r}; it is for training, and attention over a cache has none: leave it out.")
    return (score, softcap) if alibi is None else (functions.biased(softcap, score, alibi, None), None)


class CacheRequest(NamedTuple):
    """Everything that selects a kernel except the arrays of a cache and a step: a spec, in which functions are left out, the
    functions, the keys of a split, a kernel and a configuration; and the arrays that the functions captured."""

    spec: Spec
    own: tuple[tuple[str, functions.Function], ...] = ()
    captured: tuple[Any, ...] = ()
    split_keys: int = 0
    kernel: str | None = None
    config: Any = None
    kept: object = None

    @property
    def key(self) -> Any:
        """Returns what stands for all but the arrays; calls without functions share one object, ``kept``."""
        return self.kept or (self.spec, self.own, self.split_keys, self.kernel, self.config)


def request_of(
    step: Step, options: dict[str, Any], return_lse: bool, split: Any = "auto", kernel: str | None = None, config: Any = None
) -> CacheRequest:
    """The request of a call. A mask that is a function has in it what the step says of its sequences."""
    mask, score = options["mask"], options["score"]
    if (mask is None or not functions.is_function(mask)) and (score is None or not functions.is_function(score)):
        try:
            return plain_request(step.is_causal, options, return_lse, split, kernel, config)
        except TypeError:  # what cannot be hashed is not kept
            pass
    options, captured = functions.taken(options)
    request, split_keys = request_with(step, options, captured, return_lse), split_keys_of(split)
    return request._replace(split_keys=split_keys, kernel=kernel, config=config)


def plain_request(
    causal: bool, options: dict[str, Any], return_lse: bool, split: Any = "auto", kernel: str | None = None, config: Any = None
) -> CacheRequest:
    """``request_of`` for options without functions, of a causal step or of another one. Raises TypeError for what is not kept."""
    window = options["window"]
    types = tuple(map(type, window)) if isinstance(window, tuple) else ()
    return _plain(types, causal, return_lse, split, kernel, config, **options)


@functools.lru_cache(maxsize=KEPT_REQUESTS, typed=True)
def _plain(
    types: tuple[type, ...], causal: bool, return_lse: bool, split: Any, kernel: str | None, config: Any, **options: Any
) -> CacheRequest:
    """``plain_request``, kept. ``types`` are those in a window: 1 and 1.0 are equal, but not both are right."""
    return CacheRequest(spec_of(causal, options, return_lse), (), (), split_keys_of(split), kernel, config, object())


def request_with(step: Step, options: dict[str, Any], captured: tuple[Any, ...], return_lse: bool) -> CacheRequest:
    """The request by options whose functions have no arrays, with the arrays that these captured."""
    if (needed := len(functions.names(options))) != len(captured):
        raise ProblemError(f"{len(captured)} captured arrays were given; the functions among the options captured {needed}.")
    request = CacheRequest(spec_of(step.is_causal, options, return_lse), tuple(functions.among(options)), captured)
    causal = step.causal if "causal" in step.arrays else step.is_causal
    return of_step(request, causal) if type(options["mask"]) is functions.Function and causal is not False else request


def of_step(request: CacheRequest, causal: Any) -> CacheRequest:
    """The same, with a step's ``causal`` in the function that is the mask."""
    own = dict(request.own)
    count = len(own["mask"].traced.labels)
    own["mask"], captured = functions.of_step(own["mask"], request.captured[:count], causal)
    return request._replace(own=tuple(own.items()), captured=(*captured, *request.captured[count:]))


def attend(
    q: Any, cache: KVCache, step: Step, request: CacheRequest, sinks: Any = None, out: Any = None, lse: Any = None
) -> tuple[Any, ...]:
    """Computes attention over a cache on arrays that have memory."""
    check_lse(lse, request.spec.return_lse)
    tensors, read = (q, sinks, *request.captured), read_call(q, cache, step, sinks, request.captured)
    call = None if read is None else find((request.key, *read[0]))
    if call is not None and read is not None:
        addresses = read[1]
    else:
        op, found = attention_of(q, cache, step, request, sinks)
        call = call_of(op, found, request.kernel, request.config)
        addresses = addresses_of(found)
        if read is not None:
            keep((request.key, *read[0]), call)
    return call(tensors, addresses, (out, lse) if request.spec.return_lse and (out is not None or lse is not None) else out)


def read_call(q: Any, cache: KVCache, step: Step, sinks: Any, captured: tuple[Any, ...]) -> Any:
    """The forms of all arrays of a call, their addresses, and what keeps these alive; None where one cannot be read, or autograd
    would follow."""
    read = None if cache.held.requires_grad else arrays.forms_of_any((q, sinks, *captured))
    if read is None:
        return None
    return (read[0], cache.held.forms, step.held.forms), read[1] + cache.held.addresses + step.held.addresses, read[2]


def check_lse(lse: Any, return_lse: bool) -> None:
    """Raises ProblemError where an array for lse was given that nothing is written to."""
    if lse is not None and not return_lse:
        raise ProblemError("lse was given without return_lse=True.")


def arrays_of(q: Any, cache: KVCache, step: Step, request: CacheRequest, sinks: Any) -> dict[str, Array]:
    """The arrays of a call by name. Raises ProblemError for one that autograd would follow."""
    found = {"q": arrays.read(q, "q")} | ({} if sinks is None else {"sinks": arrays.read(sinks, "sinks")})
    found |= functions.read(dict(request.own), request.captured) | cache.arrays_of(step.batch) | step.arrays
    if cache.requires_grad or arrays.requires_grad(q, sinks, *request.captured):
        raise ProblemError(NO_GRADIENT)
    return found


def attention_of(
    q: Any, cache: KVCache, step: Step, request: CacheRequest, sinks: Any
) -> tuple[AttentionKVCache, dict[str, Array]]:
    """The operation and the arrays of a call, in the order of ``read_call``. Raises ProblemError for a wrong argument."""
    found = arrays_of(q, cache, step, request, sinks)
    spec, own, read = request.spec, dict(request.own), dict(found)
    if own:
        if "mask" in own:  # which has in it what the step says
            read.pop("causal", None)
        *_, rows, heads, _ = found["q"].shape
        room = Limits(step.batch, heads, *(max_kv_len(found, step),) * 2, q_below=max(1, rows))  # of a sequence without keys, too
        made = functions.resolved(own, read, room)
        spec = dataclasses.replace(spec, **{name: functions.at_positions(option) for name, option in made.items()})
    return AttentionKVCache.of(read, spec, step.max_q_len, step.max_kv_len, request.split_keys, cache.scales), found


def max_kv_len(found: dict[str, Array], step: Step) -> int:
    """More keys than a sequence has."""
    room = table_of(found) * found["k_cache"].shape[1]
    return room if step.max_kv_len is None else min(room, step.max_kv_len)


@arguments.named
def explain_kvcache(
    q: Any, cache: KVCache, step: Step, *, window: Window | None = None, softcap: float | None = None, scale: float | None = None,
    mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None, bias: None = None, sinks: Any = None,
    split: str | int = "auto", return_lse: bool = False, invariant: bool = False, dropout: float = 0,
    kernel: str | None = None, config: Any = None,
) -> Explanation:  # fmt: skip
    """Says what ``attention_kvcache`` would run for these arrays, and why, without compiling or running it. Print the result.

    >>> print(rawattn.explain_kvcache(q, cache, step))

    Raises UnsupportedError where no kernel computes it, with the reasons.
    """
    score, softcap = with_slopes(softcap, score, alibi, bias, dropout)
    options = {"window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score, "invariant": invariant}
    check_objects(cache, step)
    op, found = attention_of(q, cache, step, request_of(step, options, return_lse, split), sinks)
    return explain_operation(op, device_of(found["q"]), kernel, config)


def append(
    cache: KVCache, step: Step | None, k: Any, v: Any, *, slots: Any = None, rotary: Rotary | None = None, q: Any = None,
    q_out: Any = None, **unknown: Unpack[Nothing],
) -> Any:  # fmt: skip
    """Writes new keys and values into a cache, in one launch, and rotates q on the way.

    >>> q = rawattn.append(cache, step, k, v, rotary=rotary, q=q)

    Args:
        cache: a ``rawattn.KVCache``, written in place.
        step: a ``rawattn.Step`` whose kv_lens count the new rows too: row j of a sequence's n new ones is key kv_len - n + j. A
            sequence with kv_len 0 takes no part. None where ``slots`` say where rows go and ``rotary`` has positions or is None.
        k: (batch, n, kv_heads, head_dim), or (total, kv_heads, head_dim) where the step has cu_seqlens_q; in the cache's dtype.
            None where q alone is rotated, as where it has other rows than k: give another step, whose lengths are those of q.
        v: the same with head_dim_v; None where the cache's v is a view of its k, or k is None.
        slots: int64, k's shape without its last two dimensions: where each row goes instead, page * page_size + row of the page;
            a negative one is skipped. The order of rows with one slot is not defined.
        rotary: a ``rawattn.Rotary`` that is applied to k, and to q.
        q: (..., heads, head_dim) with the rows of k, to be rotated.
        q_out: receives the rotated q; q itself may be given. Rows without a position, such as those of sequences that take no
            part, are left as they are.

    Returns:
        The rotated q, where q is given; else None.

    A page that several sequences share must not be written: no order is kept between them.

    Raises:
        ProblemError: an argument is wrong. On the CPU so are lengths, pages and slots that the cache does not have; on a GPU
            they are on the device, where nothing beyond the cache is written.
        UnsupportedError: no kernel does this on the arrays' device.

    The specification is ``rawattn.reference.append``.
    """
    if unknown:
        arguments.refuse(append, unknown)
    if front_end.load_torch() and front_end.torch.dispatch((q if k is None else k,)) is front_end.torch.attention:
        _refuse_where_traced(q_out=q_out)
        return front_end.torch.caches.append(cache, step, k, v, slots, rotary, q)
    return write(cache, step, k, v, slots, rotary, q, q_out)


def write(
    cache: KVCache, step: Step | None, k: Any, v: Any, slots: Any = None, rotary: Rotary | None = None, q: Any = None,
    q_out: Any = None,
) -> Any:  # fmt: skip
    """Computes ``append`` on arrays that have memory."""
    check_objects(cache, step, rotary, optional=True)
    read = read_append(cache, step, rotary, (k, v, slots, q), q_out)
    call = None if read is None else find(read[0])
    if call is not None and read is not None:
        addresses = read[1]
    else:
        op, found = _append_of(cache, step, rotary, {"k": k, "v": v, "slots": slots, "q": q, "q_out": q_out})
        call, addresses = call_of(op, found), addresses_of(found)
        if read is not None:
            keep(read[0], call)
    in_place = q is not None and q_out is q
    results = call([x for x in (k, v, slots, q) if x is not None], addresses, None if in_place else q_out)
    for x in (*(() if k is None else (cache.k, cache.v)), q_out if in_place else None):
        arrays.written(x)
    return q_out if in_place else results[0] if results else None


def read_append(cache: KVCache, step: Step | None, rotary: Rotary | None, rows: tuple[Any, ...], q_out: Any) -> Any:
    """The key of an append of k, v, slots and q, torch tensors, and the addresses of its inputs; None where they must be looked
    at."""
    beside = [x.held for x in (step, rotary, cache) if x is not None]
    read, of_q_out = arrays.forms_of(rows), arrays.forms_of((q_out,))
    if read is None or of_q_out is None or [x for x in beside if x.requires_grad]:
        return None
    key = ("append", read[0], of_q_out[0], q_out is rows[-1], *[x.forms for x in beside])
    return key, sum([x.addresses for x in beside], read[1])


def _append_of(
    cache: KVCache, step: Step | None, rotary: Rotary | None, given: dict[str, Any]
) -> tuple[Append, dict[str, Array]]:
    """The operation and its arrays. Raises ProblemError for a wrong argument."""
    if cache.v_in_k and given["v"] is not None:
        raise ProblemError("v was given, but the cache's v is a view of its k; give v=None.")
    if not cache.v_in_k and given["v"] is None and given["k"] is not None:
        raise ProblemError("v is None; it must be an array, since the cache's v is no view of its k.")
    if cache.requires_grad or (rotary is not None and rotary.requires_grad) or arrays.requires_grad(*given.values()):
        raise ProblemError(NO_GRADIENT)
    found = arrays.named(tuple(given), tuple(given.values()))
    q_out = found.pop("q_out", None)
    found |= ({} if step is None else step.arrays) | ({} if rotary is None else rotary.arrays)
    rows = rows_of(found).shape
    found |= cache.arrays_of(step.batch if step is not None else 1 if len(rows) == 3 else rows[0])
    style = "" if rotary is None else "interleaved" if rotary.interleaved else "neox"
    read = {name: x for name, x in found.items() if name not in ("causal", "kv_begin")}
    read |= {} if q_out is None else {"q_out": q_out}
    op = Append.of(read, style, *((None, None) if step is None else (step.max_q_len, step.max_kv_len)), cache.scales)
    _check_writable(cache)
    if op.in_place and q_out is not None:
        check_written("q_out", q_out, given["q_out"])
    return op, found


def attention_append(q: Any, k: Any, v: Any, cache: KVCache, step: Step, *, rotary: Rotary | None = None, **options: Any) -> Any:
    """``append`` of k and v, and ``attention_kvcache`` of q over the cache that holds them then.

    >>> o = rawattn.attention_append(q, k, v, cache, step, rotary=rotary)

    Arguments as in ``append``, and ``options`` as in ``attention_kvcache``, which also says what is given back. With ``rotary`` q
    is rotated too, and stays as it was.
    """
    if unknown := [name for name in options if name not in _OPTIONS]:  # before anything is written
        arguments.refuse(attention_append, unknown, options=_OPTIONS)
    rotated = append(cache, step, k, v, rotary=rotary, q=None if rotary is None else q)
    return attention_kvcache(q if rotary is None else rotated, cache, step, **options)


_OPTIONS = tuple(inspect.signature(attention_kvcache).parameters)[4:-1]


def merge_states(
    parts: Sequence[tuple[Any, Any]], *, sinks: Any = None, out: Any = None, **unknown: Unpack[Nothing]
) -> tuple[Any, Any]:
    """Attention over the union of several sets of keys, from o and lse over each of them.

    >>> o, lse = rawattn.merge_states([(o_prefix, lse_prefix), (o_rest, lse_rest)])

    lse = log(sum_p exp(lse_p) + exp(sink)) and o = sum_p exp(lse_p - lse) o_p, added in the order of the parts.

    Args:
        parts: pairs (o, lse) as ``attention``, ``attention_varlen`` and ``attention_kvcache`` give them, of the same queries over
            keys that no two parts share: o (batch, q_len, heads, head_dim_v) or (total_q, heads, head_dim_v), lse
            (batch, heads, q_len) or (heads, total_q), natural logarithms, float32 (float64 for fp64). Strides are free but for
            o's last dimension. A GPU merges 16 in one launch, and adds others to a sum in float32, 15 with each launch, in order.
        sinks: (heads,), as in ``attention``: given here once, and not to the parts.
        out: receives o. It may be float32 where the parts are bf16 or fp16, and o of the first part may then be such a sum of
            others: of many parts, some at a time, o is rounded once. It may be o of the first part itself.

    Returns:
        o in the parts' dtype, or out, and lse.

    A part with lse = -inf takes no part, whatever its o holds; a row without any has o = 0 and lse = -inf, or its sink.

    Raises:
        ProblemError: an argument is wrong.
        UnsupportedError: no kernel does this on the arrays' device.

    The formula is that of FlashAttention's splits (arXiv 2307.08691, section 3.1).
    """
    if unknown:
        arguments.refuse(merge_states, unknown)
    given: list[Any] = []
    if not hasattr(parts, "__iter__"):
        raise ProblemError(f"parts is {brief(parts)}; it must be pairs (o, lse).")
    for i, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise ProblemError(f"part {i} is {type(part).__name__}; it must be a pair (o, lse).")
        given += part
    in_place = out is not None and bool(given) and out is given[0]
    arrays.check_untraced((*given, sinks))
    read, of_out = arrays.forms_of((*given, sinks)), arrays.forms_of((out,))
    key = None if read is None or of_out is None else ("merge", read[0], of_out[0], in_place)
    call, addresses = find(key), read[1] if read else ()
    if call is None:
        op, found = _merge_of(given, sinks, {"out": None if out is None else arrays.read(out, "out"), "in_place": in_place})
        if op.count > MOST_ARRAYS and not found["o_0"].is_cpu:
            return _merge_in_turn(list(zip(given[::2], given[1::2], strict=True)), sinks, out, found)
        call, addresses = call_of(op, found), addresses_of(found)
        if key is not None:
            keep(key, call)
    tensors = given if sinks is None else (*given, sinks)
    if in_place:
        (lse,) = call(tensors, addresses)
        arrays.written(out)
        return out, lse
    o, lse = call(tensors, addresses, None if out is None else (out, None))
    return o, lse


def _merge_in_turn(parts: list[tuple[Any, Any]], sinks: Any, out: Any, inputs: dict[str, Array]) -> tuple[Any, Any]:
    """``merge_states`` of more parts than a launch takes: some at a time are added to a sum, in order, which is rounded once."""
    if out is not None and out is not parts[0][0]:
        array = arrays.read(out, "out")
        check_written("out", array, out)
        check_output("out", array, 1, inputs.items())
    first = inputs["o_0"]
    total = arrays.maker(first, tuple(first.shape), ELEMENTS[first.dtype].lse_name)(first.object)
    found = merge_states(parts[:MOST_ARRAYS], out=total)
    for i in range(MOST_ARRAYS, len(parts), MOST_ARRAYS - 1):
        rest = parts[i : i + MOST_ARRAYS - 1]
        is_last = i + len(rest) == len(parts)
        found = merge_states([found, *rest], **({"sinks": sinks, "out": out} if is_last else {"out": total}))
    return to_libraries(found, (out,), parts[0][0])


def _merge_of(given: list[Any], sinks: Any, options: dict[str, Any]) -> tuple[Combine, dict[str, Array]]:
    """The merge of these parts, o_0, lse_0, o_1 and so on, and its arrays."""
    names = Combine.input_names(len(given))
    named = dict(zip(names, given, strict=False)) | ({} if sinks is None else {"sinks": sinks})
    if arrays.requires_grad(*named.values()):
        raise ProblemError(NO_GRADIENT)
    found = {name: arrays.read(x, name) for name, x in named.items()}
    op = Combine.of_call(found, options, ())
    if op.in_place:
        check_written("out", found["o_0"], given[0])
    return op, found


def check_objects(cache: Any, step: Any, rotary: Any = None, optional: bool = False) -> None:
    """Raises ProblemError where an argument is of another class than it must be, or its arrays lie elsewhere than they did."""
    if not isinstance(cache, KVCache):
        raise ProblemError(f"cache is a {type(cache).__name__}; it must be a rawattn.KVCache.")
    if not isinstance(step, Step) and not (step is None and optional):
        raise ProblemError(f"step is {'None' if step is None else f'a {type(step).__name__}'}; it must be a rawattn.Step.")
    if rotary is not None and not isinstance(rotary, Rotary):
        raise ProblemError(f"rotary is a {type(rotary).__name__}; it must be a rawattn.Rotary, or None.")
    cache.held.check("KVCache")
    if step is not None:
        step.held.check("Step")
    if rotary is not None:
        rotary.held.check("Rotary")


def spec_of(causal: bool, options: dict[str, Any], return_lse: bool) -> Spec:
    """The options of a call, the defaults in place of functions; ``causal`` is what the step says of all sequences, which a mask
    that is a function has in it."""
    mask, is_function = options["mask"], type(options["mask"]) is functions.Function
    if is_function and options["window"] is not None:
        raise ProblemError("mask was given beside window; write what both keep in the function.")
    spec = Spec.of(causal=causal and mask is None, return_lse=return_lse, **functions.without(options))
    return dataclasses.replace(spec, mask=causal_and(mask)) if causal and mask is not None and not is_function else spec


def split_keys_of(split: Any) -> int:
    """The keys of a split, 0 for "auto"."""
    if isinstance(split, str) and split == "auto":
        return 0
    if isinstance(split, bool) or not isinstance(split, int) or split < 64 or split & (split - 1):
        raise ProblemError(f"split is {split!r}; it must be 'auto' or a power of two from 64.")
    return split


def _refuse_where_traced(**given: Any) -> None:
    """Raises ProblemError for an argument that torch's operators do not have."""
    for name, value in given.items():
        if value is not None:
            raise ProblemError(f"{name} was given where torch traces, transforms or casts the call; the operator has no {name}.")


def _check_writable(cache: KVCache) -> None:
    """Raises ProblemError where the cache cannot be written in place."""
    for name in ("k", "v"):
        pool, array = getattr(cache, name), cache.arrays[name]
        if array.object is not pool:
            raise ProblemError(
                f"the cache's {name} is a {type(pool).__name__}, which cannot be written in place; make the cache of torch, CuPy "
                f"or NumPy arrays. A JAX array is immutable: write by {name}.at[...].set(...), and make another KVCache."
            )
        if array.is_cpu and array.library == "numpy" and not pool.flags.writeable:
            raise ProblemError(f"the cache's {name} is read-only; make the cache of a writable array.")
        if memory.overlap(array, array):
            raise ProblemError(f"several elements of the cache's {name} share one place in memory; make it of a whole array.")


def call_of(
    op: AttentionKVCache | Append | Combine, found: dict[str, Array], kernel: str | None = None, config: Any = None
) -> GpuCall | CpuCall:
    """The call of an operation on arrays that were checked, kept or made."""
    log(op)
    key = (op, kernel, config, *map(arrays.form_of, found.values()), *found)
    call: GpuCall | CpuCall | None = find(key)
    if call is None:
        first = next(iter(found.values()))
        device = device_of(first)
        with spared_capture(first):
            call = Plan(op, device, select(op, device, kernel, config), first.library).bind(found)
        keep(key, call)
    return call


def log(op: AttentionKVCache | Append | Combine) -> None:
    """Records an operation where RAWATTN_LOG asks for it: one of all that need the same kernels, since lengths of a step, and how
    many rows there are, change all the time. The bound on a sequence's rows counts by powers of two, which choose kernels, and by
    how it fills tiles, which chooses configurations of attn_fwd_mma."""
    if not os.environ.get("RAWATTN_LOG"):
        return
    key: tuple[Any, ...] = (op.kind, op.layout)
    if isinstance(op, AttentionKVCache):
        rows = op.q_len * op.heads_per_kv
        key += ((rows - 1).bit_length(), op.heads_per_kv, packs(over_tensors(op)))
    log_operation(op, key)


def check_written(name: str, array: Array, x: Any) -> None:
    """Raises ProblemError where an array of the caller cannot be written."""
    if array.object is not x:
        raise ProblemError(f"{name} is a {type(x).__name__}, which cannot be written in place; call without {name}.")
    if array.library == "numpy" and not x.flags.writeable:
        raise ProblemError(f"{name} is read-only; give a writable array.")
    if arrays.requires_grad(x):
        raise ProblemError(NO_GRADIENT)


def violations(device: Any = 0) -> tuple[str, ...]:
    """Says what launches on a GPU found wrong since the last call: lengths, pages and slots that a cache does not have, and
    ``cu_seqlens`` that lie outside of packed rows.

    >>> rawattn.violations(q.device)
    ('kv_len: a sequence is longer than its bound, its pages, or shorter than its new rows',)

    Args:
        device: the GPU's number, or as torch, CuPy and JAX name it: ``torch.device``, "cuda:0", ``cupy.cuda.Device``, a JAX
            device. "cuda" is torch's current one. A CPU gives (), since there what is wrong raises.

    It waits for the device. What was wrong was left out: nothing beyond the arrays was read or written. Raises ProblemError for
    what is no device.
    """
    number = arrays.number_of_device(device)
    found = 0 if number is None else counters.take_violations(number)
    return tuple(f"{name}: {what}" for bit, (name, what) in enumerate(VIOLATIONS.items()) if found >> bit & 1)


VIOLATIONS = {  # in the order of the bits in tile/violated.cuh
    "kv_len": "a sequence is longer than its bound, its pages, or shorter than its new rows",
    "q_len": "a sequence has more rows of q than its bound, or cu_seqlens_q lies outside of them",
    "page": "a sequence has a page that is none of the cache's",
    "position": "a row has a position that cos and sin do not have",
    "slot": "a slot is none of the cache's",
    "kv_begin": "the first key of a sequence that counts is none of its keys",
    "torn": "lengths over a cache changed while a launch read them, and its results are undefined; the next launch says so",
    "cu_seqlens": "cu_seqlens_q or cu_seqlens_kv fall, or lie outside of the rows; sequences from there on were left out",
}

"""Attention over caches: its public functions, and the requests and arrays of a call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from ..array import reading, torch_state
from ..array.array import Array
from ..array.forms import forms_of_any
from ..errors import ProblemError
from ..operation import AttentionKVCache, arguments, captures, functions
from ..operation.arguments import Nothing, Unpack
from ..operation.kvcache import EVEN, batch_of, table_of
from ..operation.spec import MaskLike, ScoreLike, Spec, Window
from ..runtime import front_end
from ..runtime.bound_call import addresses_of
from ..runtime.call_cache import find, keep
from ..runtime.explain import Explanation, explain_operation
from ..runtime.outputs import one_or_all
from ..runtime.plan import NO_GRAD, device_of
from ..runtime.request import KEPT_REQUESTS
from ..trace.proofs import Limits
from ..variant.mask import causal_and
from .cache import KVCache
from .call import call_of, check_objects, refuse_where_traced
from .step import Step


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
            Over a latent cache it may be a pair, (q_nope, q_rope), of head_dim_v columns and the rest; on GPUs from Ampere on.
        cache: a ``rawattn.KVCache``; its pages are read where they lie.
        step: a ``rawattn.Step``: how long the sequences are, which pages they have, and whether they are causal. The last query
            of a sequence stands at its last key.
        window, softcap, scale, score, alibi, sinks: as in ``rawattn.attention``. bias, dropout: refused; a score captures a bias.
        mask: a mask instead of ``window``; functions see positions in the sequence. Of a causal step keys count that both keep.
        split: keys of a split, whose results are folded; "auto": by the sequence's length; "even": latent caches' equal shares.
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

    On a GPU the bound on the rows of a sequence chooses the kernel. Rows are the queries of all heads that share a key head;
    q's shape and ``Step.max_q_len`` bound them. ``attn_decode`` takes up to 256, on Hopper ``attn_decode_wide`` those above
    32, or above 16 with one or two key heads. Where there may be more than 256, as in chunked prefill, ``attn_fwd`` computes
    all rows of the call on Hopper; ``attn_fwd_mma`` does so elsewhere. A graph replays each with any lengths.
    With the first two a row has the same bits in any batch whose bound is as its own: up to 16, 32 or 64 rows, or more. With the
    others they follow from the configuration too, which shapes and bounds choose.

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
    if front_end.load_torch() and front_end.torch.dispatch(parts_of(q)) is front_end.torch.attention:
        refuse_where_traced(out=out, lse=lse, kernel=kernel, config=config)
        found = front_end.torch.caches.attention_kvcache(q, cache, step, options, sinks, split)
        return one_or_all(found if return_lse else found[:1])
    check_objects(cache, step)
    return one_or_all(attend(q, cache, step, request_of(step, options, return_lse, split, kernel, config), sinks, out, lse))


def with_slopes(softcap: Any, score: Any, alibi: Any, bias: Any, dropout: Any) -> tuple[Any, Any]:
    """The score and the softcap; ``alibi`` slopes make one score of all. Raises ProblemError for a bias and for dropout."""
    if bias is not None:
        raise ProblemError(
            "bias was given, whose keys would be those of one length, and sequences in a cache grow; capture it in a score of "
            "positions: score=lambda s, b, h, q, kv: s + bias[b, h, q, kv]."
        )
    if dropout:
        raise ProblemError(f"dropout is {dropout!r}; it is for training, and attention over a cache has none: leave it out.")
    return (score, softcap) if alibi is None else (functions.biased(softcap, score, alibi, None), None)


class CacheRequest(NamedTuple):
    """Everything that selects a kernel except the arrays of a cache and a step: a spec without the functions, the functions, the
    keys of a split, a kernel and a configuration; and the arrays that the functions captured."""

    spec: Spec
    traced: tuple[tuple[str, functions.Function], ...] = ()
    captured: tuple[Any, ...] = ()
    split_keys: int = 0
    kernel: str | None = None
    config: Any = None
    kept: object = None

    @property
    def key(self) -> Any:
        """The key of the request without its arrays; requests without functions are kept, and have one object, ``kept``."""
        return self.kept or (self.spec, self.traced, self.split_keys, self.kernel, self.config)


def request_of(
    step: Step, options: dict[str, Any], return_lse: bool, split: Any = "auto", kernel: str | None = None, config: Any = None
) -> CacheRequest:
    """The request of a call. A mask that is a function also keeps to ``causal`` of the step."""
    mask, score, options = options["mask"], options["score"], _with_lists(step, options)
    if (mask is None or not functions.is_function(mask)) and (score is None or not functions.is_function(score)):
        try:
            return plain_request(step.is_causal, options, return_lse, split, kernel, config)
        except TypeError:  # what cannot be hashed is not kept
            pass
    options, captured = captures.take(options)
    request, split_keys = request_with(step, options, captured, return_lse), split_keys_of(split)
    return request._replace(split_keys=split_keys, kernel=kernel, config=config)


def _with_lists(step: Step, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call, with the kind of the step's lists of keys, where there are some."""
    return options if step.lists is None else {**options, "keys": step.lists}


def plain_request(
    causal: bool, options: dict[str, Any], return_lse: bool, split: Any = "auto", kernel: str | None = None, config: Any = None
) -> CacheRequest:
    """``request_of`` for options without functions, of a causal step or of another one. Raises TypeError for what is not kept."""
    window = options["window"]
    types = tuple(map(type, window)) if isinstance(window, tuple) else ()
    return _make_plain_request(types, causal, return_lse, split, kernel, config, **options)


@functools.lru_cache(maxsize=KEPT_REQUESTS, typed=True)
def _make_plain_request(
    types: tuple[type, ...], causal: bool, return_lse: bool, split: Any, kernel: str | None, config: Any, **options: Any
) -> CacheRequest:
    """The request, kept. ``types`` are those in a window: 1 and 1.0 are equal, but not both are right."""
    return CacheRequest(spec_of(causal, options, return_lse), (), (), split_keys_of(split), kernel, config, object())


def request_with(step: Step, options: dict[str, Any], captured: tuple[Any, ...], return_lse: bool) -> CacheRequest:
    """The request of ``options`` whose functions have no arrays, with ``captured``, the arrays that these captured."""
    options = _with_lists(step, options)
    if (needed := len(captures.names(options))) != len(captured):
        raise ProblemError(f"{len(captured)} captured arrays were given; the functions among the options captured {needed}.")
    request = CacheRequest(spec_of(step.is_causal, options, return_lse), tuple(functions.among(options)), captured)
    causal = step.causal if "causal" in step.arrays else step.is_causal
    return of_step(request, causal) if type(options["mask"]) is functions.Function and causal is not False else request


def of_step(request: CacheRequest, causal: Any) -> CacheRequest:
    """The request whose mask, a function, also keeps to a step's ``causal``."""
    traced = dict(request.traced)
    count = len(traced["mask"].traced.labels)
    traced["mask"], captured = functions.of_step(traced["mask"], request.captured[:count], causal)
    return request._replace(traced=tuple(traced.items()), captured=(*captured, *request.captured[count:]))


def attend(
    q: Any, cache: KVCache, step: Step, request: CacheRequest, sinks: Any = None, out: Any = None, lse: Any = None
) -> tuple[Any, ...]:
    """Computes attention over a cache on arrays that have memory."""
    check_lse(lse, request.spec.return_lse)
    tensors, read = (*parts_of(q), sinks, *request.captured), read_call(q, cache, step, sinks, request.captured)
    key, addresses = (None, ()) if read is None else ((request.key, *read[0]), read[1])
    call = find(key)
    if call is None:
        op, inputs = attention_of(q, cache, step, request, sinks)
        call, addresses = call_of(op, inputs, request.kernel, request.config), addresses_of(inputs)
        keep(key, call)
    return call(tensors, addresses, (out, lse) if request.spec.return_lse and (out is not None or lse is not None) else out)


def parts_of(q: Any) -> tuple[Any, ...]:
    """Returns q alone, or q_nope and q_rope. Raises ProblemError for any other number of arrays."""
    if not isinstance(q, (tuple, list)):
        return (q,)
    if len(q) != 2:
        raise ProblemError(f"q is a {type(q).__name__} of {len(q)}; it must be one array, or the pair (q_nope, q_rope).")
    return tuple(q)


def read_call(q: Any, cache: KVCache, step: Step, sinks: Any, captured: tuple[Any, ...]) -> Any:
    """The forms of all arrays of a call, their addresses, and the objects that keep these valid; None where an array cannot be
    read, or autograd would follow."""
    read = None if cache.held.requires_grad else forms_of_any((*parts_of(q), sinks, *captured))
    if read is None:
        return None
    return (read[0], cache.held.forms, step.held.forms), read[1] + cache.held.addresses + step.held.addresses, read[2]


def check_lse(lse: Any, return_lse: bool) -> None:
    """Raises ProblemError where an array for lse was given that nothing is written to."""
    if lse is not None and not return_lse:
        raise ProblemError("lse was given without return_lse=True.")


def attention_of(
    q: Any, cache: KVCache, step: Step, request: CacheRequest, sinks: Any
) -> tuple[AttentionKVCache, dict[str, Array]]:
    """The operation and the arrays of a call, by name, in the order of ``read_call``. Raises ProblemError for a wrong argument,
    and for one that autograd would follow."""
    parts = parts_of(q)
    if len(parts) == 2 and not cache.is_latent:
        raise ProblemError("q is a pair, (q_nope, q_rope), but the cache's v is not the first columns of its k; give one array.")
    inputs = reading.read_named(("q", "q_rope", "sinks"), (*parts, None, sinks) if len(parts) == 1 else (*parts, sinks))
    batch = batch_of({**step.arrays, **inputs})
    inputs |= captures.read(dict(request.traced), request.captured) | cache.arrays_of(batch) | step.arrays
    if cache.requires_grad or torch_state.requires_grad(*parts, sinks, *request.captured):
        raise ProblemError(NO_GRAD)
    spec, traced, read = request.spec, dict(request.traced), dict(inputs)
    if traced:
        if "mask" in traced:  # which has in it what the step says
            read.pop("causal", None)
        *_, rows, heads, _ = inputs["q"].shape
        kv_len = table_of(inputs) * inputs["k_cache"].shape[1]  # no sequence has more keys
        kv_len = kv_len if step.max_kv_len is None else min(kv_len, step.max_kv_len)
        limits = Limits(batch, heads, kv_len, kv_len, q_below=max(1, rows))  # of a sequence without keys, too
        options = captures.resolve(traced, read, limits)
        spec = dataclasses.replace(spec, **{name: functions.at_positions(option) for name, option in options.items()})
    bounds, of_cache = (step.max_q_len, step.max_kv_len), (cache.scales, cache.is_latent)
    return AttentionKVCache.of(read, spec, *bounds, request.split_keys, *of_cache), inputs


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
    op, inputs = attention_of(q, cache, step, request_of(step, options, return_lse, split), sinks)
    return explain_operation(op, device_of(inputs["q"]), kernel, config)


def spec_of(causal: bool, options: dict[str, Any], return_lse: bool) -> Spec:
    """The options of a call, with the defaults in place of functions; ``causal`` says that the step makes all sequences causal,
    which a mask that is a function sees to itself."""
    mask, is_function = options["mask"], type(options["mask"]) is functions.Function
    if is_function and options["window"] is not None:
        raise ProblemError("mask was given beside window; write what both keep in the function.")
    spec = Spec.of(causal=causal and mask is None, return_lse=return_lse, **functions.without(options))
    return dataclasses.replace(spec, mask=causal_and(mask)) if causal and mask is not None and not is_function else spec


def split_keys_of(split: Any) -> int:
    """The keys of a split, 0 for "auto", EVEN for "even"."""
    if isinstance(split, str) and split == "auto":
        return 0
    if isinstance(split, str) and split == "even":
        return EVEN
    if isinstance(split, bool) or not isinstance(split, int) or split < 64 or split & (split - 1):
        raise ProblemError(f"split is {split!r}; it must be 'auto', 'even' or a power of two from 64.")
    return split

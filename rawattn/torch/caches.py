"""rawattn's operators over caches in torch: ``torch.ops.rawattn.attention_kvcache`` and ``append``, whose schema says that it
writes the cache. A call on plain eager tensors does without them, as one of ``operators.py`` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..array import eager
from ..errors import ProblemError
from ..operation import append as append_operation
from ..operation import captures, functions, kvcache
from ..operation.keys import joined, parted
from ..operation.spec import Spec
from ..runtime.plan import NO_GRAD
from ..serving import KVCache, Rotary, Step, attention
from ..serving.append import write
from ..serving.cache import LAYOUTS, broadcast, check_pools, check_scale, read_records, scale_array
from ..serving.merge import merge_states
from ..serving.plan import KVCachePlan
from ..serving.rotary import check_angles
from ..serving.step import check_lengths
from ..variant.element import FP8_DS_MLA
from .autograd import NO_TANGENT
from .operators import describe
from .option_text import from_constants, to_constants

LENGTHS = ("kv_lens", "page_table", "cu_seqlens_q", "kv_begin", "causal", "indptr", "indices", "last_page_len")  # of a Step
_LENGTHS = ", ".join(f"Tensor? {name}=None" for name in LENGTHS)
_BOUNDS = 'str layout="NHD", SymInt? max_q_len=None, SymInt? max_kv_len=None'
_SCALES = "Tensor? k_scales=None, Tensor? v_scales=None, float k_scale=1.0, float v_scale=1.0"  # arrays and numbers
_SCHEMAS = (
    f"attention_kvcache(Tensor q, Tensor k_cache, Tensor? v_cache, {_LENGTHS}, Tensor? sinks=None, {_BOUNDS}, int split_keys=0, "
    f'str spec="{{}}", Tensor[]? captured=None, {_SCALES}, Tensor? keys=None, Tensor? keys_counts=None, Tensor? q_rope=None) -> '
    "(Tensor o, Tensor lse)",
    f"append(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor? k, Tensor? v, {_LENGTHS}, Tensor? slots=None, Tensor? cos=None, "
    f"Tensor? sin=None, Tensor? positions=None, Tensor? q=None, {_BOUNDS}, bool interleaved=False, {_SCALES}, "
    "int first_column=0) -> Tensor",
)

_library = torch.library.Library("rawattn", "FRAGMENT")  # its operators live as long as this object
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
eager.skip((KVCachePlan.run, attention.request_of, attention.attend, write, merge_states))
_ATTENTION, _APPEND = torch.ops.rawattn.attention_kvcache.default, torch.ops.rawattn.append.default


# ---- the public calls, where torch must see an operator; Dynamo traces these


def attention_kvcache(q: Any, cache: KVCache, step: Step, options: dict[str, Any], sinks: Any, split: Any) -> tuple[Any, Any]:
    """Computes ``rawattn.attention_kvcache`` by way of the operator."""
    lengths, causal = _read_lengths(step)
    options, captured = captures.take(options)
    numbers, counts, lists = parted(step.keys)
    constants = tuple([(name, to_constants(value)) for name, value in {**options, "keys": lists}.items()])
    text = _write_text(causal, constants)
    bounds, split_keys = (step.max_q_len, step.max_kv_len), attention.split_keys_of(split)
    rest = cache.layout, *bounds, split_keys, text, list(captured) or None, *_split_scales(cache), numbers, counts
    first, *q_rope = attention.parts_of(q)
    return _ATTENTION(first, cache.k, cache.v, *lengths, sinks, *rest, *q_rope)


def append(cache: KVCache, step: Step | None, k: Any, v: Any, slots: Any, rotary: Rotary | None, q: Any) -> Any:
    """Computes ``rawattn.append`` by way of the operator."""
    lengths = [None] * len(LENGTHS) if step is None else _read_lengths(step)[0]
    angles = (None, None, None) if rotary is None else (rotary.cos, rotary.sin, rotary.positions)
    bounds = (None, None) if step is None else (step.max_q_len, step.max_kv_len)
    interleaved = rotary is not None and rotary.interleaved
    rest = cache.layout, *bounds, interleaved, *_split_scales(cache), 0 if rotary is None else rotary.first_column
    rotated_q = _APPEND(cache.k, cache.v, k, v, *lengths, slots, *angles, q, *rest)
    return None if q is None else rotated_q


def _read_lengths(step: Step) -> tuple[list[Any], bool]:
    """Reads the arrays of a step, in the order of ``LENGTHS``, and whether the step is causal for all sequences."""
    is_one = isinstance(step.causal, bool)
    lengths = [None if name == "causal" and is_one else getattr(step, name) for name in LENGTHS]
    return lengths, is_one and step.causal and step.form != "rows"


def _split_scales(cache: KVCache) -> tuple[Any, Any, float, float]:
    """Splits the scales of a cache into those of k and v that are arrays, and those that are numbers."""
    k, v = cache.k_scale, cache.v_scale
    arrays = [x if isinstance(x, torch.Tensor) else None for x in (k, v)]
    numbers = [1.0 if isinstance(x, torch.Tensor) else float(x) for x in (k, v)]
    return arrays[0], arrays[1], numbers[0], numbers[1]


def _write_text(causal: bool, constants: tuple[tuple[str, Any], ...]) -> str:
    """Writes the options that ``to_constants`` took apart as the operator takes them: a spec, functions in the places of its mask
    and score, and with a function as mask whether the step is causal for all sequences, which the spec does not say then."""
    options = {name: from_constants(value) for name, value in constants}
    by_role, spec = functions.among(options), attention.spec_of(causal, options, False)
    has_mask = type(options["mask"]) is functions.Function
    try:
        return json.dumps(spec.to_json() | functions.to_json(by_role) | ({"step_is_causal": causal} if has_mask else {}))
    except TypeError as error:
        raise ProblemError(f"{spec} cannot be text ({error}); a mask or score of your own must be an Option.") from None


_write_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- the operators


def _make_step(lengths: Sequence[Any], bounds: tuple[Any, Any], keys: Any = None) -> Step:
    kv_lens, page_table, cu_seqlens_q, kv_begin, causal, indptr, indices, last_page_len = lengths
    causal = False if causal is None else causal
    pages = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    return Step(kv_lens, page_table, cu_seqlens_q, kv_begin, causal, *bounds, **pages, keys=keys)


def _read_spec(text: str) -> tuple[Spec, dict[str, functions.Function], bool]:
    """Reads the text of ``_write_text``: the spec of a call that gives lse, its functions by role, whether its step is causal."""
    try:
        fields, by_role = functions.from_json(json.loads(text))
        causal = fields.pop("step_is_causal", False)
        return Spec.from_json({**fields, "return_lse": True}), by_role, causal
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ProblemError(f"spec is {text[:80]!r}; it must be the JSON text of a rawattn.Spec ({error}).") from None


def _split_arguments(args: Sequence[Any], first: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Splits the arguments of an operator: the ``first`` ones, the lengths, and those behind the lengths."""
    return args[:first], args[first : first + len(LENGTHS)], args[first + len(LENGTHS) :]


def _fill_defaults(args: Sequence[Any], schema: Any, named: dict[str, Any]) -> list[Any]:
    """Returns all arguments in the order of the schema, with its defaults for those that are missing."""
    rest = schema.arguments[len(args) :]
    return [*args, *(named.get(x.name, x.default_value) for x in rest)]


def _make_cache(k: Any, v: Any, layout: str, k_scales: Any, v_scales: Any, k_scale: float, v_scale: float) -> KVCache:
    if v is None:
        return KVCache.records(k)
    scales = [number if array is None else array for array, number in ((k_scales, k_scale), (v_scales, v_scale))]
    return KVCache(k, v, layout, *scales)


def _compute_attention(*args: Any, **named: Any) -> tuple[Any, Any]:
    """Computes the operator ``attention_kvcache`` on real tensors."""
    (q, k, v), lengths, rest = _split_arguments(_fill_defaults(args, _ATTENTION._schema, named), 3)
    *head, text, captured, k_scales, v_scales, k_scale, v_scale, numbers, counts, q_rope = rest
    sinks, layout, *bounds, split_keys = head
    spec, by_role, causal = _read_spec(text)
    step = _make_step(lengths, tuple(bounds), joined(numbers, counts, spec.keys))
    request = attention.CacheRequest(spec, tuple(by_role.items()), tuple(captured or ()), split_keys)
    is_causal = step.causal if "causal" in step.arrays else causal
    if "mask" in by_role and is_causal is not False:
        request = attention.of_step(request, is_causal)
    pair = q if q_rope is None else (q, q_rope)
    results = attention.attend(pair, _make_cache(k, v, layout, k_scales, v_scales, k_scale, v_scale), step, request, sinks)
    return results[0], results[1]


def _compute_append(*args: Any, **named: Any) -> Any:
    """Computes the operator ``append`` on real tensors."""
    (k_cache, v_cache, k, v), lengths, rest = _split_arguments(_fill_defaults(args, _APPEND._schema, named), 4)
    slots, cos, sin, positions, q, layout, max_q_len, max_kv_len, interleaved, *scales, first_column = rest
    step = None if all(x is None for x in lengths) else _make_step(lengths, (max_q_len, max_kv_len))
    rotary = None if cos is None else Rotary(cos, sin, interleaved, positions, first_column)
    rotated_q = write(_make_cache(k_cache, v_cache, layout, *scales), step, k, v, slots, rotary, q)
    return k.new_empty(0) if q is None else rotated_q


def _describe_arrays(tensors: dict[str, Any], layout: str, scales: Sequence[Any]) -> dict[str, Any]:
    """Describes tensors without memory, by name; those of the cache as (pages, page_size, kv_heads, columns). ``scales`` are the
    cache's scales, first the arrays, then the numbers."""
    arrays = {name: describe(x) for name, x in tensors.items() if x is not None}
    if layout not in LAYOUTS:
        raise ProblemError(f"layout is {layout!r}; it must be 'NHD' or 'HND'.")
    if "v_cache" not in arrays:
        arrays["k_cache"] = read_records(arrays["k_cache"], FP8_DS_MLA)
    for name in ("k_cache", "v_cache") if "v_cache" in arrays else ():
        array = arrays[name]
        if len(array.shape) != 4:
            raise ProblemError(f"{name} has {len(array.shape)} dimensions, {tuple(array.shape)}; it must have 4.")
        shape, strides = (tuple(x[axis] for axis in LAYOUTS[layout]) for x in (array.shape, array.strides))
        arrays[name] = array._replace(shape=shape, strides=strides)
    if "v_cache" in arrays:
        check_pools(arrays["k_cache"], arrays["v_cache"], layout)
    k, lengths = arrays["k_cache"], {name: x for name, x in arrays.items() if name in (*LENGTHS, "keys")}
    if lengths:
        check_lengths(lengths, "keys" in lengths and "kv_lens" not in lengths and "indptr" not in lengths)
    rows = arrays["q"].shape if "k" not in arrays else arrays["k"].shape
    has_batch = lengths.keys() - {"keys"}
    batch = kvcache.batch_of(lengths) if has_batch else 1 if len(rows) == 3 else rows[0]
    for name, array, number in zip(("k_scale", "v_scale"), scales[:2], scales[2:], strict=True):
        if array is None:
            check_scale(name, number, k.dtype)
        else:
            arrays[name] = broadcast(scale_array(name, describe(array), k), batch, k.shape[2])
    return arrays


def _fake_attention(*args: Any, **named: Any) -> tuple[Any, Any]:
    """Makes results of the right shapes, strides and dtypes. Raises ProblemError where the arguments contradict each other."""
    (q, k, v), lengths, rest = _split_arguments(_fill_defaults(args, _ATTENTION._schema, named), 3)
    sinks, layout, max_q_len, _, _, text, captured, *scales, numbers, counts, q_rope = rest
    spec, by_role, _ = _read_spec(text)
    tensors = {"q": q, "q_rope": q_rope, "k_cache": k, "v_cache": v, "sinks": sinks, **dict(zip(LENGTHS, lengths, strict=True))}
    tensors |= {"keys": numbers, "keys_counts": counts}
    arrays = _describe_arrays(tensors, layout, scales)
    kvcache.check_arrays(arrays, max_q_len)
    kvcache.check_keys(arrays, spec.keys)
    arrays |= dict(zip(captures.names(by_role), map(describe, captured or ()), strict=True))
    captures.check(captures.labels(by_role), arrays)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    head_dim_v = kvcache.format_of(arrays)[2]
    return q.new_empty((*q.shape[:-1], head_dim_v)), q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype)


def _fake_append(*args: Any, **named: Any) -> Any:
    """Makes the result of ``append`` as ``_fake_attention`` makes those of attention."""
    (k_cache, v_cache, k, v), lengths, rest = _split_arguments(_fill_defaults(args, _APPEND._schema, named), 4)
    slots, cos, sin, positions, q, layout, max_q_len, _, interleaved, *scales, first_column = rest
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **dict(zip(LENGTHS, lengths, strict=True))}
    tensors |= {"slots": slots, "cos": cos, "sin": sin, "positions": positions, "q": q}
    arrays = {name: x for name, x in _describe_arrays(tensors, layout, scales).items() if name not in ("kv_begin", "causal")}
    if cos is not None:
        check_angles({name: arrays[name] for name in ("cos", "sin", "positions") if name in arrays})
    style = "" if cos is None else "interleaved" if interleaved else "neox"
    append_operation.check_arrays(arrays, style, max_q_len, first_column)
    return k.new_empty(0) if q is None else q.new_empty(q.shape)


def _refuse_gradients(operator: Any) -> Any:
    """Returns the operator's rule for autograd: it refuses a tensor that requires grad, and calls the operator on others."""

    def call(*args: Any, **named: Any) -> Any:
        values = [y for x in (*args, *named.values()) for y in (x if isinstance(x, (list, tuple)) else (x,))]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ProblemError(NO_GRAD)
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise ProblemError(NO_TANGENT)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **named)

    return call


for _name, _operator, _real, _fake in (
    ("attention_kvcache", _ATTENTION, _compute_attention, _fake_attention), ("append", _APPEND, _compute_append, _fake_append),
):  # fmt: skip
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    _library.impl(_name, _refuse_gradients(_operator), "Autograd")
    torch.library.register_fake(f"rawattn::{_name}", _fake, lib=_library)

"""A step of flash-attn over a cache: new keys and values are written, and attention is computed over all that is in it then."""

from __future__ import annotations

from typing import Any

import torch

from .. import serving
from ..api.naming import naming
from ..array import eager, torch_state
from ..array.forms import are_held, forms_of
from ..errors import ProblemError, brief
from ..runtime.call_cache import find, keep
from ..runtime.outputs import one_or_all
from ..serving.append import append, read_append
from ..serving.attention import CacheRequest, attention_kvcache, plain_request, read_call
from ..torch import is_plain

Rotary = tuple[Any, Any, bool, Any]  # rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens
StepArrays = tuple[Any, Any, Any, Any]  # lengths, pages, where rows begin, and the first keys


def with_kvcache(
    q: Any, pools: tuple[Any, Any], new: tuple[Any, Any], rotary: Rotary, places: tuple[Any, ...], options: dict[str, Any],
    return_lse: bool, starts: Any = None, longest: int | None = None, scales: tuple[Any, Any] = (None, None),
    new_starts: Any = None,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_with_kvcache``. ``places`` are cache_seqlens, cache_batch_idx, cache_leftpad and the table of pages,
    ``starts`` says where each sequence's rows of q begin, ``new_starts`` where its rows of k and v do, and ``scales`` has the
    scales of the caches."""
    k, (lens, rows, first, table) = new[0], places
    _check((q, k, starts, new_starts, rows, table, rotary[3]), lens, rotary)
    if rows is not None:
        compute = with_kvcache if table is not None else _compute_with_rows
        chosen_places = lens, None, first, _choose_pages(rows, table)
        return compute(q, pools, new, rotary, chosen_places, options, return_lse, starts, longest, scales, new_starts)
    request = _find_request(options, return_lse, longest) if scales[0] is scales[1] is None else None
    if not isinstance(lens, torch.Tensor):
        batch = q.shape[0] if starts is None else starts.shape[0] - 1
        lens = _fill_lens(lens, _make_cache(pools, scales).page_size, batch, table, q)
    step_of, beside = (lens, table, starts, first), (options["causal"], longest)
    if k is not None:
        new_starts = starts if new_starts is None and k.dim() == 3 else new_starts
        step_of = (_count_new_rows(lens, k, new_starts), table, starts, first)
        moves = bool(options["causal"] or options["window"] is not None or "mask" in options)
        if new_starts is starts and _are_alike(q, k, rotary, starts, lens, moves):
            q = _append(q, pools, scales, new, rotary[:3], step_of, beside, request is not None)
        else:
            q = _append_apart(q, _make_cache(pools, scales), new, rotary, step_of, new_starts, lens, moves)
    tensors = (q, *pools, *step_of)
    read = None if request is None else forms_of(tensors)
    if request is not None and read is not None and (call := find((request.key, read[0], beside))) is not None:
        return one_or_all(call(tensors, read[1]))
    cache, step = _make_cache(pools, scales), serving.Step(*step_of, causal=options["causal"], max_q_len=longest)
    results = attention_kvcache(q, cache, step, return_lse=return_lse, **without_step(options))
    if request is not None and read is not None and (call_forms := read_call(q, cache, step, None, ())) is not None:
        keep((request.key, read[0], beside), find((request.key, *call_forms[0])))
    return results


eager.skip((with_kvcache,))  # where a graph broke at the adapter
_compute_with_rows = naming(page_table="cache_batch_idx")(with_kvcache)


@naming(k="k_cache", v="v_cache", k_scale="k_descale", v_scale="v_descale")
def _make_cache(pools: tuple[Any, Any], scales: tuple[Any, Any]) -> serving.KVCache:
    return serving.KVCache(*pools, "NHD", *[1.0 if x is None else x for x in scales])


def without_step(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that a step does not have."""
    names = "scale", "mask" if "mask" in options else "window", "softcap", "alibi"
    return {name: options[name] for name in names if name in options}


def _check(tensors: tuple[Any, ...], lens: Any, rotary: Rotary) -> None:
    """Raises ProblemError where one of ``tensors`` is none, and where an argument needs another."""
    k, cos, sin = tensors[1], *rotary[:2]
    if tensors[0] is None or [x for x in tensors if x is not None and type(x) is not torch.Tensor]:
        names = "q", "k", "cu_seqlens_q", "cu_seqlens_k_new", "cache_batch_idx", "page_table", "rotary_seqlens"
        for name, x in zip(names, tensors, strict=True):
            if not (isinstance(x, torch.Tensor) or (x is None and name != "q")):
                raise ProblemError(f"{name} is a {type(x).__name__}; it must be a torch tensor.")
    if k is not None and lens is None:
        raise ProblemError("k was given without cache_seqlens, which say where it goes.")
    if k is None and cos is not None:
        raise ProblemError("rotary_cos was given without k; it is applied where k is appended.")
    if cos is None and sin is not None:
        raise ProblemError("rotary_sin was given without rotary_cos; give both.")


def _choose_pages(rows: Any, table: Any) -> Any:
    """Returns the pages of the sequences that ``rows`` chooses: these rows of the table, with -1 for a row that it does not have;
    without a table each row is a page."""
    if rows.dtype is not torch.int32 or rows.dim() != 1:
        words = f"dtype {rows.dtype} and shape {tuple(rows.shape)}"
        raise ProblemError(f"cache_batch_idx has {words}; it must be int32 of shape (batch,).")
    if table is None:
        return rows[:, None]
    if table.dim() != 2:
        raise ProblemError(f"page_table has shape {tuple(table.shape)}; it must be (batch, max_pages).")
    chosen = table.index_select(0, rows.clamp(0, max(len(table), 1) - 1))
    return torch.where(((rows >= 0) & (rows < len(table)))[:, None], chosen, -1)


def _fill_lens(lens: Any, page_size: int, batch: int, table: Any, q: Any) -> Any:
    """Makes a tensor of lengths from an int, the length of all sequences, or from None, for as many keys as the cache has."""
    if not (lens is None or hasattr(lens, "__index__")):
        raise ProblemError(f"cache_seqlens is {brief(lens)}; it must be an int32 tensor of shape (batch,), or an int.")
    if table is not None and table.dim() != 2:
        raise ProblemError(f"page_table has shape {tuple(table.shape)}; it must be (batch, max_pages).")
    capacity = page_size * (1 if table is None else table.shape[1])
    return torch.full((batch,), capacity if lens is None else lens, dtype=torch.int32, device=q.device)


def _count_new_rows(lens: Any, k: Any, starts: Any) -> Any:
    """Returns the lengths with the new rows of k, as rawattn counts these, too. Lengths that a step refuses stay as they are."""
    if lens.dtype is not torch.int32 or lens.dim() != 1:
        return lens
    if starts is not None and (starts.dtype is not torch.int32 or starts.shape != (len(lens) + 1,)):
        return lens
    if is_plain() and not are_held((lens, starts)):
        return lens
    return lens + (torch.diff(starts) if starts is not None else k.shape[1] if k.dim() > 1 else 0)


def _find_request(options: dict[str, Any], return_lse: bool, longest: Any) -> CacheRequest | None:
    """Returns the request by which a call over a cache is found again; None where an option is a function, traced or of a wrong
    type."""
    if not is_plain() or "alibi" in options or "mask" in options:
        return None
    if type(options["causal"]) is not bool or type(longest) not in (int, type(None)):
        return None
    values = {name: options[name] for name in ("window", "softcap", "scale")}
    try:
        return plain_request(options["causal"], {**values, "mask": None, "score": None, "invariant": False}, return_lse)
    except TypeError:  # what cannot be hashed is wrong
        return None


def _are_alike(q: Any, k: Any, rotary: Rotary, starts: Any, before: Any, moves: bool) -> bool:
    """Tells whether rows of q are rotated as those of k, or none is. True for wrong shapes, too, which ``append`` refuses."""
    if rotary[0] is None or not 3 <= q.dim() == k.dim() <= 4:
        return True
    is_one = starts is None and q.shape[1] <= 1
    return (rotary[3] is None or rotary[3] is before) and q.shape[:-2] == k.shape[:-2] and (moves or is_one)


def _append(
    q: Any, pools: tuple[Any, Any], scales: tuple[Any, Any], new: tuple[Any, Any], angles: tuple[Any, Any, bool],
    step_of: StepArrays, beside: tuple[Any, Any], is_plain: bool,
) -> Any:  # fmt: skip
    """Writes the new rows, and returns q, whose rows are as many, rotated where the new rows are."""
    (k, v), (cos, sin, interleaved) = new, angles
    q_to_rotate, style, read = None if cos is None else q, None if cos is None else interleaved, None
    if is_plain and type(style) in (bool, type(None)):
        tensors = (k, v, q_to_rotate, *step_of, cos, sin, *pools)
        read = forms_of(tensors)
        if read is not None and (call := find(("append", read[0], beside, style))) is not None:
            results = call(tensors, read[1])
            for pool in pools:
                torch_state.mark_written(pool)
            return results[0] if results else q
    cache, step = _make_cache(pools, scales), serving.Step(*step_of, causal=beside[0], max_q_len=beside[1])
    rotary = None if cos is None else serving.Rotary(cos, sin, interleaved)
    rotated = append(cache, step, k, v, rotary=rotary, q=q_to_rotate)
    if read is not None and (key := read_append(cache, step, rotary, (k, v, None, q_to_rotate), None)) is not None:
        keep(("append", read[0], beside, style), find(key[0]))
    return q if rotated is None else rotated


def _append_apart(
    q: Any, cache: serving.KVCache, new: tuple[Any, Any], rotary: Rotary, step_of: StepArrays, new_starts: Any, before: Any,
    moves: bool,
) -> Any:  # fmt: skip
    """Writes the new rows, and returns q, rotated where they are. q may have other rows and positions than k: its positions begin
    with rotary_seqlens, or with ``before``, the lengths without new rows, and where ``moves`` grow by one a row."""
    (cos, sin, interleaved, begin), (lens, table, starts, _) = rotary, step_of
    if cos is not None and begin is not None and (begin.dtype is not torch.int32 or begin.shape != before.shape):
        words = f"dtype {begin.dtype} and shape {tuple(begin.shape)}"
        raise ProblemError(f"rotary_seqlens has {words}; it must be int32 of shape {tuple(before.shape)}, as cache_seqlens.")
    begin = before if begin is None else begin
    serving.Step(lens, table, starts)  # which checks them
    _write(cache, (lens, table, new_starts), *new, (cos, sin, interleaved), begin)
    if cos is None:
        return q
    k, slots = new[0].new_empty((*q.shape[:-2], *cache.k.shape[-2:])), torch.full(q.shape[:-2], -1, device=q.device)
    q_rotary = serving.Rotary(cos, sin, interleaved, _number_rows(begin, q, starts, moves))  # of q alone: no row has a place
    return append(serving.KVCache(cache.k, cache.k), None, k, None, slots=slots, rotary=q_rotary, q=q)


@naming(cu_seqlens_q="cu_seqlens_k_new", positions="rotary_seqlens")
def _write(
    cache: serving.KVCache, step_of: tuple[Any, Any, Any], k: Any, v: Any, angles: tuple[Any, Any, bool], begin: Any
) -> None:
    positions = None if angles[0] is None else _number_rows(begin, k, step_of[2], True)
    rotary = None if angles[0] is None else serving.Rotary(*angles, positions)
    append(cache, serving.Step(*step_of), k, v, rotary=rotary)


def _number_rows(begin: Any, x: Any, starts: Any, moves: bool) -> Any:
    """Returns the position of each row of x: ``begin`` of its sequence, and from there on one more a row where ``moves``; -1 for
    rows that are no sequence's."""
    rows = torch.arange(x.shape[1 if starts is None else 0], dtype=torch.int32, device=x.device)
    if starts is None:
        return (begin[:, None] + rows * moves).long()
    owner = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=len(begin) - 1)
    return torch.where(rows < starts[-1], begin[owner] + (rows - starts[owner]) * moves, -1).long()

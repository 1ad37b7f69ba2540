"""A step of flash-attn over a cache: new keys and values are written, and attention is computed over all that is in it then."""

from __future__ import annotations

from typing import Any

import torch

from .. import arrays, eager, serving, torch_op
from ..errors import ProblemError, brief
from ..plans import one_or_all
from ..serving import api as caches
from .naming import naming

Rotary = tuple[Any, Any, bool, Any]  # rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens
_cache = naming(k="k_cache", v="v_cache", k_scale="k_descale", v_scale="v_descale")(serving.KVCache)


def with_kvcache(
    q: Any, pools: tuple[Any, Any], new: tuple[Any, Any], rotary: Rotary, places: tuple[Any, ...], options: dict[str, Any],
    return_lse: bool, starts: Any = None, longest: int | None = None, scales: tuple[Any, Any] = (None, None),
    new_starts: Any = None,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_with_kvcache``. ``places`` are cache_seqlens, cache_batch_idx, cache_leftpad and the table of pages;
    ``starts`` is where each sequence's rows of q begin, and ``new_starts`` where those of k and v do; ``scales`` are those of
    the caches."""
    k, (lens, rows, first, table) = new[0], places
    _check(k, lens, rotary)
    table, asked = _table(rows, table), _asked(options, return_lse, longest) if scales[0] is scales[1] is None else None
    cache_of = (*pools, "NHD", *[1.0 if x is None else x for x in scales])
    if not isinstance(lens, torch.Tensor):
        batch = q.shape[0] if starts is None else starts.shape[0] - 1
        lens = _lens(lens, _cache(*cache_of).page_size, batch, table, q)
    if k is not None:
        new_starts = starts if new_starts is None and getattr(k, "ndim", 0) == 3 else new_starts
        before, lens = lens, _counted(lens, k, new_starts)
        step = (lens, table, new_starts, first), longest if new_starts is starts else None
        q = _append(q, cache_of, new, rotary, step, options, starts, before, asked is not None)
    step_of, beside = (lens, table, starts, first), (options["causal"], longest)
    place = None if asked is None else caches.kept_for(asked.key, pools, (q, *step_of), beside)
    if place is not None and (call := caches.call_for(place, (q, *step_of))) is not None:
        return one_or_all(call(q, None, (), place[1]))
    cache, made = _cache(*cache_of), serving.Step(*step_of, causal=options["causal"], max_q_len=longest)
    found = caches.attention_kvcache(q, cache, made, return_lse=return_lse, **without_step(options))
    if asked is not None:
        caches.keep_for(place, q, cache, made, asked)
    return found


eager.skip((with_kvcache,))  # where a graph broke at the adapter


def without_step(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a step does not have."""
    names = "scale", "mask" if "mask" in options else "window", "softcap", "alibi"
    return {name: options[name] for name in names if name in options}


def _check(k: Any, lens: Any, rotary: Rotary) -> None:
    """Raises ProblemError where one argument needs another."""
    cos, sin, _, begin = rotary
    if k is not None and lens is None:
        raise ProblemError("k was given without cache_seqlens, which say where it goes.")
    if k is None and cos is not None:
        raise ProblemError("rotary_cos was given without k; it is applied where k is appended.")
    if cos is None and sin is not None:
        raise ProblemError("rotary_sin was given without rotary_cos; give both.")
    if not (begin is None or isinstance(begin, torch.Tensor)):
        raise ProblemError(f"rotary_seqlens is a {type(begin).__name__}; it must be an int32 tensor of shape (batch,).")


def _table(rows: Any, table: Any) -> Any:
    """The table of pages, of the sequences that ``rows`` chooses: of a table its rows, and of a dense cache these are pages."""
    for name, x in (("cache_batch_idx", rows), ("page_table", table)):
        if not (x is None or isinstance(x, torch.Tensor)):
            raise ProblemError(f"{name} is a {type(x).__name__}; it must be an int32 tensor.")
    if rows is None:
        return table
    if rows.dtype is not torch.int32 or rows.dim() != 1:
        found = f"cache_batch_idx has dtype {rows.dtype} and shape {tuple(rows.shape)}"
        raise ProblemError(f"{found}; it must be int32 of shape (batch,): cache_batch_idx.int().")
    return rows[:, None] if table is None else table.index_select(0, rows)


def _lens(lens: Any, page_size: int, batch: int, table: Any, q: Any) -> Any:
    """One length of all sequences, or None for all that the cache has, as a tensor."""
    if not (lens is None or hasattr(lens, "__index__")):
        raise ProblemError(f"cache_seqlens is {brief(lens)}; it must be an int32 tensor of shape (batch,), or an int.")
    if table is not None and table.dim() != 2:
        raise ProblemError(f"page_table has shape {tuple(table.shape)}; it must be (batch, max_pages).")
    capacity = page_size * (1 if table is None else table.shape[1])
    return torch.full((batch,), capacity if lens is None else lens, dtype=torch.int32, device=q.device)


def _counted(lens: Any, k: Any, starts: Any) -> Any:
    """The lengths with the new rows of k, which rawattn counts, too. Those that a step refuses are as they are."""
    if lens.dtype is not torch.int32 or lens.dim() != 1 or not isinstance(k, torch.Tensor):
        return lens
    if not (starts is None or isinstance(starts, torch.Tensor)):
        return lens
    if starts is not None and (starts.dtype is not torch.int32 or starts.shape != (len(lens) + 1,)):
        return lens
    if torch_op.is_plain() and not arrays.are_held((lens, starts)):
        return lens
    return lens + (torch.diff(starts) if starts is not None else k.shape[1] if k.dim() > 1 else 0)


def _asked(options: dict[str, Any], return_lse: bool, longest: Any) -> caches.Asked | None:
    """Returns what a call over a cache asks for, where it is found again: no functions, nothing that is traced or of a wrong
    type."""
    if not torch_op.is_plain() or "alibi" in options or "mask" in options:
        return None
    if type(options["causal"]) is not bool or type(longest) not in (int, type(None)):
        return None
    own = {name: options[name] for name in ("window", "softcap", "scale")}
    try:
        return caches.plain_asked(options["causal"], {**own, "mask": None, "score": None, "invariant": False}, return_lse)
    except TypeError:  # what cannot be hashed is wrong
        return None


def _append(
    q: Any, cache_of: tuple[Any, ...], new: tuple[Any, Any], rotary: Rotary, step: tuple[tuple[Any, Any, Any, Any], int | None],
    options: dict[str, Any], starts: Any, before: Any, is_plain: bool,
) -> Any:  # fmt: skip
    """Writes new rows into the cache, k rotated, and gives q, rotated. ``before`` are the lengths without the new rows."""
    (k, v), (cos, sin, interleaved, begin), (step_of, longest) = new, rotary, step
    moves = bool(options["causal"] or options["window"] is not None or "mask" in options)
    begin, turned = None if begin is before else begin, cos is not None
    apart = turned and not (begin is None and _are_alike(q, starts, k, step_of[2], moves))
    into, style, own = None, interleaved if turned else None, None if apart or not turned else q
    if is_plain and not apart and type(style) in (bool, type(None)):
        given = (k, v, own, *step_of, cos, sin)
        into = caches.kept_for("append", cache_of[:2], given, (options["causal"], longest, style))
        results = caches.write_for(into, cache_of[:2], given)
        if results is not None:
            return results[0] if results else q
    cache, made = _cache(*cache_of), serving.Step(*step_of, causal=options["causal"], max_q_len=longest)
    positions = None if begin is None or not turned else _positions(begin, k, step_of[2], True)
    angles = serving.Rotary(cos, sin, interleaved, positions) if turned else None
    if apart:
        serving.Step(step_of[0], step_of[1], starts)  # which checks them
        places = _positions(before if begin is None else begin, q, starts, moves)
        q = _rotated(q, cache, serving.Rotary(cos, sin, interleaved, places))
    found = caches.append(cache, made, k, v, rotary=angles, q=own)
    caches.keep_write_for(into, cache, [x.held for x in (made, angles) if x is not None], (k, v, None, own))
    return q if found is None else found


def _are_alike(q: Any, starts: Any, k: Any, new_starts: Any, moves: bool) -> bool:
    """Says whether rows of q have the positions of those of k, or are wrong, which the append says."""
    if not isinstance(k, torch.Tensor) or not 3 <= q.dim() == k.dim() <= 4:
        return True
    rows = q.shape[1] if starts is None else 2  # of a sequence, or more
    return starts is new_starts and q.shape[:-2] == k.shape[:-2] and (moves or rows <= 1)


def _positions(begin: Any, x: Any, starts: Any, moves: bool) -> Any:
    """The position of each row of x: ``begin`` of its sequence, and where it ``moves`` on from there; -1 where it has none."""
    device = x.device
    if starts is None:
        rows = torch.arange(x.shape[1], device=device) if moves else torch.zeros(x.shape[1], dtype=torch.int64, device=device)
        return begin[:, None] + rows
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=device)
    owner = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=len(begin) - 1)
    found = begin[owner] + (rows - starts[owner] if moves else 0)
    return torch.where(rows < starts[-1], found, -1).long()


def _rotated(q: Any, cache: serving.KVCache, rotary: serving.Rotary) -> Any:
    """q at these positions, by an append whose rows have no place."""
    k = q.new_empty((*q.shape[:-2], *cache.k.shape[-2:]))
    slots = torch.full(q.shape[:-2], -1, device=q.device)
    return caches.append(serving.KVCache(cache.k, cache.k), None, k, None, slots=slots, rotary=rotary, q=q)

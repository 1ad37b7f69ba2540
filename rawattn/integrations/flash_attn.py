"""The functions of flash-attn 2, with their signatures, computed by rawattn. ``flash_attn_interface`` beside it has those of 3.

>>> from rawattn.integrations.flash_attn import flash_attn_func
>>> o = flash_attn_func(q, k, v, causal=True)

``install`` makes ``import flash_attn`` and ``import flash_attn_interface`` find them. Autograd follows, as in
``rawattn.attention``, but for the functions over caches. dropout_p draws from torch's generator; return_attn_probs gives no mask
of it, and is refused over caches. A ``deterministic`` of False allows other bits from run to run in gradients, as it does there.
num_splits, pack_gqa, sm_margin and scheduler_metadata are hints; they are ignored, with a warning. A query without a key gives 0.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import torch

from .. import api, arrays, eager, serving, torch_op
from ..errors import ProblemError, UnsupportedError, brief
from ..plans import one_or_all
from ..serving import api as caches
from .naming import naming

__version__ = "2.8.3+rawattn"  # of the functions; some callers ask what flash-attn can do by it
Window = tuple[int, int]
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes", "dropout": "dropout_p",
    "cu_seqlens_kv": "cu_seqlens_k", "max_seqlen_kv": "max_seqlen_k", "max_q_len": "max_seqlen_q", "q_lens": "seqused_q",
    "page_table": "block_table", "kv_begin": "cache_leftpad", "cos": "rotary_cos", "sin": "rotary_sin",
}  # fmt: skip
_LENGTHS = {"kv_lens": "torch.diff(cu_seqlens_k)", "max_kv_len": "max_seqlen_k"}  # of keys in pages, packed
IN_CACHE = {"kv_lens": "cache_seqlens", "the step": "cache_seqlens"}


@naming(**NAMES)
def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes attention of q, (batch, q_len, heads, head_dim), and k and v; with return_attn_probs (o, lse, None)."""
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes)
    options["dropout"] = dropout_p
    return _with_probs(api.attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_func`` of kv, (batch, kv_len, 2, kv_heads, head_dim)."""
    k, v = unpacked("kv", kv, "batch, length, 2, kv_heads, head_dim")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_func`` of qkv, (batch, length, 3, heads, head_dim)."""
    q, k, v = unpacked("qkv", qkv, "batch, length, 3, heads, head_dim")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@naming(**NAMES, **_LENGTHS)
def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    """Computes attention of sequences that lie end to end; with block_table k and v are pages of a cache, without gradients."""
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes)
    options["dropout"] = dropout_p
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    found = varlen(q, k, v, starts, longest, options, return_attn_probs, block_table)
    return _with_probs(found, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_varlen_func`` of kv, (total_k, 2, kv_heads, head_dim)."""
    k, v = unpacked("kv", kv, "total_k, 2, kv_heads, head_dim")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_varlen_func`` of qkv, (total, 3, heads, head_dim)."""
    q, k, v = unpacked("qkv", qkv, "total, 3, heads, head_dim")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@naming(**NAMES, **IN_CACHE)
def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes k and v into the cache behind cache_seqlens, and computes attention of q over all that is in it then."""
    ignore(num_splits=(num_splits, 0, 1))
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    places = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    options = options_of(softmax_scale, causal, window_size, softcap, slopes=alibi_slopes)
    return with_kvcache(q, (k_cache, v_cache), (k, v), rotary, places, options, return_softmax_lse)


def refuse(**given: tuple[Any, Any]) -> None:
    """Raises UnsupportedError for an argument that is not its default, the second of each pair."""
    for name, (value, default) in given.items():
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            found = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedError(f"{name} is {found}; rawattn does not have it yet: give {default!r}.")


_ignored: set[str] = set()


def ignore(**given: tuple[Any, ...]) -> None:
    """Warns once of a hint that is none of its defaults, those behind the first of each tuple."""
    for name, (value, *defaults) in given.items():
        if name not in _ignored and not any(value is x or (type(value) is type(x) and value == x) for x in defaults):
            _ignored.add(name)
            warnings.warn(f"{name} is a hint to other kernels; rawattn ignores it.", stacklevel=4)


def options_of(
    scale: Any, causal: Any, window: Window, softcap: float, deterministic: bool = True, slopes: Any = None
) -> dict[str, Any]:
    """flash-attn's options as those of ``rawattn.attention``, which finds None faster than what means the same."""
    if not isinstance(window, (tuple, list)):
        raise ProblemError(f"window_size is {window!r}; it must be a pair (left, right), where -1 is unbounded.")
    options = {
        "scale": scale, "causal": causal, "window": None if tuple(window) == (-1, -1) else tuple(window),
        "softcap": softcap or None, "deterministic": deterministic,
    }  # fmt: skip
    return options if slopes is None else {**options, "alibi": slopes}


def _with_probs(found: Any, wanted: bool) -> Any:
    return (*found, None) if wanted else found


def varlen(
    q: Any, k: Any, v: Any, starts: tuple[Any, Any], longest: tuple[Any, Any], options: dict[str, Any], return_lse: bool,
    pages: Any = None, lens: tuple[Any, Any] = (None, None),
) -> Any:  # fmt: skip
    """Computes attention of packed queries, over packed keys or those in pages."""
    if pages is None:
        used = {"q_lens": lens[0], "kv_lens": lens[1], "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1]}
        return api.attention_varlen(q, k, v, starts[0], starts[1], return_lse=return_lse, **used, **options)
    refuse(seqused_q=(lens[0], None), dropout_p=(options.get("dropout", 0.0), 0.0))
    kv_lens = torch.diff(starts[1]) if lens[1] is None else lens[1]
    step = serving.Step(kv_lens, pages, starts[0], causal=options["causal"], max_q_len=longest[0], max_kv_len=longest[1])
    return caches.attention_kvcache(q, serving.KVCache(k, v), step, return_lse=return_lse, **_without_step(options))


def _without_step(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a step does not have."""
    names = "scale", "mask" if "mask" in options else "window", "softcap", "alibi"
    return {name: options[name] for name in names if name in options}


def unpacked(name: str, packed: Any, axes: str) -> tuple[Any, ...]:
    """The tensors that are packed along the last axis but two, whose length is a number in ``axes``."""
    each, shape = axes.split(", "), tuple(getattr(packed, "shape", ()))
    if len(shape) != len(each) or shape[-3] != int(each[-3]):
        raise ProblemError(f"{name} is a {type(packed).__name__} of shape {shape}; it must be a tensor, ({axes}).")
    return tuple(packed.unbind(-3))


def with_kvcache(
    q: Any, pools: tuple[Any, Any], new: tuple[Any, Any], rotary: tuple[Any, Any, bool], places: tuple[Any, ...],
    options: dict[str, Any], return_lse: bool, starts: Any = None, longest: int | None = None,
    scales: tuple[Any, Any] = (None, None),
) -> Any:  # fmt: skip
    """Computes ``flash_attn_with_kvcache``. ``places`` are cache_seqlens, cache_batch_idx, cache_leftpad and the table of pages;
    ``starts`` is where each sequence's rows of q, and of k and v, begin; ``scales`` are those of the caches."""
    (k, v), (lens, rows, first, table) = new, places
    if rows is not None and table is not None:
        raise ProblemError("cache_batch_idx was given beside a table of pages, which already says where each sequence lies.")
    if k is not None and lens is None:
        raise ProblemError("k was given without cache_seqlens, which say where it goes.")
    if k is None and rotary[0] is not None:
        raise ProblemError("rotary_cos was given without k; it is applied where k is appended.")
    if rotary[0] is None and rotary[1] is not None:
        raise ProblemError("rotary_sin was given without rotary_cos; give both.")
    for name, x in (("cache_batch_idx", rows), ("page_table", table)):
        if not (x is None or isinstance(x, torch.Tensor)):
            raise ProblemError(f"{name} is a {type(x).__name__}; it must be an int32 tensor.")
    if rows is not None:
        if rows.dtype is not torch.int32:
            raise ProblemError(f"cache_batch_idx has dtype {rows.dtype}; it must be int32: cache_batch_idx.int().")
        table = rows[:, None]
    if isinstance(k, torch.Tensor) and isinstance(lens, torch.Tensor):
        lens = _counted(lens, k, starts)
    asked = _asked(options, return_lse, longest) if scales[0] is scales[1] is None and isinstance(lens, torch.Tensor) else None
    step_of = (lens, table, starts, first)
    beside, into, is_written = (options["causal"], longest), None, k is None
    style = None if rotary[0] is None else rotary[2]
    if asked is not None and k is not None and type(style) in (bool, type(None)):
        given = (k, v, None if rotary[0] is None else q, *step_of, *rotary[:2])
        into = caches.kept_for("append", pools, given, (*beside, options["window"], style))
        results = caches.write_for(into, pools, given)
        q, is_written = results[0] if results else q, results is not None
    if asked is not None and is_written:
        place = caches.kept_for(asked.key, pools, (q, *step_of), beside)
        call = caches.call_for(place, (q, *step_of))
        if call is not None:
            return one_or_all(call(q, None, (), place[1]))
    if table is not None and table.dim() != 2:
        raise ProblemError(f"page_table has shape {tuple(table.shape)}; it must be (batch, max_pages).")
    cache = _cache(*pools, "NHD", *(1.0 if x is None else x for x in scales))
    if not isinstance(lens, torch.Tensor):
        if not (lens is None or hasattr(lens, "__index__")):
            raise ProblemError(f"cache_seqlens is {brief(lens)}; it must be an int32 tensor of shape (batch,), or an int.")
        batch = q.shape[0] if starts is None else starts.shape[0] - 1
        capacity = cache.page_size * (1 if table is None else table.shape[1])
        lens = torch.full((batch,), capacity if lens is None else lens, dtype=torch.int32, device=q.device)
        lens = _counted(lens, k, starts) if isinstance(k, torch.Tensor) else lens
    step = serving.Step(lens, table, starts, first, causal=options["causal"], max_q_len=longest)
    if not is_written:
        turned = _rotary(q, rotary, options, first, step.batch)
        rotated = caches.append(cache, step, k, v, rotary=turned, q=None if turned is None else q)
        held = [x.held for x in (step, turned) if x is not None]
        caches.keep_write_for(into, cache, held, (k, v, None, None if turned is None else q))
        q = q if rotated is None else rotated
    found = caches.attention_kvcache(q, cache, step, return_lse=return_lse, **_without_step(options))
    if asked is not None:
        caches.keep_for(caches.kept_for(asked.key, pools, (q, *step_of), beside), q, cache, step, asked)
    return found


def _counted(lens: Any, k: Any, starts: Any) -> Any:
    """The lengths with the new rows of k, which rawattn counts, too. Those that a step refuses are as they are."""
    if lens.dtype is not torch.int32 or lens.dim() != 1:
        return lens
    if not (starts is None or isinstance(starts, torch.Tensor)):
        return lens
    if starts is not None and (starts.dtype is not torch.int32 or starts.shape != (len(lens) + 1,)):
        return lens
    if torch_op.is_plain() and not arrays.are_held((lens, starts)):
        return lens
    return lens + (torch.diff(starts) if starts is not None else k.shape[1] if k.dim() > 1 else 0)


eager.skip((with_kvcache,))  # where a graph broke at the door
_cache = naming(k="k_cache", v="v_cache", k_scale="k_descale", v_scale="v_descale")(serving.KVCache)


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


def _rotary(q: Any, given: tuple[Any, Any, bool], options: dict[str, Any], first: Any, batch: int) -> Any:
    cos, sin, interleaved = given
    if cos is None:
        return None
    if first is not None:
        raise UnsupportedError("rotary_cos was given beside cache_leftpad, from which positions count there; rotate before.")
    rows = q.shape[1] if q.dim() == 4 else q.shape[0] - batch + 1  # of a sequence, or more
    if rows > 1 and not options["causal"] and options["window"] is None:
        raise UnsupportedError("rotary_cos was given for several queries that are not causal, which all have one position there.")
    return serving.Rotary(cos, sin, interleaved)


MODULES = {
    "flash_attn": "flash_attn", "flash_attn.flash_attn_interface": "flash_attn", "flash_attn_interface": "flash_attn_interface"
}  # fmt: skip


def install() -> None:
    """Makes ``import flash_attn`` and ``import flash_attn_interface`` give rawattn's functions, in this process.

    Raises ProblemError where flash-attn itself is loaded.
    """
    for name in MODULES:
        found = sys.modules.get(name)
        if found is not None and not hasattr(found, "_of_rawattn"):
            raise ProblemError(
                f"{name} is loaded, from {getattr(found, '__file__', None)}; call install() before it is imported."
            )
    for name, ours in MODULES.items():
        source, module = importlib.import_module(f"{__package__}.{ours}"), types.ModuleType(name, "flash-attn's, by rawattn.")
        names = [each for each in vars(source) if each.startswith("flash_attn_") and each.endswith(("_func", "_kvcache"))]
        vars(module).update({each: getattr(source, each) for each in names})
        spec = importlib.machinery.ModuleSpec(name, None, is_package=name == "flash_attn")
        vars(module).update(__spec__=spec, __version__=source.__version__, __all__=names, _of_rawattn=True)
        if name == "flash_attn":
            module.__path__ = []
        sys.modules[name] = module
    vars(sys.modules["flash_attn"])["flash_attn_interface"] = sys.modules["flash_attn.flash_attn_interface"]


def uninstall() -> None:
    """Takes back what ``install`` did."""
    for name in MODULES:
        if hasattr(sys.modules.get(name), "_of_rawattn"):
            del sys.modules[name]

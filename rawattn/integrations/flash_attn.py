"""The functions of flash-attn 2, with their signatures, computed by rawattn. ``flash_attn_interface`` beside it has those of 3.

>>> from rawattn.integrations.flash_attn import flash_attn_func
>>> o = flash_attn_func(q, k, v, causal=True)

``install`` makes ``import flash_attn``, ``flash_attn_interface`` and ``flash_attn_3`` find these functions. Autograd follows all
but those over caches. dropout_p draws from torch's generator, and is refused over caches; return_attn_probs gives no
probabilities. With ``deterministic=False`` gradients may have other bits from run to run, as in ``rawattn.attention``.
num_splits, pack_gqa, sm_margin and scheduler_metadata are hints; they are ignored, with a warning. A query without a key gives 0.
``_flash_attn_forward`` and ``_flash_attn_backward`` are for callers that write an autograd function of their own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import operator
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import serving
from ..api import attention
from ..api.naming import naming
from ..array import torch_state
from ..errors import ProblemError, UnsupportedError, brief
from ..operation.spec import Spec
from ..serving.attention import attention_kvcache
from ..torch import is_plain, seed_of
from .flash_attn_kvcache import with_kvcache, without_step

__version__ = "2.8.3+rawattn"  # of the functions; some callers ask what flash-attn can do by it
Window = Sequence[int]  # or a tensor of two
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes", "dropout": "dropout_p",
    "cu_seqlens_kv": "cu_seqlens_k", "max_seqlen_kv": "max_seqlen_k", "max_q_len": "max_seqlen_q", "q_lens": "seqused_q",
    "page_table": "block_table", "kv_begin": "cache_leftpad", "cos": "rotary_cos", "sin": "rotary_sin",
    "interleaved": "rotary_interleaved", "return_lse": "return_attn_probs",
}  # fmt: skip
_LENGTHS = {"kv_lens": "torch.diff(cu_seqlens_k)", "max_kv_len": "max_seqlen_k"}  # of keys in pages, packed
IN_CACHE = NAMES | {"kv_lens": "cache_seqlens", "the step": "cache_seqlens", "return_lse": "return_softmax_lse"}


@naming(**NAMES)
def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes attention of q, (batch, q_len, heads, head_dim), and k and v; with return_attn_probs (o, lse, None)."""
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes)
    options["dropout"] = dropout_p
    return _add_probs(attention.attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any, kv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_func`` of kv, (batch, kv_len, 2, kv_heads, head_dim)."""
    k, v = unpack("kv", kv, "batch, length, 2, kv_heads, head_dim")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_func`` of qkv, (batch, length, 3, heads, head_dim)."""
    q, k, v = unpack("qkv", qkv, "batch, length, 3, heads, head_dim")
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
    results = varlen(q, k, v, starts, longest, options, return_attn_probs, block_table)
    return _add_probs(results, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_varlen_func`` of kv, (total_k, 2, kv_heads, head_dim)."""
    k, v = unpack("kv", kv, "total_k, 2, kv_heads, head_dim")
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
    q, k, v = unpack("qkv", qkv, "total, 3, heads, head_dim")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@naming(**IN_CACHE)
def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes k and v into the cache behind cache_seqlens, and computes attention of q over all that is in it then."""
    ignore(num_splits=(num_splits, 0, 1))
    rotary = (rotary_cos, rotary_sin, rotary_interleaved, None)
    places = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    options = options_of(softmax_scale, causal, window_size, softcap, slopes=alibi_slopes)
    return with_kvcache(q, (k_cache, v_cache), (k, v), rotary, places, options, return_softmax_lse)


APART = {"seed": "rng_state", "do": "dout", "o": "out", "lse": "softmax_lse"}  # of a forward and a backward by themselves


@naming(**NAMES, **APART)
def _flash_attn_forward(
    q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> Any:  # fmt: skip
    """Computes (o, lse, None, rng_state) for callers with a backward of their own, which is given rng_state, dropout's seed."""
    options = options_of(softmax_scale, causal, (window_size_left, window_size_right), softcap, True, alibi_slopes)
    seed = seed_of(q, None) if dropout_p else None
    return *attention.attention(q, k, v, return_lse=True, dropout=dropout_p, seed=seed, **options), None, seed


@naming(**NAMES, **_LENGTHS, **APART)
def _flash_attn_varlen_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None, leftpad_k: Any = None, seqused_k: Any = None,
) -> Any:  # fmt: skip
    """Computes ``_flash_attn_forward`` of sequences that lie end to end, or whose keys are in pages."""
    refuse(leftpad_k=(leftpad_k, None))
    options = options_of(softmax_scale, causal, (window_size_left, window_size_right), softcap, True, alibi_slopes)
    seed = seed_of(q, None) if dropout_p else None
    options |= {"dropout": dropout_p} | ({} if seed is None else {"seed": seed})
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return *varlen(q, k, v, starts, longest, options, True, block_table, (None, seqused_k)), None, seed


@naming(**NAMES, **APART)
def _flash_attn_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any,
    deterministic: bool, rng_state: Any = None,
) -> None:  # fmt: skip
    """Writes the gradients into dq, dk and dv."""
    options = options_of(softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic, alibi_slopes)
    backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), options, dropout=dropout_p, seed=rng_state)


@naming(**NAMES, **APART)
def _flash_attn_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool, rng_state: Any = None,
) -> None:  # fmt: skip
    """Writes the gradients into dq, dk and dv, of sequences that lie end to end."""
    options = options_of(softmax_scale, causal, (window_size_left, window_size_right), softcap, deterministic, alibi_slopes)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k}
    packed |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
    backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), options, dropout=dropout_p, seed=rng_state, **packed)


def backward(tensors: tuple[Any, ...], gradients: tuple[Any, ...], options: dict[str, Any], **more: Any) -> None:
    """Writes the gradients of q, k and v into ``gradients``. Raises ProblemError where one of these is None."""
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        if x is None:
            raise ProblemError(f"{name} is None; it must be a tensor, which receives the gradient.")
    do, q, k, v, o, lse = tensors
    attention.attention_backward(do, q, k, v, o, lse, out=gradients, **more, **options)


def refuse(**arguments: tuple[Any, Any]) -> None:
    """Raises UnsupportedError for an argument, the first of a pair, that is not its default, the second."""
    for name, (value, default) in arguments.items():
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            words = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedError(f"{name} is {words}; rawattn does not have it yet: give {default!r}.")


_ignored: set[str] = set()


def ignore(**hints: tuple[Any, ...]) -> None:
    """Warns once of a hint, the first of a tuple, that is none of its defaults, the others."""
    for name, (value, *defaults) in hints.items():
        if name not in _ignored and not any(value is x or (type(value) is type(x) and value == x) for x in defaults):
            _ignored.add(name)
            warnings.warn(f"{name} is a hint to other kernels; rawattn ignores it.", stacklevel=4)


def options_of(
    scale: Any, causal: Any, window: Any, softcap: float, deterministic: bool = True, slopes: Any = None, chunk: int = 0,
    first: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns flash-attn's options as those of ``rawattn.attention``: None where an option is off, which is found faster. Chunks
    count from ``first``, where the keys of each sequence begin."""
    sides = None if type(window) is tuple and window == (-1, -1) else _read_sides(window)
    options = {"scale": scale, "causal": causal, "window": sides, "softcap": softcap or None, "deterministic": deterministic}
    if slopes is not None:
        options["alibi"] = slopes
    return _add_chunks(options, chunk, first) if type(chunk) is not int or chunk else options


def _read_sides(window: Any) -> tuple[int, int] | None:
    """Reads a window as a pair, in which -1 is unbounded; None where both sides are. A tensor on a GPU is waited for."""
    try:
        left, right = (max(-1, operator.index(side)) for side in window)
    except (TypeError, ValueError):
        need = "a pair (left, right) of ints, where -1 is unbounded"
        raise ProblemError(f"window_size is {brief(window)}; it must be {need}.") from None
    return None if left == right == -1 else (left, right)


def _add_chunks(options: dict[str, Any], size: Any, first: Any) -> dict[str, Any]:
    """Adds to the options a mask by which a query keeps keys of its own chunk of ``size`` positions, within causal and window."""
    if type(size) is not int or size < 0:
        raise ProblemError(f"attention_chunk is {size!r}; it must be an int >= 0, where 0 is for no chunks.")
    Spec.of(causal=options["causal"])  # which checks it
    left, right = (None if side == -1 else side for side in options["window"] or (-1, -1))
    right = 0 if options["causal"] else right

    def mask(b: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        begin = 0 if first is None else first[b]
        position = q + kv_len - q_len
        kept = (position - begin) // size == (kv - begin) // size
        kept = kept if left is None else kept & (position - kv <= left)
        return kept if right is None else kept & (kv - position <= right)

    return {**options, "causal": False, "window": None, "mask": mask}


def _add_probs(results: Any, has_probs: bool) -> Any:
    return (*results, None) if has_probs else results


def varlen(
    q: Any, k: Any, v: Any, starts: tuple[Any, Any], longest: tuple[Any, Any], options: dict[str, Any], return_lse: bool,
    pages: Any = None, lens: tuple[Any, Any] = (None, None),
) -> Any:  # fmt: skip
    """Computes attention of packed queries, over packed keys or those in pages."""
    if pages is None:
        used = {"q_lens": lens[0], "kv_lens": lens[1], "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1]}
        return attention.attention_varlen(q, k, v, starts[0], starts[1], return_lse=return_lse, **used, **options)
    refuse(seqused_q=(lens[0], None), dropout_p=(options.get("dropout", 0.0), 0.0))
    if not isinstance(starts[1], torch.Tensor):
        raise ProblemError(f"cu_seqlens_k is a {type(starts[1]).__name__}; it must be a torch tensor.")
    kv_lens = torch.diff(starts[1]) if lens[1] is None else lens[1]
    step = serving.Step(kv_lens, pages, starts[0], causal=options["causal"], max_q_len=longest[0], max_kv_len=longest[1])
    options = {**without_step(options), "return_lse": return_lse}
    compute = functools.partial(attention_kvcache, q, serving.KVCache(k, v), step, **options)
    return _Paged.apply(compute, q, k, v) if is_plain() and torch_state.requires_grad(q, k, v) else compute()


class _Paged(torch.autograd.Function):
    """Results over pages, which have no gradient: they require grad as the inputs do, and a backward through them raises."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], *tensors: Any) -> Any:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ProblemError("o was computed over pages, which have no gradient; leave block_table out, or use torch.no_grad().")


def unpack(name: str, packed: Any, axes: str) -> tuple[Any, ...]:
    """Returns the tensors that are packed along the last axis but two, whose length is a number in ``axes``."""
    lengths, shape = axes.split(", "), tuple(getattr(packed, "shape", ()))
    if len(shape) != len(lengths) or shape[-3] != int(lengths[-3]):
        raise ProblemError(f"{name} is a {type(packed).__name__} of shape {shape}; it must be a tensor, ({axes}).")
    return tuple(packed.unbind(-3))


MODULES = {
    "flash_attn": "flash_attn", "flash_attn.flash_attn_interface": "flash_attn", "flash_attn_interface": "flash_attn_interface",
    "flash_attn_3": "flash_attn_interface", "flash_attn_3.flash_attn_interface": "flash_attn_interface",
}  # fmt: skip


def install() -> None:
    """Makes ``import flash_attn``, ``flash_attn_interface`` and ``flash_attn_3`` give rawattn's functions, in this process.

    Raises ProblemError where flash-attn itself is loaded.
    """
    for name in MODULES:
        loaded = sys.modules.get(name)
        if loaded is not None and not hasattr(loaded, "_of_rawattn"):
            raise ProblemError(
                f"{name} is loaded, from {getattr(loaded, '__file__', None)}; call install() before it is imported."
            )
    for name, ours in MODULES.items():
        source, module = importlib.import_module(f"{__package__}.{ours}"), types.ModuleType(name, "flash-attn's, by rawattn.")
        names = [key for key in vars(source) if key.lstrip("_").startswith(("flash_attn_", "get_scheduler_"))]
        vars(module).update({key: getattr(source, key) for key in names})
        public, parent = [key for key in names if key[0] != "_"], name.partition(".")[0]
        spec = importlib.machinery.ModuleSpec(name, None, is_package=f"{name}.flash_attn_interface" in MODULES)
        vars(module).update(__spec__=spec, __version__=source.__version__, __all__=public, _of_rawattn=True)
        if spec.submodule_search_locations is not None:
            module.__path__ = []
        sys.modules[name] = module
        if parent != name:
            vars(sys.modules[parent])["flash_attn_interface"] = module


def uninstall() -> None:
    """Takes back what ``install`` did."""
    for name in MODULES:
        if hasattr(sys.modules.get(name), "_of_rawattn"):
            del sys.modules[name]

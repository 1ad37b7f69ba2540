"""Attention on JAX arrays: under jit, grad, vmap and shard_map, without copies.

>>> import rawattn.jax
>>> o = rawattn.jax.attention(q, k, v, causal=True)  # (batch, length, heads, head_dim)

XLA calls back into Python (``jax.experimental.buffer_callback``), which launches rawattn's kernels on XLA's stream, on the memory
that XLA gave. On a GPU XLA may capture the launches in a CUDA graph, once for each set of addresses. It needs JAX 0.10, CuPy on a
GPU, and imports JAX, which ``import rawattn`` does not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback

from .api.naming import naming
from .api.pairs import pair_options
from .array import reading
from .array.array import CPU, DTYPES, Array, contiguous_strides
from .driver.context import relaxed_capture
from .errors import ProblemError, UnsupportedError
from .operation import Backward, Forward, arguments, captures, functions
from .operation.inputs import BackwardInputs, ForwardInputs
from .operation.keys import Blocks, TopK, parted
from .operation.spec import MaskLike, Options, ScoreLike, Window, is_int, make_dropout, named
from .runtime import calls
from .runtime.request import request_for
from .variant.element import ELEMENTS
from .variant.mask import And, Causal, Full
from .variant.mask import Window as WindowMask

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BF16 = DTYPES["bf16"]

Items = tuple[tuple[str, Any], ...]  # of options, to be hashed


@arguments.named
def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window | None = None, softcap: float | None = None,
    scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None,
    bias: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, return_lse: bool = False,
    constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None, kv_offset: int | None = None,
    dropout: float = 0.0, seed: Any = None, invariant: bool = False, keys: TopK | Blocks | None = None,
) -> Any:  # fmt: skip
    """softmax(mask(score(q k^T))) v, for each batch and head, of JAX arrays.

    >>> o, lse = jax.jit(functools.partial(rawattn.jax.attention, causal=True, return_lse=True))(q, k, v)

    Arguments and results are those of ``rawattn.attention``; ``dot_product_attention`` has the names of ``jax.nn``. Gradients of
    q, k, v and sinks, by o and by lse, come by ``jax.custom_vjp``: reverse mode, once.
    NumPy arrays are taken where JAX keeps their dtype. Options are Python values: what is traced may be an array, but not a
    window or a scale.

    Arrays that a mask or a score captured, ``alibi`` and ``bias`` may be traced, too: they become operands of the callback,
    beside q, k and v, and a compiled program reads them anew at every run. Those of floats that a score captured have gradients.

    ``seed`` is an int of 64 bits, an array of one integer, which may be traced, or a key of ``jax.random``, from which 64 bits
    are drawn. The same number drops the same weights as in ``rawattn.attention``, here and in the gradients.

    vmap joins the mapped dimension to the batch; where sinks, functions or dropout are given, one element is computed after the
    other, and elements drop the same weights unless their seeds differ. What is not mapped is repeated in memory. shard_map over
    batch and heads computes each device's part, in which batch and heads begin with 0: give each device a seed of its own. Under
    jit alone, XLA cannot split a callback: it gathers sharded arrays first.

    Raises ProblemError while JAX traces, where an argument is wrong. That no kernel of the device computes the call shows when it
    runs: JAX then raises its own error with the text of the ``UnsupportedError``.
    """
    if isinstance(window, list):
        window = tuple(window)
    alibi, bias = (x if x is None else _take(name, x) for name, x in (("alibi", alibi), ("bias", bias)))
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    numbers, counts, lists = parted(keys)
    all_options = Options(
        causal=causal, window=window, softcap=softcap, scale=scale, mask=mask, score=score, return_lse=True,
        constant_time=constant_time, deterministic=deterministic, q_offset=q_offset, kv_offset=kv_offset, dropout=dropout,
        invariant=invariant, keys=lists,
    )  # fmt: skip
    options, captured = captures.take(named(all_options))
    for words, x in zip(captures.labels(options).values(), captured, strict=True):
        if not isinstance(x, jax.Array):
            raise ProblemError(f"{words} is a {type(x).__name__}; it must be a JAX array, as q is here.")
    operands = {"q": q, "k": k, "v": v, "sinks": sinks, "q_lens": q_lens, "kv_lens": kv_lens, "keys": numbers}
    operands["keys_counts"] = counts
    operands = {name: _take(name, x) for name, x in operands.items() if x is not None or name in "qkv"}
    seed_words = None if seed is None else _split_seed(seed)
    if make_dropout(dropout):
        if seed_words is None:
            raise ProblemError(f"seed is None, and dropout is {dropout}; give an int, an array of one integer, or a key.")
        operands["seed"] = seed_words
    operands |= dict(zip(captures.names(options), captured, strict=True))
    described = {name: _SEED if name == "seed" else _describe(x) for name, x in operands.items()}
    Forward.of_call(described, options, (None, None))
    o, lse = _attend(tuple(options.items()), _vary(operands, _find_axes(operands)))
    return (o, lse) if return_lse else o


@naming(q="query", k="key", v="value", q_lens="query_seq_lengths", kv_lens="key_value_seq_lengths")
def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None, is_causal: bool = False,
    query_seq_lengths: Any = None, key_value_seq_lengths: Any = None, local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None, return_residual: bool = False,
) -> Any:  # fmt: skip
    """``jax.nn.dot_product_attention``, computed by ``attention``.

    >>> o = rawattn.jax.dot_product_attention(query, key, value, is_causal=True)

    What is what: query, key and value are q, k and v, with or without the dimension of the batch. is_causal is
    ``Causal("top_left")``, local_window_size a ``Window`` of that alignment. query_seq_lengths and key_value_seq_lengths are
    q_lens and kv_lens. bias is a bias, with a gradient; mask, bools that broadcast to (batch, heads, q_len, kv_len), is read by a
    function where it lies. The residual is lse as (batch, q_len, heads), in key's dtype and without a gradient.

    A query that keeps no key gives 0, where JAX's own gives the mean of all values. Refused is an implementation other than None.
    """
    if implementation is not None:
        raise ProblemError(f"implementation is {implementation!r}; it must be None here, as rawattn is the implementation.")
    qkv = [_take(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    batched = qkv[0].ndim == 4
    if not batched:
        qkv = [x[None] for x in qkv]
    sides = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
    kept: MaskLike = Causal("top_left") if is_causal else Full()
    if mask is not None:
        q_shape, k_shape = qkv[0].shape, qkv[1].shape
        kept = _make_mask(mask, (q_shape[0], q_shape[2], q_shape[1], k_shape[1]), is_causal, sides)
    elif sides is not None:
        near = WindowMask(*sides, "top_left")
        kept = And(Causal("top_left"), near) if is_causal else near
    options = {"bias": bias, "q_lens": query_seq_lengths, "kv_lens": key_value_seq_lengths}
    o, lse = attention(*qkv, mask=kept, scale=scale, return_lse=True, **options)
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2).astype(qkv[1].dtype))
    o, residual = (x if batched else x[0] for x in (o, residual))
    return (o, residual) if return_residual else o


def triangle_attention(q: Any, k: Any, v: Any, bias: Any, mask: Any = None, scale: float | None = None) -> Any:
    """softmax(scale q k^T + bias) v for each of N rows, which share the bias, as of ``integrations.cuequivariance``.

    >>> o = rawattn.jax.triangle_attention(q, k, v, bias, mask)

    q, k and v are (..., N, heads, S, head_dim), bias (..., 1, heads, S, S), with a gradient in its own format, and mask
    (..., N, 1, 1, S) of bools: whether a key is kept. Returns o, (..., N, heads, S, head_dim). A query whose row keeps no key
    gives 0.
    """
    rows, heads, columns = q.shape[:-3], q.shape[-3], (k.shape[-2], k.shape[-1])
    wanted = {"k": (*rows, heads, *columns), "v": (*rows, heads, columns[0], v.shape[-1])}
    wanted |= {"bias": (*rows[:-1], 1, heads, q.shape[-2], columns[0]), "mask": (*rows, 1, 1, columns[0])}
    for name, x in {"k": k, "v": v, "bias": bias, **({} if mask is None else {"mask": mask})}.items():
        if q.ndim < 4 or x.shape != wanted[name]:
            raise ProblemError(f"{name} has shape {tuple(x.shape)}; it must be {wanted[name]}, as q is {tuple(q.shape)}.")
    if mask is not None and mask.dtype != bool:
        raise ProblemError(f"mask is of {mask.dtype}; it must be of bools: whether a key is kept.")
    pairs, count = bias.reshape(math.prod(rows[:-1]), *bias.shape[-3:]), math.prod(rows)
    keep = None if mask is None else mask.reshape(count, columns[0])
    each = [jnp.swapaxes(x.reshape(count, *x.shape[-3:]), 1, 2) for x in (q, k, v)]
    o = attention(*each, scale=scale, **pair_options(pairs, rows[-1], keep=keep))
    return jnp.swapaxes(o, 1, 2).reshape(*q.shape[:-1], v.shape[-1])


def _take(name: str, x: Any) -> Any:
    """Takes the argument ``name`` as a JAX array. Raises ProblemError for an array of another library than NumPy, and where JAX
    would round its numbers."""
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, (np.ndarray, np.generic)):
        raise ProblemError(f"{name} is a {type(x).__module__}.{type(x).__name__}; it must be an array of JAX or NumPy.")
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise ProblemError(
            f"{name} is a NumPy array of {x.dtype}, of which JAX would make {jax.dtypes.canonicalize_dtype(x.dtype)}; give that, "
            "or set jax_enable_x64."
        )
    return jnp.asarray(x)


def _make_mask(mask: Any, sizes: tuple[int, ...], is_causal: bool, sides: tuple[int, int] | None) -> Callable[..., Any]:
    """Makes the mask that an array of bools, is_causal and the sides of a window mean together."""
    table = _take("mask", mask)
    shape = (1,) * (4 - table.ndim) + table.shape
    if table.dtype != bool or len(shape) > 4 or any(n not in (1, need) for n, need in zip(shape, sizes, strict=True)):
        raise ProblemError(
            f"mask is {table.dtype} of shape {table.shape}; it must be of bool, and broadcast to {sizes}, (batch, heads, q_len, "
            "kv_len)."
        )
    table = table.reshape(shape)
    long_axes = tuple(n > 1 for n in table.shape)  # of the other axes all indices are 0

    def kept(b: Any, h: Any, q: Any, kv: Any) -> Any:
        is_kept = table[tuple(i if is_long else 0 for i, is_long in zip((b, h, q, kv), long_axes, strict=True))]
        if is_causal:
            is_kept = is_kept & (q >= kv)
        if sides is not None:
            is_kept = is_kept & (q - kv <= sides[0]) & (kv - q <= sides[1])
        return is_kept

    return kept


_SEED = Array("jax", CPU, "int64", (1,), (1,), 0, None)


def _split_seed(seed: Any) -> Any:
    """Splits the 64 bits of a seed into two uint32, the lower ones first: JAX has no int64 unless it is asked for."""
    if not isinstance(seed, jax.Array):
        if getattr(seed, "shape", None) == (1,):
            seed = seed[0]
        if not is_int(seed):
            raise ProblemError(f"seed is {seed!r}; it must be an int, an array of one integer, or a key of jax.random.")
        return jnp.asarray([int(seed) & 0xFFFFFFFF, (int(seed) >> 32) & 0xFFFFFFFF], jnp.uint32)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) or (seed.dtype == jnp.uint32 and seed.shape == (2,)):
        if seed.ndim > 1 or (seed.ndim and seed.dtype != jnp.uint32):
            raise ProblemError(f"seed is an array of keys of shape {seed.shape}; it must be one key.")
        return jax.random.bits(seed, (2,), jnp.uint32)
    if seed.shape not in ((), (1,)) or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise ProblemError(
            f"seed is {seed.dtype} of shape {seed.shape}; it must be an int, an array of one integer, or a key of jax.random."
        )
    seed = seed.reshape(())
    if seed.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(seed, jnp.uint32)
    upper = jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    lower = seed.astype(jnp.int32 if jnp.issubdtype(seed.dtype, jnp.signedinteger) else jnp.uint32)
    return jnp.stack([jax.lax.bitcast_convert_type(lower, jnp.uint32), upper])


def _describe(x: Any) -> Array:
    """Describes a traced array, as far as checks of shapes read one."""
    name = _NAMES.get(np.dtype(x.dtype), str(x.dtype))
    return Array("jax", CPU, name, tuple(x.shape), contiguous_strides(x.shape), 0, None)


# ---- the formula of the gradients, as JAX takes it


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Items, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Computes (o, lse)."""
    q, v = operands["q"], operands["v"]
    lse_dtype = ELEMENTS[_NAMES[np.dtype(q.dtype)]].lse_dtype
    shapes = {"o": ((*q.shape[:-1], v.shape[-1]), q.dtype), "lse": ((q.shape[0], q.shape[2], q.shape[1]), lse_dtype)}
    results = _call_back(_make_forward(options), shapes, operands)
    return results["o"], results["lse"]


def _attend_fwd(options: Items, primals: dict[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    """Computes (o, lse), and keeps them for the backward."""
    operands = {name: x.value for name, x in primals.items()}
    wrt = {name: () for name in captures.names(dict(options)) if primals[name].perturbed}
    for name in wrt:
        if name.startswith("mask"):
            words = captures.labels(dict(options))[name]
            raise UnsupportedError(f"{words} is differentiated, and a mask has no gradient; use stop_gradient on it.")
    if dict(options)["constant_time"]:
        raise ProblemError("constant_time=True was given and a gradient was asked for; no gradient is shown to be constant-time.")
    o, lse = _attend(options, operands)
    return (o, lse), (operands, o, lse, wrt)


def _attend_bwd(options: Items, kept: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    """Computes the gradients of q, k, v, the sinks, and of captured arrays."""
    operands, o, lse, followed = kept
    do, dlse = (jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    wrt = tuple(name for name in captures.names(dict(options)) if name in followed)
    shapes = {f"d{name}": (operands[name].shape, operands[name].dtype) for name in (*"qkv", "sinks", *wrt) if name in operands}
    gradients = _compute_gradients(options, wrt, tuple(shapes.items()), {**operands, "do": do, "o": o, "lse": lse, "dlse": dlse})
    return ({name: gradients.get(f"d{name}") for name in operands},)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _compute_gradients(options: Items, wrt: tuple[str, ...], shapes: tuple[Any, ...], operands: dict[str, Any]) -> dict[str, Any]:
    """Computes the gradients, which have no gradients themselves: XLA takes results of a callback for constants."""
    return _call_back(_make_backward(options, wrt), dict(shapes), operands)


@_compute_gradients.defjvp
def _refuse_second(*args: Any) -> NoReturn:
    raise ProblemError("a second derivative of rawattn.jax.attention was asked for; its gradients have none.")


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


# ---- the calls that XLA makes


def _call_back(callback: Callable[..., None], shapes: dict[str, tuple[Any, Any]], operands: dict[str, Any]) -> dict[str, Any]:
    """Makes XLA call back for results of these shapes and dtypes. bf16 goes as uint16 of its bits, which all protocols know."""
    results = {name: jax.ShapeDtypeStruct(shape, _find_carrier(dtype)) for name, (shape, dtype) in shapes.items()}
    call = buffer_callback(callback, results, vmap_method="broadcast_all", command_buffer_compatible=True)
    buffers = call({name: jax.lax.bitcast_convert_type(x, _find_carrier(x.dtype)) for name, x in operands.items()})
    buffers = _vary(buffers, _find_axes(operands))
    return {name: jax.lax.bitcast_convert_type(x, shapes[name][1]) for name, x in buffers.items()}


def _find_axes(operands: dict[str, Any]) -> set[str]:
    """Finds the axes of a mesh along which the operands differ from device to device, inside of shard_map."""
    return {axis for x in operands.values() for axis in _find_axes_of(x)}


def _find_axes_of(x: Any) -> Any:
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", aval)  # JAX 0.10 has it, and vma before
    return getattr(kind, "varying", getattr(kind, "vma", ()))


def _vary(values: dict[str, Any], axes: set[str]) -> dict[str, Any]:
    """Marks all values as different along these axes, whether they are or not. JAX sums the gradients of those that were not."""
    missing = {name: tuple(sorted(axes - set(_find_axes_of(x)))) for name, x in values.items()}
    return {name: jax.lax.pcast(x, missing[name], to="varying") if missing[name] else x for name, x in values.items()}


def _find_carrier(dtype: Any) -> Any:
    return np.uint16 if np.dtype(dtype) == _BF16 else np.dtype(dtype)


@functools.cache  # JAX compiles a callback once for each object
def _make_forward(options: Items) -> Callable[..., None]:
    def compute(context: Any, out: dict[str, Any], operands: dict[str, Any]) -> None:
        """Computes attention into XLA's buffers."""
        for element in _split_elements(context, {**operands, **out}, options):
            inputs = ForwardInputs(*map(element.get, Forward.names))
            captured = [element[name] for name in captures.names(dict(options))]
            calls.run(inputs, request_for(Forward, dict(options)), (element["o"], element["lse"]), tuple(captured))

    return compute


@functools.cache
def _make_backward(options: Items, wrt: tuple[str, ...]) -> Callable[..., None]:
    options = tuple((name, value if name != "return_lse" else False) for name, value in options)
    options = (*options, ("wrt", wrt)) if wrt else options

    def compute(context: Any, out: dict[str, Any], operands: dict[str, Any]) -> None:
        """Computes the gradients into XLA's buffers."""
        for element in _split_elements(context, {**operands, **out}, options):
            names = ("dq", "dk", "dv", "dsinks", *(f"d{name}" for name in wrt))
            results = tuple(element[name] for name in names if name in element)
            inputs = BackwardInputs(*map(element.get, Backward.names))
            captured = [element[name] for name in captures.names(dict(options))]
            calls.run(inputs, request_for(Backward, dict(options)), results, tuple(captured))

    return compute


def _split_elements(context: Any, buffers: dict[str, Any], options: Items) -> Iterator[dict[str, Any]]:
    """Splits buffers into the arrays of each call to make, by name, while XLA's stream is the current one. Dimensions that vmap
    added join the batch; with sinks and a seed, which have no batch, and with functions, which see it, each element is a call."""
    with _view_buffers(context, buffers) as views:
        extra = views["q"].ndim - 4
        if not extra:
            yield views
        elif "sinks" not in views and "seed" not in views and not functions.among(dict(options)):
            yield {name: x.reshape(-1, *x.shape[extra + 1 :]) for name, x in views.items()}
        else:
            rows = {name: x.reshape(-1, *x.shape[extra:]) for name, x in views.items()}
            for i in range(len(rows["q"])):
                yield {name: x[i] for name, x in rows.items()}


@contextlib.contextmanager
def _view_buffers(context: Any, buffers: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Views XLA's buffers as arrays of NumPy, or of CuPy on a GPU."""
    if int(buffers["q"].__dlpack_device__()[0]) == 1:  # kDLCPU
        yield _view_bits(np, buffers)
        return
    cupy = reading.import_cupy("rawattn.jax on a GPU")
    views = _view_bits(cupy, buffers)
    device = views["q"].device
    # A graph may be under way, in which memory for scratch cannot be had otherwise.
    with device, cupy.cuda.ExternalStream(context.stream, device.id), relaxed_capture():
        yield views


def _view_bits(module: Any, buffers: dict[str, Any]) -> dict[str, Any]:
    views = {name: module.asarray(x) for name, x in buffers.items()}
    views = {name: x.view(_BF16) if x.dtype == np.uint16 else x for name, x in views.items()}
    return {name: x.view(np.int64) if name == "seed" else x for name, x in views.items()}

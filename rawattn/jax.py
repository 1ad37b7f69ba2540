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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback

from . import api, arrays, driver, functions
from .api import MaskLike, ScoreLike
from .arrays import Array
from .errors import ProblemError, UnsupportedError
from .operation import Backward, Forward
from .spec import Window
from .variant.element import ELEMENTS
from .variant.mask import Both, Causal, Full, Mask
from .variant.mask import Window as WindowMask

_NAMES = {dtype: name for name, dtype in arrays.DTYPES.items()}
_BF16 = arrays.DTYPES["bf16"]

Options = tuple[tuple[str, Any], ...]


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window | None = None, softcap: float | None = None,
    scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None,
    bias: Any = None, sinks: Any = None, q_lens: Any = None, kv_lens: Any = None, return_lse: bool = False,
    constant_time: bool = False, deterministic: bool = True, q_offset: int | None = None, kv_offset: int | None = None,
    invariant: bool = False,
) -> Any:  # fmt: skip
    """softmax(mask(score(q k^T))) v, for each batch and head, of JAX arrays.

    >>> o, lse = jax.jit(functools.partial(rawattn.jax.attention, causal=True, return_lse=True))(q, k, v)

    Arguments and results are those of ``rawattn.attention``; ``dot_product_attention`` has the names of ``jax.nn``. Gradients of
    q, k, v and sinks, by o and by lse, come by ``jax.custom_vjp``: reverse mode, once. With q_lens or kv_lens there is none yet.
    Options are Python values: what is traced may be an array, but not a window or a scale.

    What functions captured may be traced, too; it gets no gradient yet.

    vmap joins the mapped dimension to the batch; where sinks or functions are given, one element is computed after the other.
    What is not mapped is repeated in memory. shard_map over batch and heads computes each device's part. Under jit alone, XLA
    cannot split a callback: it gathers sharded arrays first.

    Raises ProblemError while JAX traces, where an argument is wrong. That no kernel of the device computes the call shows when it
    runs: JAX then raises its own error with the text of the ``UnsupportedError``.
    """
    if isinstance(window, list):
        window = tuple(window)
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    options = api.options_of(
        causal=causal, window=window, softcap=softcap, scale=scale, mask=mask, score=score, return_lse=True,
        constant_time=constant_time, deterministic=deterministic, q_offset=q_offset, kv_offset=kv_offset,
        invariant=invariant,
    )  # fmt: skip
    options, captured = functions.taken(options)
    for words, x in zip(functions.labels(options).values(), captured, strict=True):
        if not isinstance(x, jax.Array):
            raise ProblemError(f"{words} is a {type(x).__name__}; it must be a JAX array, as q is here.")
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "q_lens": q_lens, "kv_lens": kv_lens}
    given = {name: jnp.asarray(x) for name, x in given.items() if x is not None or name in "qkv"}
    given |= dict(zip(functions.names(options), captured, strict=True))
    Forward.of_call({name: _described(x) for name, x in given.items()}, options, (None, None))
    o, lse = _attention(tuple(options.items()), _varying(given, _axes(given)))
    return (o, lse) if return_lse else o


def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None, is_causal: bool = False,
    query_seq_lengths: Any = None, key_value_seq_lengths: Any = None, local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None, return_residual: bool = False,
) -> Any:  # fmt: skip
    """``jax.nn.dot_product_attention``, computed by ``attention``.

    >>> o = rawattn.jax.dot_product_attention(query, key, value, is_causal=True)

    What is what: query, key and value are q, k and v, with or without the dimension of the batch. is_causal is
    ``Causal("top_left")``, local_window_size a ``Window`` of that alignment. query_seq_lengths and key_value_seq_lengths are
    q_lens and kv_lens. The residual is lse as (batch, q_len, heads), in key's dtype and without a gradient.

    A query that keeps no key gives 0, where JAX's own gives the mean of all values. Refused are bias, mask as an array, and an
    implementation other than None.
    """
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            raise UnsupportedError(f"{name} was given, an array for each pair; rawattn.jax takes none yet.")
    if implementation is not None:
        raise ProblemError(f"implementation is {implementation!r}; it must be None here, as rawattn is the implementation.")
    given = [jnp.asarray(x) for x in (query, key, value)]
    batched = given[0].ndim == 4
    if not batched:
        given = [x[None] for x in given]
    kept: Mask = Causal("top_left") if is_causal else Full()
    if local_window_size is not None:
        sides = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
        near = WindowMask(*sides, "top_left")
        kept = Both(kept, near) if is_causal else near
    lengths = {"q_lens": query_seq_lengths, "kv_lens": key_value_seq_lengths}
    o, lse = attention(*given, mask=kept, scale=scale, return_lse=True, **lengths)
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2).astype(given[1].dtype))
    o, residual = (x if batched else x[0] for x in (o, residual))
    return (o, residual) if return_residual else o


def _described(x: Any) -> Array:
    """Describes a traced array, as far as checks of shapes read one."""
    name = _NAMES.get(np.dtype(x.dtype), str(x.dtype))
    return Array("jax", arrays.CPU, name, tuple(x.shape), arrays.contiguous_strides(x.shape), 0, None)


# ---- the formula of the gradients, as JAX takes it


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, given: dict[str, Any]) -> tuple[Any, Any]:
    """Computes (o, lse)."""
    q, v = given["q"], given["v"]
    lse_dtype = ELEMENTS[_NAMES[np.dtype(q.dtype)]].lse_dtype
    shapes = {"o": ((*q.shape[:-1], v.shape[-1]), q.dtype), "lse": ((q.shape[0], q.shape[2], q.shape[1]), lse_dtype)}
    found = _called(_forward(options), shapes, given)
    return found["o"], found["lse"]


def _attention_fwd(options: Options, primals: dict[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    """Computes (o, lse), and keeps them for the backward."""
    given = {name: x.value for name, x in primals.items()}
    for name, words in functions.labels(dict(options)).items():
        if primals[name].perturbed:
            raise UnsupportedError(
                f"{words} is differentiated, and captured arrays get no gradients yet; use stop_gradient on it."
            )
    for name in ("q_lens", "kv_lens"):
        if name in given:
            raise UnsupportedError(f"{name} was given and a gradient was asked for; there is none with lengths yet.")
    if dict(options)["constant_time"]:
        raise ProblemError("constant_time=True was given and a gradient was asked for; no gradient is shown to be constant-time.")
    o, lse = _attention(options, given)
    return (o, lse), (given, o, lse)


def _attention_bwd(options: Options, kept: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    """Computes the gradients of q, k, v and the sinks."""
    given, o, lse = kept
    do, dlse = (jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
    captured = functions.names(dict(options))
    shapes = {f"d{name}": (x.shape, x.dtype) for name, x in given.items() if name not in captured}
    found = _called(_backward(options), shapes, {**given, "do": do, "o": o, "lse": lse, "dlse": dlse})
    return ({name: found.get(f"d{name}") for name in given},)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


# ---- the calls that XLA makes


def _called(callback: Callable[..., None], shapes: dict[str, tuple[Any, Any]], given: dict[str, Any]) -> dict[str, Any]:
    """Results of these shapes and dtypes from a callback. bf16 goes as the uint16 of its bits, which every protocol knows."""
    results = {name: jax.ShapeDtypeStruct(shape, _carrier(dtype)) for name, (shape, dtype) in shapes.items()}
    call = buffer_callback(callback, results, vmap_method="broadcast_all", command_buffer_compatible=True)
    found = call({name: jax.lax.bitcast_convert_type(x, _carrier(x.dtype)) for name, x in given.items()})
    found = _varying(found, _axes(given))
    return {name: jax.lax.bitcast_convert_type(x, shapes[name][1]) for name, x in found.items()}


def _axes(given: dict[str, Any]) -> set[str]:
    """The axes of a mesh along which these arrays differ from device to device, inside of shard_map."""
    return {axis for x in given.values() for axis in _axes_of(x)}


def _axes_of(x: Any) -> Any:
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", aval)  # JAX 0.10 has it, and vma before
    return getattr(kind, "varying", getattr(kind, "vma", ()))


def _varying(given: dict[str, Any], axes: set[str]) -> dict[str, Any]:
    """The arrays as ones that differ along these axes, whether they do or not. JAX sums the gradients of those that did not."""
    missing = {name: tuple(sorted(axes - set(_axes_of(x)))) for name, x in given.items()}
    return {name: jax.lax.pcast(x, missing[name], to="varying") if missing[name] else x for name, x in given.items()}


def _carrier(dtype: Any) -> Any:
    return np.uint16 if np.dtype(dtype) == _BF16 else np.dtype(dtype)


@functools.cache  # JAX compiles a callback once for each object
def _forward(options: Options) -> Callable[..., None]:
    def compute(context: Any, out: dict[str, Any], given: dict[str, Any]) -> None:
        """Computes attention into XLA's buffers."""
        for each in _elements(context, {**given, **out}, options):
            inputs, captured = tuple(map(each.get, Forward.names)), tuple(each[name] for name in functions.names(dict(options)))
            results = each["o"], each["lse"]
            api.run(inputs, dict(options), (None, None), None, None, results, Forward, None, captured)

    return compute


@functools.cache
def _backward(options: Options) -> Callable[..., None]:
    options = tuple((name, value if name != "return_lse" else False) for name, value in options)

    def compute(context: Any, out: dict[str, Any], given: dict[str, Any]) -> None:
        """Computes the gradients into XLA's buffers."""
        for each in _elements(context, {**given, **out}, options):
            results = tuple(each[name] for name in ("dq", "dk", "dv", "dsinks") if name in each)
            inputs, captured = tuple(map(each.get, Backward.names)), tuple(each[name] for name in functions.names(dict(options)))
            api.run(inputs, dict(options), (None, None), None, None, results, Backward, None, captured)

    return compute


def _elements(context: Any, buffers: dict[str, Any], options: Options) -> Iterator[dict[str, Any]]:
    """The arrays of each call to make, by name, while XLA's stream is the current one. Dimensions that vmap added join the batch;
    with sinks, which have none, and with functions, which see the batch, each element is a call of its own."""
    with _arrays(context, buffers) as found:
        extra = found["q"].ndim - 4
        if not extra:
            yield found
        elif "sinks" not in found and not functions.among(dict(options)):
            yield {name: x.reshape(-1, *x.shape[extra + 1 :]) for name, x in found.items()}
        else:
            rows = {name: x.reshape(-1, *x.shape[extra:]) for name, x in found.items()}
            for i in range(len(rows["q"])):
                yield {name: x[i] for name, x in rows.items()}


@contextlib.contextmanager
def _arrays(context: Any, buffers: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """XLA's buffers as arrays of NumPy, or of CuPy on a GPU, in place."""
    if int(buffers["q"].__dlpack_device__()[0]) == 1:  # kDLCPU
        yield _of_bits(np, buffers)
        return
    cupy = arrays.import_cupy("rawattn.jax on a GPU")
    found = _of_bits(cupy, buffers)
    device = found["q"].device
    # A graph may be under way, in which memory for scratch cannot be had otherwise.
    with device, cupy.cuda.ExternalStream(context.stream, device.id), driver.relaxed_capture():
        yield found


def _of_bits(module: Any, buffers: dict[str, Any]) -> dict[str, Any]:
    views = {name: module.asarray(x) for name, x in buffers.items()}
    return {name: x.view(_BF16) if x.dtype == np.uint16 else x for name, x in views.items()}

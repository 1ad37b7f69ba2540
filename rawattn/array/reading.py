"""This module reads arrays of torch, CuPy, Numba, JAX and NumPy, and finds the devices and streams of these libraries.

torch and CuPy arrays are read by attribute, which costs a microsecond; DLPack would cost thirty. Every other GPU array comes in
through CuPy, from ``__cuda_array_interface__`` or ``__dlpack__``, which also makes our stream wait for its producer's.
Nothing is ever copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..driver import context
from ..errors import INSTALL_EITHER, ProblemError, UnsupportedError
from . import torch_state
from .array import CPU, ELEMENTS, Array, span

_readers: dict[type, Callable[[Any, str], Array]] = {}


def read(x: Any, name: str) -> Array:
    """Returns ``x``, the argument ``name``, as an Array. Raises ProblemError where it is no array that can be read in place."""
    cls = type(x)
    read_it = _readers.get(cls)
    if read_it is None:
        read_it = _readers[cls] = _find_reader(cls)
    array = read_it(x, name)
    if array.pointer == 0 and 0 not in array.shape:
        raise ProblemError(f"{name} is a {cls.__name__} of shape {tuple(array.shape)} that has no memory; give a real array.")
    return array


def read_named(names: tuple[str, ...], arrays: tuple[Any, ...]) -> dict[str, Array]:
    """The arrays of a call by name, without those that are None."""
    return {name: read(x, name) for name, x in zip(names, arrays, strict=False) if x is not None}


def _find_reader(cls: type) -> Callable[[Any, str], Array]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(cls, torch.Tensor):
        torch_state.load(torch)
        return _read_torch
    if cupy is not None and issubclass(cls, cupy.ndarray):
        return _read_cupy
    return _read_numpy if issubclass(cls, np.ndarray) else _read_foreign


def _read_torch(x: Any, name: str) -> Array:
    if torch_state.is_dynamo():
        torch_state.check_untraced((x,))
    if not (x.is_cuda or x.is_cpu):
        raise ProblemError(f"{name} is on torch's device {x.device}; it must be on a CUDA GPU or the CPU.")
    if (reason := _find_pending(x)) is not None:
        raise ProblemError(f"{name} is a {type(x).__name__} {reason}.")
    dtype = torch_state.names.get(x.dtype)
    try:
        array = Array("torch", x.get_device(), dtype or str(x.dtype), x.shape, x.stride(), x.data_ptr(), x)
        fits = has_room(x, array.shape, array.strides)
    except (RuntimeError, NotImplementedError) as error:
        raise ProblemError(f"{name} is a torch tensor without plain memory ({x.layout}, {x.device}): {error}") from None
    if not fits:  # the pointer alone does not tell: in a freed storage it is the offset
        raise ProblemError(
            f"{name} is a {type(x).__name__} of shape {tuple(x.shape)} that has no memory for its elements (a storage that was "
            "freed, as FSDP does?); give a real tensor."
        )
    return array


def has_room(x: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Says whether a torch tensor's storage has room for its elements."""
    end = x.storage_offset() + span(shape, strides)
    return bool(end * x.element_size() <= x.untyped_storage().nbytes() or 0 in shape)


def _find_pending(x: Any) -> str | None:
    """The reason why a tensor's memory does not hold its numbers; None where it does."""
    torch = sys.modules["torch"]
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        return "which has no shape yet; run the module that makes it first"
    if x.is_nested:
        return "which is nested; give its values and offsets to rawattn.attention_varlen"
    if type(x).__name__ == "MaskedTensor":
        return "whose mask would be ignored; give its data, or a mask of attention"
    if type(x) not in torch_state.plain_tensors and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "which has no memory of its own; give a plain tensor, or call rawattn.attention itself"
    if x.is_neg():
        return "with a pending negation (its negative bit is set); give x.resolve_neg()"
    if x.is_conj():
        return "with a pending conjugation (its conjugate bit is set); give x.resolve_conj()"
    if x.layout is not torch.strided:
        return f"with layout {x.layout}; it must be strided"
    if torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "of a transform that is under way, such as vmap; it has no memory of its own"
    dual = torch.autograd.forward_ad
    if dual._current_level >= 0 and dual.unpack_dual(x).tangent is not None:
        return "with a forward-mode tangent, for which there is no formula; give its primal"
    return None


def check_plain(name: str, x: Any) -> None:
    """Raises ProblemError for a torch tensor whose class has a ``__torch_function__`` of its own, as a ``CausalBias`` has: its
    memory need not hold what it means."""
    if _behaves(type(x)):
        raise ProblemError(
            f"{name} is a {type(x).__name__}, a tensor with a __torch_function__ of its own, which a kernel would pass over; "
            "give a plain tensor of the numbers that it means."
        )


def _behaves(cls: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or cls is torch.Tensor or not issubclass(cls, torch.Tensor):
        return False
    function = cls.__torch_function__
    is_torchs = getattr(function, "__func__", None) is torch.Tensor.__torch_function__.__func__
    return not is_torchs and function is not torch._C._disabled_torch_function_impl


_behaves._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces


def _read_cupy(x: Any, name: str) -> Array:
    return Array("cupy", x.device.id, ELEMENTS.get(x.dtype, str(x.dtype)), x.shape, _count_strides(x, name), x.data.ptr, x)


def _read_numpy(x: Any, name: str) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise ProblemError(f"{name} is a masked array; its mask would be ignored. Give {name}.data, or a mask of attention.")
    if x.dtype.byteorder == ">":
        raise ProblemError(f"{name} is big-endian ({x.dtype.str}); give it in this machine's byte order.")
    return Array("numpy", CPU, ELEMENTS.get(x.dtype, str(x.dtype)), x.shape, _count_strides(x, name), x.ctypes.data, x)


def _count_strides(x: Any, name: str) -> tuple[int, ...]:
    size = x.dtype.itemsize
    if any(s % size for s in x.strides):
        raise ProblemError(f"{name} has strides of {x.strides} bytes; they must be whole elements of {size} bytes.")
    return tuple(s // size for s in x.strides)


def import_cupy(what: str) -> Any:
    """CuPy, which reads ``what``, where there is a GPU for it."""
    try:
        import cupy
    except ImportError:
        raise UnsupportedError(f"{what} needs CuPy, which is not installed: {INSTALL_EITHER}.") from None
    context.library()
    return cupy


def _read_foreign(x: Any, name: str) -> Array:
    """An array of a library that this file does not name: in through CuPy or NumPy, without a copy."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise ProblemError(f"{name} is traced by JAX (jit, grad or vmap), and has no memory; call rawattn.jax.attention instead.")
    interface = _has_interface(x)
    if not interface and not hasattr(x, "__dlpack_device__"):
        raise ProblemError(
            f"{name} is a {type(x).__name__}; it must be an array: a torch tensor, a CuPy, NumPy or Numba array, or anything "
            "with __dlpack__."
        )
    try:
        kind = 2 if interface else int(x.__dlpack_device__()[0])
    except Exception as error:  # of another library
        raise ProblemError(f"{name} is a {type(x).__name__}, whose __dlpack_device__ fails ({_name_error(error)}).") from error
    if kind not in (1, 2, 13):  # CPU, CUDA, CUDA managed
        raise ProblemError(f"{name} lies on a device of DLPack kind {kind}; it must be on a CUDA GPU or the CPU.")
    module = np if kind == 1 else import_cupy(f"{name} (a {type(x).__name__})")
    try:
        array = module.asarray(x) if interface else module.from_dlpack(x)
    except Exception as error:  # of another library
        raise ProblemError(f"{name} cannot be read without a copy ({_name_error(error)}); it is a {type(x).__name__}.") from error
    return _read_numpy(array, name) if kind == 1 else _read_cupy(array, name)


def _has_interface(x: Any) -> bool:
    """Says whether an array should come in through ``__cuda_array_interface__``. Before version 3 that names no stream to wait
    for, so DLPack, which does, goes first where there is both."""
    interface = getattr(x, "__cuda_array_interface__", None)
    return isinstance(interface, Mapping) and (interface.get("version", 0) >= 3 or not hasattr(x, "__dlpack_device__"))


def _name_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def number_of_device(device: Any) -> int | None:
    """The number of a GPU that is named as torch, CuPy or JAX do, or by the number itself; None for a CPU. "cuda" alone is
    torch's current one. Raises ProblemError for what is no device."""
    kind, index = "cuda", getattr(device, "id", device)  # CuPy's have an id
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        index = int(number) if number.isdecimal() else number or None
    elif hasattr(device, "platform"):  # JAX's
        kind, index = device.platform, device.local_hardware_id
    elif hasattr(device, "type"):  # torch's
        kind, index = device.type, device.index
    if kind == "cpu":
        return None
    if index is None and device is not None:
        torch = sys.modules.get("torch")
        index = torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
    if kind not in ("cuda", "gpu") or not hasattr(index, "__index__"):
        need = "a device as torch, CuPy or JAX name it, such as 'cuda:0', or the number of a CUDA GPU, an int from 0 up"
        raise ProblemError(f"device is {device!r}; it must be {need}.")
    return int(index)


def stream_of(library: str) -> Callable[[int], int]:
    """A function that gives the handle of a library's current stream on a device."""
    if library == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream
    return lambda device: sys.modules["cupy"].cuda.get_current_stream(device).ptr

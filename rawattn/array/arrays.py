"""Arrays of any library, seen as (pointer, shape, strides, element): the only file that knows torch, CuPy, Numba, JAX, NumPy.

torch and CuPy arrays are read by attribute, which costs a microsecond; DLPack would cost thirty. Every other GPU array comes in
through CuPy, from ``__cuda_array_interface__`` or ``__dlpack__``, which also makes our stream wait for its producer's.
Nothing is ever copied.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..driver import context
from ..errors import INSTALL_EITHER, ProblemError, UnsupportedError

CPU = -1
META = -2  # torch's device without memory; it is in descriptions alone
FLOATS = {  # numpy's types of the formats that kernels read
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_NUMPY_NAMES = {np.dtype(dtype): name for name, dtype in FLOATS.items()} | {
    np.dtype(name): name for name in ("int32", "int64", "uint8", "int8", "int16", "bool")
}
DTYPES = {name: dtype for dtype, name in _NUMPY_NAMES.items()}


class Array(NamedTuple):
    """One array argument. The fields before ``pointer`` are what a plan binds."""

    library: str  # "torch", "cupy" or "numpy"
    device: int  # CUDA ordinal, or CPU
    dtype: str  # "bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2", "int32" and other integers, "bool", or the library's own name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    pointer: int
    object: Any  # the torch tensor, CuPy or NumPy array: keeps the memory alive

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU

    def without_memory(self) -> Array:
        """The same, which keeps no memory alive."""
        return self if self.object is None else self._replace(object=None)


def _read_torch(x: Any, name: str) -> Array:
    if _is_dynamo():
        check_untraced((x,))
    if not (x.is_cuda or x.is_cpu):
        raise ProblemError(f"{name} is on torch's device {x.device}; it must be on a CUDA GPU or the CPU.")
    if (reason := _pending(x)) is not None:
        raise ProblemError(f"{name} is a {type(x).__name__} {reason}.")
    dtype = _torch_names().get(x.dtype)
    try:
        found = Array("torch", x.get_device(), dtype or str(x.dtype), x.shape, x.stride(), x.data_ptr(), x)
        fits = _fits(x, found.shape, found.strides)
    except (RuntimeError, NotImplementedError) as error:
        raise ProblemError(f"{name} is a torch tensor without plain memory ({x.layout}, {x.device}): {error}") from None
    if not fits:  # the pointer alone does not tell: in a freed storage it is the offset
        raise ProblemError(
            f"{name} is a {type(x).__name__} of shape {tuple(x.shape)} that has no memory for its elements (a storage that was "
            "freed, as FSDP does?); give a real tensor."
        )
    return found


def _fits(x: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Says whether a torch tensor's storage has room for its elements."""
    last = x.storage_offset() + sum(map(operator.mul, shape, strides)) - sum(strides)
    return bool((last + 1) * x.element_size() <= x.untyped_storage().nbytes() or 0 in shape)


def _pending(x: Any) -> str | None:
    """The reason why a tensor's memory does not hold its numbers; None where it does."""
    torch = sys.modules["torch"]
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        return "which has no shape yet; run the module that makes it first"
    if x.is_nested:
        return "which is nested; give its values and offsets to rawattn.attention_varlen"
    if type(x).__name__ == "MaskedTensor":
        return "whose mask would be ignored; give its data, or a mask of attention"
    if type(x) not in _plain_tensors and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
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
    own = cls.__torch_function__
    is_torchs = getattr(own, "__func__", None) is torch.Tensor.__torch_function__.__func__
    return not is_torchs and own is not torch._C._disabled_torch_function_impl


_behaves._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces


def _strides(x: Any, name: str) -> tuple[int, ...]:
    size = x.dtype.itemsize
    if any(s % size for s in x.strides):
        raise ProblemError(f"{name} has strides of {x.strides} bytes; they must be whole elements of {size} bytes.")
    return tuple(s // size for s in x.strides)


def _read_cupy(x: Any, name: str) -> Array:
    return Array("cupy", x.device.id, _NUMPY_NAMES.get(x.dtype, str(x.dtype)), x.shape, _strides(x, name), x.data.ptr, x)


def _read_numpy(x: Any, name: str) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise ProblemError(f"{name} is a masked array; its mask would be ignored. Give {name}.data, or a mask of attention.")
    if x.dtype.byteorder == ">":
        raise ProblemError(f"{name} is big-endian ({x.dtype.str}); give it in this machine's byte order.")
    return Array("numpy", CPU, _NUMPY_NAMES.get(x.dtype, str(x.dtype)), x.shape, _strides(x, name), x.ctypes.data, x)


def import_cupy(what: str) -> Any:
    """CuPy, which reads ``what``, where there is a GPU for it."""
    try:
        import cupy
    except ImportError:
        raise UnsupportedError(f"{what} needs CuPy, which is not installed: {INSTALL_EITHER}.") from None
    context.library()
    return cupy


def _has_interface(x: Any) -> bool:
    """Says whether an array should come in through ``__cuda_array_interface__``. Before version 3 that names no stream to wait
    for, so DLPack, which does, goes first where there is both."""
    found = getattr(x, "__cuda_array_interface__", None)
    return isinstance(found, Mapping) and (found.get("version", 0) >= 3 or not hasattr(x, "__dlpack_device__"))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
        raise ProblemError(f"{name} is a {type(x).__name__}, whose __dlpack_device__ fails ({_said(error)}).") from error
    if kind not in (1, 2, 13):  # CPU, CUDA, CUDA managed
        raise ProblemError(f"{name} lies on a device of DLPack kind {kind}; it must be on a CUDA GPU or the CPU.")
    module = np if kind == 1 else import_cupy(f"{name} (a {type(x).__name__})")
    try:
        found = module.asarray(x) if interface else module.from_dlpack(x)
    except Exception as error:  # of another library
        raise ProblemError(f"{name} cannot be read without a copy ({_said(error)}); it is a {type(x).__name__}.") from error
    return _read_numpy(found, name) if kind == 1 else _read_cupy(found, name)


_readers: dict[type, Callable[[Any, str], Array]] = {}
_plain_tensors: tuple[type, ...] = ()  # torch.Tensor and Parameter, from the first tensor on
_forward_ad: Any = None  # torch.autograd.forward_ad, likewise
_grad_enabled: Any = None  # torch.is_grad_enabled, likewise
_increment_version: Any = None  # torch.autograd.graph.increment_version, likewise
_is_dynamo: Any = None  # what says that torch traces, likewise
_is_jit: Any = None
_dispatch_modes: Any = None
_function_modes: Any = None


def reader(cls: type) -> Callable[[Any, str], Array]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(cls, torch.Tensor):
        global _tensor, _plain_tensors, _forward_ad, _grad_enabled, _increment_version
        _tensor, _plain_tensors, _forward_ad = torch.Tensor, (torch.Tensor, torch.nn.Parameter), torch.autograd.forward_ad
        _grad_enabled, _increment_version = torch.is_grad_enabled, torch.autograd.graph.increment_version
        global _is_dynamo, _is_jit, _dispatch_modes, _function_modes
        _is_dynamo, _is_jit = torch.compiler.is_dynamo_compiling, torch._C._is_tracing
        _dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
        return _read_torch
    if cupy is not None and issubclass(cls, cupy.ndarray):
        return _read_cupy
    return _read_numpy if issubclass(cls, np.ndarray) else _read_foreign


def read(x: Any, name: str) -> Array:
    """Returns ``x``, the argument ``name``, as an Array. Raises ProblemError where it is no array that can be read in place."""
    cls = type(x)
    read_it = _readers.get(cls)
    if read_it is None:
        read_it = _readers[cls] = reader(cls)
    found = read_it(x, name)
    if found.pointer == 0 and 0 not in found.shape:
        raise ProblemError(f"{name} is a {cls.__name__} of shape {tuple(found.shape)} that has no memory; give a real array.")
    return found


_tensor: Any = ()  # torch.Tensor, from the first tensor on


def named(names: tuple[str, ...], given: tuple[Any, ...]) -> dict[str, Array]:
    """The arrays of a call by name, without those that are None."""
    return {name: read(x, name) for name, x in zip(names, given, strict=False) if x is not None}


def check_untraced(given: tuple[Any, ...]) -> None:
    """Raises ProblemError where torch would put what is done with these into a graph, and sees no operator."""
    if _is_dynamo is not None and (_is_dynamo() or _is_jit() or _dispatch_modes() or _function_modes()):
        tracer = _tracer()
        if tracer and any(isinstance(x, _tensor) for x in given):
            raise ProblemError(
                f"{tracer} traces what is no operator of torch, so that a graph would lack it: a plan or explanation, "
                "merge_states, or a KVCache, Step or Rotary that is made here. Call rawattn.attention, attention_varlen, "
                "attention_backward or attention_kvcache, which are operators, or do this outside of what is traced (for "
                "torch.compile that is a function under torch.compiler.disable, too)."
            )


def _tracer() -> str:
    """Names what of torch makes a graph of this call; "" where nothing does."""
    if _is_dynamo():
        return "torch.compile"
    if _is_jit():
        return "torch.jit.trace"
    torch = sys.modules["torch"]
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    keys = torch._C._TorchDispatchModeKey
    if proxies is not None and (  # with pre_dispatch=True it is no dispatch mode; get_proxy_mode of torch 2.5 asks both
        proxies.get_innermost_proxy_mode() or torch._ops._get_dispatch_mode_pre_dispatch(keys.PROXY)
    ):
        return "make_fx or torch.export"
    is_fake = _dispatch_modes() and torch._C._get_dispatch_mode(keys.FAKE) is not None
    return "FakeTensorMode" if is_fake else ""


def forms_of(given: Sequence[Any]) -> tuple[tuple[tuple[Any, ...], ...], tuple[int, ...]] | None:
    """The form of each torch tensor, () for None, and the addresses of those that are not None. A form is all that a plan depends
    on: the address modulo 16, dtype, shape, strides and device. Tensors whose storages hold their elements pass every check that
    others of these forms passed. Returns None where one is of another library, has no plain memory, or autograd would follow.
    """
    if _forward_ad is not None and _forward_ad._current_level >= 0:  # each is read whole, which finds tangents
        return None
    forms: list[tuple[Any, ...]] = []
    addresses = []
    try:
        for x in given:
            if type(x) in _plain_tensors and not (x.requires_grad and _grad_enabled()) and not x.is_neg():
                address = x.data_ptr()
                if not address:
                    return None
                forms.append((address % 16, x.dtype, x.size(), x.stride(), x.get_device(), x.is_cuda))
                addresses.append(address)
            elif x is None:
                forms.append(())
            else:
                return None
    except (RuntimeError, NotImplementedError):
        return None
    return tuple(forms), tuple(addresses)


def forms_of_any(given: Sequence[Any]) -> tuple[tuple[tuple[Any, ...], ...], tuple[int, ...], Any] | None:
    """``forms_of``, of arrays of other libraries, too; and what keeps the addresses alive. None where an array cannot be read,
    and where autograd would follow."""
    if (found := forms_of(given)) is not None:
        return (*found, given)
    if requires_grad(*given):
        return None
    try:
        each = [None if x is None else read(x, "array") for x in given]
    except (ProblemError, UnsupportedError):  # the caller says so, with the array's name
        return None
    return tuple([form_of(x) if x else () for x in each]), tuple([x.pointer for x in each if x]), each


def form_of(array: Array) -> tuple[Any, ...]:
    """The form of an array that was read: all that a plan depends on."""
    return (*array[:5], array.pointer % 16)


@functools.lru_cache(maxsize=4096)
def unique(*values: Any) -> object:
    """One object for all that gives these values: it is hashed and compared quickly."""
    return object()


class Held:
    """Arrays by name that an object holds, and their addresses when it was made. Torch can give a tensor other memory later.

    Attributes: ``addresses``; ``forms``, one object for all whose arrays have these names and forms.
    """

    def __init__(self, found: Mapping[str, Array], *beside: Any) -> None:
        """``beside`` is what a call depends on besides."""
        self.addresses = tuple([array.pointer for array in found.values()])
        self.forms = unique(tuple(found), *[form_of(array) for array in found.values()], *beside)
        tensors = {name: array for name, array in found.items() if array.library == "torch"}
        self._names, self._tensors = tuple(tensors), [array.object for array in tensors.values()]
        self._there = [array.pointer for array in tensors.values()]

    @property
    def requires_grad(self) -> bool:
        """Says whether autograd would have to follow an operation on these; arrays may come to require grad at any time."""
        return bool([x for x in self._tensors if x.requires_grad]) and bool(_grad_enabled())

    def check(self, owner: str) -> None:
        """Raises ProblemError where a tensor has other memory than it had, which dynamo cannot ask."""
        if _is_dynamo is not None and _is_dynamo():
            check_untraced(tuple(self._tensors))
        if [x.data_ptr() for x in self._tensors] != self._there:
            moved = [x.data_ptr() != place for x, place in zip(self._tensors, self._there, strict=True)]
            name = self._names[moved.index(True)]
            raise ProblemError(
                f"{name} has other memory than it had when the {owner} was made (resized, freed, or its data replaced?); make "
                f"another {owner}."
            )


class Remade:
    """A dataclass over arrays. Copies and pickles are made from its fields: what else it knows is true of its own arrays. What a
    subclass keeps besides goes with them."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {each.name: each.init for each in dataclasses.fields(self)}  # type: ignore[arg-type]
        given = {name: getattr(self, name) for name, is_given in fields.items() if is_given}
        return _remade, (type(self), given), {name: x for name, x in vars(self).items() if name not in fields} or None


def _remade(cls: type, given: dict[str, Any]) -> Any:
    return cls(**given)


def are_held(given: Sequence[Any]) -> bool:
    """Says whether the storages of torch tensors hold their elements. In a storage that was freed, as FSDP does, the address of a
    tensor is its offset, which its form does not say."""
    return all(x is None or _fits(x, x.size(), x.stride()) for x in given)


def address(x: Any) -> int:
    """Returns the address where a torch or CuPy array begins."""
    return x.data_ptr() if isinstance(x, _tensor) else x.data.ptr


def requires_grad(*objects: Any) -> bool:
    """Says whether autograd would have to follow an operation on these."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in objects)


_torch_tables: dict[str, dict[Any, Any]] = {}


def _torch_names() -> dict[Any, str]:
    if not _torch_tables:
        torch = sys.modules["torch"]
        dtypes = {name: getattr(torch, dtype.name) for name, dtype in DTYPES.items()}
        _torch_tables["dtypes"] = dtypes
        _torch_tables["names"] = {dtype: name for name, dtype in dtypes.items()}
    return _torch_tables["names"]


def maker(like: Array, shape: tuple[int, ...], dtype: str) -> Callable[[Any], Any]:
    """A function that makes new, contiguous arrays in ``like``'s library and on its device, given an array that lies there."""
    if like.library == "torch":
        torch, torch_dtype = sys.modules["torch"], _torch_tables["dtypes"][dtype]
        if like.dtype == dtype and like.shape == shape and tuple(like.strides) == made(shape, dtype).strides:
            return torch.empty_like  # takes half as long as torch.empty
        if like.dtype == dtype:
            return operator.methodcaller("new_empty", shape)  # to name the dtype takes half as long again
        return lambda beside: beside.new_empty(shape, dtype=torch_dtype)
    if like.library == "cupy":
        return lambda beside: _cupy_empty(like.device, shape, DTYPES[dtype])
    return lambda beside: np.empty(shape, DTYPES[dtype])


def scratch_maker(like: Array, size: int) -> Callable[[Any], Any]:
    """A function that makes ``size`` bytes or a few more, given an array that lies there, of whose dtype they are."""
    return maker(like, (-(-size // DTYPES[like.dtype].itemsize),), like.dtype)


def one_int64(beside: Any, number: int) -> Any:
    """A new array of this number, (1,), in the library of ``beside``, a NumPy array or one of a GPU that CuPy can see."""
    like = read(beside, "q")
    if like.library == "numpy":
        return np.array([number], np.int64)
    with sys.modules["cupy"].cuda.Device(like.device):
        return sys.modules["cupy"].full((1,), number, np.int64)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=1024)
def made(shape: tuple[int, ...], dtype: str) -> Array:
    """Returns how an array lies that ``maker`` makes."""
    return Array("", CPU, dtype, shape, contiguous_strides(shape), 0, None)


def of_forms(forms: Iterable[tuple[Any, ...]]) -> list[Array]:
    """Arrays of these forms, at no address, without those of None."""
    names = _torch_names()
    return [
        Array("torch", device, names[dtype], shape, strides, alignment, None)
        for alignment, dtype, shape, strides, device, _ in filter(None, forms)
    ]


def dense(x: Any, whole: bool = False) -> Any:
    """``x``, or a contiguous copy of a torch, CuPy or NumPy array of which a dimension is expanded (a stride of 0), or whose last
    dimension is not contiguous, or, ``whole``, any; on a GPU also of one whose rows do not begin at 16 bytes, where those of a
    copy do. Gradients come so from autograd; nothing else is ever copied."""
    root = type(x).__module__.partition(".")[0]
    if isinstance(x, _tensor) or root == "torch":
        try:
            if _is_sparse(x.shape, x.stride(), whole):
                return x.contiguous()
            is_apart = x.get_device() >= 0 and _begins_anywhere(x.shape, x.stride(), x.element_size(), x.data_ptr())
            return x.clone(memory_format=sys.modules["torch"].contiguous_format) if is_apart else x
        except (AttributeError, NotImplementedError, RuntimeError):  # no tensor with plain memory: ``read`` says so
            return x
    if root in ("numpy", "cupy") and hasattr(x, "strides"):
        strides = tuple(stride / x.dtype.itemsize for stride in x.strides)
        if _is_sparse(x.shape, strides, whole):
            return sys.modules[root].ascontiguousarray(x)
        return x.copy() if root == "cupy" and _begins_anywhere(x.shape, strides, x.dtype.itemsize, x.data.ptr) else x
    return x


def _begins_anywhere(shape: tuple[int, ...], strides: tuple[float, ...], itemsize: int, pointer: int) -> bool:
    """Says whether rows lie where the kernels of up to 32 bits cannot read them, and those of a copy would not."""
    if 0 in shape or itemsize > 4 or shape[-1] * itemsize % 16:
        return False
    rows = zip(shape[:-1], strides, strict=False)
    return bool(pointer % 16) or any(n > 1 and (stride * itemsize % 16 or stride < 0) for n, stride in rows)


def _is_sparse(shape: tuple[int, ...], strides: tuple[float, ...], whole: bool) -> bool:
    if 0 in shape or (not whole and strides[-1:] == (1,) and 0 not in strides):
        return False
    last, wanted = len(shape) - 1, contiguous_strides(shape)
    for i, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if n > 1 and (stride != wanted[i] if whole or i == last else stride == 0):
            return True
    return False


def _cupy_empty(device: int, shape: tuple[int, ...], dtype: Any) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.empty(shape, dtype)


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


def written(out: Any) -> None:
    """Tells autograd that a tensor was changed in place, so that a backward that needs its old numbers fails in words."""
    if isinstance(out, _tensor):
        _increment_version(out)


def stream_of(library: str) -> Callable[[int], int]:
    """A function that gives the handle of a library's current stream on a device."""
    if library == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream
    return lambda device: sys.modules["cupy"].cuda.get_current_stream(device).ptr


def to_library(result: Any, original: Any) -> Any:
    """``result`` (torch, CuPy or NumPy) as an array of the library that ``original`` came from."""
    if isinstance(original, type(result)):
        return result
    root = type(original).__module__.partition(".")[0]
    if root == "numba":
        return sys.modules["numba"].cuda.as_cuda_array(result)
    if root == "torch":
        return result
    if hasattr(original, "__array_namespace__"):
        return original.__array_namespace__().from_dlpack(result)
    module = sys.modules.get(root)
    for home in (module, getattr(module, "dlpack", None)):
        if home is not None and hasattr(home, "from_dlpack"):
            return home.from_dlpack(result)
    return result


def view(array: Array) -> npt.NDArray[Any]:
    """A NumPy view of an array on the CPU, at its address. It keeps the memory alive if the array has its object."""
    dtype, found = DTYPES[array.dtype], np.asarray(_Memory(array))
    return found if found.dtype == dtype else found.view(dtype)


def as_numpy(array: Array) -> npt.NDArray[Any]:
    """An array on the CPU in NumPy: itself if it is NumPy's, else ``view``."""
    found: npt.NDArray[Any] = array.object if array.library == "numpy" else view(array)
    return found


def _typestr(dtype: npt.DTypeLike) -> str:
    """The dtype's name for NumPy; of one that it does not know, that of as many bytes."""
    number = np.dtype(dtype)
    return number.str if number.isbuiltin == 1 else f"|V{number.itemsize}"


def on_host(x: Any) -> npt.NDArray[Any]:
    """An array of any library in NumPy: a view of one on the CPU, a copy of one on a GPU."""
    array = x if isinstance(x, Array) else read(x, "array")
    if array.is_cpu:
        return as_numpy(array)
    if array.library == "torch":
        return as_numpy(read(array.object.detach().cpu(), "array"))
    found: npt.NDArray[Any] = array.object.get()
    return found


class _Memory:
    """A tensor's memory, as NumPy takes it. ``Tensor.numpy`` would forbid for good that the storage is freed and filled again,
    which FSDP does with parameters."""

    def __init__(self, array: Array) -> None:
        dtype = DTYPES[array.dtype]
        strides = tuple(s * dtype.itemsize for s in array.strides)
        place = {"data": (array.pointer, False), "shape": tuple(array.shape), "strides": strides}
        self.tensor, self.__array_interface__ = array.object, {"version": 3, "typestr": _typestr(dtype), **place}

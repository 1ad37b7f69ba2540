"""rawattn's operators in torch: ``torch.ops.rawattn.attention``, and which calls must go through it.

A plain eager tensor goes past torch's dispatcher, which is the faster way. All that works by seeing operators needs the operator:
torch.compile, export, FakeTensor, make_fx, vmap, autocast, DTensor, selective checkpointing, FLOP counting. ``intercepts`` tells
the two apart. This file is imported with rawattn where torch is loaded before, else by the first call with a tensor; import it
yourself where a saved program is loaded before any call.

The operator is functional and always gives (o, lse): a backward needs lse, and one pair of shapes serves every rule here. Its
``spec`` is the JSON text of a ``rawattn.Spec``, which a graph can hold and export can save.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.flop_counter
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from . import api
from .arrays import CPU, Array
from .errors import ProblemError
from .operation import Forward
from .operation.forward import check_arrays
from .plans import NO_GRAD
from .spec import Spec
from .variant import Option
from .variant.element import ELEMENTS

NO_TANGENT = "an input has a forward-mode tangent, and there is no formula for it; give its primal."
_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
    'SymInt? max_seqlen_q=None, SymInt? max_seqlen_kv=None, str spec="{}") -> (Tensor o, Tensor lse)'
)

_library = torch.library.Library("rawattn", "DEF")  # its operators live as long as this object
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
_ATTENTION = torch.ops.rawattn.attention.default


# ---- which calls go through the operator

_tensor, _parameter, _is_compiling = torch.Tensor, torch.nn.Parameter, torch.compiler.is_compiling
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_functorch_level, _jit_trace = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state


def _either_autocast() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", _either_autocast)  # one call, where torch has it


def intercepts(given: Sequence[Any]) -> bool:
    """Tells whether torch must see an operator: while it traces, under a mode or transform of its own, where autocast would cast,
    and for tensors without memory. It takes half a microsecond for plain tensors."""
    if _is_compiling():
        return True
    q = given[0]
    if type(q) is not _tensor and not isinstance(q, _tensor):
        return False
    if _dispatch_modes() or _functorch_level() is not None or _jit_trace() is not None:
        return True
    if _function_modes() and _seen_by_function_mode():
        return True
    for x in given:
        if type(x) is not _tensor and type(x) is not _parameter and isinstance(x, _tensor):
            return True
    return q.is_meta or (_any_autocast() and _is_cast(given))


def _seen_by_function_mode() -> bool:
    """Tells whether a torch-function mode is on that is more than ``torch.set_default_device``, which has nothing to do here."""
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(_function_modes()))


def _is_cast(given: Sequence[Any]) -> bool:
    kind = "cuda" if given[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return False
    dtype = torch.get_autocast_dtype(kind)
    return any(isinstance(x, torch.Tensor) and x.dtype is not dtype and _may_cast(x, kind) for x in given[:3])


def attention(
    given: Sequence[Any], options: dict[str, Any], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any
) -> Any:
    """Computes ``api.attention`` by way of the operator. Dynamo traces this function: it holds nothing that breaks a graph."""
    for name, value in (("out", out), ("kernel", kernel), ("config", config)):
        if value is not None:
            raise ProblemError(
                f"{name} was given where torch traces, transforms or casts the call; torch.ops.rawattn.attention has no {name}: "
                "leave it out."
            )
    q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks = (*given, None, None, None)[:6]
    if torch.compiler.is_dynamo_compiling():
        text = _constant_text(tuple([(name, _constant(value)) for name, value in options.items()]))
    else:
        _check_tensors(given)
        _register_sharding()
        text = _text(Spec.of(**options))
    longest = [_length(name, x) for name, x in zip(("max_seqlen_q", "max_seqlen_kv"), lengths, strict=True)]
    o, lse = _ATTENTION(q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, *longest, text)
    return (o, lse) if options["return_lse"] else o


def _check_tensors(given: Sequence[Any]) -> None:
    for name, x in zip(Forward.names, given, strict=False):
        if x is None and name not in "qkv":
            continue
        if not isinstance(x, torch.Tensor):
            raise ProblemError(f"{name} is a {type(x).__name__} but q a torch tensor; give all arrays from one library.")
        if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
            raise ProblemError(f"{name} is a {type(x).__name__}, which has no shape yet; run the module that makes it first.")


def _length(name: str, value: Any) -> Any:
    """Returns a bound on lengths as the operator takes it: None, an int or, while torch traces, a SymInt."""
    if value is None or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) != 0:
        raise ProblemError(f"{name} is {value!r}; it must be an int >= 0, or None.")
    return int(value)


# ---- options as text


def _text(spec: Spec) -> str:
    """Writes the spec as the operator takes it."""
    try:
        text = json.dumps(dataclasses.replace(spec, return_lse=False).to_json())
    except TypeError as error:
        raise ProblemError(f"{spec} cannot be text ({error}); a mask or score of your own must be an Option.") from None
    _options(text)  # raises where it cannot be read again
    return text


@functools.lru_cache(maxsize=1024)
def _options(text: str) -> dict[str, Any]:
    """Reads what ``_text`` wrote, as the options of a call that gives lse."""
    try:
        spec = Spec.from_json(json.loads(text))
        named = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return api.options_of(**{**named, "return_lse": True})
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ProblemError(f"spec is {text[:80]!r}; it must be the JSON text of a rawattn.Spec ({error}).") from None


def _constant(value: Any) -> Any:
    """Takes an option apart into nested tuples of constants. Dynamo follows this: it guards on the value of every number."""
    if isinstance(value, Option):
        return (type(value), tuple([(field.name, _constant(getattr(value, field.name))) for field in dataclasses.fields(value)]))
    if isinstance(value, (tuple, list)):
        return tuple([_constant(x) for x in value])
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # loaded already where dynamo traces

        return guard_scalar(value)
    return value


def _constant_text(constants: tuple[tuple[str, Any], ...]) -> str:
    """Writes the options that ``_constant`` took apart."""
    return _text(Spec.of(**{name: _option(value) for name, value in constants}))


# torch.compiler.assume_constant_result says the same, but imports dynamo, which takes a second.
_constant_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _option(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return value[0](**{name: _option(part) for name, part in value[1]})
    return value


# ---- the operator


def _named(tensors: Sequence[Any]) -> dict[str, Any]:
    """Returns the operator's tensors by name, in the order of ``Forward.names``."""
    q, k, v, sinks, *starts = tensors
    return dict(zip(Forward.names, (q, k, v, *starts, sinks), strict=False))


def _compute(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}",
) -> tuple[Any, Any]:  # fmt: skip
    """Computes the operator on real tensors."""
    lengths = (max_seqlen_q, max_seqlen_kv)
    return api.run((q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks), _options(spec), lengths)


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _compute, _key)


@torch.library.register_fake("rawattn::attention", lib=_library)
def _fake(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}",
) -> tuple[Any, Any]:  # fmt: skip
    """Makes results of the right shapes, strides and dtypes. Raises ProblemError where the arguments contradict each other."""
    tensors = {name: x for name, x in _named((q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv)).items() if x is not None}
    _options(spec)
    check_arrays({name: _described(x) for name, x in tensors.items()}, max_seqlen_q, max_seqlen_kv)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "int32"}
_NAMES[torch.int64] = "int64"


def _described(x: Any) -> Array:
    """Describes a tensor without memory, as far as checks of shapes read one."""
    index = CPU if x.device.type == "cpu" else x.device.index or 0
    return Array("torch", index, _NAMES.get(x.dtype, str(x.dtype)), tuple(x.shape), x.stride(), 0, None)


def _autograd(*args: Any) -> tuple[Any, Any]:
    """Refuses what has no formula yet, and passes on the rest. The backward's formula takes this place."""
    _register_sharding()
    tensors = [x for x in args[:6] if x is not None]
    for x in tensors:
        if x.is_nested:
            raise ProblemError("an input is a nested tensor; give its values and offsets to rawattn.attention_varlen.")
        if type(x).__name__ == "MaskedTensor":
            raise ProblemError("an input is a MaskedTensor, whose mask would be ignored; give its data, or a mask of attention.")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ProblemError(NO_GRAD)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ProblemError(NO_TANGENT)
    with torch._C._AutoDispatchBelowAutograd():
        return _ATTENTION(*args)


_library.impl("attention", _autograd, "Autograd")


# ---- autocast, vmap, FLOPs, DTensor


def _may_cast(x: Any, kind: str) -> bool:
    """Tells whether autocast for a kind of device converts the tensor; float64 stays, as in torch's own attention."""
    return x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == kind


def _autocast(kind: str, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    key = getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}")
    dtype = torch.get_autocast_dtype(kind)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return _ATTENTION(*(x.to(dtype) if _may_cast(x, kind) else x for x in (q, k, v)), *rest)


for _key in ("CPU", "CUDA"):
    _library.impl("attention", functools.partial(_autocast, _key.lower()), f"Autocast{_key}")


def _vmap(info: Any, in_dims: tuple[Any, ...], q: Any, k: Any, v: Any, *rest: Any) -> tuple[tuple[Any, Any], tuple[int, int]]:
    """Joins the mapped dimension to the batch, and repeats what is not mapped."""
    if q.dim() - (in_dims[0] is not None) == 3:
        raise ProblemError("attention_varlen was called under vmap; put the sequences into one packed call instead.")
    if any(dim is not None for dim in in_dims[3:]):
        raise ProblemError("sinks is mapped by vmap; it must be the same for every element of the batch.")

    def joined(x: Any, dim: int | None) -> Any:
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    results = _ATTENTION(*(joined(x, dim) for x, dim in zip((q, k, v), in_dims[:3], strict=True)), *rest)
    o, lse = (x.unflatten(0, (info.batch_size, -1)) for x in results)
    return (o, lse), (0, 0)


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    torch.library.register_vmap("rawattn::attention", _vmap, lib=_library)


@torch.utils.flop_counter.register_flop_formula(torch.ops.rawattn.attention)
def _flops(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}", out_shape: Any = None, **_: Any,
) -> int:  # fmt: skip
    """Counts ``Forward.flops`` of these shapes: both products over the pairs that the mask keeps. torch counts whole squares for
    its own attention."""
    varlen = cu_seqlens_q is not None
    if not all(isinstance(n, int) for shape in (q, k, v) for n in shape):  # symbolic: a sum over queries would fix the length
        pairs = q[-3] * k[-3] if varlen else q[0] * q[1] * k[1]
        return 2 * (q[-1] + v[-1]) * q[-2] * pairs
    batch, total_q, total_kv = (cu_seqlens_q[0] - 1, q[0], k[0]) if varlen else (q[0], -1, -1)
    return Forward(
        ELEMENTS["fp32"], batch, q[-3], k[-3], q[-2], k[-2], q[-1], v[-1], Spec.of(**_options(spec)), varlen, total_q, total_kv
    ).flops


def _register_sharding() -> None:
    """Tells DTensor how the operator splits, once ``torch.distributed.tensor``, which is slow to import, is there."""
    if "torch.distributed.tensor" in sys.modules:
        _shard()


@functools.cache
def _shard() -> None:
    try:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # before torch 2.5; DTensor then says that it does not know the operator
        return

    def sharding(
        q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *options: Any
    ) -> list[Any]:  # fmt: skip
        varlen = cu_seqlens_q is not None

        def placed(rows: Any, lse: Any, heads: Any) -> Any:
            """Places o and lse, and the tensors that are given: q, k and v lie as o does."""
            others = [heads] * (sinks is not None) + [Replicate()] * 2 * varlen
            return [rows, lse], [rows, rows, rows, *others]

        found = [placed(Replicate(), Replicate(), Replicate())]
        # Evenly, or heads of q would meet others of k than their own.
        if k.tensor_meta.shape[-2] % _head_parts((q, k, v), not varlen) == 0:
            found.append(placed(Shard(1), Shard(0), Shard(0)) if varlen else placed(Shard(2), Shard(1), Shard(0)))
        return found if varlen else [*found, placed(Shard(0), Shard(0), Replicate())]

    register_sharding(_ATTENTION)(sharding)


def _head_parts(specs: Sequence[Any], batched: bool) -> int:
    """Counts the parts into which DTensor might split the heads of q, k and v, which lie as their specs say: along each axis of
    the mesh that they are not replicated on. Along one that splits their batch they stay so."""
    mesh = specs[0].mesh
    batched = batched and specs[0].tensor_meta.shape[0] >= mesh.size()
    parts = 1
    for size, *placements in zip(mesh.shape, *(spec.placements for spec in specs), strict=True):
        if not (all(x.is_replicate() for x in placements) or (batched and all(x.is_shard(0) for x in placements))):
            parts *= size
    return parts

"""This module knows torch from its first tensor on, and says what torch does with a call: traces it, or lets autograd follow.

Nothing here loads torch: who uses another library need not wait for it.
"""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ProblemError
from .array import DTYPES

# What ``load`` sets; a module that uses one names this module, as it is another object from then on.
tensor: Any = ()  # torch.Tensor
plain_tensors: tuple[type, ...] = ()  # torch.Tensor and Parameter
dtypes: dict[str, Any] = {}  # torch's, by the names of elements
names: dict[Any, str] = {}  # of elements, by torch's dtypes
forward_ad: Any = None  # torch.autograd.forward_ad
grad_enabled: Any = None  # torch.is_grad_enabled
is_dynamo: Any = None  # torch.compiler.is_dynamo_compiling
_increment_version: Any = None
_is_jit: Any = None
_dispatch_modes: Any = None
_function_modes: Any = None


def load(torch: Any) -> None:
    """Sets what this module knows of ``torch``, the module."""
    global dtypes, names, forward_ad, grad_enabled
    dtypes = {name: getattr(torch, dtype.name) for name, dtype in DTYPES.items()}
    names = {dtype: name for name, dtype in dtypes.items()}
    forward_ad, grad_enabled = torch.autograd.forward_ad, torch.is_grad_enabled
    global _increment_version, _is_jit, _dispatch_modes, _function_modes
    _increment_version, _is_jit = torch.autograd.graph.increment_version, torch._C._is_tracing
    _dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
    global tensor, plain_tensors, is_dynamo  # last: another thread that finds one of these uses the rest
    plain, dynamo = (torch.Tensor, torch.nn.Parameter), torch.compiler.is_dynamo_compiling
    tensor, plain_tensors, is_dynamo = torch.Tensor, plain, dynamo


def is_compiling() -> bool:
    """Says whether torch.compile, or torch.export with strict=True, traces the call."""
    _load_imported()
    return is_dynamo is not None and is_dynamo()


def _load_imported() -> None:
    if is_dynamo is None and sys.modules.get("torch") is not None:
        load(sys.modules["torch"])


# Dynamo calls it while it traces: the call may be the first since torch was loaded.
_load_imported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def requires_grad(*objects: Any) -> bool:
    """Says whether autograd would have to follow an operation on ``objects``."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in objects)


def address(x: Any) -> int:
    """Returns the address where a torch or CuPy array begins."""
    return x.data_ptr() if isinstance(x, tensor) else x.data.ptr


def mark_written(out: Any) -> None:
    """Tells autograd that a tensor was changed in place, so that a backward that needs its old numbers fails in words."""
    if isinstance(out, tensor):
        _increment_version(out)


def check_untraced(arrays: tuple[Any, ...]) -> None:
    """Raises ProblemError where torch would put what is done with ``arrays`` into a graph, and sees no operator."""
    if is_dynamo is not None and (is_dynamo() or _is_jit() or _dispatch_modes() or _function_modes()):
        tracer = _name_tracer()
        if tracer and any(isinstance(x, tensor) for x in arrays):
            raise ProblemError(
                f"{tracer} traces what is no operator of torch, so that a graph would lack it: a plan or explanation, "
                "merge_states, or a KVCache, Step or Rotary that is made here. Call rawattn.attention, attention_varlen, "
                "attention_backward or attention_kvcache, which are operators, or do this outside of what is traced (for "
                "torch.compile that is a function under torch.compiler.disable, too)."
            )


def _name_tracer() -> str:
    """Names what of torch makes a graph of this call; "" where nothing does."""
    if is_dynamo():
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

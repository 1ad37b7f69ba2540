"""This module says what torch does with a call: whether it traces, transforms or casts it, or lets autograd follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._device import DeviceContext

is_compiling, grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
functorch_level, _jit_trace = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
is_mapped = torch._C._functorch.is_batchedtensor  # by torch.vmap
is_batched = torch._C._functorch.is_legacy_batchedtensor  # by torch.autograd.grad(is_grads_batched=True)


def _some_requires_grad(*values: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


def _either_autocast() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")


# One call each, where torch has it.
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", _either_autocast)
any_requires_grad = getattr(torch._C, "_any_requires_grad", _some_requires_grad)


def sees_operators() -> bool:
    """Tells whether torch must see operators here, whatever the tensors are: it traces, or a mode or transform is on."""
    return bool(
        is_compiling()
        or _dispatch_modes()
        or functorch_level() is not None
        or _jit_trace() is not None
        or (_function_modes() and _sees_functions())
    )


def _sees_functions() -> bool:
    """Tells whether a torch-function mode is on besides ``torch.set_default_device``, which changes nothing in a call."""
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(_function_modes()))


def is_plain() -> bool:
    """Tells whether torch neither traces, transforms nor casts here, whatever the tensors are."""
    return not (sees_operators() or any_autocast())


def is_cast(tensors: Sequence[Any]) -> bool:
    """Tells whether autocast would convert q, k or v, the first of these tensors."""
    kind = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return False
    dtype = torch.get_autocast_dtype(kind)
    return any(isinstance(x, torch.Tensor) and x.dtype is not dtype and may_cast(x, kind) for x in tensors[:3])


def may_cast(x: Any, kind: str) -> bool:
    """Tells whether autocast for a kind of device converts the tensor; float64 stays, as in torch's own attention."""
    return x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == kind

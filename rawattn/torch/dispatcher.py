"""This module decides what computes a call on tensors: kernels at once, autograd's Function, or an operator that torch sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..api import attention as attention_
from ..array import eager, torch_state
from ..errors import ProblemError
from ..operation.spec import is_int
from ..runtime import calls
from ..runtime.plan import Plan
from .autograd import differentiable
from .modes import any_autocast, functorch_level, grad_enabled, is_cast, is_compiling, sees_operators
from .operators import attention

NO_RANDOMNESS = (
    "dropout was given without seed under torch.vmap, whose randomness is 'error', the default; give torch.vmap "
    "randomness='different', for a seed for each element, or randomness='same', for one, or give seed."
)
_tensor, _parameter = torch.Tensor, torch.nn.Parameter

torch_state.load(torch)  # so that tensors are known, and the first call of all is kept
eager.skip((Plan.run, calls.forward, attention_.backward))


def is_tensor(x: Any) -> bool:
    """Tells whether ``x`` is a torch tensor."""
    return isinstance(x, _tensor)


def seed_of(q: Any, seed: Any, missing: str = "") -> Any:
    """Returns the seed of a call as a tensor on q's device: the tensor that is given, one that an int fills, or one that torch's
    generator of the device draws there. Nothing waits for the device, and a graph draws anew at every replay."""
    if seed is None:
        if missing:
            raise ProblemError(f"seed is None, and there is dropout; {missing}.")
        try:
            return torch.randint(0, (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)
        except RuntimeError as error:
            if functorch_level() is None or "randomness" not in str(error):
                raise
            raise ProblemError(NO_RANDOMNESS) from None
    return torch.full((1,), seed, dtype=torch.int64, device=q.device) if is_int(seed) else seed


def dispatch(tensors: Sequence[Any], casts: bool = True) -> Callable[..., Any] | None:
    """Returns the function that computes a call on these tensors: None for ``calls.run``, which launches kernels;
    ``differentiable`` where autograd follows; ``attention`` where torch must see an operator, which is while it traces, under a
    mode or transform of its own, where autocast would cast (if ``casts``), and for tensors without memory."""
    if is_compiling():
        return attention
    q = tensors[0]
    if type(q) is not _tensor and not isinstance(q, _tensor):
        return None
    if sees_operators():
        return attention
    return attention if casts and any_autocast() and not q.is_meta and is_cast(tensors) else dispatch_plain(tensors)


def dispatch_plain(tensors: Sequence[Any]) -> Callable[..., Any] | None:
    """Returns what ``dispatch`` returns where ``is_plain()`` holds; None also where q, the first of these, is no tensor."""
    q, requires_grad = tensors[0], False
    if type(q) is not _tensor and not isinstance(q, _tensor):
        return None
    for x in tensors:
        if type(x) is _tensor or type(x) is _parameter:
            if x.requires_grad:
                requires_grad = True
        elif isinstance(x, _tensor):
            return attention
    if q.is_meta:
        return attention
    if requires_grad and grad_enabled():
        return differentiable if forward_ad._current_level < 0 else attention
    return None

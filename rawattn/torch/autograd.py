"""Autograd follows attention by a Function: below a call of plain tensors, and below the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ..errors import ProblemError
from ..operation import Backward, Forward, captures, functions
from ..operation.inputs import BackwardInputs, ForwardInputs
from ..operation.keys import check_gradient
from ..operation.spec import Spec
from ..runtime import calls
from ..runtime.request import Request, request_for
from . import sharding
from .modes import any_requires_grad, functorch_level, grad_enabled, is_batched, sees_operators
from .operators import ATTENTION, BACKWARD, BEFORE_WRT, CAPTURED, Rest, library
from .option_text import options_of, text_of

NO_CONSTANT_TIME = (
    "constant_time=True was given and an input requires grad, but no gradient is shown to take the same time for all numbers; "
    "call under torch.no_grad(), or on detached inputs."
)
NO_TANGENT = "an input has a forward-mode tangent, and there is no formula for it; give its primal."
NO_SECOND = (
    "a second derivative was asked for, that of attention_backward, and there is no formula for it; leave out create_graph=True, "
    "or use torch's scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has one."
)
NO_BATCH = (
    "is_grads_batched=True was given, and a captured tensor requires grad; ask for one gradient after the other, or use "
    "torch.func.vmap."
)
NO_GRADIENT_OF_PARTS = "q is a DTensor, which has no gradients of captured tensors: they would be parts of sums"


class AutogradRequest:
    """The request of a call that autograd follows: options, as a dict or as text, bounds on lengths, whether lse is a result
    besides o (``both``), and ``wrt``, the names of captured tensors to which autograd follows. Where options are a dict, it has
    the requests of the forward and of the backward."""

    def __init__(
        self, options: dict[str, Any] | str, lengths: tuple[Any, ...], both: bool, kernel: str | None = None, config: Any = None,
        wrt: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.options, self.lengths, self.both, self.wrt = options, lengths, both, wrt
        if not isinstance(options, str):
            self.forward = request_for(Forward, options, lengths, kernel, config)
            self.backward = request_for(Backward, {**options, "wrt": wrt} if wrt else options, lengths)


class LowestFunction(_SingleLevelFunction):
    """An autograd.Function below an operator or a call, whose ``apply`` looks for no transform.

    ``apply`` of ``torch.autograd.Function`` looks for transforms and for the tensors that they left behind, which costs a
    microsecond, and takes a Function below a transform only where it has ``setup_context``. Here ``_apply_function`` allows it
    below transforms, and ``reading.read`` refuses a tensor that a transform left behind."""

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


class Attention(LowestFunction):
    """Attention that autograd follows, below a call or below the operator. It saves its tensors, o and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, sinks: Any, inputs: ForwardInputs, captured: tuple[Any, ...], request: AutogradRequest,
        *followed: Any,
    ) -> Any:  # fmt: skip
        """Computes o, and lse where that is asked for. ``inputs`` has all tensors except for those that functions captured, and
        ``followed`` has the captured ones to which autograd follows."""
        options, lengths = request.options, request.lengths
        if isinstance(options, str):
            rest = Rest.of(inputs, lengths, options, captured)._replace(sinks=sinks)
            o, lse = _call_below_autograd(ATTENTION, q, k, v, *rest)
        else:
            o, lse = calls.run(inputs, request.forward, None, captured)
        ctx.save_for_backward(*inputs, *captured, o, lse)
        ctx.request = request
        if not request.both:
            return o
        ctx.set_materialize_grads(False)
        if not any_requires_grad(q, k, sinks, *followed):  # v is not in it
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Computes dq, dk, dv, dsinks and the gradients of captured tensors, and gives None for arguments that are no tensors."""
        (*saved, o, lse), request = ctx.saved_tensors, ctx.request
        count = len(ForwardInputs._fields)
        forward, captured = ForwardInputs(*saved[:count]), tuple(saved[count:])
        if do is None:
            if dlse is None:
                return (None,) * (7 + len(request.wrt))
            do = torch.zeros_like(o)
        inputs = BackwardInputs.of(do, forward, o, lse, dlse)
        is_seen = isinstance(request.options, str) or _sees_backward(do, dlse, (*forward, *captured))
        if is_seen:
            text = request.options if isinstance(request.options, str) else text_of(request.options)
            args = (*inputs[:7], *Rest.of(inputs, request.lengths, text, captured))
            if request.wrt:
                if any(x is not None and is_batched(x) for x in (do, dlse)):
                    raise ProblemError(NO_BATCH)
                names = captures.names(options_of(text))
                gradients = CAPTURED(*args, [names.index(name) for name in request.wrt])
            else:
                gradients = BACKWARD(*args)
        else:
            gradients = calls.run(inputs, request.backward, None, captured)
        captured_gradients = gradients[3 + (is_seen or inputs.sinks is not None) :] if request.wrt else ()
        return (*gradients[:3], None if inputs.sinks is None else gradients[3], None, None, None, *captured_gradients)


def _sees_backward(do: Any, dlse: Any, tensors: Sequence[Any]) -> bool:
    """Tells whether torch must see the operator of a backward whose forward was computed on plain tensors. It asks what
    ``dispatch`` asks, except for autocast, which casts nothing here; ``do`` and ``dlse`` may be tensors of any kind."""
    if sees_operators():
        return True
    for x in (do,) if dlse is None else (do, dlse):
        if type(x) is not torch.Tensor or x.is_neg() or is_batched(x):
            return True
    return bool(grad_enabled() and any_requires_grad(do, dlse, *tensors))


class AttentionBackward(LowestFunction):
    """The gradients, where autograd would follow them further. A second derivative raises ProblemError when it is computed."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Computes ``attention_backward``."""
        return _call_below_autograd(BACKWARD, *args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        """Raises: a second derivative has no formula."""
        raise ProblemError(NO_SECOND)


class CapturedBackward(AttentionBackward):
    """The gradients with those of captured tensors, where autograd would follow them further."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Computes ``attention_backward_captured``."""
        return tuple(_call_below_autograd(CAPTURED, *args))


def _call_below_autograd(operator: Any, *args: Any) -> Any:
    """Calls an operator inside of a Function. Below a transform such as ``torch.func.grad`` the transform may follow it."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(functorch_level() is not None):
        return operator(*args)


def _apply_function(apply: Any, *args: Any) -> Any:
    """Calls the ``apply`` of a Function inside of an operator; below a transform torch must be told to allow it."""
    if functorch_level() is None:
        return apply(*args)
    with enable_single_level_autograd_function():
        return apply(*args)


def differentiable(inputs: ForwardInputs, request: Request, out: Any, captured: tuple[Any, ...]) -> Any:
    """Computes the attention of a call so that autograd can follow it."""
    if out is not None:
        raise ProblemError(
            "out was given and an input requires grad, but autograd follows new results only; leave out away, or call under "
            "torch.no_grad() or on detached inputs."
        )
    check_gradient(request.options["keys"], inputs.q.is_cpu)
    wrt = captures.find_followed(request.options, captured) if captured else ()
    if wrt not in request.followed:
        request.followed[wrt] = _make_request(request.options, request.lengths, request.kernel, request.config, wrt)
    autograd_request = request.followed[wrt]
    followed = [x for name, x in zip(captures.names(request.options), captured, strict=True) if name in wrt] if wrt else ()
    return Attention.apply(inputs.q, inputs.k, inputs.v, inputs.sinks, inputs, captured, autograd_request, *followed)


def _make_request(
    options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None, config: Any, wrt: tuple[str, ...] = ()
) -> AutogradRequest:
    """Makes the request of a call that autograd follows. Raises ProblemError where the call has no gradient."""
    if type(options["return_lse"]) is not bool or options["constant_time"]:
        Spec.of(**functions.without(options))  # raises where it is none
        if options["constant_time"]:
            raise ProblemError(NO_CONSTANT_TIME)
    has_lse, options = options["return_lse"], {**options, "return_lse": True}
    return AutogradRequest(options, lengths, has_lse, kernel, config, wrt)


def _follow(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    """Computes ``attention``, which autograd follows where a tensor requires grad."""
    args = Rest(*rest)
    inputs, captured = args.inputs(q, k, v), tuple(args.captured or ())
    _check_followed((*inputs, *captured))
    wrt = captures.find_followed(options_of(args.spec), captured) if captured else ()
    if wrt and type(q).__name__ == "DTensor":
        captures.check_no_grad(options_of(args.spec), captured, NO_GRADIENT_OF_PARTS)
    if grad_enabled() and (wrt or any_requires_grad(*inputs)):
        check_gradient(options_of(args.spec)["keys"], q.is_cpu)
        if options_of(args.spec)["constant_time"]:
            raise ProblemError(NO_CONSTANT_TIME)
        request = AutogradRequest(args.spec, args.lengths, True, wrt=wrt)
        names = captures.names(options_of(args.spec)) if wrt else ()
        followed = [x for name, x in zip(names, captured, strict=False) if name in wrt]
        return _apply_function(Attention.apply, q, k, v, args.sinks, inputs, captured, request, *followed)
    with torch._C._AutoDispatchBelowAutograd():
        return ATTENTION(q, k, v, *args)


def _follow_backward(*args: Any) -> tuple[Any, ...]:
    """Computes ``attention_backward``; where a tensor requires grad, its own derivative raises ProblemError."""
    tensors = _read_tensors(args)
    if grad_enabled() and any_requires_grad(*tensors):
        return _apply_function(AttentionBackward.apply, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return BACKWARD(*args)


def _follow_captured(*args: Any) -> list[Any]:
    """Computes ``attention_backward_captured``; where a tensor requires grad, its own derivative raises ProblemError."""
    tensors = _read_tensors(args)
    if grad_enabled() and any_requires_grad(*tensors):
        return list(_apply_function(CapturedBackward.apply, *args))
    with torch._C._AutoDispatchBelowAutograd():
        return list(CAPTURED(*args))


def _read_tensors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Reads the tensors of a backward's operator to which autograd may follow, and checks them."""
    rest = Rest(*args[7:BEFORE_WRT])
    tensors = (*args[:7], rest.sinks, *(rest.captured or ()))
    _check_followed((*tensors, rest.cu_seqlens_q, rest.cu_seqlens_kv))
    return tensors


def _check_followed(tensors: Sequence[Any]) -> None:
    """Raises ProblemError for tensors that autograd passes on but the operators cannot take."""
    sharding.register_where_loaded()
    tensors = [x for x in tensors if x is not None]
    for x in tensors:
        if x.is_nested:
            raise ProblemError("an input is a nested tensor; give its values and offsets to rawattn.attention_varlen.")
        if type(x).__name__ == "MaskedTensor":
            raise ProblemError("an input is a MaskedTensor, whose mask would be ignored; give its data, or a mask of attention.")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ProblemError(NO_TANGENT)


library.impl("attention", _follow, "Autograd")
library.impl("attention_backward", _follow_backward, "Autograd")
library.impl("attention_backward_captured", _follow_captured, "Autograd")

"""Calls of attention and its gradients on arrays: a kept one is launched, or made from a similar one, or by a plan of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..array import reading, torch_state
from ..array.array import Array
from ..array.eager import eager
from ..array.forms import form_of, forms_of, of_forms
from ..errors import LayoutWarning, ProblemError
from ..operation import Forward, captures, functions
from ..operation.forward import layout_doubt
from ..operation.inputs import ForwardInputs
from ..operation.spec import Options, named, with_functions
from . import front_end
from .bound_call import CpuCall, GpuCall, Numbered, addresses_of
from .call_cache import find, keep
from .outputs import one_or_all
from .plan import NO_GRAD, Plan, device_of, spared_capture
from .record import is_logging, log_operation
from .request import Request, request_for, with_numbers
from .select import select, warn_once

Forms = tuple[tuple[Any, ...], ...]


def forward(inputs: ForwardInputs, options: Options, lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any) -> Any:
    """Computes ``attention`` and ``attention_varlen``: by way of torch's operator where torch must see one, and of an autograd
    Function where autograd follows. Dynamo passes over it where a graph broke."""
    captured: tuple[Any, ...] = ()
    request = numbers = read = None
    if options.mask is not None or options.score is not None:
        mask, score, captured, numbers = functions.parted(options.mask, options.score)
        options = with_functions(options, mask, score)
    if front_end.load_torch():
        is_plain = front_end.torch.is_plain()
        if is_plain and (read := forms_of(inputs + captured)) is not None:
            request = request_for(Forward, options, lengths, kernel, config)
            call = find((request, read[0]))
            if call is not None and numbers is None:
                return one_or_all(call(inputs + captured, read[1], out))
            if call is not None and (numbered := call.numbered(numbers)) is not None:
                return one_or_all(call(inputs + captured, read[1], out, numbered))
        if numbers is not None:
            options, request = with_numbers(options, numbers), None
        compute = (front_end.torch.dispatch_plain if is_plain else front_end.torch.dispatch)(inputs + captured)
        if compute is not None:
            if compute is front_end.torch.differentiable:
                return compute(inputs, request_for(Forward, options, lengths, kernel, config), out, captured)
            return compute(inputs, named(options), lengths, kernel, config, out, captured=captured)
    elif numbers is not None:
        options = with_numbers(options, numbers)
    return _run_unkept(inputs, captured, request or request_for(Forward, options, lengths, kernel, config), out, read)


def run(inputs: Any, request: Request, out: Any = None, captured: tuple[Any, ...] = ()) -> Any:
    """Computes a request on arrays that have memory: ``inputs``, a tuple in the order of ``operation.input_names``, and
    ``captured``, those of the functions among its options, which are ``taken``."""
    read = forms_of(inputs + captured)
    call = None if read is None else find((request, read[0]))
    if call is None or read is None:
        return _run_unkept(inputs, captured, request, out, read)
    return one_or_all(call(inputs + captured, read[1], out))


@eager
def _run_unkept(inputs: Any, captured: tuple[Any, ...], request: Request, out: Any, read: Any) -> Any:
    """Computes a call on arrays of forms for which it was not made yet, or whose forms must be looked at. The first of these that
    applies serves it: a call that takes other numbers, one for whose lengths the same kernels are launched, one of its family,
    resized, and a plan of its own. ``read`` has the forms and addresses of the arrays where they are known."""
    call: Any = None
    numbers = None
    dense = request.operation.dense(inputs)
    if read is None or dense is not inputs:
        inputs, read = dense, forms_of(dense + captured)
    if read is not None:
        call, numbers = _find_kept(request, read[0])
        if call is None:
            call, numbers = _adapt(read[0], len(inputs), captured, request)
    if call is not None and read is not None:
        results = call(inputs + captured, read[1], out) if numbers is None else call(inputs + captured, read[1], out, numbers)
        return one_or_all(results)
    operands = reading.read_named(request.operation.input_names(len(inputs)), inputs) | captures.read(request.options, captured)
    call = call_on(request, operands)
    if read is not None:
        if isinstance(call, GpuCall):
            keep(_make_family_key(read[0], len(inputs), request), call)
        _keep(read[0], len(inputs), request, call)
    return one_or_all(call(inputs + captured, addresses_of(operands), out))


def _keep(forms: Forms, count: int, request: Request, call: GpuCall | CpuCall) -> None:
    """Keeps a call for tensors of these forms, ``count`` of which its functions did not capture, and for those of other lengths;
    where it takes other numbers, for all of them."""
    if request.is_kept:
        is_gpu = isinstance(call, GpuCall)  # a CPU's configurations are for one length
        owner = request.without_numbers if isinstance(call, GpuCall) and call.takes_numbers else request
        keep((owner, forms), call)
        if is_gpu and (not request.has_functions or call.op.holds_in_steps(request.options)):
            keep((owner, _make_layout_key(forms, count, request)), call)


def _find_kept(request: Request, form: Any) -> tuple[Any, Numbered | None]:
    """The call that is kept for arrays of a form, and the numbers that it is to take, where they are not its own."""
    if request.numbers is not None:
        call = find((request.without_numbers, form))
        numbers = None if call is None else call.numbered(request.numbers)
        if numbers is not None:
            return call, numbers
    return find((request, form)), None


def _make_layout_key(forms: Forms, count: int, request: Request) -> tuple[Any, ...]:
    """The form of all tensors for whose lengths the same kernels are launched; functions must be proved for these."""
    return ("lengths", request.operation.layout_key(forms[:count], request.options), forms[count:])


def _make_family_key(forms: Forms, count: int, request: Request) -> Any:
    """The key of a family of calls; None where there is none. Its functions have the same code and arrays of the same form."""
    if not request.is_kept or (request.has_functions and request.operation is not Forward):
        return None
    family = request.operation.family(forms[:count], request.options)
    return family and ("family", family, forms[count:], request.family)


def _adapt(forms: Forms, count: int, captured: tuple[Any, ...], request: Request) -> tuple[GpuCall | None, Numbered | None]:
    """The call on tensors of these forms, made from a kept one on tensors of other lengths or with other offsets, and the numbers
    that it is to take; None without such a call."""
    similar, numbers = None, None
    if not (request.has_functions and is_logging()):  # to which each new operation goes
        similar, numbers = _find_kept(request, _make_layout_key(forms, count, request))
    if similar is not None:
        operands = dict(zip(similar.inputs, of_forms(forms[:count]), strict=False))
        call = similar.at_lengths_of(operands)
        if is_logging():
            log_operation(similar.op.resized_to(operands, request.options))
        keep((request if numbers is None else request.without_numbers, forms), call)
        return call, numbers
    similar = find(_make_family_key(forms, count, request))
    if similar is None:
        return None, None
    operands = dict(zip(similar.inputs, of_forms(forms[:count]), strict=False))
    if request.has_functions:
        operands |= captures.read(request.options, captured)
    op = similar.op.resized_to(operands, request.options)
    if op is None:
        return None, None
    call = similar.resized(op, operands)
    if op is not similar.op:
        log_operation(op)
    _keep(forms, count, request, call)
    return call, None


def call_on(request: Request, operands: dict[str, Array], on_compile: Callable[[], None] | None = None) -> GpuCall | CpuCall:
    """The call on operands of these forms, by name, which is kept or made."""
    if torch_state.requires_grad(*(array.object for array in operands.values())):
        raise ProblemError(NO_GRAD)
    key = (request, *map(form_of, operands.values()), *operands)
    call: GpuCall | CpuCall | None = find(key)
    if call is None:
        first = next(iter(operands.values()), None)
        op = request.operation.of_call(operands, request.options, request.lengths)
        assert first is not None, "of_call raises where there is no array"
        device = device_of(first)
        with spared_capture(first):
            selection = select(op, device, request.kernel, request.config)
            if selection.slow is not None:
                warn_once(selection.slow)
            causal = request.options.get("causal") is True
            if request.operation is Forward and (doubt := layout_doubt(operands["q"].shape, operands["k"].shape, causal)):
                warn_once(doubt, LayoutWarning, LayoutWarning)
            log_operation(op)
            call = Plan(op, device, selection, first.library, on_compile).bind(operands)
        if request.is_kept:
            keep(key, call)
    return call

"""This module computes calls on arrays, and keeps them: a call like one before is found by its key and launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..array import arrays
from ..array.arrays import Array
from ..array.eager import eager
from ..errors import LayoutWarning, ProblemError
from ..operation import Forward, Operation, functions
from ..operation.forward import layout_doubt
from . import front_end
from .plans import NO_GRAD, CpuCall, GpuCall, Numbered, Plan, addresses_of, device_of, find, keep, one_or_all, spared_capture
from .record import is_logging, log_operation
from .request import MASK, OPTIONS, SCORE, Asked, asked_of, with_numbers
from .select import select, warn_once

Forms = tuple[tuple[Any, ...], ...]


def forward(
    given: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any
) -> Any:
    """Computes ``attention`` and ``attention_varlen``: by way of torch's operator where torch must see one, and of an autograd
    Function where autograd follows. Dynamo passes over it where a graph broke."""
    captured: tuple[Any, ...] = ()
    asked = numbers = None
    if values[MASK] is not None or values[SCORE] is not None:
        mask, score, captured, numbers = functions.parted(values[MASK], values[SCORE])
        values = (*values[:MASK], mask, score, *values[SCORE + 1 :])
    if front_end.load_torch():
        is_plain = front_end.operators.is_plain()
        if is_plain and (read := arrays.forms_of(given + captured)) is not None:
            asked = asked_of(Forward, values, lengths, kernel, config)
            call = find((asked, read[0]))
            if call is not None and numbers is None:
                return one_or_all(call(given + captured, read[1], out))
            if call is not None and (own := call.numbered(numbers)) is not None:
                return one_or_all(call(given + captured, read[1], out, own))
        if numbers is not None:
            values, asked = with_numbers(values, numbers), None
        compute = (front_end.operators.way_of_tensors if is_plain else front_end.operators.way)(given + captured)
        if compute is not None:
            if compute is front_end.operators.differentiable:
                return compute(given, asked_of(Forward, values, lengths, kernel, config), out, captured)
            return compute(given, dict(zip(OPTIONS, values, strict=True)), lengths, kernel, config, out, captured=captured)
    elif numbers is not None:
        values = with_numbers(values, numbers)
    return _first(given, captured, asked or asked_of(Forward, values, lengths, kernel, config), out)


def run(
    given: tuple[Any, ...], options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None = None, config: Any = None,
    out: Any = None, operation: type[Operation] = Forward, asked: Asked | None = None, captured: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Computes a call on arrays that have memory, which are those of ``operation.input_names``, and ``captured``, those of the
    functions among its options; ``options`` and ``lengths`` are what its ``of_call`` takes, for attention what ``options_of``
    gives, with functions ``taken``. ``asked`` is what ``asked_of`` gives for all this, where the caller keeps it."""
    asked, read = asked or asked_of(operation, options, lengths, kernel, config), arrays.forms_of(given + captured)
    call = None if read is None else find((asked, read[0]))
    if call is None or read is None:
        return _first(given, captured, asked, out)
    return one_or_all(call(given + captured, read[1], out))


@eager
def _first(given: tuple[Any, ...], captured: tuple[Any, ...], asked: Asked, out: Any) -> Any:
    """Computes a call on arrays of forms for which it was not made yet, or whose forms must be looked at. The first of these that
    applies serves it: a call that takes other numbers, one for whose lengths the same kernels are launched, one of its family,
    resized, and a plan of its own."""
    call: Any = None
    numbers = None
    given = asked.operation.dense(given)
    read = arrays.forms_of(given + captured)
    if read is not None:
        call, numbers = _kept(asked, read[0])
        if call is None and arrays.are_held(given + captured):
            call, numbers = _similar(read[0], len(given), captured, asked)
    if call is not None and read is not None:
        results = call(given + captured, read[1], out) if numbers is None else call(given + captured, read[1], out, numbers)
        return one_or_all(results)
    found = arrays.named(asked.operation.input_names(len(given)), given) | functions.read(asked.options, captured)
    call = call_on(asked, found)
    if read is not None:
        if isinstance(call, GpuCall) and (family := _family(read[0], len(given), asked)) is not None:
            keep(family, call)
        _keep(read[0], len(given), asked, call)
    return one_or_all(call(given + captured, addresses_of(found), out))


def _keep(forms: Forms, count: int, asked: Asked, call: GpuCall | CpuCall) -> None:
    """Keeps a call for tensors of these forms, ``count`` of which its functions did not capture, and for those of other lengths;
    where it takes other numbers, for all of them."""
    if asked.is_kept:
        is_gpu = isinstance(call, GpuCall)  # a CPU's configurations are for one length
        owner = asked.without_numbers if is_gpu and call.op.takes_numbers else asked
        keep((owner, forms), call)
        if is_gpu and (not asked.has_functions or call.op.holds_in_steps(asked.options)):
            keep((owner, _layout(forms, count, asked)), call)


def _kept(asked: Asked, form: Any) -> tuple[Any, Numbered | None]:
    """The call that is kept for arrays of a form, and the numbers that it is to take, where they are not its own."""
    if asked.numbers is not None:
        call = find((asked.without_numbers, form))
        numbers = None if call is None else call.numbered(asked.numbers)
        if numbers is not None:
            return call, numbers
    return find((asked, form)), None


def _layout(forms: Forms, count: int, asked: Asked) -> tuple[Any, ...]:
    """The form of all tensors for whose lengths the same kernels are launched; functions must be proved for these."""
    return ("lengths", asked.operation.layout_key(forms[:count], asked.options), forms[count:])


def _family(forms: Forms, count: int, asked: Asked) -> Any:
    """The key of a family of calls; None where there is none. Its functions have the same code and arrays of the same form."""
    if not asked.is_kept or (asked.has_functions and asked.operation is not Forward):
        return None
    family = asked.operation.family(forms[:count], asked.options)
    return family and ("family", family, forms[count:], asked.of_family)


def _similar(forms: Forms, count: int, captured: tuple[Any, ...], asked: Asked) -> tuple[GpuCall | None, Numbered | None]:
    """A call on tensors of these forms, made from one on tensors of other lengths or with other offsets, and the numbers that it
    is to take."""
    like, numbers = None, None
    if not (asked.has_functions and is_logging()):  # to which each new operation goes
        like, numbers = _kept(asked, _layout(forms, count, asked))
    if like is not None:
        found = dict(zip(like.names, arrays.of_forms(forms[:count]), strict=False))
        call = like.at_lengths_of(found)
        if is_logging():
            log_operation(like.op.resized_to(found, asked.options))
        keep((asked if numbers is None else asked.without_numbers, forms), call)
        return call, numbers
    like = find(_family(forms, count, asked))
    if like is None:
        return None, None
    found = dict(zip(like.names, arrays.of_forms(forms[:count]), strict=False))
    if asked.has_functions:
        found |= functions.read(asked.options, captured)
    op = like.op.resized_to(found, asked.options)
    if op is None:
        return None, None
    call = like.resized(op, found)
    if op is not like.op:
        log_operation(op)
    _keep(forms, count, asked, call)
    return call, None


def call_on(asked: Asked, found: dict[str, Array], on_compile: Callable[[], None] | None = None) -> GpuCall | CpuCall:
    """The call on arrays of these forms, kept or made."""
    if arrays.requires_grad(*(array.object for array in found.values())):
        raise ProblemError(NO_GRAD)
    key = (asked, *map(arrays.form_of, found.values()), *found)
    call: GpuCall | CpuCall | None = find(key)
    if call is None:
        first = next(iter(found.values()), None)
        op = asked.operation.of_call(found, asked.options, asked.lengths)
        assert first is not None, "of_call raises where there is no array"
        device = device_of(first)
        with spared_capture(first):
            selection = select(op, device, asked.kernel, asked.config)
            if selection.slow is not None:
                warn_once(selection.slow)
            causal = asked.options.get("causal") is True
            if asked.operation is Forward and (doubt := layout_doubt(found["q"].shape, found["k"].shape, causal)):
                warn_once(doubt, LayoutWarning, LayoutWarning)
            log_operation(op)
            call = Plan(op, device, selection, first.library, on_compile).bind(found)
        if asked.is_kept:
            keep(key, call)
    return call

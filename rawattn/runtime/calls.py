"""This module computes calls on arrays, and keeps them: a call like one before is found by its key and launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..array import arrays
from ..array.arrays import Array
from ..array.eager import eager
from ..errors import LayoutWarning, ProblemError
from ..operation import Forward, Operation, functions
from ..operation.forward import layout_doubt
from . import front_end
from .plans import NO_GRAD, CpuCall, GpuCall, Numbered, Plan, cache_put, device_of, one_or_all, spared_capture
from .record import is_logging, log_operation
from .request import MASK, OPTIONS, SCORE, Asked, asked_of, with_numbers
from .select import select, warn_once

KEPT_PLANS, KEPT_CALLS = 4096, 1024
_plans: dict[Any, Plan] = {}
_families: dict[Any, GpuCall] = {}
_layouts: dict[Any, Any] = {}  # GpuCall, and CpuCall where there are no functions
_calls: dict[Any, Any] = {}


def forward(
    given: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any
) -> Any:
    """Computes ``attention`` and ``attention_varlen``: by way of torch's operator where torch must see one, and of an autograd
    Function where autograd follows. Dynamo passes over it where a graph broke."""
    captured: tuple[Any, ...] = ()
    key = asked = numbers = None
    if values[MASK] is not None or values[SCORE] is not None:
        mask, score, captured, numbers = functions.parted(values[MASK], values[SCORE])
        values = (*values[:MASK], mask, score, *values[SCORE + 1 :])
    if front_end.load_torch():
        is_plain = front_end.operators.is_plain()
        if is_plain and (key := _key(given, captured)) is not None:
            asked = asked_of(Forward, values, lengths, kernel, config)
            call = _calls.get((asked, key))
            if call is not None and numbers is None:
                return one_or_all(call(given[0], out, captured))
            if call is not None and (own := call.numbered(numbers)) is not None:
                return one_or_all(call(given[0], out, captured, (), own))
        if numbers is not None:
            values, asked = with_numbers(values, numbers), None
        compute = (front_end.operators.way_of_tensors if is_plain else front_end.operators.way)(given + captured)
        if compute is not None:
            if compute is front_end.operators.differentiable:
                return compute(given, asked_of(Forward, values, lengths, kernel, config), out, captured)
            return compute(given, dict(zip(OPTIONS, values, strict=True)), lengths, kernel, config, out, captured=captured)
    elif numbers is not None:
        values = with_numbers(values, numbers)
    asked = asked or asked_of(Forward, values, lengths, kernel, config)
    return _first(given, captured, key if key is not None else _key(given, captured), asked, out)


def run(
    given: tuple[Any, ...], options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None = None, config: Any = None,
    out: Any = None, operation: type[Operation] = Forward, asked: Asked | None = None, captured: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Computes a call on arrays that have memory, which are those of ``operation.input_names``, and ``captured``, those of the
    functions among its options; ``options`` and ``lengths`` are what its ``of_call`` takes, for attention what ``options_of``
    gives, with functions ``taken``. ``asked`` is what ``asked_of`` gives for all this, where the caller keeps it."""
    asked, key = asked or asked_of(operation, options, lengths, kernel, config), _key(given, captured)
    call = None if key is None else _calls.get((asked, key))
    return _first(given, captured, key, asked, out) if call is None else one_or_all(call(given[0], out, captured))


def _key(given: tuple[Any, ...], captured: tuple[Any, ...]) -> Any:
    """All of a call's torch tensors that it depends on, (signatures, forms of what functions captured); None for other arrays,
    and for tensors that must be looked at."""
    signatures = arrays.plain_signatures(given)
    forms = arrays.forms(captured) if captured else ()
    return None if signatures is None or forms is None else (signatures, forms)


@eager
def _first(given: tuple[Any, ...], captured: tuple[Any, ...], key: Any, asked: Asked, out: Any) -> Any:
    """Computes a call on arrays that it was not made for yet. The first of these that applies serves it: a call of a copy that is
    made or of other numbers, a call on arrays that lie so in other places, one of its family, resized, and a plan of its own."""
    call: Any = None
    numbers = None
    dense = asked.operation.dense(given)
    if dense is not given:
        given, key = dense, _key(dense, captured)
    if key is not None:
        call, numbers = _kept(_calls, asked, key)
        if call is None:
            call, numbers = _known(given, captured, key, asked)
    if call is None:
        found = arrays.named(asked.operation.input_names(len(given)), given) | functions.read(asked.options, captured)
        plan = plan_of(asked, found)
        call = plan.bind(found)
        captured = tuple([found[each.name].object for each in plan.op.captured])
        if isinstance(call, GpuCall) and key is not None:
            family = _family(key, asked)
            if family is not None:
                cache_put(_families, family, call, KEPT_PLANS)
            _keep(key, asked, call)
        elif key is not None and not asked.has_functions:
            _keep(key, asked, call)
    return one_or_all(call(given[0], out, captured) if numbers is None else call(given[0], out, captured, (), numbers))


def _keep(key: Any, asked: Asked, call: GpuCall | CpuCall) -> None:
    """Keeps a call for its tensors, and for those that lie so; where it takes other numbers, for all of them."""
    if asked.is_kept:
        owner = asked.without_numbers if call.op.takes_numbers else asked
        cache_put(_calls, (owner, key), call, KEPT_CALLS)
        is_gpu = isinstance(call, GpuCall)  # a CPU's configurations are for one length
        if asked.has_functions or not is_gpu:
            cache_put(_layouts, (owner, _layout(key, asked)), call, KEPT_CALLS)
        if is_gpu and (not asked.has_functions or call.op.holds_in_steps(asked.options)):
            cache_put(_layouts, (owner, _layout_in_steps(key, asked)), call, KEPT_CALLS)


def _kept(calls: Mapping[Any, GpuCall], asked: Asked, key: Any) -> tuple[GpuCall | None, Numbered | None]:
    """The call that is kept under a key, and the numbers that it is to take, where they are not its own."""
    if asked.numbers is not None:
        call = calls.get((asked.without_numbers, key))
        numbers = None if call is None else call.numbered(asked.numbers)
        if numbers is not None:
            return call, numbers
    return calls.get((asked, key)), None


def call_of(given: tuple[Any, ...], asked: Asked) -> GpuCall | None:
    """The call that is kept for these tensors of a GPU; None where there is none."""
    key = _key(given, ())
    call = None if key is None else _calls.get((asked, key))
    return call if isinstance(call, GpuCall) else None


def kept_at(place: tuple[Any, ...]) -> GpuCall | None:
    """The call that an adapter keeps under a key of its own; None where there is none."""
    found: GpuCall | None = _calls.get(place)
    return found


def keep_at(place: tuple[Any, ...], call: GpuCall) -> None:
    """Keeps a call under an adapter's key, which begins with what is asked for and has more parts than those of ``attention``."""
    cache_put(_calls, place, call, KEPT_CALLS)


def _layout(key: Any, asked: Asked) -> tuple[Any, ...]:
    """A key of tensors of these lengths that lie so, wherever."""
    return (Operation.layout_key(key[0], asked.options), key[1])


def _layout_in_steps(key: Any, asked: Asked) -> tuple[Any, ...]:
    """A key of all for which the same program serves; functions are to be proved for all lengths of which the same is lowered."""
    return (asked.operation.layout_key(key[0], asked.options), key[1], "in steps")


def _family(key: Any, asked: Asked) -> Any:
    """The key of a family of calls; None where there is none. Its functions have the same code and arrays of the same form."""
    if not asked.is_kept or (asked.has_functions and asked.operation is not Forward):
        return None
    family = asked.operation.family(key[0], asked.options)
    return family and (family, key[1], asked.of_family)


def moved(like: GpuCall, signatures: tuple[Any, ...], asked: Asked) -> GpuCall:
    """The call for tensors that lie as those of another one, in other places, by their signatures."""
    found = dict(zip(like.names, arrays.of_signatures(signatures), strict=False))
    call = like.moved(found)
    if not call.has_lengths_of(like) and is_logging():
        log_operation(like.op.resized_to(found, asked.options))
    return call


def _known(given: tuple[Any, ...], captured: tuple[Any, ...], key: Any, asked: Asked) -> tuple[GpuCall | None, Numbered | None]:
    """The call on tensors that lie as those of another call in other places, with the numbers that it is to take; or one whose
    lengths or offsets are others: a call of the same family, resized."""
    if not arrays.have_memory(given, key[0]):
        return None, None
    like, numbers = None, None
    if not (asked.has_functions and is_logging()):  # to which each new operation goes
        like, numbers = _kept(_layouts, asked, _layout_in_steps(key, asked))
    if like is None:
        like, numbers = _kept(_layouts, asked, _layout(key, asked))
    if like is not None:
        call = moved(like, key[0], asked)
        cache_put(_calls, (asked if numbers is None else asked.without_numbers, key), call, KEPT_CALLS)
        return call, numbers
    like = _families.get(_family(key, asked))
    if like is None:
        return None, None
    found = dict(zip(like.names, arrays.of_signatures(key[0]), strict=False))
    if asked.has_functions:
        found |= functions.read(asked.options, captured)
    op = like.op.resized_to(found, asked.options)
    if op is None:
        return None, None
    call = like.resized(op, found)
    if op is not like.op:
        log_operation(op)
    _keep(key, asked, call)
    return call, None


def plan_of(asked: Asked, found: dict[str, Array], on_compile: Callable[[], None] | None = None) -> Plan:
    """The plan for these arrays, found or made."""
    if arrays.requires_grad(*(array.object for array in found.values())):
        raise ProblemError(NO_GRAD)
    # All that a plan depends on: strides and alignment decide whether a kernel refuses.
    key = (asked, *[(*array[:5], array.pointer % 16) for array in found.values()], *found)
    plan = _plans.get(key)
    if plan is None:
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
            plan = Plan(op, device, selection, first.library, on_compile)
        if asked.is_kept:
            cache_put(_plans, key, plan, KEPT_PLANS)
    return plan

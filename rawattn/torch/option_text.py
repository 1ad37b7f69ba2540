"""The options of a call as JSON text, which a graph can hold and export can save."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ProblemError
from ..operation import functions
from ..operation.spec import Options, Spec, named
from ..variant import Option


def text_of(options: dict[str, Any]) -> str:
    """Writes the options of a call as the operators take them, also where dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        return _constant_text(tuple([(name, constant(value)) for name, value in options.items()]))
    return write_spec(Spec.of(**functions.without(options)), functions.among(options))


def write_spec(spec: Spec, own: Sequence[tuple[str, functions.Function]] = ()) -> str:
    """Writes the spec as the operator takes it, with functions of its own in the places of the mask and the score."""
    try:
        text = json.dumps(dataclasses.replace(spec, return_lse=False).to_json() | functions.to_json(own))
    except TypeError as error:
        raise ProblemError(f"{spec} cannot be text ({error}); a mask or score of your own must be an Option.") from None
    options_of(text)  # raises where it cannot be read again
    return text


@functools.lru_cache(maxsize=1024)
def options_of(text: str) -> dict[str, Any]:
    """Reads what ``write_spec`` wrote, as the options of a call that gives lse."""
    try:
        fields, own = functions.from_json(json.loads(text))
        spec = Spec.from_json(fields)
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return named(Options(**{**values, **own, "return_lse": True}))
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ProblemError(f"spec is {text[:80]!r}; it must be the JSON text of a rawattn.Spec ({error}).") from None


def constant(value: Any) -> Any:
    """Takes an option apart into nested tuples of constants. Dynamo follows this: it guards on the value of every number."""
    if isinstance(value, functions.BiasText):
        return (functions.Function, value.text, constant(value.numbers), constant(value.sizes))
    if isinstance(value, functions.Function):
        return (functions.Function, value.traced.text, constant(value.numbers), constant(value.sizes))
    if isinstance(value, Option):
        return (type(value), tuple([(field.name, constant(getattr(value, field.name))) for field in dataclasses.fields(value)]))
    if isinstance(value, (tuple, list)):
        return tuple([constant(x) for x in value])
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, float) and _follows_guards():
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # loaded already where dynamo traces

        return guard_scalar(value)
    return value


def _follows_guards() -> bool:
    """Tells whether dynamo traces ``guard_scalar``. Versions that do not take each float as a constant."""
    from torch._dynamo import trace_rules

    return "torch.fx.experimental.symbolic_shapes.guard_scalar" in trace_rules.manual_torch_name_rule_map


_follows_guards._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _constant_text(constants: tuple[tuple[str, Any], ...]) -> str:
    """Writes the options that ``constant`` took apart."""
    options = {name: option(value) for name, value in constants}
    return write_spec(Spec.of(**functions.without(options)), functions.among(options))


# torch.compiler.assume_constant_result says the same, but imports dynamo, which takes a second.
_constant_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def option(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] is functions.Function:
        return functions.from_text(*value[1:])
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return value[0](**{name: option(part) for name, part in value[1]})
    return value

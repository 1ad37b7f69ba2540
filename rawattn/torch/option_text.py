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
from ..operation.keys import KeyLists
from ..operation.spec import Options, Spec, named
from ..variant import Option


def text_of(options: dict[str, Any]) -> str:
    """Writes the options of a call as the operators take them, also where dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        return _write_constants(tuple([(name, to_constants(value)) for name, value in options.items()]))
    return write_spec(Spec.of(**functions.without(options)), functions.among(options))


def write_spec(spec: Spec, by_role: Sequence[tuple[str, functions.Function]] = ()) -> str:
    """Writes the spec as the operator takes it, with the functions ``by_role`` in the places of its mask and its score."""
    try:
        text = json.dumps(dataclasses.replace(spec, return_lse=False).to_json() | functions.to_json(by_role))
    except TypeError as error:
        raise ProblemError(f"{spec} cannot be text ({error}); a mask or score of your own must be an Option.") from None
    options_of(text)  # raises where it cannot be read again
    return text


@functools.lru_cache(maxsize=1024)
def options_of(text: str) -> dict[str, Any]:
    """Reads a text of ``write_spec`` as the options of a call that gives lse."""
    try:
        fields, by_role = functions.from_json(json.loads(text))
        spec = Spec.from_json(fields)
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return named(Options(**{**values, **by_role, "return_lse": True}))
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ProblemError(f"spec is {text[:80]!r}; it must be the JSON text of a rawattn.Spec ({error}).") from None


def to_constants(value: Any) -> Any:
    """Takes an option apart into nested tuples of constants. Dynamo traces this function, and guards on each number's value."""
    if isinstance(value, functions.BiasText):
        return (functions.Function, value.text, to_constants(value.numbers), to_constants(value.sizes))
    if isinstance(value, functions.Function):
        return (functions.Function, value.traced.text, to_constants(value.numbers), to_constants(value.sizes))
    if isinstance(value, (Option, KeyLists)):
        return (type(value), tuple([(x.name, to_constants(getattr(value, x.name))) for x in dataclasses.fields(value)]))
    if isinstance(value, (tuple, list)):
        return tuple([to_constants(x) for x in value])
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


def _write_constants(constants: tuple[tuple[str, Any], ...]) -> str:
    """Writes the options that ``to_constants`` took apart."""
    options = {name: from_constants(value) for name, value in constants}
    return write_spec(Spec.of(**functions.without(options)), functions.among(options))


# torch.compiler.assume_constant_result does this, but imports dynamo, which takes a second.
_write_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


def from_constants(value: Any) -> Any:
    """Puts together the option that ``to_constants`` took apart."""
    if isinstance(value, tuple) and value and value[0] is functions.Function:
        return functions.from_text(*value[1:])
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return value[0](**{name: from_constants(part) for name, part in value[1]})
    return value

"""What a fresh function of known code captured, read by a Python function that is written for that code: each
step of a path stands there as an attribute or an index, so that a call pays for no loop over paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .capture import NOTES, ArraySlot, Note, Path, Slot

_STEPS = {
    "cell": "{}.__closure__[{}].cell_contents", "global": "{}.__globals__[{!r}]", "default": "{}.__defaults__[{}]",
    "keyword": "{}.__kwdefaults__[{!r}]", "item": "{}[{!r}]", "type": "type({})",
}  # fmt: skip


def written(
    notes: Sequence[Note], slots: Sequence[Slot], arrays: Sequence[int], numbers: Sequence[int]
) -> Callable[[Any], tuple[tuple[Any, ...], ...] | None]:
    """A function that gives what another one has in the slots that are arrays, in those that are numbers, and in all; None where
    something else is there, or where what was noted does not hold."""
    lines: list[str] = []
    known: dict[str, Any] = {}
    for i, (path, what, value) in enumerate(notes):
        known |= {f"value{i}": value, f"holds{i}": NOTES[what]}
        at = _expression(path, known)
        same = {
            "code": f"{at}.__code__ is value{i}", "type": f"type({at}) is value{i}", "value": f"{at} is value{i}",
            "truth": f"bool({at}) is value{i}", "size": f"len({at}) == value{i}",
        }.get(what, "False")  # fmt: skip
        lines.append(f"    if not ({same}) and not holds{i}({at}, value{i}, f): return None")
    for i, slot in enumerate(slots):
        lines.append(f"    x{i} = {_expression(slot.path, known)}")
        if isinstance(slot, ArraySlot):
            known |= {f"cls{i}": slot.cls, f"dtype{i}": slot.dtype}
            lines.append(f"    if type(x{i}) is not cls{i} or x{i}.dtype != dtype{i} or x{i}.ndim != {slot.ndim}: return None")
            continue
        plain, sign = {"int": int, "float": float}[slot.kind], "<" if slot.is_negative else ">="
        known |= {f"cls{i}": plain, f"accepts{i}": slot.accepts}
        right = f"x{i} {sign} 0" if slot.kind == "int" else "True"
        lines.append(f"    if not (type(x{i}) is cls{i} and {right}):")
        lines.append(f"        if not accepts{i}(x{i}): return None")
        lines.append(f"        x{i} = cls{i}(x{i})")
    results = (f"({''.join(f'x{i}, ' for i in each)})" for each in (arrays, numbers, range(len(slots))))
    exec("\n".join(["def find(f):", *lines, f"    return {', '.join(results)}"]), known)
    find: Callable[[Any], tuple[tuple[Any, ...], ...] | None] = known["find"]
    return find


def _expression(path: Path, known: dict[str, Any]) -> str:
    text = "f"
    for step, at in path:
        if step == "attribute":
            text = f"{text}.{at}" if at.isidentifier() else f"getattr({text}, {at!r})"
        elif step == "item" and type(at) not in (int, str):  # whose repr may be no text of Python
            name = f"key{len(known)}"
            known[name] = at
            text = f"{text}[{name}]"
        else:
            text = _STEPS[step].format(text, at)
    return text

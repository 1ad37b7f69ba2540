"""The arrays that receive results: those of the caller, which are checked, and those that are returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..array import conversion, reading, torch_state
from ..array.array import DTYPES, Array
from ..errors import ProblemError
from ..operation import Operation
from ..operation.operand import Operand, check_output

if TYPE_CHECKING:
    from .plan import Plan


def given_outputs(out: Any, outputs: tuple[Operand, ...]) -> tuple[Any, ...]:
    """The arrays that ``out`` gives for ``outputs``, None where one is to be made; one array is for the first. Raises
    ProblemError for a tuple of another length."""
    if not isinstance(out, tuple):
        return (out, *(None,) * (len(outputs) - 1))
    if len(out) != len(outputs):
        names = ", ".join(operand.name for operand in outputs)
        raise ProblemError(f"out has {len(out)} arrays; it must have one for each of {names}, None for one to be made.")
    return out


def read_outputs(
    outs: Sequence[Any], op: Operation, plan: Plan, device: int, inputs: Iterable[tuple[str, Array]], is_written: bool = True
) -> dict[str, Array]:
    """The arrays of the caller, ``outs``, by the names of the outputs that they receive. Raises ProblemError where one cannot
    receive its result, or overlaps an input or another output."""
    outputs: dict[str, Array] = {}
    apart: list[tuple[str, Array | None]] = [*inputs]
    for operand, x in zip(op.outputs, outs, strict=False):
        if x is None:
            continue
        name = "out" if x is outs[0] and all(y is None for y in outs[1:]) else f"out ({operand.name})"
        array = outputs[operand.name] = reading.read(x, name)
        operand._replace(name=name).check(array, plan.library, device)
        check_written(name, array, x)
        if is_written:
            size = DTYPES[operand.element].itemsize
            is_plain = operand.contiguous and operand.name not in plan.tiled
            check_output(name, array, size if is_plain else max(size, plan.selection.kernel.alignment), apart)
        apart.append((name, array))
    return outputs


def check_written(name: str, array: Array, x: Any) -> None:
    """Raises ProblemError where ``x``, an array of the caller that was read as ``array``, cannot receive results."""
    if array.object is not x:
        raise ProblemError(f"{name} is a {type(x).__name__}, which cannot be written in place; call without {name.split()[0]}.")
    if array.library == "numpy" and not x.flags.writeable:
        raise ProblemError(f"{name} is read-only; give a writable array.")
    if torch_state.requires_grad(x):
        raise ProblemError(
            f"{name} requires grad, and autograd does not follow what is written to it; give {name}.detach(), or call under "
            "torch.no_grad()."
        )


def to_libraries(results: Sequence[Any], outs: Sequence[Any], first: Any) -> tuple[Any, ...]:
    """The results as arrays of the library of ``first``; those of the caller, ``outs``, as they are."""
    return tuple(x if any(x is y for y in outs) else conversion.to_library(x, first) for x in results)


def one_or_all(results: tuple[Any, ...]) -> Any:
    """The only result, or all of them."""
    return results[0] if len(results) == 1 else results

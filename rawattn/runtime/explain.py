"""The explanation of a call: what it would run, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..array import conversion, reading
from ..driver.device import Device
from ..errors import ProblemError
from ..kernel.program import Program
from ..operation import Backward, Forward, Operation, functions
from ..variant.intervals import is_interval
from ..variant.walk import lists
from .select import Selection, select
from .tile_classes import TileClasses, count


def explain_operation(op: Operation, device: Device, kernel: str | None = None, config: Any = None) -> Explanation:
    """``explain`` of an operation on a device, which need not be here."""
    selection = select(op, device, kernel, config)
    program = None if device.is_cpu else selection.kernel.lower(op, selection.config, device)
    return Explanation(op, device, selection, program)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """An operation and what was selected for it; ``str`` of it is for people. ``program`` is None on the CPU. ``copied`` are the
    arrays whose strides or addresses no kernel takes, and which are copied first. ``tiles`` are the shares of tiles that a mask
    that is a function leaves out, keeps whole and cuts, where that can be seen without waiting: on the CPU. ``count_tiles`` gives
    them for a GPU's arrays."""

    op: Operation
    device: Device
    selection: Selection
    program: Program | None
    copied: tuple[str, ...] = ()
    tiles: TileClasses | None = None

    @property
    def has_list(self) -> bool:
        """Says whether the mask is a function, whose tiles are found on the device."""
        mask = getattr(self._forward, "mask", None)
        return lists(mask) or is_interval(mask)

    @property
    def generated(self) -> dict[str, str]:
        """The CUDA C that was written for functions, by the name of the file that it stands for."""
        options = [getattr(self._forward, name, None) for name in functions.ROLES]
        options += [getattr(option, "bounds", None) for option in options]
        return {name: text for option in options for name, text in getattr(option, "texts", {}).items()}

    def count_tiles(self, **tensors: Any) -> TileClasses:
        """The shares of tiles for ``tensors``, by name: those that the mask captured, mask_0 and so on, and those that say how
        long sequences are. It copies a GPU's to the host. Raises ProblemError where one is missing, or is another."""
        op = self._forward
        if not self.has_list or not isinstance(op, Forward):
            raise ProblemError(
                f"count_tiles counts for a mask that is a function, and this operation is {op}; give its mask as a function."
            )
        config = None if self.device.is_cpu else self.selection.config
        names = {array.name for array in op.mask.arrays} | {"cu_seqlens_q", "cu_seqlens_kv", "q_lens", "kv_lens"}
        needed = {operand.name: operand for operand in op.inputs if operand.name in names}
        takes = ", ".join(f"{name} ({operand.title.rstrip(',')})" if operand.label else name for name, operand in needed.items())
        inputs = reading.read_named(tuple(tensors), tuple(tensors.values()))
        for name in inputs.keys() - {operand.name for operand in op.inputs}:
            raise ProblemError(f"count_tiles was given {name}; it takes {takes or 'no arrays'}.")
        for name, operand in needed.items():
            if name not in inputs:
                raise ProblemError(f"{name} is missing; count_tiles takes {takes}.")
            operand.check(inputs[name], *inputs[name][:2])
        views = {name: conversion.on_host(inputs[name]) for name in needed}
        return count(op, views, *(getattr(config, name, 128) for name in ("tile_q", "tile_kv")))

    @property
    def _forward(self) -> Any:
        return getattr(self.op, "forward", self.op)

    def _write_functions(self) -> Iterator[str]:
        for role in functions.ROLES:
            option: Any = getattr(self._forward, role, None)
            if option is None or not option.is_function:
                continue
            yield f"{role:8} {str(option).partition('(')[2][:-1]}"
            yield from (f"  {note}" for note in option.notes)
            if role == "mask" and isinstance(self._forward, Forward):
                yield from (f"  {interval}" for interval in option.intervals(self._forward.limits))
            if role == "mask" and self.tiles is not None:
                yield f"  tiles of {self.tiles}"

    def __str__(self) -> str:
        op, selection = self.op, self.selection
        lines = [f"op       {op}", *self._write_functions(), f"device   {self.device.name}", f"kernel   {selection.kernel.name}"]
        lines += [f"  not {name}: {reason}" for name, reason in selection.refusals]
        lines += [f"config   {selection.config}", f"  {selection.why}"]
        if self.program is not None:
            lines += [f"launch   {launch}" for launch in self.program.launches]
            lines += [f"scratch  {self.program.scratch_bytes} bytes"] if self.program.scratch_bytes else []
        if isinstance(op, Backward):
            kept = [operand for operand in op.inputs if operand.name in ("q", "k", "v", "o", "lse")]
            lines += [f"kept     {sum(operand.bytes for operand in kept)} bytes, q, k, v, o and lse, from the forward on"]
        lines += [f"copied   {name}, which is expanded, not contiguous, or has rows that begin anywhere" for name in self.copied]
        lines += [f"work     {op.flops:.4g} FLOP, at least {op.bytes:.4g} bytes"]
        return "\n".join(lines)

"""The contract of a kernel: what it can do, how it may be configured, and what it makes of an operation."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from ..compile import compiler
from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward, Operation
from ..operation.operand import Layout
from ..variant import Option
from ..variant.field import Fields
from ..variant.walk import lists
from . import intervals, pyramid, tiling
from .program import Launch, Program

Op = TypeVar("Op", bound=Operation)


class Kernel(abc.ABC, Generic[Op]):
    """The files of ``cuda_src/`` that compute an operation, and all that the host knows about them. Nothing about a kernel is
    known elsewhere.

    ``config_type`` is a frozen dataclass of compile-time options. ``alignment`` is what outputs need, in bytes. Two kernels
    share by functions of modules beside them, never by importing each other. An ablation is a subclass.
    """

    name: ClassVar[str]
    alignment: ClassVar[int] = 16
    config_type: ClassVar[type[Any]]
    needs: ClassVar[str]  # the GPUs that it runs on, in words
    places_back: ClassVar[float] = 1.5  # that it goes back where it does not come first: behind the next one

    @abc.abstractmethod
    def runs_on(self, device: Device) -> bool:
        """Says whether the device has the instructions."""

    def device_reasons(self, device: Device) -> list[str]:
        """The reason why the kernel does not run on the device, if it does not."""
        return [] if self.runs_on(device) else [f"it needs {self.needs}, and {device.name} is {device.arch}"]

    @abc.abstractmethod
    def supports(self, op: Op, device: Device) -> list[str]:
        """The reasons why this kernel does not compute the operation on the device; none where it does."""

    def meant_for(self, op: Op, device: Device) -> bool:
        """Says whether the kernel is made for such operations on the device: a slower kernel that computes one in its place is
        worth a warning."""
        return self.runs_on(device)

    def prefers(self, op: Op, device: Device) -> bool:
        """Says whether the kernel comes first for an operation that it supports; where not, another kernel goes before it."""
        return True

    @abc.abstractmethod
    def layout_reason(self, layout: Layout) -> str | None:
        """The reason why the kernel cannot read arrays of this layout, which a copy would mend; None where it can."""

    def asks_for_copies(self, op: Op) -> bool:
        """Says whether an operation that this kernel could compute if its arrays were copied is refused, so that the caller
        decides. Else a slower kernel computes it, with a warning."""
        return True

    def is_tried(self, op: Op) -> bool:
        """Says whether only compiling tells which configurations keep all in registers, as where the mask or the score is a
        function, or a class of the caller's own."""
        return False

    def small_spill(self, op: Op) -> int:
        """The bytes of a thread, stored and loaded, up to which a spill costs less than a smaller tile."""
        return 0

    def counts_spills(self, launch: Launch) -> bool:
        """Says whether the spills of a launch tell configurations apart. Those of short passes around a kernel need not."""
        return True

    @abc.abstractmethod
    def legal(self, config: Any, op: Op, device: Device) -> str | None:
        """The reason why the configuration cannot be compiled and run for the operation; None where it can."""

    @abc.abstractmethod
    def candidates(self, op: Op, device: Device) -> list[Any]:
        """The legal configurations worth comparing."""

    @abc.abstractmethod
    def cost(self, config: Any, op: Op, device: Device) -> float:
        """The estimated seconds of a configuration, to compare it with others."""

    @abc.abstractmethod
    def tuning_shapes(self, op: Op) -> tuple[Op, ...]:
        """The operations of one kind by which configurations are compared."""

    @abc.abstractmethod
    def lower(self, op: Op, config: Any, device: Device) -> Program:
        """The launches that compute the operation; none where nothing is computed."""

    def programs(self, op: Op, config: Any, device: Device) -> tuple[Program, ...]:
        """The program, and others that operations of this kind may need in this configuration: they are compiled together, so
        that a new length compiles nothing."""
        return (self.lower(op, config, device),)

    def _keep(self, key: Any, make: Callable[[], tuple[Source, Fields]]) -> tuple[Source, Fields]:
        """The source and the fields that ``make`` makes, once for each key."""
        rendered = self._cache.get(key)
        if rendered is None:
            rendered = self._cache[key] = make()
        return rendered

    @functools.cached_property
    def _cache(self) -> dict[Any, tuple[Source, Fields]]:
        return {}

    def __repr__(self) -> str:
        return self.name


MOST_TRIED = 4  # configurations that are compiled to see whether they spill: the first, and at the same time those after it
SMALL_SPILL_COST = 1.05  # of the expected time: what a spill that a kernel calls small counts as


def without_spills(kernel: Kernel[Any], tried: Sequence[tuple[Any, Sequence[Any]]], device: Device) -> list[Any]:
    """The best configuration of each operation in ``tried``, which has the cheapest first, once they are compiled: the cheapest
    that keeps all in registers, where a small spill counts as some of the time; or the one that spills least. None for none.

    It takes two rounds at most: the first configurations of all are compiled at once, then those after the ones that spill. Where
    nothing can be compiled, only what the caches or a bundle have counts, or else the first."""
    spilled: dict[Any, float] = {}
    for first, last in ((0, 1), (1, MOST_TRIED)):
        asked = {
            config: kernel.lower(op, config, device).launches
            for op, configs in tried
            if not _is_settled(kernel, op, configs[:first], configs[first:MOST_TRIED], spilled, device)
            for config in configs[first:last]
            if config not in spilled
        }
        sources = {launch.source.key: launch.source for launches in asked.values() for launch in launches}
        binaries = compiler.compile_all(sources.values())
        for config, launches in asked.items():
            compiled = [binaries.get(launch.source.key) for launch in launches if kernel.counts_spills(launch)]
            spilled[config] = NOT_COMPILED if None in compiled else sum(binary.spill_bytes for binary in compiled if binary)
    return [
        min(configs[:MOST_TRIED], key=lambda config: _rate(kernel, op, config, spilled, device), default=None)
        for op, configs in tried
    ]


NOT_COMPILED = math.inf


def _rate(kernel: Kernel[Any], op: Any, config: Any, spilled: Mapping[Any, float], device: Device) -> tuple[float, float]:
    """The rank of a configuration, the less, the better: the expected time if it spills nothing, or little, then the bytes."""
    spill = spilled.get(config, NOT_COMPILED)
    if spill > kernel.small_spill(op):
        return math.inf, spill
    return kernel.cost(config, op, device) * (SMALL_SPILL_COST if spill else 1), spill


def _is_settled(
    kernel: Kernel[Any], op: Any, known: Sequence[Any], rest: Sequence[Any], spilled: Mapping[Any, float], device: Device
) -> bool:
    """Says whether none of the configurations ``rest`` can be better than the best of those in ``known``."""
    if not known or not rest:
        return not rest
    best = min(_rate(kernel, op, config, spilled, device)[0] for config in known)
    return best <= kernel.cost(rest[0], op, device)


class OneLaunch(Kernel[Op]):
    """A kernel that computes queries in one launch."""

    @abc.abstractmethod
    def options(self, op: Op, config: Any) -> dict[str, Option]:
        """The option on each axis, by the name that the kernel has for it."""

    @abc.abstractmethod
    def fields(self, op: Op, config: Any) -> Fields:
        """The fields of struct Args, in order."""

    @abc.abstractmethod
    def render(self, op: Op, config: Any, arch: str) -> Source:
        """The source of one configuration; operations of one kind share it."""

    @abc.abstractmethod
    def rendered_kind(self, op: Op, config: Any) -> tuple[Any, ...]:
        """All that ``render`` and ``fields`` depend on besides the configuration."""

    @abc.abstractmethod
    def values(self, op: Op, config: Any, device: Device) -> dict[str, float]:
        """The run-time numbers of struct Args."""

    @abc.abstractmethod
    def grid(self, op: Op, config: Any, device: Device) -> int:
        """The number of blocks."""

    def launch(self, op: Op, config: Any, device: Device) -> Launch:
        """The launch; what it renders is made once for each kind."""
        key = (*self.rendered_kind(op, config), config, device.arch)
        rendered = self._keep(key, lambda: (self.render(op, config, device.arch), self.fields(op, config)))
        return Launch(self.name, *rendered, self.values(op, config, device), self.grid(op, config, device))

    def lower(self, op: Any, config: Any, device: Device) -> Program:
        """The launches that compute the operation; none where no row is computed."""
        if not op.total_q * op.heads * op.batch:
            return Program(())
        return pyramid.before(Program((self.launch(op, config, device),)), op.mask, device)


class ForwardKernel(OneLaunch[Forward]):
    """A kernel of the forward that is one file and one launch."""

    file: ClassVar[str]

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        return tiling.tuning_shapes(op)

    def is_tried(self, op: Forward) -> bool:
        return lists(op.mask) or op.score.is_function or tiling.is_foreign(op.mask) or tiling.is_foreign(op.score)

    def rendered_kind(self, op: Forward, config: Any) -> tuple[Any, ...]:
        return op.kind, op.layout.tma_captured

    def lower(self, op: Any, config: Any, device: Device) -> Program:
        return intervals.of_forward(super().lower(op, config, device), op, device)

    def tiles(self, op: Forward, config: Any, device: Device) -> tiling.QueryTiles:
        """The tiles of dense queries, from which the grid and some of ``values`` follow."""
        return tiling.query_tiles(op, config.tile_q, device)

    def grid(self, op: Forward, config: Any, device: Device) -> int:
        tiles = self.tiles(op, config, device)
        return min(tiles.most_blocks, tiling.most_tiles(op, tiles.tile_q)) if op.varlen else tiles.at(op.q_len)[1]

    def launch(self, op: Forward, config: Any, device: Device) -> Launch:
        launch = super().launch(op, config, device)
        return launch if op.varlen else launch.at(op.q_len, self.tiles(op, config, device))

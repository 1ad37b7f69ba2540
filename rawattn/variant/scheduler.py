"""This module says which tile a block takes, and when; in which order its warpgroups issue; whether it begins before the launch
in front ended."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import Counter, Field, Fields, Violations


@dataclasses.dataclass(frozen=True)
class LptScheduler(Option):
    """Heads grouped to share L2, the longest tiles of a group first. Persistent blocks draw tiles from a counter; others compute
    one tile each, or ``cluster``s of blocks do. With ``split`` each tile is computed once for each of ``splits`` splits of its
    keys."""

    persistent: bool = True
    split: bool = False
    cluster: bool = False
    source: ClassVar[str] = "variant/scheduler/lpt.cuh"

    @property
    def cuda_type(self) -> str:
        numbers = "DynamicPersistent" if self.persistent else "ClusterTile" if self.cluster else "SingleTile"
        return f"{self.cuda_name}<{f'Split<{numbers}>' if self.split else numbers}>"

    @property
    def sources(self) -> tuple[str, ...]:
        numbers = "dynamic_persistent" if self.persistent else "cluster_tile" if self.cluster else "single_tile"
        return (f"variant/scheduler/{numbers}.cuh", *(("variant/scheduler/split.cuh",) if self.split else ()), self.source)

    @property
    def fields(self) -> Fields:
        return (*self.numbers, *(Field(name, "i32") for name in ("batches", "q_tiles", "l2_head_group", "last_group")))

    @property
    def numbers(self) -> Fields:
        """The fields from which the numbers of the works are drawn."""
        counter = (Field("counter", "i32*", Counter()),) if self.persistent else ()
        return (*counter, Field("splits", "i32")) if self.split else counter


class LptVarlenScheduler(LptScheduler):
    """Tiles of packed sequences, one sequence after the other, each with its longest tiles first."""

    source: ClassVar[str] = "variant/scheduler/lpt_varlen.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.numbers, Field("batches", "i32"))


class TwoEndedScheduler(Option):
    """Packed sequences for persistent blocks, half of which take works from the front and half from the back: so a prompt is
    computed while the keys of sequences that decode are read."""

    source: ClassVar[str] = "variant/scheduler/two_ended.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("counter", "i32*", Counter(16)), Field("batches", "i32"))


class Once(Wrapper):
    """One work for a block, of a scheduler that is not persistent, for a kernel that asks for more."""

    source: ClassVar[str] = "variant/scheduler/once.cuh"


class SharedTiles(Option):
    """A query tile of several sequences and heads, one after the other: of all that share what a block adds to."""

    source: ClassVar[str] = "variant/scheduler/shared_tiles.cuh"

    @property
    def fields(self) -> Fields:
        return tuple(Field(name, "i32") for name in ("batches", "q_tiles", "shared_batches", "shared_heads"))


class ReportingScheduler(Wrapper):
    """A scheduler whose first block records sequences with illegal lengths in the word of violations."""

    source: ClassVar[str] = "variant/scheduler/reporting.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("violations", "u32*", Violations()))


class StreamKScheduler(Option):
    """Equal shares of all key tiles, cut at the borders of splits, which each block finds from the lengths on the device."""

    source: ClassVar[str] = "variant/scheduler/stream_k.cuh"

    @property
    def fields(self) -> Fields:
        return tuple(Field(name, "i32") for name in ("batches", "split_keys_log2", "most_splits_log2"))


@dataclasses.dataclass(frozen=True)
class StreamK(StreamKScheduler):
    """The same for ``members`` blocks that have each share together, rows of their own; splits of sequences above ``long_keys``
    have a quarter as many keys."""

    members: int = 1

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("long_keys", "i32"))

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.members}>"


class EvenShares(StreamK):
    """Equal shares of all key tiles, cut at any of them: bits follow from the batch and the grid."""

    source: ClassVar[str] = "variant/scheduler/even_shares.cuh"


DIRECTIONS = {
    "Ascending": "ascending", "Alternating": "alternating", "AlternatingLong": "alternating_long",
    "ShortestFirst": "shortest_first", "LongestFirst": "longest_first",
}  # fmt: skip
NUMBERS = {
    "DynamicPersistent": "dynamic_persistent", "StaticPersistent": "static_persistent", "SingleTile": "single_tile",
    "ClusterTile": "cluster_tile",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KvScheduler(Option):
    """Key tiles of the backward: groups of heads that share L2, all heads of a key tile, then those of the next one.
    ``direction`` says in which order key tiles and the query tiles of each are taken, and ``draw`` who takes which work."""

    direction: str = "Ascending"
    draw: str = "DynamicPersistent"
    source: ClassVar[str] = "variant/scheduler/kv_lpt.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.draw}, {self.direction}>"

    @property
    def sources(self) -> tuple[str, ...]:
        files = DIRECTIONS[self.direction], NUMBERS[self.draw]
        return (*(f"variant/scheduler/{file}.cuh" for file in files), self.source)

    @property
    def fields(self) -> Fields:
        return (*self.numbers, *(Field(name, "i32") for name in ("kv_tiles", "l2_head_group", "last_group")))

    @property
    def numbers(self) -> Fields:
        """The fields from which the numbers of the works are drawn, and the batches."""
        counter = (Field("counter", "i32*", Counter()),) if self.draw == "DynamicPersistent" else ()
        return (*counter, Field("batches", "i32"))


class KvVarlenScheduler(KvScheduler):
    """Key tiles of the backward of packed sequences, one sequence after the other."""

    source: ClassVar[str] = "variant/scheduler/kv_lpt_varlen.cuh"

    @property
    def fields(self) -> Fields:
        return self.numbers


class KvWindows(KvScheduler):
    """Key tiles of the backward of packed sequences that go round, one sequence after the other."""

    source: ClassVar[str] = "variant/scheduler/kv_windows.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.draw}>"

    @property
    def fields(self) -> Fields:
        return self.numbers


class KvBundles(KvScheduler):
    """Key tiles of the backward of packed sequences without a mask, several sequences side by side."""

    source: ClassVar[str] = "variant/scheduler/kv_bundles.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.draw}>"

    @property
    def fields(self) -> Fields:
        return (*self.numbers, Field("bundle_works", "i32"))


class KvBands(KvScheduler):
    """Key tiles of the backward whose query tiles are in parts along the diagonal, one part after the other."""

    source: ClassVar[str] = "variant/scheduler/kv_bands.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.numbers, Field("kv_tiles", "i32"))


class PingPong(Option):
    """Warpgroups issue their products in turn, so that the softmax of one runs beside the products of another."""

    source: ClassVar[str] = "variant/order/ping_pong.cuh"


class Unordered(Option):
    """Each warpgroup issues its products when it is ready."""

    source: ClassVar[str] = "variant/order/unordered.cuh"


class OneWarp(Option):
    """A warp of the forward by mma.sync has its rows alone."""

    source: ClassVar[str] = "variant/strip/one_warp.cuh"


class TwoWarps(Option):
    """Two warps have the same rows, each half of the columns, for heads wider than 256."""

    source: ClassVar[str] = "variant/strip/two_warps.cuh"


class Dependent(Option):
    """A kernel begins early and waits for that launch's results: programmatic dependent launch, from Hopper on."""

    source: ClassVar[str] = "variant/launch/dependent.cuh"


class Independent(Option):
    """A kernel begins when the launch in front of it has ended."""

    source: ClassVar[str] = "variant/launch/independent.cuh"


def launch_of(arch: str) -> Option:
    """The option for an architecture: ``Dependent`` from Hopper on."""
    return Dependent() if int(arch[3:].rstrip("a")) >= 90 else Independent()

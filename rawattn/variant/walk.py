"""This module says how a kernel visits the key tiles of some queries, or the query tiles of some keys.

Tiles are side by side, and the mask says where they begin and end; or they are lists with holes, which warps find by asking the
mask for a class of each tile."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Pairwise, Wrapper
from .field import Field, Fields, Scratch

# Lists of blocks transposed, in scratch: the steps of each key tile, and where those of each begin.
TILE_LISTS: Fields = tuple(Field(name, "const i32*", Scratch(name)) for name in ("tile_steps", "tile_begins"))


def lists(mask: Pairwise | None) -> bool:
    """Says whether the tiles that a mask visits may have holes between them."""
    return mask is not None and mask.lists


class IntervalWalk(Option):
    """Key tiles of attn_fwd, side by side."""

    source: ClassVar[str] = "variant/walk/interval.cuh"


class PagedWalk(IntervalWalk):
    """Key tiles of attn_fwd in pages (``PagedPanelsKv``), side by side, of which each lane loads a part."""

    source: ClassVar[str] = "variant/walk/paged.cuh"


class PagedCopiesWalk(PagedWalk):
    """The same of rows that threads copy (``PagedCopiesKv``)."""

    source: ClassVar[str] = "variant/walk/paged_copies.cuh"


class ListWalk(Option):
    """Key tiles of attn_fwd, a list."""

    source: ClassVar[str] = "variant/walk/list.cuh"


class PagedListWalk(ListWalk):
    """Key tiles of attn_fwd in pages, a list."""

    source: ClassVar[str] = "variant/walk/paged_list.cuh"


@dataclasses.dataclass(frozen=True)
class IntervalCursor(Option):
    """Key tiles side by side, for warps that go along them by themselves: ``up``, or the last one first."""

    up: bool = False
    source: ClassVar[str] = "variant/walk/interval_cursor.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{str(self.up).lower()}>"


class ListCursor(IntervalCursor):
    """A list of key tiles, for such warps."""

    source: ClassVar[str] = "variant/walk/list_cursor.cuh"


class IntervalKeys(Option):
    """Key tiles of attn_bwd_dq, side by side."""

    source: ClassVar[str] = "variant/walk/keys_interval.cuh"


class ListKeys(Option):
    """Key tiles of attn_bwd_dq, a list."""

    source: ClassVar[str] = "variant/walk/keys_list.cuh"


class SplitIntervalWalk(Option):
    """Key tiles of attn_decode, side by side."""

    source: ClassVar[str] = "variant/walk/split_interval.cuh"


class WorkIntervalWalk(Option):
    """Key tiles of attn_mla, side by side."""

    source: ClassVar[str] = "variant/walk/work_interval.cuh"


class WorkListWalk(Option):
    """Key tiles of a token's list."""

    source: ClassVar[str] = "variant/walk/work_list.cuh"


class SplitListWalk(Option):
    """Key tiles of attn_decode, a list."""

    source: ClassVar[str] = "variant/walk/split_list.cuh"


class QIntervalWalk(Option):
    """Query tiles of a key tile, side by side."""

    source: ClassVar[str] = "variant/walk/q_interval.cuh"


class QIntervalByTiles(Option):
    """Query tiles of a key tile, side by side, each of all heads that share a key head before the next one."""

    source: ClassVar[str] = "variant/walk/q_interval_by_tiles.cuh"


class QIntervalRotated(Option):
    """Query tiles of a key tile, side by side, in a round that each key tile of a window begins somewhere else."""

    source: ClassVar[str] = "variant/walk/q_interval_rotated.cuh"

    @property
    def fields(self) -> Fields:
        return tuple(Field(name, "i32") for name in ("window_tiles", "q_stride"))


class QIntervalRotatedPacked(QIntervalWalk):
    """Query tiles of a key tile of a packed sequence, side by side, in such a round."""

    source: ClassVar[str] = "variant/walk/q_interval_rotated_packed.cuh"


class QIntervalPart(QIntervalRotated):
    """Query tiles of a key tile, side by side, of one part of all of them, in such a round."""

    source: ClassVar[str] = "variant/walk/q_interval_part.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("part_tiles", "i32"), *super().fields)


class QIntervalBand(Option):
    """Query tiles of a key tile, side by side, of one part of them: those at some distance from the first one."""

    source: ClassVar[str] = "variant/walk/q_interval_band.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("part_tiles", "i32"),)


class QIntervalUneven(QIntervalWalk):
    """Query tiles of a key tile, side by side, for a part of the heads that share a key head, where parts differ by a head."""

    source: ClassVar[str] = "variant/walk/q_interval_uneven.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("group_heads", "i32"),)


@dataclasses.dataclass(frozen=True)
class QListWalk(Option):
    """Query tiles of a key tile, a list that the first warp finds, where it is ``ordered`` with the order in which key tiles add
    to dq; of which the last one ``finishes`` it."""

    ordered: bool = False
    finishes: bool = False
    source: ClassVar[str] = "variant/walk/q_list.cuh"

    @property
    def cuda_type(self) -> str:
        return f"QListWalk<{str(self.ordered).lower()}, {str(self.finishes).lower()}>"


class QListCursor(Option):
    """Query tiles of a key tile, a list, for warps that go along it by themselves."""

    source: ClassVar[str] = "variant/walk/q_list_cursor.cuh"


class QIntervalSteps(Wrapper):
    """Query tiles of a key tile, side by side, which one thread finds for its block as the base goes along them."""

    source: ClassVar[str] = "variant/walk/q_interval_steps.cuh"


class QListSteps(QListWalk):
    """Query tiles of a key tile, a list, which one warp finds for its block."""

    source: ClassVar[str] = "variant/walk/q_list_steps.cuh"

    @property
    def cuda_type(self) -> str:
        return f"QListSteps<{str(self.ordered).lower()}>"


@dataclasses.dataclass(frozen=True)
class QBlockWalk(Option):
    """Query tiles of a key tile, those whose lists name it, one for ``block_q`` queries, as ``block_lists.cu`` sorts them."""

    block_q: int
    source: ClassVar[str] = "variant/walk/q_blocks.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"listed_block_q": self.block_q}

    @property
    def cuda_type(self) -> str:
        return "QBlockWalk<>"

    @property
    def fields(self) -> Fields:
        return (*TILE_LISTS, *(Field(name, "i32") for name in ("listed", "listed_blocks", "listed_heads", "listed_tiles")))


class QBlockWalkByTime(QBlockWalk):
    """The same, where key tiles add to dq in the order of time (``block_turns.cu``)."""

    source: ClassVar[str] = "variant/walk/q_blocks_by_time.cuh"

    @property
    def cuda_type(self) -> str:
        return "QBlockWalkByTime<>"


class QBlockSteps(QBlockWalk):
    """The same, which one thread reads for its block."""

    source: ClassVar[str] = "variant/walk/q_block_steps.cuh"

    @property
    def cuda_type(self) -> str:
        return self.cuda_name


class IntervalTurn(Option):
    """Key tiles that add to a tile of dq are counted."""

    source: ClassVar[str] = "variant/walk/turn_interval.cuh"


class RotatedTurn(Option):
    """Key tiles that add to a tile of dq are counted as they come to it, window by window, each in its round."""

    source: ClassVar[str] = "variant/walk/turn_rotated.cuh"


class BlockTurn(Option):
    """Steps of lists of blocks know how many add to a tile of dq before them."""

    source: ClassVar[str] = "variant/walk/turn_blocks.cuh"


class ListTurn(Option):
    """Each key tile that adds to a tile of dq says which one is the next."""

    source: ClassVar[str] = "variant/walk/turn_list.cuh"

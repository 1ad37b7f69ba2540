"""This module says which keys queries attend to that have lists of them, and where these keys lie."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from . import Option, Wrapper
from .field import AxisStride, Field, Fields, Pointer, Violations


@dataclasses.dataclass(frozen=True)
class TokenLists(Option):
    """A list for each row of q. Where they are ``counted``, an array says how many of its numbers count."""

    counted: bool
    source: ClassVar[str] = "variant/lists/by_token.cuh"
    counts: ClassVar[str] = "CountedByToken"
    axes: ClassVar[tuple[str, ...]] = ("row",)

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.counts if self.counted else 'WholeLists'}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source.replace("/by", "/counted_by") if self.counted else "variant/lists/whole.cuh", self.source)

    @property
    def fields(self) -> Fields:
        fields = [Field("listed", "i32")]
        for name in ("keys", "keys_counts")[: 1 + self.counted]:
            strides = (Field(f"{name}_{axis}", "i64", AxisStride(name, i)) for i, axis in enumerate(self.axes))
            fields += [Field(name, "const i32*", Pointer(name)), *strides]
        return tuple(fields)


class BlockLists(TokenLists):
    """A list for each head and block of queries of a sequence."""

    source: ClassVar[str] = "variant/lists/by_block.cuh"
    counts: ClassVar[str] = "CountedByBlock"
    axes: ClassVar[tuple[str, ...]] = ("sequence", "head", "row")

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("listed_blocks", "i32"))


@dataclasses.dataclass(frozen=True)
class BlockWalk(Option):
    """Key tiles of attn_fwd: those that lists of blocks of ``block_kv`` keys name, of which each ``block_q`` queries have one."""

    numbers: BlockLists
    block_q: int
    block_kv: int
    source: ClassVar[str] = "variant/walk/blocks.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.numbers.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.numbers.sources, self.source)

    @property
    def constants(self) -> dict[str, int]:
        return {"listed_block_q": self.block_q, "listed_block_kv": self.block_kv}

    @property
    def fields(self) -> Fields:
        return (*self.numbers.fields, Field("listed_heads", "i32"), Field("violations", "u32*", Violations()))


@dataclasses.dataclass(frozen=True)
class BesideLists(Wrapper):
    """A mask beside lists of blocks, which say what tiles are visited: it says what of them is kept."""

    base: Any

    @property
    def cuda_type(self) -> str:
        return str(self.base.cuda_type)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.base.sources)

    @property
    def values(self) -> dict[str, float]:
        return dict(self.base.values)

    @property
    def lists(self) -> bool:
        return True


class BlockPairWalk(BlockWalk):
    """The same, where each half of a tile of queries has a list."""

    source: ClassVar[str] = "variant/walk/block_pairs.cuh"


@dataclasses.dataclass(frozen=True)
class ListedRows(Wrapper):
    """Rows of blocks of ``block_q`` queries, each a sequence of its own with ``block_kv`` keys for each number of its list, of
    real sequences, ``base``. Where these are ``ragged`` and each query has a list, the query's row says which sequence is its."""

    block_q: int
    block_kv: int
    ragged: bool
    by_row: bool
    source: ClassVar[str] = "variant/rows/listed.cuh"

    @property
    def place(self) -> str:
        """The C++ type that says which queries a block has."""
        return "RowsOfSequences" if self.ragged and self.by_row else "BlocksOfSequences"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}, {self.place}>"

    @property
    def sources(self) -> tuple[str, ...]:
        place = "rows" if self.ragged and self.by_row else "blocks"
        return (*super().sources, f"variant/lists/{place}_of_sequences.cuh")

    @property
    def constants(self) -> dict[str, int]:
        own = {"listed_block_q": self.block_q, "listed_block_kv": self.block_kv, "listed_ragged": int(self.ragged)}
        return {**self.base.constants, **own}

    @property
    def fields(self) -> Fields:
        number = "listed_sequences" if self.ragged and self.by_row else "listed_blocks"
        return (*self.base.fields, *(Field(name, "i32") for name in ("listed_heads", "listed", number)))


@dataclasses.dataclass(frozen=True)
class _OfLists(Wrapper):
    """An option of real sequences, for blocks of queries with lists of keys, whose ``numbers`` say which."""

    numbers: TokenLists

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}, {self.numbers.cuda_type}, Rows>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.numbers.sources, *super().sources)

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, *self.numbers.fields, Field("violations", "u32*", Violations()))


class ListedMask(_OfLists):
    """A mask of the keys of lists."""

    source: ClassVar[str] = "variant/mask/listed.cuh"


class ListedMaskOfHeads(ListedMask):
    """The same, for all heads together, whose lists may be of different lengths."""


class ListedScore(_OfLists):
    """A score of positions, which are those of the keys in lists."""

    source: ClassVar[str] = "variant/score/listed.cuh"


class ListedPages(_OfLists):
    """The pages in which the keys of lists lie."""

    source: ClassVar[str] = "variant/pages/listed.cuh"


class NumberedKeys(_OfLists):
    """The keys of a token's list, one by one."""

    source: ClassVar[str] = "variant/lists/numbered_keys.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}, {self.numbers.cuda_type}>"


class PackedKeys(Option):
    """Packed keys as one page."""

    source: ClassVar[str] = "variant/pages/packed.cuh"


@dataclasses.dataclass(frozen=True)
class PhysicalPages(Option):
    """Keys that are rows of the whole cache."""

    page_size: int
    source: ClassVar[str] = "variant/pages/physical.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"listed_page_size": self.page_size}


class EveryRow(Option):
    """The number of keys where lists name rows of the cache: all of them."""

    source: ClassVar[str] = "variant/pages/every_row.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("max_kv_len", "i32"),)

"""How a kernel visits the key tiles of some queries, or the query tiles of some keys."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class IntervalWalk(Option):
    """They lie side by side, and the mask says where they begin and end."""

    type: ClassVar[str] = "IntervalWalk"
    source: ClassVar[str] = "variant/walk/interval.cuh"


@dataclasses.dataclass(frozen=True)
class PagedWalk(IntervalWalk):
    """The same over keys in pages (``PagedPanelsKv``), of whose tiles each lane loads a part."""

    type: ClassVar[str] = "PagedWalk"
    source: ClassVar[str] = "variant/walk/paged.cuh"


@dataclasses.dataclass(frozen=True)
class ListWalk(Option):
    """There may be holes between them: the mask classifies a tile, and 32 tiles together, on the device."""

    type: ClassVar[str] = "ListWalk"
    source: ClassVar[str] = "variant/walk/list.cuh"


@dataclasses.dataclass(frozen=True)
class IntervalCursor(Option):
    """The same as ``IntervalWalk`` for warps that go along key tiles by themselves."""

    type: ClassVar[str] = "IntervalCursor"
    source: ClassVar[str] = "variant/walk/interval_cursor.cuh"


@dataclasses.dataclass(frozen=True)
class ListCursor(Option):
    """The same as ``ListWalk`` for such warps."""

    type: ClassVar[str] = "ListCursor"
    source: ClassVar[str] = "variant/walk/list_cursor.cuh"


def lists(mask: object) -> bool:
    """Says whether the tiles that a mask visits may have holes between them."""
    return bool(getattr(mask, "lists", False))

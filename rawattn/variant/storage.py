"""The number format of a cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class SameStorage(Option):
    """It is that of the new rows."""

    type: ClassVar[str] = "SameStorage"
    source: ClassVar[str] = "variant/storage/same.cuh"

"""Where key and value bytes come from."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Choice


@dataclasses.dataclass(frozen=True)
class Strided(Choice):
    """Plain strided tensors, read by the copy engine."""

    type: ClassVar[str] = "Strided"
    source: ClassVar[str] = "variant/kv/strided.cuh"

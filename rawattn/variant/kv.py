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


@dataclasses.dataclass(frozen=True)
class Async(Choice):
    """Plain strided tensors, read by every thread with asynchronous copies of 16 bytes."""

    type: ClassVar[str] = "Async"
    source: ClassVar[str] = "variant/kv/async.cuh"

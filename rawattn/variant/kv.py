"""This module says where key and value bytes come from."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class TmaKv(Option):
    """Plain strided tensors, read by TMA."""

    type: ClassVar[str] = "TmaKv"
    source: ClassVar[str] = "variant/kv/tma.cuh"


@dataclasses.dataclass(frozen=True)
class CpAsyncKv(Option):
    """Plain strided tensors, read by every thread with asynchronous copies of 16 bytes."""

    type: ClassVar[str] = "CpAsyncKv"
    source: ClassVar[str] = "variant/kv/cp_async.cuh"

"""This module says which rows are in no tile of the backward: a pass clears their gradients."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class BehindLast(Option):
    """Those behind the last one of sequences end to end."""

    type: ClassVar[str] = "BehindLast"
    source: ClassVar[str] = "variant/unused/behind_last.cuh"


@dataclasses.dataclass(frozen=True)
class BehindUsed(Option):
    """In each sequence, those behind the ones that ``q_lens`` and ``kv_lens`` say it uses."""

    type: ClassVar[str] = "BehindUsed"
    source: ClassVar[str] = "variant/unused/behind_used.cuh"

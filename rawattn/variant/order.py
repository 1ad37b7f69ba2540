"""The order in which the warpgroups of a block issue their matrix products."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class PingPong(Option):
    """In turn, so that one warpgroup's softmax runs beside another's products."""

    type: ClassVar[str] = "PingPong"
    source: ClassVar[str] = "variant/order/ping_pong.cuh"


@dataclasses.dataclass(frozen=True)
class Unordered(Option):
    """As each is ready."""

    type: ClassVar[str] = "Unordered"
    source: ClassVar[str] = "variant/order/unordered.cuh"


@dataclasses.dataclass(frozen=True)
class DqAtOnce(Option):
    """A step of the backward makes its own part of dq."""

    type: ClassVar[str] = "DqAtOnce"
    source: ClassVar[str] = "variant/step/at_once.cuh"


@dataclasses.dataclass(frozen=True)
class DqStepLater(Option):
    """A step of the backward makes the part of dq of the step before, and packs weights late."""

    type: ClassVar[str] = "DqStepLater"
    source: ClassVar[str] = "variant/step/later.cuh"

"""This module says what the gradient of lse is."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Pointer


@dataclasses.dataclass(frozen=True)
class ZeroDlse(Option):
    """The loss does not depend on lse."""

    type: ClassVar[str] = "ZeroDlse"
    source: ClassVar[str] = "variant/statistics/dlse.cuh"


@dataclasses.dataclass(frozen=True)
class GivenDlse(Option):
    """An array that lies like lse."""

    type: ClassVar[str] = "GivenDlse"
    source: ClassVar[str] = "variant/statistics/dlse.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("dlse", "const Number*", Pointer("dlse")),)

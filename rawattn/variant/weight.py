"""This module says what becomes of a weight between its sum and the product with v."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class Identity(Option):
    """Leaves weights as they are."""

    type: ClassVar[str] = "Identity"
    source: ClassVar[str] = "variant/weight/identity.cuh"

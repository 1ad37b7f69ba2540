"""How the reference of a row's exponentials follows the row's maximum."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Choice


@dataclasses.dataclass(frozen=True)
class Steady(Choice):
    """Looks for the maximum and rescales in every tile. What is executed does not depend on the data."""

    type: ClassVar[str] = "Steady"
    source: ClassVar[str] = "variant/softmax/steady.cuh"


@dataclasses.dataclass(frozen=True)
class Trusting(Choice):
    """Trusts the first tile's maximum, and looks for another only where a sum shows that it is far off. Time depends on data."""

    type: ClassVar[str] = "Trusting"
    source: ClassVar[str] = "variant/softmax/trusting.cuh"
    steady: ClassVar[Choice] = Steady()


@dataclasses.dataclass(frozen=True)
class Lazy(Choice):
    """Looks for the maximum in every tile, and moves the reference when it lags by 2^8. Time depends on the data, a little."""

    type: ClassVar[str] = "Lazy"
    source: ClassVar[str] = "variant/softmax/lazy.cuh"
    steady: ClassVar[Choice] = Steady()

"""This module says what the first pass of the backward clears for those that follow."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Fields
from .store import DQ, DQ_SUM, TURNS


@dataclasses.dataclass(frozen=True)
class ClearNothing(Option):
    """Nothing: each output is written by one block, whole."""

    type: ClassVar[str] = "ClearNothing"
    source: ClassVar[str] = "variant/dq/clear_nothing.cuh"


@dataclasses.dataclass(frozen=True)
class ClearTurns(Option):
    """The turns in which blocks add to dq (``DqOrdered``)."""

    type: ClassVar[str] = "ClearTurns"
    source: ClassVar[str] = "variant/dq/clear_turns.cuh"

    @property
    def fields(self) -> Fields:
        return (TURNS,)


@dataclasses.dataclass(frozen=True)
class ClearTurnsDq(ClearTurns):
    """The same, and dq of rows that keep no key, which no block writes (``DqOrderedFinal``)."""

    type: ClassVar[str] = "ClearTurnsDq"
    source: ClassVar[str] = "variant/dq/clear_turns_and_rows.cuh"

    @property
    def fields(self) -> Fields:
        return (TURNS, DQ)


@dataclasses.dataclass(frozen=True)
class ClearListTurnsDq(ClearTurnsDq):
    """The same where key tiles are a list."""

    type: ClassVar[str] = "ClearListTurnsDq"
    source: ClassVar[str] = "variant/dq/clear_list_turns_and_rows.cuh"


@dataclasses.dataclass(frozen=True)
class ClearDqSum(Option):
    """The sums to which blocks add in any order (``DqUnordered``)."""

    type: ClassVar[str] = "ClearDqSum"
    source: ClassVar[str] = "variant/dq/clear_sum.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM,)

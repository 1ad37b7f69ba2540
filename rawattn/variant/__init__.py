"""This package defines the options of each axis of variation: it is the Python face of ``cuda_src/variant/``.

An option is a frozen value. It names the C++ type that takes its place in the kernel, the files that define that type, the
constants it adds to ``cfg::`` (compile-time: a new value is a new kernel) and the fields it adds to ``Args`` (run-time: a new
value compiles nothing). Two options with the same ``kind`` share one compiled kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from .field import Fields


class Pairwise:
    """A base of masks and scores, which answers what they are asked: None stands for a method that one lacks."""

    @property
    def is_function(self) -> bool:
        """Says whether it is a traced Python function."""
        return False

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that a function captured, or what is needed of each."""
        return ()

    @property
    def lists(self) -> bool:
        """Of a mask: whether the tiles that it visits may have holes between them."""
        return False

    @property
    def interval(self) -> Callable[..., Any] | None:
        """Every mask has it: ``mask.Pairs.interval``."""
        return None

    @property
    def keep(self) -> Callable[..., Any] | None:
        """Of a mask whose queries keep several runs of keys: ``keep(xp, batch, head, q, kv, q_len, kv_len)`` says which of the
        queries q, a column, keep which of the keys kv, a row."""
        return None

    @property
    def of_head(self) -> Callable[[int], Any] | None:
        """Of a mask that differs by head: ``of_head(head)`` gives the pairs of one query head."""
        return None

    @property
    def of_sequence(self) -> Callable[[int], Any] | None:
        """Of a mask on the host that differs by sequence: ``of_sequence(batch)`` gives the pairs of one of them."""
        return None

    @property
    def logit(self) -> Callable[..., Any] | None:
        """Of a score: its definition, ``score.Score``."""
        return None

    @property
    def slope(self) -> Callable[..., Any] | None:
        """Of a score: its derivative by s, ``score.Score``."""
        return None

    @property
    def unshifted(self) -> Any:
        """Of a score: the option that computes the same for the softmax ``Unshifted``; None where there is none."""
        return None

    def of_lengths(self, q_len: int, kv_len: int) -> Any:
        """The score of a sequence of these lengths."""
        return self


@dataclasses.dataclass(frozen=True)
class Option(Pairwise):
    """One option on one axis. Subclasses set the class variables; one with fields, its run-time values, is a frozen dataclass."""

    type: ClassVar[str] = ""  # in C++, where its name is not the class's
    source: ClassVar[str]

    @property
    def cuda_name(self) -> str:
        """The name of the C++ type, or template: the class's own, but where ``type`` is another."""
        return self.type or type(self).__name__

    @property
    def cuda_type(self) -> str:
        """The C++ type, as it stands in a ``using`` line."""
        return self.cuda_name

    @property
    def sources(self) -> tuple[str, ...]:
        """The files of ``cuda_src/`` that define the type."""
        return (self.source,)

    @property
    def texts(self) -> dict[str, str]:
        """The text of those ``sources`` that are no files, but written for this option."""
        return {}

    @property
    def constants(self) -> dict[str, int]:
        """Returns what it adds to ``namespace cfg``."""
        return {}

    @property
    def fields(self) -> Fields:
        """Returns what it adds to ``struct Args``."""
        return ()

    @property
    def values(self) -> dict[str, float]:
        """The value of each of ``fields``."""
        return {}

    @property
    def constant_time(self) -> Option:
        """Returns the option that computes the same by instructions that do not depend on the data: itself, if its do not."""
        return self

    @property
    def kind(self) -> tuple[object, ...]:
        """Returns what a compiled kernel depends on: everything but the run-time values."""
        return (self.cuda_type, self.sources, tuple(self.constants.items()))


@dataclasses.dataclass(frozen=True)
class Wrapper(Option):
    """An option made of another one, ``base``: a C++ template on its type. Subclasses may add ``fields``."""

    base: Option

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.base.sources, self.source)

    @property
    def texts(self) -> dict[str, str]:
        return self.base.texts

    @property
    def constants(self) -> dict[str, int]:
        return self.base.constants

    @property
    def fields(self) -> Fields:
        return self.base.fields

    @property
    def constant_time(self) -> Option:
        return dataclasses.replace(self, base=self.base.constant_time)

    @property
    def lists(self) -> bool:
        return self.base.lists


def constant_time(choices: dict[str, Option]) -> dict[str, Option]:
    """Returns the options in the forms whose instructions do not depend on the data."""
    return {axis: choice.constant_time for axis, choice in choices.items()}

"""This module lets errors of an adapter call its arguments by the names that they have there, not by rawattn's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from ..array import torch_state
from ..errors import ProblemError, UnsupportedError

_BIAS = re.compile(r"(?:score Biased: )?Biased\.(slopes|bias)(?:, which score captured,)?")  # of alibi or of bias


def naming(raised: type[ProblemError] | None = None, /, **names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that lets errors of a function say ``names`` instead of rawattn's, which are the keywords. ``raised`` takes the
    place of ProblemError."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def named(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except (ProblemError, UnsupportedError) as error:
                if torch_state.is_compiling():  # torch.compile cannot trace what follows
                    raise
                error.args = (renamed(str(error), names),)
                if raised is None or not isinstance(error, ProblemError):
                    raise
                raise raised(*error.args).with_traceback(error.__traceback__) from error.__cause__

        return named

    return decorate


def renamed(text: str, names: dict[str, str]) -> str:
    """The text of an error with these names: at its beginning, and those that are no words alone everywhere. q, k and v are
    arguments where the text begins with one."""
    text = _BIAS.sub(lambda match: "alibi" if match[1] == "slopes" else "bias", text)
    letters = re.match("[qkv] ", text) is not None
    everywhere = [name for name in names if not name.isalpha() or (letters and len(name) == 1)]
    pattern = rf"^(?:{'|'.join(names)})(?!\w)|(?<![\w.])(?:{'|'.join(everywhere) or '(?!)'})(?![\w,])"
    return re.sub(pattern, lambda match: names[match[0]], text)

"""This module keeps torch.compile out of what is not for its graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Makes torch.compile leave its graph for this function, as ``torch.compiler.disable`` does; but that imports dynamo, which
    takes a second, where nobody compiles."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            disabled.append(sys.modules["torch"].compiler.disable(function))
        return disabled[0](*args, **options)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]  # of the same signature

"""This module keeps torch.compile out of what is not for its graphs."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
codes: set[types.CodeType] = set()  # one, as all wrappers have the same


def skip(whole: Iterable[Callable[..., Any]]) -> None:
    """Tells torch's hook of frames to pass over the wrappers: where a graph broke it would trace them, and all of sys.modules. Of
    the functions in ``whole`` it passes over all that they call, too."""
    frames: Any = getattr(getattr(sys.modules["torch"]._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.7
        skipped, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        for code in codes:
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skipped, default))
        for function in whole:
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skipped, skipped))


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

    codes.add(called.__code__)  # type: ignore[attr-defined]
    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]  # of the same signature

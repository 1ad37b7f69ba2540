"""The record of the operations that calls compute, a line each, which are compiled before the first call of a later run."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from ..driver import context
from ..errors import ProblemError, brief
from ..operation import Operation, from_json
from .loaded_kernel import load_all
from .select import select

_logged: set[Any] = set()


def warm_up(operations: Iterable[Operation] | str | os.PathLike[str], device: int = 0) -> int:
    """Compiles and loads all that these operations need on a GPU, so that nothing compiles when they are called; gives their
    number.

    >>> rawattn.warm_up("operations.jsonl")

    Args:
        operations: operations such as ``rawattn.Forward``, or the path of a file that RAWATTN_LOG named in an earlier run.
        device: the number of the GPU.

    Raises:
        ProblemError: a line of the file is no operation.
        UnsupportedError: no kernel computes one of them on the device.
    """
    listed, gpu = operations_of(operations), context.device(device)
    for op in listed:
        load_all(op, select(op, gpu), gpu)
    return len(listed)


def operations_of(source: Iterable[Operation] | str | os.PathLike[str]) -> list[Operation]:
    """The operations of ``source``, an iterable or a file. Raises ProblemError where a line of it is no operation."""
    if not isinstance(source, (str, os.PathLike)):
        operations = list(source) if isinstance(source, Iterable) else [source]
        if wrong := [x for x in operations if not isinstance(x, Operation)]:
            raise ProblemError(f"operations has {brief(wrong[0])}; it must have operations such as rawattn.Forward.")
        return operations
    try:
        lines = pathlib.Path(source).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ProblemError(
            f"operations is {os.fspath(source)!r}, which is no text ({error}); name a file of RAWATTN_LOG."
        ) from None
    return [_read_line(line) for line in lines]


def _read_line(line: str) -> Operation:
    try:
        return from_json(json.loads(line))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ProblemError(f"operations has the line {line[:80]!r}, which is no operation ({reason}).") from None


def is_logging() -> bool:
    """Says whether new operations are written to a file."""
    return "RAWATTN_LOG" in os.environ and bool(os.environ["RAWATTN_LOG"])  # a third of what ``get`` takes where there is none


def log_operation(op: Operation, key: Any = None) -> None:
    """Appends the operation to the file that the environment variable RAWATTN_LOG names: each operation once, or where there is a
    ``key`` only the first that has it."""
    path = os.environ.get("RAWATTN_LOG")
    if not path or (key is not None and (path, key) in _logged):
        return
    line = json.dumps(op.to_json())
    if (path, key or line) not in _logged:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{_find_line_break(path)}{line}\n")
        except OSError as error:
            raise ProblemError(
                f"RAWATTN_LOG is {path!r}, where no operation can be written ({error}); name a file that can be, or unset it."
            ) from error
        _logged.add((path, key or line))


def _find_line_break(path: str) -> str:
    """A newline if the last line of a file has none, else nothing."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # it is empty, or a pipe
        file.seek(-1, os.SEEK_END)
        return "" if file.read(1) == b"\n" else "\n"  # not all: a device such as /dev/full has no end
    return ""

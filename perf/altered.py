"""Kernels that differ from the product's in one thing, made without touching it: by a patch to a source, by another choice on an
axis, or by other values. For what takes techniques away, and for what measures inside."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

from rawattn import driver
from rawattn.choose import Choice
from rawattn.compiler import Source
from rawattn.plan import Plan

from .compiling import without_lse
from .peers import Task

PATCHES = pathlib.Path(__file__).parent / "ablations"


def patch(source: Source, text: str) -> Source:
    """A source changed by a unified diff, whose line numbers count for nothing: what a hunk removes must be there once.

    Raises ValueError where it is not, or where the diff is of a file that the source has not.
    """
    texts = {source.name: source.text, **dict(source.headers)}
    for part in re.split(r"^--- a/cuda_src/", text, flags=re.MULTILINE)[1:]:
        path, _, body = part.partition("\n")
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]:
            old, new = ("".join(line[1:] + "\n" for line in hunk.splitlines() if line[:1] in keep) for keep in (" -", " +"))
            if texts.get(path, "").count(old) != 1:
                raise ValueError(f"{path} has not once, but {texts.get(path, '').count(old)} times:\n{old}")
            texts[path] = texts[path].replace(old, new)
    headers = tuple((path, texts[path]) for path, _ in source.headers)
    return dataclasses.replace(source, text=texts[source.name], headers=headers)


def kernel(original: Any, patches: tuple[str, ...] = (), **replaced: Callable[..., Any]) -> Any:
    """A copy of a kernel's module whose functions see each other's replacements; a replacement is given the original's result.

    >>> kernel(attn_fwd, ("static_order",), values=lambda found, problem, config, device: {**found, "head_group": 1})
    """
    copy = types.ModuleType(original.__name__)
    for name, value in vars(original).items():
        if isinstance(value, types.FunctionType) and value.__globals__ is vars(original):
            value = types.FunctionType(value.__code__, vars(copy), name, value.__defaults__)
        setattr(copy, name, value)
    if patches:
        texts = [(PATCHES / f"{name}.patch").read_text() for name in patches]

        def patched(source: Source, *_: Any) -> Source:
            for text in texts:
                source = patch(source, text)
            return source

        replaced["render"] = patched
    for name, change in replaced.items():
        setattr(copy, name, _changed(getattr(copy, name), change))
    return copy


def _changed(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: change(function(*given), *given)


def plan(task: Task, which: Any, config: Any) -> Plan:
    """A plan of an altered kernel, whatever it calls legal."""
    return Plan(without_lse(task.case.problem), driver.device(task.q.get_device()), Choice(which, config, "", ()), "torch")

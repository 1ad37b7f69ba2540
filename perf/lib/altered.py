"""Kernels that differ from the product's in one thing, as subclasses: for what takes techniques away, and for what measures
inside."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from rawattn.compile.compiler import Source
from rawattn.driver.device import Device
from rawattn.kernel.attn_bwd_mma import AttnBwdMma
from rawattn.kernel.attn_bwd_mma import AttnBwdMmaConfig as ConfigBwdMma
from rawattn.kernel.attn_fwd import AttnFwd
from rawattn.kernel.program import Launch, Program
from rawattn.operation import Backward, Forward

from .machine import ROOT

PATCHES = ROOT / "perf" / "ablations"


def patch(source: Source, text: str) -> Source:
    """A source changed by a unified diff, whose line numbers count for nothing: what a hunk removes must be there once. Files of
    cuda_src/ that the source does not include are passed over. Headers that only the changed text includes come with it.

    Raises ValueError where it is not, or where the diff is of a file that the source has not.
    """
    texts = {source.name: source.text, **dict(source.headers)}
    for part in re.split(r"^--- a/cuda_src/", text, flags=re.MULTILINE)[1:]:
        path, _, body = part.partition("\n")
        if path not in texts and (ROOT / "cuda_src" / path).is_file():
            continue
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]:
            old, new = ("".join(line[1:] + "\n" for line in hunk.splitlines() if line[:1] in keep) for keep in (" -", " +"))
            if (times := texts.get(path, "").count(old)) != 1:
                raise ValueError(f"{path} has not once, but {times} times:\n{old}")
            texts[path] = texts[path].replace(old, new)
    pending = [*texts.values()]
    while pending:
        for path in re.findall(r'^#include "([^"]+)"', pending.pop(), flags=re.MULTILINE):
            if path not in texts:
                texts[path] = (ROOT / "cuda_src" / path).read_text(encoding="utf-8")
                pending.append(texts[path])
    text = texts.pop(source.name)
    return dataclasses.replace(source, text=text, headers=tuple(sorted(texts.items())))


class Patched(AttnFwd):
    """attn_fwd from sources that patches in perf/ablations/ have changed."""

    def __init__(self, *patches: str) -> None:
        self.texts = [(PATCHES / f"{name}.patch").read_text(encoding="utf-8") for name in patches]

    def render(self, op: Forward, config: Any, arch: str) -> Source:
        source = super().render(op, config, arch)
        for text in self.texts:
            source = patch(source, text)
        return source


class AlteredBwdMma(AttnBwdMma):
    """attn_bwd_mma whose own launch is another one."""

    def __init__(self, change: Callable[[Launch, Backward], dict[str, Any]]) -> None:
        self.change = change

    def lower(self, op: Backward, config: ConfigBwdMma, device: Device) -> Program:
        program = super().lower(op, config, device)
        own = [launch._replace(**self.change(launch, op)) if launch.entry == self.name else launch for launch in program.launches]
        return program._replace(launches=tuple(own))


def patched_bwd_mma(name: str) -> AlteredBwdMma:
    """attn_bwd_mma from sources that a patch in perf/ablations/attn_bwd_mma/ has changed."""
    text = (PATCHES / "attn_bwd_mma" / f"{name}.patch").read_text(encoding="utf-8")
    return AlteredBwdMma(lambda launch, _: {"source": patch(launch.source, text)})

"""This module holds what is known of a device, as a frozen value: kernels and the chooser depend on these facts only."""

from __future__ import annotations

import dataclasses
import os
import re


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or the CPU (``arch`` is "cpu" and ``sm_count`` its cores)."""

    name: str
    arch: str  # the target of NVRTC: "sm_90a", "sm_89", ... or "cpu"
    sm_count: int  # multiprocessors, or cores
    smem_bytes: int  # shared memory that one block may have
    l2_bytes: int
    index: int = 0

    @property
    def capability(self) -> int:
        """The compute capability as one number, such as 90 or 120; 0 for the CPU."""
        return 0 if self.is_cpu else int(self.arch.removeprefix("sm_").rstrip("a"))

    @property
    def slug(self) -> str:
        """The name as a file's: ``NVIDIA H200``, and the typical one, are ``h200``."""
        name = self.name.lower().removeprefix("nvidia").removesuffix("(typical)")
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")

    @property
    def is_cpu(self) -> bool:
        return self.arch == "cpu"


def cpu() -> Device:
    """This machine's processor, with the cores that this process may use."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return Device("CPU", "cpu", cores, 0, 0)


def arch_of(major: int, minor: int) -> str:
    """NVRTC's target for a compute capability; Hopper's own instructions need the suffix a."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


# Typical boards, to compile and to choose for where there is no GPU.
TYPICAL = {
    "sm_75": Device("T4 (typical)", "sm_75", 40, 65_536, 4 << 20),
    "sm_80": Device("A100 (typical)", "sm_80", 108, 166_912, 40 << 20),
    "sm_86": Device("A10 (typical)", "sm_86", 72, 101_376, 6 << 20),
    "sm_87": Device("AGX Orin (typical)", "sm_87", 16, 166_912, 4 << 20),
    "sm_89": Device("L4 (typical)", "sm_89", 58, 101_376, 48 << 20),
    "sm_90a": Device("H200 (typical)", "sm_90a", 132, 232_448, 50 << 20),
    "sm_100": Device("B200 (typical)", "sm_100", 148, 232_448, 126 << 20),
    "sm_120": Device("RTX 5090 (typical)", "sm_120", 170, 101_376, 96 << 20),
}

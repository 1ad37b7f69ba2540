"""What is known of a device, as a frozen value: kernels and the chooser depend on these facts and on nothing else."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or the CPU (``arch`` is "cpu" and ``units`` its cores)."""

    name: str
    arch: str  # the target of NVRTC: "sm_90a", "sm_89", ... or "cpu"
    units: int  # multiprocessors, or cores
    smem_bytes: int  # shared memory that one block may have
    l2_bytes: int
    index: int = 0

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
    "sm_90a": Device("H200 (typical)", "sm_90a", 132, 232_448, 50 << 20),
}

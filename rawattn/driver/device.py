"""Devices: all that is known of one, as a frozen value. Kernels and the selection depend on these facts only."""

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
    "sm_103": Device("B300 (typical)", "sm_103", 148, 232_448, 126 << 20),
    "sm_110": Device("AGX Thor (typical)", "sm_110", 20, 232_448, 32 << 20),
    "sm_120": Device("RTX 5090 (typical)", "sm_120", 170, 101_376, 96 << 20),
    "sm_121": Device("GB10 (typical)", "sm_121", 48, 101_376, 24 << 20),
}
# Other boards in common use: name, multiprocessors, MiB of L2. The configurations that one gets depend on these.
_BOARDS: dict[str, list[tuple[str, int, float]]] = {
    "sm_75": [("RTX 2080 Ti", 68, 5.5), ("Quadro RTX 6000", 72, 6)],
    "sm_80": [("A30", 56, 24)],
    "sm_86": [("A2", 10, 2), ("RTX 3060", 28, 3), ("RTX 3080", 68, 5), ("RTX 3090", 82, 6), ("A40", 84, 6)],
    "sm_89": [("RTX 4060", 24, 24), ("RTX 4070", 46, 36), ("RTX 4080", 76, 64), ("RTX 4090", 128, 72), ("L40S", 142, 96)],
    "sm_90a": [("H100 80GB HBM3", 132, 50), ("H100 PCIe", 114, 50), ("H20", 78, 60)],
    "sm_120": [("RTX 5060", 30, 32), ("RTX 5070", 48, 48), ("RTX 5080", 84, 64), ("RTX PRO 6000", 188, 128)],
}


def boards(arch: str) -> list[Device]:
    """The typical board of an architecture, and the others that are known."""
    typical = TYPICAL[arch]
    others = [
        dataclasses.replace(typical, name=f"NVIDIA {name}", sm_count=sm_count, l2_bytes=int(l2 * (1 << 20)))
        for name, sm_count, l2 in _BOARDS.get(arch, [])
    ]
    return [typical, *others]


def _shorten(name: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|jetson|agx|dgx|80gb hbm3|\(typical\)|[^a-z0-9]", "", name.lower())


# The boards by the names that people use: h100, 4090, thor; and others by those whose chip they have.
NAMES = {_shorten(board.name): board for arch in TYPICAL for board in boards(arch)}
_LIKE = {"a10g": "a10", "a6000": "a40", "6000ada": "l40s", "gh200": "h100", "gb200": "b200", "gb300": "b300", "spark": "gb10"}
NAMES |= {name: NAMES[chip] for name, chip in _LIKE.items()}
KNOWN = f"{', '.join(TYPICAL)}, or of the boards {', '.join(NAMES)}"  # in words


def board(name: str) -> Device | None:
    """The board of this name, in any case, with or without its maker's words; the typical one of an architecture; or None."""
    return TYPICAL.get(name.lower()) or NAMES.get(_shorten(name))

"""This module reads what figures depend on besides code:
device, clocks, power, temperature, driver, libraries, sources, commit."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import pathlib
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from rawattn.compile import compiler
from rawattn.driver import context
from rawattn.driver.device import Device
from rawattn.errors import RawattnError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMI = ("nvidia-smi", "--format=csv,noheader,nounits", "--id=0")
LIBRARIES = (
    "torch", "triton", "cuda-bindings", "cupy-cuda12x", "cupy-cuda13x", "flash-attn", "flash-attn-4", "flashinfer-python",
    "xformers",
)  # fmt: skip


def record(device: Device) -> pathlib.Path:
    """The folder of what was measured on a device."""
    return ROOT / "perf" / "record" / device.slug


def gpu(tool: str) -> Device:
    """The first GPU. Raises SystemExit where there is none."""
    if context.device_count():
        return context.device(0)
    raise SystemExit(f"perf.{tool}: no NVIDIA GPU here; plot, sass, occupancy, mutate and host --dry need none.")


def source_hash() -> str:
    """Of all that decides what a kernel is: the package and its CUDA sources. Two equal hashes are one program."""
    files = (path for folder in ("rawattn", "cuda_src") for path in (ROOT / folder).rglob("*"))
    texts = [path.read_bytes() for path in sorted(files) if path.suffix in (".py", ".cu", ".cuh")]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _output(*words: str) -> str:
    """Returns what a program prints, or an empty string if it is not there or fails."""
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def facts() -> dict[str, Any]:
    """Everything that is recorded beside a measurement; what cannot be found out is left away. A commit with a + was changed."""
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "rawattn", "cuda_src")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found: dict[str, Any] = {"date": now, "commit": _output("git", "rev-parse", "HEAD") + "+" * bool(changed)}
    found |= {"source_hash": source_hash(), "python": platform.python_version(), "system": platform.platform()}
    with contextlib.suppress(RawattnError):
        found["nvrtc"] = compiler.nvrtc_version()
    with contextlib.suppress(RawattnError):
        found |= {"device": context.device(0).name, "cuda_of_driver": "{}.{}".format(*context.version())}
        found["driver, power limit"] = _output(*SMI, "--query-gpu=driver_version,power.limit")
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _reader() -> tuple[Callable[[], tuple[float, ...]], float]:
    """Returns the function that reads the GPU's state, and how many seconds to wait between two readings."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # not installed, or one of NVML's own errors
        return lambda: tuple(map(float, _output(*SMI, "--query-gpu=clocks.sm,power.draw,temperature.gpu").split(","))), 1.0
    return lambda: (
        nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    ), 0.1  # fmt: skip


class Monitor:
    """Reads clock, power and temperature in a thread while the body runs."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, ...]] = []  # time.monotonic(), MHz, watts, degrees
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        read, pause = _reader()
        with contextlib.suppress(ValueError):  # no nvidia-smi, or no number for this GPU
            while not self._stop.wait(pause):
                self.readings.append((time.monotonic(), *read()))

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def summary(self, begin: float) -> dict[str, float]:
        """Median clock, greatest power and temperature since ``begin``; empty for no readings."""
        readings = [reading for at, *reading in self.readings if at >= begin]
        if not readings:
            return {}
        clocks, watts, degrees = zip(*readings, strict=True)
        return {"sm_mhz": statistics.median(clocks), "power_w": max(watts), "celsius": max(degrees)}

"""What a figure depends on besides the code: device, clocks, power, temperature, driver, libraries, sources, commit."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import pathlib
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rawattn import compiler, driver
from rawattn.device import Device
from rawattn.errors import RawattnError

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "perf" / "record"
LIBRARIES = (
    "torch", "triton", "numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flash-attn",
    "flash-attn-4", "flashinfer-python", "xformers",
)  # fmt: skip


def slug(name: str) -> str:
    """A device's name as a file's: ``NVIDIA H200`` is ``h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-") or "unknown"


def record(device: Device) -> pathlib.Path:
    """The folder of what was measured on a device."""
    return RECORD / slug(device.name)


def gpu(tool: str) -> Device | None:
    """The first GPU; None, and a word on stderr, where there is none."""
    if driver.device_count():
        return driver.device(0)
    print(f"perf.{tool}: no NVIDIA GPU here; perf.sass, perf.plot and perf.tune --dry need none.", file=sys.stderr)
    return None


def source_hash() -> str:
    """Of all that decides what a kernel is: the package and its CUDA sources. Two equal hashes are one program."""
    digest = hashlib.sha256()
    files = [path for folder in ("rawattn", "cuda_src") for path in (ROOT / folder).rglob("*")]
    for path in sorted(path for path in files if path.suffix in (".py", ".cu", ".cuh")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit, with a + where tracked files differ from it; empty where this is no git checkout."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "rawattn", "cuda_src"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def facts() -> dict[str, Any]:
    """Everything that is recorded beside a measurement; what cannot be found out is left away."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(), "source_hash": source_hash(), "python": platform.python_version(), "system": platform.platform(),
    }  # fmt: skip
    with contextlib.suppress(RawattnError):
        found["nvrtc"] = compiler.nvrtc_version()
    with contextlib.suppress(RawattnError):
        found["device"] = driver.device(0).name
        found["cuda_of_driver"] = ".".join(map(str, driver.version()))
        found["driver"] = _smi("driver_version")[0]
        found["power_limit_w"] = float(_smi("power.limit")[0])
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault("libraries", {})[name] = importlib.metadata.version(name)
    return found


def _smi(*names: str) -> list[str]:
    """Values that nvidia-smi gives for the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ["nan"] * len(names)
    return [value.strip() for value in ran.stdout.strip().split(",")]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of the GPU at one moment."""

    at: float  # time.monotonic()
    sm_mhz: float
    power_w: float
    celsius: float


def _reader() -> tuple[Callable[[], Reading], float]:
    """What reads the GPU's state, and how many seconds it should be left alone between two readings."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # not installed, or one of NVML's own errors

        def by_smi() -> Reading:
            return Reading(time.monotonic(), *map(_number, _smi("clocks.sm", "power.draw", "temperature.gpu")))

        return by_smi, 1.0

    def by_nvml() -> Reading:
        clock, power = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM), pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        return Reading(time.monotonic(), clock, power, pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU))

    return by_nvml, 0.1


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


class Monitor:
    """Reads clock, power and temperature in a thread while the body runs.

    >>> with Monitor() as monitor:
    ...     begin = time.monotonic()
    ...     work()
    ...     print(monitor.summary(begin))
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        read, pause = _reader()
        while not self._stop.is_set():
            self.readings.append(read())
            self._stop.wait(pause)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=15)

    def summary(self, begin: float) -> dict[str, float]:
        return summarize([reading for reading in self.readings if reading.at >= begin])


def summarize(readings: Sequence[Reading]) -> dict[str, float]:
    """Median clock, greatest power and temperature; empty for no readings."""
    if not readings:
        return {}
    clocks = sorted(reading.sm_mhz for reading in readings)
    return {
        "sm_mhz": clocks[len(clocks) // 2],
        "power_w": round(max(reading.power_w for reading in readings), 1),
        "celsius": max(reading.celsius for reading in readings),
    }

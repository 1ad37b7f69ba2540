"""The cost model of the CPU path: one core of an EPYC 7003 (Zen 3, AVX2)."""

from __future__ import annotations

from ..driver.device import Device

PRODUCTS_PER_SECOND = 36e9  # in float32; half in float64
SECONDS_PER_NUMBER = {"fp64": 1.2e-9, "fp32": 0.8e-9, "fp16": 1.5e-9, "bf16": 1.5e-9}  # of k and v, to bring in
SECONDS_PER_UNIT = 40e-6
SECONDS_PER_THREAD = 80e-6


def backward_seconds(pairs: int, columns: int) -> float:
    """About what a backward takes one thread."""
    return pairs * 5 * columns / PRODUCTS_PER_SECOND


def threads_for(seconds: float, device: Device) -> int:
    """The threads that pay for themselves."""
    return min(device.sm_count, 1 + int(seconds / (4 * SECONDS_PER_THREAD)))

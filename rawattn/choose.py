"""Which kernel and which configuration serve a problem on a device."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

from . import cpu
from .device import Device
from .errors import ProblemError, UnsupportedError
from .kernel import attn_fwd, attn_fwd_mma
from .problem import Problem

KERNELS: tuple[ModuleType, ...] = (attn_fwd, attn_fwd_mma, cpu)  # best first


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel and its configuration, why, and why the others were passed over. ``slow`` says so where a better kernel of the
    device refused."""

    kernel: Any
    config: Any
    why: str
    refusals: tuple[tuple[str, str], ...]
    slow: str | None = None


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem, device: Device, kernel: str | None = None, config: Any = None) -> Choice:
    """The first kernel that supports the problem, in its cheapest legal configuration; ``kernel`` and ``config`` override.

    Raises UnsupportedError with every kernel's reason, or where a better kernel would take the problem with other strides;
    ProblemError for an override that does not fit.
    """
    names = [k.name for k in KERNELS]
    if kernel is not None and kernel not in names:
        raise ProblemError(f"kernel is {kernel!r}; it must be None or one of {', '.join(map(repr, names))}.")
    refusals: list[tuple[str, str]] = []
    slow: str | None = None
    for candidate in KERNELS:
        if kernel not in (None, candidate.name):
            continue
        reason = candidate.supports(problem, device)
        if reason is None:
            best, why = _configure(candidate, problem, device, config)
            return Choice(candidate, best, why, tuple(refusals), slow and f"{candidate.name} computes this on {device.name}: {slow}")
        refusals.append((candidate.name, reason))
        if candidate.runs_on(device):
            slow = slow or f"{candidate.name}, which is faster, refuses: {reason}"
            if kernel is None and _fits_with_other_strides(candidate, problem, device):
                raise UnsupportedError(f"{candidate.name}: {reason}; or ask for a slower kernel by name, kernel={names[-2]!r}.")
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no kernel computes {problem} on {device.name}:{reasons}")


def _fits_with_other_strides(kernel: ModuleType, problem: Problem, device: Device) -> bool:
    """Whether only the strides or pointers of the arrays stand against the kernel: what the caller can mend."""
    reason: str | None = kernel.supports(dataclasses.replace(problem, tma_misfit=None, misaligned=None), device)
    return reason is None


def _configure(kernel: Any, problem: Problem, device: Device, config: Any) -> tuple[Any, str]:
    if config is not None:
        if not isinstance(config, kernel.Config):
            raise ProblemError(f"config is {config!r}; kernel {kernel.name} takes a {kernel.__name__}.Config.")
        reason = kernel.legal(config, problem, device)
        if reason is not None:
            raise ProblemError(f"config is {config}, which {kernel.name} cannot run here: {reason}.")
        return config, "given by the caller"
    candidates = kernel.candidates(problem, device)
    if not candidates:
        raise UnsupportedError(f"{kernel.name} has no configuration that fits {problem} on {device.name}.")
    best = min(candidates, key=lambda c: kernel.cost(c, problem, device))
    micros = kernel.cost(best, problem, device) * 1e6
    return best, f"cheapest of {len(candidates)} by the cost model, which expects {micros:.3g} us"

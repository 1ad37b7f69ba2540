"""Which kernel and which configuration serve a problem on a device."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

from . import cpu
from .device import Device
from .errors import ProblemError, UnsupportedError
from .kernel import attn_fwd
from .problem import Problem

KERNELS: tuple[ModuleType, ...] = (attn_fwd, cpu)  # best first


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel and its configuration, why, and why the others were passed over."""

    kernel: Any
    config: Any
    why: str
    refusals: tuple[tuple[str, str], ...]


def choose(problem: Problem, device: Device, kernel: str | None = None, config: Any = None) -> Choice:
    """The first kernel that supports the problem, in its cheapest configuration for problems of this kind; ``kernel`` and
    ``config`` override.

    Raises UnsupportedError with every kernel's reason, ProblemError for an override that does not fit.
    """
    names = [k.name for k in KERNELS]
    if kernel is not None and kernel not in names:
        raise ProblemError(f"kernel is {kernel!r}; it must be None or one of {', '.join(map(repr, names))}.")
    if config is not None and not isinstance(config, tuple(k.Config for k in KERNELS)):
        raise ProblemError(f"config is {config!r}; it must be None or {' or '.join(f'{k.__name__}.Config' for k in KERNELS)}.")
    return _choose(problem, device, kernel, config)


@functools.lru_cache(maxsize=4096)
def _choose(problem: Problem, device: Device, kernel: str | None, config: Any) -> Choice:
    refusals: list[tuple[str, str]] = []
    for candidate in KERNELS:
        if kernel not in (None, candidate.name):
            continue
        reason = candidate.supports(problem, device)
        if reason is None:
            best, why = _configure(candidate, problem, device, config)
            return Choice(candidate, best, why, tuple(refusals))
        refusals.append((candidate.name, reason))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no kernel computes {problem} on {device.name}:{reasons}")


def _configure(kernel: Any, problem: Problem, device: Device, config: Any) -> tuple[Any, str]:
    if config is not None:
        if not isinstance(config, kernel.Config):
            raise ProblemError(f"config is {config!r}; kernel {kernel.name} takes a {kernel.__name__}.Config.")
        reason = kernel.legal(config, problem, device)
        if reason is not None:
            raise ProblemError(f"config is {config}, which {kernel.name} cannot run here: {reason}.")
        return config, "given by the caller"
    typical = kernel.typical(problem)
    costs = {candidate: kernel.cost(candidate, typical, device) for candidate in kernel.candidates(typical, device)}
    if not costs:
        raise UnsupportedError(f"{kernel.name} has no configuration that fits {problem} on {device.name}.")
    best = min(costs, key=lambda candidate: costs[candidate])
    micros = kernel.cost(best, problem, device) * 1e6
    return best, f"cheapest of {len(costs)} by the cost model, which expects {micros:,.0f} us"

"""Which kernel and which configuration serve a problem on a device."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

from . import cpu, records
from .device import Device
from .errors import ProblemError, UnsupportedError
from .kernel import attn_fwd, attn_fwd_mma, attn_fwd_simt
from .problem import Problem

KERNELS: tuple[ModuleType, ...] = (attn_fwd, attn_fwd_mma, attn_fwd_simt, cpu)  # best first


@dataclasses.dataclass(frozen=True)
class Selection:
    """A kernel and its configuration, why, and why the others were passed over. ``slow`` says so where one that is made for the
    device was among these. ``compiled_with``: the configurations that other problems of this kind may get."""

    kernel: Any
    config: Any
    why: str
    refusals: tuple[tuple[str, str], ...]
    slow: str | None = None
    compiled_with: tuple[Any, ...] = ()


def select(problem: Problem, device: Device, kernel: str | None = None, config: Any = None) -> Selection:
    """The first kernel that supports the problem, in the configuration that serves the most similar of this kind's typical
    problems best: by the device's record where that is of these sources, else by the cost model. ``kernel`` and ``config``
    override.

    Raises UnsupportedError with every kernel's reason, or where a better kernel would compute the problem but for the strides of
    the arrays; ProblemError for an override that does not fit.
    """
    names = [k.name for k in KERNELS]
    if kernel is not None and kernel not in names:
        raise ProblemError(f"kernel is {kernel!r}; it must be None or one of {', '.join(map(repr, names))}.")
    if config is not None and not isinstance(config, tuple(k.Config for k in KERNELS)):
        raise ProblemError(f"config is {config!r}; it must be None or {' or '.join(f'{k.__name__}.Config' for k in KERNELS)}.")
    return _select(problem, device, kernel, config)


@functools.lru_cache(maxsize=4096)
def _select(problem: Problem, device: Device, kernel: str | None, config: Any) -> Selection:
    refusals: list[tuple[str, str]] = []
    slow: str | None = None
    for candidate in KERNELS:
        if kernel not in (None, candidate.name):
            continue
        reason = candidate.supports(problem, device)
        if reason is None:
            best, why, others = _configure(candidate, problem, device, config)
            slow = slow and f"{candidate.name} computes this, slowly; {slow}"
            return Selection(candidate, best, why, tuple(refusals), slow, others)
        refusals.append((candidate.name, reason))
        if candidate.runs_on(device):
            slow = slow or f"{candidate.name}, which is made for {device.name}, does not: {reason}"
            if kernel is None and _refuses_strides(candidate, problem, device):
                slower = [repr(k.name) for k in KERNELS if k.supports(problem, device) is None]
                raise UnsupportedError(f"{candidate.name}: {reason}; or ask for a slower kernel: kernel={' or '.join(slower)}.")
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no kernel computes {problem} on {device.name}:{reasons}")


def _refuses_strides(kernel: ModuleType, problem: Problem, device: Device) -> bool:
    """Whether the kernel would compute the problem if the arrays lay otherwise: what the caller can mend, and should know."""
    reason: str | None = kernel.supports(dataclasses.replace(problem, tma_unsupported_reason=None, unaligned_reason=None), device)
    return reason is None


def _configure(kernel: Any, problem: Problem, device: Device, config: Any) -> tuple[Any, str, tuple[Any, ...]]:
    if config is not None:
        if not isinstance(config, kernel.Config):
            raise ProblemError(f"config is {config!r}; kernel {kernel.name} takes a {kernel.__name__}.Config.")
        reason = kernel.legal(config, problem, device)
        if reason is not None:
            raise ProblemError(f"config is {config}, which {kernel.name} cannot run here: {reason}.")
        return config, "given by the caller", ()
    members = config_set(kernel, kernel.tuning_shapes(problem), device)
    if not members:
        raise UnsupportedError(f"{kernel.name} has no configuration that fits {problem} on {device.name}.")
    best, seconds = nearest(kernel, members, problem, device)
    why = f"cheapest of {len(members)} by the cost model, which expects {seconds * 1e6:,.0f} us"
    if best.date:
        why = f"record of {best.date} for problems like {records.Kind.of(kernel, best.like).size}"
    others = dict.fromkeys(member.config for member in members if member.config != best.config)
    return best.config, why, tuple(others)


class Member(NamedTuple):
    """What the problems of a kind run in that are most like one of its typical problems."""

    like: Problem
    modelled: Any  # the cheapest configuration by the cost model
    config: Any  # the recorded one where there is one, else the modelled
    date: str  # of the record; empty for none


@functools.lru_cache(maxsize=256)
def config_set(kernel: Any, typical: tuple[Problem, ...], device: Device) -> tuple[Member, ...]:
    """All that problems of a kind may run in: a member for each of the kind's typical problems, but for those that the cost model
    tells not apart."""
    found: dict[Any, Member] = {}
    for problem in typical:
        costs = {config: kernel.cost(config, problem, device) for config in kernel.candidates(problem, device)}
        modelled = min(costs, key=costs.__getitem__, default=None)
        if modelled is not None and modelled not in found:
            record = records.find(kernel, problem, device)
            found[modelled] = Member(problem, modelled, *((record.config, record.date) if record else (modelled, "")))
    return tuple(found.values())


def nearest(kernel: Any, members: tuple[Member, ...], problem: Problem, device: Device) -> tuple[Member, float]:
    """The member that serves a problem, and the seconds that the cost model expects of its own choice for it. By that choice it
    is found, so that a record changes what a kind of problem runs in, not which problems are of that kind."""
    costs = [kernel.cost(member.modelled, problem, device) for member in members]
    best = min(range(len(members)), key=costs.__getitem__)
    return members[best], costs[best]

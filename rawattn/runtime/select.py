"""The selection of the kernel and the configuration that serve an operation on a device."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..cpu.kernels import CPU, CPU_APPEND, CPU_BACKWARD, CPU_COMBINE, CPU_KVCACHE
from ..driver.device import Device
from ..errors import ProblemError, SlowKernelWarning, UnsupportedError
from ..kernel.append import APPEND
from ..kernel.attn_bwd import ATTN_BWD
from ..kernel.attn_bwd_mma import ATTN_BWD_MMA
from ..kernel.attn_bwd_pair import ATTN_BWD_PAIR
from ..kernel.attn_bwd_simt import ATTN_BWD_SIMT
from ..kernel.attn_bwd_wide import ATTN_BWD_WIDE
from ..kernel.attn_decode import ATTN_DECODE
from ..kernel.attn_decode_beside import ATTN_DECODE_AND_FWD, ATTN_DECODE_AND_FWD_MMA
from ..kernel.attn_decode_listed import ATTN_DECODE_LISTED
from ..kernel.attn_decode_wide import ATTN_DECODE_WIDE
from ..kernel.attn_fwd import ATTN_FWD
from ..kernel.attn_fwd_kvcache import ATTN_FWD_KVCACHE
from ..kernel.attn_fwd_mma import ATTN_FWD_MMA
from ..kernel.attn_fwd_mma_kvcache import ATTN_FWD_MMA_KVCACHE
from ..kernel.attn_fwd_simt import ATTN_FWD_SIMT
from ..kernel.attn_fwd_wide import ATTN_FWD_WIDE
from ..kernel.attn_mla import ATTN_MLA
from ..kernel.attn_mla_listed import ATTN_MLA_LISTED
from ..kernel.base import without_spills
from ..kernel.block_gradients import ATTN_BWD_BLOCKS, ATTN_BWD_MMA_BLOCKS
from ..kernel.block_tiles import ATTN_FWD_BLOCKS
from ..kernel.combine import COMBINE
from ..kernel.listed import ATTN_FWD_MMA_LISTED, ATTN_FWD_SIMT_LISTED
from ..kernel.program import Program
from ..operation import Append, AttentionKVCache, Backward, Combine, Forward, Operation
from ..operation.operand import PLAIN

KERNELS: tuple[Any, ...] = (ATTN_FWD, ATTN_FWD_WIDE, ATTN_FWD_MMA, ATTN_FWD_SIMT, CPU)  # best first
KERNELS_BACKWARD: tuple[Any, ...] = (ATTN_BWD, ATTN_BWD_PAIR, ATTN_BWD_WIDE, ATTN_BWD_MMA, ATTN_BWD_SIMT, CPU_BACKWARD)
KERNELS_OF: dict[type[Operation], tuple[Any, ...]] = {  # of each operation
    Forward: KERNELS, Backward: KERNELS_BACKWARD, Append: (APPEND, CPU_APPEND),
    Combine: (COMBINE, CPU_COMBINE),
    AttentionKVCache: (
        ATTN_MLA, ATTN_DECODE, ATTN_DECODE_WIDE, ATTN_DECODE_AND_FWD, ATTN_FWD_KVCACHE, ATTN_DECODE_AND_FWD_MMA,
        ATTN_FWD_MMA_KVCACHE, CPU_KVCACHE,
    ),
}  # fmt: skip
LISTED: dict[type[Operation], tuple[Any, ...]] = {  # of those with lists of keys, which no other kernel is asked for
    Backward: (ATTN_BWD_BLOCKS, ATTN_BWD_MMA_BLOCKS, CPU_BACKWARD),
    Forward: (ATTN_FWD_BLOCKS, ATTN_FWD_MMA_LISTED, ATTN_FWD_SIMT_LISTED, CPU),
    AttentionKVCache: (ATTN_MLA_LISTED, ATTN_DECODE_LISTED, ATTN_FWD_MMA_LISTED, ATTN_FWD_SIMT_LISTED, CPU_KVCACHE),
}


def kernels_of(op: Operation) -> tuple[Any, ...]:
    """The kernels that may compute an operation, the best first."""
    of_keys: Any = op.forward if isinstance(op, Backward) else op
    return LISTED[type(op)] if getattr(of_keys, "keys", None) is not None else KERNELS_OF[type(op)]


class Selection(NamedTuple):
    """A kernel and its configuration, why they were selected, and why other kernels were refused.

    ``slow`` is the warning where a kernel that is made for the device was refused. ``compiled_with`` are the configurations that
    other operations of this kind may get.
    """

    kernel: Any
    config: Any
    why: str
    refusals: tuple[tuple[str, str], ...] = ()
    slow: str | None = None
    compiled_with: tuple[Any, ...] = ()

    def programs(self, op: Operation, device: Device) -> Iterator[Program]:
        """The programs that operations of this kind may need."""
        for config in (self.config, *self.compiled_with):
            yield from self.kernel.programs(op, config, device)


def select(op: Operation, device: Device, kernel: str | None = None, config: Any = None) -> Selection:
    """The first kernel that supports the operation, in the configuration that is best for the most similar of this kind's tuning
    shapes by the cost model. ``kernel`` and ``config`` override.

    Raises UnsupportedError with every kernel's reasons, or where a better kernel would compute the operation but for the strides
    of the arrays; ProblemError for an override that does not fit.
    """
    kernels = kernels_of(op)
    names = [k.name for k in kernels]
    if kernel is not None and kernel not in names:
        raise ProblemError(f"kernel is {kernel!r}; it must be None or one of {', '.join(map(repr, names))}.")
    if config is not None and not isinstance(config, tuple(k.config_type for k in kernels)):
        classes = " or ".join(dict.fromkeys(_name_config(k) for k in kernels))
        raise ProblemError(f"config is {config!r}; it must be None or {classes}.")
    key = (op.selection_key, device, kernel, config)
    selection = _selections.get(key)
    if selection is None:
        try:
            selection = _select(op.rounded(), device, kernel, config)
        except UnsupportedError:
            return _select(op, device, kernel, config)  # its message has the sizes that were given
        if len(_selections) >= KEPT_SELECTIONS:
            _selections.clear()
        _selections[key] = selection
    return selection


KEPT_SELECTIONS = 4096
_selections: dict[Any, Selection] = {}


def forget() -> None:
    """Forgets all earlier selections, as after a change of what spills."""
    _selections.clear()
    config_set.cache_clear()


def _name_config(kernel: Any) -> str:
    return f"{kernel.config_type.__module__}.{kernel.config_type.__name__}"


def _select(op: Any, device: Device, kernel: str | None, config: Any) -> Selection:
    refusals: list[tuple[str, str]] = []
    slow: str | None = None
    kernels = kernels_of(op)
    places = {k: place + k.places_back * (not k.prefers(op, device)) for place, k in enumerate(kernels)}
    ordered = sorted(kernels, key=places.__getitem__)
    for candidate in (k for k in ordered if kernel in (None, k.name)):
        reasons = candidate.supports(op, device)
        if not reasons:
            best, why, others = _configure(candidate, op, device, config)
            slow = slow and f"{candidate.name} computes this, slowly; {slow}"
            return Selection(candidate, best, why, tuple(refusals), slow, others)
        reason = "; ".join(reasons)
        refusals.append((candidate.name, reason))
        if candidate.meant_for(op, device):
            slow = slow or f"{candidate.name}, which is made for {device.name}, does not: {reason}"
            lies_wrong = not candidate.supports(dataclasses.replace(op, layout=PLAIN), device)
            if kernel is None and lies_wrong and candidate.asks_for_copies(op):
                slower = [repr(k.name) for k in ordered if not k.supports(op, device)]
                hint = f"; or ask for a slower kernel: kernel={' or '.join(slower)}" if slower else ""
                raise UnsupportedError(f"{candidate.name}: {reason}{hint}.")
    refusals.sort(key=lambda refusal: (refusal[0] == "cpu") != device.is_cpu)  # the device's own first
    lines = "".join(f"\n  {name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no kernel computes {op} on {device.name}:{lines}")


def _configure(kernel: Any, op: Any, device: Device, config: Any) -> tuple[Any, str, tuple[Any, ...]]:
    if config is not None:
        if not isinstance(config, kernel.config_type):
            raise ProblemError(f"config is {config!r}; kernel {kernel.name} takes a {_name_config(kernel)}.")
        reason = kernel.legal(config, op, device)
        if reason is not None:
            raise ProblemError(f"config is {config}, which {kernel.name} cannot run here: {reason}.")
        return config, "given by the caller", ()
    members = config_set(kernel, kernel.tuning_shapes(op), device)
    if not members:
        raise UnsupportedError(f"{kernel.name} has no configuration that fits {op} on {device.name}.")
    best, seconds = nearest(kernel, members, op, device)
    why = f"cheapest of {len(members)} by the cost model, which expects {seconds * 1e6:,.0f} us"
    others = dict.fromkeys(member.config for member in members if member.config != best.config)
    return best.config, why, tuple(others)


class Member(NamedTuple):
    """The configuration that serves the operations of a kind that are most similar to ``shape``, one of its typical shapes."""

    shape: Any
    config: Any


@functools.lru_cache(maxsize=256)
def config_set(kernel: Any, shapes: tuple[Any, ...], device: Device) -> tuple[Member, ...]:
    """The configurations that operations of a kind may run in: one for each of its typical ``shapes``, unless the cost model
    cannot tell these apart."""
    members: dict[Any, Member] = {}
    ordered: list[tuple[Any, list[Any]]] = []
    for op in shapes:
        costs = {config: kernel.cost(config, op, device) for config in kernel.candidates(op, device)}
        ordered.append((op, sorted(costs, key=costs.__getitem__)))
    if any(map(kernel.is_tried, shapes)):
        best = without_spills(kernel, ordered, device)
    else:
        best = [next(iter(configs), None) for _, configs in ordered]
    for op, config in zip(shapes, best, strict=True):
        if config is not None:
            members.setdefault(config, Member(op, config))
    return tuple(members.values())


def nearest(kernel: Any, members: tuple[Member, ...], op: Any, device: Device) -> tuple[Member, float]:
    """The member that serves an operation, and the seconds that the cost model expects of it."""
    costs = [kernel.cost(member.config, op, device) for member in members]
    best = min(range(len(members)), key=costs.__getitem__)
    return members[best], costs[best]


warned: set[Any] = set()


def warn_once(message: str, category: type[Warning] = SlowKernelWarning, key: Any = None) -> None:
    """Warns at the line that called rawattn, once for each key, which is the message by default."""
    if (key or message) in warned:
        return
    frame, level = sys._getframe(), 1
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(("rawattn.", "torch._dynamo.")):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
    warned.add(key or message)

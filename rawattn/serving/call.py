"""The parts that calls over caches and merges share: checks of their arguments, and their bound call, which is kept or made."""

from __future__ import annotations

import os
from typing import Any

from ..array.array import Array
from ..array.forms import form_of
from ..errors import ProblemError
from ..kernel import few_rows
from ..kernel.attn_decode import is_wide
from ..kernel.attn_fwd_mma import packs
from ..kernel.paging import over_tensors
from ..operation import AttentionKVCache, Operation
from ..runtime.bound_call import CpuCall, GpuCall
from ..runtime.call_cache import find, keep
from ..runtime.plan import Plan, device_of, spared_capture
from ..runtime.record import log_operation
from ..runtime.select import select
from .cache import KVCache
from .rotary import Rotary
from .step import Step


def check_objects(cache: Any, step: Any, rotary: Any = None, optional: bool = False) -> None:
    """Raises ProblemError where an argument is of the wrong class, or one of its arrays was moved since it was checked."""
    if not isinstance(cache, KVCache):
        raise ProblemError(f"cache is a {type(cache).__name__}; it must be a rawattn.KVCache.")
    if not isinstance(step, Step) and not (step is None and optional):
        raise ProblemError(f"step is {'None' if step is None else f'a {type(step).__name__}'}; it must be a rawattn.Step.")
    if rotary is not None and not isinstance(rotary, Rotary):
        raise ProblemError(f"rotary is a {type(rotary).__name__}; it must be a rawattn.Rotary, or None.")
    cache.held.check("KVCache")
    if step is not None:
        step.held.check("Step")
    if rotary is not None:
        rotary.held.check("Rotary")


def refuse_where_traced(**arguments: Any) -> None:
    """Raises ProblemError for an argument that torch's operators do not have."""
    for name, value in arguments.items():
        if value is not None:
            raise ProblemError(f"{name} was given where torch traces, transforms or casts the call; the operator has no {name}.")


def call_of(op: Operation, inputs: dict[str, Array], kernel: str | None = None, config: Any = None) -> GpuCall | CpuCall:
    """The bound call of an operation on inputs, by name, which were checked: a kept one, or a new one."""
    log(op)
    key = (op, kernel, config, *map(form_of, inputs.values()), *inputs)
    call: GpuCall | CpuCall | None = find(key)
    if call is None:
        first = next(iter(inputs.values()))
        device = device_of(first)
        with spared_capture(first):
            call = Plan(op, device, select(op, device, kernel, config), first.library).bind(inputs)
        keep(key, call)
    return call


def log(op: Operation) -> None:
    """Records an operation where RAWATTN_LOG is set: one of all that need the same kernels, since lengths of a step, and how
    many rows there are, change all the time. The bound on a sequence's rows counts by powers of two, which choose kernels, by how
    it fills tiles, which chooses configurations of attn_fwd_mma, and by whether these are so few that keys may be split."""
    if not os.environ.get("RAWATTN_LOG"):
        return
    key: tuple[Any, ...] = (op.kind, op.layout)
    if isinstance(op, AttentionKVCache):
        rows, forward = op.q_len * op.heads_per_kv, over_tensors(op)
        key += ((rows - 1).bit_length(), op.heads_per_kv, packs(forward), few_rows.are_sparse(forward), is_wide(op))
    log_operation(op, key)

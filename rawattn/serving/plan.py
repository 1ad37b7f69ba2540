"""Plans of attention over caches, compiled and loaded before they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..array import torch_state
from ..array.array import CPU, Array
from ..driver.device import Device
from ..errors import ProblemError
from ..operation import AttentionKVCache, arguments, captures
from ..operation.spec import MaskLike, ScoreLike, Window
from ..runtime.bound_call import CpuCall, GpuCall, addresses_of
from ..runtime.call_cache import KEPT_CALLS, cache_put
from ..runtime.outputs import one_or_all
from ..runtime.plan import Plan, device_of
from ..runtime.select import Selection, select
from .attention import attention_of, check_lse, parts_of, read_call, request_with, split_keys_of, with_slopes
from .cache import KVCache
from .call import check_objects, log
from .step import Step
from .violations import violations

# Fields of the operation whose names callers do not know; an array of another shape is named before.
_WORDS = {"q_len": "max_q_len of the step", "kv_len": "max_kv_len of the step", "spec": "causal of the step", "form": "the pages"}


@arguments.named
def plan_kvcache(
    q: Any, cache: KVCache, step: Step, *, window: Window | None = None, softcap: float | None = None, scale: float | None = None,
    mask: MaskLike | None = None, score: ScoreLike | None = None, alibi: Any = None, bias: None = None, sinks: Any = None,
    split: str | int = "auto", return_lse: bool = False, invariant: bool = False, dropout: float = 0,
    kernel: str | None = None, config: Any = None, on_compile: Callable[[], None] | None = None,
) -> KVCachePlan:  # fmt: skip
    """Makes the plan of ``attention_kvcache`` for arrays like these, compiled and loaded: ``plan.run(q, cache, step)`` then
    costs the least a call can cost, with the cache of any layer and the step of any time.

    >>> p = rawattn.plan_kvcache(q, cache, step)
    >>> o = p.run(q, cache, step)

    Arguments as in ``attention_kvcache``; ``run`` takes the arrays that functions captured, and ``alibi``, anew. ``on_compile``
    is called before NVRTC runs.
    """
    check_objects(cache, step)
    score, softcap = with_slopes(softcap, score, alibi, bias, dropout)
    options, captured = captures.take(
        {"window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score, "invariant": invariant}
    )
    planned = PlanRequest(options, return_lse, split_keys_of(split), order_of(step, options, len(captured)))
    request = request_with(step, options, captured, return_lse)._replace(split_keys=planned.split_keys)
    op, inputs = attention_of(q, cache, step, request, sinks)
    device = device_of(inputs["q"])
    log(op)
    return KVCachePlan(op, device, select(op, device, kernel, config), inputs["q"].library, planned, on_compile)


class PlanRequest(NamedTuple):
    """The request of a plan: options, in which functions have no arrays, the keys of a split, and which of the
    captured arrays its kernel takes, in order; None stands for the step's ``causal``."""

    options: dict[str, Any]
    return_lse: bool
    split_keys: int
    order: tuple[int | None, ...]

    def in_order(self, captured: tuple[Any, ...], step: Step) -> tuple[Any, ...]:
        """The captured arrays in the order in which the kernel takes them; as they are where their number is wrong."""
        if len(captured) != len(captures.names(self.options)):
            return captured
        return tuple([step.causal if i is None else captured[i] for i in self.order])


def order_of(step: Step, options: dict[str, Any], count: int) -> tuple[int | None, ...]:
    """The order in which a kernel takes ``count`` captured arrays, and the step's ``causal`` as None."""
    captured = request_with(step, options, tuple(range(count)), False).captured
    return tuple([place if isinstance(place, int) else None for place in captured])


class KVCachePlan(Plan):
    """Attention over caches on a device, by one kernel in one configuration, compiled and loaded.

    ``rawattn.plan_kvcache`` makes it. ``run`` takes any q, cache and step of the shapes, dtypes, library, device and bounds that
    it was made for, whatever their strides, pointers and scales, from several threads at once. Attributes as of ``Plan``.
    """

    def __init__(
        self, op: AttentionKVCache, device: Device, selection: Selection, library: str, request: PlanRequest,
        on_compile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(op, device, selection, library, on_compile)
        self._request = request

    def run(  # type: ignore[override]  # its arrays come in a cache and a step
        self, q: Any, cache: KVCache, step: Step, *captured: Any, sinks: Any = None, out: Any = None, lse: Any = None,
        **unknown: arguments.Unpack[arguments.Nothing],
    ) -> Any:  # fmt: skip
        """Computes o, or (o, lse) where the plan was made with ``return_lse=True``.

        ``captured`` are the arrays that functions among the options captured, in order. ``out`` and ``lse`` receive the results.
        Raises ProblemError where something is not what the plan was made for.
        """
        if unknown:
            arguments.refuse(KVCachePlan.run, unknown)
        torch_state.check_untraced((*parts_of(q), sinks, *captured))
        check_objects(cache, step)
        check_lse(lse, self._request.return_lse)
        ordered = self._request.in_order(captured, step)
        tensors, read = (*parts_of(q), sinks, *ordered), read_call(q, cache, step, sinks, ordered)
        key, addresses = (None, ()) if read is None else read[:2]
        call = self._calls.get(key)
        if call is None:
            call, inputs = self._bind_call(q, cache, step, sinks, captured)
            addresses = addresses_of(inputs)
            if key is not None:
                cache_put(self._calls, key, call, KEPT_CALLS)
        return one_or_all(call(tensors, addresses, out if lse is None else (out, lse)))

    def violations(self) -> tuple[str, ...]:
        """``rawattn.violations`` of the plan's device: what any launch there found wrong since the last call. A CPU raises."""
        return () if self.device.is_cpu else violations(self.device.index)

    def _bind_call(
        self, q: Any, cache: KVCache, step: Step, sinks: Any, captured: tuple[Any, ...]
    ) -> tuple[GpuCall | CpuCall, dict[str, Array]]:
        """The plan bound to the arrays, and these by name. Raises ProblemError where they are not what the plan was made for."""
        planned = self._request
        request = request_with(step, planned.options, captured, planned.return_lse)._replace(split_keys=planned.split_keys)
        op, inputs = attention_of(q, cache, step, request, sinks)
        self._check(op, inputs)
        same = (op.k_scale, op.v_scale) == (self.op.k_scale, self.op.v_scale)  # type: ignore[attr-defined]
        plan = self if same else self.resized(dataclasses.replace(op, layout=self.op.layout))
        return plan.bind(inputs), inputs

    def _check(self, op: AttentionKVCache, inputs: dict[str, Array]) -> None:
        """Raises ProblemError where arrays are not what the plan was made for."""
        place = CPU if self.device.is_cpu else self.device.index
        for operand in self.op.inputs:
            operand.check(inputs.get(operand.name), self.library, place)
        for extra in {operand.name for operand in op.inputs} - {operand.name for operand in self.op.inputs}:
            raise ProblemError(f"{extra} was given; this plan was made without it: make another by rawattn.plan_kvcache.")
        for field in dataclasses.fields(op):
            value, planned = getattr(op, field.name), getattr(self.op, field.name)
            if value != planned and field.name not in ("layout", "k_scale", "v_scale"):
                what = _WORDS.get(field.name, field.name)
                raise ProblemError(
                    f"{what} gives {value}, and this plan was made for {planned}; make another by rawattn.plan_kvcache."
                )
        if self.program is None:
            return
        kernel, reads_otherwise = self.selection.kernel, op.layout.tma_unsupported
        reason = kernel.layout_reason(op.layout) or kernel.legal(self.config, op, self.device)
        if reason is None and reads_otherwise:
            launches = kernel.lower(op, self.config, self.device).launches
            if [launch.source.key for launch in launches] != [launch.source.key for launch in self.program.launches]:
                reason = f"{reads_otherwise}; or make another plan, by rawattn.plan_kvcache: a kernel of this one reads by TMA"
        if reason is not None:
            raise ProblemError(f"{reason}.")

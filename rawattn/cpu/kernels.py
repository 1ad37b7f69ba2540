"""The CPU path as kernels, of the contract that those of a GPU have."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..driver.device import Device
from ..operation import Backward, Forward, host_functions
from ..operation.keys import ListedKeys
from ..operation.operand import Layout
from ..reference.formula import Dropped
from ..variant.mask import kept_pairs
from .backward import run_backward
from .caches import append, attend, combine
from .cost import PRODUCTS_PER_SECOND, SECONDS_PER_NUMBER, SECONDS_PER_THREAD, SECONDS_PER_UNIT, backward_seconds, threads_for
from .forward import CpuConfig, run_forward, sequences_alone, undefined_reason
from .lists import ListedSequence, run_lists
from .units import Array, sequences_of


def _count_queries(config: CpuConfig, op: Forward) -> int:
    """Queries of a unit."""
    return max(1, config.tile_q // op.heads_per_kv)


class Cpu:
    """The CPU path as a kernel: the contract of ``kernel.base.Kernel``, but for launches. ``run`` takes their place."""

    name = "cpu"
    alignment = 1
    places_back = 1.5
    config_type = CpuConfig

    def runs_on(self, device: Device) -> bool:
        """Says whether the device is a CPU."""
        return device.is_cpu

    def supports(self, op: Forward, device: Device) -> list[str]:
        """The reasons why the CPU path does not compute the operation on the device; none where it does."""
        reasons = [] if device.is_cpu else [f"it runs on the CPU, and the arrays are on {device.name}"]
        for which in ("head_dim", "head_dim_v"):
            if getattr(op, which) > 1024:
                reasons.append(f"{which} is {getattr(op, which)}; it takes up to 1024")
        if op.score.logit is None:
            reasons.append(f"it takes scores with a definition in Python, logit(...), and {type(op.score).__name__} has none")
        if op.constant_time:
            reasons.append("a CPU takes longer for some numbers, such as subnormal ones; constant_time is for GPUs")
        if (reason := undefined_reason(op.mask)) is not None:
            reasons.append(reason)
        return reasons

    def meant_for(self, op: Any, device: Device) -> bool:
        """Says whether this kernel computes on the device."""
        return self.runs_on(device)

    def prefers(self, op: Any, device: Device) -> bool:
        """True: nothing goes before it on the CPU."""
        return True

    def layout_reason(self, layout: Layout) -> str | None:
        """None: it reads whatever NumPy reads."""
        return None

    def legal(self, config: CpuConfig, op: Forward, device: Device) -> str | None:
        """The reason why the configuration cannot run the operation; None where it can."""
        for which, value in dataclasses.asdict(config).items():
            if not isinstance(value, int) or not 1 <= value <= 4096:
                return f"{which} is {value!r}; it must be an int from 1 to 4096"
        return None

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        """Only ``op``: the loops are compiled once for all configurations."""
        return (op,)

    def is_tried(self, op: Forward) -> bool:
        """Registers are the compiler's own."""
        return False

    def candidates(self, op: Forward, device: Device) -> list[CpuConfig]:
        """The legal configurations worth comparing."""
        tile_kv = 96 if op.head_dim + op.head_dim_v <= 512 else 48  # so that its keys and values stay in the L2 cache
        threads = {min(1 << i, device.sm_count) for i in range(device.sm_count.bit_length() + 1)}
        return [CpuConfig(tile_q, tile_kv, count) for tile_q in (512, 256, 128, 64, 32, 16) for count in sorted(threads)]

    def cost(self, config: CpuConfig, op: Forward, device: Device) -> float:
        """Estimated seconds: the units that fall to one thread, and the start of the threads."""
        queries, batch = _count_queries(config, op), max(1, op.batch)
        kept = kept_pairs(op.spec.placed_mask, op.q_len, op.kv_len) / max(1, op.q_len)
        fetched, used = (min(op.kv_len, kept + (rows + config.tile_kv) / 2) for rows in (queries, 16))
        rows = math.ceil(min(queries, op.q_len) * op.heads_per_kv / 16) * 16
        rate = PRODUCTS_PER_SECOND / (2 if op.element.name == "fp64" else 1)
        unit = (op.head_dim + op.head_dim_v) * (used * rows / rate + fetched * SECONDS_PER_NUMBER[op.element.name])
        units = op.batch * op.kv_heads * math.ceil(op.total_q / batch / queries)
        threads = max(1, min(config.threads, units))
        return math.ceil(units / threads) * (SECONDS_PER_UNIT + unit) + (threads - 1) * SECONDS_PER_THREAD

    def run(
        self, op: Forward, config: CpuConfig, q: Array, k: Array, v: Array, o: Array, lse: Array | None = None,
        cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None, sinks: Array | None = None,
        q_lens: Array | None = None, kv_lens: Array | None = None, seed: Array | None = None, keys: Array | None = None,
        keys_counts: Array | None = None, **captured: Array,
    ) -> None:  # fmt: skip
        """Computes the operation on NumPy arrays of its shapes, ``captured`` of which its functions captured: ``run_forward``."""
        lengths = (cu_seqlens_q, cu_seqlens_kv, q_lens, kv_lens)
        spec, dropped = host_functions.for_loops(op.spec, captured, lengths[:2]), Dropped.of(op.spec, seed)
        options = spec.placed_mask, spec.placed_score, op.scale, sinks
        if keys is not None:
            places = sequences_of(q, k, *lengths[:2])
            each = sequences_alone(q, k, v, o, lse, *options[:2], places, q_lens, kv_lens)
            return run_lists(
                [*map(ListedSequence.of, each, [place[0] for place in places])], op, keys, keys_counts, sinks, config
            )
        run_forward(q, k, v, o, lse, *options, *lengths, dropped, config=config, invariant=op.invariant)

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class CpuBackwardConfig:
    """Threads."""

    threads: int = 1


class CpuBackward(Cpu):
    """The gradients on the CPU as a kernel."""

    config_type = CpuBackwardConfig  # type: ignore[assignment]

    def supports(self, op: Backward, device: Device) -> list[str]:  # type: ignore[override]
        """The reasons why the CPU path does not compute the operation; none where it does."""
        reasons, score = super().supports(op.forward, device), op.forward.score
        if device.is_cpu and score.slope is None:
            reasons.append(f"it needs the derivative of the score, slope(...), and {type(score).__name__} has none")
        return reasons

    def candidates(self, op: Any, device: Device) -> list[Any]:
        """The configuration with as many threads as pay."""
        return [CpuBackwardConfig(threads_for(self.cost(CpuBackwardConfig(), op, device), device))]

    def cost(self, config: Any, op: Any, device: Device) -> float:
        """Estimated seconds."""
        forward = op.forward
        seconds = backward_seconds(forward.pairs * forward.batch * forward.heads, forward.head_dim + forward.head_dim_v)
        return seconds / config.threads + config.threads * SECONDS_PER_THREAD

    def run(self, op: Any, config: Any, seed: Array | None = None, **arrays: Any) -> None:  # type: ignore[override]
        """Computes the operation on NumPy arrays, by name: ``run_backward``."""
        inputs = {each.name: arrays.pop(each.name) for each in op.captured}
        starts = arrays.get("cu_seqlens_q"), arrays.get("cu_seqlens_kv")
        spec, scale = host_functions.for_loops(op.forward.spec, inputs, starts), op.forward.scale
        options = {"mask": spec.placed_mask, "score": spec.placed_score, "scale": scale, "dropped": Dropped.of(spec, seed)}
        captured = {int(name.rpartition("_")[2]): arrays.pop(f"d{name}") for name in op.wrt}
        numbers: dict[str, Any] = {name: arrays.pop(name) for name in ("keys", "keys_counts") if name in arrays}
        lists = ListedKeys(op.forward.spec.keys, numbers, op.forward.heads) if numbers else None
        run_backward(**arrays, **options, captured=captured, lists=lists, threads=config.threads)


@dataclasses.dataclass(frozen=True)
class CpuCacheConfig:
    """The most threads that compute."""

    threads: int = 1


class CpuCache(Cpu):
    """This is what the kernels have in common that compute on the CPU over caches."""

    config_type = CpuCacheConfig  # type: ignore[assignment]

    def supports(self, op: Any, device: Device) -> list[str]:
        """The reasons why the CPU path does not compute the operation on the device; none where it does."""
        return [] if device.is_cpu else [f"it runs on the CPU, and the arrays are on {device.name}"]

    def candidates(self, op: Any, device: Device) -> list[Any]:
        """The configuration of one thread."""
        return [CpuCacheConfig()]

    def cost(self, config: Any, op: Any, device: Device) -> float:
        """Estimated seconds."""
        return op.bytes * 1e-9 + op.flops * 1e-10 / config.threads


class CpuAttentionKVCache(CpuCache):
    """Attention over caches. Threads are as many as the lengths are worth, up to those of the configuration."""

    def supports(self, op: Any, device: Device) -> list[str]:
        """The reasons why the CPU path does not compute the operation on the device; none where it does."""
        reasons = super().supports(op, device)
        if op.widest > 1024:
            reasons.append(f"head_dim is {op.widest}; it takes up to 1024")
        if op.score.logit is None:
            reasons.append(f"it takes scores with a definition in Python, logit(...), and {type(op.score).__name__} has none")
        if (reason := undefined_reason(op.mask)) is not None:
            reasons.append(reason)
        return reasons

    def candidates(self, op: Any, device: Device) -> list[Any]:
        """The configuration of all threads."""
        return [CpuCacheConfig(device.sm_count)]

    def run(self, op: Any, config: Any, **views: Any) -> None:  # type: ignore[override]
        """Computes the operation on NumPy arrays, by name."""
        attend(op, config.threads, views, views["o"], views.get("lse"))


class CpuAppend(CpuCache):
    """New keys and values."""

    def run(self, op: Any, config: Any, **views: Any) -> None:  # type: ignore[override]
        """Computes the operation on NumPy arrays, by name."""
        append(op, views | ({"q_out": views["q"]} if op.in_place else {}))


class CpuCombine(CpuCache):
    """Results over different keys merged."""

    def run(self, op: Any, config: Any, **views: Any) -> None:  # type: ignore[override]
        """Computes the operation on NumPy arrays, by name."""
        combine(op, views)


CPU, CPU_BACKWARD = Cpu(), CpuBackward()
CPU_KVCACHE, CPU_APPEND, CPU_COMBINE = CpuAttentionKVCache(), CpuAppend(), CpuCombine()

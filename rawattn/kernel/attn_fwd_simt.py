"""attn_fwd_simt.cu: forward attention of any number format, stride and GPU, in plain CUDA C."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..operation.operand import Layout
from ..variant import Option, element, kv, softmax, store
from ..variant.field import Field, Fields, View
from . import tiling
from .base import ForwardKernel
from .render import config_header, source


@dataclasses.dataclass(frozen=True)
class AttnFwdSimtConfig:
    """The configuration of attn_fwd_simt.cu."""

    tile_q: int = 64
    tile_kv: int = 64
    chunk: int = 64  # columns of K that are in shared memory at a time
    v_chunk: int = 64  # ... and of V
    threads: int = 256
    ctas_per_sm: int = 1  # blocks on a multiprocessor


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def smem_bytes(config: AttnFwdSimtConfig, op: Forward) -> int:
    """Shared memory of a block: Q, a part of K or V, and P, each row a vector of 16 bytes longer than its numbers."""
    size = 8 if op.element == element.FP64 else 4
    q = config.tile_q * (size * _round_up(op.head_dim, config.chunk) + 16)
    kv = config.tile_kv * (size * max(config.chunk, config.v_chunk) + 16)
    return q + kv + config.tile_q * (size * config.tile_kv + 16)


def registers(config: AttnFwdSimtConfig, op: Forward) -> int:
    """Registers of a thread, about: O; S, of which there are two where it has chunks, or a part of O; the vectors that are
    multiplied; and the rest, fitted to what ptxas uses."""
    words = 2 if op.element == element.FP64 else 1
    rows_each, keys_each = config.tile_q * 16 // config.threads, config.tile_kv // 16
    columns_each = _round_up(op.head_dim_v, config.v_chunk) // 16
    sums = max(keys_each if op.head_dim <= config.chunk else 2 * keys_each, config.v_chunk // 16)
    return words * rows_each * (sums + columns_each + 2) + 4 * (rows_each + keys_each) + 52


class AttnFwdSimt(ForwardKernel):
    """The kernel and its cost model."""

    name = "attn_fwd_simt"
    needs = "a GPU of compute capability 7.5 or newer"
    file = "attn_fwd_simt.cu"
    alignment = 1  # any
    config_type = AttnFwdSimtConfig

    def runs_on(self, device: Device) -> bool:
        return device.capability >= 75

    def supports(self, op: Forward, device: Device) -> list[str]:
        reasons = self.device_reasons(device)
        sizes = {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
        reasons += [f"{which} is {size}; it takes up to 512" for which, size in sizes.items() if size > 512]
        if op.constant_time and op.element == element.FP64:
            reasons.append("it takes longer for some numbers of fp64; constant_time is for bf16, fp16 and fp32")
        reasons += tiling.function_reasons(op)
        return reasons + tiling.too_many_tiles(op, 8)

    def layout_reason(self, layout: Layout) -> str | None:
        return None

    def legal(self, config: AttnFwdSimtConfig, op: Forward, device: Device) -> str | None:
        if config.threads % 32 or not 32 <= config.threads <= 1024 or config.tile_q % (config.threads // 16) or config.tile_q < 1:
            return f"threads is {config.threads}, tile_q {config.tile_q}; they must be multiples of 32 and of threads / 16"
        for which in ("tile_kv", "chunk", "v_chunk"):
            if getattr(config, which) % 16 or getattr(config, which) < 16:
                return f"{which} is {getattr(config, which)}; it must be a multiple of 16"
        if reasons := tiling.too_many_tiles(op, config.tile_q):
            return reasons[0]
        if config.ctas_per_sm < 1:
            return f"ctas_per_sm is {config.ctas_per_sm}; it must be at least 1"
        if reason := tiling.too_much_smem(smem_bytes(config, op), config.ctas_per_sm, device):
            return reason
        limit = min(255, 65536 // (config.threads * config.ctas_per_sm) // 8 * 8)
        if registers(config, op) > limit:
            return f"a thread needs about {registers(config, op)} registers; above {limit} it spills"
        return None

    def candidates(self, op: Forward, device: Device) -> list[AttnFwdSimtConfig]:
        """Every legal configuration worth comparing, with as many blocks as fit."""
        widths = {min(_round_up(n, 16), limit) for n in (op.head_dim, op.head_dim_v) for limit in (64, 128)}
        configs = []
        for threads in (256, 128):
            for rows_each in (8, 4, 2, 1):
                for tile_kv in (64, 32, 16):
                    for width in sorted(widths, reverse=True):
                        chunk, v_chunk = (min(_round_up(n, 16), width) for n in (op.head_dim, op.head_dim_v))
                        tile_q = rows_each * threads // 16
                        fitting = [AttnFwdSimtConfig(tile_q, tile_kv, chunk, v_chunk, threads, ctas) for ctas in (4, 3, 2, 1)]
                        configs += [c for c in fitting if self.legal(c, op, device) is None][:1]
        return configs

    def cost(self, config: AttnFwdSimtConfig, op: Forward, device: Device) -> float:
        """Estimated seconds, to compare configurations: multiplications and loads from shared memory share the issue slots."""
        rows_each, keys_each = config.tile_q * 16 // config.threads, config.tile_kv // 16
        vectors = (rows_each + keys_each) / (rows_each * keys_each) + 1 / 4 + 1 / rows_each
        warps = min(config.ctas_per_sm * config.threads / 32, 16)
        count = -(-op.q_len // config.tile_q) * op.batch * op.heads
        waves = max(1.0, count / (device.sm_count * config.ctas_per_sm))
        work = config.tile_q * config.ctas_per_sm * max(1, op.kv_len) * (op.head_dim + op.head_dim_v)
        return waves * work * (1 + vectors) * (1 + 2 / warps) / 128 / 1.5e9

    def options(self, op: Forward, config: AttnFwdSimtConfig) -> dict[str, Option]:
        out = store.StoreOLse() if op.return_lse else store.StoreO()
        scheduler = tiling.lpt_scheduler(op, persistent=False)
        walk = tiling.cursor(op)
        return tiling.options(op, Softmax=softmax.Plain(), Kv=kv.NumbersKv(), Scheduler=scheduler, Store=out, Walk=walk)

    def fields(self, op: Forward, config: AttnFwdSimtConfig) -> Fields:
        return tiling.fields([Field(name, "StridedTensor", View(name)) for name in "qkv"], self.options(op, config))

    def constants(self, op: Any, config: AttnFwdSimtConfig) -> dict[str, int]:
        """The constants of a configuration, in order."""
        dims = {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
        return {**dataclasses.asdict(config), **dims, "q_sign": -1 if op.scale < 0 else 1}

    def render(self, op: Forward, config: AttnFwdSimtConfig, arch: str) -> Source:
        constants = self.constants(op, config)
        return source(self.file, config_header(constants, self.fields(op, config), [], self.options(op, config)), arch)

    def values(self, op: Forward, config: AttnFwdSimtConfig, device: Device) -> dict[str, float]:
        return tiling.values(op, config.tile_q, device)


ATTN_FWD_SIMT = AttnFwdSimt()

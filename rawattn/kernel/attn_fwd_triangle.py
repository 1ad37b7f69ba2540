"""attn_fwd_triangle.cu: the forward on Hopper with a bias of pairs that many entries of the batch share."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..operation.operand import Layout
from ..variant import Option, rows, store
from ..variant.element import BF16
from ..variant.field import Field, Fields, Scratch, TensorMap
from . import tiling, triangle
from .base import OneLaunch
from .program import Program
from .render import config_header, source, wgmma

WIDEST = 64


@dataclasses.dataclass(frozen=True)
class AttnFwdTriangleConfig:
    """The configuration of attn_fwd_triangle.cu."""

    rows: int = 4  # entries of the batch whose states a warpgroup keeps
    consumers: int = 2  # warpgroups, of 64 queries each
    stages: int = 4  # tiles of K and of V
    polynomial_each: int = 0  # one exponential of so many is a polynomial; 0 for none

    @property
    def registers(self) -> tuple[int, int]:
        """Those of a thread of the producer and of a consumer."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.consumers]


def smem_bytes(config: AttnFwdTriangleConfig, op: Forward) -> int:
    """Shared memory of a block, at most."""
    return 8192 * (config.rows * config.consumers + 2 * config.stages) + triangle.TILE_BYTES * config.consumers + 1024


def accumulators(config: AttnFwdTriangleConfig, op: Forward) -> int:
    """The registers of a thread for states, S, P and the bias."""
    return config.rows * (-(-op.head_dim_v // 8) * 4 + 4) + 32 + 16 + 32


class AttnFwdTriangle(OneLaunch[Forward]):
    """The kernel and its cost model."""

    name = "attn_fwd_triangle"
    needs = "a Hopper GPU (compute capability 9.0)"
    file: ClassVar[str] = "attn_fwd_triangle.cu"
    config_type = AttnFwdTriangleConfig
    takes_numbers = False  # how many entries of the batch share a bias is one
    places_back = 3.5  # behind attn_fwd_mma

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Forward, device: Device) -> bool:
        return False  # others compute what it refuses

    def prefers(self, op: Forward, device: Device) -> bool:
        return triangle.prefers(op)

    def supports(self, op: Forward, device: Device) -> list[str]:
        refusals = self.device_reasons(device) + tiling.tensor_core_reasons(op, WIDEST) + triangle.reasons(op)
        refusals += tiling.too_many_tiles(op, triangle.SIDE)
        return refusals + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        """Only ``op``: the configuration follows from its kind."""
        return (op,)

    def legal(self, config: AttnFwdTriangleConfig, op: Forward, device: Device) -> str | None:
        if config.consumers not in (1, 2, 3) or config.rows < 1 or config.stages < 2:
            values = f"rows is {config.rows}, consumers {config.consumers}, stages {config.stages}"
            return f"{values}; they must be at least 1, from 1 to 3, and at least 2"
        if config.polynomial_each and (op.element != BF16 or config.polynomial_each < 2):
            return f"polynomial_each is {config.polynomial_each} in {op.element.name}; it must be 0, or at least 2 in bf16"
        if reason := tiling.too_large_block(smem_bytes(config, op), device):
            return reason
        count, limit = accumulators(config, op), {1: 216, 2: 200, 3: 128}[config.consumers]
        return f"its accumulators take {count} registers of a thread; above {limit} it spills" if count > limit else None

    def candidates(self, op: Forward, device: Device) -> list[AttnFwdTriangleConfig]:
        """Any number of entries at once: with many of them the bias comes seldom, with fewer the last works are fuller."""
        return [config for config in map(AttnFwdTriangleConfig, range(1, 7)) if self.legal(config, op, device) is None]

    def cost(self, config: AttnFwdTriangleConfig, op: Forward, device: Device) -> float:
        """A unit takes the clocks of its exponentials and what they wait, or of its bytes from L2, of which 21 come a clock."""
        strips = config.consumers
        bytes_each = triangle.TILE_BYTES / config.rows + 128 * (op.head_dim + op.head_dim_v) / strips
        works = triangle.count_works(op, config.rows, op.q_len, triangle.SIDE * strips)
        units = config.rows * strips * -(-op.kv_len // triangle.SIDE)  # of a work
        clocks = -(-works // device.sm_count) * units * max(340.0, bytes_each / 21)
        return clocks / 1.755e9 + 8e-6

    def options(self, op: Forward, config: AttnFwdTriangleConfig) -> dict[str, Option]:
        return {
            "Element": op.element, "Rows": rows.Dense(), "Keys": triangle.keys_option(op),
            "Exponent": triangle.MixedEx2(config.polynomial_each) if config.polynomial_each else triangle.Ex2(),
            "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        }  # fmt: skip

    def fields(self, op: Forward, config: AttnFwdTriangleConfig) -> Fields:
        tensors = tuple(Field(name, "TmaTensor", TensorMap(name, triangle.SIDE)) for name in "qkv")
        of_options = (field for option in self.options(op, config).values() for field in option.fields)
        tiles = Field("tiles", "float*", Scratch("bias_tiles"))
        return tuple(dict.fromkeys((*tensors, tiles, Field("scale", "float"), *triangle.SIZES, *of_options)))

    def render(self, op: Forward, config: AttnFwdTriangleConfig, arch: str) -> Source:
        producer, consumer = config.registers
        constants = {
            "rows": config.rows, "consumers": config.consumers, "stages": config.stages, "head_dim": op.head_dim,
            "head_dim_v": op.head_dim_v, "producer_registers": producer, "consumer_registers": consumer, "m_tiles_per_warp": 1,
        }  # fmt: skip
        products = [
            wgmma("QkMma", op.element, triangle.SIDE, a_in_registers=False, b_by_rows=False),
            wgmma("PvMma", op.element, op.head_dim_v, a_in_registers=True, b_by_rows=True),
        ]
        return source(self.file, config_header(constants, self.fields(op, config), products, self.options(op, config)), arch)

    def rendered_kind(self, op: Forward, config: AttnFwdTriangleConfig) -> tuple[object, ...]:
        return op.element, op.head_dim, op.head_dim_v, triangle.keys_option(op), op.return_lse

    def values(self, op: Forward, config: AttnFwdTriangleConfig, device: Device) -> dict[str, float]:
        return triangle.values(op)

    def grid(self, op: Forward, config: AttnFwdTriangleConfig, device: Device) -> int:
        return min(triangle.count_works(op, config.rows, op.q_len, triangle.SIDE * config.consumers), device.sm_count)

    def lower(self, op: Forward, config: AttnFwdTriangleConfig, device: Device) -> Program:
        launches, buffers = triangle.before(op, device, (triangle.TilesOfQueries(),))
        return Program((*launches, self.launch(op, config, device)), tuple(buffers))


ATTN_FWD_TRIANGLE = AttnFwdTriangle()

"""attn_bwd_triangle_dkdv.cu, attn_bwd_triangle_dq.cu and pair_sums.cu: gradients on Hopper with a bias of pairs that many
entries of the batch share, and that of the bias."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import Layout
from ..variant import Option
from ..variant.element import FP32, Item
from ..variant.field import Field, Fields, Pointer, Scratch, Value
from ..variant.gradients import DK_DV, DQ
from ..variant.mask import Full
from ..variant.scheduler import launch_of
from . import backward, tiling, triangle
from .attn_bwd_captured import clear
from .backward import BackwardKernel, DeltaPass
from .program import Buffer, Launch, Program
from .render import config_header, source, wgmma

WIDEST, MOST_PARTS = 64, 32
MOST_SUMS = 1 << 28  # bytes of the sums of all parts, where there are several


class AddedPairSum(Option):
    """dS is summed over the batch, for the gradient of the bias."""

    source: ClassVar[str] = "variant/pair_sum/added.cuh"
    fields: ClassVar[Fields] = (Field("sums", "float*", Scratch("pair_sums")),)


class NoPairSum(Option):
    """The bias has no gradient."""

    source: ClassVar[str] = "variant/pair_sum/none.cuh"


@dataclasses.dataclass(frozen=True)
class AttnBwdTriangleConfig:
    """The configuration of attn_bwd_triangle_dkdv.cu and attn_bwd_triangle_dq.cu."""

    kv_rows: int = 3  # entries of the batch whose dk and dv a warpgroup keeps
    q_rows: int = 3  # and whose dq
    kv_stages: int = 3  # tiles of Q and dO
    q_stages: int = 3  # tiles of K and V
    consumers: int = 2  # warpgroups of both kernels
    parts: int = 0  # of the batch, with sums of their own; 0 for what sizes suggest

    @property
    def registers(self) -> tuple[int, int]:
        """Those of a thread of the producer and of a consumer."""
        return {1: (56, 256), 2: (24, 240)}[self.consumers]


def smem_bytes(config: AttnBwdTriangleConfig) -> int:
    """Shared memory of a block, at most: the larger of the two kernels'."""
    kv = (
        16384 * (config.kv_rows * config.consumers + config.kv_stages)
        + triangle.TILE_BYTES * config.consumers
        + 512 * config.kv_stages
    )
    q = 16384 * (config.q_rows * config.consumers + config.q_stages) + triangle.TILE_BYTES * config.consumers
    q += 512 * config.q_rows * config.consumers
    return max(kv, q) + 1024


def accumulators(config: AttnBwdTriangleConfig, op: Forward) -> int:
    """The registers of a thread, at most, for sums, S, dP, the bias and what is multiplied."""
    qk, v = -(-op.head_dim // 8) * 4, -(-op.head_dim_v // 8) * 4
    return max(config.kv_rows * (qk + v) + 96 + 16, config.q_rows * qk + 128 + 16)


class AttnBwdTriangle(BackwardKernel):
    """The kernels and their launches."""

    name = "attn_bwd_triangle"
    needs = "a Hopper GPU (compute capability 9.0)"
    config_type = AttnBwdTriangleConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Backward, device: Device) -> bool:
        return False  # others compute what it refuses

    def prefers(self, op: Backward, device: Device) -> bool:
        return triangle.prefers(op.forward)

    def supports(self, op: Backward, device: Device) -> list[str]:
        refusals = self.device_reasons(device) + tiling.tensor_core_reasons(op.forward, WIDEST) + triangle.reasons(op.forward)
        refusals += backward.reasons(op, triangle.SIDE, triangle.SIDE)
        bias = triangle.bias_of(op.forward)
        if bias is not None and {*op.wrt} - {bias.array.name}:
            refusals.append("it makes no gradient of a bias of keys")
        return refusals + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported or layout.unaligned

    def legal(self, config: AttnBwdTriangleConfig, op: Backward, device: Device) -> str | None:
        numbers = (config.kv_rows, config.q_rows, config.kv_stages, config.q_stages)
        if config.consumers not in (1, 2) or min(numbers) < 1 or min(numbers[2:]) < 2 or config.parts < 0:
            values = f"consumers is {config.consumers}, rows and stages {numbers}, parts {config.parts}"
            return f"{values}; they must be 1 or 2, at least 1, 2 and 0"
        if reason := tiling.too_large_block(smem_bytes(config), device):
            return reason
        count, limit = accumulators(config, op.forward), {1: 220, 2: 216}[config.consumers]
        return f"its accumulators take {count} registers of a thread; above {limit} it spills" if count > limit else None

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdTriangleConfig]:
        """The one with the most entries at once, of those that there are. Four whose dq is kept spill some 64 bytes above 24
        columns."""
        bias = triangle.bias_of(op.forward)
        assert bias is not None
        kv_most, q_most = min(4, bias.shared), min(4 if op.forward.head_dim <= 24 else 3, bias.shared)
        found = [AttnBwdTriangleConfig(kv, q) for kv in range(kv_most, 0, -1) for q in range(q_most, 0, -1)]
        return [config for config in found if self.legal(config, op, device) is None][:1]

    def cost(self, config: AttnBwdTriangleConfig, op: Backward, device: Device) -> float:
        return triangle.least_seconds(op.forward, 870, device)

    def lower(self, op: Backward, config: AttnBwdTriangleConfig, device: Device) -> Program:
        forward, side = op.forward, triangle.SIDE
        plain = dataclasses.replace(op, forward=tiling.with_mask(forward, Full()))
        shared = backward.values(plain.forward, side, side) | triangle.values(forward)
        before, buffers = triangle.before(forward, device, (triangle.TilesOfQueries(), triangle.TilesOfKeys()))
        parts, part_rows = find_parts(forward, config, device)
        q_rows = side * config.consumers
        grids = [
            min(device.sm_count, triangle.count_works(forward, rows, length, q_rows))
            for rows, length in ((config.kv_rows, forward.kv_len), (part_rows, forward.q_len))
        ]
        kind = functools.partial(self._launch, op, config, device)
        launches = [kind("attn_bwd_triangle_dkdv", shared, grids[0], _render_dkdv)]
        launches.append(kind("attn_bwd_triangle_dq", shared | {"part_rows": part_rows}, grids[1], _render_dq))
        if op.wrt:
            more, buffer = self._sum(op, device, shared | {"part_rows": part_rows}, parts)
            launches += more
            buffers.append(buffer)
        return self.program(plain, device, DeltaPass(side, side, 8), [*before, *launches], _nothing_captured, tuple(buffers))

    def _launch(
        self, op: Backward, config: AttnBwdTriangleConfig, device: Device, name: str, values: dict[str, float], grid: int,
        render: Any,
    ) -> Launch:  # fmt: skip
        rendered = self._keep((name, op.kind, config, device.arch), lambda: render(op, config, device.arch))
        return Launch(name, *rendered, values, grid)

    def _sum(self, op: Backward, device: Device, values: dict[str, float], parts: int) -> tuple[list[Launch], Buffer]:
        """The launches that make the gradient of the bias of its sums, and the memory of these."""
        bias, forward = triangle.bias_of(op.forward), op.forward
        assert bias is not None
        array, steps = bias.array, _find_steps(bias)
        values = values | steps | {"heads_each": 1 if bias.head is not None else forward.heads}
        tiles = triangle.count_tiles(forward)
        rendered = _render_sums(array.name, array.element, device.arch)
        launches = [Launch("pair_sums", *rendered, values, min(tiles, 16 * device.sm_count))]
        count, pairs = math.prod(array.shape), bias.biases * forward.q_len * forward.kv_len
        if count != pairs * (1 if bias.head is None else forward.heads):  # some elements belong to no pair
            launches.insert(0, clear(self, op, device, Pointer(f"d{array.name}"), Item(array.element).cuda_type, count))
        return launches, Buffer("pair_sums", parts * tiles * triangle.TILE_BYTES)


def _nothing_captured(*_: Any) -> tuple[list[Launch], list[Buffer]]:
    return [], []


def _find_steps(bias: triangle.PairBias) -> dict[str, int]:
    """The steps in the gradient, which is contiguous, from one bias, head and query to the next."""
    strides = [math.prod(bias.array.shape[axis + 1 :]) for axis in range(len(bias.array.shape))]
    axes = {"batch_step": bias.batch, "head_step": bias.head, "row_step": bias.query}
    return {name: 0 if axis is None else strides[axis] for name, axis in axes.items()}


def find_parts(op: Forward, config: AttnBwdTriangleConfig, device: Device) -> tuple[int, int]:
    """The parts of the entries that share a bias, which have sums of their own, and the entries of each: as many parts as give
    each multiprocessor a work, or leave few of them waiting, and whose sums take little memory."""
    bias = triangle.bias_of(op)
    assert bias is not None
    groups = -(-bias.shared // config.q_rows)
    most = max(1, min(MOST_PARTS, groups, MOST_SUMS // (triangle.count_tiles(op) * triangle.TILE_BYTES)))
    works = triangle.count_works(op, bias.shared, op.q_len, triangle.SIDE * config.consumers)

    def seconds(parts: int) -> float:
        return -(-works * parts // device.sm_count) * -(-groups // parts) + 0.02 * parts * works / device.sm_count

    wanted = config.parts or min(range(1, most + 1), key=seconds)
    rows = -(-groups // wanted) * config.q_rows
    return -(-bias.shared // rows), rows


def _constants(op: Forward, config: AttnBwdTriangleConfig, rows: int, stages: int) -> dict[str, int]:
    producer, consumer = config.registers
    return {
        "rows": rows, "consumers": config.consumers, "stages": stages, "head_dim": op.head_dim, "head_dim_v": op.head_dim_v,
        "producer_registers": producer, "consumer_registers": consumer, "tile_q": 64, "q_block": 64, "tile_kv": 64,
    }  # fmt: skip


def _products(op: Forward, **columns: int) -> list[str]:
    """The products S and dP, and those that are summed, by name, each with its number of columns."""
    found = [wgmma(name, op.element, triangle.SIDE, a_in_registers=False, b_by_rows=False) for name in ("SMma", "DpMma")]
    return found + [wgmma(name, op.element, width, a_in_registers=True, b_by_rows=True) for name, width in columns.items()]


def _fields(op: Forward, order: Option) -> Fields:
    tiles = Field("tiles", "float*", Scratch(triangle.TILES[order]))
    plain = tiling.with_mask(op, Full())
    return (*backward.loads(plain, 64, 64), *backward.STATISTICS, *backward.HEADS, tiles, *triangle.SIZES)


def _options(op: Forward, **more: Option) -> dict[str, Option]:
    return {"Element": op.element, "Keys": triangle.keys_option(op), **more}


def _render_dkdv(op: Backward, config: AttnBwdTriangleConfig, arch: str) -> tuple[Source, Fields]:
    forward = op.forward
    constants = _constants(forward, config, config.kv_rows, config.kv_stages)
    products = _products(forward, DvMma=forward.head_dim_v, DkMma=forward.head_dim)
    fields = (*_fields(forward, triangle.TilesOfKeys()), *DK_DV)
    return backward.rendered("attn_bwd_triangle_dkdv.cu", constants, fields, products, _options(forward), arch)


def _render_dq(op: Backward, config: AttnBwdTriangleConfig, arch: str) -> tuple[Source, Fields]:
    forward = op.forward
    constants = _constants(forward, config, config.q_rows, config.q_stages)
    every = _options(forward, PairSum=AddedPairSum() if op.wrt else NoPairSum())
    fields = (*_fields(forward, triangle.TilesOfQueries()), DQ, Field("part_rows", "i32"))
    products = _products(forward, DqMma=forward.head_dim)
    return backward.rendered("attn_bwd_triangle_dq.cu", constants, fields, products, every, arch)


@functools.lru_cache(maxsize=64)
def _render_sums(name: str, element: str, arch: str) -> tuple[Source, Fields]:
    item = Item(element)
    steps = tuple(Field(x, "i64") for x in ("batch_step", "head_step", "row_step"))
    counts = tuple(Field(x, "i32", Value()) for x in ("part_rows", "heads_each"))
    fields: Fields = (
        Field("gradient", f"{item.cuda_type}*", Pointer(f"d{name}")), Field("sums", "float*", Scratch("pair_sums")),
        *steps, *counts, *triangle.SIZES,
    )  # fmt: skip
    options: dict[str, Option] = {"Element": FP32, "Item": item, "Launch": launch_of(arch)}
    return source("pair_sums.cu", config_header({"threads": 128, "m_tiles_per_warp": 1}, fields, [], options), arch), fields


ATTN_BWD_TRIANGLE = AttnBwdTriangle()

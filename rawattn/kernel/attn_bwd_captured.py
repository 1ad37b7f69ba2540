"""attn_bwd_captured.cu, attn_bwd_captured_mma.cu, and the passes before and behind them: the gradients of arrays that a score
captured.

They follow the kernels that make dq, dk and dv, whichever these are, and read their scratch memory of each row. Sums of an
array's elements are cleared; then there is a launch for each element that the score reads, two for ``table[a] + table[b]``; then
the array's gradient is made of the sums. These are exact (``cuda_src/tile/exact_sum.cuh``), so that any block may add to any of
them; but an array with an element for each query and key has plain ones, to each of which one thread adds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..compiler import Source
from ..device import Device
from ..operation import Backward, Forward
from ..program import Buffer, Field, Fields, Launch, Pointer, Scratch
from ..trace.gradients import ElementGradient, by_elements, gathering, own_indices
from ..variant import Option
from ..variant.function import Captured, FunctionGradient, FunctionScore
from ..variant.gather import ExactSums, Gather, MmaLayout, OrderedSums, SimtLayout
from ..variant.item import Item
from ..variant.scheduler import Once, SharedTiles
from . import backward, tiling

THREADS = 256  # of the passes before and behind


class Config(NamedTuple):
    """The configuration of the kernels: by tensor cores or not; rows of a block, keys of a tile, rows of a block of scratch
    memory; the number of the element among the nodes of the score's code, and how its gradients are summed; how the
    statistics of rows lie."""

    tensor_cores: bool
    tile_q: int
    tile_kv: int
    q_block: int
    node: int
    way: str
    sums: ExactSums
    statistics: Option


def score_of(op: Forward) -> FunctionScore:
    """The score, which captured arrays."""
    assert isinstance(op.score, FunctionScore)
    return op.score


def launches(own: Any, op: Backward, device: Device, first: backward.FirstPass) -> tuple[list[Launch], list[Buffer]]:
    """The launches for the arrays in ``op.wrt``, and their scratch memory; ``own`` is the kernel that they follow, and ``first``
    its first pass."""
    found: list[Launch] = []
    buffers: list[Buffer] = []
    for i, array in enumerate(score_of(op.forward).arrays if op.wrt else ()):
        if array.name in op.wrt and 0 not in array.shape:
            each, buffer = _of_array(own, op, device, first, i, array)
            found += each
            buffers += buffer
    return found, buffers


def _of_array(
    own: Any, op: Backward, device: Device, first: backward.FirstPass, i: int, array: Captured
) -> tuple[list[Launch], list[Buffer]]:
    forward, count = op.forward, int(math.prod(array.shape))
    score, number = score_of(forward), forward.number
    reads = [each for each in by_elements(score.code) if each.array == i]
    ways = [way(score, each) for each in reads]
    ordered = ways == ["pairs"]
    in_place = ordered and array.element == number
    fill = Pointer(f"d{array.name}") if in_place else Scratch(f"d{array.name}_sums")
    sums = (OrderedSums if ordered else ExactSums)(fill)
    words = count * sums.bytes(number) // 4
    grid = min(-(-count // THREADS), 8 * device.sm_count)
    clear = min(-(-words // THREADS), 8 * device.sm_count)
    found = [own.launch(op, fill, device, "attn_bwd_captured_clear", {"words": words}, clear, _clear)]
    for each, how in zip(reads, ways, strict=True):
        found.append(_gather(own, op, device, first, each, how if ordered or how != "pairs" else "scattered", sums))
    if in_place:
        return found, []
    last = array.name, array.element, sums
    found.append(own.launch(op, last, device, "attn_bwd_captured_sum", {"elements": count}, grid, _sum))
    return found, [Buffer(f"d{array.name}_sums", 4 * words)]


def way(score: FunctionScore, each: ElementGradient) -> str:
    """Returns how the gradients of an element that a score reads are summed."""
    return gathering(each.load, [axis for node, axis in score.checked if node == each.node])


def _gather(
    own: Any, op: Backward, device: Device, first: backward.FirstPass, each: ElementGradient, how: str, sums: ExactSums
) -> Launch:
    """The launch for an element that the score reads."""
    forward, q_block, lie = op.forward, first.q_block, first.statistics
    if own.alignment == 16 and forward.element.itemsize == 2:  # kernels by tensor cores, whose conditions these are, too
        tile_kv = 64 if widest(forward) <= 128 and how != "pairs" else 32
        config = Config(True, min(64, q_block), tile_kv, q_block, each.node, how, sums, lie)
    else:
        config = Config(False, 32 if q_block % 32 == 0 else 16, 32, q_block, each.node, how, sums, lie)
    tile_q = config.tile_q
    values = backward.values(forward, q_block, config.tile_kv) | FunctionGradient(score_of(forward), each.node).values
    values["q_tiles"] = -(-(forward.total_q if forward.varlen else forward.q_len) // tile_q)
    if how == "pairs":
        apart = own_indices(each.load, [axis for node, axis in score_of(forward).checked if node == each.node])
        values["shared_batches"] = 1 if "b" in apart else forward.batch
        values["shared_heads"] = 1 if "h" in apart else forward.heads
        groups = forward.batch * forward.heads // max(1, values["shared_batches"] * values["shared_heads"])
        grid = int(values["q_tiles"] * groups)
    else:
        grid = forward.heads * backward.q_blocks(forward, tile_q)
    grid = grid if forward.total_q and forward.total_kv else 0  # indices are proved for pairs that there are
    name = "attn_bwd_captured_mma" if config.tensor_cores else "attn_bwd_captured"
    found: Launch = own.launch(op, config, device, name, values, grid, _captured)
    return found


def widest(op: Forward) -> int:
    """The larger head size."""
    return max(op.head_dim, op.head_dim_v)


def _captured(op: Forward, config: Config, arch: str) -> tuple[Source, Fields]:
    constants = {
        "tile_q": config.tile_q, "tile_kv": config.tile_kv, "q_block": config.q_block, "head_dim": op.head_dim,
        "head_dim_v": op.head_dim_v, "scale_sign": -1 if op.scale < 0 else 1,
    }  # fmt: skip
    if config.tensor_cores:
        file = "attn_bwd_captured_mma.cu"
        constants |= {"threads": 2 * config.tile_q, "ctas_per_sm": 3 if widest(op) <= 128 else 2}
    else:
        file = "attn_bwd_captured.cu"
        constants |= {"chunk": min(64, -(-widest(op) // 16) * 16)}
    layout: Option = MmaLayout() if config.tensor_cores else SimtLayout()
    plan: Option = SharedTiles() if config.way == "pairs" else Once(tiling.lpt_scheduler(op, persistent=False))
    every = backward.options(
        op, Score=op.spec.placed_score, Weight=op.spec.weight, Scheduler=plan, Walk=tiling.cursor(op, up=True),  # type: ignore
        Gradient=FunctionGradient(score_of(op), config.node), Sums=config.sums, Layout=layout,
        Gather=Gather(config.way), Statistics=config.statistics,
    )  # fmt: skip
    fields = (*backward.READS, *backward.STATISTICS, *backward.HEADS)
    return backward.rendered(file, constants, fields, [], every, arch)


def _clear(op: Forward, memory: Any, arch: str) -> tuple[Source, Fields]:
    fields = Field("memory", "u32*", memory), Field("words", "i64")
    return backward.rendered("attn_bwd_captured_clear.cu", {"threads": THREADS}, fields, [], {"Element": op.element}, arch)


def _sum(op: Forward, last: tuple[str, str, ExactSums], arch: str) -> tuple[Source, Fields]:
    name, element, sums = last
    fields = Field("gradient", "void*", Pointer(f"d{name}")), Field("elements", "i64")
    every: dict[str, Option] = {"Element": op.element, "Item": Item(element), "Sums": sums}
    return backward.rendered("attn_bwd_captured_sum.cu", {"threads": THREADS}, fields, [], every, arch)

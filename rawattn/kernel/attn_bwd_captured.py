"""attn_bwd_captured.cu, attn_bwd_captured_mma.cu, and the passes before and behind them: the gradients of arrays that a score
captured.

They follow the kernels that make dq, dk and dv, whichever these are, and read their scratch memory of each row. Sums of an
array's elements are cleared; then there is a launch for each element that the score reads, two for ``table[a] + table[b]``; then
the array's gradient is made of the sums. These are exact (``cuda_src/tile/exact_sum.cuh``), so that any block may add to any of
them; but an array with an element for each query and key has plain ones, to each of which one thread adds. Where no two pairs
share an element there are none: each is written once, in the array's format.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..trace.gradients import ElementGradient, by_elements, gathering, own_indices, slope
from ..trace.pair_axes import PairAxes
from ..variant import Option
from ..variant.element import Item
from ..variant.field import Field, Fields, Pointer, Scratch
from ..variant.function import Captured, FunctionGradient, FunctionScore
from ..variant.gather import ExactSums, Gather, MmaLayout, OrderedSums, SimtLayout, WrittenOnce
from ..variant.mask import Full
from ..variant.scheduler import Once, SharedTiles
from ..variant.walk import lists
from . import backward, tiling
from .program import Buffer, Launch

THREADS = 256  # of the passes before and behind


class AttnBwdCapturedConfig(NamedTuple):
    """The configuration of attn_bwd_captured.cu and attn_bwd_captured_mma.cu."""

    tensor_cores: bool  # attn_bwd_captured_mma.cu
    tile_q: int  # rows of a block
    tile_kv: int
    q_block: int  # rows of a block of scratch memory
    node: int  # the number of the element among the nodes of the score's code
    gathering: str  # how its gradients are summed
    sums: ExactSums | WrittenOnce
    statistics: Option  # how those of rows lie


def score_of(op: Forward) -> FunctionScore:
    """The operation's score, a function."""
    assert isinstance(op.score, FunctionScore)
    return op.score


def arrays_with_ds_gradient(op: Backward) -> dict[str, PairAxes]:
    """The arrays in ``op.wrt`` whose gradient is dS, that of the scaled dot product, in the call's own format, and their axes: a
    logit changes with the array's element as with s, no two pairs share an element, and TMA writes tiles of the gradient. Which
    arrays these are depends on no length."""
    score, arrays = op.forward.score, dict[str, PairAxes]()
    if not op.wrt or not isinstance(score, FunctionScore):
        return arrays
    reads, of_s = by_elements(score.code), slope(score.code.root)
    for i, array in enumerate(score.arrays):
        elements = [read for read in reads if read.array == i]
        if array.name not in op.wrt or f"d{array.name}" not in op.layout.tma_captured or len(elements) != 1:
            continue
        _, axes = score.pair_axes.get(elements[0].node, (i, None))
        if axes is not None and array.element == op.forward.element.name and elements[0].derivative is of_s:
            arrays[array.name] = axes
    return arrays


def _find_array(forward: Forward, name: str) -> Captured:
    return next(array for array in score_of(forward).arrays if array.name == name)


def is_cleared_for_ds(forward: Forward, name: str) -> bool:
    """Says whether the gradient of the array ``name``, which is dS, is cleared first: where lengths, or a mask whose tiles are a
    list, leave some of its tiles out, or where the array is larger than the pairs."""
    return lists(forward.mask) or not _has_pairs_alone(forward, math.prod(_find_array(forward, name).shape))


def cleared_for_ds(kernel: Any, op: Backward, device: Device, name: str) -> list[Launch]:
    """The launch that clears the gradient of the array ``name``, if it ``is_cleared_for_ds``."""
    if not is_cleared_for_ds(op.forward, name):
        return []
    array = _find_array(op.forward, name)
    count = math.prod(array.shape)
    if not op.forward.total_kv:  # no tensor map follows, for which the caller's memory is checked
        return [clear(kernel, op, device, Pointer(f"d{name}"), Item(array.element).cuda_type, count)]
    return [clear(kernel, op, device, Pointer(f"d{name}"), "u64", count // 4)]  # rows are multiples of 16 bytes


def make_launches(
    kernel: Any, op: Backward, device: Device, first: backward.DeltaPass, stored: str = ""
) -> tuple[list[Launch], list[Buffer]]:
    """The launches for the arrays in ``op.wrt`` but ``stored``, and their scratch memory; they follow those of ``kernel``, whose
    first pass is ``first``."""
    launches: list[Launch] = []
    buffers: list[Buffer] = []
    for i, array in enumerate(score_of(op.forward).arrays if op.wrt else ()):
        if array.name in op.wrt and array.name != stored and 0 not in array.shape:
            array_launches, array_buffers = _launch_array(kernel, op, device, first, i, array)
            launches += array_launches
            buffers += array_buffers
    return launches, buffers


def _launch_array(
    kernel: Any, op: Backward, device: Device, first: backward.DeltaPass, i: int, array: Captured
) -> tuple[list[Launch], list[Buffer]]:
    forward, count = op.forward, int(math.prod(array.shape))
    score, number = score_of(forward), forward.number
    reads = [read for read in by_elements(score.code) if read.array == i]
    gatherings = [gathering_of(score, read) for read in reads]
    ordered, gradient = gatherings == ["pairs"], Pointer(f"d{array.name}")
    if ordered and sharing(forward, reads[0]) == (1, 1):
        written = WrittenOnce(gradient, array.element)
        gather = _gather(kernel, op, device, first, reads[0], "pairs", written)
        if _has_every_pair(forward, count):
            return [gather], []
        return [clear(kernel, op, device, gradient, Item(array.element).cuda_type, count), gather], []
    in_place = ordered and array.element == number
    fill = gradient if in_place else Scratch(f"d{array.name}_sums")
    sums = (OrderedSums if ordered else ExactSums)(fill)
    words = count * sums.bytes(number) // 4
    launches = [clear(kernel, op, device, fill, "u32", words)]
    for read, how in zip(reads, gatherings, strict=True):
        launches.append(_gather(kernel, op, device, first, read, how if ordered or how != "pairs" else "diagonals", sums))
    if in_place:
        return launches, []
    grid = min(-(-count // THREADS), 8 * device.sm_count)
    last = array.name, array.element, sums
    launches.append(kernel.launch(op, last, device, "attn_bwd_captured_sum", {"elements": count}, grid, _render_sum))
    return launches, [Buffer(f"d{array.name}_sums", 4 * words)]


def gathering_of(score: FunctionScore, read: ElementGradient) -> str:
    """The way in which the gradients of an element that a score reads are summed."""
    return gathering(read.load, [axis for node, axis in score.checked if node == read.node])


def sharing(forward: Forward, read: ElementGradient) -> tuple[int, int]:
    """The numbers of sequences and of heads that share an element, where the array has one for each query and key."""
    apart = own_indices(read.load, [axis for node, axis in score_of(forward).checked if node == read.node])
    return 1 if "b" in apart else forward.batch, 1 if "h" in apart else forward.heads


def _has_every_pair(forward: Forward, count: int) -> bool:
    """Says whether an array of ``count`` elements has one for each pair and no others, and the mask keeps every pair."""
    return isinstance(forward.mask, Full) and _has_pairs_alone(forward, count)


def _has_pairs_alone(forward: Forward, count: int) -> bool:
    """Says whether an array of ``count`` elements, with an element for each pair, has no others."""
    is_dense = not forward.varlen and not any(forward.lens)
    return is_dense and count == forward.batch * forward.heads * forward.q_len * forward.kv_len


def clear(kernel: Any, op: Backward, device: Device, memory: Any, ctype: str, words: int) -> Launch:
    """The launch that clears ``words`` words of the type ``ctype``."""
    grid = min(-(-words // THREADS), 8 * device.sm_count)
    launch: Launch = kernel.launch(op, (memory, ctype), device, "attn_bwd_captured_clear", {"words": words}, grid, _render_clear)
    return launch


def _gather(
    kernel: Any, op: Backward, device: Device, first: backward.DeltaPass, read: ElementGradient, how: str,
    sums: ExactSums | WrittenOnce,
) -> Launch:  # fmt: skip
    """The launch that sums the gradients of an element that the score reads."""
    forward, q_block, statistics = op.forward, first.q_block, first.statistics
    if kernel.alignment == 16 and forward.element.itemsize == 2:  # kernels by tensor cores, whose conditions these are, too
        tile_kv = 64 if forward.widest <= 128 else 32
        config = AttnBwdCapturedConfig(True, min(64, q_block), tile_kv, q_block, read.node, how, sums, statistics)
    else:
        config = AttnBwdCapturedConfig(False, 32 if q_block % 32 == 0 else 16, 32, q_block, read.node, how, sums, statistics)
    tile_q = config.tile_q
    values = backward.values(forward, q_block, config.tile_kv) | FunctionGradient(score_of(forward), read.node).values
    values["q_tiles"] = -(-(forward.total_q if forward.varlen else forward.q_len) // tile_q)
    if how == "pairs":
        batches, heads = sharing(forward, read)
        values |= {"shared_batches": batches, "shared_heads": heads}
        grid = int(values["q_tiles"]) * (forward.batch * forward.heads // max(1, batches * heads))
    else:
        grid = forward.heads * backward.q_blocks(forward, tile_q)
    grid = grid if forward.total_q and forward.total_kv else 0  # indices are proved for pairs that there are
    name = "attn_bwd_captured_mma" if config.tensor_cores else "attn_bwd_captured"
    launch: Launch = kernel.launch(op, config, device, name, values, grid, _render_captured)
    return launch


def _render_captured(op: Forward, config: AttnBwdCapturedConfig, arch: str) -> tuple[Source, Fields]:
    constants = {
        "tile_q": config.tile_q, "tile_kv": config.tile_kv, "q_block": config.q_block, "head_dim": op.head_dim,
        "head_dim_v": op.head_dim_v, "scale_sign": -1 if op.scale < 0 else 1,
    }  # fmt: skip
    if config.tensor_cores:
        file = "attn_bwd_captured_mma.cu"
        constants |= {"threads": 2 * config.tile_q, "ctas_per_sm": 3 if op.widest <= 128 else 2}
    else:
        file = "attn_bwd_captured.cu"
        constants |= {"chunk": min(64, -(-op.widest // 16) * 16)}
    layout: Option = MmaLayout() if config.tensor_cores else SimtLayout()
    plan: Option = SharedTiles() if config.gathering == "pairs" else Once(tiling.lpt_scheduler(op, persistent=False))
    every = backward.options(
        op, Score=op.spec.placed_score, Weight=op.spec.weight, Scheduler=plan, Walk=tiling.cursor(op, up=True),
        Gradient=FunctionGradient(score_of(op), config.node), Layout=layout, Sums=config.sums,
        Gather=Gather(config.gathering), Statistics=config.statistics,
    )  # fmt: skip
    fields = (*backward.READS, *backward.STATISTICS, *backward.HEADS)
    return backward.rendered(file, constants, fields, [], every, arch)


def _render_clear(op: Forward, memory_and_type: tuple[Any, str], arch: str) -> tuple[Source, Fields]:
    memory, ctype = memory_and_type
    fields = Field("memory", f"{ctype}*", memory), Field("words", "i64")
    return backward.rendered("attn_bwd_captured_clear.cu", {"threads": THREADS}, fields, [], {"Element": op.element}, arch)


def _render_sum(op: Forward, last: tuple[str, str, ExactSums], arch: str) -> tuple[Source, Fields]:
    name, element, sums = last
    fields = Field("gradient", "void*", Pointer(f"d{name}")), Field("elements", "i64")
    every: dict[str, Option] = {"Element": op.element, "Item": Item(element), "Sums": sums}
    return backward.rendered("attn_bwd_captured_sum.cu", {"threads": THREADS}, fields, [], every, arch)

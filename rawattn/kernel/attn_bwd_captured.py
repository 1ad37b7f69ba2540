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
    """The configuration of the kernels: by tensor cores or not; rows of a block, keys of a tile, rows of a block of scratch
    memory; the number of the element among the nodes of the score's code, and how its gradients are summed; how the
    statistics of rows lie."""

    tensor_cores: bool
    tile_q: int
    tile_kv: int
    q_block: int
    node: int
    gathering: str
    sums: ExactSums | WrittenOnce
    statistics: Option


def score_of(op: Forward) -> FunctionScore:
    """The score, which captured arrays."""
    assert isinstance(op.score, FunctionScore)
    return op.score


def arrays_with_ds_gradient(op: Backward) -> dict[str, PairAxes]:
    """The arrays in ``op.wrt`` whose gradient is that of the scaled dot product itself, dS, in the call's own format: a logit
    changes with their one element as it does with s, each pair has an element of its own, and TMA writes tiles of them. It
    depends on no length."""
    score, found = op.forward.score, dict[str, PairAxes]()
    if not op.wrt or not isinstance(score, FunctionScore):
        return found
    reads, of_s = by_elements(score.code), slope(score.code.root)
    for i, array in enumerate(score.arrays):
        every = [each for each in reads if each.array == i]
        if array.name not in op.wrt or f"d{array.name}" not in op.layout.tma_captured or len(every) != 1:
            continue
        _, axes = score.pair_axes.get(every[0].node, (i, None))
        if axes is not None and array.element == op.forward.element.name and every[0].derivative is of_s:
            found[array.name] = axes
    return found


def _array(forward: Forward, name: str) -> Captured:
    return next(each for each in score_of(forward).arrays if each.name == name)


def is_cleared_for_ds(forward: Forward, name: str) -> bool:
    """Says whether the gradient of such an array is cleared before: where lengths or a mask whose tiles are a list leave some of
    its tiles out, or where it is larger than the pairs."""
    return lists(forward.mask) or not _is_of_pairs(forward, math.prod(_array(forward, name).shape))


def cleared_for_ds(kernel: Any, op: Backward, device: Device, name: str) -> list[Launch]:
    """The launch that clears it, where that is so."""
    if not is_cleared_for_ds(op.forward, name):
        return []
    array = _array(op.forward, name)
    count = math.prod(array.shape)
    if not op.forward.total_kv:  # no tensor map follows, for which the caller's memory is checked
        return [_clear(kernel, op, device, Pointer(f"d{name}"), Item(array.element).cuda_type, count)]
    return [_clear(kernel, op, device, Pointer(f"d{name}"), "u64", count // 4)]  # rows are multiples of 16 bytes


def launches(
    kernel: Any, op: Backward, device: Device, first: backward.DeltaPass, stored: str = ""
) -> tuple[list[Launch], list[Buffer]]:
    """The launches for the arrays in ``op.wrt`` but ``stored``, and their scratch memory; ``kernel`` is the one that they follow,
    and ``first`` its first pass."""
    found: list[Launch] = []
    buffers: list[Buffer] = []
    for i, array in enumerate(score_of(op.forward).arrays if op.wrt else ()):
        if array.name in op.wrt and array.name != stored and 0 not in array.shape:
            each, buffer = _of_array(kernel, op, device, first, i, array)
            found += each
            buffers += buffer
    return found, buffers


def _of_array(
    kernel: Any, op: Backward, device: Device, first: backward.DeltaPass, i: int, array: Captured
) -> tuple[list[Launch], list[Buffer]]:
    forward, count = op.forward, int(math.prod(array.shape))
    score, number = score_of(forward), forward.number
    reads = [each for each in by_elements(score.code) if each.array == i]
    gatherings = [gathering_of(score, each) for each in reads]
    ordered, gradient = gatherings == ["pairs"], Pointer(f"d{array.name}")
    if ordered and sharing(forward, reads[0]) == (1, 1):
        written = WrittenOnce(gradient, array.element)
        found = (
            [] if _are_all_pairs(forward, count) else [_clear(kernel, op, device, gradient, Item(array.element).cuda_type, count)]
        )
        return [*found, _gather(kernel, op, device, first, reads[0], "pairs", written)], []
    in_place = ordered and array.element == number
    fill = gradient if in_place else Scratch(f"d{array.name}_sums")
    sums = (OrderedSums if ordered else ExactSums)(fill)
    words = count * sums.bytes(number) // 4
    found = [_clear(kernel, op, device, fill, "u32", words)]
    for each, how in zip(reads, gatherings, strict=True):
        found.append(_gather(kernel, op, device, first, each, how if ordered or how != "pairs" else "diagonals", sums))
    if in_place:
        return found, []
    grid = min(-(-count // THREADS), 8 * device.sm_count)
    last = array.name, array.element, sums
    found.append(kernel.launch(op, last, device, "attn_bwd_captured_sum", {"elements": count}, grid, _sum))
    return found, [Buffer(f"d{array.name}_sums", 4 * words)]


def gathering_of(score: FunctionScore, each: ElementGradient) -> str:
    """Returns how the gradients of an element that a score reads are summed."""
    return gathering(each.load, [axis for node, axis in score.checked if node == each.node])


def sharing(forward: Forward, each: ElementGradient) -> tuple[int, int]:
    """Returns the numbers of sequences and of heads that share an element, where there is one for each query and key."""
    apart = own_indices(each.load, [axis for node, axis in score_of(forward).checked if node == each.node])
    return 1 if "b" in apart else forward.batch, 1 if "h" in apart else forward.heads


def _are_all_pairs(forward: Forward, count: int) -> bool:
    """Says whether so many elements, of which each pair has one of its own, are all of an array's, and every one is met."""
    return isinstance(forward.mask, Full) and _is_of_pairs(forward, count)


def _is_of_pairs(forward: Forward, count: int) -> bool:
    """Says whether an array of so many elements, of which each pair has one of its own, has no others."""
    is_dense = not forward.varlen and not any(forward.lens)
    return is_dense and count == forward.batch * forward.heads * forward.q_len * forward.kv_len


def _clear(kernel: Any, op: Backward, device: Device, memory: Any, ctype: str, words: int) -> Launch:
    """The launch that clears so many words of this type."""
    grid = min(-(-words // THREADS), 8 * device.sm_count)
    found: Launch = kernel.launch(op, (memory, ctype), device, "attn_bwd_captured_clear", {"words": words}, grid, _cleared)
    return found


def _gather(
    kernel: Any, op: Backward, device: Device, first: backward.DeltaPass, each: ElementGradient, how: str,
    sums: ExactSums | WrittenOnce,
) -> Launch:  # fmt: skip
    """The launch for an element that the score reads."""
    forward, q_block, statistics = op.forward, first.q_block, first.statistics
    if kernel.alignment == 16 and forward.element.itemsize == 2:  # kernels by tensor cores, whose conditions these are, too
        tile_kv = 64 if forward.widest <= 128 else 32
        config = AttnBwdCapturedConfig(True, min(64, q_block), tile_kv, q_block, each.node, how, sums, statistics)
    else:
        config = AttnBwdCapturedConfig(False, 32 if q_block % 32 == 0 else 16, 32, q_block, each.node, how, sums, statistics)
    tile_q = config.tile_q
    values = backward.values(forward, q_block, config.tile_kv) | FunctionGradient(score_of(forward), each.node).values
    values["q_tiles"] = -(-(forward.total_q if forward.varlen else forward.q_len) // tile_q)
    if how == "pairs":
        batches, heads = sharing(forward, each)
        values |= {"shared_batches": batches, "shared_heads": heads}
        grid = int(values["q_tiles"]) * (forward.batch * forward.heads // max(1, batches * heads))
    else:
        grid = forward.heads * backward.q_blocks(forward, tile_q)
    grid = grid if forward.total_q and forward.total_kv else 0  # indices are proved for pairs that there are
    name = "attn_bwd_captured_mma" if config.tensor_cores else "attn_bwd_captured"
    found: Launch = kernel.launch(op, config, device, name, values, grid, _captured)
    return found


def _captured(op: Forward, config: AttnBwdCapturedConfig, arch: str) -> tuple[Source, Fields]:
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


def _cleared(op: Forward, memory_and_type: tuple[Any, str], arch: str) -> tuple[Source, Fields]:
    memory, ctype = memory_and_type
    fields = Field("memory", f"{ctype}*", memory), Field("words", "i64")
    return backward.rendered("attn_bwd_captured_clear.cu", {"threads": THREADS}, fields, [], {"Element": op.element}, arch)


def _sum(op: Forward, last: tuple[str, str, ExactSums], arch: str) -> tuple[Source, Fields]:
    name, element, sums = last
    fields = Field("gradient", "void*", Pointer(f"d{name}")), Field("elements", "i64")
    every: dict[str, Option] = {"Element": op.element, "Item": Item(element), "Sums": sums}
    return backward.rendered("attn_bwd_captured_sum.cu", {"threads": THREADS}, fields, [], every, arch)

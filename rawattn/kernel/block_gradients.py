"""Gradients over lists of blocks: kernels with keys stationary go along the lists transposed, which two launches make before."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..variant.element import FP32
from ..variant.field import Field, Fields, Scratch
from ..variant.lists import BesideLists, BlockLists, BlockWalk
from ..variant.walk import TILE_LISTS
from . import backward, block_tiles
from .attn_bwd import AttnBwd, AttnBwdConfig
from .attn_bwd_mma import AttnBwdMma, AttnBwdMmaConfig, config_of, dq_row_warps
from .backward import BackwardKernel
from .program import Buffer, Launch, Program

STEPS_THREADS, STEPS_CHUNK = 128, 1024  # of a block of block_steps.cu; key tiles that it counts at once
SORT_THREADS, SORT_COLUMNS = 1024, 256  # of a block of block_lists.cu, whose key tiles are these
STEPS = Field("listed_steps", "i32*", Scratch("listed_steps"))
STARTS = Field("work_starts", "i32*", Scratch("work_starts"))
TURNS = ("", "by_time")  # the order in which key tiles add to dq: their own, or that of time


@functools.lru_cache(maxsize=1024)
def placed(op: Backward) -> Backward:
    """The operation whose mask is one of lists."""
    spec = dataclasses.replace(op.forward.spec, mask=BesideLists(op.forward.mask))  # type: ignore[arg-type]
    return dataclasses.replace(op, forward=dataclasses.replace(op.forward, spec=spec))


@functools.lru_cache(maxsize=1024)
def without_lists(op: Backward) -> Backward:
    """The operation as if every query kept all keys that the mask keeps."""
    return dataclasses.replace(op, forward=block_tiles.without_lists(op.forward))


def gradient_reasons(op: Backward) -> list[str]:
    """The reasons why there are no gradients over these lists."""
    refusals, lists = block_tiles.list_reasons(op.forward), op.forward.spec.keys
    assert lists is not None
    if not refusals and lists.block_kv > 128:
        refusals.append(f"it takes blocks of 64 or 128 keys, and block_kv is {lists.block_kv}")
    if op.wrt:
        refusals.append("beside lists of blocks it has no gradients of captured arrays")
    return refusals


def values(op: Forward, tile_kv: int) -> dict[str, float]:
    """The run-time numbers of lists of blocks."""
    return block_tiles.list_values(op) | {"listed_tiles": count_tiles(op, tile_kv)}


def count_tiles(op: Forward, tile_kv: int) -> int:
    """The key tiles of a sequence, at most."""
    return -(-(op.total_kv if op.varlen else op.kv_len) // tile_kv)


def with_lists(
    kernel: BackwardKernel, op: Backward, tile_kv: int, device: Device, program: Program, main: Launch | None = None
) -> Program:
    """The program behind the launches that transpose the lists for its key tiles, of ``tile_kv`` keys; with turns by time where
    ``main`` is given, the launch whose blocks take them."""
    forward, keys = op.forward, op.forward.keys
    assert keys is not None
    groups, tiles = forward.batch * keys.heads, count_tiles(forward, tile_kv)
    numbers = groups * keys.blocks * keys.most
    shared = backward.values(forward, 1, tile_kv) | values(forward, tile_kv)
    launches = [
        kernel.launch(op, tile_kv, device, "block_steps", shared, groups * keys.blocks * (keys.most > 0), _render_steps),
        kernel.launch(op, tile_kv, device, "block_lists", shared, groups * (tiles // SORT_COLUMNS + 1), _render_lists),
    ]
    if main is not None:
        launches += [
            kernel.launch(op, tile_kv, device, "block_starts", {**shared, **main.values}, main.grid, _render_starts),
            kernel.launch(op, tile_kv, device, "block_turns", shared, launches[0].grid, _render_turns),
        ]
    sizes = {"work_starts": 4 * forward.batch * forward.kv_heads * tiles} if main is not None else {}
    sizes |= {"listed_steps": 16 * numbers, "tile_steps": 8 * numbers, "tile_begins": 4 * groups * (tiles + 1)}
    buffers = [Buffer(name, max(16, size)) for name, size in sizes.items()]
    launches = [launch for launch in launches if launch.grid and program.launches]
    whole = Program((*launches, *program.launches), (*buffers, *program.scratch))
    return whole.with_values(values(forward, tile_kv))


def _render_steps(op: Forward, tile_kv: int, arch: str) -> tuple[Source, Fields]:
    lists = op.spec.keys
    assert lists is not None and op.keys is not None
    walk = BlockWalk(BlockLists(op.keys.counts), lists.block_q, lists.block_kv)
    constants = walk.constants | {"tile_q": 64, "tile_kv": tile_kv, "threads": STEPS_THREADS, "chunk": STEPS_CHUNK}
    every = backward.options(op, Lists=walk.numbers, Launch=backward.launch_option(arch))
    del every["Mask"]
    fields = (STEPS, Field("heads", "i32"), *walk.fields)
    return backward.rendered("block_steps.cu", constants, fields, [], every, arch)


def _render_lists(op: Forward, tile_kv: int, arch: str) -> tuple[Source, Fields]:
    every = {"Element": op.element, "Launch": backward.launch_option(arch)}
    numbers = tuple(Field(name, "i32") for name in ("listed", "listed_blocks", "listed_tiles"))
    writes = tuple(field._replace(ctype="i32*") for field in TILE_LISTS)
    constants = {"tile_q": 64, "tile_kv": tile_kv, "threads": SORT_THREADS, "columns": SORT_COLUMNS}
    return backward.rendered("block_lists.cu", constants, (STEPS, *writes, *numbers), [], every, arch)


def _render_starts(op: Forward, tile_kv: int, arch: str) -> tuple[Source, Fields]:
    every = backward.options(op, Scheduler=backward.kv_scheduler(op, "ShortestFirst", "StaticPersistent"))
    every["Launch"] = backward.launch_option(arch)
    del every["Mask"]
    fields = (STARTS, TILE_LISTS[1], *(Field(name, "i32") for name in ("heads", "heads_per_kv", "listed_tiles")))
    return backward.rendered("block_starts.cu", {"tile_q": 64, "tile_kv": tile_kv, "threads": 32}, fields, [], every, arch)


def _render_turns(op: Forward, tile_kv: int, arch: str) -> tuple[Source, Fields]:
    every = {"Element": op.element, "Launch": backward.launch_option(arch)}
    numbers = tuple(Field(name, "i32") for name in ("heads_per_kv", "listed", "listed_blocks", "listed_tiles"))
    reads = (STARTS._replace(ctype="const i32*"), TILE_LISTS[0]._replace(ctype="i32*"), TILE_LISTS[1])
    constants = {"tile_q": 64, "tile_kv": tile_kv, "threads": STEPS_THREADS}
    return backward.rendered("block_turns.cu", constants, (STEPS, *reads, *numbers), [], every, arch)


class AttnBwdBlocks(AttnBwd):
    """The kernel over lists of blocks."""

    def meant_for(self, op: Backward, device: Device) -> bool:
        """Says whether it is made for the operation."""
        return super().meant_for(op, device) and not gradient_reasons(op)

    def prefers(self, op: Backward, device: Device) -> bool:
        return True

    def supports(self, op: Backward, device: Device) -> list[str]:
        reasons = super().supports(without_lists(op), device) + gradient_reasons(op)
        if op.forward.widest > 128:
            reasons.append(f"beside lists of blocks it takes heads up to 128 columns, not {op.forward.widest}")
        return reasons

    def legal(self, config: AttnBwdConfig, op: Backward, device: Device) -> str | None:
        if config.consumers != 2 or config.store == "final" or config.order == "dp_later":
            return "over lists of blocks consumers is 2, store not 'final', and order not 'dp_later'"
        lists = op.forward.keys
        is_served = config.store == "ordered" and lists is not None and lists.heads == op.forward.heads
        if config.turns not in TURNS or (config.turns and not is_served):
            return f"turns is {config.turns!r}; it must be of {[*TURNS]}; by_time needs store 'ordered' and a list of each head"
        return super().legal(config, placed(op), device)

    def tuning_shapes(self, op: Backward) -> tuple[Backward, ...]:
        """Only ``op``: the configuration follows from its kind."""
        return (op,)

    def is_tried(self, op: Backward) -> bool:
        return False

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdConfig]:
        """The configuration for the head sizes, found by compiling."""
        columns, (producer, consumer) = op.forward.head_dim, (56, 224) if op.forward.widest > 96 else (72, 216)
        config = AttnBwdConfig(dq_parts=2, dq_columns=64) if columns > 96 else AttnBwdConfig(dq_columns=columns)
        config = dataclasses.replace(config, producer_registers=producer, consumer_registers=consumer, steps="apart")
        if columns > 96 and op.forward.has_plain_score:  # a warpgroup without a step's keys is a step ahead then
            config = dataclasses.replace(config, order="step_later")
        return [config] if self.legal(config, op, device) is None else []

    def cost(self, config: AttnBwdConfig, op: Backward, device: Device) -> float:
        return super().cost(config, placed(op), device)

    def lower(self, op: Backward, config: AttnBwdConfig, device: Device) -> Program:
        program = super().lower(placed(op), config, device)
        main = next((each for each in program.launches if each.entry == self.name and config.turns), None)
        return with_lists(self, op, config.tile_kv, device, program, main)

    def programs(self, op: Backward, config: Any, device: Device) -> tuple[Program, ...]:
        return (self.lower(op, config, device),)


class AttnBwdMmaBlocks(AttnBwdMma):
    """The kernel with mma.sync over lists of blocks."""

    def supports(self, op: Backward, device: Device) -> list[str]:
        reasons = super().supports(without_lists(op), device) + gradient_reasons(op)
        if not reasons and not self.candidates(op, device):
            lists, forward = op.forward.spec.keys, op.forward
            reasons.append(f"it has no tiles for {lists} in {forward.element.name} with heads of {forward.widest} columns")
        return reasons

    def legal(self, config: AttnBwdMmaConfig, op: Backward, device: Device) -> str | None:
        lists = op.forward.spec.keys
        assert lists is not None
        if config.tile_kv != lists.block_kv or lists.block_q % config.tile_q:
            return f"tile_kv is {config.tile_kv} and tile_q {config.tile_q}; they must be block_kv, and divide block_q"
        return super().legal(config, placed(op), device)

    def tuning_shapes(self, op: Backward) -> tuple[Backward, ...]:
        """Only ``op``: the configuration follows from its kind."""
        return (op,)

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdMmaConfig]:
        """The configuration for the head sizes, with as many keys of a warp as a block of keys asks for."""
        plain = config_of(without_lists(op).forward, device)
        found, is_tight = list[AttnBwdMmaConfig](), op.forward.element == FP32 and op.forward.widest > 64
        for tile_q, warps, m_tiles, sharing in itertools.product((64, 32), (8, 4), (1, 2), (2, 1, 4)):
            shape: dict[str, Any] = {"tile_q": tile_q, "warps": warps, "m_tiles_per_warp": m_tiles, "sharing": sharing}
            shape |= {"chunk_q": min(tile_q // sharing, 16 if m_tiles == 2 or is_tight else 32), "ctas_per_sm": 1}
            for stages in (plain.q_stages, 1):
                config = dataclasses.replace(plain, **shape, q_stages=stages, do_stages=min(stages, plain.do_stages))
                config = dataclasses.replace(config, dq_row_warps=dq_row_warps(op.forward, config))
                found += [config] * (self.legal(config, op, device) is None)
        return found[:1]

    def lower(self, op: Backward, config: AttnBwdMmaConfig, device: Device) -> Program:
        return with_lists(self, op, config.tile_kv, device, super().lower(placed(op), config, device))

    def programs(self, op: Backward, config: Any, device: Device) -> tuple[Program, ...]:
        return (self.lower(op, config, device),)


ATTN_BWD_BLOCKS, ATTN_BWD_MMA_BLOCKS = AttnBwdBlocks(), AttnBwdMmaBlocks()

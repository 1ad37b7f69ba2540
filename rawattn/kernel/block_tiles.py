"""attn_fwd.cu over lists of blocks, which are whole key tiles: a tile's queries have a list, or each half of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..operation.keys import have_tiles
from ..variant import Option, scheduler
from ..variant.field import Fields
from ..variant.lists import BlockLists, BlockPairWalk, BlockWalk
from . import tiling
from .attn_fwd import AttnFwd, AttnFwdConfig, rendered
from .program import Program

PAIR = 0.95  # of the time of two blocks on a multiprocessor, where two lists share a tile; guessed


@functools.lru_cache(maxsize=1024)
def without_lists(op: Forward) -> Forward:
    """The operation as if every query kept all keys that the mask keeps."""
    return dataclasses.replace(op, keys=None, spec=dataclasses.replace(op.spec, keys=None))


def list_reasons(op: Forward) -> list[str]:
    """The reasons why blocks are no tiles of kernels with tensor cores."""
    lists, refusals = op.spec.keys, []
    assert lists is not None and op.keys is not None
    if not have_tiles(lists):
        refusals.append(f"it takes lists of blocks of 64 or 128 queries and keys, or multiples of them, and these are {lists}")
    if op.mask.lists:
        refusals.append(f"beside lists of blocks it takes masks whose queries keep one run of keys, and mask is {op.mask}")
    if op.total_q and not op.keys.blocks and not lists.by_token:
        refusals.append("indices of keys has no query blocks")
    return refusals


def list_values(op: Forward) -> dict[str, float]:
    """The run-time numbers of lists of blocks."""
    assert op.keys is not None
    return {"listed": op.keys.most, "listed_blocks": op.keys.blocks, "listed_heads": op.heads // max(1, op.keys.heads)}


class AttnFwdBlocks(AttnFwd):
    """The kernel over lists of blocks. Tiles of 64 queries share a multiprocessor, or two of them a tile."""

    def meant_for(self, op: Forward, device: Device) -> bool:
        """Says whether it is made for the operation: other lists are other kernels'."""
        return super().meant_for(op, device) and not list_reasons(op)

    def prefers(self, op: Forward, device: Device) -> bool:
        return True

    def supports(self, op: Forward, device: Device) -> list[str]:
        return super().supports(without_lists(op), device) + list_reasons(op)

    def legal(self, config: AttnFwdConfig, op: Forward, device: Device) -> str | None:
        lists = op.spec.keys
        assert lists is not None
        if config.pack_gqa or config.kv_splits != 1:
            return "pack_gqa is True or kv_splits not 1; over lists of blocks heads share no tiles, and keys are not split"
        if lists.block_kv % config.tile_kv:
            return f"tile_kv is {config.tile_kv}; it must divide block_kv, {lists.block_kv}"
        if lists.block_q % config.tile_q and 2 * lists.block_q != config.tile_q:
            return f"tile_q is {config.tile_q}; it must divide block_q, {lists.block_q}, or be twice as many"
        return super().legal(config, op, device)

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        """Only ``op``: the configuration follows from its kind."""
        return (op,)

    def candidates(self, op: Forward, device: Device) -> list[AttnFwdConfig]:
        """Tiles of a block of queries or two, and of 64 or 128 keys, with the deepest rings that fit."""
        configs = [AttnFwdConfig(64, 64, 3, 1, ctas_per_sm=2), AttnFwdConfig(64, 64, 2, 1, ctas_per_sm=2)]
        for tile_q, tile_kv in ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32)):
            fitting = [AttnFwdConfig(tile_q, tile_kv, stages, q_stages) for stages in (6, 5, 4, 3, 2) for q_stages in (2, 1)]
            configs += [config for config in fitting if self.legal(config, op, device) is None][:1]
        return [config for config in configs if self.legal(config, op, device) is None]

    def cost(self, config: AttnFwdConfig, op: Forward, device: Device) -> float:
        """The time of the products, by how well a multiprocessor hides what is beside them, which nobody has measured."""
        lists = op.spec.keys
        assert lists is not None
        hidden = {64: 1.5, 128: 1.0}[config.tile_q] if config.ctas_per_sm == 1 else 1.0
        pair = PAIR if config.tile_q > lists.block_q else 1.0
        return tiling.least_seconds(op.flops, device) * hidden * pair * (1 + 8 / config.tile_kv)

    def options(self, op: Forward, config: AttnFwdConfig) -> dict[str, Option]:
        lists, plain = op.spec.keys, without_lists(op)
        assert lists is not None and op.keys is not None
        pairs = config.tile_q > lists.block_q
        walk = (BlockPairWalk if pairs else BlockWalk)(BlockLists(op.keys.counts), lists.block_q, lists.block_kv)
        order = {"Order": scheduler.Unordered()} if pairs else {}
        return super().options(plain, config) | {"Walk": walk, **order}

    def fields(self, op: Forward, config: AttnFwdConfig) -> Fields:
        return tuple(dict.fromkeys(super().fields(op, config)))

    def render(self, op: Forward, config: AttnFwdConfig, arch: str) -> Source:
        return rendered(op, config, arch, self.fields(op, config), self.options(op, config))

    def values(self, op: Forward, config: AttnFwdConfig, device: Device) -> dict[str, float]:
        return super().values(without_lists(op), config, device) | list_values(op)

    def lower(self, op: Forward, config: AttnFwdConfig, device: Device) -> Program:
        return self._lower(op, config, device, 1)

    def programs(self, op: Any, config: AttnFwdConfig, device: Device) -> tuple[Program, ...]:
        return (self.lower(op, config, device),)


ATTN_FWD_BLOCKS = AttnFwdBlocks()

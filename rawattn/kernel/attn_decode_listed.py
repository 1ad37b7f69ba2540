"""attn_decode.cu over lists of keys in a cache: each block of queries is a sequence of its own, whose keys are those of its list,
and are split as any."""

from __future__ import annotations

from ..driver.device import Device
from ..operation import AttentionKVCache
from ..variant import Option, kv, rows, scheduler
from ..variant.field import Fields
from ..variant.lists import ListedMaskOfHeads
from ..variant.walk import SplitIntervalWalk
from . import listed, paging, pyramid
from .attn_decode import AttnDecode, AttnDecodeConfig, partials_bytes
from .listed import over_block_lists
from .program import Buffer, Launch, Program

MOST_QUERIES = 16  # of a sequence: each block of the grid looks at all lists
MOST_BLOCKS = 1 << 16  # of queries


class AttnDecodeListed(AttnDecode):
    """The kernel. Keys are copied row by row, wherever they lie."""

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = super().supports(over_block_lists(op), device)
        arrays = " and ".join(name for name in ("k_scale", "v_scale") if getattr(op, f"{name}s"))
        reasons += [f"it takes lists with scales that are numbers, and has arrays for {arrays}"] if arrays else []
        if listed.heads_each(op) < op.heads_per_kv:
            reasons.append("each head of q has lists of its own; it takes those that the heads of a key head share")
        if op.spec.invariant:
            reasons.append("invariant is True; which kernel computes lists then never follows from how many queries there are")
        if listed.count_blocks(op) > MOST_BLOCKS:
            reasons.append(f"here are {listed.count_blocks(op)} blocks of queries; it takes up to {MOST_BLOCKS}")
        return reasons

    def prefers(self, op: AttentionKVCache, device: Device) -> bool:
        return op.q_len <= MOST_QUERIES

    def meant_for(self, op: AttentionKVCache, device: Device) -> bool:
        return False  # what it does not take, attn_fwd_mma does as well

    def is_tried(self, op: AttentionKVCache) -> bool:
        return super().is_tried(_step(op)) or paging.has_functions(op) or any(paging.arrays_of(op))

    def legal(self, config: AttnDecodeConfig, op: AttentionKVCache, device: Device) -> str | None:
        return super().legal(config, _step(op), device)

    def candidates(self, op: AttentionKVCache, device: Device) -> list[AttnDecodeConfig]:
        step = _step(op)
        first = super().candidates(step, device)[:1]
        return [*first, *(lighter for config in first for lighter in self._lighten(config, step))]

    def cost(self, config: AttnDecodeConfig, op: AttentionKVCache, device: Device) -> float:
        """As of any step: it tells no configurations apart, whose order is that of ``candidates``."""
        return 1e-6 * self.candidates(op, device).index(config) + 1e-5

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[AttentionKVCache, ...]:
        return listed.ATTN_FWD_MMA_LISTED.tuning_shapes(op)

    def options(self, op: AttentionKVCache, config: AttnDecodeConfig, arch: str) -> dict[str, Option]:
        of_rows = paging.rows_option(op, rows.CacheRows(op.ragged, paging.lengths_option(op)))
        mask, score = paging.mask_option(op), paging.score_option(op).constant_time
        own = listed.list_options(op, of_rows, mask, score)
        assert op.spec.keys is not None
        if not op.spec.keys.by_token:
            own["Mask"] = ListedMaskOfHeads(mask, listed.numbers_of(op))
        own |= {
            "Kv": kv.PagedCpAsyncKv(listed.pages_option(op), config.tile_kv),
            "Walk": SplitIntervalWalk(),
            "Launch": scheduler.Independent(),  # lists are not read while the launch before may still write them
        }
        return super().options(_step(op), config, arch) | own

    def fields(self, op: AttentionKVCache, config: AttnDecodeConfig, arch: str) -> Fields:
        return tuple(dict.fromkeys(super().fields(op, config, arch)))

    def values(self, op: AttentionKVCache) -> dict[str, float]:
        return {**super().values(over_block_lists(op)), **listed.values(op)}

    def lower(self, op: AttentionKVCache, config: AttnDecodeConfig, device: Device) -> Program:
        if not op.total_q * op.batch:
            return Program(())
        step, arch = over_block_lists(op), device.arch
        rendered = self._keep((op.kind, config, arch), lambda: (self.render(op, config, arch), self.fields(op, config, arch)))
        grid = self.grid(step, config, device)
        partials = Buffer("partials", partials_bytes(step, config, grid))
        return pyramid.before(Program((Launch(self.name, *rendered, self.values(op), grid),), (partials,)), op.mask, device)


def _step(op: AttentionKVCache) -> AttentionKVCache:
    """The step over blocks, of an operation with lists or of one that is such a step."""
    return op if op.keys is None else over_block_lists(op)


ATTN_DECODE_LISTED = AttnDecodeListed()

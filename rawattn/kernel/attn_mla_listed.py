"""attn_mla.cu over lists of keys in latent caches: each token is a sequence of its own, whose keys are those of its list."""

from __future__ import annotations

import dataclasses

from ..driver.device import Device
from ..operation import AttentionKVCache
from ..variant import Option, kv, rows, scheduler
from ..variant.lists import NumberedKeys, PhysicalPages
from ..variant.walk import WorkListWalk
from . import listed, paging
from .attn_mla import AttnMla, AttnMlaConfig, gathered_option, is_even
from .program import Program

MOST_TOKENS = 1 << 20  # each block of the grid looks at all


class AttnMlaListed(AttnMla):
    """The kernel. Threads ask for keys row by row, wherever they lie."""

    def gathers(self, op: AttentionKVCache) -> bool:
        return True

    def step(self, op: AttentionKVCache) -> AttentionKVCache:
        """The step whose sequences are tokens and their keys."""
        return op if op.keys is None else listed.over_block_lists(op)

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        assert op.spec.keys is not None
        if not op.spec.keys.by_token:
            return [*self.device_reasons(device), "it takes lists for each token, TopK, not for blocks of queries"]
        reasons = super().supports(op, device)
        if listed.count_blocks(op) > MOST_TOKENS:
            reasons.append(f"here are {listed.count_blocks(op)} tokens; it takes up to {MOST_TOKENS}")
        return reasons

    def options(self, op: AttentionKVCache, config: AttnMlaConfig, arch: str) -> dict[str, Option]:
        assert op.spec.keys is not None
        of_rows = paging.rows_option(op, rows.CacheRows(op.ragged, paging.lengths_option(op)))
        pages: Option = PhysicalPages(op.page_size) if op.spec.keys.physical else kv.PAGES[op.form]
        own = listed.list_options(op, of_rows, paging.mask_option(op), op.score.constant_time)
        own |= {
            "Kv": gathered_option(op, NumberedKeys(pages, listed.numbers_of(op)), config.cluster),
            "Walk": WorkListWalk(),
            "Launch": scheduler.Independent(),  # lists are not read while the launch before may still write them
        }
        return super().options(self.step(op), config, arch) | own

    def rendered_kind(self, op: AttentionKVCache, config: AttnMlaConfig) -> tuple[object, ...]:
        return op.kind, op.scale < 0, is_even(op)

    def values(self, op: AttentionKVCache, config: AttnMlaConfig) -> dict[str, float]:
        return {**super().values(self.step(op), config), **listed.values(op)}

    def programs(self, op: AttentionKVCache, config: AttnMlaConfig, device: Device) -> tuple[Program, ...]:
        longest = dataclasses.replace(op, keys=op.keys._replace(most=1 << 20))  # type: ignore[union-attr]  # which is folded
        return self.lower(op, config, device), self.lower(longest, config, device)


ATTN_MLA_LISTED = AttnMlaListed()

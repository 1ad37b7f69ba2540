"""attn_decode.cu and a kernel of many rows, one after the other: each sequence goes to the one that would take it alone, in calls
that are invariant, and in others that ask for it by ``kernel=``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..driver.device import Device
from ..operation import AttentionKVCache
from ..variant import Option, rows
from . import paging
from .attn_decode import MOST_ROWS, AttnDecode, AttnDecodeConfig, most_rows
from .attn_fwd_kvcache import AttnFwdKVCache
from .attn_fwd_mma_kvcache import AttnFwdMmaKVCache
from .base import without_spills
from .paging import OverCache
from .program import Program


def few_queries(op: AttentionKVCache) -> int:
    """The most queries of a sequence that attn_decode takes."""
    return MOST_ROWS // op.heads_per_kv


class AttnDecodeOfFew(AttnDecode):
    """attn_decode for the sequences that have few rows."""

    def options(self, op: AttentionKVCache, config: AttnDecodeConfig, arch: str) -> dict[str, Option]:
        options = super().options(op, config, arch)
        return options | {"Rows": rows.RowsByQueryCount(options["Rows"], few=True)}

    def values(self, op: AttentionKVCache) -> dict[str, float]:
        return super().values(op) | {"few_queries": few_queries(op)}


_FEW = AttnDecodeOfFew()


def reasons(op: AttentionKVCache, device: Device) -> list[str]:
    """The reasons why attn_decode does not go beside another kernel."""
    if not op.ragged or most_rows(op) <= MOST_ROWS:
        return [f"it is for ragged steps, where sequences may have more than {MOST_ROWS} rows, and others fewer"]
    few = dataclasses.replace(op, q_len=few_queries(op))
    return [f"attn_decode: {reason}" for reason in _FEW.supports(few, device)] or (
        [] if few_queries(op) and _FEW.candidates(op, device) else ["attn_decode has no configuration"]
    )


def few_config(op: AttentionKVCache, device: Device) -> Any:
    """The configuration of attn_decode: the first, or where only compiling tells, the one that few rows have by themselves."""
    if not _FEW.is_tried(op):
        return _FEW.candidates(op, device)[0]
    return _try_configs(dataclasses.replace(paging.tried_shape(op), q_len=few_queries(op)), device)


@functools.lru_cache(maxsize=256)
def _try_configs(op: AttentionKVCache, device: Device) -> Any:
    return without_spills(_FEW, [(op, _FEW.candidates(op, device))], device)[0]


class Beside(OverCache):
    """A kernel of the forward over caches, in its configurations, with attn_decode before it; that kernel is a base after it."""

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        return reasons(op, device) or super().supports(op, device)

    def prefers(self, op: AttentionKVCache, device: Device) -> bool:
        return op.spec.invariant

    def options(self, op: AttentionKVCache, config: Any) -> dict[str, Option]:
        options = super().options(op, config)
        return options | {"Rows": rows.RowsByQueryCount(options["Rows"], few=False)}

    def values(self, op: AttentionKVCache, config: Any, device: Device) -> dict[str, float]:
        return super().values(op, config, device) | {"few_queries": few_queries(op)}

    def lower(self, op: AttentionKVCache, config: Any, device: Device) -> Program:
        many = super().lower(op, config, device)
        if not many.launches:
            return many
        few = _FEW.lower(op, few_config(op, device), device)
        main = many.launches[-1]._replace(entry=self.plain.name)  # those before make pyramids, which are made once
        return Program((*few.launches, main), tuple(dict.fromkeys((*few.scratch, *many.scratch))))

    def programs(self, op: AttentionKVCache, config: Any, device: Device) -> tuple[Program, ...]:
        return (self.lower(op, config, device),)  # steps of any lengths, whose keys are not split


class AttnDecodeAndFwd(Beside, AttnFwdKVCache):
    """attn_fwd with attn_decode before it."""

    name = "attn_decode+attn_fwd"

    def meant_for(self, op: AttentionKVCache, device: Device) -> bool:
        return not reasons(op, device) and super().meant_for(op, device)


class AttnDecodeAndFwdMma(Beside, AttnFwdMmaKVCache):
    """attn_fwd_mma with attn_decode before it."""

    name = "attn_decode+attn_fwd_mma"

    def meant_for(self, op: AttentionKVCache, device: Device) -> bool:
        return False


ATTN_DECODE_AND_FWD = AttnDecodeAndFwd()
ATTN_DECODE_AND_FWD_MMA = AttnDecodeAndFwdMma()

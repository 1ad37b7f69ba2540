"""Steps over cached keys for tests of attn_decode.cu, in few words, and what its host side makes of them."""

from __future__ import annotations

import dataclasses

from rawattn.compile.compiler import Source
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_decode
from rawattn.kernel.attn_decode import ATTN_DECODE, AttnDecodeConfig
from rawattn.operation import AttentionKVCache
from rawattn.operation.operand import Layout
from rawattn.operation.spec import Spec
from rawattn.variant import Option, score
from rawattn.variant.element import BF16, Element
from rawattn.variant.field import Fields
from rawattn.variant.mask import Causal, Mask
from rawattn.variant.score import Score

__all__ = [
    "AttnDecodeConfig",
    "Decode",
    "config_of",
    "fields",
    "options",
    "page_rows",
    "source",
    "split_rule",
    "values",
    "workspace",
]


@dataclasses.dataclass(frozen=True)
class Decode:
    """A step over cached keys. ``page`` is 0 for a dense cache, where sequence i is page i. ``q_len`` is the most that a sequence
    has where ``varlen``."""

    batch: int = 1
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    page: int = 0
    varlen: bool = False
    total_q: int = 0
    mask: Mask = Causal()  # noqa: RUF009
    score: Score = score.Scale()  # noqa: RUF009
    scale: float = 0.088
    sinks: bool = False
    return_lse: bool = True
    element: Element = BF16
    aligned: bool = True  # as TMA needs the pools
    split_keys: int = 0  # 0: by the sequence's length
    kv_element: Element | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scales: bool = False  # arrays say so
    v_scales: bool = False
    kv_len: int = 1 << 20  # what the cache has room for

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def operation(self) -> AttentionKVCache:
        spec = Spec(mask=self.mask, score=self.score, scale=self.scale, return_lse=self.return_lse)
        return AttentionKVCache(
            self.element, self.batch, self.q_len, self.kv_len, self.heads, self.kv_heads, self.head_dim, self.head_dim_v,
            1, self.page or 1 << 20, spec, "table" if self.page else "dense", 1, self.varlen, self.total_q if self.varlen else -1,
            sinks=self.sinks, split_keys=self.split_keys, kv_element=self.kv_element, k_scale=self.k_scale, v_scale=self.v_scale,
            k_scales=self.k_scales, v_scales=self.v_scales, layout=Layout(None if self.aligned else "it is not aligned"),
        )  # fmt: skip


def config_of(op: Decode, arch: str) -> AttnDecodeConfig:
    return ATTN_DECODE.candidates(op.operation, TYPICAL[arch])[0]


def page_rows(op: Decode, config: AttnDecodeConfig) -> int:
    return attn_decode.page_rows(op.operation, config)


def split_rule(op: Decode) -> tuple[int, int]:
    return attn_decode.split_rule(op.operation)


def workspace(op: Decode, config: AttnDecodeConfig, grid: int) -> dict[str, int]:
    """Bytes of scratch memory, and of counters, which are zero between launches."""
    return {
        "partials": attn_decode.partials_bytes(op.operation, config, grid),
        "arrived": 4 * attn_decode.MOST_BLOCKS + 4,
        "violations": 4,
    }


def options(op: Decode, config: AttnDecodeConfig, arch: str) -> dict[str, Option]:
    return ATTN_DECODE.options(op.operation, config, arch)


def fields(op: Decode, config: AttnDecodeConfig, arch: str) -> Fields:
    return ATTN_DECODE.fields(op.operation, config, arch)


def source(op: Decode, config: AttnDecodeConfig, arch: str) -> Source:
    return ATTN_DECODE.render(op.operation, config, arch)


def values(op: Decode, config: AttnDecodeConfig, max_kv_len: int, table_stride: int = 0) -> dict[str, float]:
    """The numbers of struct Args."""
    found = {**ATTN_DECODE.values(op.operation), "max_kv_len": max_kv_len, "page_table_stride": table_stride}
    keys, most = split_rule(op)
    return found | {"split_keys_log2": keys.bit_length() - 1, "most_splits_log2": most.bit_length() - 1}

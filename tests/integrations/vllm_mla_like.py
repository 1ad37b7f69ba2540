"""Classes with the signatures of vLLM 0.33's for MLA, for tests where it is not installed."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from typing import Any, Generic, TypeVar

from tests.integrations import vllm_like

M = TypeVar("M")


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY, UNIFORM, VARLEN = "single_only", "uniform", "varlen"


class MLACommonBackend(vllm_like.AttentionBackend):
    pass


@dataclasses.dataclass
class MLACommonDecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


class MLACommonMetadata(types.SimpleNamespace):
    pass


class SparseMLACommonMetadata(types.SimpleNamespace):
    pass


class MLACommonMetadataBuilder(Generic[M]):
    def _build_decode(
        self, block_table_tensor: Any, seq_lens_device: Any, max_seq_len: Any, query_start_loc_cpu: Any,
        query_start_loc_device: Any, num_decode_tokens: Any, max_query_len: Any, dcp_tot_seq_lens_device: Any,
    ) -> Any:  # fmt: skip
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self._build_decode(**common_attn_metadata)


class SparseMLACommonMetadataBuilder(Generic[M]):
    pass


class MLACommonImpl(Generic[M]):
    need_to_return_lse_for_decode = False

    def __init__(
        self, num_heads: Any, head_size: Any, scale: Any, num_kv_heads: Any, alibi_slopes: Any, sliding_window: Any,
        kv_cache_dtype: Any, logits_soft_cap: Any, attn_type: Any, kv_sharing_target_layer_name: Any, **mla_args: Any,
    ) -> None:  # fmt: skip
        self.scale = float(scale)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        raise NotImplementedError


class SparseMLACommonImpl(MLACommonImpl[M]):
    def _forward_mqa_kernel(
        self, q: Any, kv_cache: Any, topk_indices: Any, valid_counts: Any, *, layer: Any, block_size: Any, is_decode: Any
    ) -> Any:
        raise NotImplementedError


def align_blocks_to_rows(spec: Any, rows: Any = 1) -> Any:
    return spec


def flat_kv_row_view(kv_cache: Any, block_size: Any) -> Any:
    step = kv_cache.stride(0) // kv_cache.shape[2]
    return kv_cache.as_strided(((len(kv_cache) - 1) * step + block_size, kv_cache.shape[2]), (kv_cache.shape[2], 1)), step


CONTENT = {
    "vllm.model_executor.layers.attention.mla_attention": (
        MLACommonBackend, MLACommonDecodeMetadata, MLACommonImpl, MLACommonMetadata, MLACommonMetadataBuilder, QueryLenSupport,
    ),
    "vllm.model_executor.layers.attention.sparse_mla_attention": (
        SparseMLACommonImpl, SparseMLACommonMetadata, SparseMLACommonMetadataBuilder,
    ),
    "vllm.v1.attention.backends.mla.sparse_utils": (align_blocks_to_rows, flat_kv_row_view),
}  # fmt: skip


def modules() -> dict[str, types.ModuleType]:
    """Returns what ``import`` finds in vLLM's place."""
    found = vllm_like.modules()
    for name, content in CONTENT.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(found[name]).update({each.__name__: each for each in content})
    return found


def install(monkeypatch: Any) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)

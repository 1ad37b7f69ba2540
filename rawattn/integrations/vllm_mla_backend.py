"""The classes that vLLM asks for MLA, written to the contract of version 0.33: ``RAWATTN_MLA`` for all keys of a sequence, and
``RAWATTN_MLA_SPARSE`` for those that an indexer chose. Latent rows have 16 bits, or are records of 656 bytes (``fp8_ds_mla``).

vLLM writes its cache, projects queries and values, and computes long prompts by its own backends; decoding, drafts and short
prompts come here, by ``attention_kvcache`` over the latent cache, with queries as a pair of arrays and of any numbers for each
sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from .. import serving
from ..errors import UnsupportedError
from ..operation.keys import TopK
from ..serving.attention import attention_kvcache
from ..variant.element import FP8_DS_MLA

CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16, FP8_DS_MLA.name: torch.bfloat16}  # with the model's dtype
COLUMNS, VALUES = 576, 512  # of a latent row


class LatentBackend:
    """This is what both backends answer where vLLM asks before it chooses one."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CACHES]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [64, 16, 32, 128, 256]  # powers of two; vLLM divides a larger block into these

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [COLUMNS]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, block_size: Any, use_mla: bool, has_sink: bool, use_sparse: bool,
        use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        if has_sink:
            return "sinks beside MLA are not served"
        if CACHES.get(kv_cache_dtype, dtype) != dtype:
            return f"a cache of {kv_cache_dtype} needs a model of {CACHES[kv_cache_dtype]}, and this one computes in {dtype}"
        return None


class RawattnMLABackend(LatentBackend, MLACommonBackend):
    """A backend of vLLM for MLA over all keys."""

    @staticmethod
    def get_name() -> str:
        return "RAWATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return RawattnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return RawattnMLAMetadataBuilder


@dataclasses.dataclass
class RawattnMLADecodeMetadata(MLACommonDecodeMetadata):
    """The sequences of a batch that decode, as a step."""

    step: serving.Step


class RawattnMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """A builder of a batch's metadata. The arrays of its step are vLLM's own, so that graphs see their new contents."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH  # prompts are vLLM's
    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 128  # queries of a sequence up to which it decodes, as with FlashMLA
    _captures = False

    def _build_decode(
        self, block_table_tensor: Any, seq_lens_device: Any, max_seq_len: int, query_start_loc_cpu: Any,
        query_start_loc_device: Any, num_decode_tokens: int, max_query_len: int, dcp_tot_seq_lens_device: Any,
    ) -> RawattnMLADecodeMetadata:  # fmt: skip
        """Makes the step of the sequences that decode. A graph is replayed with other lengths, and so has no bound of keys."""
        longest = None if self._captures else 1 << max(0, max_seq_len - 1).bit_length()
        step = serving.Step(
            seq_lens_device, block_table_tensor, query_start_loc_device, max_q_len=max_query_len, max_kv_len=longest
        )
        return RawattnMLADecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Makes the metadata of a graph."""
        self._captures = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._captures = False


class RawattnMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """A layer's attention to all keys of its latent cache."""

    can_return_lse_for_decode: bool = True
    _cache: tuple[Any, serving.KVCache] | None = None

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla_args: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        _check_layer(alibi_slopes, attn_type)
        self.supports_quant_query_input = False
        window = None if sliding_window is None else (sliding_window - 1, 0)
        self.options = {
            "scale": self.scale,
            "softcap": logits_soft_cap,
            "window": window,
            "invariant": bool(envs.VLLM_BATCH_INVARIANT),
        }

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> tuple[Any, Any]:
        """Computes o, (tokens, heads, 512), and where vLLM merges parts of contexts lse, (tokens, heads), in natural logarithms,
        of q, (tokens, heads, 576), or a pair of arrays of 512 and 64 columns."""
        if self._cache is None or self._cache[0] is not kv_c_and_k_pe_cache:
            self._cache = kv_c_and_k_pe_cache, make_cache(kv_c_and_k_pe_cache)
        found = attention_kvcache(
            q, self._cache[1], attn_metadata.decode.step, return_lse=self.need_to_return_lse_for_decode, **self.options
        )
        return (found[0], found[1].T.contiguous()) if self.need_to_return_lse_for_decode else (found, None)


def make_cache(kv_cache: Any) -> serving.KVCache:
    """Makes a cache of vLLM's, (blocks, block_size, 576) in 16 bits, or (blocks, block_size, 656) bytes of records."""
    if kv_cache.element_size() == 1:
        return serving.KVCache.records(kv_cache.view(torch.uint8))
    k = kv_cache.unsqueeze(2)
    return serving.KVCache(k, k[..., :VALUES])


def _check_layer(alibi_slopes: Any, attn_type: str) -> None:
    if alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes were given; rawattn does not serve them beside MLA in vLLM.")
    if attn_type != AttentionType.DECODER:
        raise UnsupportedError(f"attn_type is {attn_type!r}; rawattn serves decoders beside MLA in vLLM.")


class RawattnMLASparseBackend(LatentBackend, AttentionBackend):
    """A backend of vLLM for MLA over the keys that an indexer chose."""

    @staticmethod
    def get_name() -> str:
        return "RAWATTN_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return RawattnMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return RawattnMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return align_blocks_to_rows(spec)


class RawattnMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """A builder of a batch's metadata, vLLM's own."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH


class RawattnMLASparseImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    """A layer's attention to the rows of the cache that are listed for each token."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla_args: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        _check_layer(alibi_slopes, attn_type)
        if sliding_window is not None:
            raise UnsupportedError(f"sliding_window is {sliding_window}; rows that are listed have no positions.")
        self.supports_quant_query_input = False
        self.options = {"scale": self.scale, "softcap": logits_soft_cap, "invariant": bool(envs.VLLM_BATCH_INVARIANT)}

    def _forward_mqa_kernel(
        self, q: Any, kv_cache: Any, topk_indices: Any, valid_counts: Any, *, layer: Any, block_size: int, is_decode: bool
    ) -> tuple[Any, Any]:
        """Computes o, (tokens, heads, 512), over the rows of the cache that topk_indices, (tokens, k), names for each token, the
        first valid_counts of them; and lse, (tokens, heads), where vLLM merges parts of contexts."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        step = serving.Step(None, None, causal=False, keys=TopK(topk_indices, valid_counts, physical=True))
        each = tuple(x[:, None] for x in q) if isinstance(q, tuple) else q[:, None]
        returns_lse = self.need_to_return_lse_for_decode
        found = attention_kvcache(each, make_cache(rows[None]), step, return_lse=returns_lse, **self.options)
        return (found[0][:, 0], found[1][..., 0]) if returns_lse else (found[:, 0], None)

"""The classes that vLLM asks for an attention backend: over its paged cache, by ``rawattn.append`` and ``attention_kvcache``.

Lengths, pages and slots stay on the device. Served is attention of decoders with 16-bit caches, and with ones of e4m3 and e5m2
under one scale for each layer. vLLM's checks refuse the rest, or ``RawattnImpl`` does, when a model is loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from .. import serving
from ..errors import UnsupportedError
from ..serving import api as caches

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
KEPT_STEPS = 256


class RawattnBackend(AttentionBackend):
    """This is what vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *SIXTEEN_BITS, *EIGHT_BITS]

    @staticmethod
    def get_name() -> str:
        return "RAWATTN"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return RawattnImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return RawattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256]  # powers of two; vLLM divides a larger block into these

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 16 <= head_size <= 256 and head_size % 16 == 0

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, block_size: Any, use_mla: bool, has_sink: bool, use_sparse: bool,
        use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        if kv_cache_dtype in EIGHT_BITS and head_size % 32:
            return f"a cache of {kv_cache_dtype} needs a head size that is a multiple of 32"
        if kv_cache_dtype in SIXTEEN_BITS and SIXTEEN_BITS[kv_cache_dtype] != dtype:
            return f"a cache of {kv_cache_dtype} needs a model of {kv_cache_dtype}, and this one computes in {dtype}"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@dataclasses.dataclass
class RawattnMetadata(AttentionMetadata):
    """One step, which all layers of a group share."""

    step: serving.Step
    slots: Any
    rows: int


class RawattnMetadataBuilder(AttentionMetadataBuilder[RawattnMetadata]):
    """Makes the step of a batch out of what vLLM says of it. The arrays are vLLM's own, so that graphs see their new contents."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._steps: dict[Any, serving.Step] = {}
        self._captures = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RawattnMetadata:
        """Makes a batch's metadata. A graph is replayed with other lengths, and so has no bound of keys."""
        common = common_attn_metadata
        longest = None if self._captures else 1 << max(0, common.max_seq_len - 1).bit_length()  # a bound that few steps change
        arrays = common.seq_lens, common.block_table_tensor, common.query_start_loc
        bounds = {"max_q_len": common.max_query_len, "max_kv_len": longest}
        slots, rows = common.slot_mapping[: common.num_actual_tokens], common.num_actual_tokens
        if isinstance(common.causal, torch.Tensor):
            return RawattnMetadata(serving.Step(*arrays, causal=common.causal.int(), **bounds), slots, rows)
        key = (*((x.data_ptr(), x.shape, x.stride()) for x in arrays), *bounds.values(), bool(common.causal))
        if key not in self._steps:  # a step that is known costs the layers less
            if len(self._steps) >= KEPT_STEPS:
                self._steps.clear()
            self._steps[key] = serving.Step(*arrays, causal=bool(common.causal), **bounds)
        return RawattnMetadata(self._steps[key], slots, rows)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> RawattnMetadata:
        """Makes the metadata by ``build``, which vLLM's classes override to say of the batch something else."""
        self._captures = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._captures = False


class RawattnImpl(AttentionImpl[RawattnMetadata]):
    """A layer's attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type is {attn_type!r}; rawattn serves {AttentionType.DECODER!r} in vLLM.")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.writes = kv_cache_dtype, kv_sharing_target_layer_name is None
        self.sliding_window, self.sinks = sliding_window, sinks  # which have no numbers before weights are loaded
        self.options: dict[str, Any] = {"scale": self.scale, "softcap": logits_soft_cap}
        if alibi_slopes is not None:
            self.options["alibi"] = torch.tensor(alibi_slopes, dtype=torch.float32)  # where vLLM makes the layer: on its device
        self._cache: tuple[Any, tuple[Any, Any], serving.KVCache] | None = None

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Converts the sinks to float32, in which kernels read them. Those that are loaded again go where the earlier ones are,
        as graphs read them there."""
        if self.sinks is None:
            return
        kept = self.options.get("sinks")
        if kept is None or kept.device != self.sinks.device:
            self.options["sinks"] = self.sinks.detach().float()
        else:
            kept.copy_(self.sinks.detach())

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: RawattnMetadata, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        """Writes key and value, (rows, kv_heads, head_size), into the cache, and attention over it into output."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale was given; rawattn does not give results in eight bits.")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        rows, cache = attn_metadata.rows, self._cache_of(layer, kv_cache)
        if self.writes and key is not None:
            caches.append(cache, None, key[:rows], value[:rows], slots=attn_metadata.slots)
        if self.sinks is not None and "sinks" not in self.options:
            self.process_weights_after_loading(query.dtype)
        options = self.options | {"window": self._window(attn_metadata.step)}
        caches.attention_kvcache(query[:rows], cache, attn_metadata.step, out=output[:rows], **options)
        return output

    def _window(self, step: serving.Step) -> tuple[int, int] | None:
        """The keys on both sides that count: as in vLLM's own backends, queries that are not causal see as many after them. Of
        sequences that are causal by an array, the step keeps those alone that are not after the query."""
        if self.sliding_window is None:
            return None
        return self.sliding_window - 1, 0 if step.causal is True else self.sliding_window - 1

    def _cache_of(self, layer: Any, kv_cache: Any) -> serving.KVCache:
        """The layer's cache out of (blocks, kv_heads, block_size, 2 head_size), in which a key and its value lie together."""
        eight = self.kv_cache_dtype in EIGHT_BITS
        scales = (layer._k_scale_float, layer._v_scale_float) if eight else (1.0, 1.0)
        if self._cache is None or self._cache[0] is not kv_cache or self._cache[1] != scales:
            pools = kv_cache.view(EIGHT_BITS[self.kv_cache_dtype]) if eight else kv_cache
            k, v = pools.split(self.head_size, -1)
            self._cache = kv_cache, scales, serving.KVCache(k, v, "HND", *scales)
        return self._cache[2]

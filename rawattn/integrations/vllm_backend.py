"""The classes that vLLM asks for an attention backend, written to the contract of version 0.33: over its paged cache by
``rawattn.append`` and ``attention_kvcache``, and without one, in encoders, by ``attention_varlen``.

Lengths, pages and slots stay on the device. Caches have 16 bits, or are of e4m3 and e5m2 under one scale for each layer. vLLM's
checks refuse the rest, or ``RawattnImpl`` does, when a model is loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from .. import serving
from ..api import attention
from ..errors import UnsupportedError
from ..serving.append import append
from ..serving.attention import attention_kvcache

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SIXTEEN_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ENCODERS = AttentionType.ENCODER, AttentionType.ENCODER_ONLY  # they have no cache
KEPT_STEPS = 256


class RawattnBackend(AttentionBackend):
    """A backend of vLLM, by what vLLM asks before it chooses one."""

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
        older = device_capability is not None and (device_capability.major, device_capability.minor) < (8, 9)
        if older and EIGHT_BITS.get(kv_cache_dtype) == torch.float8_e4m3fn:
            return f"a cache of {kv_cache_dtype} needs compute capability 8.9 or newer; fp8_e5m2 does not"
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

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *ENCODERS)


@dataclasses.dataclass
class RawattnMetadata(AttentionMetadata):
    """The metadata of one step, which all layers of a group share."""

    step: serving.Step
    slot_mapping: Any  # vLLM's name: for attention to an encoder's keys it writes another one here
    rows: int
    prefix: tuple[Any, Any, Any] | None = None


class RawattnMetadataBuilder(AttentionMetadataBuilder[RawattnMetadata]):
    """A builder of a batch's metadata. The arrays of its step are vLLM's own, so that graphs see their new contents."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update: bool = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Returns which graphs vLLM may capture: none of prompts with ranges of images, which differ between batches."""
        ranges = vllm_config.model_config.is_mm_prefix_lm
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if ranges else cls._cudagraph_support

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
        prefix = _read_prefix(common)
        if isinstance(common.causal, torch.Tensor):
            return RawattnMetadata(serving.Step(*arrays, causal=common.causal.int(), **bounds), slots, rows)
        causal = bool(common.causal) and prefix is None  # a mask of ranges is causal by itself
        key = (*((x.data_ptr(), x.shape, x.stride()) for x in arrays), *bounds.values(), causal)
        if key not in self._steps:  # a step that is known costs the layers less
            if len(self._steps) >= KEPT_STEPS:
                self._steps.clear()
            self._steps[key] = serving.Step(*arrays, causal=causal, **bounds)
        return RawattnMetadata(self._steps[key], slots, rows, prefix)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> RawattnMetadata:
        """Makes the metadata of a graph by ``build``, which classes of vLLM override to change what the batch says."""
        self._captures = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._captures = False

    def update_draft_decode_metadata(self, metadata: RawattnMetadata) -> None:
        """Does nothing: the step has vLLM's own arrays, which hold the next draft's lengths already."""


def _read_prefix(common: Any) -> tuple[Any, Any, Any] | None:
    """Reads the ranges of positions in which tokens see each other: the first and the last key of each row's range, and by how
    much a position of each sequence differs from its row; None where no row is in such a range."""
    ranges = getattr(common, "mm_req_doc_ranges", None)
    if not ranges:
        return None
    bounds = torch.tensor([[1 << 30], [-1]], dtype=torch.int32).repeat(1, common.num_actual_tokens)
    starts, any_row = common.query_start_loc_cpu.tolist(), False
    for i, pairs in ranges.items():
        rows = starts[i + 1] - starts[i]
        first = int(common.seq_lens_cpu_upper_bound[i]) - rows  # the position of its first row
        for begin, last in pairs:
            low, high = max(begin - first, 0), min(last + 1 - first, rows)
            if begin < last and low < high:
                any_row = True
                bounds[:, starts[i] + low : starts[i] + high] = torch.tensor([[begin], [last]], dtype=torch.int32)
    if not any_row:
        return None
    if common.causal is not True:
        raise UnsupportedError(f"mm_req_doc_ranges were given where causal is {common.causal!r}; rawattn has them beside True.")
    begin, last = bounds.to(common.seq_lens.device, non_blocking=True)
    return begin, last, (common.query_start_loc[1:] - common.seq_lens).int()


class RawattnImpl(AttentionImpl[RawattnMetadata]):
    """A layer's attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        self.attn_type = attn_type
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.writes = kv_cache_dtype, kv_sharing_target_layer_name is None
        self.sliding_window, self.sinks = sliding_window, sinks  # which have no numbers before weights are loaded
        self.options: dict[str, Any] = {"scale": self.scale, "softcap": logits_soft_cap}
        self.options["invariant"] = bool(envs.VLLM_BATCH_INVARIANT)
        if alibi_slopes is not None:
            self.options["alibi"] = torch.tensor(alibi_slopes, dtype=torch.float32)  # where vLLM makes the layer: on its device
        self._cache: tuple[Any, tuple[Any, Any], serving.KVCache] | None = None

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Converts the sinks to float32, in which kernels read them. Sinks that are loaded again go where the earlier ones are,
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
        """Writes key and value, (rows, kv_heads, head_size), into the cache, and attention over it into output. Where queries see
        an encoder's keys, key has as many rows as there are slots, or is None, as they are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale was given; rawattn does not give results in eight bits.")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        rows, step, slots = attn_metadata.rows, attn_metadata.step, attn_metadata.slot_mapping
        if self.sinks is not None and "sinks" not in self.options:
            self.process_weights_after_loading(query.dtype)
        options = self.options | self._make_mask(layer, attn_metadata)
        if self.attn_type in ENCODERS:
            starts, longest = step.cu_seqlens_q, step.max_q_len
            tensors = query[:rows], key[:rows], value[:rows], starts, starts, longest, longest
            attention.attention_varlen(*tensors, causal=step.is_causal, out=output[:rows], **options)
            return output
        cache = self._find_cache(layer, kv_cache)
        if self.writes and key is not None and len(slots):
            append(cache, None, key[: len(slots)], value[: len(slots)], slots=slots)
        attention_kvcache(query[:rows], cache, step, out=output[:rows], **options)
        return output

    def _make_mask(self, layer: Any, metadata: RawattnMetadata) -> dict[str, Any]:
        """Makes the option that says which keys count: a window, or, where rows are in ranges, a mask. The window of a layer with
        ``mm_prefix_clamp_sliding_window`` cuts the ranges too."""
        if metadata.prefix is None:
            return {"window": self._make_window(metadata.step)}
        (begin, last, shift), clamps = metadata.prefix, bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))
        window = self.sliding_window or 1 << 30

        def keep(b: Any, h: Any, q: Any, kv: Any) -> Any:
            row = q + shift[b]
            inside, near = (kv >= begin[row]) & (kv <= last[row]), q - kv < window
            return near & ((kv <= q) | inside) if clamps else (near & (kv <= q)) | inside

        return {"mask": keep}

    def _make_window(self, step: serving.Step) -> tuple[int, int] | None:
        """Returns the numbers of keys before and after a query that count: as in vLLM's own backends, queries that are not causal
        see as many after them. Where an array says which sequences are causal, the step drops the keys after their queries."""
        if self.sliding_window is None:
            return None
        return self.sliding_window - 1, 0 if step.causal is True else self.sliding_window - 1

    def _find_cache(self, layer: Any, kv_cache: Any) -> serving.KVCache:
        """Returns the cache of a layer whose ``kv_cache`` is (blocks, kv_heads, block_size, 2 head_size): key, then value."""
        eight = self.kv_cache_dtype in EIGHT_BITS
        scales = (layer._k_scale_float, layer._v_scale_float) if eight else (1.0, 1.0)
        if self._cache is None or self._cache[0] is not kv_cache or self._cache[1] != scales:
            pools = kv_cache.view(EIGHT_BITS[self.kv_cache_dtype]) if eight else kv_cache
            k, v = pools.split(self.head_size, -1)
            self._cache = kv_cache, scales, serving.KVCache(k, v, "HND", *scales)
        return self._cache[2]

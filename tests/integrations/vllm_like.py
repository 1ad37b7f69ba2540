"""Classes with the signatures of vLLM 0.33's, for tests where it is not installed."""

from __future__ import annotations

import enum
import types
from typing import Any, Generic, TypeVar

M = TypeVar("M")


class AttentionType(str, enum.Enum):
    DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER = "decoder", "encoder", "encoder_only", "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE = 3, 2, 1


class AttentionBackend:
    pass


class AttentionMetadata:
    pass


class AttentionMetadataBuilder(Generic[M]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.device = device

    def build(self, common_prefix_len: Any, common_attn_metadata: Any, fast_build: Any = False) -> Any:
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        raise NotImplementedError

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        raise NotImplementedError


class AttentionImpl(Generic[M]):
    def process_weights_after_loading(self, act_dtype: Any) -> None:
        raise NotImplementedError

    def __init__(
        self, num_heads: Any, head_size: Any, scale: Any, num_kv_heads: Any = None, alibi_slopes: Any = None,
        sliding_window: Any = None, kv_cache_dtype: Any = "auto", logits_soft_cap: Any = None,
        attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: Any = None,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        raise NotImplementedError


class CommonAttentionMetadata(types.SimpleNamespace):
    causal = True


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"


REGISTERED: dict[str, str] = {}


def register_backend(backend: Any, class_path: Any = None, is_mamba: Any = False) -> Any:
    REGISTERED[backend] = class_path


BASES = (
    AttentionType, AttentionCGSupport, AttentionBackend, AttentionMetadata, AttentionMetadataBuilder, AttentionImpl,
    CommonAttentionMetadata,
)  # fmt: skip


def modules() -> dict[str, types.ModuleType]:
    """Returns what ``import`` finds in vLLM's place."""
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.attention.backends")
    found = {name: types.ModuleType(name) for name in (*names, "vllm.v1.attention.backends.registry")}
    vars(found["vllm.v1.attention.backend"]).update({each.__name__: each for each in BASES})
    vars(found["vllm"])["envs"] = types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    registry = {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend}
    vars(found["vllm.v1.attention.backends.registry"]).update(registry)
    return found

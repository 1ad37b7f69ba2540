"""Classes with the signatures of SGLang 0.5.23's, for tests: SGLang itself cannot be imported without its GPU libraries."""

from __future__ import annotations

import enum
import types
from typing import Any


class ForwardMode(enum.IntEnum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY = range(1, 6)

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY


class AttentionBackend:
    forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: Any = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def init_cuda_graph_state(self, max_bs: Any, max_num_tokens: Any) -> None: ...

    def get_cuda_graph_seq_len_fill_value(self) -> Any: ...

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: Any = True, **kwargs: Any
    ) -> Any: ...

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: Any = True, **kwargs: Any
    ) -> Any: ...


class KVWriteLoc:
    def __init__(self, loc: Any, swa_loc: Any = None) -> None:
        self.loc, self.swa_loc = loc, None if swa_loc is None else swa_loc[: len(loc)]

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, swa_loc)


class Pool:
    """The keys and values of all tokens, as ``MHATokenToKVPool`` has them."""

    def __init__(self, tokens: int, heads: int, dim: int, device: str, dtype: Any) -> None:
        import torch

        self.k, self.v = torch.full((2, tokens, heads, dim), 77.0, device=device, dtype=dtype)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        self.k[loc_info.loc], self.v[loc_info.loc] = cache_k, cache_v

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v


class LatentPool:
    """The latent rows of all tokens, as ``MLATokenToKVPool`` has them."""

    def __init__(self, tokens: int, columns: int, kv_lora_rank: int, device: str, dtype: Any) -> None:
        import torch

        self.kv = torch.full((tokens, 1, columns), 77.0, device=device, dtype=dtype)
        self.kv_lora_rank, self.dtype, self.use_dsa = kv_lora_rank, dtype, False

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        self.kv[loc_info.loc] = cache_k

    def set_mla_kv_buffer(self, layer: Any, loc_info: Any, cache_k_nope: Any, cache_k_rope: Any) -> None:
        self.kv[loc_info.loc, :, : self.kv_lora_rank] = cache_k_nope
        self.kv[loc_info.loc, :, self.kv_lora_rank :] = cache_k_rope

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.kv

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.kv[..., : self.kv_lora_rank]


class WindowPool:
    """Two pools, as ``SWAKVPool`` has them: layer 1 is in that of windows, whose places are others."""

    def __init__(self, full: Pool, windows: Pool, mapping: Any) -> None:
        self.full_kv_pool, self.swa_kv_pool, self.full_to_swa_index_mapping = full, windows, mapping
        self.layers_mapping = {0: (0, False), 1: (0, True)}

    def _of(self, layer_id: int) -> Pool:
        return self.swa_kv_pool if self.layers_mapping[layer_id][1] else self.full_kv_pool

    def translate_loc_from_full_to_swa(self, kv_indices: Any) -> Any:
        return self.full_to_swa_index_mapping[kv_indices]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        loc = loc_info.swa_loc if self.layers_mapping[layer.layer_id][1] else loc_info.loc
        self._of(layer.layer_id).set_kv_buffer(layer, KVWriteLoc(loc), cache_k, cache_v)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self._of(layer_id).k

    def get_value_buffer(self, layer_id: int) -> Any:
        return self._of(layer_id).v


BACKENDS: dict[str, Any] = {}
CHOICES, DETERMINISTIC, RADIX = ["triton"], ["triton"], ["triton"]


def register_attention_backend(name: str) -> Any:
    return lambda make: BACKENDS.__setitem__(name, make)


def modules() -> dict[str, types.ModuleType]:
    """Returns what ``import`` finds in SGLang's place."""
    content = {
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend,
            "ATTENTION_BACKENDS": BACKENDS,
        },
        "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": CHOICES,
            "add_attention_backend_choices": CHOICES.extend,
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": DETERMINISTIC,
            "add_deterministic_attention_backend_choices": DETERMINISTIC.extend,
            "add_radix_supported_deterministic_attention_backend_choices": RADIX.extend,
        },
    }
    found = {}
    for path, members in content.items():
        parts = f"sglang.srt.{path}".split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in found:
                found[name] = types.ModuleType(name)
                if i > 1:
                    setattr(found[".".join(parts[: i - 1])], parts[i - 1], found[name])
        vars(found[".".join(parts)]).update(members)
    return found

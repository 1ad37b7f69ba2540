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
        self.loc = loc


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


BACKENDS: dict[str, Any] = {}
CHOICES = ["triton"]


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
        "arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": CHOICES, "add_attention_backend_choices": CHOICES.extend},
    }
    found = {}
    for name, members in content.items():
        parts = f"sglang.srt.{name}".split(".")
        for i in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(found[".".join(parts)]).update(members)
    return found

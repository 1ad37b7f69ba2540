"""rawattn as an attention backend of Hugging Face diffusers.

>>> import rawattn.integrations.diffusers
>>> rawattn.integrations.diffusers.enable()
>>> pipeline.transformer.set_attention_backend("rawattn")  # or: with attention_backend("rawattn"):

It serves models whose attention goes by diffusers' dispatcher, as those of Flux, Wan and Qwen-Image do. Older ones, and UNets,
call torch's own attention: ``rawattn.integrations.sdpa.register`` is for these.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from ..api import attention as api
from ..api.naming import naming
from ..array import reading
from ..errors import UnsupportedError
from . import sdpa

NAME = "rawattn"


def enable() -> None:
    """Registers rawattn under the name "rawattn", for ``set_attention_backend`` and ``attention_backend``."""
    _AttentionBackendRegistry.register(_add_member(NAME))(attention)


def _add_member(value: str) -> Any:
    """Returns the member of diffusers' enumeration of backends with this value, and adds it where there is none."""
    names = AttentionBackendName
    if value not in names._value2member_map_:
        member = str.__new__(names, value)
        member._name_, member._value_, member._sort_order_ = value.upper(), value, len(names)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[value] = member
    return names(value)


@naming(q="query", k="key", v="value", bias="attn_mask", dropout="dropout_p")
def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, _parallel_config: Any = None,
) -> Any:  # fmt: skip
    """Computes attention, (batch, length, heads, head_dim), as diffusers calls it: arguments mean what they mean in torch's own.
    diffusers looks at the parameters' names, and leaves out what is not among them."""
    if _parallel_config is not None:
        raise UnsupportedError("a parallel_config was given; rawattn does not serve diffusers' context parallelism.")
    sdpa.check_heads(query.shape[2], key.shape[2], enable_gqa)
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        reading.check_plain("attn_mask", attn_mask)
        attn_mask = attn_mask[:, None, None]  # which of each sequence's keys count, or what is added to their logits
    (batch, q_len, heads, _), kv_len = query.shape, key.shape[1]
    options = sdpa.read_mask(attn_mask, is_causal, (batch, heads, q_len, kv_len))
    return api.attention(query, key, value, scale=scale, dropout=dropout_p, return_lse=return_lse, **options)

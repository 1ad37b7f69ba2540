"""The attention of a model, read from its ``config.json`` as Hugging Face transformers writes it. transformers is not needed."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ..errors import ProblemError

_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # how the names of such architectures end
_ALTERNATING = ("gemma2", "gemma3", "cohere2", "gpt_oss")  # model types whose layers are of both kinds
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The attention of one kind of layer. ``window`` counts the keys that a query keeps, its own among them."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bf16"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False


def read(path: str | os.PathLike[str]) -> list[Layer]:
    """The kinds of layers of a model.

    Raises ProblemError where the file is no such config or has attention of a kind that is not known, OSError where it cannot be
    read.
    """
    data = pathlib.Path(path).read_bytes()
    try:
        config = json.loads(data)
        return layers(config | config.get("text_config", {}))
    except ProblemError as error:
        raise ProblemError(f"{path} {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ProblemError(f"{path} is no config.json of a transformers model ({error}).") from error


def layers(config: Mapping[str, Any]) -> list[Layer]:
    """The kinds of layers that a model's config has, those with a window last."""
    heads = _find_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
    kv_heads = _find_number(config, "num_key_value_heads", "num_kv_heads", default=1 if config.get("multi_query") else heads)
    rotary, head_dim_v = config.get("qk_rope_head_dim"), config.get("v_head_dim")
    if config.get("qk_nope_head_dim") and rotary:  # multi-head latent attention, as its prefill computes it
        kv_heads, head_dim = heads, config["qk_nope_head_dim"] + rotary
    else:
        head_dim = config.get("head_dim") or _divide_by_heads(_find_number(config, "hidden_size", "n_embd", "d_model"), heads)
    base = config.get("query_pre_attn_scalar")
    plain = Layer(
        "full", heads, kv_heads, head_dim, head_dim_v or head_dim, _DTYPES.get(_read_dtype(config), "bf16"), _is_causal(config),
        softcap=config.get("attn_logit_softcapping"), scale=base**-0.5 if base else config.get("attention_multiplier"),
        sinks=config.get("model_type") == "gpt_oss",
    )  # fmt: skip
    kinds, window = _find_kinds(config)
    return [plain if kind == "full" else dataclasses.replace(plain, name=f"window {window}", window=window) for kind in kinds]


def _find_kinds(config: Mapping[str, Any]) -> tuple[list[str], int | None]:
    """The kinds of layers, of "full" and "window", and the window."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    types = {str(name).removesuffix("_attention") for name in config.get("layer_types") or []}
    if unknown := types - {"full", "sliding"}:
        raise ProblemError(f"has layers of the kind {sorted(unknown)[0]}; full and sliding ones are known.")
    if window is None:
        return ["full"], None
    both = config.get("model_type", "").startswith(_ALTERNATING) if not types else types == {"full", "sliding"}
    return (["full", "window"] if both else ["full"] if types == {"full"} else ["window"]), window


def _divide_by_heads(size: int, heads: int) -> int:
    if size % heads:
        raise ProblemError(f"has a hidden size of {size} and {heads} heads; it must be a multiple of them, without a head_dim.")
    return size // heads


def _find_number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The number under the first of the ``names`` that the config has."""
    number = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ProblemError(f"has {number!r} under {' or '.join(names)}; it must be an int >= 1.")
    return number


def _read_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype"))


def _is_causal(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return not names or any(str(name).endswith(_CAUSAL) for name in names)

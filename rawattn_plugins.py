"""What vLLM and SGLang call by their entry points, in each of their processes wherever rawattn is installed.

It imports nothing of rawattn, as most of these servers run with another backend.

>>> vllm.LLM(model, attention_config={"backend": "RAWATTN"})  # or: vllm serve MODEL --attention-backend RAWATTN

    python -m sglang.launch_server --model-path MODEL --attention-backend rawattn
"""

from __future__ import annotations

import warnings
from typing import Any

PATHS = {
    "RAWATTN": "rawattn.integrations.vllm_backend.RawattnBackend",
    "RAWATTN_MLA": "rawattn.integrations.vllm_mla_backend.RawattnMLABackend",
    "RAWATTN_MLA_SPARSE": "rawattn.integrations.vllm_mla_backend.RawattnMLASparseBackend",
}
_warned: set[str] = set()


def vllm() -> None:
    """Makes the backends known to vLLM, from version 0.33 on, as RAWATTN, RAWATTN_MLA and RAWATTN_MLA_SPARSE. It may be called
    several times.

    A vLLM of another version, which cannot be told of the backend, gets a warning and runs without it."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for name, path in PATHS.items():
            if name not in AttentionBackendEnum.__members__:
                register_backend(name, path)
    except (ImportError, AttributeError, TypeError) as error:
        _warn("vLLM", "RAWATTN", error)


def sglang() -> None:
    """Makes the backend known to SGLang, from version 0.5.23 on, as rawattn, also for deterministic inference. It may be called
    several times. An SGLang of another version gets a warning and runs without it."""
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        if "rawattn" not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_deterministic_attention_backend_choices(["rawattn"])
            choices.add_radix_supported_deterministic_attention_backend_choices(["rawattn"])
            choices.add_attention_backend_choices(["rawattn"])
        register_attention_backend("rawattn")(_sglang_backend)
    except (ImportError, AttributeError, TypeError) as error:
        _warn("SGLang", "rawattn", error)


def _sglang_backend(runner: Any) -> Any:
    from rawattn.integrations.sglang_backend import RawattnBackend

    return RawattnBackend(runner)


def _warn(server: str, name: str, error: Exception) -> None:
    if server not in _warned:
        _warned.add(server)
        text = f"this {server} has no registry that takes backends by name, and does not know {name}: {error}"
        warnings.warn(text, stacklevel=3)

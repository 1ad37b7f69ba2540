"""rawattn as an attention backend of SGLang, written to the contract of version 0.5.23.

SGLang finds ``register`` by the entry point "sglang.srt.plugins" wherever rawattn is installed, in each of its processes:

    python -m sglang.launch_server --model-path MODEL --attention-backend rawattn
"""

from __future__ import annotations

from typing import Any

NAME = "rawattn"


def register() -> None:
    """Makes the backend known to SGLang by its name. It imports no kernels, and may be called several times."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(make)


def make(runner: Any) -> Any:
    """Makes the backend of a model's runner."""
    from .sglang_backend import RawattnBackend

    return RawattnBackend(runner)

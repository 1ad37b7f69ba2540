"""rawattn as an attention backend of vLLM, written to the contract of version 0.33.

vLLM finds ``register`` by the entry point "vllm.general_plugins" wherever rawattn is installed, in each of its processes:

>>> vllm.LLM(model, attention_config={"backend": "RAWATTN"})  # or: vllm serve MODEL --attention-backend RAWATTN
"""

from __future__ import annotations

import warnings

NAME, PATH = "RAWATTN", "rawattn.integrations.vllm_backend.RawattnBackend"


def register() -> None:
    """Makes the backend known to vLLM by its name. It imports no kernels, and may be called several times.

    vLLM calls this wherever rawattn is installed: one of another version, which cannot be told of the backend, gets a warning and
    runs without it."""
    global _warned
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if NAME not in AttentionBackendEnum.__members__:
            register_backend(NAME, PATH)
    except (ImportError, AttributeError, TypeError) as error:
        if not _warned:
            _warned = True
            text = f"this vLLM has no registry that takes backends by name, and does not know {NAME}: {error}"
            warnings.warn(text, stacklevel=2)


_warned = False

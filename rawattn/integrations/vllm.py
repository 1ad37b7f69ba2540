"""rawattn as an attention backend of vLLM, written to the contract of version 0.33.

vLLM finds ``register`` by the entry point "vllm.general_plugins" wherever rawattn is installed, in each of its processes:

>>> vllm.LLM(model, attention_config={"backend": "RAWATTN"})  # or: vllm serve MODEL --attention-backend RAWATTN
"""

from __future__ import annotations

NAME, PATH = "RAWATTN", "rawattn.integrations.vllm_backend.RawattnBackend"


def register() -> None:
    """Makes the backend known to vLLM by its name. It imports no kernels, and may be called several times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, PATH)

"""Doors from other libraries to rawattn. Each module is imported by name and needs the library that it is for.

``flash_attn`` and ``flash_attn_interface`` have the functions of flash-attn 2 and 3, ``sdpa`` and ``flex_attention`` those of
torch, ``transformers`` registers an attention there. ``rawattn.jax`` is the door from JAX.
"""

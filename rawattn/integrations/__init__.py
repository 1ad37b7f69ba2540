"""Adapters from other libraries to rawattn. Each module is imported by name and needs the library that it is for.

``flash_attn`` and ``flash_attn_interface`` have the functions of flash-attn 2 and 3, ``xformers`` those of xformers, ``sdpa`` and
``flex_attention`` those of torch, ``cuequivariance`` and ``deepspeed`` those of protein models, with biases of pairs, and
``block_sparse_attn``, ``fastvideo_kernel``, ``flashinfer`` and ``moba`` those of sparse models, with lists of blocks.
``transformers`` and ``diffusers`` register an attention there; ``vllm`` and ``sglang`` are found by entry points. ``rawattn.jax``
is the adapter from JAX.
"""

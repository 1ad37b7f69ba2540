"""Attention over several GPUs, or processes, by ``torch.distributed``. It needs torch, and is imported by its own name.

>>> import rawattn.parallel
>>> o = rawattn.parallel.context_attention(q, k, v, mesh["cp"], causal=True)  # a part of the sequence on each rank
"""

from .context import context_attention
from .heads import head_attention
from .layout import join, positions, split
from .packed import context_attention_varlen

__all__ = ["context_attention", "context_attention_varlen", "head_attention", "join", "positions", "split"]

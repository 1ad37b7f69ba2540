"""Attention kernels for NVIDIA GPUs, compiled at run time: pip is the whole toolchain.

>>> import rawattn
>>> o = rawattn.attention(q, k, v, causal=True)  # torch, CuPy, NumPy, JAX ... arrays, (batch, length, heads, head_dim)
"""

from . import reference
from .api import (
    Explanation,
    attention,
    attention_backward,
    attention_varlen,
    explain,
    explain_backward,
    plan,
    plan_backward,
    warm_up,
)
from .bundle import load_bundle, save_bundle
from .errors import CompileError, DeviceError, LayoutWarning, ProblemError, RawattnError, SlowKernelWarning, UnsupportedError
from .operation import Append, AttentionKVCache, Backward, Combine, Forward
from .plans import Plan
from .serving import KVCache, Rotary, Step
from .serving.api import append, attention_append, attention_kvcache, explain_kvcache, merge_states, violations
from .serving.cache import kvcache_bytes
from .serving.plan import KVCachePlan, plan_kvcache
from .spec import Spec
from .variant import mask, score

__version__ = "0.1.0"
__all__ = [
    "Append", "AttentionKVCache", "Backward", "Combine", "CompileError", "DeviceError", "Explanation", "Forward", "KVCache",
    "KVCachePlan", "LayoutWarning", "Plan", "ProblemError", "RawattnError", "Rotary", "SlowKernelWarning", "Spec", "Step",
    "UnsupportedError", "append", "attention", "attention_append", "attention_backward", "attention_kvcache", "attention_varlen",
    "explain", "explain_backward", "explain_kvcache", "kvcache_bytes", "load_bundle", "mask", "merge_states", "plan",
    "plan_backward", "plan_kvcache", "reference", "save_bundle", "score", "violations", "warm_up",
]  # fmt: skip

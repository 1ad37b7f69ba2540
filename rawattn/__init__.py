"""Attention kernels for NVIDIA GPUs, compiled at run time: pip is the whole toolchain.

>>> import rawattn
>>> o = rawattn.attention(q, k, v, causal=True)  # torch, CuPy, NumPy, JAX ... arrays, (batch, length, heads, head_dim)
"""

from . import mask, reference, score, sparse
from .api.attention import attention, attention_backward, attention_varlen, explain, explain_backward, plan, plan_backward
from .errors import CompileError, DeviceError, LayoutWarning, ProblemError, RawattnError, SlowKernelWarning, UnsupportedError
from .operation import Append, AttentionKVCache, Backward, Combine, Forward
from .operation.keys import Blocks, TopK
from .operation.spec import Spec
from .package import __version__ as __version__
from .runtime.bundle import load_bundle, save_bundle
from .runtime.explain import Explanation
from .runtime.front_end import load_torch as _load_torch
from .runtime.plan import Plan
from .runtime.record import warm_up
from .serving import KVCache, Rotary, Step
from .serving.append import append, attention_append
from .serving.attention import attention_kvcache, explain_kvcache
from .serving.cache import kvcache_bytes
from .serving.merge import merge_states
from .serving.plan import KVCachePlan, plan_kvcache
from .serving.violations import violations
from .variant.element import FP8_DS_MLA

__all__ = [
    "FP8_DS_MLA",
    "Append",
    "AttentionKVCache",
    "Backward",
    "Blocks",
    "Combine",
    "CompileError",
    "DeviceError",
    "Explanation",
    "Forward",
    "KVCache",
    "KVCachePlan",
    "LayoutWarning",
    "Plan",
    "ProblemError",
    "RawattnError",
    "Rotary",
    "SlowKernelWarning",
    "Spec",
    "Step",
    "TopK",
    "UnsupportedError",
    "append",
    "attention",
    "attention_append",
    "attention_backward",
    "attention_kvcache",
    "attention_varlen",
    "explain",
    "explain_backward",
    "explain_kvcache",
    "kvcache_bytes",
    "load_bundle",
    "mask",
    "merge_states",
    "plan",
    "plan_backward",
    "plan_kvcache",
    "reference",
    "save_bundle",
    "score",
    "sparse",
    "violations",
    "warm_up",
]  # fmt: skip

_load_torch()  # torch.ops.rawattn: compiled and saved programs may name it before any call

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
from .errors import CompileError, DeviceError, ProblemError, RawattnError, SlowKernelWarning, UnsupportedError
from .operation import Backward, Forward
from .plans import Plan
from .spec import Spec
from .variant import mask, score

__version__ = "0.1.0"
__all__ = [
    "Backward", "CompileError", "DeviceError", "Explanation", "Forward", "Plan", "ProblemError", "RawattnError",
    "SlowKernelWarning", "Spec", "UnsupportedError", "attention", "attention_backward", "attention_varlen", "explain",
    "explain_backward", "mask", "plan", "plan_backward", "reference", "score", "warm_up",
]  # fmt: skip

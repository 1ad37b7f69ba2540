"""Attention kernels for NVIDIA GPUs, compiled at run time: pip is the whole toolchain.

>>> import rawattn
>>> o = rawattn.attention(q, k, v, causal=True)  # torch, CuPy, NumPy, JAX ... arrays, (batch, length, heads, head_dim)
"""

from . import reference
from .api import Explanation, attention, attention_varlen, explain, plan
from .errors import CompileError, DeviceError, ProblemError, RawattnError, SlowKernelWarning, UnsupportedError
from .plan import Plan
from .problem import Problem
from .variant import mask, score

__version__ = "0.1.0"
__all__ = [
    "CompileError", "DeviceError", "Explanation", "Plan", "Problem", "ProblemError", "RawattnError",
    "SlowKernelWarning", "UnsupportedError", "attention", "attention_varlen", "explain", "mask", "plan", "reference", "score",
]  # fmt: skip

"""This module defines the errors, ordered by who causes them.

RawattnError
  ProblemError(ValueError)                the call is wrong: the argument, what was given, what is needed
  UnsupportedError(NotImplementedError)   the call is right, but no kernel serves it: one reason per kernel
  CompileError(RuntimeError)              NVRTC refused a source: first error, where the source was kept, the whole log
  DeviceError(RuntimeError)               the driver refused: the call, its code and name
    BinaryError                           it refused the machine code, which another compiler or driver made, or a torn file

SlowKernelWarning(UserWarning)            a kernel serves the call that is much slower than the best one for the device
LayoutWarning(UserWarning)                arrays are all but certainly in another order than (batch, length, heads, head_dim)
"""

from __future__ import annotations

from typing import Any

# CUDA's major version -> the line that installs what the extra of that name brings; rawattn's own name need not be published.
INSTALL = {
    12: 'pip install "cuda-bindings==12.9.*" "cupy-cuda12x==14.*" "nvidia-cuda-nvrtc-cu12>=12.8"',
    13: 'pip install "cuda-bindings==13.*" "cupy-cuda13x==14.*" "nvidia-cuda-nvrtc==13.*"',
}
INSTALL_EITHER = f"{INSTALL[13]} (NVIDIA driver 580 or newer) or {INSTALL[12]}"


class RawattnError(Exception):
    """The root of everything that rawattn raises on purpose."""


class ProblemError(RawattnError, ValueError):
    """The arguments contradict each other or the documentation; the message names the argument and the need."""


class UnsupportedError(RawattnError, NotImplementedError):
    """The arguments are sound, but no kernel computes them; the message has each kernel's reason."""


class CompileError(RawattnError, RuntimeError):
    """NVRTC refused a source. ``log`` is its whole log, ``source`` the folder with what it was given, if it could be kept."""

    def __init__(self, message: str, log: str = "", source: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class DeviceError(RawattnError, RuntimeError):
    """The CUDA driver refused a call. ``code`` is its CUresult, or None where no driver could be loaded."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class BinaryError(DeviceError):
    """The driver cannot load a kernel's machine code; compiling it again, here, may help."""


class SlowKernelWarning(UserWarning):
    """The call is computed by a kernel that is much slower than the best one for the device; the message says why."""


class LayoutWarning(UserWarning):
    """The shapes of q and k are all but certainly those of (batch, heads, length, head_dim), torch's order."""


def brief(value: Any) -> str:
    """Returns how a message shows a value: of an int of many digits the first ones and their number."""
    if not isinstance(value, int) or abs(value) < 10**30:
        return repr(value)
    digits = int(value.bit_length() * 0.30102999566398120)
    digits += abs(value) >= 10**digits
    return f"{'-' * (value < 0)}{abs(value) // 10 ** (digits - 6)}... (an int of {digits} digits)"

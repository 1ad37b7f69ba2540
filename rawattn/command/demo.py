"""This module is ``python -m rawattn``: it shows attention on this machine, checked against the reference, timed beside torch's.

torch and CuPy are imported by name, since either may be missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from rich.console import Console

from .. import mask, package, reference
from ..api import attention
from ..array import conversion, reading
from ..compile import compiler
from ..cpu import loops
from ..driver import context
from ..driver.device import TYPICAL
from ..errors import INSTALL_EITHER, DeviceError, UnsupportedError
from ..operation import Forward
from ..operation.spec import Spec
from ..runtime import explain
from ..runtime.select import select
from ..variant.element import BF16, FP32, Element
from . import timing

GPU_SHAPE, CPU_SHAPE = (2, 4096, 16, 128), (1, 2048, 8, 64)  # batch, length, heads, head_dim
ROWS = 16  # queries of each batch and head that are compared with the reference
MARGIN = 4  # a result may err this often as much as the plain formula that rounds logits and probabilities as a kernel does
TURNS = timing.TimingProtocol("burst", 25, 0.0, 0.0)
WRONG = "the result is wrong; run `python -m rawattn clear` and try again, and if it stays, report it with what `doctor` prints"

Array = npt.NDArray[Any]
Calls = dict[str, Callable[[], Any]]


def run(console: Console) -> int:
    """Runs the demonstration; gives the exit status."""
    console.print(f"rawattn  {package.__version__}")
    lack, fault = missing_gpu()
    with console.status("importing torch"):
        torch = import_if_there("torch")
    if lack is None:
        gpu, (major, minor) = context.device(0), context.version()
        console.print(f"machine  {gpu.name}, {gpu.arch}, {gpu.sm_count} multiprocessors, driver for CUDA {major}.{minor}")
        torch = torch if torch is not None and torch.cuda.is_available() else None
        libraries = ["cupy"] if torch is None else ["cupy", "torch"]
        return 0 if attend(console, libraries, GPU_SHAPE, BF16, torch) else 1
    console.print(f"no GPU   {lack}")
    right = attend(console, ["numpy"], CPU_SHAPE, FP32, torch)
    return 0 if cross_compile(console) and right and not fault else 1


def missing_gpu() -> tuple[str | None, bool]:
    """Returns why no GPU can be used (None if one can), and whether that is a fault of this machine, not a lack."""
    try:
        context.library()
        gpu = context.device(0)
        select(_make_operation(GPU_SHAPE, BF16), gpu)
    except (UnsupportedError, DeviceError) as error:
        return str(error), isinstance(error, DeviceError)
    if import_if_there("cupy") is None:
        return f"{gpu.name} needs CuPy and NVRTC; {INSTALL_EITHER}", True
    return None, False


def attend(console: Console, libraries: Sequence[str], shape: tuple[int, ...], element: Element, torch: Any) -> bool:
    """Explains, checks and times causal attention of N(0,1) inputs in each library. Tells whether it was right."""
    rows = np.linspace(0, shape[1] - 1, ROWS).astype(int).tolist()
    with console.status("drawing inputs and computing the reference"):
        normal = np.random.default_rng(0).standard_normal
        host = [normal(shape, np.float32).astype(element.dtype) for _ in range(3)]
        exact = reference.attention(*host, causal=True, rows=rows)
        plain = reference.attention(*host, causal=True, rows=rows, rounded=True)
        allowed = MARGIN * _measure_error(plain, exact) + 2 * float(ml_dtypes.finfo(element.dtype).eps)
    calls: Calls = {}
    right = True
    for library in libraries:
        *inputs, out = (_convert(library, x) for x in (*host, np.full(shape, np.nan, element.dtype)))
        if library == libraries[0]:
            console.print(str(attention.explain(*inputs, causal=True)))
            _compile(console, inputs, element)
        with console.status("attention"):
            attention.attention(*inputs, causal=True, out=out)
            result = _copy_to_host(out).astype(np.float64)
        error = _measure_error(result[:, rows], exact)
        good = error <= allowed and bool(np.isfinite(result).all())
        right &= good
        console.print(f"error    {error:.2g} relative to each query's largest number, {allowed:.2g} allowed  ({library})")
        if not good:
            console.print(f"         {WRONG}", style="red")
        calls[f"rawattn, {library}"] = functools.partial(attention.attention, *inputs, causal=True)
    on_gpu = element is BF16
    if torch is not None:
        calls["torch SDPA"] = _make_sdpa(torch, [_convert("torch", x) if on_gpu else torch.from_numpy(x) for x in host])
    with console.status("timing"):
        seconds = _time(calls, on_gpu, torch)
    _report(console, seconds, _make_operation(shape, element).flops)
    return right


def cross_compile(console: Console) -> bool:
    """Compiles the Hopper kernel where there is no Hopper. Tells whether that went well, or CuPy was left out on purpose."""
    op, target = _make_operation(GPU_SHAPE, BF16), TYPICAL["sm_90a"]
    selection = select(op, target)
    console.print(f"\nA GPU's kernel can be compiled all the same:\n{explain.explain_operation(op, target)}")
    try:
        with console.status("looking into the cache") as status:
            source = selection.kernel.render(op, selection.config, target.arch)
            binary = compiler.compile(source, lambda: status.update("NVRTC compiles"))
    except UnsupportedError as error:
        console.print(f"no NVRTC {error}", style="red")
        return importlib.util.find_spec("cupy") is None
    console.print(f"compiled {describe(binary)}")
    return True


def describe(binary: compiler.Binary) -> str:
    """Describes where a kernel came from, and its registers and spills."""
    text = f"in {binary.seconds:.2f} s by NVRTC {binary.nvrtc}"
    text = text if binary.origin == "compiled" else f"earlier, {text}, now found on {binary.origin}"
    return f"{text}; {binary.registers} registers, {binary.spill_bytes} bytes spilled"


def _make_operation(shape: tuple[int, ...], element: Element) -> Forward:
    batch, length, heads, head_dim = shape
    return Forward(element, batch, length, length, heads, heads, head_dim, head_dim, Spec(mask.Causal()))


def _measure_error(result: Array, exact: Array) -> float:
    """Measures the largest error at any query, relative to the largest number that the exact result has there."""
    return float((np.abs(result - exact).max((0, 2, 3)) / np.abs(exact).max((0, 2, 3))).max())


def import_if_there(name: str) -> Any:
    """Imports a module; None where it is not there."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # not installed, or it misses a library of its own
        return None


def _convert(library: str, x: Array) -> Any:
    """Converts a NumPy array to one of a library, on its GPU, copied as bytes: no kernel of the library has to be compiled."""
    if library == "numpy":
        return x
    module = importlib.import_module(library)
    return module.asarray(x) if library == "cupy" else module.from_numpy(x.view(np.int16)).view(module.bfloat16).cuda()


def _copy_to_host(x: Any) -> Array:
    return conversion.as_numpy(reading.read(x.get() if hasattr(x, "get") else x.cpu() if hasattr(x, "cpu") else x, "out"))


def _compile(console: Console, inputs: Sequence[Any], element: Element) -> None:
    """Compiles what the calls need, and prints what it took."""
    begin = time.perf_counter()
    with console.status("looking into the cache") as status:
        plan = attention.plan(*inputs, causal=True, on_compile=lambda: status.update("NVRTC compiles"))
    if plan.binaries:
        text = describe(plan.binaries[0])
    else:  # this shows its own progress
        text = "earlier by Numba, now found on disk" if loops.load(element).cached else "by Numba"
    console.print(f"compiled {text}; ready after {time.perf_counter() - begin:.2f} s")


def _make_sdpa(torch: Any, inputs: Sequence[Any]) -> Callable[[], Any]:
    """Makes the call of torch's own attention, on views of the inputs."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _time(calls: Calls, on_gpu: bool, torch: Any) -> dict[str, float]:
    """Times each call, the calls taking turns, on a GPU by its own clock. Returns median seconds."""
    clock: timing.Clock = timing.Host() if not on_gpu else timing.CupyGpu() if torch is None else timing.Gpu()
    loads = {name: clock.load(timing.Call(call)) for name, call in calls.items()}
    return {name: timing.median_of_rounds(us) / 1e6 for name, us in timing.race(clock, loads, TURNS).items()}


def _report(console: Console, seconds: dict[str, float], flops: int) -> None:
    torch = seconds.get("torch SDPA")
    for name, median in seconds.items():
        ratio = f", {torch / median:.2f} of torch's speed" if torch and name != "torch SDPA" else ""
        console.print(f"time     {median * 1e3:.3f} ms, {flops / median * 1e-12:.3g} TFLOP/s{ratio}  ({name})")
    console.print(f"  medians of {TURNS.rounds}, in turns{'' if torch else '; torch is not here to compare with'}")

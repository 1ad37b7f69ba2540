"""``python -m rawattn bench``: attention on this machine, in your shapes, beside torch's own, forward and backward.

torch, CuPy and matplotlib are imported by name, since each may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from ..api import attention as api
from ..driver import context
from ..driver.device import Device
from ..driver.device import cpu as this_cpu
from ..errors import ProblemError, RawattnError
from ..operation import Backward, Forward
from ..operation.spec import Spec
from ..runtime import model_config
from ..runtime.model_config import Layer
from ..variant.element import ELEMENTS
from . import demo, timing
from .timing import Call

BACKENDS = {  # of torch's scaled_dot_product_attention
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
COLORS = {"rawattn": "#c0392b", "cudnn": "#76b900", "flash": "#7f8c8d", "efficient": "#2980b9", "math": "#8e44ad"}
ON_CPU = timing.TimingProtocol("burst", 3, 0.05, 0.0)
LENGTHS, CPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384), (128, 256, 512)
MOST_LOGITS = 1 << 29  # that the plain formula is given
PASSES = ("forward", "backward")


class Result(NamedTuple):
    """The time of a contender on a problem, or why there is none."""

    layer: Layer
    batch: int
    length: int
    direction: str  # of PASSES
    name: str
    us: float | None
    flops: int
    reason: str = ""

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6 if self.us else float("nan")


class Bench:
    """Times layers on a device; ``library`` is that of the arrays, "torch", "cupy" or "numpy"."""

    def __init__(self, device: Device, library: str) -> None:
        self.device, self.library = device, library
        self.module = importlib.import_module(library)
        self.schedule = ON_CPU if device.is_cpu else timing.BURST
        clocks: dict[str, Callable[[], timing.Clock]] = {"torch": timing.Gpu, "cupy": timing.CupyGpu}
        self.clock = timing.Host() if device.is_cpu else clocks[library]()
        self.results: list[Result] = []

    def measure(self, layer: Layer, batch: int, length: int) -> None:
        """Adds the times of all contenders on sequences of a layer."""
        op = operation(layer, batch, length)
        arrays = self._make_inputs(op)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says in many why a backend refuses
            calls, reasons = self._make_calls(op, arrays)
        for direction, flops in zip(PASSES, (op.flops, Backward(op).flops), strict=True):
            loads = {name: self._make_load(both[direction], direction) for name, both in calls.items()}
            rounds = timing.race(self.clock, loads, self.schedule)
            for name in (*calls, *reasons):
                us = timing.median_of_rounds(rounds[name]) if name in rounds else None
                reason = reasons.get(name, "")
                self.results.append(Result(layer, op.batch, op.q_len, direction, name, us, flops, reason))

    def _make_inputs(self, op: Forward) -> dict[str, Any]:
        """Makes q, k, v and do of N(0, 1)."""
        shapes = {operand.name: operand.shape for operand in (*op.inputs, op.outputs[0])}
        shapes["do"] = shapes.pop("o")
        if self.library == "torch":
            torch, device = self.module, "cpu" if self.device.is_cpu else "cuda"
            random = torch.Generator(device).manual_seed(0)
            dtype = getattr(torch, np.dtype(op.element.dtype).name)
            kinds = {name: torch.float32 if name == "sinks" else dtype for name in shapes}
            return {
                name: torch.randn(shape, device=device, dtype=kinds[name], generator=random) for name, shape in shapes.items()
            }
        normal = np.random.default_rng(0).standard_normal
        host = {name: normal(shape, np.float32) for name, shape in shapes.items()}
        host |= {name: x.astype(op.element.dtype) for name, x in host.items() if name != "sinks"}
        return host if self.library == "numpy" else {name: self.module.asarray(x) for name, x in host.items()}

    def _make_calls(self, op: Forward, arrays: dict[str, Any]) -> tuple[dict[str, dict[str, Call]], dict[str, str]]:
        """Makes the calls of contenders, each in both directions, and the reasons of those that cannot take part."""
        calls, reasons = {}, {}
        makers: dict[str, Callable[[], dict[str, Call]]] = {"rawattn": lambda: ours(op, arrays, self.library)}
        if self.library == "torch":
            names = ("flash", "math") if self.device.is_cpu else BACKENDS
            makers |= {name: lambda name=name: sdpa(op, arrays, name) for name in names}  # type: ignore[misc]
        for name, make in makers.items():
            try:
                calls[name] = make()
            except (RawattnError, RuntimeError, TypeError, ValueError) as error:  # torch has no such kernel, argument or memory
                reasons[name] = str(error).strip().partition("\n")[0]
        return calls, reasons

    def _make_load(self, call: Call, direction: str) -> timing.Load:
        """Makes a call ready: as a graph, where it is too short for events and can be captured."""
        load = self.clock.load(call)
        if isinstance(self.clock, timing.Gpu) and direction == "forward" and load.us < timing.GRAPH_BELOW_US:
            with contextlib.suppress(RuntimeError):  # it cannot be captured
                return self.clock.graph(call)
        return load


def operation(layer: Layer, batch: int, length: int) -> Forward:
    """Returns the operation that a layer computes."""
    window = None if layer.window is None else (layer.window - 1, 0 if layer.causal else layer.window - 1)
    spec = Spec.of(causal=layer.causal and window is None, window=window, softcap=layer.softcap, scale=layer.scale)
    sizes = (batch, length, length, layer.heads, layer.kv_heads, layer.head_dim, layer.head_dim_v)
    return Forward(ELEMENTS[layer.dtype], *sizes, spec, sinks=layer.sinks)


def ours(op: Forward, arrays: dict[str, Any], library: str) -> dict[str, Call]:
    """Returns the calls of rawattn, with gradients by autograd where there is torch."""
    spec, (q, k, v) = op.spec, (arrays[name] for name in "qkv")
    options: dict[str, Any] = {"mask": spec.mask, "score": spec.score, "scale": spec.scale, "sinks": arrays.get("sinks")}
    if library == "torch":
        return differentiate(lambda q, k, v: api.attention(q, k, v, **options), q, k, v, arrays["do"])
    o, lse = api.attention(q, k, v, return_lse=True, **options)
    return {
        "forward": Call(lambda: api.attention(q, k, v, **options)),
        "backward": Call(lambda: api.attention_backward(arrays["do"], q, k, v, o, lse, **options)),
    }


def sdpa(op: Forward, arrays: dict[str, Any], name: str) -> dict[str, Call]:
    """Returns the calls of torch's attention by one backend. Raises ValueError where torch does not compute the operation,
    RuntimeError where the backend does not."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")
    if op.score.cuda_type != "Scale" or op.sinks:
        raise ValueError("torch has no softcap and no sinks")
    if name == "math" and op.batch * op.heads * op.q_len * op.kv_len > MOST_LOGITS:
        raise ValueError("its logits need much memory")
    more: dict[str, Any] = {"scale": op.scale, "is_causal": op.mask.cuda_type == "Causal"}
    if op.heads != op.kv_heads:
        more["enable_gqa"] = True
    if op.mask.cuda_type not in ("Full", "Causal"):
        more["attn_mask"] = band(torch, op, arrays["q"].device)
    backend = getattr(attention.SDPBackend, BACKENDS[name])

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2)

    with attention.sdpa_kernel(backend):
        calls = differentiate(attend, arrays["q"], arrays["k"], arrays["v"], arrays["do"])
    return {name: dataclasses.replace(call, context=lambda: attention.sdpa_kernel(backend)) for name, call in calls.items()}


def band(torch: Any, op: Forward, device: Any) -> Any:
    """Returns the mask of an operation as torch takes it, (q_len, kv_len)."""
    begin, end = (torch.from_numpy(x).to(device)[:, None] for x in op.mask.interval(np.arange(op.q_len), op.q_len, op.kv_len))
    keys = torch.arange(op.kv_len, device=device)
    return (begin <= keys) & (keys < end)


def differentiate(attend: Callable[..., Any], q: Any, k: Any, v: Any, do: Any) -> dict[str, Call]:
    """Returns the calls of the forward, without gradients, and of the backward alone, as torch's autograd calls it."""
    torch = importlib.import_module("torch")
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    torch.autograd.grad(o, leaves, do, retain_graph=True)  # what cannot be differentiated says so now
    return {
        "forward": Call(lambda: attend(q, k, v)),
        "backward": Call(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)),
    }


def run(options: argparse.Namespace, console: Console) -> int:
    """Measures and prints; gives the exit status. No length begins after ``options.seconds``."""
    figure, (device, library) = options.plot and new_figure(options.plot), here()
    layers, lengths, tokens = _choose_layers(options, device), options.lengths, options.tokens
    lengths, tokens = lengths or (CPU_LENGTHS if device.is_cpu else LENGTHS), tokens or (512 if device.is_cpu else 16384)
    bench, begin, left = Bench(device, library), time.monotonic(), []
    console.print(f"{device.name}, arrays of {library}, {tokens} tokens a call, medians of {bench.schedule.rounds} rounds")
    with console.status("") as status:
        for layer in layers:
            for length in lengths:
                if time.monotonic() - begin > options.seconds:
                    left.append(f"{layer.name} of {length}")
                    continue
                status.update(f"{layer.name}, length {length}")
                bench.measure(layer, max(1, tokens // length), length)
    for layer in layers:
        console.print(table(layer, [result for result in bench.results if result.layer == layer], device))
    for name, reason in dict.fromkeys((result.name, result.reason) for result in bench.results if result.reason):
        console.print(f"{name}: {reason}")
    if left:
        console.print(f"not measured, as {options.seconds:g} s had passed: {', '.join(left)}; --seconds gives more")
    if figure is not None and bench.results:
        draw(figure, bench.results, device)
        figure.savefig(options.plot)
        console.print(f"drawn in {options.plot}")
    return int(any(result.name == "rawattn" and result.us is None for result in bench.results))


def here() -> tuple[Device, str]:
    """Returns the device that is measured, and the library of the arrays on it."""
    lack, _ = demo.missing_gpu()
    torch = demo.import_if_there("torch")
    if lack is None:
        return context.device(0), "torch" if torch is not None and torch.cuda.is_available() else "cupy"
    return this_cpu(), "numpy" if torch is None else "torch"


def _choose_layers(options: argparse.Namespace, device: Device) -> list[Layer]:
    """Chooses the layers: those of a model, or one; an option that is given goes before what the model has."""
    if options.like is not None:
        layers = model_config.read(options.like)
    else:
        heads, head_dim, dtype = (4, 64, "fp32") if device.is_cpu else (16, 128, "bf16")
        heads, head_dim = options.heads or heads, options.head_dim or head_dim
        layers = [Layer("attention", heads, options.kv_heads or heads, head_dim, head_dim, dtype, options.causal)]
    names = ("heads", "kv_heads", "head_dim", "head_dim_v", "dtype", "softcap")
    overrides = {name: value for name in names if (value := getattr(options, name)) is not None}
    return [dataclasses.replace(layer, **overrides) for layer in layers]


def _choose_unit(device: Device) -> tuple[str, float]:
    """Returns the unit of speeds on a device, and how many of it a TFLOP/s is."""
    return ("GFLOP/s", 1e3) if device.is_cpu else ("TFLOP/s", 1.0)


def table(layer: Layer, results: Sequence[Result], device: Device) -> Table:
    """Returns a table of results, with a row for each length and direction and a column for each contender."""
    unit, factor = _choose_unit(device)
    heads = str(layer.heads) if layer.heads == layer.kv_heads else f"{layer.heads}/{layer.kv_heads}"
    dims = f"{layer.head_dim}" if layer.head_dim == layer.head_dim_v else f"{layer.head_dim}/{layer.head_dim_v}"
    words = [layer.name, layer.dtype, f"{heads} heads of {dims}", *["causal"] * layer.causal]
    words += [] if layer.softcap is None else [f"softcap {layer.softcap:g}"]
    words += ["sinks"] * layer.sinks
    grid = Table(title=f"{', '.join(words)}: {unit}", title_justify="left")
    names = list(dict.fromkeys(result.name for result in results))
    for name in ("batch x length", "", *names, "to the best other"):
        grid.add_column(name, justify="right")
    for key in dict.fromkeys((result.batch, result.length, result.direction) for result in results):
        row = {result.name: result for result in results if (result.batch, result.length, result.direction) == key}
        others = [result.tflops for result in row.values() if result.us and result.name != "rawattn"]
        mine = row["rawattn"].tflops
        ratio = f"{mine / max(others):.2f}" if others and row["rawattn"].us else "-"
        cells = (f"{row[name].tflops * factor:.3g}" if row[name].us else "-" for name in names)
        grid.add_row(f"{key[0]} x {key[1]}", key[2], *cells, ratio)
    return grid


def new_figure(path: pathlib.Path) -> Any:
    """Makes a figure to be drawn into. Raises ProblemError where matplotlib or the path's format is not there."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
    except ImportError as error:
        raise ProblemError(f"--plot needs matplotlib ({error}): pip install matplotlib.") from None
    if not path.parent.is_dir():
        raise ProblemError(f"--plot is {path}, but there is no folder {path.parent}; make it first.")
    if path.exists():
        raise ProblemError(f"--plot is {path}, which exists and would be lost; give another name.")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ProblemError(f"--plot is {path}; it must end with one of {', '.join(f'.{name}' for name in sorted(formats))}.")
    return figure


def draw(figure: Any, results: Sequence[Result], device: Device) -> None:
    """Draws speed over length into a figure: a column of panels for each layer, and a row for each direction."""
    unit, factor = _choose_unit(device)
    layers = list(dict.fromkeys(result.layer for result in results))
    figure.set_size_inches(1 + 4.5 * len(layers), 6.5)
    axes = figure.subplots(len(PASSES), len(layers), squeeze=False, sharey="row")
    for layer, column in zip(layers, axes.T, strict=True):
        for direction, axis in zip(PASSES, column, strict=True):
            panel = [result for result in results if result.layer == layer and result.direction == direction and result.us]
            for name in dict.fromkeys(result.name for result in panel):
                points = [(result.length, result.tflops * factor) for result in panel if result.name == name]
                axis.plot(*zip(*points, strict=True), "o-", label=name, color=COLORS[name], linewidth=1 + (name == "rawattn"))
            axis.set(title=f"{layer.name}, {direction}", xlabel="length", ylabel=unit, ylim=(0, None), xscale="log")
            lengths = sorted({result.length for result in panel})
            axis.set_xticks(lengths, list(map(str, lengths)), minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(device.name)

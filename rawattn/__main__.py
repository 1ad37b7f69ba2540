"""The command line: ``python -m rawattn [demo|doctor|show|choose|compile|bundle|bench|clear]``."""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import math
import pathlib
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console

from .command import bench, demo, doctor
from .compile import compiler
from .compile.cache import CacheWarning, cache_folder
from .compile.compiler import Binary, Source
from .driver import context
from .driver.device import KNOWN, TYPICAL, Device, board
from .driver.device import cpu as this_cpu
from .errors import ProblemError, RawattnError, UnsupportedError
from .operation import Forward
from .operation.spec import Spec
from .package import __version__
from .runtime import explain as attention
from .runtime.bundle import USUAL, save_bundle, usual_operations
from .runtime.select import Selection, select
from .variant import Option
from .variant.element import ELEMENTS

COMPARED = 6  # configurations that `choose` lists, best first
INSTRUCTIONS = {  # by how their names begin; those that a kernel has are counted
    "HGMMA": "matrix products of a warpgroup on the tensor cores",
    "HMMA": "matrix products of a warp on the tensor cores",
    "UTMALDG": "tiles fetched by TMA",
    "LDGSTS": "copies from global to shared memory",
    "LDSM": "loads of matrices from shared memory",
    "DFMA": "float64 multiply-adds",
    "MUFU.EX2": "exponentials",
    "FFMA": "float32 multiply-adds",
    "FMNMX": "float32 maxima",
    "SHFL": "exchanges in a warp",
    "SYNCS": "operations on barriers in shared memory",
    "LDL": "loads of spilled registers",
    "STL": "stores of spilled registers",
}

Options = argparse.Namespace
console = Console(markup=False, highlight=False, soft_wrap=True)


def show(options: Options) -> int:
    """Prints what NVRTC is given for an operation, and what it makes of it."""
    selection, source = _render(options)
    texts = {source.name: source.text, **dict(source.headers)}
    for path, text in texts.items():
        if options.all or path == "config.cuh":
            console.print(f"// ---- {path}\n{text}")
    console.print(f"// ---- NVRTC {' '.join(source.options)}")
    console.print("\n".join(f"{len(text.splitlines()):>5} lines  {path}" for path, text in texts.items()))
    console.print(f"// ---- machine code of {selection.kernel.name}, {selection.config}")
    binary = _compile(source)
    console.print(f"compiled {demo.describe(binary)}{''.join(f', {code}' for code in binary.advisories)}")
    try:
        counts = count_instructions(binary.cubin)
    except FileNotFoundError:
        console.print("its instructions are counted where nvdisasm is: pip install nvidia-cuda-nvdisasm")
        return 0
    console.print(f"{sum(counts.values()):>5} instructions, of these")
    for name, meaning in INSTRUCTIONS.items():
        if count := sum(count for word, count in counts.items() if word.startswith(name)):
            console.print(f"{count:>5} {name:<8} {meaning}")
    return 0


def count_instructions(cubin: bytes) -> collections.Counter[str]:
    """Counts how often each instruction stands in the machine code."""
    text = compiler.disassemble(cubin)
    return collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text))


def explain(options: Options) -> int:
    """Prints which kernel and configuration an operation gets, why, and how the best configurations compare."""
    op, device = _make_operation(options), _choose_device(options)
    selection = select(op, device)
    console.print(f"{attention.explain_operation(op, device)}")
    costs = {config: selection.kernel.cost(config, op, device) for config in selection.kernel.candidates(op, device)}
    for config in sorted(costs, key=lambda config: costs[config])[:COMPARED]:
        console.print(f"  {config}, {costs[config] * 1e6:,.0f} us")
    return 0


def compile(options: Options) -> int:
    """Compiles into the cache all kernels that the kind of operation may get on such a device, and with --out writes what this
    one gets into a folder."""
    selection, source = _render(options)
    binary = _compile(source)
    name = f"{selection.kernel.name}-{source.key[:12]}"
    console.print(f"{name}  {selection.config}\ncompiled {demo.describe(binary)}\nkept in {cache_folder()}")
    op = _make_operation(options)
    for config in selection.compiled_with:
        other = selection.kernel.render(op, config, source.arch)
        _compile(other)
        console.print(f"with {selection.kernel.name}-{other.key[:12]}  {config}, for other sizes")
    if options.out:
        _write(options.out / name, source, binary, options.force)
    return 0


def _write(folder: pathlib.Path, source: Source, binary: Binary, force: bool) -> None:
    """Writes machine code, log and all that NVRTC was given. Refuses to change a file unless ``force``, and then says it."""
    log = re.sub(r".*Compile time = .*\n?", "", binary.log)  # it differs each time
    texts = {**dict(source.headers), source.name: source.text, "nvrtc.log": f"{' '.join(source.options)}\n{log}"}
    files = {folder / path: text.encode() for path, text in texts.items()}
    files[(folder / source.name).with_suffix(".cubin")] = binary.cubin
    for path, data in files.items():
        if path.exists() and path.read_bytes() != data:
            if not force:
                raise ProblemError(f"{path} exists with other content; give another --out, or --force to overwrite it.")
            console.print(f"overwriting {path}")
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    console.print(f"written to {folder}")


def bundle(options: Options) -> int:
    """Writes the kernels that recorded operations, or those of usual models, need into a file."""
    with console.status("looking for kernels") as status:
        operations = options.spec or usual_operations()
        count = save_bundle(operations, options.out, options.arch.split(","), lambda: status.update("NVRTC compiles"))
    console.print(f"{count} kernels, {options.out.stat().st_size / 1e6:.1f} MB, written to {options.out}")
    return 0


def clear(options: Options) -> int:
    """Empties the cache, or removes the files that were not used for long."""
    count, size = compiler.clear(options.unused)
    console.print(f"removed {count} files, {size / 1e6:.1f} MB, from {cache_folder()}")
    return 0


def _render(options: Options) -> tuple[Selection, Source]:
    """Returns the kernel and configuration of the operation, and what NVRTC is given for them."""
    op, device = _make_operation(options), _choose_device(options)
    if device.is_cpu:
        raise UnsupportedError("NVRTC compiles for a GPU; what runs on the CPU is rawattn/cpu/lanes.py, compiled by Numba.")
    selection = select(op, device)
    return selection, selection.kernel.render(op, selection.config, device.arch)


def _compile(source: Source) -> Binary:
    """Compiles a source, with progress. A cache that cannot be written is an error here: to fill it is the purpose."""
    with console.status("looking into the cache") as status, warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        return compiler.compile(source, lambda: status.update("NVRTC compiles"))


def _make_operation(options: Options) -> Forward:
    kv_length = options.length if options.kv_length is None else options.kv_length
    spec = Spec.of(
        causal=options.causal, window=options.window, softcap=options.softcap, mask=options.mask, score=options.score,
        return_lse=options.lse,
    )  # fmt: skip
    return Forward(
        ELEMENTS[options.dtype], options.batch, options.length, kv_length, options.heads,
        options.heads if options.kv_heads is None else options.kv_heads, options.head_dim,
        options.head_dim if options.head_dim_v is None else options.head_dim_v, spec, options.varlen,
        options.batch * options.length, options.batch * kv_length,
    )  # fmt: skip


def _choose_device(options: Options) -> Device:
    """Chooses the device: the GPU here if it is of the arch that --arch names, else a board. It prints which board, if there is
    neither a GPU nor an --arch."""
    if options.arch == "cpu":
        return this_cpu()
    if context.device_count() and options.arch in (None, context.device(0).arch):
        return context.device(0)
    if options.arch is None:
        console.print(f"for {TYPICAL['sm_90a'].name}, the default for want of a GPU here; --arch names another")
    device = board(options.arch or "sm_90a")
    assert device is not None, "_read_arch has looked"
    return device


def _read_arch(text: str) -> str:
    """Reads an architecture, a board's name, or the CPU, in lower case."""
    if (name := text.lower()) != "cpu" and board(name) is None:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from cpu, {KNOWN})")
    return name


def _read_option(text: str) -> Any:
    """Reads a mask or a score such as ``rawattn.mask:Window(3, right=0)``: a module, and a call of one of its classes."""
    module, _, call = text.partition(":")
    try:
        node = ast.parse(call, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("it has no call")
        option_class = pkgutil.resolve_name(f"{module}.{node.func.id}")
        keywords = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
        option = option_class(*map(ast.literal_eval, node.args), **keywords)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a class and its arguments, such as mymodule:Mine(7) ({error})"
        ) from None
    if not isinstance(option, Option):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mask and no score of CUDA, such as rawattn.mask:Window(3); what rawattn makes of a Python function, "
            "rawattn.explain says for the arrays of a call"
        )
    return option


def _read_window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if side == "none" else int(side) for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair such as 128,0 or none,0") from None
    return left, right


def _read_numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 512,4096")
    return [int(number) for number in text.split(",")]


def _read_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an int from 1 up")
    return int(text)


def _read_limit(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 up")


def _read_seconds(text: str) -> float:
    if not (match := re.fullmatch(r"(\d+)([dh])", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days or hours such as 30d or 12h")
    return int(match[1]) * {"d": 86400.0, "h": 3600.0}[match[2]]


def _make_layer_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("layer").add_argument
    add("--dtype", choices=[*ELEMENTS], help="number format; default: bf16")
    add("--heads", type=_read_count, metavar="N", help="heads of q; default: 16")
    add("--kv-heads", type=_read_count, metavar="N", help="heads of k and v; default: as many")
    add("--head-dim", type=_read_count, metavar="N", help="columns of q and k; default: 128")
    add("--head-dim-v", type=_read_count, metavar="N", help="columns of v and o; default: as many")
    add("--causal", action="store_true", help="each query keeps the keys up to its own position")
    add("--softcap", type=float, metavar="X", help="cap of the logits")
    return parser


def _make_problem_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=[_make_layer_options()])
    add = parser.add_argument_group("problem").add_argument
    arch_text = f"what it is for, of {KNOWN}, or cpu; default: the GPU here, {TYPICAL['sm_90a'].name} where there is none"
    add("--arch", type=_read_arch, metavar="ARCH", help=arch_text)
    add("--batch", type=int, default=2, metavar="N", help="sequences; default: 2")
    add("--length", type=int, default=4096, metavar="N", help="queries of a sequence; default: 4096")
    add("--kv-length", type=int, metavar="N", help="keys of a sequence; default: as many")
    window_text = "keys kept before and after that position, such as 128,0 or none,0"
    add("--window", type=_read_window, metavar="LEFT,RIGHT", help=window_text)
    parser.set_defaults(dtype="bf16", heads=16, head_dim=128)
    add("--mask", type=_read_option, metavar="MODULE:CALL", help="a mask of your own, such as mymodule:Mine(7)")
    add("--score", type=_read_option, metavar="MODULE:CALL", help="a score of your own")
    add("--varlen", action="store_true", help="sequences packed end to end, as attention_varlen takes them")
    add("--lse", action="store_true", help="lse is wanted beside o")
    return parser


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m rawattn", description="Attention kernels, compiled at run time.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(run=lambda options: demo.run(console))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, run: Callable[[Options], int], text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=parents)
        command.set_defaults(run=run)
        return command

    problem = _make_problem_options()
    add("demo", lambda options: demo.run(console), "compute, check and time attention on this machine; the default")
    add("doctor", lambda options: doctor.run(console), "check what attention needs here, and say how to get what is missing")
    show_parser = add("show", show, "print what a kernel is compiled from, and a summary of its machine code", problem)
    show_parser.add_argument("--all", action="store_true", help="print every file, not config.cuh alone")
    add("choose", explain, "print which kernel and configuration a problem gets, and why", problem)
    compile_parser = add("compile", compile, "compile a kernel into the cache, for which no GPU is needed", problem)
    compile_parser.epilog = (
        "A few kernels, compiled together, serve all lengths, batches, numbers of heads, window sizes and caps on a device; "
        "dtype, head dims, the kind of mask, softcap or none, varlen, lse and, with attn_fwd_mma, few queries of grouped heads "
        "each make others. To prepare another machine, compile for each kind of call that it will see and copy the cache folder "
        "there: these calls then need no NVRTC. Without a GPU here a typical board of the architecture is prepared for; one with "
        "another number of multiprocessors may want other configurations."
    )
    add_option = compile_parser.add_argument
    add_option("--out", type=pathlib.Path, metavar="FOLDER", help="also write machine code, sources and log into a folder")
    add_option("--force", action="store_true", help="let --out overwrite files that differ")
    bundle_parser = add("bundle", bundle, "write the kernels that an application needs into one file, for rawattn.load_bundle")
    bundle_parser.epilog = (
        "Run the application with RAWATTN_LOG=FILE first, which records its operations, or write them with "
        "json.dumps(operation.to_json()), one a line. Without --spec the file has decoding and prefill by attention_append, in "
        "bf16 over pages of 16 rows in a page table, packed or not, with neox rotary embeddings of whole heads or none, for "
        f"{'; '.join(dict.fromkeys(layer.name for layer in USUAL))}, and models with layers of these head sizes, windows and "
        "sinks. With masks or scores of your own call rawattn.save_bundle where they are imported. No GPU is needed; those that "
        "are here are prepared for besides the common boards of each architecture."
    )
    add_option = bundle_parser.add_argument
    add_option("--arch", required=True, metavar="ARCH,...", help=f"architectures, of {KNOWN}")
    add_option("--spec", type=pathlib.Path, metavar="FILE", help="recorded operations; default: those of usual models")
    add_option("--out", type=pathlib.Path, required=True, metavar="FILE", help="the file to write, such as kernels.zip")
    text = "time attention in your shapes, forward and backward, beside torch's"
    bench_parser = add("bench", lambda options: bench.run(options, console), text, _make_layer_options())
    bench_parser.epilog = (
        "Without --like one layer is measured, on a CPU of 4 heads of 64 in fp32 by default. Cells are TFLOP/s, on a CPU "
        "GFLOP/s, of what the mask keeps; the backward is timed alone."
    )
    add_option = bench_parser.add_argument
    add_option("--like", type=pathlib.Path, metavar="FILE", help="config.json of a transformers model, whose layers are measured")
    add_option("--lengths", type=_read_numbers, metavar="N,...", help="lengths; default: 512 to 16384, on a CPU 128 to 512")
    add_option("--tokens", type=_read_count, metavar="N", help="tokens of a call; default: 16384, on a CPU 512")
    add_option("--seconds", type=_read_limit, default=60.0, metavar="X", help="begin nothing after this time; default: 60")
    add_option("--plot", type=pathlib.Path, metavar="FILE", help="also draw it, into a file such as attention.svg")
    clear_parser = add("clear", clear, "empty the cache")
    clear_text = "remove only what was not used for so long, such as 30d or 12h; known to a day"
    clear_parser.add_argument("--unused", type=_read_seconds, default=0.0, metavar="TIME", help=clear_text)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; gives its exit status, 0 where all went well."""
    options = _make_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except (RawattnError, CacheWarning, OSError) as error:
        print(f"rawattn: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

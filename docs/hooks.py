"""This module says what mkdocs puts in place of ``{{ ... }}`` in the pages: tables and drawings that follow from the sources and
the records.

{{ support Forward }}                        which kernel takes what, by the kernels' own answers
{{ record h200/decode.md 1 }}                a table of a file of perf/record, and from which run it is
{{ figure h200/bench-paper-burst.json bars What it shows }}
{{ cuda attn_fwd.cu struct Producer }}       a part of a file of cuda_src: from the line with these words to its closing brace
{{ barriers attn_fwd.cu }}                    the table of barriers in its head
{{ timeline }}                               the drawing of docs/timeline.py
{{ tiles documents }}                         the tiles of the mask that this section of gallery.md makes, and their shares
{{ beside_flex documents }}                   the speed of a function of perf/lib/functions.py beside FlexAttention

Whatever is not found raises, so the build fails.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS, CUDA = ROOT / "perf" / "record", ROOT / "cuda_src"
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import charts  # noqa: E402
import numpy as np  # noqa: E402
import timeline  # noqa: E402

from rawattn import trace  # noqa: E402
from rawattn.driver.device import TYPICAL  # noqa: E402
from rawattn.driver.device import cpu as this_cpu  # noqa: E402
from rawattn.operation import AttentionKVCache, Backward, Forward  # noqa: E402
from rawattn.operation.spec import Spec  # noqa: E402
from rawattn.runtime.select import KERNELS_OF  # noqa: E402
from rawattn.trace.classes import CUT, EMPTY, FULL, classify  # noqa: E402
from rawattn.variant.element import ELEMENTS, FP8  # noqa: E402
from rawattn.variant.function import option_of  # noqa: E402
from rawattn.variant.ready import Biased  # noqa: E402

FORMS = ("bf16", "fp16", "fp32", "fp64")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills in a page; mkdocs calls it."""

    def filled(match: re.Match[str]) -> str:
        name, _, rest = match[1].partition(" ")
        return figure(rest, config, files, page) if name == "figure" else MAKERS[name](rest)

    return re.sub(r"^\{\{ (.+?) \}\}$", filled, markdown, flags=re.MULTILINE)


# ---- what kernels support

MIDDLE: dict[str, Any] = {"batch": 2, "q_len": 512, "kv_len": 512, "heads": 4, "kv_heads": 4, "head_dim": 64, "head_dim_v": 64}
CACHE: dict[str, Any] = {"q_len": 1, "heads": 8, "kv_heads": 2, "pages": 64, "page_size": 16, "form": "table", "table": 32}
DOC, NUMBERS = np.zeros(512, np.int32), np.zeros((4, 512, 512), np.float32)


def function(value: Any, role: str) -> Spec:
    """The options with a Python function for the mask or the score."""
    traced, arrays, numbers = trace.bind(value, role)
    forms = [(element, array.shape) for (element, _), array in zip(traced.code.arrays, arrays, strict=True)]
    return dataclasses.replace(Spec(), **{role: option_of(traced, forms, numbers, (2, 4, 512, 512))})


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"spec": Spec.of(causal=True)},
    "window": {"spec": Spec.of(window=(128, 64))},
    "causal and window": {"spec": Spec.of(causal=True, window=(128, 64))},
    "a function as mask": {"spec": function(lambda q, kv: DOC[q] == DOC[kv], "mask")},
    "softcap": {"spec": Spec.of(softcap=30.0)},
    "a function as score": {"spec": function(lambda s, h, q, kv: s + NUMBERS[h, q, kv], "score")},
    "`alibi`": {"spec": function(Biased(slopes=NUMBERS[:, 0, 0]), "score")},
    "sinks": {"sinks": True},
}
PLAIN = {  # not over caches
    "`bias`": {"spec": function(Biased(bias=NUMBERS), "score")},
    "`dropout`": {"spec": Spec.of(dropout=0.1)},
}
ROWS = {
    "grouped heads": {"heads": 8, "kv_heads": 2},
    "packed sequences": {"varlen": True, "total_q": 700, "total_kv": 700},
    "`q_offset`, `kv_offset`": {"spec": Spec.of(causal=True, q_offset=512)},
    "`q_lens`, `kv_lens`": {"q_lens": True, "kv_lens": True},
}
OF_OPERATION: dict[str, dict[str, dict[str, Any]]] = {
    "Forward": OPTIONS | PLAIN | ROWS | {
        "`constant_time`": {"spec": Spec.of(constant_time=True)},
        "`invariant`": {"spec": Spec.of(invariant=True)},
    },
    "Backward": OPTIONS | PLAIN | ROWS,
    "AttentionKVCache": OPTIONS | {
        "dense cache": {"form": "dense", "table": 1, "pages": 2, "page_size": 512},
        "pages of one row": {"page_size": 1, "table": 512},
        "several queries": {"q_len": 16},
        **{f"cache of {name}": {"kv_element": element} for name, element in FP8.items()},
        "`kv_begin`": {"kv_begin": True},
        "`causal` of each sequence": {"causal_each": True},
    },
}  # fmt: skip


def support(operation: str) -> str:
    """A column for each kernel of an operation, a row for each property."""
    rows: dict[str, list[str]] = {}
    classes = {"Forward": Forward, "Backward": Backward, "AttentionKVCache": AttentionKVCache}
    devices = *TYPICAL.values(), this_cpu()
    kernels = [x for x in KERNELS_OF[classes[operation]] if any(takes(x, plain(operation), each) for each in devices)]
    for kernel in kernels:
        for name, value in properties(kernel, operation):
            rows.setdefault(name, []).append(value)
    names = " | ".join(f"`{kernel.name}`" for kernel in kernels)
    lines = [f"| | {names} |", f"| --- |{' --- |' * len(kernels)}"]
    return wide([*lines, *(f"| {name} | {' | '.join(values)} |" for name, values in rows.items())])


def properties(kernel: Any, operation: str) -> Iterable[tuple[str, str]]:
    """Returns what a kernel answers: by name, in one order for all kernels."""
    devices = [each for each in (*TYPICAL.values(), this_cpu()) if takes(kernel, plain(operation), each)]
    yield "devices", ", ".join(each.arch for each in devices)
    forms = [name for name in FORMS if takes(kernel, plain(operation, element=ELEMENTS[name]), devices[-1])]
    yield "formats", ", ".join(forms)
    for name in ("head_dim", "head_dim_v"):
        sizes = (size for size in range(1, 1025) if takes(kernel, plain(operation, **{name: size}), devices[-1]))
        yield f"`{name}`", spanned(sizes)
    for name, changes in OF_OPERATION[operation].items():
        yield name, "yes" if takes(kernel, plain(operation, **changes), devices[-1]) else "no"
    if operation == "Backward":
        ops = [plain(operation, spec=Spec.of(deterministic=flag)) for flag in (True, False)]
        ordered, free = ([] if kernel.name == "cpu" else kernel.candidates(op, devices[-1])[:1] for op in ops)
        yield "`deterministic=False`", "the same bits" if ordered == free else "faster, other bits"


def plain(operation: str, **changes: Any) -> Any:
    """An operation of the middle of the road, but for changes."""
    if operation == "AttentionKVCache":
        return AttentionKVCache(**{"element": ELEMENTS["bf16"], **MIDDLE, **CACHE, **changes})
    if operation == "Forward":
        return Forward(**{"element": ELEMENTS["bf16"], **MIDDLE, **changes})
    forward = plain("Forward", **changes)
    return Backward(dataclasses.replace(forward, spec=dataclasses.replace(forward.spec, return_lse=True)))


def takes(kernel: Any, op: Any, device: Any) -> bool:
    return not kernel.supports(op, device)


def spanned(numbers: Iterable[int]) -> str:
    """Numbers as "1 to 512" or "multiples of 8, 8 to 256"."""
    found = list(numbers)
    step = found[1] - found[0] if len(found) > 1 else 1
    if found != list(range(found[0], found[-1] + 1, step)):
        raise ValueError(f"numbers without a simple rule: {found}")
    return f"{found[0]} to {found[-1]}" if step == 1 else f"multiples of {step}, {found[0]} to {found[-1]}"


def wide(lines: Iterable[str]) -> str:
    """A table in a box of its own that scrolls."""
    return "\n".join(['<div class="wide" markdown>', "", *lines, "", "</div>"])


# ---- records


def record(words: str) -> str:
    """A table of a record, with its run's machine and date below."""
    path, _, number = words.partition(" ")
    text = (RECORDS / path).read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    facts = dict(re.findall(r"(?:^- |, |^)(date|device|commit|nvrtc):? ([^,\n]+)", text, re.MULTILINE))
    run = f"{facts['device']}, {facts['date'][:10]}, commit {facts['commit'][:8]}, NVRTC {facts['nvrtc']}: perf/record/{path}"
    table = re.sub(r"\bours\b", "rawattn", tables[int(number) - 1])
    return f"{wide([table])}\n\n<small>{run}</small>\n"


def figure(words: str, config: Any, files: Any, page: Any) -> str:
    """A figure of a run that perf.bench recorded, drawn by perf.plot. Each of its panels becomes a file of the site: bars have
    one for each head_dim and mask, which stand beside each other where there is room."""
    import io

    from matplotlib import rc_context
    from mkdocs.structure.files import File

    from perf import plot
    from perf.lib.sets import from_json, mask_label

    path, kind, caption = words.split(" ", 2)
    run, images = plot.Run.read(RECORDS / path), []
    names = ["ours", *(peer for peer in ("fa3", "cudnn", "fa2") if peer in run.peers)]
    panels: dict[str, list[Any]] = {}
    for result in run.results:
        case = from_json(result.case)
        panels.setdefault(f"{case.head_dim}-{mask_label(case)}" if kind == "bars" else "all", []).append(result)
    caption = f"{caption}: {run.machine['device']}, {run.machine['date'][:10]}, commit {run.machine['commit'][:8]}"
    for panel, results in panels.items():
        drawing, name = io.StringIO(), f"figures/{pathlib.PurePath(path).stem}-{kind}-{panel}.svg"
        with rc_context({"font.size": 11}):
            draw = {"bars": plot.bars, "roofline": plot.roofline}[kind]
            draw(dataclasses.replace(run, results=results), names).savefig(drawing, format="svg")
        files.append(File.generated(config, name, content=drawing.getvalue()))
        target = "../" * page.url.count("/") + name
        images.append(f'<a href="{target}"><img src="{target}" alt="{caption}, {panel}"></a>')
    return f'<figure class="panels">{"".join(images)}<figcaption>{caption}</figcaption></figure>'


# ---- masks

GALLERY = ROOT / "docs" / "gallery.md"
SIDE = 64  # queries and keys of a tile in the gallery's pictures


def tiles(heading: str) -> str:
    """The tiles of the mask that a section of the gallery makes, as a kernel finds them: by bounds, without the pairs."""
    text = GALLERY.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    block = re.search(r"^```python\n(.*?)^o = ", section[1], re.MULTILINE | re.DOTALL) if section else None
    if block is None:
        raise ValueError(f"{GALLERY} has no section {heading!r} with a block of Python that makes a mask")
    values: dict[str, Any] = {}
    exec(block[1], values)
    (_, n, _, _), (traced, arrays, numbers) = values["q"].shape, trace.bind(values["mask"], "mask")
    first = np.arange(0, n, SIDE)
    last = np.minimum(first + SIDE, n) - 1
    found = classify(traced.code, arrays, numbers, 0, 0, (first[:, None], last[:, None]), (first, last), n, n)
    empty, cut, full = (float((found == kind).mean()) for kind in (EMPTY, CUT, FULL))
    shares = f"{empty:.0%} of the tiles are skipped, {cut:.0%} ask their pairs, {full:.0%} are full"
    return f'<figure class="mask">{charts.tiles(found, f"{heading}: {shares}")}<figcaption>{shares}</figcaption></figure>'


def beside_flex(name: str) -> str:
    """How a function stands beside FlexAttention, forward and, where it was timed, backward."""
    from perf.lib import functions
    from perf.lib.report import Run

    sizes = {
        "sliding": f" a window of {functions.WINDOW} keys,",
        "documents": f" documents of {functions.DOCUMENT} tokens in the mean,",
        "documents+causal": f" documents of {functions.DOCUMENT} tokens in the mean,",
        "neighbours": f" {functions.NEIGHBOURS} x {functions.NEIGHBOURS} neighbours on a grid of 64 x 64,",
        "blocks": f" {functions.KEPT_BLOCKS:.0%} of the blocks and the diagonal,",
    }
    said, runs = [], {"forward": "bench-functions-burst", "backward": "bench-masks-bwd-burst"}
    for part, stem in runs.items():
        run = Run.read(RECORDS / "h200" / f"{stem}.json")
        for result in run.results:
            if result.case.get("function") == name:
                ratio, us = result.ratio("flex"), {timing.name: timing.us for timing in result.timings}
                said.append(f"{part} {ratio:.2f} times FlexAttention's speed ({us['ours']:.0f} us beside {us['flex']:.0f})")
                machine = f"{run.machine['device']}, {result.label.split(' f:')[0]},{sizes.get(name, '')} {stem}"
    if not said:
        raise ValueError(f"no record of {name!r} beside FlexAttention")
    return f"<small>{'; '.join(said)}; {machine}</small>"


# ---- kernels


def cuda(words: str) -> str:
    """A part of a source, as a block of code."""
    path, _, head = words.partition(" ")
    lines = (CUDA / path).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if head in line and not line.lstrip().startswith("//"))
    depth, part = 0, []
    for line in lines[first:]:
        part.append(line)
        depth += line.count("{") - line.count("}")
        if depth == 0 and ("}" in line or ";" in line):
            break
    else:
        raise ValueError(f"{path} has no end of {head!r}")
    indent = len(part[0]) - len(part[0].lstrip())
    text = "\n".join(line[indent:] if line[:indent].isspace() else line for line in part)
    return f'``` {{.cpp title="cuda_src/{path}, from line {first + 1}"}}\n{text}\n```'


def barriers(path: str) -> str:
    """The table of barriers in a kernel's head."""
    head = (CUDA / path).read_text(encoding="utf-8").partition("\n\n#include")[0]
    lines = [line.removeprefix("//").strip() for line in head.splitlines() if re.match(r"//   \S+.*\S\s{2,}\S", line)]
    rows = [re.split(r"\s{2,}", line) for line in lines]
    names, *others = rows
    cells = [[f"`{name}`", *rest] for name, *rest in others]
    return wide(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *cells))


def drawing(_: str) -> str:
    return f'<figure><div class="wide">\n{timeline.svg(timeline.simulated())}\n</div></figure>'


MAKERS: dict[str, Callable[[str], str]] = {
    "support": support, "record": record, "cuda": cuda, "barriers": barriers, "timeline": drawing,
    "tiles": tiles, "beside_flex": beside_flex,
}  # fmt: skip

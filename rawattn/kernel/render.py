"""Everything NVRTC is given: a ``.cu`` of ``cuda_src/``, the headers it reaches, and ``config.cuh``, which is written here.

``config.cuh`` holds, in this order, the constants (``namespace cfg``), ``struct Args``, the matrix products in use, and for each
axis of variation the include of its option and a ``using`` line.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .. import package
from ..compile.compiler import Source
from ..trace import cuda_lines
from ..variant import Option
from ..variant.element import Element
from ..variant.field import Fields

FOLDER = next(
    f for f in (package.FOLDER / "cuda_src", package.FOLDER.parent / "cuda_src") if f.is_dir()
)  # in a wheel; in a checkout

# C++ type -> (bytes, alignment, format of the struct module). Args is laid out as the compiler does it; Facts.args_bytes agrees.
CTYPES = {
    "TmaTensor": (192, 64, "192s"),
    "TmaTensorOnce": (192, 64, "192s"),
    "TmaClusterTensor": (192, 64, "192s"),
    "StridedTensor": (32, 8, "32s"),
    "StridedOutput": (32, 8, "32s"),
    "PartList": (1024, 8, "1024s"),
    "Left*": (8, 8, "Q"),
    "TmaPages": (192, 64, "192s"),
    "TmaPageRows": (192, 64, "192s"),
    "TmaPageRowsOnce": (192, 64, "192s"),
    "TmaClusterPageRows": (192, 64, "192s"),
    "TmaPageBoxes": (192, 64, "192s"),
    "TmaHeads": (192, 64, "192s"),
    "StridedPages": (40, 8, "40s"),
    "Element*": (8, 8, "Q"),
    "OElement*": (8, 8, "Q"),
    "Number*": (8, 8, "Q"),
    "const Number*": (8, 8, "Q"),
    "const Element*": (8, 8, "Q"),
    **{f"{const}{element}*": (8, 8, "Q") for element, _ in cuda_lines.CTYPES.values() for const in ("", "const ")},
    "function::Divisor": (12, 4, "12s"),
    "u32*": (8, 8, "Q"),
    "u64*": (8, 8, "Q"),
    "const void*": (8, 8, "Q"),
    "void*": (8, 8, "Q"),
    "i64": (8, 8, "q"),
    "i32": (4, 4, "i"),
    "float": (4, 4, "f"),
}
ELEMENT_AXES = ("Element", "QElement", "KvElement", "OElement")  # of products' operands; of q; of k and v; of o
_NUMBERS = {"fp32": (4, 4, "f"), "fp64": (8, 8, "d")}  # what "Number" is
TENSORS = {  # C++ type -> its file
    "TmaTensor": "tile/tma_tensor.cuh",
    "TmaTensorOnce": "tile/tma_tensor.cuh",
    "TmaClusterTensor": "tile/tma_cluster_tensor.cuh",
    "StridedTensor": "tile/strided_tensor.cuh",
    "StridedOutput": "tile/strided_tensor.cuh",
    "PartList": "tile/part_list.cuh",
    "Left*": "tile/share.cuh",
    "TmaPages": "tile/pages.cuh",
    "TmaPageRows": "tile/page_rows.cuh",
    "TmaPageRowsOnce": "tile/page_rows.cuh",
    "TmaClusterPageRows": "tile/tma_cluster_page_rows.cuh",
    "TmaPageBoxes": "tile/page_boxes.cuh",
    "TmaHeads": "tile/tma_heads.cuh",
    "StridedPages": "tile/strided_pages.cuh",
    "function::Divisor": "function/integer.cuh",
    **{f"{const}function::{x}*": "function/element.cuh" for x in ("Bool", "Bf16", "Fp16") for const in ("", "const ")},
}
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def wgmma(
    name: str, element: Element, n: int, *, a_in_registers: bool, b_by_rows: bool, a_by_rows: bool = False, negate: bool = False
) -> str:
    """A struct with one matrix product of a warpgroup, 64 x n x 16 with float32 sums: d (+)= a b, or d (-)= a b where ``negate``.

    ``a`` comes from shared memory or registers, ``b`` from shared memory, their contraction along the columns of a tile or along
    its rows. https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
    """
    sums = n // 2
    a_words = 4 if a_in_registers else 1
    a_operand = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}" if a_in_registers else f"%{sums}"
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(a)'
    flags = f"{-1 if negate else 1}, 1{'' if a_in_registers else f', {int(a_by_rows)}'}, {int(b_by_rows)}"
    b, add = sums + a_words, sums + a_words + 1
    return f"""\
struct {name} {{
    static constexpr int accumulators = {sums};
    static constexpr float sign = {-1 if negate else 1}.f;
    __device__ static void multiply(float (&d)[{sums}], {"const u32* a" if a_in_registers else "u64 a"}, u64 b, bool add) {{
        asm volatile(
            "{{ .reg .pred add; setp.ne.b32 add, %{add}, 0; "
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element.wgmma}.{element.wgmma} "
            "{{{", ".join(f"%{i}" for i in range(sums))}}}, {a_operand}, %{b}, add, {flags}; }}"
            : {", ".join(f'"+f"(d[{i}])' for i in range(sums))}
            : {a_inputs}, "l"(b), "r"(i32(add)));
    }}
}};
"""


class ArgsLayout(NamedTuple):
    """The layout of ``struct Args`` in memory. ``pack`` takes a value for each field, in order."""

    pack: struct.Struct
    offsets: dict[str, int]
    formats: dict[str, str]

    def only(self, names: Sequence[str]) -> struct.Struct:
        """The memory of ``struct Args`` with nothing but these fields, in order, in it."""
        text, end = "<", 0
        for name in names:
            text += f"{self.offsets[name] - end}x{self.formats[name][1:]}"
            end = struct.calcsize(text)
        return struct.Struct(f"{text}{self.pack.size - end}x")


@functools.lru_cache(maxsize=1024)
def layout(fields: Fields, number: str = "fp32") -> ArgsLayout:
    """The layout of ``struct Args``; ``number`` is what is computed in, "fp32" or "fp64"."""
    ctypes = CTYPES | {"Number": _NUMBERS[number]}
    text, offsets, formats, end, widest = "<", {}, {}, 0, 1
    for field in fields:
        size, align, form = ctypes[field.ctype]
        begin = -(-end // align) * align
        text += f"{begin - end}x{form}"
        offsets[field.name], formats[field.name] = begin, f"<{form}"
        end, widest = begin + size, max(widest, align)
    return ArgsLayout(struct.Struct(f"{text}{-end % widest}x"), offsets, formats)


class ConfigHeader(str):
    """The text of ``config.cuh``. ``texts`` has the headers that were written for its options, by name."""

    texts: Mapping[str, str] = {}


def config_header(
    constants: Mapping[str, int], fields: Fields, products: Sequence[str], options: Mapping[str, Option]
) -> ConfigHeader:
    """``config.cuh``. ``options``: axis (the C++ name) -> option, in the order of inclusion. Number formats that are not among
    them are ``Element``'s."""
    constants = dict(constants)
    for option in options.values():
        constants.update(option.constants)
    elements = {axis: options.get(axis, options["Element"]) for axis in ELEMENT_AXES}
    values = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines = ["#pragma once", "namespace cfg {", *values, "}", ""]
    includes = dict.fromkeys(TENSORS[field.ctype] for field in fields if field.ctype in TENSORS)
    includes |= dict.fromkeys(source for option in elements.values() for source in option.sources)
    lines += [f'#include "{source}"' for source in includes]
    lines += [f"using {axis} = {option.cuda_type};" for axis, option in elements.items()]
    lines += ["using Number = Element::Number;", ""]
    lines += ["struct Args {", *(f"    {field.ctype} {field.name};" for field in fields), "};", "", *products]
    for axis, option in options.items():
        if axis in elements:
            continue
        lines += [*(f'#include "{source}"' for source in option.sources), f"using {axis} = {option.cuda_type};"]
    config = ConfigHeader("\n".join(lines) + "\n")
    config.texts = {name: text for option in options.values() for name, text in getattr(option, "texts", {}).items()}
    return config


@functools.cache
def _read(path: str) -> str:
    return (FOLDER / path).read_text(encoding="utf-8")


def source(file: str, config: str, arch: str) -> Source:
    """The source of ``file`` of ``cuda_src/`` for NVRTC, with the headers that it reaches and no others, so that a change to one
    recompiles just the kernels that use it. Headers that were written for its options come with ``config``."""
    written = config.texts if isinstance(config, ConfigHeader) else {}
    headers = {"config.cuh": str(config)}
    pending = [_read(file), config]
    while pending:
        for path in _INCLUDE.findall(pending.pop()):
            if path not in headers:
                headers[path] = written[path] if path in written else _read(path)
                pending.append(headers[path])
    return Source(name=file, text=_read(file), headers=tuple(sorted(headers.items())), arch=arch)

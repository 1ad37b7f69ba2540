"""Everything NVRTC is given: a ``.cu`` of ``cuda_src/``, the headers it reaches, and ``config.cuh``, which is written here.

``config.cuh`` holds, in this order, the constants (``namespace cfg``), ``struct Args``, the matrix products in use, and for each
axis of variation the include of its choice and a ``using`` line.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .compiler import Source
from .variant import Fields, Option
from .variant.element import Element

_PACKAGE = pathlib.Path(__file__).parent
FOLDER = next(f for f in (_PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src") if f.is_dir())  # in a wheel; in a checkout

# C++ type -> (bytes, alignment, NumPy format). Args is laid out as the compiler lays it out; Facts.args_bytes must agree.
CTYPES = {
    "TmaTensor": (192, 64, "V192"),
    "StridedTensor": (32, 8, "V32"),
    "PartList": (1024, 8, "V1024"),
    "Element*": (8, 8, "u8"),
    "Number*": (8, 8, "u8"),
    "float*": (8, 8, "u8"),
    "i32*": (8, 8, "u8"),
    "const i32*": (8, 8, "u8"),
    "const float*": (8, 8, "u8"),
    "const Number*": (8, 8, "u8"),
    "i64": (8, 8, "i8"),
    "i32": (4, 4, "i4"),
}
TENSORS = {  # C++ type -> its file
    "TmaTensor": "tile/tma_tensor.cuh",
    "StridedTensor": "tile/strided_tensor.cuh",
    "PartList": "tile/part_list.cuh",
}
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def wgmma(name: str, element: Element, n: int, *, a_in_registers: bool, b_by_rows: bool, negate: bool = False) -> str:
    """A struct with one matrix product of a warpgroup, 64 x n x 16 with float32 sums: d (+)= a b, or d (-)= a b where ``negate``.

    ``a`` comes from shared memory or registers, ``b`` from shared memory, its contraction along the columns of a tile or along
    its rows. https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
    """
    sums = n // 2
    a_words = 4 if a_in_registers else 1
    a_operand = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}" if a_in_registers else f"%{sums}"
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(a)'
    flags = f"{-1 if negate else 1}, 1{'' if a_in_registers else ', 0'}, {int(b_by_rows)}"
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


def layout(fields: Fields, number: npt.DTypeLike = np.float32) -> tuple[dict[str, tuple[int, str]], int]:
    """Offset and NumPy format of each field of ``struct Args``, and its size in bytes; ``number`` is what is computed in."""
    size = np.dtype(number).itemsize
    ctypes = CTYPES | {"Number": (size, size, f"f{size}")}
    places: dict[str, tuple[int, str]] = {}
    end, widest = 0, 1
    for name, ctype in fields:
        size, align, form = ctypes[ctype]
        begin = -(-end // align) * align
        places[name] = (begin, form)
        end, widest = begin + size, max(widest, align)
    return places, -(-end // widest) * widest


def config_header(constants: Mapping[str, int], fields: Fields, products: Sequence[str], choices: Mapping[str, Option]) -> str:
    """``config.cuh``. ``choices``: axis (the C++ name) -> choice, in the order of inclusion; the first is the element."""
    constants = dict(constants)
    for choice in choices.values():
        constants.update(choice.constants)
    element, *rest = choices.items()
    values = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines = ["#pragma once", "namespace cfg {", *values, "}", ""]
    includes = [*dict.fromkeys(TENSORS[ctype] for _, ctype in fields if ctype in TENSORS), *element[1].sources]
    lines += [f'#include "{source}"' for source in includes]
    lines += ["using Number = Element::Number;", ""]
    lines += ["struct Args {", *(f"    {ctype} {name};" for name, ctype in fields), "};", "", *products]
    for axis, choice in rest:
        lines += [*(f'#include "{source}"' for source in choice.sources), f"using {axis} = {choice.cuda_type};"]
    return "\n".join(lines) + "\n"


@functools.cache
def _text(path: str) -> str:
    return (FOLDER / path).read_text(encoding="utf-8")


def source(file: str, config: str, arch: str) -> Source:
    """What NVRTC is given for ``file`` of ``cuda_src/``: the headers it reaches and no others, so that a change to one
    recompiles just the kernels that use it."""
    headers = {"config.cuh": config}
    pending = [_text(file), config]
    while pending:
        for path in _INCLUDE.findall(pending.pop()):
            if path not in headers:
                headers[path] = _text(path)
                pending.append(headers[path])
    return Source(name=file, text=_text(file), headers=tuple(sorted(headers.items())), arch=arch)

"""A few lines of CUDA around a file of ``cuda_src/``, run by one block on a GPU."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from rawattn.array import tma
from rawattn.compile import compiler
from rawattn.driver import context, tensor_map
from rawattn.driver.launch import BoundLaunch, LoadedFunction
from rawattn.kernel import render
from rawattn.variant import Option
from rawattn.variant.element import BF16
from rawattn.variant.field import Field, Fields

HEADERS = {path.relative_to(render.FOLDER).as_posix(): path.read_text() for path in sorted(render.FOLDER.rglob("*.cuh"))}
ENTRY = """
extern "C" __device__ Facts facts = {cfg::smem_bytes, sizeof(Args), cfg::threads, false};
extern "C" __global__ __launch_bounds__(cfg::threads) void snippet(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char smem[];
    run(args, smem);
}
"""


def source(
    text: str, fields: Fields, constants: Mapping[str, int], products: Sequence[str], options: Mapping[str, Option]
) -> compiler.Source:
    """Returns the source that is compiled: ``text`` behind a configuration like a kernel's."""
    config = render.config_header(constants, fields, products, {"Element": BF16, **options})
    headers = tuple({**HEADERS, "config.cuh": config}.items())
    return compiler.Source("snippet.cu", f'#include "config.cuh"\n#include "tile/facts.cuh"\n{text}{ENTRY}', headers, "sm_90a")


@functools.cache
def function(source: compiler.Source) -> LoadedFunction:
    """The compiled snippet, loaded once."""
    return LoadedFunction(compiler.compile(source).cubin, "snippet", 0)


def run(
    text: str, args: Mapping[str, tuple[str, Any]], *, threads: int = 32, smem_bytes: int = 0,
    products: Sequence[str] = (), options: Mapping[str, Option] | None = None, **constants: int,
) -> None:  # fmt: skip
    """Runs ``__device__ void run(const Args& args, unsigned char* smem)`` of the text in each thread.

    ``args`` are the fields of Args: name -> (type in C++, value); a CuPy array stands for a pointer.
    """
    import cupy

    constants = {"m_tiles_per_warp": 1, **constants, "threads": threads, "smem_bytes": smem_bytes}
    fields = tuple(Field(name, ctype) for name, (ctype, _) in args.items())
    loaded = function(source(text, fields, constants, products, options or {}))
    values = (value.data.ptr if isinstance(value, cupy.ndarray) else value for _, value in args.values())
    stream = cupy.cuda.get_current_stream()
    BoundLaunch(loaded, 1, render.layout(fields).pack.pack(*values), stream.ptr)()
    stream.synchronize()


def tensor(x: Any, box_rows: int) -> bytes:
    """The TmaTensor of a CuPy array of 16-bit numbers, (batch, rows, heads, columns) or (rows, heads, columns)."""
    shape = tma.geometry(x.shape, tuple(s // 2 for s in x.strides), 2, box_rows)
    with context.current(0):
        encoded = tensor_map.tensor_maps("fp16", shape.sizes, shape.strides, shape.box)(x.data.ptr)
    return encoded + struct.pack("<2i", shape.head_step, shape.batch_step)

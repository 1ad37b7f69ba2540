"""This module tests what NVRTC gets: the rendered configuration, the arguments' layout, and what may change a kernel's key."""

from __future__ import annotations

import dataclasses
import pathlib
import struct

import pytest

from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd, render
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.operation import Forward
from rawattn.variant.element import BF16, FP16, FP64, Element
from rawattn.variant.field import Value
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests.operations import forward, replace

GOLDEN = pathlib.Path(__file__).parent / "golden"
DEVICE = TYPICAL["sm_90a"]
ARCH = DEVICE.arch
PLAIN = forward(BF16, 2, 300, 300, 4, 4, 16, 16, scale=0.25)
MANY = forward(
    FP16, 2, 300, 400, 4, 2, 24, 16, scale=-0.2, mask=And(Causal("top_left"), Window(64, 0)), score=Softcap(30.0), varlen=True,
    total_q=500, total_kv=600, return_lse=True,
)  # fmt: skip
OPERATIONS = {"plain": (PLAIN, attn_fwd.AttnFwdConfig(128, 32, 2, 1)), "many": (MANY, attn_fwd.AttnFwdConfig(192, 48, 3, 2))}


def header(op: Forward, config: attn_fwd.AttnFwdConfig) -> str:
    return dict(ATTN_FWD.render(op, config, ARCH).headers)["config.cuh"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_golden(name: str) -> None:
    """After a change that is meant: python -m tests.host.kernel.test_render."""
    assert header(*OPERATIONS[name]) == (GOLDEN / f"{name}.cuh").read_text()


def words(cubin: bytes, symbol: str) -> tuple[int, ...]:
    """The u32 of a global variable: its bytes in the section that its symbol names. https://refspecs.linuxfoundation.org/elf"""
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        for at in range(offset, offset + length, 24):
            name, _, _, section, value, extent = struct.unpack_from("<IBBHQQ", cubin, at)
            if cubin[sections[link][4] + name :].startswith(symbol.encode() + b"\0"):
                return struct.unpack_from(f"<{extent // 4}I", cubin, sections[section][4] + value)
    raise KeyError(symbol)


@pytest.mark.parametrize("name", OPERATIONS)
def test_args_are_laid_out_as_the_compiler_does(name: str) -> None:
    op, config = OPERATIONS[name]
    layout = render.layout(ATTN_FWD.fields(op, config))
    offsets = ", ".join(f"__builtin_offsetof(Args, {field})" for field in layout.offsets)
    text = f'#include "config.cuh"\nextern "C" __device__ u32 layout[] = {{{offsets}, sizeof(Args)}};\n'
    source = dataclasses.replace(ATTN_FWD.render(op, config, ARCH), name="layout.cu", text=text)
    wanted = {**layout.offsets, "size": layout.pack.size}
    if tuple(map(int, compiler.nvrtc_version().split("."))) < (13, 1):
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} has no __builtin_offsetof")
    assert dict(zip(wanted, words(compiler.compile(source).cubin, "layout"), strict=True)) == wanted


@pytest.mark.parametrize("element, number", [(BF16, "fp32"), (FP64, "fp64")], ids=["fp32", "fp64"])
def test_every_type_is_laid_out_as_the_compiler_does_it(element: Element, number: str) -> None:
    """Size and alignment of all that may be in Args, also of what no kernel here has."""
    ctypes = render.CTYPES | {"Number": render._NUMBERS[number]}
    headers = "".join(f'#include "{file}"\n' for file in (*render.TENSORS.values(), *element.sources))
    asked = ", ".join(f"sizeof({name}), alignof({name})" for name in ctypes)
    aliases = "".join(f"using {axis} = {element.cuda_type};\n" for axis in render.ELEMENT_AXES)
    text = f'{headers}{aliases}using Number = Element::Number;\nextern "C" __device__ u32 sizes[] = {{{asked}}};\n'
    (config,) = (each for path, each in render.source("attn_fwd.cu", text, ARCH).headers if path == "config.cuh")
    source = dataclasses.replace(render.source("attn_fwd.cu", config, ARCH), name="sizes.cu", text='#include "config.cuh"\n')
    found = [*words(compiler.compile(source).cubin, "sizes")]
    assert found == [part for size, align, _ in ctypes.values() for part in (size, align)]
    assert all(struct.calcsize(f"<{form}") == size for size, _, form in ctypes.values())


@pytest.mark.parametrize("name", OPERATIONS)
def test_facts(name: str) -> None:
    op, config = OPERATIONS[name]
    cubin = compiler.compile(ATTN_FWD.render(op, config, ARCH)).cubin
    smem_bytes, args_bytes, threads, uses_pdl, needs_all_blocks = words(cubin, "facts")
    assert args_bytes == render.layout(ATTN_FWD.fields(op, config)).pack.size
    assert threads == 128 * (1 + config.consumers) and uses_pdl and not needs_all_blocks
    assert smem_bytes == attn_fwd.smem_bytes(config, op), "legal() takes a block for larger or smaller than it is"


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_filled(name: str) -> None:
    """By values(), which knows the operation, or by the plan, which knows the arrays and reads where the field says it from."""
    op, config = OPERATIONS[name]
    fields = ATTN_FWD.fields(op, config)
    assert {field.name for field in fields if type(field.fill) is Value} == set(ATTN_FWD.values(op, config, DEVICE))
    operands = {operand.name for operand in (*op.inputs, *op.outputs)}
    assert {getattr(field.fill, "operand", "q") for field in fields} == operands


SAME_KERNEL = [
    (PLAIN, {"batch": 70_000, "q_len": 1, "kv_len": 0}),
    (PLAIN, {"heads": 6, "kv_heads": 2}),
    (PLAIN, {"scale": 1e-30}),
    (PLAIN, {"scale": 0.0}),
    (MANY, {"total_q": 9, "total_kv": 9, "batch": 1}),
    (MANY, {"scale": -3.0}),
    (MANY, {"score": Softcap(5.0)}),
    (MANY, {"mask": And(Causal("top_left"), Window(None, 7))}),
]
OTHER_KERNEL = [
    (PLAIN, {"element": FP16}),
    (PLAIN, {"head_dim": 24}),
    (PLAIN, {"head_dim_v": 24}),
    (PLAIN, {"scale": -0.25}),
    (PLAIN, {"mask": Causal()}),
    (PLAIN, {"mask": Window(3, 3)}),
    (PLAIN, {"score": Softcap(5.0)}),
    (PLAIN, {"varlen": True}),
    (PLAIN, {"return_lse": True}),
    (MANY, {"mask": And(Causal(), Window(64, 0))}),
    (MANY, {"mask": And(Causal("top_left"), Window(64, 0, "top_left"))}),
    (MANY, {"mask": And(Window(64, 0), Causal("top_left"))}),
    (MANY, {"mask": Full()}),
    (MANY, {"score": Scale()}),
]


def changed(change: object) -> str:
    return str(change) if isinstance(change, dict) else "many" if change is MANY else "plain"


@pytest.mark.parametrize(("op", "change"), SAME_KERNEL, ids=changed)
def test_run_time_values_compile_nothing(op: Forward, change: dict[str, object]) -> None:
    config = attn_fwd.AttnFwdConfig()
    assert ATTN_FWD.render(replace(op, **change), config, ARCH).key == ATTN_FWD.render(op, config, ARCH).key


@pytest.mark.parametrize(("op", "change"), OTHER_KERNEL, ids=changed)
def test_kinds_and_sizes_make_another_kernel(op: Forward, change: dict[str, object]) -> None:
    config = attn_fwd.AttnFwdConfig()
    assert ATTN_FWD.render(replace(op, **change), config, ARCH).key != ATTN_FWD.render(op, config, ARCH).key


@pytest.mark.parametrize("change", [{"tile_q": 192}, {"tile_kv": 64}, {"stages": 3}, {"q_stages": 2}], ids=str)
def test_every_setting_makes_another_kernel(change: dict[str, int]) -> None:
    config = attn_fwd.AttnFwdConfig()
    assert ATTN_FWD.render(PLAIN, dataclasses.replace(config, **change), ARCH).key != ATTN_FWD.render(PLAIN, config, ARCH).key


def test_only_headers_in_use_are_given() -> None:
    """A change to another option's file must not compile this kernel anew."""
    given = {path for path, _ in ATTN_FWD.render(*OPERATIONS["plain"], ARCH).headers}
    assert {"ptx/tma.cuh", "variant/mask/full.cuh", "variant/rows/dense.cuh"} <= given
    assert not {"variant/mask/causal.cuh", "variant/rows/varlen.cuh", "variant/score/softcap.cuh"} & given


if __name__ == "__main__":
    for name in OPERATIONS:
        (GOLDEN / f"{name}.cuh").write_text(header(*OPERATIONS[name]))

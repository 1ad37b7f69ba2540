"""The score files, compiled for the host, against what the scores in Python say: values and derivatives of single logits."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rawattn import render
from rawattn.program import Field
from rawattn.variant.score import ConstantTimeSoftcap, Scale, Softcap
from tests import emulator, options
from tests.traced import files

TEXT = """\
#include "threads.hpp"
#include "tile/log_sum.cuh"
using Number = {number};
namespace cfg {{ {constants} }}
struct Args {{ {fields} }};
struct Rows {{}};
{includes}
extern "C" void ask(const Args* args, i32 b, i32 h, i32 n, i32 m, const Number* s, Number* logit, Number* slope) {{
    const {type} score(*args, Rows{{}}, {{b, h, 0, 0}});
    for (i32 q = 0; q < n; ++q)
        for (i32 kv = 0; kv < m; ++kv, ++s) {{
            *logit++ = score(*s, q, kv) * score.scale_log2 / Number(log2_e);
            *slope++ = score.derivative(*s, q, kv);
        }}
}}
"""
CAP = st.sampled_from([0.5, 5.0, 30.0, 1e4])
# constant_time is not for fp64, in which the polynomial of a small logit would show
SCORES = {"scale": st.builds(Scale), "softcap": st.builds(Softcap, CAP), "constant time": st.builds(ConstantTimeSoftcap, CAP)}


@functools.cache
def compiled(kind: Any, number: str, folder: pathlib.Path) -> ctypes.CDLL:
    """The type of a score, ``(type, sources, fields, constants)``."""
    name, sources, fields, constants = kind
    text = TEXT.format(
        number=number, type=name, includes="\n".join(f'#include "{source.replace("../", "up/")}"' for source in sources),
        constants="".join(f"constexpr i32 {key} = {value}; " for key, value in constants),
        fields="".join(f"{field.ctype} {field.name}; " for field in fields),
    )  # fmt: skip
    return emulator.compiled(text, files("tile/log_sum.cuh", *sources), folder)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, number)
        for name in (*SCORES, *options.SCORES)
        for number in ("fp32", "fp64")
        if (name, number) != ("constant time", "fp64")
    ],
)
def test_scores(name: str, number: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of dot products of every size, in each head; the sign of the scale is in them."""
    dtype, folder = {"fp32": np.float32, "fp64": np.float64}[number], tmp_path_factory.mktemp("scores")
    allowed = 2e-6 if number == "fp32" else 1e-13
    n, m = 7, 40
    dot = np.random.default_rng(0).standard_normal((n, m)) * np.geomspace(1e-3, 1e3, m)

    @hypothesis.settings(max_examples=10, derandomize=True)
    @hypothesis.given((SCORES | options.SCORES)[name], st.integers(0, 3), st.sampled_from([0.125, -0.5, 2.0]))
    def check(score: Any, head: int, scale: float) -> None:
        fields = (Field("scale", "Number"), *score.fields)
        kind = score.cuda_type, score.sources, fields, tuple(score.constants.items())
        cuda = compiled(kind, {"fp32": "float", "fp64": "double"}[number], folder)
        values = {"scale": abs(scale), **score.values}
        args = render.layout(fields, number).pack.pack(*(values[field.name] for field in fields))
        given = np.ascontiguousarray(dot * np.sign(scale), dtype)
        logit, slope = np.empty_like(given), np.empty_like(given)
        pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (given, logit, slope))
        cuda.ask(ctypes.create_string_buffer(args, len(args)), 1, head, n, m, *pointers)
        s, q, kv = given.astype(np.float64) * abs(scale), np.arange(n)[:, None], np.arange(m)[None]
        wanted = score.logit(np, s, 1, head, q, kv)
        own = score.slope(np, s, 1, head, q, kv)
        assert (abs(logit - wanted) <= allowed * (abs(wanted) + abs(s) + 1e-6)).all()
        assert (abs(slope - (1.0 if own is None else own)) <= 2 * allowed).all()

    check()

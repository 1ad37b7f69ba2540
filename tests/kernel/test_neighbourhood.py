"""Neighbourhood attention on a GPU: o and gradients against the definition, in each format, and the kernels that it gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import rawattn
from rawattn.sparse import GridTiles, neighbourhood

torch = pytest.importorskip("torch")

from tests.neighbourhoods import CASES, GridCase  # noqa: E402

pytestmark = pytest.mark.gpu("any")
WIDE = {
    "13 x 13": GridCase((40, 72), (13, 13), head_dim=128),
    "25 x 25, 64 columns": GridCase((48, 64), (25, 25), head_dim=64),
    "no tile is cut": GridCase((48, 64), (24, 40), (8, 8), head_dim=128),
    "three axes": GridCase((9, 20, 24), (5, 9, 9), head_dim=128),
}


def error(x: Any, wanted: Any) -> float:
    return float((x.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", [*CASES, *WIDE])
def test_definition(name: str, dtype: str) -> None:
    case = (CASES | WIDE)[name] if name in WIDE else dataclasses.replace(CASES[name], head_dim=64)
    *given, do = case.inputs("cuda", getattr(torch, dtype))
    q, k, v = (x.requires_grad_() for x in given)
    o = neighbourhood(q, k, v, case.kernel, **case.options)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = case.wanted(*exact)
    most = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}[dtype]
    assert error(o, wanted) < most
    found = torch.autograd.grad(o, (q, k, v), do)
    for x, y in zip(found, torch.autograd.grad(wanted, exact, do.double()), strict=True):
        assert error(x, y) < most
    again = torch.autograd.grad(neighbourhood(q, k, v, case.kernel, **case.options), (q, k, v), do)
    assert all(map(torch.equal, found, again)), "the same bits on every run"


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDE)
def test_kernels_of_hopper(name: str) -> None:
    case = WIDE[name]
    q, k, v, do = case.inputs("cuda", torch.bfloat16)
    tiles = GridTiles(case.grid, case.kernel, case.stride or 1, like=q)
    q, k, v, do = (tiles.to_tiles(x) for x in (q, k, v, do))
    o, lse = rawattn.attention(q, k, v, mask=tiles.mask, return_lse=True)
    assert rawattn.explain(q, k, v, mask=tiles.mask).selection.kernel.name == "attn_fwd"
    assert rawattn.explain_backward(do, q, k, v, o, lse, mask=tiles.mask).selection.kernel.name == "attn_bwd"


def test_graph() -> None:
    """Once a grid was seen, a graph takes the whole call: nothing waits for the device, and nothing is copied from the host."""
    q, k, v, _ = WIDE["13 x 13"].inputs("cuda", torch.bfloat16)
    wanted = neighbourhood(q, k, v, 13)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = neighbourhood(q, k, v, 13)
    o.zero_()
    graph.replay()
    assert torch.equal(o, wanted)

"""Neighbourhood attention through the kernels of Hopper, on the CPU: o and gradients against the definition."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from rawattn.sparse import neighbourhood
from tests.emulator.gpu import stand_in

torch = pytest.importorskip("torch")

from tests.neighbourhoods import GridCase  # noqa: E402

CASES = {
    "partial tiles": GridCase((12, 19), (5, 6)),
    "no tile is cut": GridCase((24, 24), (24, 8), (8, 8), heads=1),
    "three axes": GridCase((3, 7, 11), (2, 3, 5), (1, 2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_definition(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    *given, do = case.inputs(dtype=torch.bfloat16)
    exact = [x.double().requires_grad_() for x in given]
    wanted = case.wanted(*exact)
    gradients = torch.autograd.grad(wanted, exact, do.double())
    stand_in(monkeypatch, tmp_path)
    inputs = [x.requires_grad_() for x in given]
    o = neighbourhood(*inputs, case.kernel, **case.options)
    found: Any = torch.autograd.grad(o, inputs, do)
    for x, y in zip((o, *found), (wanted, *gradients), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)

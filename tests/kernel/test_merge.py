"""Results over different keys merged on a GPU, and added to float32 sums in place, against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rawattn

pytestmark = pytest.mark.gpu("any")


def made(count: int, shape: tuple[int, ...], dtype: Any) -> list[tuple[Any, Any]]:
    """Parts of which some rows have no key and hold NaN."""
    generator, found = torch.Generator("cuda").manual_seed(count), []
    for _ in range(count):
        o = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        lse = 5 * torch.randn(shape[0], shape[2], shape[1], generator=generator, device="cuda")
        empty = torch.rand(lse.shape, generator=generator, device="cuda") < 0.2
        o[empty.transpose(1, 2)] = torch.nan
        found.append((o, lse.masked_fill(empty, -torch.inf)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [7, 64, 128, 256])
def test_sums(head_dim: int, dtype: Any) -> None:
    """Two parts become a sum, whose rows lie apart; others are added to it; it is rounded once, with the sinks, to any place."""
    shape, sinks = (2, 300, 3, head_dim), torch.tensor([0.5, -torch.inf, 3.0], device="cuda")
    parts, room = made(8, shape, dtype), torch.full((2, 900, 3, head_dim), torch.nan, device="cuda")
    sums = room[:, 300:600]
    o, lse = rawattn.merge_states(parts[:2], out=sums)
    assert o is sums
    for i in (2, 4):
        o, lse = rawattn.merge_states([(sums, lse), *parts[i : i + 2]], out=sums)
    wanted = rawattn.reference.merge_states(parts[:6])
    np.testing.assert_allclose(sums.double().cpu(), wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse.double().cpu(), wanted[1], rtol=1e-5, atol=1e-6)  # it may be near 0
    assert room[:, :300].isnan().all() and room[:, 600:].isnan().all()
    out = torch.empty(*shape[:3], head_dim + 2, device="cuda", dtype=dtype)[..., 1:-1]
    wanted = rawattn.reference.merge_states(parts, sinks=sinks)
    found = rawattn.merge_states([(sums, lse), *parts[6:]], sinks=sinks, out=out)
    assert found[0] is out
    np.testing.assert_allclose(out.double().cpu(), wanted[0], rtol=2.0**-7.9, atol=2.0**-7.9)
    np.testing.assert_allclose(found[1].double().cpu(), wanted[1], rtol=1e-5, atol=1e-6)


def test_many_parts() -> None:
    """More than one launch takes; the same bits each time."""
    sinks, parts = torch.tensor([0.5, -torch.inf, 3.0], device="cuda"), made(133, (2, 100, 3, 128), torch.bfloat16)
    o, lse = rawattn.merge_states(parts, sinks=sinks)
    wanted = rawattn.reference.merge_states(parts, sinks=sinks)
    np.testing.assert_allclose(o.double().cpu(), wanted[0], rtol=2.0**-7.9, atol=2.0**-7.9)
    np.testing.assert_allclose(lse.double().cpu(), wanted[1], rtol=1e-5, atol=1e-6)
    again = rawattn.merge_states(parts, sinks=sinks)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)

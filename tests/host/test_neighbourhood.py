"""Neighbourhood attention on grids, whose tokens are put tile by tile, against its definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import rawattn  # noqa: E402
from rawattn import ProblemError, trace  # noqa: E402
from rawattn.sparse import GridTiles, neighbourhood  # noqa: E402
from rawattn.trace.classes import EMPTY, FULL, classify  # noqa: E402
from tests.neighbourhoods import CASES, GridCase  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CASES)
def test_definition(name: str) -> None:
    """o and all gradients, of torch; o of NumPy."""
    case = CASES[name]
    *given, do = case.inputs()
    q, k, v = (x.requires_grad_() for x in given)
    o, wanted = neighbourhood(q, k, v, case.kernel, **case.options), case.wanted(q, k, v)
    torch.testing.assert_close(o, wanted, rtol=1e-9, atol=1e-10)
    found, exact = (torch.autograd.grad(x, (q, k, v), do) for x in (o, wanted))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    on_numpy = neighbourhood(*(x.detach().numpy() for x in (q, k, v)), case.kernel, **case.options)
    np.testing.assert_allclose(on_numpy, wanted.detach().numpy(), 1e-9, 1e-10)


def test_beside_the_mask() -> None:
    """The ready-made mask, over tokens row by row, keeps the same keys."""
    q, k, v, _ = GridCase((10, 14), (5, 3)).inputs()
    o = rawattn.attention(*(x.flatten(1, 2) for x in (q, k, v)), mask=rawattn.mask.Neighbourhood((10, 14), (5, 3)), scale=0.3)
    torch.testing.assert_close(neighbourhood(q, k, v, (5, 3), scale=0.3).flatten(1, 2), o)


AXIS = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)).map(lambda x: (max(x), sorted(x)[1], min(x)))


@settings(max_examples=60, deadline=None)
@given(st.lists(AXIS, min_size=1, max_size=3))
def test_tiles(axes: Any) -> None:
    """Tokens come back; each place of a grid stands once among the rows; a tile holds a box; what is kept is the definition's."""
    grid, kernel, stride = (tuple(x) for x in zip(*axes, strict=True))
    x = np.arange(2 * math.prod(grid)).reshape(2, *grid)
    tiles, case = GridTiles(grid, kernel, stride, like=x), GridCase(grid, kernel, stride)
    rows = tiles.to_tiles(x)
    np.testing.assert_array_equal(tiles.to_grid(rows), x)
    assert rows.shape == (2, tiles.rows) and math.prod(tiles.tile) == 64 and tiles.rows % 64 == 0
    np.testing.assert_array_equal(tiles.to_grid(tiles.to_tiles(torch.from_numpy(x))), torch.from_numpy(x))
    places = tiles.mask.places.reshape(len(grid), -1, 64) // 2
    assert (places.max(2) - places.min(2) < np.array(tiles.tile)[:, None]).all()
    for place in np.random.default_rng(0).integers(0, grid, (8, len(grid))):
        row = int(np.flatnonzero((tiles.mask.places == 2 * place[:, None]).all(0))[0])
        kept = np.argwhere([[bool(tiles.mask(0, 0, row, kv)) for kv in range(tiles.rows)]])[:, 1] if tiles.rows < 600 else []
        windows = [case.window(int(p), axis) for axis, p in enumerate(place)]
        if len(kept):
            found = {tuple(p) for p in (tiles.mask.places[:, kept] // 2).T.tolist()}
            assert len(kept) == len(found) == math.prod(kernel)
            assert all(p in w for each in found for p, w in zip(each, windows, strict=True))


def classes(grid: tuple[int, ...], kernel: Any, stride: Any = 1) -> Any:
    """The class of each tile of 64 queries and 64 keys, as kernels find it by bounds."""
    tiles = GridTiles(grid, kernel, stride, like=np.zeros(1))
    traced, arrays, numbers = trace.bind(tiles.mask, "mask")
    first = np.arange(0, tiles.rows, 64)
    ends = first, first + 63
    return classify(traced.code, arrays, numbers, 0, 0, tuple(x[:, None] for x in ends), ends, tiles.rows, tiles.rows)


def test_few_tiles_are_visited() -> None:
    """Of a tile of 8 x 8 the neighbours of 13 x 13 lie in 3 x 3 tiles at most; with a stride none is cut."""
    found = classes((64, 64), 13)
    assert (found != EMPTY).sum(1).max() == 9 and (found != EMPTY).sum() == 22**2
    whole = classes((64, 64), 24, 8)
    assert ((whole == FULL).sum(1) == 9).all() and (whole != EMPTY).sum() == (whole == FULL).sum()
    cubes = classes((12, 16, 16), 12, 4)
    assert ((cubes == EMPTY) | (cubes == FULL)).all() and (cubes == FULL).sum(1).tolist() == [27] * len(cubes)


@pytest.mark.parametrize(
    ("grid", "kernel", "stride", "tile"),
    [
        ((128, 128), 13, 1, (8, 8)), ((16, 32, 32), (5, 9, 9), 1, (4, 4, 4)), ((1, 4096), (1, 65), 1, (1, 64)),
        ((1, 64, 64), (1, 13, 13), 1, (1, 8, 8)), ((2, 4096), (2, 65), 1, (2, 32)), ((64, 64), 24, 8, (8, 8)),
    ],
)  # fmt: skip
def test_shapes_of_tiles(grid: Any, kernel: Any, stride: Any, tile: Any) -> None:
    assert GridTiles(grid, kernel, stride, like=np.zeros(1)).tile == tile


def test_a_model_that_keeps_tokens_in_tiles() -> None:
    """Tokens are put in tiles before they are projected; a mask that was made while nothing had gradients is part of a graph."""
    x, w = torch.randn(2, 12, 20, 32), torch.randn(32, 96, requires_grad=True)

    def heads(x: Any) -> Any:
        return (x @ w).unflatten(-1, (3, 2, 16)).unbind(-3)

    with torch.inference_mode():
        tiles = GridTiles((12, 20), 5, like=x)
    o = tiles.to_grid(rawattn.attention(*heads(tiles.to_tiles(x)), mask=tiles.mask))
    wanted = neighbourhood(*heads(x), 5)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), w)[0] for each in (o, wanted)), rtol=1e-4, atol=1e-3)
    assert GridTiles((12, 20), 5, like=x).mask is tiles.mask


Q = np.zeros((1, 6, 10, 2, 8), np.float32)
WRONG = {
    "kernel": ((Q, Q, Q, 7), {}, "kernel is 7; it must be at most 6, the length of its axis"),
    "kernels": ((Q, Q, Q, (3, 3, 3)), {}, r"kernel is \(3, 3, 3\); it must be an int, or one for each of the grid's 2 axes"),
    "no int": ((Q, Q, Q, 3.0), {}, "kernel is 3.0; it must be an int >= 1"),
    "stride": ((Q, Q, Q, 3), {"stride": (1, 4)}, "stride is 4; it must be at most 3, the kernel of its axis"),
    "grids": (
        (Q, Q[:, 1:], Q, 3),
        {},
        r"q, k and v have shapes .*; they must be \(batch, \*grid, heads, head_dim\), of one grid",
    ),
    "no grid": ((Q[0, 0],) * 3 + (3,), {}, r"they must be \(batch, \*grid, heads, head_dim\)"),
    "no array": ((Q, Q, 3, 3), {}, "they must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    arguments, options, message = WRONG[name]
    with pytest.raises(ProblemError, match=message):
        neighbourhood(*arguments, **options)


def test_other_shapes_than_the_grid() -> None:
    tiles = GridTiles((6, 10), 3, like=Q)
    with pytest.raises(ProblemError, match=r"x has shape \(1, 10, 6\); it must be \(batch, 6, 10, \.\.\.\)"):
        tiles.to_tiles(np.zeros((1, 10, 6)))
    with pytest.raises(ProblemError, match=rf"x has shape \(1, 60\); it must be \(batch, {tiles.rows}, \.\.\.\)"):
        tiles.to_grid(np.zeros((1, 60)))
    with pytest.raises(ProblemError, match=r"middles has shape \(2, \d+\); it must be \(2, 60\)"):
        rawattn.attention(*[Q.reshape(1, 60, 2, 8)] * 3, mask=tiles.mask)
    with pytest.raises(ProblemError, match="like is a list; it must be of torch, CuPy or NumPy"):
        GridTiles((6, 10), 3, like=[])

"""Masks and scores that are ready-made functions, and the shorthands alibi and bias, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn import mask as masks
from rawattn.errors import ProblemError

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)
N = 60
Q, K = np.arange(N)[:, None], np.arange(N)
IDS = np.sort(RNG.integers(0, 5, (2, N)), axis=1).astype(np.int32)
TABLE = RNG.random((2, 1, 4, 8)) < 0.5
ANCESTORS = np.tril(RNG.random((8, 8)) < 0.5) | np.eye(8, dtype=bool)
PREFIX = np.array([7, 20], np.int32)


def near(n: int, kernel: int, x: Array, y: Array) -> Array:
    """The pairs of one axis of a neighbourhood."""
    found: Array = abs(np.clip(x, kernel // 2, n - 1 - kernel // 2) - y) <= kernel // 2
    return found


def inputs(n: int = N, m: int = N) -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal((2, rows, heads, 16), np.float32) for rows, heads in ((n, 2), (m, 1), (m, 1)))


def by_hand(q: Array, k: Array, v: Array, kept: Any = True, bias: Any = 0.0, cap: float | None = None) -> Array:
    k, v = (np.repeat(x, 2, 2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / 4
    s = np.where(kept, (s if cap is None else cap * np.tanh(s / cap)) + bias, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    return np.einsum("bhqk,bkhd->bqhd", p / np.maximum(p.sum(-1, keepdims=True), 1e-30), v)


MASKS = {
    "documents": (masks.Documents(IDS), (IDS[:, :, None] == IDS[:, None])[:, None]),
    "documents of all, causal": (masks.Documents(IDS[0], causal=True), (IDS[0][:, None] == IDS[0]) & (Q >= K)),
    "documents of keys": (masks.Documents(IDS, IDS[::-1].copy()), (IDS[:, :, None] == IDS[::-1][:, None])[:, None]),
    "prefix": (masks.Prefix(PREFIX), ((PREFIX[:, None, None] > K) | (Q >= K))[:, None]),
    "prefix of all": (masks.Prefix(9), (K < 9) | (Q >= K)),
    "chunked": (masks.Chunked(13), (Q // 13 == K // 13) & (Q >= K)),
    "neighbourhood": (masks.Neighbourhood((6, 10), (3, 5)), near(6, 3, Q // 10, K // 10) & near(10, 5, Q % 10, K % 10)),
    "neighbourhood of a line": (masks.Neighbourhood((N,), 7), near(N, 7, Q, K)),
    "block table": (masks.BlockTable(TABLE, (16, 8)), np.repeat(np.repeat(TABLE, 16, 2), 8, 3)[:, :, :N, :N]),
    "block table of all": (masks.BlockTable(TABLE[:1], (16, 8)), np.repeat(np.repeat(TABLE[:1], 16, 2), 8, 3)[:, :, :N, :N]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    given, (mask, kept) = inputs(), MASKS[name]
    np.testing.assert_allclose(rawattn.attention(*given, mask=mask), by_hand(*given, kept), 1e-5, 1e-5)


def test_tree() -> None:
    """The last keys are nodes, and so are the queries."""
    given = inputs(8)
    kept = np.concatenate([np.ones((8, N - 8), bool), ANCESTORS], 1)
    np.testing.assert_allclose(rawattn.attention(*given, mask=masks.Tree(ANCESTORS)), by_hand(*given, kept), 1e-5, 1e-5)
    each = np.stack([ANCESTORS, np.eye(8, dtype=bool)])
    kept = np.concatenate([np.ones((2, 8, N - 8), bool), each], 2)[:, None]
    np.testing.assert_allclose(rawattn.attention(*given, mask=masks.Tree(each)), by_hand(*given, kept), 1e-5, 1e-5)


@pytest.mark.parametrize("nodes", [8, 32, 40])
def test_tree_of_words(nodes: int) -> None:
    """Bits, of one tree and of one for each sequence, also where the highest bit of a word is one."""
    given = inputs(nodes)
    each = np.random.default_rng(0).random((2, nodes, nodes)) < 0.5
    each[:, :, -1] |= np.eye(nodes, dtype=bool)[-1]
    bits = np.pad(np.packbits(each, axis=2, bitorder="little"), ((0, 0), (0, 0), (0, -nodes // 8 % 4)))
    words = bits.view("<i4")
    assert words.shape == (2, nodes, -(-nodes // 32)) and (nodes < 32 or words.min() < 0)
    for mask, tree in ((masks.Tree.from_words(words), masks.Tree(each)), (masks.Tree.from_words(words[1]), masks.Tree(each[1]))):
        np.testing.assert_array_equal(rawattn.attention(*given, mask=mask), rawattn.attention(*given, mask=tree))
    with pytest.raises(ProblemError, match=rf"words has shape .*; {nodes} nodes have {-(-nodes // 32)} words each"):
        masks.Tree.from_words(np.concatenate([words, words], 2))
    with pytest.raises(ProblemError, match=r"words has shape \(1, .*; it must be \(2, "):
        rawattn.attention(*given, mask=masks.Tree.from_words(words[:1]))
    with pytest.raises(ProblemError, match=r"words is of shape \(8,\); it must be an array of \(nodes"):
        masks.Tree.from_words(words[0, :8, 0])


def test_one_may_be_a_part_of_a_function() -> None:
    given, documents = inputs(), masks.Documents(IDS)
    found = rawattn.attention(*given, mask=lambda b, h, q, kv: documents(b, h, q, kv) & (abs(q - kv) < 9))
    np.testing.assert_allclose(found, by_hand(*given, MASKS["documents"][1] & (abs(Q - K) < 9)), 1e-5, 1e-5)


@pytest.mark.parametrize("shape", [(2, 2, 40, N), (1, 2, 40, N), (2, 1, 1, N), (40, N), (N,), (2, 1, 1), (1, 1), ()])
def test_bias(shape: tuple[int, ...]) -> None:
    given, slopes = inputs(40), np.array([0.1, 0.4], np.float32)
    bias = np.asarray(np.random.default_rng(2).standard_normal(shape), np.float32)
    whole = np.broadcast_to(bias, (2, 2, 40, N))
    alibi = -slopes[:, None, None] * abs(np.arange(40)[:, None] + N - 40 - K)
    np.testing.assert_allclose(rawattn.attention(*given, bias=bias), by_hand(*given, bias=whole), 1e-5, 1e-5)
    found = rawattn.attention(*given, bias=bias, alibi=slopes, softcap=3.0)
    np.testing.assert_allclose(found, by_hand(*given, bias=whole + alibi, cap=3.0), 1e-5, 1e-5)
    assert "Biased.bias" in str(rawattn.explain(*given, bias=bias, alibi=slopes))
    again = rawattn.plan(*given, bias=bias).run(*given, bias)
    assert (again == rawattn.attention(*given, bias=bias)).all()


def test_alibi() -> None:
    given, slopes = inputs(40), np.array([[0.1, 0.4], [0.2, 0.3]], np.float32)
    distance = abs(np.arange(40)[:, None] + N - 40 - K)
    for each in (slopes, slopes[0]):
        wanted = by_hand(*given, bias=-np.broadcast_to(each, (2, 2))[..., None, None] * distance)
        np.testing.assert_allclose(rawattn.attention(*given, alibi=each), wanted, 1e-5, 1e-5)
    q, k, v = (x[0] for x in given)
    starts = np.array([0, 40], np.int32), np.array([0, N], np.int32)
    packed = rawattn.attention_varlen(q, k, v, *starts, alibi=slopes[0])
    np.testing.assert_array_equal(packed, rawattn.attention(*(x[:1] for x in given), alibi=slopes[0])[0])


ZEROS = {shape: np.zeros(shape, np.float32) for shape in ((3,), (7, 4), (4, 20, 20), (4, 60, 60), (1, 3, 40, 40), (4,))}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"alibi": ZEROS[3,]}, r"alibi has shape \(3,\); it must be \(4,\), \(heads\)"),
        ({"alibi": ZEROS[7, 4]}, r"alibi has shape \(7, 4\); it must be \(1, 4\), \(batch, heads\)"),
        ({"bias": ZEROS[4, 20, 20]}, r"bias has shape \(4, 20, 20\); it must be \(4, 40, 40\), \(heads, q_len, kv_len\)"),
        ({"bias": ZEROS[4, 60, 60], "alibi": ZEROS[4,]}, r"bias has shape \(4, 60, 60\); it must be \(4, 40, 40\)"),
        ({"bias": ZEROS[1, 3, 40, 40]}, r"bias has shape \(1, 3, 40, 40\); .* An axis of 1 is for all"),
        ({"bias": np.ones((40, 40), bool)}, "bias is of bool; give it as mask"),
        ({"mask": masks.Documents(np.zeros(10, np.int32))}, r"ids has shape \(10,\); it must be \(40,\), \(length\)"),
        ({"mask": masks.Documents(np.zeros((5, 40), np.int32))}, r"ids has shape \(5, 40\); it must be \(1, 40\)"),
        ({"mask": masks.Documents(np.zeros(40, int), np.zeros(41, int))}, r"kv_ids has shape \(41,\); .* \(kv_len\)"),
        ({"mask": masks.Prefix(np.zeros(2, np.int32))}, r"lengths has shape \(2,\); it must be \(1,\), \(batch\)"),
        ({"mask": masks.Tree(np.ones((2, 4, 4), bool))}, r"ancestors has shape \(2, 4, 4\); it must be \(1, 4, 4\)"),
        ({"mask": masks.Tree(np.ones((30, 30), bool))}, r"ancestors has shape \(30, 30\), 30 nodes, but there are 40 queries"),
        ({"mask": masks.Neighbourhood((3, 13), 3)}, r"Neighbourhood of \(3, 13\) as a mask has .*; it must be \(40, 40\)"),
        ({"mask": masks.BlockTable(TABLE, 16)}, r"keep has shape \(2, 1, 4, 8\); it must be \(1, 4, 3, 3\)"),
    ],
)
def test_sizes(option: Any, message: str) -> None:
    q = np.zeros((1, 40, 4, 16), np.float32)
    with pytest.raises(ProblemError, match=message):
        rawattn.attention(q, q, q, **option)
    if "mask" in option:
        with pytest.raises(ProblemError, match=message):
            rawattn.attention(q, q, q, mask=rawattn.mask.function(option["mask"]))


def test_sizes_of_parts() -> None:
    """With offsets an array is of whole sequences, and packed sequences may be shorter than all rows."""
    q, ids = np.zeros((1, 40, 4, 16), np.float32), np.zeros(100, np.int32)
    rawattn.attention(q, q, q, mask=masks.Documents(ids), q_offset=60)
    with pytest.raises(ProblemError, match=r"ids has shape \(100,\); it must be \(101,\)"):
        rawattn.attention(q, q, q, mask=masks.Documents(ids), q_offset=61)
    starts = np.array([0, 20, 40], np.int32)
    rawattn.attention_varlen(q[0], q[0], q[0], starts, starts, mask=masks.Documents(ids[:20]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.Documents([1, 2]), r"ids is \[1, 2\]; it must be an array of \(length,\) or \(batch, length\)"),
        (lambda: masks.Documents(IDS, IDS[0]), r"kv_ids has shape \(60,\) but ids \(2, 60\)"),
        (lambda: masks.Prefix(IDS), r"lengths is of shape \(2, 60\); it must be an array of \(batch,\), or an int"),
        (lambda: masks.Prefix([3]), r"lengths is \[3\]; it must be an array of \(batch,\), or an int"),
        (lambda: masks.Tree(np.eye(4)), "ancestors is of float64; it must be of bools"),
        (lambda: masks.Tree(IDS[0]), r"ancestors is of shape \(60,\)"),
        (lambda: masks.Tree(TABLE[0, 0]), r"ancestors has shape \(4, 8\); its last two dimensions must be the same"),
        (lambda: masks.Chunked(0), "size is 0; it must be an int >= 1"),
        (lambda: masks.Neighbourhood((6, 10), 4), "kernel is 4; it must be odd, and at most 6"),
        (lambda: masks.Neighbourhood((6, 10), (3, 5, 7)), "one for each of shape's 2 axes"),
        (lambda: masks.Neighbourhood(12, 3), "shape is 12; it must be a tuple of ints >= 1, the lengths of the grid's axes"),
        (lambda: masks.BlockTable(TABLE[0], 16), r"keep is of shape \(1, 4, 8\)"),
        (lambda: masks.BlockTable(TABLE, (1, 2, 3)), "or a pair of ints"),
        (lambda: rawattn.attention(*inputs(), alibi=3), r"alibi is 3; it must be an array of \(heads,\) or \(batch, heads\)"),
        (lambda: rawattn.attention(*inputs(), alibi=np.ones(4, np.int32)), "alibi is of int32; it must be of floats"),
        (lambda: rawattn.attention(*inputs(), bias=TABLE[None]), "that broadcasts to"),
        (lambda: rawattn.attention(*inputs(), bias=TABLE, score=lambda s, q: s * q), "alibi or bias was given beside score"),
        (lambda: rawattn.attention(*inputs(), bias=TABLE, softcap="3"), "softcap is '3'"),
        (lambda: rawattn.attention(*inputs(), bias=TABLE, softcap=-3.0), "softcap is -3.0; it must be a finite number > 0"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        make()

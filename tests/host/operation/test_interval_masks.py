"""``rawattn.mask.Intervals`` on the CPU: its loops against the formula, its constructors against NumPy, and its errors."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import rawattn
import rawattn.reference
from rawattn.array.array import Array
from rawattn.errors import ProblemError
from rawattn.mask import Intervals
from rawattn.operation import captures
from rawattn.trace.proofs import Limits
from rawattn.variant.intervals import is_interval
from tests import intervals

F, E = intervals.arrays("random", 0, 60, 60, 2)


def inputs(n: int, m: int, heads: int, kv_heads: int, batch: int | None = 2) -> list[Any]:
    rng, of_batch = np.random.default_rng(n), () if batch is None else (batch,)
    sizes = (n, heads), (m, kv_heads), (m, kv_heads), (n, heads)
    return [rng.standard_normal((*of_batch, *size, 8), np.float32) for size in sizes]


def check(q: Any, k: Any, v: Any, do: Any, call: Any, gradients: Any, options: dict[str, Any]) -> None:
    o, lse = call(q, k, v, return_lse=True)
    wanted = rawattn.reference.attention(q, k, v, return_lse=True, **options)
    for x, y in zip((o, lse), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    found = rawattn.attention_backward(do, q, k, v, o, lse, **gradients)
    for x, y in zip(found, rawattn.reference.attention_backward(do, q, k, v, **options), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


@hypothesis.settings(max_examples=40, derandomize=True, database=None, deadline=None)
@hypothesis.given(
    st.sampled_from([*intervals.KINDS]), st.integers(0, 99), st.integers(1, 150), st.integers(1, 150),
    st.sampled_from([(1, 1), (4, 2)]), st.sampled_from(["batch", "head", "key head", "all"]), st.booleans(),
    st.sampled_from([None, (9, 3), (None, 5)]), st.sampled_from(["", "offsets", "lens"]),
)  # fmt: skip
def test_on_the_cpu(
    kind: str, seed: int, n: int, m: int, heads: tuple[int, int], axes: str, causal: bool, window: Any, others: str
) -> None:  # fmt: skip
    by = {"batch": (2,), "head": (2, heads[0]), "key head": (1, heads[1]), "all": ()}[axes]
    options: dict[str, Any] = {"q_offset": 3, "kv_offset": 7} if others == "offsets" else {}
    if others == "lens":
        options = {"q_lens": np.array([n, n // 2], np.int32), "kv_lens": np.array([m // 3, m], np.int32)}
    first, end = intervals.arrays(kind, seed, n + options.get("q_offset", 0), m, *by)
    group = heads[0] // heads[1] if axes == "key head" else 1
    options["mask"] = Intervals(first, end, group=group, causal=causal, window=window)
    check(*inputs(n, m, *heads), lambda *x, **y: rawattn.attention(*x, **y, **options), options, options)


@pytest.mark.parametrize("axes", [(), (1,), (1, 4)])
def test_packed(axes: tuple[int, ...]) -> None:
    """Arrays are along q's rows, and keys have their numbers in their own sequences."""
    q_ends, kv_ends = (np.array(x, np.int32) for x in ([0, 40, 40, 95], [0, 70, 80, 110]))
    first, end = intervals.arrays("random", 1, 95, 70, *axes)
    given = {"cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends, "mask": Intervals(first, end, causal=True)}
    own = {"mask": given["mask"]}
    check(
        *inputs(95, 110, 4, 2, None),
        lambda *x, **y: rawattn.attention_varlen(*x, q_ends, kv_ends, 55, 70, **y, **own),
        given,
        given,
    )


def test_functions_of_that_form_are_intervals() -> None:
    q, k, v, _ = inputs(60, 60, 2, 1)
    prefix = lambda b, h, q, kv: ((kv < E[b, q]) | (kv <= q)) & (F[b, q] <= kv) & (F[b, q] > 9)  # noqa: E731
    for function, expected in (
        (prefix, True), (lambda b, h, q, kv: (F[b, q] <= kv) & (kv < E[b, q]), True),
        (lambda b, h, q, kv: kv < E[b, q], True), (lambda b, h, q, kv: F[b, q] == F[b, kv], False),
        (lambda b, h, q, kv: (F[b, q] <= kv) | (kv < E[b, q]), False), (lambda b, h, q, kv: F[b, kv] <= q, False),
    ):  # fmt: skip
        found = rawattn.explain(q, k, v, mask=function)
        assert ("Intervals(" in str(found)) == expected and found.tiles is not None
        o = rawattn.attention(q, k, v, mask=function)
        np.testing.assert_allclose(o, rawattn.reference.attention(q, k, v, mask=function), rtol=1e-4, atol=1e-4)


def _numbers(library: str, x: Any) -> Any:
    module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy", "numpy": "numpy"}[library])
    return module.asarray(x)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_constructors(library: str) -> None:
    q, kv = np.arange(12)[:, None], np.arange(12)
    ids, lengths = np.repeat([[7, 1, 1, 7], [2, 2, 0, 0]], 3, 1), np.array([5, 0], np.int32)
    run = np.repeat([[0, 1, 1, 2], [0, 0, 1, 1]], 3, 1)
    used, near = np.arange(12) < lengths[:, None], (q - kv <= 1) & (kv - q <= 2)
    for mask, kept in (
        (Intervals.documents(_numbers(library, ids), causal=True), (run[:, :, None] == run[:, None]) & (q >= kv)),
        (Intervals.documents(_numbers(library, ids)[0], window=(1, 2)), (run[0][:, None] == run[0]) & near),
        (Intervals.prefixes(_numbers(library, lengths), 12), (kv < lengths[:, None, None]) | (q >= kv)),
        (Intervals.padding(_numbers(library, lengths), 12), used[:, :, None] & used[:, None]),
    ):  # fmt: skip
        first, end = (np.asarray(x) for x in (mask.first, mask.end))
        assert first.dtype == end.dtype == np.int32
        found = (first[..., None] <= kv) & (kv < end[..., None])
        found &= (q >= kv) if mask.causal else True
        found &= near if mask.left is not None else True
        np.testing.assert_array_equal(found, kept)


def test_errors() -> None:
    q, k, v, _ = inputs(60, 60, 4, 2)
    short = Intervals(F[:, :50].copy(), E[:, :50].copy())
    for words, call in (
        ("first has shape (2, 60) but end (2, 9)", lambda: Intervals(F, E[:, :9])),
        ("first is of int64; it must be of int32", lambda: Intervals(F.astype(np.int64), E)),
        ("first is 3; it must be an array", lambda: Intervals(3, E)),
        ("group is 0; it must be an int >= 1", lambda: Intervals(F, E, group=0)),
        ("window is 3; it must be a pair", lambda: Intervals(F, E, window=3)),
        ("first has shape (2, 50); it must be (2, 60)", lambda: rawattn.attention(q, k, v, mask=short)),
        ("Documents and Intervals take causal=True", lambda: rawattn.attention(q, k, v, mask=Intervals(F, E), causal=True)),
        ("ids is of shape (2, 60, 1)", lambda: Intervals.documents(F[..., None])),
        ("lengths is of int64; it must be of int32", lambda: Intervals.padding(np.array([3]), 5)),
    ):  # fmt: skip
        with pytest.raises(ProblemError) as found:
            call()
        assert words in str(found.value), str(found.value)


@pytest.mark.parametrize("others", ["score", "blocks"])
@pytest.mark.parametrize("axes", [(2,), (2, 4)])
def test_gradients_by_the_formula(axes: tuple[int, ...], others: str) -> None:
    """Each sequence has its own intervals where no loop knows the score or the lists, too."""
    numbers = np.random.default_rng(0).integers(0, 2, (2, 4, 2, 2)).astype(np.int32)
    options: dict[str, Any] = {"mask": Intervals(*intervals.arrays("random", 1, 70, 90, *axes))}
    if others == "score":
        options["score"] = lambda s, b, h, q, kv: s + 0.1 * h - 0.01 * kv
    else:
        options["keys"] = rawattn.Blocks(numbers, None, block_q=64, block_kv=64)
    check(*inputs(70, 90, 4, 2), lambda *x, **y: rawattn.attention(*x, **y, **options), options, options)


def test_functions_keep_lists_for_gradients() -> None:
    """Arrays of one's own may fall. Those of Intervals are said to rise, and lists of blocks say themselves what is visited."""
    q = Array("torch", 0, "bf16", (2, 60, 2, 64), (7680, 128, 64, 1), 0, None)
    arrays = {"q": q, "mask_0": q._replace(dtype="int32", shape=(2, 60), strides=(60, 1))}
    arrays |= {"k": q, "v": q, "mask_1": arrays["mask_0"]}
    keys = rawattn.Blocks(np.zeros((2, 2, 1, 1), np.int32), None, block_q=64, block_kv=64)
    own = lambda b, h, q, kv: (F[b, q] <= kv) & (kv < E[b, q])  # noqa: E731
    for mask, beside, rises in ((own, None, False), (own, keys, True), (Intervals(F, E), None, True)):
        options, _ = captures.take({"mask": mask, "keys": beside})
        forward, backward = (captures.resolve_by_intervals(options, arrays, Limits(2, 2, 60, 60), x) for x in (False, True))
        assert is_interval(forward["mask"]) and is_interval(backward["mask"]) == rises

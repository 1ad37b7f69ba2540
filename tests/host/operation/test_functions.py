"""Functions as masks and scores, by the public calls on the CPU: what they compute, their errors, and what is kept of them."""

from __future__ import annotations

import gc
import json
import pathlib
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn import reference
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.kernel.attn_fwd import ATTN_FWD, smem_bytes
from rawattn.operation import Backward, Forward, from_json, functions
from rawattn.runtime import explain
from rawattn.runtime.plan import Plan
from rawattn.runtime.select import select
from rawattn.testing import Case, expect, expect_backward
from rawattn.variant.mask import And, Causal, Window
from rawattn.variant.score import Softcap
from tests import zoo
from tests.host.kernel.test_render import words
from tests.threads import at_once

Array = npt.NDArray[Any]
H200 = TYPICAL["sm_90a"]
MASKS = ["chained", "documents_sliding", "flashmask", "block_table", "tree", "padding_array", "head_windows", "thresholds"]
MASKS += ["top_list"]
SCORES = ["alibi", "alibi_softcap", "t5_table", "graphormer", "forgetting", "conditional", "pooled"]


def made(name: str, n: int, m: int, seed: int = 0) -> Any:
    """A function of the zoo."""
    return getattr(zoo, name)(np.random.default_rng(seed), n, m)


def on_arrays(function: Any, *given: Any) -> Array:
    """A function's values by its own code, on NumPy arrays that broadcast."""
    with np.errstate(all="ignore"):
        found: Array = getattr(function, "on_arrays", function)(*given)
    return found


def by_hand(q: Array, k: Array, v: Array, mask: Any = None, score: Any = None) -> tuple[Array, Array]:
    """o and lse of whole batches, by the functions' own code."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    s = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, group, 2)) / q.shape[3] ** 0.5
    at = [np.arange(n).reshape([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(s.shape)]
    if score is not None:
        s = on_arrays(score, s, *at)
    kept = np.ones(s.shape, bool) if mask is None else np.broadcast_to(on_arrays(mask, *at), s.shape)
    s = np.where(kept, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.where(kept, np.exp(s - np.where(np.isfinite(top), top, 0)), 0)
    total = p.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        lse = np.where(total > 0, np.where(np.isfinite(top), top, 0) + np.log(total), -np.inf)[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1, total), np.repeat(v, group, 2)), lse


def inputs(n: int = 40, m: int = 50, heads: int = 2, kv_heads: int = 1, dim: int = 16, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal((2, rows, count, dim), np.float32) for rows, count in ((n, heads), (m, kv_heads), (m, kv_heads))
    )


def near(found: tuple[Any, Any], wanted: tuple[Any, Any], error: float = 2e-5) -> None:
    for x, y in zip(found, wanted, strict=True):
        same = np.isfinite(y)
        assert (np.isfinite(x) == same).all()
        np.testing.assert_allclose(x[same], y[same], error, error)


# ---- what is computed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    q, k, v = inputs(90, 130)
    mask = made(name, 90, 130)
    wanted = by_hand(q, k, v, mask)
    near(rawattn.attention(q, k, v, mask=mask, return_lse=True), wanted)
    near(reference.attention(q, k, v, mask=mask, return_lse=True), wanted, 1e-12)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    q, k, v = inputs(60, 60)
    score = made(name, 60, 60)
    wanted = by_hand(q, k, v, None, score)
    near(rawattn.attention(q, k, v, score=score, return_lse=True), wanted)
    near(reference.attention(q, k, v, score=score, return_lse=True), wanted, 1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_both_in_every_format(dtype: str) -> None:
    case = Case(dtype, 2, 70, 100, 2, 1, 24, 40, sinks=True, seed=3)
    options = {"mask": made("documents_sliding", 70, 100), "score": made("alibi", 70, 100), "sinks": case.sink_logits()}
    given = case.inputs()
    o, lse = rawattn.attention(*given, **options, return_lse=True)
    expect(*given, **options).check(o, lse)


def test_positions_are_within_a_packed_sequence() -> None:
    lengths = ((30, 45), (0, 7), (50, 20))
    case = Case("fp32", lengths=lengths, heads=2, kv_heads=1, head_dim=16, head_dim_v=16)
    q, k, v, cu_q, cu_kv = case.inputs()
    reach, slopes = np.array([5, 3, 9], np.int32), np.array([0.1, -0.3], np.float32)
    mask, score = lambda b, q, kv: abs(q - kv) <= reach[b], lambda s, h, q, kv: s + slopes[h] * (kv - q)
    o, lse = rawattn.attention_varlen(q, k, v, cu_q, cu_kv, mask=mask, score=score, return_lse=True)
    for i, (rows, keys) in enumerate(lengths):
        own, own_keys = slice(cu_q[i], cu_q[i] + rows), slice(cu_kv[i], cu_kv[i] + keys)
        each = lambda b, h, q, kv, i=i: abs(q - kv) <= reach[i]  # noqa: E731
        bias = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)  # noqa: E731
        wanted = by_hand(q[None, own], k[None, own_keys], v[None, own_keys], each, bias)
        near((o[None, own], lse[None, :, own]), wanted)
    expect(q, k, v, cu_q, cu_kv, mask=mask, score=score).check(o, lse)


def test_rows_of_all_sequences() -> None:
    """q_start and kv_start are the rows with which a sequence begins, of all of them end to end."""
    q, k, v, cu_q, cu_kv = Case("fp32", lengths=((20, 20), (33, 33)), head_dim=8, head_dim_v=8).inputs()
    doc = np.repeat(np.arange(6), 9)[:53].astype(np.int32)
    o = rawattn.attention_varlen(
        q, k, v, cu_q, cu_kv, mask=lambda q, kv, q_start, kv_start: doc[q + q_start] == doc[kv + kv_start]
    )
    for first, last in ((0, 20), (20, 53)):
        own = doc[first:last]
        wanted, _ = by_hand(*(x[None, first:last] for x in (q, k, v)), lambda b, h, q, kv, own=own: own[q] == own[kv])
        np.testing.assert_allclose(o[first:last], wanted[0], 2e-5, 2e-5)


def test_arrays_of_which_only_sizes_are_read() -> None:
    """Their sizes are run-time values, and the gradient of such an array is 0."""
    q, k, v = inputs()
    for n in (4, 7):
        ids, table = np.zeros(n, np.int32), np.ones((2, n), np.float32)
        o = rawattn.attention(
            q, k, v, mask=lambda q, kv, x=ids: kv < x.shape[0], score=lambda s, kv, x=table: s + kv / x.size(1) / x.shape[0]
        )
        expected = by_hand(q, k, v, lambda b, h, q, kv, n=n: kv < n, lambda s, b, h, q, kv, n=n: s + kv / n / 2)
        np.testing.assert_allclose(o, expected[0], atol=2e-6)
    score = lambda s, kv: s + kv / table.shape[1]  # noqa: E731
    o, lse = rawattn.attention(q, k, v, score=score, return_lse=True)
    *_, gradient = rawattn.attention_backward(np.ones_like(o), q, k, v, o, lse, score=score, wrt=(table,))
    assert gradient.shape == table.shape and not gradient.any()


def test_lengths_in_use() -> None:
    """Functions see the lengths in use, as the library's masks do."""
    q, k, v = inputs(40, 50)
    q_lens, kv_lens = np.array([17, 40], np.int32), np.array([50, 23], np.int32)
    causal = lambda q, kv, q_len, kv_len: kv + 0 * q <= q + (kv_len - q_len) - (q >= 1000)  # noqa: E731  # not recognised
    score = lambda s, q, q_len: s * (1 + q / (q_len + 1.0))  # noqa: E731
    options = {"mask": causal, "score": score, "q_lens": q_lens, "kv_lens": kv_lens}
    o, lse = rawattn.attention(q, k, v, **options, return_lse=True)
    for i in range(2):
        n, m = int(q_lens[i]), int(kv_lens[i])
        each = (x[i : i + 1, :rows] for x, rows in ((q, n), (k, m), (v, m)))
        wanted = by_hand(
            *each, lambda b, h, q, kv, n=n, m=m: kv <= q + m - n, lambda s, b, h, q, kv, n=n: s * (1 + q / (n + 1.0))
        )
        near((o[i : i + 1, :n], lse[i : i + 1, :, :n]), wanted)
        assert (o[i, n:] == 0).all() and (lse[i, :, n:] == -np.inf).all()
    near((o, lse), reference.attention(q, k, v, **options, return_lse=True))


def test_offsets() -> None:
    """Parts of a sequence see positions: together they are the whole."""
    q, k, v = inputs(64, 64)
    doc, slopes = np.repeat(np.arange(8), 8).astype(np.int32), np.array([0.2, -0.1], np.float32)
    options = {
        "mask": lambda q, kv: (doc[q] // 2 == doc[kv] // 2) & (q >= kv),
        "score": lambda s, h, q, kv: s + slopes[h] * (kv - q),
    }
    whole = rawattn.attention(q, k, v, **options)
    part = rawattn.attention(q[:, 40:], k[:, 32:], v[:, 32:], **options, q_offset=40, kv_offset=32)
    np.testing.assert_allclose(part[:, 8:], whole[:, 48:], 1e-5, 1e-5)
    np.testing.assert_allclose(
        part, reference.attention(q[:, 40:], k[:, 32:], v[:, 32:], **options, q_offset=40, kv_offset=32), 2e-5, 2e-5
    )


def test_gradients() -> None:
    case = Case("fp32", 2, 40, 56, 4, 2, 16, 24, sinks=True)
    given, (do, dlse) = case.inputs(), case.output_gradients()
    slopes = np.array([0.1, 0.2, -0.1, 0.3], np.float32)
    score = lambda s, h, q, kv: 9 * np.tanh((s + slopes[h] * (kv - q)) / 9)  # noqa: E731
    options = {"mask": made("documents_sliding", 40, 56), "score": score, "sinks": case.sink_logits()}
    o, lse = rawattn.attention(*given, **options, return_lse=True)
    found = rawattn.attention_backward(do, *given, o, lse, dlse=dlse, **options)
    expect_backward(do, *given, dlse=dlse, **options).check(*found)


def test_one_that_says_what_the_library_has_is_that() -> None:
    q, k, v = inputs()
    w, cap = 7, 20.0
    for options, wanted in (
        ({"mask": lambda q, kv: q >= kv}, Causal("top_left")),
        ({"mask": lambda q, kv: (q >= kv) & (q - kv <= w)}, And(Causal("top_left"), Window(w, None, "top_left"))),
        ({"score": lambda s: cap * np.tanh(s / cap)}, Softcap(cap)),
    ):
        op = rawattn.explain(q, k, v, **options).op
        assert isinstance(op, Forward) and wanted in (op.mask, op.score)


# ---- errors ---------------------------------------------------------------------------------------------------------------


def raises(match: str, **options: Any) -> None:
    q, k, v = options.pop("given", None) or inputs()
    with pytest.raises(ProblemError, match=match):
        rawattn.attention(q, k, v, **options)


def test_errors_name_what_was_captured() -> None:
    doc, wide = np.zeros(50, np.uint32), np.zeros((50, 100), np.int32)[:, ::2]
    raises(r"mask .*doc holds uint32; its dtype must be one of", mask=lambda q, kv: doc[q] == doc[kv])
    raises(r"wide, which mask captured, has a stride of 2 in its last dimension", mask=lambda q, kv: wide[q, kv] == 0)
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(50, dtype=torch.int32)
    raises(
        r"tensor, which mask captured, is a torch int32 array of shape \(50,\) on the CPU but q is a numpy fp32 array",
        mask=lambda q, kv: tensor[q] == tensor[kv],
    )


def test_errors_of_arrays_without_memory() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in inputs())
    doc = torch.zeros(50, dtype=torch.int32, device="meta")
    with pytest.raises(ProblemError, match="doc, which mask captured, is on torch's device meta"):
        rawattn.attention(q, k, v, mask=lambda q, kv: doc[q] == doc[kv])
    with pytest.raises(ProblemError, match=r"bias, which score captured, is on torch's device meta"):
        rawattn.attention(q, k, v, bias=torch.zeros((), device="meta"))
    with pytest.raises(ProblemError, match="doc, which mask captured, is on torch's device meta"):
        rawattn.explain(q, k, v, mask=lambda q, kv: doc[q] == doc[kv])


def test_errors_of_options() -> None:
    for beside in ({"causal": True}, {"window": (3, 0)}):
        words = r"mask was given beside causal or window; mask is a function, which says both itself, as lambda"
        raises(words, mask=lambda b, q, kv: (kv >= 3) & (q != kv), **beside)
        raises(words + ".* Chunked and Prefix are causal", mask=rawattn.mask.Chunked(8), **beside)
    raises(r"combine options as mask=rawattn.mask.And\(a, b\)", mask=lambda q, kv: q - kv <= 3, causal=True)  # is a Window
    with pytest.raises(ProblemError, match=r"b of And is .*Chunked.*, a function; write what both keep as one function"):
        rawattn.mask.And(rawattn.mask.Causal(), rawattn.mask.Chunked(8))
    raises("score was given beside softcap", score=lambda s, q: s * (q + 1), softcap=3.0)
    raises(
        r"mask is <rawattn\.score\.function .*; make it by rawattn\.mask\.function",
        mask=rawattn.score.function(lambda s, q: s * q),
    )
    raises("mask is <class .*Causal'>; it must be a mask", mask=Causal)
    raises("mask is 3; it must be a mask", mask=3)
    raises(r"mask is an array, bool of shape \(5, 9\); .*lambda b, h, q, kv: keep\[q, kv\]", mask=np.ones((5, 9), bool))
    raises(r"score is an array, float32 of shape \(9,\); give it as bias=", score=np.ones(9, np.float32))
    raises("it gives a float", mask=lambda q, kv: q * 0.5)
    with pytest.raises(ProblemError, match="write what both keep as one function"):
        And(Causal(), rawattn.explain(*inputs(), mask=lambda q, kv: (q + kv) % 2 == 0).op.mask)


def test_no_kernel_takes_functions_in_constant_time() -> None:
    op = rawattn.explain(*inputs(dim=64), mask=lambda q, kv: (q + kv) % 3 == 0, score=lambda s, q: s * (q + 1)).op
    assert isinstance(op, Forward)
    op = Forward.from_json({**op.to_json(), "element": "bf16", "spec": {**op.spec.to_json(), "constant_time": True}})
    with pytest.raises(UnsupportedError) as error:
        select(op, H200)
    for kernel in ("attn_fwd", "attn_fwd_mma", "attn_fwd_simt"):
        assert f"{kernel}: its mask and its score may take any time, as functions do" in str(error.value)


def test_plans_say_what_they_take() -> None:
    q, k, v = inputs()
    doc = np.zeros(50, np.int32)
    plan = rawattn.plan(q, k, v, mask=lambda q, kv: doc[q] == doc[kv])
    with pytest.raises(
        ProblemError, match=r"doc, which mask captured, is missing; this plan takes a numpy int32 array of shape \(50,\)"
    ):
        plan.run(q, k, v)
    with pytest.raises(ProblemError, match=r"doc, which mask captured, is a numpy int32 array of shape \(49,\)"):
        plan.run(q, k, v, doc[1:])
    with pytest.raises(ProblemError, match="this plan takes q, k, v, mask_0"):
        plan.run(q, k, v, doc=doc)


def test_count_tiles_says_what_it_takes() -> None:
    q, k, v = inputs()
    doc = np.zeros(50, np.int32)
    with pytest.raises(ProblemError, match="count_tiles counts for a mask that is a function"):
        rawattn.explain(q, k, v, bias=np.zeros((40, 50), np.float32)).count_tiles()
    found = rawattn.explain(q, k, v, mask=lambda q, kv: doc[q] == doc[kv])
    assert found.count_tiles(mask_0=doc) == found.tiles
    with pytest.raises(ProblemError, match=r"mask_0 is missing; count_tiles takes mask_0 \(doc, which mask captured\)"):
        found.count_tiles()
    with pytest.raises(ProblemError, match=r"doc, which mask captured, is a numpy int32 array of shape \(3,\) .*must be"):
        found.count_tiles(mask_0=doc[:3])
    with pytest.raises(ProblemError, match=r"count_tiles was given doc; it takes mask_0 \(doc"):
        found.count_tiles(doc=doc)


def test_a_seed_is_looked_at_without_dropout() -> None:
    q, k, v = inputs()
    for dropout in (0, 0.0):
        for seed in ("garbage", 1 << 64, np.zeros(2, np.int64), np.zeros((), np.int64), np.zeros(1, np.int32), 0.5):
            with pytest.raises(ProblemError, match="seed is"):
                rawattn.attention(q, k, v, dropout=dropout, seed=seed)
        for good in (3, np.int64(3), np.zeros(1, np.int64)):
            rawattn.attention(q, k, v, dropout=dropout, seed=good)


# ---- what is kept ---------------------------------------------------------------------------------------------------------


def documents(doc: Array, reach: int = 5) -> Any:
    return lambda q, kv: (doc[q] == doc[kv]) & (q - kv <= reach)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that are made."""
    found: list[Any] = []
    own = Plan.__init__
    monkeypatch.setattr(Plan, "__init__", lambda self, *given: (found.append(given), own(self, *given))[1])
    return found


def test_new_arrays_and_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan serves fresh functions of the same code with other arrays; nobody keeps what arrays hold."""
    q, k, v = inputs()
    first, second = np.repeat(np.arange(10), 5).astype(np.int32), np.repeat(np.arange(5), 10).astype(np.int32)
    made_plans = counted(monkeypatch)
    for doc in (first, second, first):
        wanted, _ = by_hand(q, k, v, lambda b, h, q, kv, doc=doc: documents(doc)(q, kv))
        np.testing.assert_allclose(rawattn.attention(q, k, v, mask=documents(doc)), wanted, 2e-5, 2e-5)
    assert len(made_plans) == 1
    rawattn.attention(q, k, v, mask=documents(first, 6))
    assert len(made_plans) == 2, "a number is a run-time value of a plan"
    plan, wanted = rawattn.plan(q, k, v, mask=documents(first)), rawattn.attention(q, k, v, mask=documents(second))
    assert (plan.run(q, k, v, second) == wanted).all() and (plan.run(q, k, v, mask_0=second) == wanted).all()
    first[:] = second
    assert (plan.run(q, k, v, first) == wanted).all() and (rawattn.attention(q, k, v, mask=documents(first)) == wanted).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_are_not_kept(library: str) -> None:
    given: Any = inputs()
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in given]
        make = lambda: torch.zeros(50, dtype=torch.int32)  # noqa: E731
    else:
        make = lambda: np.zeros(50, np.int32)  # noqa: E731
    references = []
    for _ in range(3):
        doc, bias = make(), make()
        references += [weakref.ref(doc), weakref.ref(bias)]
        rawattn.attention(*given, mask=documents(doc), score=lambda s, kv, bias=bias: s + bias[kv])
        rawattn.plan(*given, mask=documents(doc))
        rawattn.explain(*given, mask=documents(doc))
        del doc, bias
    gc.collect()
    assert [each() for each in references] == [None] * 6


def test_explain_says_the_bounds() -> None:
    """Of both sides of each comparison, and of those that follow from two; none of a score."""
    (q, k, v), doc, reach = inputs(), np.zeros(50, np.uint8), 20
    mask = lambda q, kv: (doc[q] == doc[kv]) & (q - kv <= reach) & (doc[q] >= 3)  # noqa: E731
    lines = str(rawattn.explain(q, k, v, mask=mask, score=lambda s, q: s * (q < 3))).splitlines()
    found = {line.strip() for line in lines[2:7]}
    assert found >= {
        "doc uint8 (50,), bounded by minima and maxima of its blocks",
        "(q - 20) <= kv: q - 20 from -20 to 19, kv from 0 to 49",
        "3 <= doc[q]: doc[q] from 0 to 255",
        "3 <= doc[kv]: doc[kv] from 0 to 255",
    }
    (equal,) = (line for line in found if "==" in line)
    assert equal.count("from 0 to 255") == 2
    floats = np.zeros(50, np.float32)
    assert "floats[q] - floats[kv] of any value" in str(rawattn.explain(q, k, v, mask=lambda q, kv: floats[q] - floats[kv] < 1))


def test_keys_tell_numbers_and_arrays_apart() -> None:
    """Functions of one code whose numbers, formats or shapes differ, one after the other and back."""
    q, k, v = inputs()
    for reach in (1, 30, 1):
        for dtype in (np.int32, np.int64, np.int32):
            for width in (50, 60, 50):
                doc = (np.arange(width) // 7).astype(dtype)
                found = rawattn.attention(q, k, v, mask=documents(doc, reach))
                wanted, _ = by_hand(q, k, v, lambda b, h, q, kv, doc=doc, reach=reach: documents(doc, reach)(q, kv))
                np.testing.assert_allclose(found, wanted, 2e-5, 2e-5)


def test_threads() -> None:
    """Threads that call at once with functions of one code get the results of their own arrays."""
    q, k, v = inputs()
    docs = [(np.arange(50) // size).astype(np.int32) for size in range(3, 11)]
    wanted = [rawattn.attention(q, k, v, mask=documents(doc, 40)) for doc in docs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            if not (rawattn.attention(q, k, v, mask=documents(docs[i], 40)) == wanted[i]).all():
                wrong.append(i)

    at_once(work, [(i,) for i in range(len(docs))])
    assert wrong == []


# ---- operations as text, and what GPUs are given --------------------------------------------------------------------------


def operation(n: int = 512, m: int = 512, reach: int = 5, heads: int = 4, **options: Any) -> Forward:
    """An operation of bf16 with a function that captured documents and one that captured slopes."""
    import ml_dtypes

    q, k, v = (np.zeros((2, rows, heads, 64), ml_dtypes.bfloat16) for rows in (n, m, m))
    doc, slopes = np.zeros(max(n, m) + 16, np.int32), np.zeros(heads, np.float32)
    options = {"mask": documents(doc, reach), "score": lambda s, h, q, kv: s + slopes[h] * (kv - q), **options}
    op = rawattn.explain(q, k, v, **options).op
    assert isinstance(op, Forward)
    return op


def test_json(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (operation(), Backward(operation(q_offset=7, kv_offset=3)), operation(mask=None)):
        again = from_json(json.loads(json.dumps(op.to_json())))
        assert again == op and again.kind == op.kind and str(again) == str(op) and again.inputs == op.inputs
    log = tmp_path / "operations.jsonl"
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    q, k, v = inputs()
    rawattn.attention(q, k, v, mask=documents(np.zeros(50, np.int32), 3))
    (line,) = log.read_text().splitlines()
    again = from_json(json.loads(line))
    assert isinstance(again, Forward) and [each.name for each in again.inputs] == ["q", "k", "v", "mask_0"]


@pytest.mark.parametrize("kernel", ["attn_fwd", "attn_fwd_mma", "attn_fwd_simt"])
def test_new_lengths_numbers_and_arrays_compile_nothing(kernel: str) -> None:
    """They are launches of the same sources, of which the pyramid's comes first."""

    def launches(op: Forward) -> Any:
        return select(op, H200, kernel, config).kernel.lower(op, config, H200).launches

    config = None
    config = select(operation(), H200, kernel).config
    first = launches(operation())
    assert [each.entry for each in first] == ["pyramid", kernel]
    for op in (operation(777, 1300), operation(reach=99), operation(heads=16), operation(3, 4000)):
        assert [each.source for each in launches(op)] == [each.source for each in first]
    with_offset = launches(operation(q_offset=3))
    assert [each.source for each in launches(operation(q_offset=9, kv_offset=1))] == [each.source for each in with_offset]


@pytest.mark.parametrize("kernel", ["attn_fwd", "attn_fwd_mma", "attn_fwd_simt"])
def test_kernels_compile(kernel: str) -> None:
    """With what else an option may be wrapped in."""
    op = operation(q_offset=5)
    choice = select(op, H200, kernel)
    for launch in choice.kernel.lower(op, choice.config, H200).launches:
        assert "error" not in compiler.compile(launch.source).log


def test_columns_are_counted_in_shared_memory() -> None:
    """Some of the deepest rings fit a block but for the columns of a mask. They take as many bytes as the kernel says."""
    ids, others = np.zeros(528, np.int64), np.zeros(528, np.int32)
    for each, column_bytes in (
        (documents(others), 4), (lambda q, kv: (ids[q] == ids[kv]) & (q >= kv), 8),
        (lambda q, kv: (others[q] == others[kv]) & (ids[q] > ids[kv]), 0), (lambda q, kv: q // 7 == kv % 3, 4),
    ):  # fmt: skip
        op = operation(mask=each, score=None)
        assert op.mask.column_bytes == column_bytes  # type: ignore[union-attr]
        found = [config for config in ATTN_FWD.candidates(op, H200) if config.tile_q == config.tile_kv == 128]
        assert [config.stages for config in found] == [5 if column_bytes else 6]
        if column_bytes == 8:
            (launch,) = (launch for launch in ATTN_FWD.lower(op, found[0], H200).launches if launch.entry == "attn_fwd")
            assert words(compiler.compile(launch.source).cubin, "facts")[0] == smem_bytes(found[0], op) <= H200.smem_bytes


def test_selections_are_shared() -> None:
    """Operations whose arrays and numbers differ have one selection, as they have one kind."""
    a, b = operation(500, 500, 3), operation(510, 510, 9)
    assert a != b and a.kind == b.kind and a.selection_key == b.selection_key
    assert a.selection_key != operation(500, 500, 3, score=None).selection_key
    assert explain.explain_operation(a, H200).selection is explain.explain_operation(b, H200).selection


def test_zeros_of_either_sign_and_nan_in_keys() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 20, 2, 16)).astype(np.float32) for _ in range(3))

    def make(c: float) -> Any:
        return lambda s, b, h, q, kv: np.where(1.0 / c > 0.0, s + kv, s - kv)

    for c, sign in ((0.0, 1), (-0.0, -1)):
        o = rawattn.attention(q, k, v, score=make(c))
        expected, _ = by_hand(q, k, v, score=lambda s, b, h, q, kv, sign=sign: s + sign * kv)
        np.testing.assert_allclose(o, expected, atol=1e-5)
    found = {functions.bind(make(float("nan")), "score")[0] for _ in range(3)}
    assert len(found) == 1
    fields = json.loads(json.dumps(functions.to_json([("score", next(iter(found)))])))
    assert functions.from_json(fields)[1] == {"score": next(iter(found))}

"""Functions over caches, on the CPU: they see positions in the sequence, whose last query stands at its last key."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn import reference
from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError
from rawattn.kernel import attn_fwd, attn_fwd_mma
from rawattn.operation import AttentionKVCache, from_json
from rawattn.runtime.select import select
from rawattn.testing import _move
from tests.caches import Cached
from tests.emulator.gpu import stand_in

Array = npt.NDArray[Any]
CASE = Cached(((3, 40), (1, 17), (5, 3), (2, 0), (7, 31)), heads=4, kv_heads=2, whole=True)
IDS = np.random.default_rng(0).integers(0, 3, (5, 64)).astype(np.int32)
SLOPES = np.array([0.1, -0.2, 0.3, 0.05], np.float32)
MASK = lambda b, h, q, kv: (IDS[b, q] == IDS[b, kv]) | (q - kv < 3)  # noqa: E731
SCORE = lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q)  # noqa: E731
# Where an index is brought into its array by hand, which has no wrong one in a call.
IN_NUMPY = {MASK: lambda b, h, q, kv: (IDS[b, np.maximum(q, 0)] == IDS[b, kv]) | (q - kv < 3)}


def by_hand(
    case: Cached, mask: Any = None, score: Any = None, scale: float | None = None, sinks: Any = None
) -> list[tuple[Array, Array]]:
    """o and lse of each sequence, (heads, q_len, columns) and (heads, q_len)."""
    found, q = [], case.rows(case.heads, case.head_dim, 1).astype(np.float64)
    for i, (q_len, kv_len) in enumerate(case.lengths):
        k, v = (np.repeat(x.astype(np.float64), case.heads // case.kv_heads, 1) for x in case.keys(i))
        s = np.einsum("qhd,khd->hqk", case.of(q, i), k) * (case.head_dim**-0.5 if scale is None else scale)
        mask = IN_NUMPY.get(mask, mask)
        at = i, np.arange(case.heads)[:, None, None], np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)
        if score is not None:
            s = score(s, *at)
        kept = np.broadcast_to(True if mask is None else mask(*at), s.shape)
        if case.begins is not None:
            kept = kept & (at[3] >= case.begins[i])
        causal = case.causal if isinstance(case.causal, bool) else bool(case.causal[i])
        s = np.where(kept & (at[3] <= at[2]) if causal else kept, s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True, initial=-1e30), -1e30 if sinks is None else sinks[:, None, None])
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - top))
        with np.errstate(divide="ignore"):
            lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
        found.append((np.einsum("hqk,khd->hqd", p / np.where(total == 0, 1, total), v), lse))
    return found


def check(case: Cached, o: Array, lse: Array, bound: float = 2e-5, **functions: Any) -> None:
    for i, (wanted, wanted_lse) in enumerate(by_hand(case, **functions)):
        np.testing.assert_allclose(case.of(o, i).swapaxes(0, 1), wanted, bound, bound)
        own = case.of(lse.T if case.ragged else lse.swapaxes(1, 2), i).T
        np.testing.assert_allclose(own, wanted_lse, 2e-5, 2e-5)


@pytest.mark.parametrize("causal", [True, False, (1, 0, 1, 1, 0)])
@pytest.mark.parametrize("form", ["dense", "table", "indptr"])
@pytest.mark.parametrize(
    "functions", [{"mask": MASK}, {"score": SCORE}, {"mask": MASK, "score": SCORE}], ids=["mask", "score", "both"]
)
def test_functions(functions: dict[str, Any], form: str, causal: Any) -> None:
    case = dataclasses.replace(CASE, form=form, causal=causal, page_size=4 if form != "dense" else 64)
    q, cache, step = case.rows(4, 16, 1), case.cache(), case.step()
    o, lse = rawattn.attention_kvcache(q, cache, step, **functions, return_lse=True)
    check(case, o, lse, **functions)
    check(case, *reference.attention_kvcache(q, cache, step, **functions, return_lse=True), **functions)


def test_alibi() -> None:
    """As a score that captured the slopes, beside a cap; and under torch's operator."""
    torch, (q, cache, step) = pytest.importorskip("torch"), (CASE.rows(4, 16, 1), CASE.cache(), CASE.step())
    o, lse = rawattn.attention_kvcache(q, cache, step, alibi=SLOPES, softcap=3.0, return_lse=True)
    check(CASE, o, lse, score=lambda s, b, h, q, kv: 3 * np.tanh(s / 3) - SLOPES[h] * abs(q - kv))
    given = torch.from_numpy(q), CASE.cache("torch"), CASE.step("torch"), torch.from_numpy(SLOPES)
    call = lambda q, alibi: rawattn.attention_kvcache(q, given[1], given[2], alibi=alibi, softcap=3.0)  # noqa: E731
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(given[0], given[3]), torch.from_numpy(o))
    with pytest.raises(ProblemError, match="alibi or bias was given beside score"):
        rawattn.attention_kvcache(q, cache, step, alibi=SLOPES, score=SCORE)


def test_the_first_key() -> None:
    """Keys before kv_begin are masked, and may hold anything."""
    case = dataclasses.replace(CASE, lengths=((3, 40), (1, 17)), begins=(9, 2))
    o, _ = rawattn.attention_kvcache(case.rows(4, 16, 1), case.cache(), case.step(), mask=MASK, return_lse=True)
    firsts = np.array([9, 2])
    for i, (wanted, _) in enumerate(by_hand(case, lambda b, h, q, kv: MASK(b, h, q, kv) & (kv >= firsts[b]))):
        np.testing.assert_allclose(case.of(o, i).swapaxes(0, 1), wanted, 2e-5, 2e-5)


def test_one_that_says_what_the_library_has_is_that() -> None:
    """Causal by positions is aligned to the last key."""
    case = dataclasses.replace(CASE, causal=False)
    q, cache = case.rows(4, 16, 1), case.cache()
    for functions, step, options in (
        ({"mask": lambda q, kv: q >= kv}, case.step(), {"mask": rawattn.mask.Causal()}),
        ({"mask": lambda q, kv: q - kv <= 5}, case.step(causal=True), {"mask": rawattn.mask.Window(5, 0)}),
    ):
        found = rawattn.attention_kvcache(q, cache, step, **functions)
        assert (found == rawattn.attention_kvcache(q, cache, case.step(), **options)).all()


def test_operation() -> None:
    """Captured arrays are its operands; a GPU's kernel says that it takes no functions yet."""
    case = dataclasses.replace(CASE, dtype="bf16", causal=(1, 0, 1, 1, 0))
    asked = rawattn.serving.attention.request_of(
        case.step(), {"mask": MASK, "score": SCORE, "window": None, "softcap": None, "scale": None}, False
    )
    op, _ = rawattn.serving.attention.attention_of(case.rows(4, 16, 1), case.cache(), case.step(), asked, None)
    names = [each.name for each in op.inputs]
    assert names[-3:] == ["mask_0", "mask_1", "score_0"] and "causal" not in names
    assert {each.title for each in op.captured} == {
        "IDS, which mask captured,",
        "causal, which mask captured,",
        "SLOPES, which score captured,",
    }
    assert from_json(op.to_json()) == op and isinstance(op, AttentionKVCache)
    for q_len, kernel in ((7, "attn_decode"), (300, "attn_fwd")):
        large = dataclasses.replace(op, q_len=q_len, head_dim=32, head_dim_v=32, page_size=16, total_q=300)
        assert select(large, TYPICAL["sm_90a"]).kernel.name == kernel


LONG = Cached(
    ((3, 150), (1, 70), (5, 3), (2, 0), (7, 131)), page_size=16, dtype="bf16", heads=4, kv_heads=2, head_dim=32, head_dim_v=32,
    whole=True,
)  # fmt: skip
DOCUMENTS = np.random.default_rng(0).integers(0, 3, (5, 10)).repeat(16, 1).astype(np.int32)
WORDS = np.random.default_rng(1).integers(0, 128, (5, 7)).astype(np.int32)  # the ancestors of each node of a draft, as bits
ON_GPUS: dict[str, tuple[Cached, str, str]] = {  # sequences, mask, score
    "documents": (LONG, "documents", ""),
    "documents of some, begins": (dataclasses.replace(LONG, causal=(1, 0, 0, 1, 1), begins=(65, 3, 1, 0, 100)), "documents", ""),
    "draft in bits, slopes": (dataclasses.replace(LONG, causal=False, lengths=((7, 150), (7, 70), (7, 7))), "words", "slopes"),
    "slopes": (dataclasses.replace(LONG, form="dense", page_size=160, causal=False), "", "slopes"),
    "before the first key": (dataclasses.replace(LONG, causal=False, lengths=((70, 40), (5, 3), (9, 70))), "blocks", "slopes"),
    "copied": (dataclasses.replace(LONG, page_size=2), "documents", "slopes"),
}


KERNELS = "attn_decode", "attn_fwd", "attn_fwd_mma"


def functions_of(mask: str, score: str, move: Any) -> dict[str, Any]:
    """A mask and a score by name, with what they captured where ``move`` takes it."""
    ids, words, slopes, n = *(move(x) for x in (DOCUMENTS, WORDS, SLOPES)), 5
    found: dict[str, Any] = {
        "documents": lambda b, h, q, kv: ids[b, q] == ids[b, kv],
        "words": lambda b, h, q, kv, kv_len: (
            (kv < kv_len - 7) | (words[b, q - kv_len + 7] >> (kv - kv_len + 7).clip(0, 6) & 1 > 0)
        ),
        "blocks": lambda b, h, q, kv: (q // 8 - kv // n <= 1) & (ids[b, q] != ids[b, kv] + q % 2),
        "slopes": lambda s, b, h, q, kv: s + slopes[h] * (kv - q),
    }
    return {role: found[name] for role, name in (("mask", mask), ("score", score)) if name}


def in_numpy(case: Cached, mask: str, score: str) -> dict[str, Any]:
    """The same for ``by_hand``, which asks for indices before the first key, too."""
    kv_lens = np.array([kv for _, kv in case.lengths])

    def words(b: int, h: Any, q: Any, kv: Any) -> Any:
        row, column = np.clip(q - kv_lens[b] + 7, 0, 6), np.clip(kv - kv_lens[b] + 7, 0, 6)
        return (kv < kv_lens[b] - 7) | (WORDS[b, row] >> column & 1 > 0)

    found: dict[str, Any] = {
        "documents": lambda b, h, q, kv: DOCUMENTS[b, np.maximum(q, 0)] == DOCUMENTS[b, kv],
        "words": words,
        "blocks": lambda b, h, q, kv: (q // 8 - kv // 5 <= 1) & (DOCUMENTS[b, np.maximum(q, 0)] != DOCUMENTS[b, kv] + q % 2),
        "slopes": SCORE,
    }
    return {role: found[name] for role, name in (("mask", mask), ("score", score)) if name}


QUICK = {(kernel, "documents of some, begins") for kernel in KERNELS} | {("attn_decode", "draft in bits, slopes")}
QUICK |= {("attn_decode", "before the first key")}
EACH = [pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow) for x in itertools.product(KERNELS, ON_GPUS)]


@pytest.mark.parametrize(("kernel", "name"), EACH)
def test_on_a_gpu(kernel: str, name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tensors on the CPU stand for those on a GPU, from the call to the bytes that the kernels get, and their results."""
    torch, word, (case, mask, score) = pytest.importorskip("torch"), stand_in(monkeypatch, tmp_path, sm_count=5), ON_GPUS[name]
    configs = {
        "attn_fwd": attn_fwd.AttnFwdConfig(64, 64, 2, 1),
        "attn_fwd_mma": attn_fwd_mma.AttnFwdMmaConfig(32, 32, 2, 1, 1, 1, pack_gqa=True),
    }
    if (name, kernel) == ("copied", "attn_fwd"):
        case = dataclasses.replace(case, page_size=256)
    q, functions = _move(case.rows(4, 32, 1), "torch", "cpu"), functions_of(mask, score, torch.from_numpy)
    more: dict[str, Any] = {"kernel": kernel, "config": configs.get(kernel), "return_lse": True}
    o, lse = rawattn.attention_kvcache(
        q, case.cache("torch"), case.step("torch", max_q_len=max(q for q, _ in case.lengths)), **functions, **more
    )
    check(case, o.double().numpy(), lse.numpy(), 1.2e-2, **in_numpy(case, mask, score))
    assert word[0] == 0


@pytest.mark.slow
def test_arrays_that_change_and_sequences_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept call takes other arrays and other contents, and a sequence has the same bits alone, from a dense cache."""
    torch, _ = pytest.importorskip("torch"), stand_in(monkeypatch, tmp_path, sm_count=5)
    case, begins, causal = LONG, (65, 3, 2, 0, 100), (1, 0, 1, 1, 0)
    case = dataclasses.replace(case, begins=begins, causal=causal)
    rows, cache, step = case.rows(4, 32, 1), case.cache("torch"), case.step("torch", max_q_len=7)
    ids, other = torch.from_numpy(DOCUMENTS.copy()), torch.from_numpy(np.roll(DOCUMENTS, 11, 1).copy())

    rows = _move(rows, "torch", "cpu")

    def call(ids: Any, q: Any = rows, cache: Any = cache, step: Any = step) -> Any:
        return rawattn.attention_kvcache(q, cache, step, mask=lambda b, q, kv: ids[b, q] == ids[b, kv], return_lse=True)

    first, (o, lse) = call(ids)[0], call(other)
    assert not torch.equal(first, o)
    ids.copy_(other)
    assert torch.equal(call(ids)[0], o)
    for i in (0, 1, 2, 4):
        alone = rawattn.KVCache(*(_move(x[None], "torch", "cpu") for x in case.keys(i)))
        lengths = (torch.tensor([x], dtype=torch.int32) for x in (case.lengths[i][1], begins[i], causal[i]))
        own = rawattn.Step(next(lengths), kv_begin=next(lengths), causal=next(lengths))
        found = call(other[i : i + 1].contiguous(), case.of(rows, i)[None], alone, own)
        assert torch.equal(found[0][0], case.of(o, i)) and torch.equal(found[1][0], case.of(lse.T, i).T), i


def test_errors() -> None:
    q, cache, step = CASE.rows(4, 16, 1), CASE.cache(), CASE.step()
    with pytest.raises(ProblemError, match="mask was given beside window"):
        rawattn.attention_kvcache(q, cache, step, mask=MASK, window=(3, 0))
    ids = np.zeros((5, 64), np.float16)[:, ::2]
    with pytest.raises(ProblemError, match="ids, which mask captured, has a stride of 2"):
        rawattn.attention_kvcache(q, cache, step, mask=lambda b, q, kv: ids[b, q] == ids[b, kv])


def test_the_operator() -> None:
    """torch.compile sees captured tensors as arguments; the step's causal joins the function below the operator."""
    torch = pytest.importorskip("torch")
    ids, slopes = torch.from_numpy(IDS), torch.from_numpy(SLOPES)
    functions = {
        "mask": rawattn.mask.function(lambda b, q, kv: (ids[b, q] == ids[b, kv]) | (q - kv < 3)),
        "score": rawattn.score.function(lambda s, h, q, kv: s + slopes[h] * (kv - q)),
    }
    for causal in (True, False, (1, 0, 1, 1, 0)):
        case = dataclasses.replace(CASE, causal=causal)
        q, cache, step = torch.from_numpy(case.rows(4, 16, 1)), case.cache("torch"), case.step("torch")
        call = lambda q, cache=cache, step=step: rawattn.attention_kvcache(q, cache, step, **functions, return_lse=True)  # noqa: E731
        o, lse = torch.compile(call, backend="aot_eager", fullgraph=True)(q)
        check(case, o.numpy(), lse.numpy(), mask=MASK, score=SCORE)
        assert torch.equal(o, call(q)[0])

"""Masks and scores that are Python functions, by name: what users write, as rawattn and torch's FlexAttention both take it.

A function is made twice: with torch tensors on the GPU, which a call captures, and on torch's "meta" device, which has no memory:
which kernels must be compiled follows from that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn import trace
from rawattn.mask import Intervals
from rawattn.testing import Case
from rawattn.trace.capture import ELEMENTS
from rawattn.trace.proofs import Limits
from rawattn.variant.function import option_of
from rawattn.variant.intervals import by_intervals
from rawattn.variant.mask import Causal, Window, kept_pairs

WINDOW, DOCUMENT, NEIGHBOURS, BLOCK, KEPT_BLOCKS, REACH = 1024, 1024, 13, 128, 0.1, 128


@dataclasses.dataclass(frozen=True)
class Function:
    """A function for a case. ``make`` gives it with tensors on a device, ``pairs`` counts what it keeps, of all sequences and
    heads. ``built_in`` are the options of the case that computes the same without a function, or for a score nearly: the plain
    call, beside which its time is said. ``by_batch`` and ``by_head`` say what its mask differs by."""

    role: str
    make: Callable[[Case, str], Any]
    pairs: Callable[[Case], int]
    built_in: Callable[[Case], dict[str, Any] | None] = lambda case: None
    by_batch: bool = False
    by_head: bool = False


def _pairs_of(option: Any, case: Case) -> int:
    return case.batch * case.heads * int(kept_pairs(option, case.q_len, case.kv_len))


def _pairs_of_score(case: Case) -> int:
    return _pairs_of(Causal() if case.causal else Window(None, None), case)


# ---- masks


def causal(case: Case, device: str) -> Any:
    n = case.kv_len  # one condition more than Causal has, so that it is not recognised
    return lambda b, h, q, kv: (q >= kv) & (kv < n)


def sliding(case: Case, device: str) -> Any:
    n = case.kv_len
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= WINDOW) & (kv < n)


@functools.lru_cache(maxsize=16)
def document_lengths(case: Case) -> tuple[tuple[int, ...], ...]:
    """The lengths of the documents of each sequence, from 1 up to twice their mean."""
    rng, found = np.random.default_rng((7, case.q_len)), []
    for _ in range(case.batch):
        ends = np.cumsum(rng.integers(1, 2 * DOCUMENT, 4 + 2 * case.q_len // DOCUMENT))
        ends = np.append(ends[ends < case.q_len], case.q_len)
        found.append(tuple(int(n) for n in np.diff(ends, prepend=0)))
    return tuple(found)


def _ids(case: Case, device: str) -> Any:
    import torch

    rows = [np.repeat(np.arange(len(lengths), dtype=np.int32), lengths) for lengths in document_lengths(case)]
    return torch.from_numpy(np.stack(rows)).to(device)


def documents(case: Case, device: str) -> Any:
    ids = _ids(case, device)
    return lambda b, h, q, kv: ids[b, q] == ids[b, kv]


def documents_causal(case: Case, device: str) -> Any:
    ids = _ids(case, device)
    return lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)


def documents_sliding(case: Case, device: str) -> Any:
    ids = _ids(case, device)
    return lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv) & (q - kv <= WINDOW // 2)


def intervals(case: Case, device: str, causal: bool = False, reach: int | None = None) -> Any:
    """First and end of each query's document, cut as a causal mask or a window cuts it."""
    import torch

    each = [np.repeat([(end - n, end) for end, n in zip(np.cumsum(x), x, strict=True)], x, 0) for x in document_lengths(case)]
    first, end = np.stack(each).astype(np.int32).transpose(2, 0, 1)
    own = np.arange(case.q_len, dtype=np.int32)
    first = first if reach is None else np.maximum(first, own - reach)
    return Intervals(*(torch.from_numpy(x.copy()).to(device) for x in (first, np.minimum(end, own + 1) if causal else end)))


def _document_pairs(option: Any, case: Case) -> int:
    return case.heads * sum(int(kept_pairs(option, n, n)) for lengths in document_lengths(case) for n in lengths)


def _packed(case: Case, **more: Any) -> dict[str, Any]:
    lengths = tuple((n, n) for each in document_lengths(case) for n in each)
    return {"batch": 1, "q_len": 0, "kv_len": 0, "lengths": lengths, **more}


def prefix(case: Case, device: str) -> Any:
    import torch

    lengths = torch.full((case.batch,), case.kv_len // 4, dtype=torch.int32).to(device)
    return lambda b, h, q, kv: (kv < lengths[b]) | (q >= kv)


def _prefix_pairs(case: Case) -> int:
    n = case.kv_len // 4
    return _pairs_of(Causal("top_left"), case) + case.batch * case.heads * n * (n - 1) // 2


def _side(case: Case) -> int:
    return round(case.q_len**0.5)  # of a square of tokens, row by row


def neighbours(case: Case, device: str) -> Any:
    n, reach = _side(case), NEIGHBOURS // 2

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        y, x = (q // n).clamp(reach, n - 1 - reach), (q % n).clamp(reach, n - 1 - reach)
        return (abs(y - kv // n) <= reach) & (abs(x - kv % n) <= reach)

    return mask


@functools.lru_cache(maxsize=16)
def _table(case: Case) -> Any:
    import torch

    rows, columns = -(-case.q_len // BLOCK), -(-case.kv_len // BLOCK)
    keep = torch.rand(case.heads, rows, columns, generator=torch.Generator().manual_seed(5)) < KEPT_BLOCKS
    return keep | torch.eye(rows, columns, dtype=torch.bool)


def blocks(case: Case, device: str) -> Any:
    keep = _table(case).to(device)
    return lambda b, h, q, kv: keep[h, q // BLOCK, kv // BLOCK]


# ---- scores


def _normal(device: str, *shape: int, dtype: str = "float32") -> Any:
    import torch

    if device == "meta":
        return torch.empty(shape, device=device, dtype=getattr(torch, dtype))
    random = torch.Generator(device).manual_seed(3)
    return torch.randn(*shape, device=device, dtype=getattr(torch, dtype), generator=random)


def alibi(case: Case, device: str) -> Any:
    import torch

    slopes = (2.0 ** (-8.0 / case.heads * torch.arange(1, case.heads + 1))).to(device)
    return lambda s, b, h, q, kv: s + slopes[h] * (kv - q)


def pair_bias(case: Case, device: str) -> Any:
    bias = _normal(device, case.batch, case.heads, case.q_len, case.kv_len, dtype="bfloat16")
    return lambda s, b, h, q, kv: s + bias[b, h, q, kv]


def triangle(case: Case, device: str, dtype: str = "float32") -> Any:
    bias = _normal(device, case.heads, case.q_len, case.kv_len, dtype=dtype)  # of all sequences
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


def temperature(case: Case, device: str) -> Any:
    factors = 1 + 0.1 * _normal(device, case.heads)
    return lambda s, b, h, q, kv: s * factors[h]


def t5_table(case: Case, device: str) -> Any:
    bias = _normal(device, case.heads, 2 * REACH + 1)
    return lambda s, b, h, q, kv: s + bias[h, (kv - q).clamp(-REACH, REACH) + REACH]


def _plain(case: Case) -> dict[str, Any]:
    return {}


FUNCTIONS = {
    "causal": Function("mask", causal, functools.partial(_pairs_of, Causal("top_left")), lambda case: {"causal": True}),
    "sliding": Function(
        "mask", sliding, lambda case: _pairs_of(Window(WINDOW, 0), case), lambda case: {"window": (WINDOW, 0), "causal": True}
    ),
    "documents": Function("mask", documents, functools.partial(_document_pairs, Window(None, None)), _packed, by_batch=True),
    "documents+causal": Function(
        "mask", documents_causal, functools.partial(_document_pairs, Causal()),
        functools.partial(_packed, causal=True), by_batch=True,
    ),
    "documents+sliding": Function(
        "mask", documents_sliding, lambda case: _document_pairs(Window(WINDOW // 2, 0), case),
        lambda case: _packed(case, causal=True, window=(WINDOW // 2, 0)), by_batch=True,
    ),
    "intervals": Function("mask", intervals, functools.partial(_document_pairs, Window(None, None)), _packed, by_batch=True),
    "intervals+causal": Function(
        "mask", functools.partial(intervals, causal=True), functools.partial(_document_pairs, Causal()),
        functools.partial(_packed, causal=True), by_batch=True,
    ),
    "intervals+sliding": Function(
        "mask", lambda case, device: intervals(case, device, True, WINDOW // 2),
        lambda case: _document_pairs(Window(WINDOW // 2, 0), case),
        lambda case: _packed(case, causal=True, window=(WINDOW // 2, 0)), by_batch=True,
    ),
    "prefix": Function("mask", prefix, _prefix_pairs, by_batch=True),
    "neighbours": Function("mask", neighbours, lambda case: case.batch * case.heads * case.q_len * NEIGHBOURS**2),
    "blocks": Function("mask", blocks, lambda case: case.batch * BLOCK**2 * int(_table(case).sum()), by_head=True),
    "alibi": Function("score", alibi, _pairs_of_score, _plain),
    "pair_bias": Function("score", pair_bias, _pairs_of_score, _plain),
    "triangle": Function("score", triangle, _pairs_of_score, _plain),
    "triangle16": Function("score", functools.partial(triangle, dtype="bfloat16"), _pairs_of_score, _plain),
    "temperature": Function("score", temperature, _pairs_of_score, _plain),
    "t5_table": Function("score", t5_table, _pairs_of_score, _plain),
}  # fmt: skip
DOCUMENTS = ("documents", "documents+causal", "documents+sliding")
INTERVALS = ("intervals", "intervals+causal", "intervals+sliding")
MASKS = tuple(name for name, each in FUNCTIONS.items() if each.role == "mask")
LISTS = tuple(name for name in MASKS if name not in INTERVALS)
TRIANGLES = ("triangle", "triangle16")  # biases of pairs that all sequences share
SCORES = tuple(name for name, each in FUNCTIONS.items() if each.role == "score" and name not in TRIANGLES)


def option(name: str, case: Case) -> Any:
    """The option that a call of the case gets for a function, whatever it captures."""
    role = FUNCTIONS[name].role
    traced, arrays, numbers = trace.bind(FUNCTIONS[name].make(case, "meta"), role)
    forms = tuple((ELEMENTS[str(x.dtype).rpartition(".")[2]][0], tuple(x.shape)) for x in arrays)
    return by_intervals(option_of(traced, forms, numbers, Limits(case.batch, case.heads, case.q_len, case.kv_len)))


def mask_mod(function: Any) -> Any:
    """A mask as a function of b, h, q and kv alone, as FlexAttention takes it."""
    return (lambda b, h, q, kv: function(b, h, q, kv, 0, 0, 0)) if isinstance(function, Intervals) else function


def of_part(role: str, function: Any, batch: int, head: int) -> Any:
    """The function for arrays that begin with a batch and a head of the call's."""
    if role == "mask":
        function = mask_mod(function)
        return lambda b, h, q, kv: function(b + batch, h + head, q, kv)
    return lambda s, b, h, q, kv: function(s, b + batch, h + head, q, kv)

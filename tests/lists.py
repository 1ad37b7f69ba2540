"""Lists of keys for tests: numbers of all kinds, and attention over them by hand, key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import rawattn

Array = npt.NDArray[Any]
SIZES = (1, 63, 64, 65, 576, 2048)
WRONG = 2147480000  # no key of any sequence


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of ``most`` numbers: of keys for each token where ``heads`` is 0, else of blocks for each of so many heads and block of
    queries. ``none`` is the share of numbers that are -1, ``same`` that of numbers that repeat the one before, ``wrong`` that of
    numbers that are no keys."""

    most: int = 5
    heads: int = 0
    block_q: int = 1
    block_kv: int = 1
    counts: bool = False
    none: float = 0.2
    same: float = 0.1
    wrong: float = 0.0
    empty: bool = False  # whether every third list has no key
    seed: int = 0

    def numbers(self, shape: tuple[int, ...], below: Array) -> Array:
        """Numbers of lists in ``shape``, which broadcasts against ``below``, the numbers that there are."""
        rng = np.random.default_rng((9, self.seed))
        shape = (*shape, self.most)
        numbers = np.where(below[..., None] > 0, rng.integers(0, 1 << 30, shape) % np.maximum(below, 1)[..., None], -1)
        repeated = np.concatenate([numbers[..., :1], numbers[..., :-1]], -1)
        numbers = np.where(rng.random(shape) < self.same, repeated, numbers)
        numbers = np.where(rng.random(shape) < self.none, -1, numbers)
        odd = rng.choice([WRONG, -2, -WRONG], shape)
        numbers = np.where(rng.random(shape) < self.wrong, odd, numbers)
        if self.empty:
            numbers.reshape(-1, self.most)[::3] = -1
        return numbers.astype(np.int32)

    def of(self, q_lens: list[int], kv_lens: list[int], dense: bool) -> tuple[Array, Array | None]:
        """The numbers and counts for sequences of these lengths; ``dense`` ones have as many queries each."""
        rng = np.random.default_rng((8, self.seed))
        keys = np.array([-(-n // self.block_kv) for n in kv_lens])
        if not self.heads:
            below = np.repeat(keys, q_lens)
            numbers = self.numbers(below.shape, below)
        else:
            blocks = max([-(-n // self.block_q) for n in q_lens], default=0)
            shape = len(q_lens), self.heads, blocks
            numbers = self.numbers(shape, np.broadcast_to(keys[:, None, None], shape))
        counts = rng.integers(0, self.most + 1, numbers.shape[:-1]).astype(np.int32) if self.counts else None
        return numbers, counts

    def keys(self, numbers: Any, counts: Any, physical: bool = False) -> Any:
        """The argument of a call."""
        if not self.heads:
            return rawattn.TopK(numbers, counts, physical)
        return rawattn.Blocks(numbers, counts, self.block_q, self.block_kv)

    def places(self, numbers: Array, counts: Array | None, at: tuple[int, int, int, int], heads: int, kv_len: int) -> list[int]:
        """The listed keys of a query, ``at`` its sequence, token, head and number, one after the other."""
        sequence, token, head, query = at
        index = (token,) if not self.heads else (sequence, head * self.heads // heads, query // self.block_q)
        count = self.most if counts is None else counts[index]
        found = []
        for number in numbers[index][:count].tolist():
            for place in range(number * self.block_kv, (number + 1) * self.block_kv) if 0 <= number < 1 << 30 else ():
                found += [place] if place < kv_len else []
        return found


def by_hand(
    q: Array, k: Array, v: Array, places: Callable[[int, int], list[int]], scale: float | None = None, sinks: Array | None = None,
    keep: Callable[[int, int, int], bool] | None = None, score: Callable[..., float] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """o and lse of one sequence, (rows, heads, columns), in float64: ``places(head, query)`` are the keys of a query, as often as
    they are listed, of which those count that ``keep(head, query, key)`` keeps."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    o, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[1::-1], -np.inf)
    for query in range(q.shape[0]):
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            kept = [j for j in places(head, query) if keep is None or keep(head, query, j)]
            logits = [float(q[query, head] @ k[j, kv_head]) * (scale or q.shape[2] ** -0.5) for j in kept]
            logits = [x if score is None else float(score(x, head, query, j)) for x, j in zip(logits, kept, strict=True)]
            sink = -np.inf if sinks is None else float(sinks[head])
            top = max([*logits, sink])
            weights = [np.exp(x - top) for x in logits]
            total = sum(weights) + (np.exp(sink - top) if sinks is not None else 0.0)
            if total and np.isfinite(top):
                lse[head, query] = top + np.log(total)
                o[query, head] = sum((w / total * v[j, kv_head] for w, j in zip(weights, kept, strict=True)), np.zeros(v.shape[2]))
    return o, lse


def lists(most: tuple[int, ...] = SIZES, heads: tuple[int, ...] = (0,)) -> st.SearchStrategy[Lists]:
    """Lists of all kinds."""
    share = st.sampled_from((0.0, 0.1, 0.5, 1.0))
    by_token = st.builds(
        Lists, st.sampled_from(most), counts=st.booleans(), none=share, same=share, wrong=share, empty=st.booleans(),
        seed=st.integers(0, 99),
    )  # fmt: skip
    if heads == (0,):
        return by_token
    return st.builds(
        dataclasses.replace, by_token, most=st.sampled_from((1, 2, 7)), heads=st.sampled_from(heads),
        block_q=st.sampled_from((1, 3, 64)), block_kv=st.sampled_from((1, 4, 64, 128)),
    )  # fmt: skip

"""Lists of keys for tests: numbers of all kinds, and attention over them by hand, key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import rawattn
from tests.caches import Cached

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


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A step over a cache with lists of keys. Rows of the cache that no list names are NaN. Where they are ``physical`` the numbers
    are those of rows of the cache, and there is no mask."""

    case: Cached
    lists: Lists
    physical: bool = False

    @property
    def numbers(self) -> tuple[Array, Array | None]:
        """The numbers of keys in the sequences, and the counts."""
        return self.lists.of(*(list(x) for x in zip(*self.case.lengths, strict=True)), not self.case.ragged)

    def places(self, i: int) -> Callable[[int, int], list[int]]:
        """The listed keys of a sequence's queries, by head and number."""
        numbers, counts = self.numbers
        token, kv_len = sum(q_len for q_len, _ in self.case.lengths[:i]), self.case.lengths[i][1]
        return lambda head, query: self.lists.places(numbers, counts, (i, token + query, head, query), self.case.heads, kv_len)

    def named(self, i: int) -> list[int]:
        """The keys of a sequence that any list of its queries has."""
        places = self.places(i)
        return sorted({j for n in range(self.case.lengths[i][0]) for h in range(self.case.heads) for j in places(h, n)})

    def cache(self, library: str = "numpy") -> rawattn.KVCache:
        """The cache of the keys that lists name."""
        k, v = self.case.pools()
        for i in range(len(self.case.lengths)):
            keys = self.case.stored(i)
            for j in self.named(i):
                for pool, x in zip((k, v), keys, strict=True):
                    self.case.row(pool, i, j)[...] = x[j]
        return self.case.made(k, v, library)

    def step(self, put: Callable[[Array], Any], library: str = "numpy", **changes: Any) -> rawattn.Step:
        """The step, whose arrays ``put`` brings to the library."""
        numbers, counts = self.numbers
        if self.physical:
            numbers = self.rows(numbers)
        keys = self.lists.keys(put(numbers), None if counts is None else put(counts), self.physical)
        if not self.physical:
            return self.case.step(library, keys=keys, **changes)
        starts = self.case.step_arrays().get("cu_seqlens_q")
        return rawattn.Step(cu_seqlens_q=None if starts is None else put(starts), keys=keys)

    def rows(self, numbers: Array) -> Array:
        """The rows of the cache at which keys lie; other numbers as they are."""
        found, token = numbers.copy(), 0
        for i, ((q_len, kv_len), pages) in enumerate(zip(self.case.lengths, self.case.pages(), strict=True)):
            for n in range(token, token + q_len):
                own = numbers[n]
                there = (own >= 0) & (own < kv_len)
                found[n, there] = pages[own[there] // self.case.page_size] * self.case.page_size + own[there] % self.case.page_size
            token += q_len
        return found

    def wanted(self, i: int) -> tuple[Array, Array]:
        """o and lse of a sequence by hand."""
        case = self.case
        (q_len, kv_len), (k, v) = case.lengths[i], case.keys(i)
        begin, end = case.mask(i).interval(np.arange(q_len), q_len, kv_len)
        cap = case.softcap

        def keep(head: int, query: int, j: int) -> bool:
            return self.physical or bool(begin[query] <= j < end[query])

        score = None if cap is None else lambda s, h, n, j: cap * np.tanh(s / cap)
        q = case.of(case.rows(case.heads, case.head_dim, 1), i)
        return by_hand(q, k, v, self.places(i), sinks=case.sink_logits(), keep=keep, score=score)

    def check(self, o: Array, lse: Array, tolerance: float) -> None:
        """Compares with ``wanted``."""
        for i in range(len(self.case.lengths)):
            o_wanted, lse_wanted = self.wanted(i)
            own_lse = self.case.of(lse.T, i).T if self.case.ragged else lse[i]
            np.testing.assert_allclose(self.case.of(o, i).astype(np.float64), o_wanted, atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(own_lse, lse_wanted, atol=min(tolerance, 2e-3), rtol=1e-4)


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

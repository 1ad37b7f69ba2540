"""Lists of keys for tests: numbers of all kinds, and attention over them by hand, key by key."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import rawattn
from rawattn.variant.element import ELEMENTS
from tests.caches import Cached

Array = npt.NDArray[Any]
SIZES = (1, 63, 64, 65, 576, 2048)
WRONG = 2147480000  # no key of any sequence


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of ``most`` numbers: of keys for each token where ``heads`` is 0, else of blocks, for each of so many heads and each
    block of queries. ``none`` is the share of numbers that are -1, ``same`` that of numbers that repeat the one before, ``wrong``
    that of numbers that are no keys."""

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

    def of(self, q_lens: list[int], kv_lens: list[int]) -> tuple[Array, Array | None]:
        """The numbers and counts for sequences of these lengths."""
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
            kept = np.array([j for j in places(head, query) if keep is None or keep(head, query, j)], np.int64)
            logits = k[kept, kv_head] @ q[query, head] * (scale or q.shape[2] ** -0.5)
            if score is not None:
                logits = np.array([score(float(x), head, query, int(j)) for x, j in zip(logits, kept, strict=True)])
            sink = -np.inf if sinks is None else float(sinks[head])
            top = max(sink, logits.max(initial=-np.inf))
            if np.isfinite(top):
                weights = np.exp(logits - top)
                total = weights.sum() + np.exp(sink - top)
                lse[head, query] = top + np.log(total)
                o[query, head] = weights / total @ v[kept, kv_head]
    return o, lse


def to_numpy(x: Any) -> Array:
    """A result in float64."""
    return np.asarray(x if isinstance(x, np.ndarray) else x.double().cpu().numpy(), np.float64)


@dataclasses.dataclass(frozen=True)
class ListedCase:
    """A call on plain tensors; sequences are packed where their lengths differ. Keys that no list names are NaN."""

    lists: Lists
    lengths: tuple[tuple[int, int], ...] = ((6, 90), (6, 90))
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    head_dim_v: int = 16
    dtype: str = "bf16"
    causal: bool = False
    options: Any = dataclasses.field(default_factory=dict)  # a function of these makes a key kept, or a score
    keep: Any = None
    score: Any = None
    sinks: bool = False
    used: Any = None  # q_lens and kv_lens

    @property
    def packed(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def numbers(self) -> tuple[Array, Array | None]:
        """The numbers of keys, and the counts."""
        there = [n for _, n in self.lengths] if self.used is None else [*self.used[1]]
        return self.lists.of([n for n, _ in self.lengths], there)

    def arrays(self) -> list[Any]:
        """q, k and v of each sequence."""
        rng, dtype, found, token = np.random.default_rng(3), ELEMENTS[self.dtype].dtype, [], 0
        sizes = (0, self.heads, self.head_dim), (1, self.kv_heads, self.head_dim), (1, self.kv_heads, self.head_dim_v)
        for i, lengths in enumerate(self.lengths):
            q, k, v = (rng.standard_normal((lengths[n], *rest)).astype(dtype) for n, *rest in sizes)
            unnamed = np.ones(lengths[1], bool)
            for n, h in itertools.product(range(lengths[0]), range(self.heads)):
                unnamed[self.lists.places(*self.numbers, (i, token + n, h, n), self.heads, lengths[1])] = False
            k[unnamed] = v[unnamed] = np.nan
            found.append((q, k, v))
            token += lengths[0]
        return found

    def wanted(self) -> list[Any]:
        """o and lse of each sequence by hand."""
        token, found, (numbers, counts) = 0, [], self.numbers
        for i, ((q_len, kv_len), (q, k, v)) in enumerate(zip(self.lengths, self.arrays(), strict=True)):
            used, there = (q_len, kv_len) if self.used is None else (self.used[0][i], self.used[1][i])

            def keep(h: int, n: int, j: int, used: int = used, there: int = there, i: int = i) -> bool:
                kept = n < used and (not self.causal or j <= n + there - used)
                return kept and (self.keep is None or bool(self.keep(i, h, n, j)))

            def places(h: int, n: int, i: int = i, token: int = token, there: int = there) -> list[int]:
                return self.lists.places(numbers, counts, (i, token + n, h, n), self.heads, there)

            score = None if self.score is None else lambda s, h, n, j, i=i: self.score(s, i, h, n, j)
            sinks = np.linspace(-1, 2, self.heads) if self.sinks else None
            found.append(by_hand(q, k, v, places, sinks=sinks, keep=keep, score=score))
            token += q_len
        return found

    def call(self, put: Callable[[Array], Any], **options: Any) -> tuple[list[Array], list[Array]]:
        """o and lse of each sequence, of arrays that ``put`` brings to a library."""
        q_lens, kv_lens = zip(*self.lengths, strict=True)
        numbers, counts = self.numbers
        keys = self.lists.keys(put(numbers), None if counts is None else put(counts))
        options |= self.options | {"causal": self.causal, "return_lse": True, "keys": keys}
        sinks = np.linspace(-1, 2, self.heads).astype(ELEMENTS[self.dtype].lse_dtype)
        options |= {"sinks": put(sinks)} if self.sinks else {}
        used = zip(("q_lens", "kv_lens"), self.used or (), strict=False)
        options |= {name: put(np.array(x, np.int32)) for name, x in used}
        join = np.concatenate if self.packed else np.stack
        q, k, v = (put(join(x)) for x in zip(*self.arrays(), strict=True))
        if not self.packed:
            o, lse = map(to_numpy, rawattn.attention(q, k, v, **options))
            return [*o], [*lse]
        starts = [put(np.cumsum([0, *x]).astype(np.int32)) for x in (q_lens, kv_lens)]
        o, lse = map(to_numpy, rawattn.attention_varlen(q, k, v, *starts, **options))
        ends = np.cumsum(q_lens)[:-1]
        return np.split(o, ends), np.split(lse, ends, axis=1)

    def check(self, results: tuple[list[Array], list[Array]]) -> None:
        """Compares what ``call`` gave with ``wanted``."""
        tolerance = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-5, "fp64": 1e-12}[self.dtype]
        for o, lse, (o_wanted, lse_wanted) in zip(*results, self.wanted(), strict=True):
            np.testing.assert_allclose(o, o_wanted, atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(lse, lse_wanted, atol=min(tolerance, 2e-3), rtol=min(tolerance, 1e-4))


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A step over a cache with lists of keys. Rows of the cache that no list names are NaN. Where they are ``physical`` the
    numbers are those of rows of the cache, and there is no mask."""

    case: Cached
    lists: Lists
    physical: bool = False

    @property
    def numbers(self) -> tuple[Array, Array | None]:
        """The numbers of keys in the sequences, and the counts."""
        return self.lists.of([n for n, _ in self.case.lengths], [n for _, n in self.case.lengths])

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
        for (q_len, kv_len), pages in zip(self.case.lengths, self.case.pages(), strict=True):
            for n in range(token, token + q_len):
                own = numbers[n]
                there = (own >= 0) & (own < kv_len)
                found[n, there] = (
                    pages[own[there] // self.case.page_size] * self.case.page_size + own[there] % self.case.page_size
                )
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
    of_heads = [n for n in heads if n]
    return by_token if not of_heads else by_token | st.builds(
        dataclasses.replace, by_token, most=st.sampled_from((1, 2, 7)), heads=st.sampled_from(of_heads),
        block_q=st.sampled_from((1, 3, 64)), block_kv=st.sampled_from((1, 4, 64, 128)),
    )  # fmt: skip


TOKENS, BLOCKS = Lists(70), Lists(3, heads=2, block_q=4, block_kv=16)
RAGGED = ((6, 90), (0, 5), (1, 33), (3, 0), (9, 64))
CASES = {
    "tokens": ListedCase(TOKENS),
    "tokens, causal": ListedCase(TOKENS, causal=True, sinks=True),
    "tokens, one head": ListedCase(Lists(33, counts=True, empty=True), heads=1, kv_heads=1),
    "tokens, many heads": ListedCase(Lists(40), heads=70, kv_heads=1, lengths=((2, 50),)),
    "tokens, packed": ListedCase(Lists(40, counts=True), lengths=RAGGED, causal=True),
    "blocks": ListedCase(BLOCKS, causal=True),
    "blocks of heads": ListedCase(dataclasses.replace(BLOCKS, heads=4, counts=True), causal=True),
    "blocks of one query": ListedCase(Lists(2, heads=2, block_kv=32, empty=True), lengths=((3, 90), (3, 90))),
    "blocks, packed": ListedCase(dataclasses.replace(BLOCKS, counts=True), lengths=RAGGED, causal=True),
    "blocks of 64": ListedCase(Lists(2, heads=2, block_q=64, block_kv=64), lengths=((70, 90),), heads=2),
    "window": ListedCase(TOKENS, options={"window": (30, 2)}, keep=lambda b, h, q, kv: -30 <= kv - q - 84 <= 2),
    "lengths": ListedCase(TOKENS, used=((3, 6), (90, 41)), causal=True),
    "softcap": ListedCase(TOKENS, options={"softcap": 0.7}, score=lambda s, b, h, q, kv: 0.7 * np.tanh(s / 0.7)),
    "functions": ListedCase(
        TOKENS,
        options={"mask": lambda b, h, q, kv: (kv + q + h) % 3 != b, "score": lambda s, b, h, q, kv: s + (kv - q) * 0.02},
        keep=lambda b, h, q, kv: (kv + q + h) % 3 != b,
        score=lambda s, b, h, q, kv: s + (kv - q) * 0.02,
    ),
    "invariant": ListedCase(TOKENS, options={"invariant": True}),
}
OTHERS = {
    "fp32": ListedCase(Lists(40, counts=True), dtype="fp32", causal=True),
    "fp64": ListedCase(Lists(2, heads=4, block_q=3, block_kv=8), dtype="fp64", lengths=RAGGED, causal=True),
    "wide": ListedCase(Lists(20), dtype="fp16", head_dim=320, head_dim_v=300, lengths=((2, 40),), heads=2, kv_heads=1),
}
SEQUENCES = Cached(
    ((3, 150), (0, 5), (1, 0), (1, 70), (4, 64)), page_size=16, dtype="bf16", heads=4, kv_heads=2, head_dim=32, head_dim_v=48
)
STEPS = {
    "table": ListedStep(SEQUENCES, Lists(90)),
    "dense": ListedStep(
        dataclasses.replace(SEQUENCES, form="dense", page_size=151, sinks=True, softcap=3.0), Lists(40, counts=True)
    ),
    "indptr": ListedStep(dataclasses.replace(SEQUENCES, form="indptr", layout="HND"), Lists(40)),
    "begins": ListedStep(
        dataclasses.replace(SEQUENCES, begins=(31, 2, 0, 9, 0), causal=(0, 1, 1, 1, 0)), Lists(60, same=0.5, empty=True)
    ),
    "small pages": ListedStep(dataclasses.replace(SEQUENCES, page_size=1), Lists(70, counts=True)),
    "many keys": ListedStep(
        dataclasses.replace(SEQUENCES, lengths=((1, 700), (1, 1100)), ragged=False, heads=2, kv_heads=1), Lists(1300)
    ),
    "rows": ListedStep(SEQUENCES, Lists(60), physical=True),
    "rows, same": ListedStep(
        dataclasses.replace(SEQUENCES, lengths=((2, 60), (2, 90)), ragged=False, page_size=3),
        Lists(60, counts=True),
        physical=True,
    ),
    "blocks": ListedStep(
        dataclasses.replace(SEQUENCES, lengths=((2, 200), (2, 90)), ragged=False), Lists(3, heads=2, block_kv=32, counts=True)
    ),
    "blocks of other numbers": ListedStep(  # a head has none, and another ten, which are split
        dataclasses.replace(SEQUENCES, lengths=((1, 1400), (1, 900)), ragged=False),
        Lists(10, heads=2, block_kv=128, counts=True, none=0.0, seed=6),
    ),
    "blocks, ragged": ListedStep(SEQUENCES, Lists(3, heads=2, block_q=2, block_kv=16, counts=True)),
    "blocks of heads": ListedStep(SEQUENCES, Lists(3, heads=4, block_q=2, block_kv=16)),
    "shared": ListedStep(dataclasses.replace(SEQUENCES, pool="shared", head_dim_v=16), Lists(40)),
    "e4m3": ListedStep(
        dataclasses.replace(SEQUENCES, kv_dtype="e4m3", scales=("number", "number"), head_dim_v=64),
        Lists(3, heads=2, block_kv=16),
    ),
}

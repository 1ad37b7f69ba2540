"""The specification: what attention and its gradients are, in float64 and plain array operations, on NumPy, CuPy or torch.

    o[i] = sum_j p[i, j] v[j],   p[i, j] = exp(s[i, j] - lse[i]),   lse[i] = log(sum_j exp(s[i, j]) + exp(sink))

over the keys j that the mask keeps for the query i, where the logit s[i, j] is scale * q[i].k[j], or what the score makes of it
(Vaswani et al., arXiv 1706.03762, equation 1), and the sink of the query's head, if it has one, is a logit without a value
(Xiao et al., arXiv 2309.17453; gpt-oss, arXiv 2508.10925). Kernels compute the same sums in blocks, with a running maximum
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).

The gradients of a loss, from do and dlse, those of o and lse: dp[i, j] = do[i].v[j] is the gradient of p[i, j], and with
delta[i] = do[i].o[i] - dlse[i] that of the logit is p[i, j] (dp[i, j] - delta[i]); times the score's slope and scale it is that
of q[i].k[j]. The sink's is -sum_i exp(sink - lse[i]) delta[i]: it is a key of probability exp(sink - lse[i]) with dp = 0.

With dropout the weights of o are m[i, j] p[i, j], where m is 0 or 1 / (1 - dropout) (``variant.weight.Dropout.kept``), and dp is
m[i, j] do[i].v[j]; p, lse and delta stay what they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..array.reading import read
from ..array.torch_state import requires_grad
from ..errors import ProblemError, UnsupportedError
from ..operation import arguments, captures, functions, host_functions
from ..operation.forward import limits as limits_of
from ..operation.keys import KeyLists, ListedKeys, parted
from ..operation.spec import Options, Spec, named
from ..variant import weight
from ..variant.mask import Pairs, of_head
from ..variant.score import Score

LOGITS = 1 << 22  # that are held at once
INF = float("inf")


@arguments.named
@arguments.with_options(Options)
def attention(
    q: Any, k: Any, v: Any, *, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, q_lens: Any = None,
    kv_lens: Any = None, seed: Any = None, rows: Sequence[int] | None = None, rounded: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Attention in float64, slow and exact, to compare with.

    >>> o = rawattn.reference.attention(q, k, v, causal=True)

    Args:
        q: (batch, q_len, heads, head_dim), of any float dtype and strides: a NumPy or CuPy array or a torch tensor.
        k, v: (batch, kv_len, kv_heads, head_dim) and (batch, kv_len, kv_heads, head_dim_v), in q's library.
        options: as in ``rawattn.attention``. The score needs ``logit`` alone; constant_time, deterministic and invariant change
            no result. Numbers in ``keys`` that are no keys are left out.
        seed: an int or one in an array; it is needed where there is dropout.
        sinks: (heads,) floats in any library, a logit of each query head that joins the sum and lse and has no value.
        cu_seqlens_q, cu_seqlens_kv: (batch + 1,) integers; then q, k, v are (total, heads, head_dim), sequences end to end.
        q_lens, kv_lens: (batch,) integers, the rows that each sequence uses: its other queries keep no key, and its other keys
            are not there.
        rows: compute these queries only, numbered in each sequence, or in all of q where sequences are end to end.
        rounded: compute in float32, with logits and probabilities rounded to q's dtype, and give float32: the yardstick for a
            kernel's error.

    Returns:
        o (batch, q_len, heads, head_dim_v) or (total_q, heads, head_dim_v), and with ``return_lse`` lse (batch, heads, q_len) or
        (heads, total_q), natural logarithms; float64, in q's library and on its device. ``rows`` gives len(rows) for q_len.

    A query that keeps no key, or whose kept logits are all -inf, has o = 0 and lse = the sink, or -inf without one. A sink of
    -inf is none; one of inf leaves o = 0 and lse = inf. A masked key or value takes no part, whatever it holds; NaN in q or in a
    kept key makes the row NaN.
    """
    *lists, options["keys"] = parted(options.get("keys"))
    chosen, starts = arguments.choose(Options, attention, options), (cu_seqlens_q, cu_seqlens_kv)
    formula = make_formula(q, k, chosen, seed, starts=starts, rounded=rounded)
    if chosen.keys is not None:
        formula = dataclasses.replace(formula, lists=listed(chosen.keys, lists[0], lists[1], q.shape[-2]))
    o, lse = formula.forward(q, k, v, sinks, *starts, rows, (q_lens, kv_lens))
    return (o, lse) if chosen.return_lse else o


@arguments.named
@arguments.with_options(Options)
def attention_backward(
    do: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
    q_lens: Any = None, kv_lens: Any = None, seed: Any = None, wrt: Any = (), rounded: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of a loss by q, k, v, the sinks and what a score captured in float64, slow and exact, to compare with.

    >>> dq, dk, dv = rawattn.reference.attention_backward(do, q, k, v, causal=True)

    Args:
        do: the loss's gradient by o, in the shape of o.
        dlse: its gradient by lse, (batch, heads, q_len) or (heads, total_q), where the loss depends on lse.
        rounded: compute in float32, with logits, probabilities, o and gradients of logits rounded to q's dtype.
        The rest as in ``attention``. A score needs ``slope`` too.

    Returns:
        dq, dk, dv in the shapes of q, k, v, with ``sinks`` dsinks (heads,), and the gradients by the arrays in ``wrt``, which
        the score captured; float64, in q's library and on its device. Keys and values that query heads share get the sum of the
        gradients.

    A query that keeps no key has dq = 0 and adds nothing to dk and dv; its dlse reaches the sink. NaN or inf in a query reaches
    dk and dv of the keys that it keeps alone, and in a key or value dq of the queries that keep it, and through them dk and dv.
    Rows that q_lens and kv_lens leave unused have gradients of 0, and dlse of such a query reaches no sink.
    """
    *lists, options["keys"] = parted(options.get("keys"))
    chosen, starts = arguments.choose(Options, attention_backward, options), (cu_seqlens_q, cu_seqlens_kv)
    formula = make_formula(q, k, chosen, seed, starts=starts, rounded=rounded)
    if chosen.keys is not None:
        formula = dataclasses.replace(formula, lists=listed(chosen.keys, lists[0], lists[1], q.shape[-2]))
    return formula.backward(do, q, k, v, dlse, sinks, *starts, (chosen.score, wrt), (q_lens, kv_lens))


def cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if isinstance(x, np.ndarray) or not hasattr(x, "detach") else _detach(x).to(dtype)


def _detach(x: Any) -> Any:
    """A torch tensor to which autograd does not follow. Raises ProblemError where it would have to."""
    if requires_grad(x):
        raise ProblemError(
            "an input requires grad, and rawattn.reference has no autograd; detach it, or call under torch.no_grad(). "
            "rawattn.reference.attention_backward gives gradients. Nothing is detached silently."
        )
    return x.detach()


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """The array as a NumPy one, floats as float64."""
    if hasattr(x, "detach"):
        x = _detach(x).cpu()
        return (x.double() if x.is_floating_point() else x).numpy()
    x = x.get() if hasattr(x, "get") else np.asarray(x)
    return x if x.dtype.kind in "iu" else x.astype(np.float64)


def make_formula(
    q: Any, k: Any, options: Options, seed: Any = None, *, starts: tuple[Any, Any] = (None, None), rounded: bool = False
) -> Formula:
    """The formula for q's library and device and these options, in float64, or ``rounded``."""
    xp = sys.modules[type(q).__module__.partition(".")[0]]
    device = {"device": q.device} if xp.__name__ == "torch" else {}
    traced, captured = captures.take({"mask": options.mask, "score": options.score})
    held = [_detach(x) if hasattr(x, "detach") else x for x in captured]
    by_name = dict(zip(captures.names(traced), held, strict=True))
    if functions.among(traced):
        arrays = {"q": q, "k": k, "cu_seqlens_q": starts[0]}
        limits = limits_of({name: x for name, x in arrays.items() if x is not None}, named(options))
        traced = captures.make_options(traced, {name: read(x, name) for name, x in by_name.items()}, limits)
    spec = host_functions.on_host(Spec.of(**named(options) | traced), by_name, starts)
    factor = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    pairs, dropped = (spec.placed_mask, spec.placed_score), Dropped.of(spec, seed)
    rounding = (lambda x: cast(cast(x, q.dtype), x.dtype)) if rounded else (lambda x: x)
    return Formula(xp, device, xp.float32 if rounded else xp.float64, rounding, *pairs, factor, dropped)


def listed(lists: KeyLists, numbers: Any, counts: Any, heads: int) -> ListedKeys:
    """The lists of keys of a call on q of these heads, in NumPy."""
    arrays = {"keys": to_numpy(numbers)} | ({} if counts is None else {"keys_counts": to_numpy(counts)})
    return ListedKeys(lists, arrays, heads)


def kept_places(
    xp: Any, mask: Pairs, batch_head: tuple[int, int], query: int, places: Any, lengths: tuple[int, int], device: Any = None
) -> Any:
    """Those of the listed places that the mask keeps for a query, in order."""
    begin, end = of_head(mask, batch_head[1]).interval(np.array([query]), *lengths)
    places = places[(places >= begin) & (places < end)]
    if mask.keep is None or not len(places):
        return places
    q, kv = (xp.asarray(x, **(device or {})) for x in ([[query]], places[None]))
    return places[to_numpy(mask.keep(xp, *batch_head, q, kv, *lengths) & (kv >= 0))[0] != 0]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some queries of a sequence, a run of keys that holds all that they keep, or the places that their list names, and which
    pairs they keep.

    ``q`` and ``kv`` are the positions in the sequence as a column and a row, ``lengths`` its numbers of queries and keys;
    ``rows`` says which of the wanted queries these are.
    """

    rows: slice
    keys: Any
    q: Any
    kv: Any
    kept: Any
    lengths: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Dropped:
    """which weights a call drops: by its option and seed, and the positions of the first rows of q and of k."""

    option: weight.Dropout
    seed: int
    offsets: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, spec: Spec, seed: Any) -> Dropped | None:
        """None where nothing is dropped. Raises ProblemError where there is no seed."""
        if not spec.dropout:
            return None
        if seed is None:
            raise ProblemError(f"seed is missing, and dropout is {spec.dropout}; give an int, or one int64 in an array.")
        number = int(seed if isinstance(seed, int) else to_numpy(seed).reshape(()))
        return cls(weight.Dropout(spec.dropout), number, spec.offsets or (0, 0))

    def kept(self, batch_head: tuple[int, int], tile: Tile) -> npt.NDArray[np.bool_]:
        """Says which weights of a tile are kept."""
        q, kv = (to_numpy(x) + offset for x, offset in zip((tile.q, tile.kv), self.offsets, strict=True))
        return self.option.kept(self.seed, *batch_head, q, kv)


@dataclasses.dataclass(frozen=True)
class Formula:
    """The formula for one library, device and precision; ``rounding`` is applied to what kernels hold in the inputs' format."""

    xp: Any
    device: dict[str, Any]  # the device as a keyword argument, where the library takes one
    dtype: Any
    rounding: Callable[[Any], Any]
    mask: Pairs
    score: Score
    scale: float
    dropout: Dropped | None = None
    first: int = 0  # the number of the first sequence
    lists: ListedKeys | None = None  # of the keys of each query, which a mask may leave out
    token: int = 0  # the number of its first row among those that have lists
    sums: dict[int, npt.NDArray[np.float64]] | None = None  # to which gradients of captured arrays are added, by their numbers

    def forward(
        self, q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_kv: Any, wanted: Sequence[int] | None = None,
        lens: tuple[Any, Any] = (None, None),
    ) -> tuple[Any, Any]:  # fmt: skip
        """o and lse of all sequences, or of the wanted queries; ``lens`` are the rows of q and of k that each uses."""
        queries = np.arange(q.shape[-3]) if wanted is None else np.asarray(wanted, np.int64)
        with self._settings(q):
            shape = (*q.shape[:-3], len(queries), q.shape[-2])
            o = self.xp.zeros((*shape, v.shape[-1]), dtype=self.dtype, **self.device)
            lse = self.xp.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=self.dtype, **self.device)
            sinks = self._read_sinks(sinks, q.shape[-2])
            for head, sink in enumerate(sinks):
                lse[..., head, :] = sink
            for batch, rows, keys in self._find_sequences(q, cu_q, cu_kv):
                if isinstance(rows, int):
                    at, to = np.arange(len(queries)), (o[rows], lse[rows])
                    chosen = queries
                else:
                    at, to = np.nonzero((queries >= rows.start) & (queries < rows.stop))[0], (o, lse)
                    chosen = queries[at] - rows.start
                used, keys_used = (slice(None if each is None else int(each[batch])) for each in lens)
                if used.stop is not None:
                    chosen, at = chosen[chosen < used.stop], at[chosen < used.stop]
                inputs = q[rows][used], k[keys][keys_used], v[keys][keys_used]
                if self.lists is not None:
                    token = self.token + (rows * q.shape[1] if isinstance(rows, int) else rows.start)
                    self.forward_listed((self.first + batch, token), *inputs, sinks, chosen, at, *to)
                    continue
                self.forward_sequence((self.first + batch, 0), *inputs, sinks, chosen, at, *to)
        return o, lse

    def backward(
        self, do: Any, q: Any, k: Any, v: Any, dlse: Any, sinks: Any, cu_q: Any, cu_kv: Any,
        wanted: tuple[Any, Sequence[Any]] = (None, ()), lens: tuple[Any, Any] = (None, None),
    ) -> tuple[Any, ...]:  # fmt: skip
        """dq, dk, dv of all sequences, dsinks where there are sinks, and the gradients by the wanted arrays of a function;
        ``lens`` are the rows of q and of k that each sequence uses."""
        if wanted[1]:
            return self._add_captured(*wanted, do, q, k, v, dlse, sinks, cu_q, cu_kv, (None, ()), lens)
        with self._settings(q):
            gradients = [self.xp.zeros(x.shape, dtype=self.dtype, **self.device) for x in (q, k, v)]
            dsinks = self.xp.zeros(q.shape[-2], dtype=self.dtype, **self.device)
            dq, dk, dv = gradients
            if dlse is None:
                dlse = self.xp.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=self.dtype, **self.device)
            numbers = self._read_sinks(sinks, q.shape[-2])
            for batch, rows, keys in self._find_sequences(q, cu_q, cu_kv):
                n, m = (slice(None if each is None else int(each[batch])) for each in lens)
                dlse_i = cast((dlse[rows] if isinstance(rows, int) else dlse[:, rows])[:, n], self.dtype)
                inputs = (do[rows][n], q[rows][n], k[keys][m], v[keys][m], dlse_i, numbers)
                token = rows * q.shape[1] if isinstance(rows, int) else rows.start
                self.backward_sequence((batch, 0), *inputs, dq[rows][n], dk[keys][m], dv[keys][m], dsinks, token=token)
        return (*gradients, dsinks) if sinks is not None else tuple(gradients)

    def _add_captured(self, score: Any, wrt: Sequence[Any], *rest: Any) -> tuple[Any, ...]:
        """Returns what ``backward`` gives, and the gradients by these arrays, which the score captured."""
        options, captured = captures.take({"score": score})
        numbers = [int(name.rpartition("_")[2]) for name in captures.named_in(options, captured, wrt)]
        sums = {i: np.zeros(tuple(x.shape)) for i, x in zip(numbers, wrt, strict=True)}
        gradients = dataclasses.replace(self, sums=sums).backward(*rest)
        return (*gradients, *(self.xp.asarray(sums[i], dtype=self.dtype, **self.device) for i in numbers))

    def _settings(self, q: Any) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(np.errstate(all="ignore"))
        if self.xp.__name__ == "cupy":
            stack.enter_context(q.device)
        return stack

    @staticmethod
    def _read_sinks(sinks: Any, heads: int) -> list[float]:
        """The sink of each head; -inf where there is none."""
        if sinks is None:
            return [-INF] * heads
        if tuple(sinks.shape) != (heads,):
            raise ProblemError(f"sinks has shape {tuple(sinks.shape)}; it must be ({heads},), a number for each head of q.")
        return list(map(float, sinks.tolist()))

    @staticmethod
    def _find_sequences(q: Any, cu_q: Any, cu_kv: Any) -> Iterator[tuple[int, Any, Any]]:
        """The number of each sequence, and where its rows of q and of k are."""
        if q.ndim == 4:
            yield from ((i, i, i) for i in range(len(q)))
        else:
            q_ends, kv_ends = (list(map(int, cu)) for cu in (cu_q, cu_kv))
            for i in range(len(q_ends) - 1):
                yield i, slice(*q_ends[i : i + 2]), slice(*kv_ends[i : i + 2])

    def heads(self, first: int, count: int) -> Iterator[tuple[Pairs, Sequence[int]]]:
        """The pairs that a mask keeps and the heads that they are of, counted from ``first``: all, or each where they differ."""
        if self.mask.of_head is not None or self.mask.keep is not None:
            yield from ((of_head(self.mask, first + head), (head,)) for head in range(count))
        else:
            yield self.mask, range(count)

    def tiles(self, mask: Pairs, batch_head: tuple[int, int], queries: Any, q_len: int, kv_len: int) -> Iterator[Tile]:
        """The queries in tiles whose logits fit in memory, but for tiles that keep no key. ``batch_head`` are the numbers of the
        sequence and of the head."""
        step = max(1, LOGITS // max(1, kv_len))
        for first in range(0, len(queries), step):
            chosen = queries[first : first + step]
            begin, end = mask.interval(chosen, q_len, kv_len)
            low, high = int(begin.min()), int(end.max())
            if low < high:
                j = np.arange(low, high)
                kept = (j >= begin[:, None]) & (j < end[:, None])
                q, kv, kept = (self.xp.asarray(x, **self.device) for x in (chosen[:, None], j[None], kept))
                if mask.keep is not None:
                    kept = kept & mask.keep(self.xp, *batch_head, q, kv, q_len, kv_len)
                    columns = np.flatnonzero(to_numpy(kept.any(0)))  # between them are all keys that any of the queries keeps
                    if not len(columns):
                        continue
                    some = slice(int(columns[0]), int(columns[-1]) + 1)
                    kv, kept, low, high = kv[:, some], kept[:, some], low + some.start, low + some.stop
                yield Tile(slice(first, first + len(chosen)), slice(low, high), q, kv, kept, (q_len, kv_len))

    def tiles_of_head(self, batch_head: tuple[int, int], queries: Any, q_len: int, kv_len: int, token: int) -> Iterator[Tile]:
        """The queries in ``tiles`` of one head, or, where they have lists, with the keys that these name."""
        mask = of_head(self.mask, batch_head[1])
        if self.lists is None:
            yield from self.tiles(mask, batch_head, queries, q_len, kv_len)
            return
        lists, first = self.lists, 0
        for _, some in itertools.groupby(queries.tolist(), lambda query: query // lists.lists.block_q):
            chosen = np.array([*some])
            places = lists.of(batch_head[0], token + int(chosen[0]), int(chosen[0]), batch_head[1], kv_len, strict=False)
            begin, end = mask.interval(chosen, q_len, kv_len)
            kept = (places >= begin[:, None]) & (places < end[:, None])
            rows, first = slice(first, first + len(chosen)), first + len(chosen)
            q, kv, kept, keys = (self.xp.asarray(x, **self.device) for x in (chosen[:, None], places[None], kept, places))
            if mask.keep is not None and len(places):
                kept = kept & mask.keep(self.xp, *batch_head, q, kv, q_len, kv_len)
            if len(places) and bool(kept.any()):
                yield Tile(rows, keys, q, kv, kept, (q_len, kv_len))

    def rounds(self, places: Any) -> Iterator[tuple[Any, Any]]:
        """Some of the listed places after the other, with their numbers in the list, none of them twice at once."""
        at = to_numpy(places)
        order = np.argsort(at, kind="stable")
        begins = np.concatenate([[True], np.diff(at[order]) != 0])
        nth = np.empty(len(at), np.int64)
        nth[order] = np.arange(len(at)) - np.maximum.accumulate(np.where(begins, np.arange(len(at)), 0))
        for i in range(int(nth.max()) + 1):
            some = np.flatnonzero(nth == i)
            yield tuple(self.xp.asarray(x, **self.device) for x in (some, at[some]))

    def forward_sequence(
        self, origin: tuple[int, int], q: Any, k: Any, v: Any, sinks: list[float], queries: Any, at: Any, o: Any, lse: Any
    ) -> None:
        """Writes the queries of one sequence to the rows ``at`` of o and lse; its number and that of the first head are
        ``origin``."""
        for mask, heads in self.heads(origin[1], q.shape[1]):
            for tile in self.tiles(mask, (origin[0], origin[1] + heads[0]), queries, len(q), len(k)):
                to, last = self.xp.asarray(at[tile.rows], **self.device), -1
                for head in heads:
                    kv_head = head // (q.shape[1] // k.shape[1])
                    if kv_head != last:  # heads that share keys come one after another
                        keys, values = (cast(x[tile.keys, kv_head], self.dtype) for x in (k, v))
                        last = kv_head
                    rows = cast(q[:, head][tile.q[:, 0]], self.dtype)
                    o[to, head], lse[head, to] = self.attend(rows, keys, values, sinks[head], (origin[0], origin[1] + head), tile)

    def forward_listed(
        self, origin: tuple[int, int], q: Any, k: Any, v: Any, sinks: list[float], queries: Any, at: Any, o: Any, lse: Any
    ) -> None:
        """Writes the queries of one sequence as ``forward_sequence`` does, where each has a list of keys; its number and that of
        its first row are ``origin``."""
        for head, sink in enumerate(sinks):
            batch_head, kv_head = (origin[0], head), head // (q.shape[1] // k.shape[1])
            for tile in self.tiles_of_head(batch_head, queries, len(q), len(k), origin[1]):
                to = self.xp.asarray(at[tile.rows], **self.device)
                rows = q[:, head][tile.q[:, 0]], k[tile.keys, kv_head], v[tile.keys, kv_head]
                inputs = [cast(x, self.dtype) for x in rows]
                o[to, head], lse[head, to] = self.attend(inputs[0], inputs[1], inputs[2], sink, batch_head, tile)

    def attend_listed(
        self, q: Any, k: Any, v: Any, sink: float, batch_head: tuple[int, int], query: int, places: Any, lengths: tuple[int, int]
    ) -> tuple[Any, Any]:
        """o and lse of one query of one head, over the keys and values of its list, whose places are these."""
        if not len(places):
            return 0.0, sink
        xp, kv = self.xp, self.xp.asarray(places[None], **self.device)
        tile = Tile(slice(0, 1), slice(0, 0), xp.asarray([[query]], **self.device), kv, kv >= 0, lengths)
        o, lse = self.attend(cast(q[None], self.dtype), cast(k, self.dtype), cast(v, self.dtype), sink, batch_head, tile)
        return o[0], lse[0]

    def backward_sequence(
        self, origin: tuple[int, int], do: Any, q: Any, k: Any, v: Any, dlse: Any, sinks: list[float], dq: Any, dk: Any, dv: Any,
        dsinks: Any, known: tuple[Any, Any] | None = None, token: int = 0,
    ) -> None:  # fmt: skip
        """Adds the gradients of one sequence to dq, dk, dv and dsinks; its number and that of the first head are ``origin``, that
        of its first row among all that have lists ``token``. ``known`` are lse and delta where they come from more keys than
        these."""
        for head, sink in enumerate(sinks):
            kv_head = head // (q.shape[1] // k.shape[1])
            lse, delta = self.xp.full_like(dlse[head], sink), -dlse[head]
            batch_head = origin[0], origin[1] + head
            for tile in self.tiles_of_head(batch_head, np.arange(len(q)), len(q), len(k), token):
                rows, keys = tile.rows, tile.keys
                inputs = do[rows, head], q[rows, head], k[keys, kv_head], v[keys, kv_head]
                x = [cast(x, self.dtype) for x in inputs]
                known_rows = None if known is None else tuple(each[head, rows, None] for each in known)
                gradients = self.gradients(x[0], x[1], x[2], x[3], dlse[head, rows, None], sink, batch_head, tile, known_rows)
                dq[rows, head] += gradients[0]
                for some, at in [(slice(None), keys)] if isinstance(keys, slice) else self.rounds(keys):
                    dk[at, kv_head] += gradients[1][some]
                    dv[at, kv_head] += gradients[2][some]
                lse[rows], delta[rows] = gradients[3:]
            if sink != -INF:
                p = self.xp.where(lse == sink, 1.0, self.xp.exp(sink - lse))  # 1 where both are inf
                dsinks[head] += self.sink_gradient(p, delta)

    def attend(self, q: Any, k: Any, v: Any, sink: float, batch_head: tuple[int, int], tile: Tile) -> tuple[Any, Any]:
        """o and lse of the queries of one head."""
        p, lse, _, _ = self.weights(q, k, sink, batch_head, tile)
        return self.total(self.dropped(p, batch_head, tile), v, tile.kept), lse

    def dropped(self, p: Any, batch_head: tuple[int, int], tile: Tile) -> Any:
        """Weights, or their gradients, after dropout."""
        if self.dropout is None:
            return p
        kept = self.xp.asarray(self.dropout.kept(batch_head, tile), **self.device)
        return self.xp.where(kept, p * self.dropout.option.factor, 0.0)

    def weights(self, q: Any, k: Any, sink: float, batch_head: tuple[int, int], tile: Tile) -> tuple[Any, Any, Any, Any]:
        """The probabilities, lse, the scaled dot products, and the logits."""
        xp = self.xp
        if self.score.logit is None:
            raise UnsupportedError(f"the reference has no formula for the score {self.score!r}: it has no logit(...).")
        dot = self.scale * (q @ k.T)
        s = cast(self.score.of_lengths(*tile.lengths).logit(xp, dot, *batch_head, tile.q, tile.kv), self.dtype)
        s = xp.where(tile.kept, self.rounding(s), -INF)
        m = xp.amax(s, axis=-1, keepdims=True)
        m = xp.where(m < sink, sink, m)
        base = xp.where(m == -INF, 0.0, m)
        p = xp.exp(s - base)
        sink_exp = 0.0 if sink == -INF else xp.where(m == sink, 1.0, xp.exp(sink - base))
        total = xp.sum(p, axis=-1, keepdims=True) + sink_exp
        p = xp.where(tile.kept, p / xp.where(total == 0, 1.0, total), 0.0)
        return self.rounding(p), (m + xp.log(total))[:, 0], dot, s

    def gradients(
        self, do: Any, q: Any, k: Any, v: Any, dlse: Any, sink: float, batch_head: tuple[int, int], tile: Tile, known: Any = None
    ) -> tuple[Any, ...]:
        """dq, dk, dv, lse and delta of the queries of one head."""
        p, ds, lse, delta = self.weights_backward(do, q, k, v, dlse, sink, batch_head, tile, known)
        dq = self.scale * self.total(ds, k, tile.kept)
        return dq, self.scale * self.total(ds.T, q, tile.kept.T), self.total(p.T, do, tile.kept.T), lse, delta

    def weights_backward(
        self, do: Any, q: Any, k: Any, v: Any, dlse: Any, sink: float, batch_head: tuple[int, int], tile: Tile, known: Any = None
    ) -> tuple[Any, ...]:
        """The weights of the values, the gradients of the scaled dot products, lse and delta of the queries of one head.

        ``known`` are lse and delta where these keys are a part of all."""
        p, lse, dot, s = self.weights(q, k, sink, batch_head, tile)
        if known is None:
            o = self.rounding(self.total(self.dropped(p, batch_head, tile), v, tile.kept))
            delta = self.xp.sum(do * o, axis=-1, keepdims=True) - dlse
        else:
            whole, delta = known
            p = self.rounding(self.xp.where(tile.kept & (whole != -INF), self.xp.exp(s - whole), 0.0))
        ds = p * (self.dropped(do @ v.T, batch_head, tile) - delta)
        self.gather(ds, dot, batch_head, tile)
        slope = self.slope(dot, batch_head, tile)
        ds = self.rounding(self.xp.where(tile.kept, ds if slope is None else ds * slope, 0.0))
        return self.dropped(p, batch_head, tile), ds, lse, delta[:, 0]

    def gather(self, gradients: Any, dot: Any, batch_head: tuple[int, int], tile: Tile) -> None:
        """Adds to ``sums`` what these gradients of logits are by the elements of captured arrays."""
        if not self.sums:
            return
        score, xp = self.score.of_lengths(*tile.lengths), self.xp
        for i, indices, derivative in score.element_gradients(xp, dot, *batch_head, tile.q, tile.kv):
            if i in self.sums:
                self.scatter(self.sums[i], indices, xp.where(tile.kept, gradients * derivative, 0.0))

    def scatter(self, sums: npt.NDArray[np.float64], indices: tuple[Any, ...], parts: Any) -> None:
        """Adds each part to the sum with its indices."""
        at = np.zeros(parts.shape, np.int64).ravel()
        for index, size in zip(indices, sums.shape, strict=True):
            at = at * size + to_numpy(index).ravel()
        np.add.at(sums.reshape(-1), at, to_numpy(parts).ravel())

    def slope(self, dot: Any, batch_head: tuple[int, int], tile: Tile) -> Any:
        """The score's derivative; None where it is 1."""
        if self.score.slope is None:
            raise UnsupportedError(f"the score {self.score!r} has no slope(...), its derivative by s, which gradients need.")
        return self.score.of_lengths(*tile.lengths).slope(self.xp, dot, *batch_head, tile.q, tile.kv)

    def sink_gradient(self, p: Any, delta: Any) -> Any:
        """The gradient of a head's sink."""
        return -self.xp.sum(p * delta)

    def total(self, weights: Any, x: Any, kept: Any) -> Any:
        """weights @ x, to which a pair that is not kept adds nothing, not even 0 times inf or NaN."""
        xp = self.xp
        infinite = ~xp.all(xp.isfinite(x), axis=1)
        if not bool(xp.any(infinite)):
            return weights @ x
        result = weights @ xp.where(infinite[:, None], 0.0, x)
        for j in (j for j, is_infinite in enumerate(infinite.tolist()) if is_infinite):
            result += xp.where(kept[:, j, None], weights[:, j, None] * x[j], 0.0)
        return result

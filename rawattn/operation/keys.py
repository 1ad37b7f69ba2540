"""Lists of keys: which keys each query attends to, as numbers in an array, as indexers and block scores choose them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..array.array import Array
from ..errors import ProblemError, UnsupportedError
from .operand import Operand, check_contiguous, check_int32, check_like

NO_GRADIENT = (
    "keys was given and an input requires grad, and on a GPU only Blocks of 64 or 128 keys and a multiple of 64 queries have "
    "gradients; call under torch.no_grad(), or on detached inputs."
)
NO_ARRAYS = (int, float, str, bytes, list, tuple, dict, set, range)
MOST_KEYS = 1 << 30  # of a list, each as often as it is listed


@dataclasses.dataclass(frozen=True)
class TopK:
    """The keys of each token, as an indexer chooses them (DeepSeek-V3.2).

    >>> o = rawattn.attention(q, k, v, causal=True, keys=rawattn.TopK(positions))  # (batch * q_len, k)

    Args:
        positions: int32, (tokens, k), in q's library and on its device: the keys of each row of q, by their places in the row's
            sequence, from 0 up. Tokens are q's rows in order: batch * q_len, or those of packed sequences. All heads share them.
            The last dimension is contiguous.
        counts: int32, (tokens,): how many of a token's numbers count, from the first one on. None for all.
        physical: numbers are page * page_size + row of a cache, for ``Step(keys=...)`` without kv_lens and page_table. Such keys
            have no position: no mask, window or score of positions applies, and ``causal`` of the step is not looked at.

    -1 is none. A number that is no key of the sequence is none, too, and ``violations`` says so; on the CPU it raises. Masks,
    windows and lengths apply to the places: a listed key that they leave out does not count. A key counts as often as it is
    listed. Sums go along the list, so its order decides last bits. A token without a key has o = 0 and lse = -inf. What lies in
    keys that no list names reaches no result; NaN or inf in a listed v that a mask leaves out may.
    """

    positions: Any
    counts: Any = None
    physical: bool = False

    def __post_init__(self) -> None:
        _check_object("TopK", "positions", self.positions, "(tokens, k)")
        if not isinstance(self.physical, (bool, np.bool_)):
            raise ProblemError(f"physical is {self.physical!r}; it must be True or False.")

    @property
    def lists(self) -> KeyLists:
        """The kind of lists that these are."""
        return KeyLists(True, 1, 1, bool(self.physical))

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The numbers, and how many of them count."""
        return self.positions, self.counts


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of keys of each block of queries and each head, as block scores choose them (NSA, MoBA, Quest).

    >>> o = rawattn.attention(q, k, v, causal=True, keys=rawattn.Blocks(indices, block_q=1, block_kv=64))

    Args:
        indices: int32, (batch, kv_heads or heads, query blocks, most), in q's library and on its device: block i has keys
            i * block_kv to (i + 1) * block_kv - 1 of the sequence. Query block j has queries j * block_q to
            (j + 1) * block_q - 1 of q's rows of the sequence. The last dimension is contiguous.
        counts: int32, (batch, kv_heads or heads, query blocks): how many numbers of a list count, from the first one on.
        block_q: queries of a block, an int from 1 up. The last block may have fewer.
        block_kv: keys of a block, a power of two up to 1024.

    -1 is none; the rest is as for ``TopK``. Where sequences are packed, queries behind the last block keep no key.

    Blocks of 64 or 128 keys and a multiple of 64 queries are whole tiles of kernels with tensor cores: these have gradients on
    GPUs, beside built-in masks, where a block counts as often as it is listed. On the CPU all lists have. Lists that rise share
    most of what they read. NaN or inf in a key may reach dq of queries that list its neighbour: a tile of gradients may have the
    128 keys of two blocks, and all rows of the last one.
    """

    indices: Any
    counts: Any = None
    block_q: int = 1
    block_kv: int = 64

    def __post_init__(self) -> None:
        _check_object("Blocks", "indices", self.indices, "(batch, kv_heads, query blocks, most)")
        for name, least in (("block_q", 1), ("block_kv", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value < MOST_KEYS:
                raise ProblemError(f"{name} is {value!r}; it must be an int from {least} up.")
        if self.block_kv & (self.block_kv - 1) or self.block_kv > 1024:
            raise ProblemError(f"block_kv is {self.block_kv}; it must be a power of two up to 1024.")

    @property
    def lists(self) -> KeyLists:
        """The kind of lists that these are."""
        return KeyLists(False, int(self.block_q), int(self.block_kv), False)

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The numbers, and how many of them count."""
        return self.indices, self.counts


@dataclasses.dataclass(frozen=True)
class KeyLists:
    """The kind of a call's lists of keys: one for each token, or for each head and block of ``block_q`` queries; of single keys,
    or of blocks of ``block_kv``; by their places in the sequence, or ``physical``, in the cache."""

    by_token: bool = True
    block_q: int = 1
    block_kv: int = 1
    physical: bool = False

    def to_json(self) -> list[Any]:
        """The fields as JSON can hold them; ``KeyLists(*fields)`` is the inverse."""
        return [*dataclasses.astuple(self)]

    def __str__(self) -> str:
        if self.by_token:
            return f"lists of {'rows of the cache' if self.physical else 'keys'} for each token"
        return f"lists of blocks of {self.block_kv} keys for each {self.block_q} queries"


class ListSizes(NamedTuple):
    """The sizes of lists of keys: the numbers of one, the lists of a sequence, by head and query block (0 where there is one for
    each token), and whether an array says how many numbers count."""

    most: int
    heads: int = 0
    blocks: int = 0
    counts: bool = False


def _check_object(name: str, field: str, value: Any, shape: str) -> None:
    if value is None or isinstance(value, NO_ARRAYS):  # torch 2.4 cannot compile hasattr of a tensor
        raise ProblemError(f"{field} of {name} is {value!r}; it must be an int32 array of shape {shape}.")


def parted(keys: Any) -> tuple[Any, Any, KeyLists | None]:
    """The arrays of ``keys``, a TopK, a Blocks or None, and the kind of its lists. Raises ProblemError for anything else."""
    if keys is None:
        return None, None, None
    if not isinstance(keys, (TopK, Blocks)):
        raise ProblemError(f"keys is a {type(keys).__name__}; it must be a rawattn.TopK or a rawattn.Blocks, or None.")
    return (*keys.arrays, keys.lists)


def joined(numbers: Any, counts: Any, lists: KeyLists | None) -> TopK | Blocks | None:
    """The inverse of ``parted``."""
    if lists is None or numbers is None:
        return None
    return TopK(numbers, counts, lists.physical) if lists.by_token else Blocks(numbers, counts, lists.block_q, lists.block_kv)


def have_tiles(lists: KeyLists) -> bool:
    """Says whether blocks are whole tiles of kernels with tensor cores: multiples of 64 queries and of 64 keys."""
    return not lists.by_token and lists.block_q % 64 == 0 and lists.block_kv % 64 == 0


def check_gradient(lists: KeyLists | None, is_cpu: bool) -> None:
    """Raises UnsupportedError where a call with these lists has no gradients."""
    if lists is not None and not is_cpu and not (have_tiles(lists) and lists.block_kv <= 128):
        raise UnsupportedError(NO_GRADIENT)


def make_lists(value: Any) -> KeyLists | None:
    """The kind of lists that an option says, also as ``KeyLists.to_json`` gave it. Raises ProblemError for anything else."""
    if isinstance(value, (list, tuple)) and len(value) == 4:
        value = KeyLists(*value)
    if value is not None and not isinstance(value, KeyLists):
        raise ProblemError(f"keys is {value!r}; it must be a rawattn.KeyLists, or None.")
    return value


def sizes_of(arrays: Mapping[str, Array], lists: KeyLists | None) -> ListSizes | None:
    """The sizes of the lists among arrays, by name, which were checked."""
    if lists is None:
        return None
    shape, counts = tuple(arrays["keys"].shape), "keys_counts" in arrays
    return ListSizes(shape[1], 0, 0, counts) if lists.by_token else ListSizes(shape[3], shape[1], shape[2], counts)


def check_lists(
    arrays: Mapping[str, Array], lists: KeyLists | None, tokens: Any, batch: Any, q_len: Any, heads: int, kv_heads: int
) -> None:
    """Raises ProblemError where the lists among arrays, by name, are not for these rows of q. ``q_len`` is None where sequences
    have any number of queries. It reads no memory."""
    if ("keys" in arrays) != (lists is not None):
        raise ProblemError("keys was given without the kind of its lists, or that without keys; give both to the operator.")
    if lists is None:
        return
    field = "positions" if lists.by_token else "indices"
    for name, title in (("keys", f"{field} of keys"), ("keys_counts", "counts of keys")):
        if name in arrays:
            check_like(title, arrays[name], "q", arrays["q"])
            check_int32(title, arrays[name])
            check_contiguous(title, arrays[name])
    found = tuple(arrays["keys"].shape)
    if lists.by_token:
        if len(found) != 2 or found[0] != tokens:
            raise ProblemError(f"positions of keys has shape {found}; it must be ({tokens}, k), a list for each row of q.")
    else:
        blocks = None if q_len is None else -(-q_len // lists.block_q)
        wrong = (
            len(found) != 4
            or found[0] != batch
            or found[1] not in (kv_heads, heads)
            or (blocks is not None and found[2] != blocks)
        )
        if wrong:
            counted = "query blocks" if blocks is None else blocks
            either = f"{kv_heads}" if heads == kv_heads else f"{kv_heads} or {heads}"
            need = f"({batch}, {either}, {counted}, most), a list for each head and {lists.block_q} queries of a sequence"
            raise ProblemError(f"indices of keys has shape {found}; it must be {need}.")
    if found[-1] * lists.block_kv >= MOST_KEYS:
        raise ProblemError(f"{field} of keys has {found[-1]} numbers in a list; with {lists.block_kv} keys each it has too many.")
    if "keys_counts" in arrays and tuple(arrays["keys_counts"].shape) != found[:-1]:
        raise ProblemError(
            f"counts of keys has shape {tuple(arrays['keys_counts'].shape)}; it must be {found[:-1]}, one for each list."
        )


def list_operands(lists: KeyLists | None, sizes: ListSizes | None, tokens: int, batch: int) -> list[Operand]:
    """The arrays of lists of keys."""
    if lists is None or sizes is None:
        return []
    shape = (tokens,) if lists.by_token else (batch, sizes.heads, sizes.blocks)
    return [Operand("keys", "int32", (*shape, sizes.most)), *[Operand("keys_counts", "int32", shape)] * sizes.counts]


class ListedKeys:
    """The lists of an operation's arrays, by name, in NumPy: of each query and head the places of its keys."""

    def __init__(self, lists: KeyLists, arrays: Mapping[str, Any], heads: int) -> None:
        self.lists, self.numbers, self.counts, self.heads = lists, arrays["keys"], arrays.get("keys_counts"), heads

    def shared_by(self, group: int) -> bool:
        """Says whether the ``group`` heads of q that share a key head have one list."""
        return self.lists.by_token or self.numbers.shape[1] * group == self.heads

    def of(self, sequence: int, token: int, query: int, head: int, kv_len: int, strict: bool = True) -> Any:
        """The keys of a query, number ``query`` of its sequence and ``token`` of q's rows, for a head of q: as often as they are
        listed, in the list's order. Raises ProblemError for a number that is none, but where not ``strict``."""
        lists, block = self.lists, query // self.lists.block_q
        at: tuple[int, ...] = (token,)
        if not lists.by_token:
            at = sequence, head * self.numbers.shape[1] // self.heads, block
            if block >= self.numbers.shape[2]:
                _refuse(strict, f"indices of keys has {self.numbers.shape[2]} query blocks; query {query} is in block {block}")
                return np.zeros(0, np.int64)
        numbers = self.numbers[at].astype(np.int64)
        if self.counts is not None:
            count = int(self.counts[at])
            if not 0 <= count <= len(numbers):
                _refuse(strict, f"counts of keys has {count}; it must be from 0 to {len(numbers)}, the numbers of a list")
            numbers = numbers[: max(0, count)]
        end = -(-kv_len // lists.block_kv)
        wrong = (numbers != -1) & ((numbers < 0) | (numbers >= end))
        if wrong.any():
            what = f"must be from 0 to {end - 1}, or -1 for none" if end else "must be -1, since the sequence has no key"
            _refuse(strict, f"keys has {numbers[np.argmax(wrong)]} for query {query} of sequence {sequence}; it {what}")
        numbers = numbers[(numbers >= 0) & (numbers < end)]
        places = (numbers[:, None] * lists.block_kv + np.arange(lists.block_kv)).ravel()
        return places[places < kv_len]


def _refuse(strict: bool, reason: str) -> None:
    if strict:
        raise ProblemError(f"{reason}.")

"""rawattn as an attention implementation of Hugging Face transformers.

>>> import rawattn.integrations.transformers
>>> rawattn.integrations.transformers.enable()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rawattn")

transformers says by a Python function which pairs count. Causal masks, windows, padding and packed sequences are recognised and
become options of rawattn; nothing of q_len x kv_len is made. Any other function goes to ``rawattn.mask.function``. A padding mask
or packed positions are read by the host, once a forward pass. ``continuous_batching`` serves ``generate_batch``.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import mask, serving
from ..api import attention as api
from ..api.naming import naming
from ..array import reading, torch_state
from ..errors import UnsupportedError
from ..serving.attention import attention_kvcache
from . import sdpa, transformers_paged
from .transformers_paged import continuous_batching as continuous_batching

NAME = "rawattn"


def enable(name: str = NAME) -> None:
    """Registers rawattn's attention and masks, for ``attn_implementation=name``, and what ``continuous_batching`` needs."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(transformers_paged.NAME, attention_paged)


@naming(q="query", k="key", v="value", scale="scaling", bias="position_bias or attention_mask")
def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: float | None = None,
    softcap: float | None = None, s_aux: Any = None, is_causal: bool | None = None, position_bias: Any = None, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Computes a layer's attention, (batch, length, heads, head_dim), as transformers calls it. Sinks are given to the kernels in
    float32, in which lse is, whatever the model's dtype. Dropout draws from torch's generator."""
    if not _REFUSED.isdisjoint(others):
        _refuse(**{name: others.get(name) for name in (*CHOICES, "output_attentions", "cache")})
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = _options(q, scaling, softcap, s_aux)
    if dropout:
        options["dropout"] = dropout
    if position_bias is not None:
        options["bias"] = _in_rows("position_bias", position_bias)
    if isinstance(attention_mask, Kept):
        return attention_mask.attend(q, k, v, options), None
    if attention_mask is not None:
        if hasattr(module, "prepare_dynamic_mask"):
            raise UnsupportedError(
                f"{type(module).__name__} makes a mask of its own, in which a causal one counts only if it is a tensor; "
                "rawattn's is none: use another implementation for this model."
            )
        attention_mask = _in_rows("attention_mask", attention_mask)
        kept = sdpa.kept(attention_mask, False, (*query.shape[:3], key.shape[2]), "attention_mask")
        if not kept.keys().isdisjoint(options):
            raise UnsupportedError(
                "position_bias was given beside a mask that is a tensor of floats; add them, and give the sum."
            )
        return api.attention(q, k, v, **kept, **options), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return api.attention(q, k, v, causal=bool(causal), **options), None


def attention_paged(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: float | None = None,
    softcap: float | None = None, s_aux: Any = None, cache: Any = None, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Computes a layer's attention over the paged cache of continuous batching, all sequences end to end."""
    if cache is None:
        raise UnsupportedError(
            f"cache is None; {transformers_paged.NAME} serves continuous batching alone: use {NAME} for other calls of a model."
        )
    refused = {name: others.get(name) for name in (*CHOICES, "output_attentions", "position_bias")}
    _refuse(attention_mask=attention_mask, dropout=dropout, **refused)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = _options(q, scaling, softcap, s_aux)
    return transformers_paged.attend(module, q, k, v, {"cache": cache, **others}, options), None


def _in_rows(name: str, pairs: Any) -> Any:
    """A bias or a mask whose last dimension is contiguous; where T5 looks a bias up, the heads are there."""
    if not pairs.dim() or pairs.stride(-1) == 1 or pairs.shape[-1] == 1:
        return pairs
    reading.check_plain(name, pairs)
    _warn_of_copies(f"{name} is copied in each layer, as its last dimension is not contiguous in memory.")
    return pairs.contiguous()


def _options(q: Any, scaling: float | None, softcap: float | None, s_aux: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    if s_aux is not None:
        options["sinks"] = s_aux.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return options


CHOICES = ("indices", "block_indices", "sinks")  # arguments of models that change which keys count, beside the mask
_REFUSED = frozenset((*CHOICES, "output_attentions", "cache"))


def _refuse(**given: Any) -> None:
    """Raises UnsupportedError for an argument that is more than off."""
    for name, value in given.items():
        if value is not None and (hasattr(value, "shape") or value):
            raise UnsupportedError(f"{name} was given, a {type(value).__name__}; rawattn does not serve it in transformers yet.")


class Band(NamedTuple):
    """The keys that a query keeps, by their distance: ``left`` before it and ``right`` after it, None for all."""

    left: int | None = None
    right: int | None = None

    def and_(self, left: int | None, right: int | None) -> Band:
        """The pairs that are in this one and in another."""
        sides = ((self.left, left), (self.right, right))
        return Band(*(min((x for x in side if x is not None), default=None) for side in sides))

    @property
    def options(self) -> dict[str, Any]:
        """This as options of ``rawattn.attention``."""
        if self.right == 0:
            return {"causal": True} if self.left is None else {"window": (self.left, 0)}
        return {} if self == Band() else {"window": tuple(self)}


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None, **_: Any,
) -> Kept:  # fmt: skip
    """Makes what a model's layers get as attention_mask, from what transformers says of it."""

    def everything() -> Callable[..., Any]:
        """The mask as one function of indices."""
        whole = mask_function
        if attention_mask is not None:
            padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            whole = masking_utils.and_masks(whole, masking_utils.padding_mask_function(padding))
        return masking_utils.add_offsets_to_mask_function(whole, q_offset, kv_offset)

    def last(count: int) -> Kept:
        """The mask of the last queries alone."""
        first = q_offset + q_length - count
        return make_mask(batch_size, count, kv_length, first, kv_offset, mask_function, attention_mask)

    kept, found = Kept((batch_size, 1, q_length, kv_length), everything, last), _band(mask_function)
    if found is None:
        return kept
    band, packed = found
    own: Any = q_offset + q_length - kv_offset  # how many keys there are up to the last query's own position
    if attention_mask is not None or q_length > 1 or band.right != 0:
        own = int(own)  # on the device with a static cache; one query without a mask may be captured in a graph
    used = own if band.right == 0 else kv_length
    if type(own) is int and band != Band() and (own > kv_length or own != used):
        return kept
    kept.band, kept.used, kept.options = band, used, band.options
    padding = None if attention_mask is None else _padding(attention_mask, kv_offset, kv_length)[:, :used]
    if padding is not None and padding.all():
        padding = None
    if padding is not None or packed is not None:
        kept.has_parts = True
        kept.parts = _parts(padding, band, q_length) if packed is None else _runs(packed.cpu().numpy(), q_length)
    return kept


def _padding(attention_mask: Any, first: int, count: int) -> Any:
    """Returns which of the keys are no padding, (batch, count), on the host; those behind the mask are padding."""
    rows = attention_mask[:, first:][:, :count].cpu().numpy()
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1])))


def _band(function: Callable[..., Any]) -> tuple[Band, Any] | None:
    """Returns what a mask function of transformers keeps, and the numbers of the sequences that are packed in a row or None.

    Returns None where the function is of another kind."""
    band, packed = Band(), None
    for kind, held in _leaves(function):
        if kind == "causal_mask_function":
            band = band.and_(None, 0)
        elif kind == "sliding_window_overlay":
            band = band.and_(held["sliding_window"] - 1, None)
        elif kind == "sliding_window_bidirectional_overlay":
            band = band.and_(held["sliding_window"], held["sliding_window"])
        elif kind == "packed_sequence_mask_function" and packed is None:
            packed = held["packed_sequence_mask"]
        elif kind != "bidirectional_mask_function":
            return None
    return band, packed


def _leaves(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that a mask function is the intersection of, each with its name in transformers and what it holds. Inside of
    packed sequences positions grow by 1, so that distances are those of the indices."""
    if not isinstance(function, types.FunctionType) or function.__module__ != masking_utils.__name__:
        yield "", {}
        return
    kind = function.__qualname__.partition(".")[0]
    held = {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    if kind == "and_masks":
        for each in held["mask_functions"]:
            yield from _leaves(each)
    elif kind == "remap_positions_for_packed_sequence":
        yield from _leaves(held["mask_function"])
    else:
        yield kind, held


Parts = list[list[tuple[int, int]]]  # of each row, how many queries and keys each of its sequences has, in order


def _runs(ids: Any, q_length: int) -> Parts:
    """The sequences that are packed in rows, by the number of each token's. Queries are the last tokens of a row."""
    return [_of_cuts(_cuts(row).tolist(), len(row) - q_length) for row in ids]


def _of_cuts(cuts: list[int], first: int) -> list[tuple[int, int]]:
    """Returns how many queries and keys runs between cuts have, where a row's queries begin at its token ``first``."""
    return [(max(0, end - max(begin, first)), end - begin) for begin, end in itertools.pairwise(cuts)]


def _cuts(row: Any) -> Any:
    """Returns where runs of equal values begin, and the end of the last."""
    return np.r_[0, np.flatnonzero(row[1:] != row[:-1]) + 1, len(row)]


def _parts(padding: Any, band: Band, q_length: int) -> Parts | None:
    """The tokens and the padding of each row, as sequences of their own; None where tokens are not one run. The last query stands
    at the last key, and so queries that are padding see padding; where nothing depends on positions all see the tokens."""
    found = []
    for row in padding:
        cuts = _cuts(row)
        runs = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
        tokens = [run for run in runs if row[run[0]]]
        if len(tokens) > 1:
            return None
        if band == Band():
            seen = tokens or runs
            found.append([(q_length if run in seen else 0, run[1] - run[0]) for run in runs])
        else:
            found.append(_of_cuts(cuts.tolist(), len(row) - q_length))
    return found


_warned: set[str] = set()


class Kept(BlockMask):
    """Says which pairs count; layers get it for attention_mask.

    transformers lets a finished mask pass only if it is a tensor or a BlockMask, of four dimensions.

    Attributes: ``band``, None for a mask that only ``function`` knows, and the ``options`` that mean it; ``used``, how many keys
    there are to see, an int or a tensor; ``has_parts``, whether rows hold padding or several sequences, and ``parts``, which, or
    None where these are no runs.
    """

    def __init__(self, shape: tuple[int, ...], function: Callable[[], Callable[..., Any]], last: Callable[[int], Kept]) -> None:
        self._shape, self.function, self._last = shape, function, last
        self.band: Band | None = None
        self.options: dict[str, Any] = {}
        self.used: Any = None
        self.has_parts = False
        self.parts: Parts | None = None
        self._step: Any = None
        self._starts: dict[int, tuple[Any, ...]] = {}
        self._option: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    def dim(self) -> int:
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def to(self, device: Any, *_: Any, **__: Any) -> Kept:
        """Refused: it is asked for by models that make a tensor of another dtype of it."""
        raise UnsupportedError(f"attention_mask.to({device}) was asked for; {_BY_HAND}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refused: torch's own functions are asked for by models that add it to logits."""
        raise UnsupportedError(f"attention_mask was given to torch's {function.__name__}; {_BY_HAND}")

    def contiguous(self) -> Kept:
        """Itself: transformers asks for it before a static cache."""
        return self

    def __getitem__(self, index: Any) -> Kept:
        """The mask of the last queries, ``mask[:, :, -n:, :]``, which models take for layers that give nothing to a cache."""
        whole, given = slice(None), index if isinstance(index, tuple) else (index,)
        if len(given) == 4 and all(type(x) is slice for x in given) and (given[0], given[1], given[3]) == (whole, whole, whole):
            first, end, step = given[2].indices(self._shape[2])
            if first < end == self._shape[2] and step == 1:
                return self if first == 0 else self._last(end - first)
        raise UnsupportedError(
            f"attention_mask[{index!r}] was asked for; rawattn's mask in transformers is no tensor, and has its last queries "
            "alone, attention_mask[:, :, -n:, :]."
        )

    def attend(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o, (batch, q_len, heads, head_dim_v), by the first way that serves the mask."""
        if self.band is not None:
            if not self.has_parts and type(self.used) is int:
                if k.shape[1] != self.used:
                    k, v, options = k[:, : self.used], v[:, : self.used], _shortened(options, self.used)
                return api.attention(q, k, v, **self.options, **options)
            if self.parts is not None and "bias" not in options:
                return self._end_to_end(q, k[:, : self.used], v[:, : self.used], self.parts, options)
            if not self.has_parts and _NO_CACHE.isdisjoint(options) and not torch_state.requires_grad(q, k, v):
                return self._over_cache(q, k, v, options)
        if self._option is None:
            self._option = mask.function(self.function())
        return api.attention(q, k, v, mask=self._option, **options)

    def _over_cache(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o with k and v as a cache; how many keys it has is on the device."""
        window = dict(self.options)
        causal = window.pop("causal", False)
        if self._step is None:  # of all layers
            self._step = serving.Step(self.used.expand(len(q)).int().contiguous(), causal=causal)
        return attention_kvcache(q, serving.KVCache(k, v), self._step, **window, **options)

    def _end_to_end(self, q: Any, k: Any, v: Any, parts: Parts, options: dict[str, Any]) -> Any:
        """Computes o with all rows end to end, padding too. Keys stay where they are, between others' where heads are outside."""
        step = _step(k)
        if step is None or step != _step(v) or (step != k.shape[1] and torch_state.requires_grad(q, k, v)):
            k, v, step = k.contiguous(), v.contiguous(), k.shape[1]
            _warn_of_copies()
        flat = q.flatten(0, 1)
        if flat.data_ptr() != q.data_ptr():
            _warn_of_copies()
        if step not in self._starts:  # of all layers
            self._starts[step] = _starts(parts, step, q.device)
        starts_q, starts_kv, *longest = self._starts[step]
        options = {**options, **self.options, "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1]}
        o = api.attention_varlen(flat, _rows(k, step), _rows(v, step), starts_q, starts_kv, **options)
        return o.unflatten(0, q.shape[:2])


_BY_HAND = (
    "rawattn's mask in transformers is no tensor. This model computes attention by itself, not by transformers' registered "
    "functions: use attn_implementation='eager' for it."
)
_NO_CACHE = frozenset(("bias", "dropout"))  # which attention over a cache does not have


def _shortened(options: dict[str, Any], used: int) -> dict[str, Any]:
    """The options for so many of the first keys."""
    return {**options, "bias": options["bias"][..., :used]} if "bias" in options else options


def _step(x: Any) -> int | None:
    """Counts the rows between sequences of x, (batch, length, heads, head_dim), if a row is a step of its second dimension;
    None where these are no whole rows."""
    if len(x) == 1:
        return int(x.shape[1])
    step, rest = divmod(x.stride(0), max(x.stride(1), 1))
    return step if rest == 0 and step >= x.shape[1] else None


def _rows(x: Any, step: int) -> Any:
    """The rows of all sequences of x as one dimension, a view; those between sequences are none of theirs."""
    if step == x.shape[1]:
        return x.flatten(0, 1)
    return x.as_strided((step * (len(x) - 1) + x.shape[1], *x.shape[2:]), x.stride()[1:])


def _starts(parts: Parts, step: int, device: Any) -> tuple[Any, ...]:
    """Returns where sequences of queries and of keys begin, and the longest lengths.

    Rows of keys that are between rows of the batch, or behind the last key, belong to sequences without queries."""
    q, kv = [0], [0]
    for i, row in enumerate(parts):
        if kv[-1] < i * step:
            q.append(q[-1])
            kv.append(i * step)
        for queries, keys in row:
            q.append(q[-1] + queries)
            kv.append(kv[-1] + keys)
    longest = (max((part[side] for row in parts for part in row), default=0) for side in (0, 1))
    return (*(torch.tensor(x, dtype=torch.int32).to(device) for x in (q, kv)), *longest)


_ROWS_ARE_COPIED = "rows with padding or several sequences are copied, as they do not lie end to end in memory."


def _warn_of_copies(text: str = _ROWS_ARE_COPIED) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)

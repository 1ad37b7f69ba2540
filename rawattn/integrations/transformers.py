"""rawattn as an attention implementation of Hugging Face transformers.

>>> import rawattn.integrations.transformers
>>> rawattn.integrations.transformers.enable()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rawattn")

transformers gives a Python function that says which pairs count. Causal masks, windows, padding and packed sequences are
recognised and become options of rawattn; nothing of q_len x kv_len is made. Any other function goes to
``rawattn.mask.function``. A padding mask or packed positions are read by the host, once a forward pass.
``continuous_batching`` serves ``generate_batch``.
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
    options = _make_options(q, scaling, softcap, s_aux)
    if dropout:
        options["dropout"] = dropout
    if position_bias is not None:
        options["bias"] = _make_contiguous("position_bias", position_bias)
    if isinstance(attention_mask, LayerMask):
        return attention_mask.attend(q, k, v, options), None
    if attention_mask is not None:
        if hasattr(module, "prepare_dynamic_mask"):
            raise UnsupportedError(
                f"{type(module).__name__} makes a mask of its own, in which a causal one counts only if it is a tensor; "
                "rawattn's is none: use another implementation for this model."
            )
        attention_mask = _make_contiguous("attention_mask", attention_mask)
        mask_options = sdpa.read_mask(attention_mask, False, (*query.shape[:3], key.shape[2]), "attention_mask")
        if not mask_options.keys().isdisjoint(options):
            raise UnsupportedError(
                "position_bias was given beside a mask that is a tensor of floats; add them, and give the sum."
            )
        return api.attention(q, k, v, **mask_options, **options), None
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
    options = _make_options(q, scaling, softcap, s_aux)
    return transformers_paged.attend(module, q, k, v, {"cache": cache, **others}, options), None


def _make_contiguous(name: str, pairs: Any) -> Any:
    """Returns a bias or a mask whose last dimension is contiguous: a copy where it is not, as in T5, which looks a bias up."""
    if not pairs.dim() or pairs.stride(-1) == 1 or pairs.shape[-1] == 1:
        return pairs
    reading.check_plain(name, pairs)
    _warn_of_copies(f"{name} is copied in each layer, as its last dimension is not contiguous in memory.")
    return pairs.contiguous()


def _make_options(q: Any, scaling: float | None, softcap: float | None, s_aux: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    if s_aux is not None:
        options["sinks"] = s_aux.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return options


CHOICES = ("indices", "block_indices", "sinks")  # arguments of models that change which keys count, beside the mask
_REFUSED = frozenset((*CHOICES, "output_attentions", "cache"))


def _refuse(**arguments: Any) -> None:
    """Raises UnsupportedError for an argument that is given and not off."""
    for name, value in arguments.items():
        if value is not None and (hasattr(value, "shape") or value):
            raise UnsupportedError(f"{name} was given, a {type(value).__name__}; rawattn does not serve it in transformers yet.")


class Band(NamedTuple):
    """The keys that a query keeps, by their distance: ``left`` before it and ``right`` after it, None for all."""

    left: int | None = None
    right: int | None = None

    def and_(self, left: int | None, right: int | None) -> Band:
        """Returns the band of the pairs that are in this band and in one of these sides."""
        sides = ((self.left, left), (self.right, right))
        return Band(*(min((x for x in side if x is not None), default=None) for side in sides))

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``rawattn.attention`` that keep these pairs."""
        if self.right == 0:
            return {"causal": True} if self.left is None else {"window": (self.left, 0)}
        return {} if self == Band() else {"window": tuple(self)}


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None, **_: Any,
) -> LayerMask:  # fmt: skip
    """Makes the mask that a model's layers get as attention_mask, with the signature that transformers asks for."""

    def everything() -> Callable[..., Any]:
        """Returns the mask as one function of indices."""
        whole = mask_function
        if attention_mask is not None:
            padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            whole = masking_utils.and_masks(whole, masking_utils.padding_mask_function(padding))
        return masking_utils.add_offsets_to_mask_function(whole, q_offset, kv_offset)

    def last(count: int) -> LayerMask:
        """Returns the mask of the last ``count`` queries alone."""
        first = q_offset + q_length - count
        return make_mask(batch_size, count, kv_length, first, kv_offset, mask_function, attention_mask)

    kept, recognised = LayerMask((batch_size, 1, q_length, kv_length), everything, last), _recognise(mask_function)
    if recognised is None:
        return kept
    band, packed = recognised
    reach: Any = q_offset + q_length - kv_offset  # how many keys there are up to the last query's own position
    if attention_mask is not None or q_length > 1 or band.right != 0:
        reach = int(reach)  # on the device with a static cache; one query without a mask may be captured in a graph
    used = reach if band.right == 0 else kv_length
    if type(reach) is int and band != Band() and (reach > kv_length or reach != used):
        return kept
    kept.band, kept.used, kept.options = band, used, band.options
    padding = None if attention_mask is None else _read_padding(attention_mask, kv_offset, kv_length)[:, :used]
    if padding is not None and padding.all():
        padding = None
    if padding is not None or packed is not None:
        kept.has_parts = True
        kept.parts = _read_parts(padding, band, q_length) if packed is None else _read_runs(packed.cpu().numpy(), q_length)
    return kept


def _read_padding(attention_mask: Any, first: int, count: int) -> Any:
    """Reads which of ``count`` keys are no padding, (batch, count), on the host; keys behind the mask are padding."""
    rows = attention_mask[:, first:][:, :count].cpu().numpy()
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1])))


def _recognise(function: Callable[..., Any]) -> tuple[Band, Any] | None:
    """Returns the band that a mask function of transformers keeps, and the numbers of the sequences that are packed in a row, or
    None. Returns None where the function is of another kind."""
    band, packed = Band(), None
    for kind, held in _list_leaves(function):
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


def _list_leaves(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lists the functions that a mask function is the intersection of, each with its name in transformers and the variables that
    it holds. Inside of packed sequences positions grow by 1, so that distances are those of the indices."""
    if not isinstance(function, types.FunctionType) or function.__module__ != masking_utils.__name__:
        yield "", {}
        return
    kind = function.__qualname__.partition(".")[0]
    held = {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    if kind == "and_masks":
        for part in held["mask_functions"]:
            yield from _list_leaves(part)
    elif kind == "remap_positions_for_packed_sequence":
        yield from _list_leaves(held["mask_function"])
    else:
        yield kind, held


Parts = list[list[tuple[int, int]]]  # of each row, how many queries and keys each of its sequences has, in order


def _read_runs(ids: Any, q_length: int) -> Parts:
    """Reads the sequences that are packed in rows, where ``ids`` has the number of each token's sequence. Queries are the last
    tokens of a row."""
    return [_count_runs(_find_cuts(row).tolist(), len(row) - q_length) for row in ids]


def _count_runs(cuts: list[int], first: int) -> list[tuple[int, int]]:
    """Counts the queries and the keys of the runs between cuts, in a row whose queries begin at its token ``first``."""
    return [(max(0, end - max(begin, first)), end - begin) for begin, end in itertools.pairwise(cuts)]


def _find_cuts(row: Any) -> Any:
    """Finds where runs of equal values begin in a row, and the end of the last."""
    return np.r_[0, np.flatnonzero(row[1:] != row[:-1]) + 1, len(row)]


def _read_parts(padding: Any, band: Band, q_length: int) -> Parts | None:
    """Reads the tokens and the padding of each row as sequences of their own; None where tokens are not one run. The last query
    stands at the last key, and so queries that are padding see padding; where nothing depends on positions all see the tokens."""
    parts = []
    for row in padding:
        cuts = _find_cuts(row)
        runs = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
        tokens = [run for run in runs if row[run[0]]]
        if len(tokens) > 1:
            return None
        if band == Band():
            seen = tokens or runs
            parts.append([(q_length if run in seen else 0, run[1] - run[0]) for run in runs])
        else:
            parts.append(_count_runs(cuts.tolist(), len(row) - q_length))
    return parts


_warned: set[str] = set()


class LayerMask(BlockMask):
    """The pairs that count, which layers get for attention_mask.

    transformers lets a finished mask pass only if it is a tensor or a BlockMask, of four dimensions.

    Attributes: ``band``, None for a mask that only ``function`` knows, and the ``options`` that mean it; ``used``, how many keys
    there are to see, an int or a tensor; ``has_parts``, whether rows hold padding or several sequences, and ``parts``, which, or
    None where these are no runs.
    """

    def __init__(self, shape: tuple[int, ...], function: Callable[[], Any], last: Callable[[int], LayerMask]) -> None:
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

    def to(self, device: Any, *_: Any, **__: Any) -> LayerMask:
        """Raises UnsupportedError, for models that would make a tensor of another dtype of the mask."""
        raise UnsupportedError(f"attention_mask.to({device}) was asked for; {_BY_HAND}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises UnsupportedError, for models that would add the mask to logits by torch's functions."""
        raise UnsupportedError(f"attention_mask was given to torch's {function.__name__}; {_BY_HAND}")

    def contiguous(self) -> LayerMask:
        """Returns itself: transformers calls this before a static cache."""
        return self

    def __getitem__(self, index: Any) -> LayerMask:
        """Returns the mask of the last queries, ``mask[:, :, -n:, :]``, which models take for layers that write no cache."""
        whole, slices = slice(None), index if isinstance(index, tuple) else (index,)
        if len(slices) == 4 and all(type(x) is slice for x in slices) and slices[0] == slices[1] == slices[3] == whole:
            first, end, step = slices[2].indices(self._shape[2])
            if first < end == self._shape[2] and step == 1:
                return self if first == 0 else self._last(end - first)
        raise UnsupportedError(
            f"attention_mask[{index!r}] was asked for; rawattn's mask in transformers is no tensor, and has its last queries "
            "alone, attention_mask[:, :, -n:, :]."
        )

    def attend(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o, (batch, q_len, heads, head_dim_v), by the first method that serves the mask."""
        if self.band is not None:
            if not self.has_parts and type(self.used) is int:
                if k.shape[1] != self.used:
                    k, v, options = k[:, : self.used], v[:, : self.used], _shorten(options, self.used)
                return api.attention(q, k, v, **self.options, **options)
            if self.parts is not None and "bias" not in options:
                return self._attend_end_to_end(q, k[:, : self.used], v[:, : self.used], self.parts, options)
            if not self.has_parts and _NO_CACHE.isdisjoint(options) and not torch_state.requires_grad(q, k, v):
                return self._attend_over_cache(q, k, v, options)
        if self._option is None:
            self._option = mask.function(self.function())
        return api.attention(q, k, v, mask=self._option, **options)

    def _attend_over_cache(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o with k and v as a cache, whose number of keys is on the device."""
        window = dict(self.options)
        causal = window.pop("causal", False)
        if self._step is None:  # of all layers
            self._step = serving.Step(self.used.expand(len(q)).int().contiguous(), causal=causal)
        return attention_kvcache(q, serving.KVCache(k, v), self._step, **window, **options)

    def _attend_end_to_end(self, q: Any, k: Any, v: Any, parts: Parts, options: dict[str, Any]) -> Any:
        """Computes o with all rows end to end, padding too. Keys are not copied where rows of all sequences have one stride."""
        step = _find_step(k)
        if step is None or step != _find_step(v) or (step != k.shape[1] and torch_state.requires_grad(q, k, v)):
            k, v, step = k.contiguous(), v.contiguous(), k.shape[1]
            _warn_of_copies()
        flat = q.flatten(0, 1)
        if flat.data_ptr() != q.data_ptr():
            _warn_of_copies()
        if step not in self._starts:  # of all layers
            self._starts[step] = _find_starts(parts, step, q.device)
        starts_q, starts_kv, *longest = self._starts[step]
        options = {**options, **self.options, "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1]}
        o = api.attention_varlen(flat, _join_rows(k, step), _join_rows(v, step), starts_q, starts_kv, **options)
        return o.unflatten(0, q.shape[:2])


_BY_HAND = (
    "rawattn's mask in transformers is no tensor. This model computes attention by itself, not by transformers' registered "
    "functions: use attn_implementation='eager' for it."
)
_NO_CACHE = frozenset(("bias", "dropout"))  # which attention over a cache does not have


def _shorten(options: dict[str, Any], used: int) -> dict[str, Any]:
    """Returns the options for the first ``used`` keys alone."""
    return {**options, "bias": options["bias"][..., :used]} if "bias" in options else options


def _find_step(x: Any) -> int | None:
    """Finds the number of rows from one sequence of x, (batch, length, heads, head_dim), to the next, as the length counts them;
    None where that is no whole number."""
    if len(x) == 1:
        return int(x.shape[1])
    step, rest = divmod(x.stride(0), max(x.stride(1), 1))
    return step if rest == 0 and step >= x.shape[1] else None


def _join_rows(x: Any, step: int) -> Any:
    """Returns a view in which the rows of all sequences of x are one dimension, with the rows between sequences."""
    if step == x.shape[1]:
        return x.flatten(0, 1)
    return x.as_strided((step * (len(x) - 1) + x.shape[1], *x.shape[2:]), x.stride()[1:])


def _find_starts(parts: Parts, step: int, device: Any) -> tuple[Any, ...]:
    """Finds where sequences of queries and of keys begin, and their longest lengths.

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

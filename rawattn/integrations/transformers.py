"""rawattn as an attention implementation of Hugging Face transformers.

>>> import rawattn.integrations.transformers
>>> rawattn.integrations.transformers.enable()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rawattn")

transformers says by a Python function which pairs count. Causal masks, windows, padding and packed sequences are recognised and
become options of rawattn; nothing of q_len x kv_len is made. Any other function goes to ``rawattn.mask.function`` where that is
there, and is refused else. A padding mask or packed positions are read by the host, once a forward pass.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import api, arrays, mask, serving
from ..errors import UnsupportedError
from ..serving import api as caches
from . import sdpa

NAME = "rawattn"


def enable(name: str = NAME) -> None:
    """Registers rawattn's attention and masks, for ``attn_implementation=name``."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)


def attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, scaling: float | None = None,
    softcap: float | None = None, s_aux: Any = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Computes a layer's attention, (batch, length, heads, head_dim), as transformers calls it. Sinks are given to the kernels in
    float32, in which lse is, whatever the model's dtype."""
    if dropout or not _REFUSED.isdisjoint(others):
        _refuse(dropout=dropout, **{name: others.get(name) for name in _REFUSED})
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    if s_aux is not None:
        options["sinks"] = s_aux.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if isinstance(attention_mask, Kept):
        return attention_mask.attend(q, k, v, options), None
    if attention_mask is not None:
        return api.attention(q, k, v, **sdpa.kept(attention_mask, False), **options), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return api.attention(q, k, v, causal=bool(causal), **options), None


_REFUSED = frozenset(("output_attentions", "position_bias", "cache"))


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

    kept, found = Kept((batch_size, 1, q_length, kv_length), everything), _band(mask_function)
    if found is None:
        return kept
    band, packed = found
    own: Any = q_offset + q_length - kv_offset  # how many keys there are up to the last query's own position
    if attention_mask is not None or q_length > 1:
        own = int(own)  # on the device with a static cache; one query without a mask may be captured in a graph
    used = own if band.right == 0 else kv_length
    if band != Band() and isinstance(own, int) and (own > kv_length or own != used):
        return kept
    kept.band, kept.used, kept.options = band, used, band.options
    padding = None if attention_mask is None else _padding(attention_mask, kv_offset, kv_length)[:, :used]
    if padding is not None and padding.all():
        padding = None
    if padding is None and packed is None:
        return kept
    kept.parts, device = True, (attention_mask if packed is None else packed).device
    if q_length == used:
        kept.starts = _starts(padding, None if packed is None else packed.cpu().numpy(), device)
    if packed is None:
        kept.ends = _ends(padding, band, device)
    return kept


def _padding(attention_mask: Any, first: int, count: int) -> Any:
    """Which of the keys are no padding, (batch, count), on the host; those behind the mask are padding."""
    rows = attention_mask[:, first:][:, :count].cpu().numpy()
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1])))


def _band(function: Callable[..., Any]) -> tuple[Band, Any] | None:
    """What a mask function of transformers keeps, and the numbers of the sequences that are packed in a row or None; None where
    it is of another kind."""
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


def _ends(padding: Any, band: Band, device: Any) -> tuple[Any, Any] | None:
    """The first key of each sequence, and one past its last; None where its keys are not one run, or where queries do not stand
    where a cache would have them."""
    count, length = padding.shape
    filled = padding.any(1)
    first = np.where(filled, padding.argmax(1), 0)
    last = np.where(filled, length - padding[:, ::-1].argmax(1), 0)
    if (padding.sum(1) != last - first).any():
        return None
    if band.right == 0:  # no query that counts sees what comes after it
        last = np.full(count, length)
    elif band != Band() and (last != length).any():
        return None
    first, last = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (first, last))
    return first, last


def _starts(padding: Any, packed: Any, device: Any) -> tuple[Any, int] | None:
    """Where the sequences begin if all rows lie end to end, padding being sequences of its own, and the longest length; None
    where a sequence is in two parts."""
    given = [x.astype(np.int64) for x in (padding, packed) if x is not None]
    count, length = given[0].shape
    changes = np.zeros((count, length), bool)
    changes[:, 0] = True
    for x in given:
        changes[:, 1:] |= x[:, 1:] != x[:, :-1]
    if padding is not None:
        begins = changes & padding
        whole = begins.sum(1) <= 1
        if not np.all(whole):
            return None
    starts = np.append(np.flatnonzero(changes), count * length).astype(np.int32)
    return torch.from_numpy(starts).to(device), int(np.diff(starts).max(initial=0))


_warned: set[str] = set()


class Kept(BlockMask):
    """Which pairs count: what layers get for attention_mask. transformers lets a finished mask pass only if it is a tensor or a
    BlockMask, of four dimensions.

    Attributes: ``band``, None for a mask that only ``function`` knows, and the ``options`` that mean it; ``used``, how many keys
    there are to see, an int or a tensor; ``parts``, whether rows hold padding or several sequences. Then ``ends``, the first key
    of each row and one past the last, and ``starts``, where sequences begin if all rows lie end to end, say how to compute it;
    each is None where it is no way.
    """

    def __init__(self, shape: tuple[int, ...], function: Callable[[], Callable[..., Any]]) -> None:
        self._shape, self.function = shape, function
        self.band: Band | None = None
        self.options: dict[str, Any] = {}
        self.used: Any = None
        self.parts = False
        self.ends: tuple[Any, Any] | None = None
        self.starts: tuple[Any, int] | None = None
        self._step: Any = None
        self._option: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def contiguous(self) -> Kept:
        """Itself: transformers asks for it before a static cache."""
        return self

    def attend(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o, (batch, q_len, heads, head_dim_v), by the first way that serves the mask."""
        if self.band is not None:
            if not self.parts and type(self.used) is int:
                if k.shape[1] != self.used:
                    k, v = k[:, : self.used], v[:, : self.used]
                return api.attention(q, k, v, **self.options, **options)
            if self.starts is not None:
                return self._end_to_end(q, k, v, options)
            if (self.ends is not None or not self.parts) and not arrays.requires_grad(q, k, v):
                return self._over_cache(q, k, v, options)
        if not hasattr(mask, "function"):
            raise UnsupportedError(
                "the model's mask is none of causal, window, padding on one side and packed sequences, or a gradient through a "
                "cache was asked for; rawattn takes no mask function yet: choose another attn_implementation."
            )
        if self._option is None:
            self._option = mask.function(self.function())
        return api.attention(q, k, v, mask=self._option, **options)

    def _over_cache(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o with k and v as a cache, of which sequences use parts; what they use is on the device."""
        window = dict(self.options)
        if self._step is None:  # of all layers
            first, last = self.ends or (None, torch.as_tensor(self.used, device=q.device).expand(len(q)).int().contiguous())
            self._step = serving.Step(last, kv_begin=first, causal=window.get("causal", False))
        window.pop("causal", None)
        return caches.attention_kvcache(q, serving.KVCache(k, v), self._step, **window, **options)

    def _end_to_end(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        """Computes o with all rows end to end, padding too, as sequences of their own."""
        assert self.starts is not None
        (starts, longest), rows = self.starts, []
        for x in (q, k[:, : self.used], v[:, : self.used]):
            flat = x.flatten(0, 1)
            if flat.data_ptr() != x.data_ptr() and "copied" not in _warned:
                _warned.add("copied")
                warnings.warn(
                    "padded or packed rows are copied before rawattn.attention_varlen, as they do not lie as (batch, length, "
                    "heads, head_dim) in memory.",
                    stacklevel=2,
                )
            rows.append(flat)
        options = {**self.options, **options}
        o = api.attention_varlen(rows[0], rows[1], rows[2], starts, starts, longest, longest, **options)
        return o.unflatten(0, q.shape[:2])

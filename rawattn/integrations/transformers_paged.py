"""transformers' continuous batching over its paged cache, computed by rawattn.

>>> from rawattn.integrations import transformers as adapter
>>> adapter.enable()
>>> with adapter.continuous_batching(model):
...     outputs = model.generate_batch(prompts, generation_config)

Pages are read and written where they lie, by ``rawattn.append`` and ``rawattn.attention_kvcache``; nothing is read by the host,
and transformers may capture its steps in CUDA graphs. Layers with a sliding window keep a ring of keys, which transformers
gathers for every step: a copy, of which a warning tells once.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import PagedAttentionCache

from .. import serving
from ..api import attention
from ..errors import UnsupportedError
from ..serving.append import append
from ..serving.attention import attention_kvcache

NAME = "rawattn_flash"  # transformers makes dense masks, or refuses, where an implementation's name has no "flash" in it


@contextlib.contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Makes a model's ``generate_batch``, and managers of continuous batching that are made meanwhile, compute by rawattn.

    >>> with continuous_batching(model):
    ...     outputs = model.generate_batch(prompts, generation_config)

    Other calls of the model are refused meanwhile; afterwards its implementations are what they were. Raises UnsupportedError
    where transformers is older than 5.19, whose batching takes the implementations that it knows alone.
    """
    if "page_size" not in inspect.signature(transformers.ContinuousBatchingConfig).parameters:  # as it is called since
        raise UnsupportedError(f"transformers is {transformers.__version__}; continuous batching by rawattn needs 5.19 or newer.")
    before = [(config, config._attn_implementation) for config in _list_configs(model.config)]
    model.config._attn_implementation = NAME  # of all parts
    hook = model.register_forward_pre_hook(_hand_on, with_kwargs=True)
    try:
        yield model
    finally:
        hook.remove()
        for config, implementation in before:  # the whole before its parts, which it sets, too
            config._attn_implementation = implementation


def _list_configs(config: Any) -> Iterator[Any]:
    """Lists a model's configuration, and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield from _list_configs(part)


class PassedCache(PagedAttentionCache):
    """A paged cache that shares all of ``cache``, and that a layer hands on to its attention.

    Since transformers 5.24 a layer updates the cache before attention: keys and values would be copied out of their pages.
    """

    def __init__(self, cache: PagedAttentionCache) -> None:
        self.__dict__ = cache.__dict__

    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        kwargs["cache"] = self
        return key_states, value_states


def _hand_on(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts a ``PassedCache`` in the place of a paged cache, before a pass of the model."""
    cache = named.get("cache")
    return args, {**named, "cache": PassedCache(cache)} if isinstance(cache, PagedAttentionCache) else named


class Pages:
    """The pages of one kind of layers: a cache for each layer, and the step that is computed."""

    def __init__(self) -> None:
        self.layers: dict[int, serving.KVCache] = {}
        self.step: serving.Step | None = None

    def of_layer(self, allocator: Any, layer: int) -> serving.KVCache:
        """Returns the layer's keys and values. A block of transformers holds pages of all layers, keys and values in turn."""
        if layer not in self.layers:
            apart = allocator.block_physical_stride // allocator.tokens_per_page
            self.layers[layer] = serving.KVCache(*(x[::apart] for x in allocator.get_cache_for_block_table(layer)))
        return self.layers[layer]


_pages: weakref.WeakKeyDictionary[Any, Pages] = weakref.WeakKeyDictionary()  # by transformers' allocator


@torch.compiler.disable  # as transformers does, whose cache is aliased views of one tensor
def attend(module: Any, q: Any, k: Any, v: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Writes k and v, (1, total_q, kv_heads, head_dim), into the cache, and computes o over all keys that it then has."""
    cache, layer = kwargs["cache"], module.layer_idx
    if getattr(cache, "layer_to_allocator", None) is None:
        raise UnsupportedError(f"cache is a {type(cache).__name__}; it must be the paged cache of continuous batching.")
    if kwargs.get("block_table") is not None:
        raise UnsupportedError("block_table was given; rawattn reads read_index and write_index: use the name rawattn_flash.")
    allocator, (q, k, v) = cache.layer_to_allocator[layer], (x[0] for x in (q, k, v))
    used = kwargs["read_index"][allocator.index]  # empty where all keys are those of this step
    starts, longest = (kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type]), _read_longest(kwargs, allocator)
    if kwargs.get("sliding_window") is not None:
        options = {**options, "window": (kwargs["sliding_window"] - 1, 0)}
    varlen = {"causal": True, "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1], **options}
    if not allocator.supports_block_table:
        k, v = _gather(cache, k, v, layer, kwargs)
        return attention.attention_varlen(q, k, v, *starts, **varlen)[None]
    pages = _pages.setdefault(allocator, Pages())
    if layer == allocator.layer_indices[0]:  # anew in each pass, since a graph may capture this one
        index = used if used.numel() else kwargs["write_index"][allocator.index]
        pages.step = _make_step(index, starts, longest, allocator)
    assert pages.step is not None
    append(pages.of_layer(allocator, layer), pages.step, k, v)
    if not used.numel():
        return attention.attention_varlen(q, k, v, *starts, **varlen)[None]
    return attention_kvcache(q, pages.of_layer(allocator, layer), pages.step, **options)[None]


def _read_longest(kwargs: dict[str, Any], allocator: Any) -> tuple[int, int]:
    return kwargs["max_length_q"], kwargs["max_length_k"][allocator.layer_type]


def _make_step(index: Any, starts: tuple[Any, Any], longest: tuple[int, int], allocator: Any) -> serving.Step:
    """Makes the step of which ``index`` has the place of each key, sequences end to end; a page's first key says which it is."""
    size = allocator.tokens_per_page
    first = starts[1][:-1, None] + size * torch.arange(-(-longest[1] // size), device=index.device)
    blocks = index[first.clamp(max=index.numel() - 1)] // allocator.block_physical_stride
    return serving.Step(torch.diff(starts[1]), blocks.int(), starts[0], max_q_len=longest[0], max_kv_len=longest[1])


_warned: set[str] = set()


def _gather(cache: Any, k: Any, v: Any, layer: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Gathers all keys and values of a step, by transformers' own update of its cache."""
    if "gathered" not in _warned:
        _warned.add("gathered")
        text = "keys and values of layers with a sliding window are copied out of transformers' cache, which is a ring."
        warnings.warn(text, stacklevel=2)
    heads_first = (x.transpose(0, 1)[None] for x in (k, v))
    pair = PagedAttentionCache.update(cache, *heads_first, layer_idx=layer, kwargs=dict(kwargs))
    return tuple(x[0].transpose(0, 1) for x in pair)

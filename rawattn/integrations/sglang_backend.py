"""The class that SGLang asks for attention, over the pool of tokens that its requests have, by ``attention_kvcache``.

New keys and values are written by SGLang's pool. Served are decoders with one pool; what else a model asks for is refused by
name: MLA, pools for sliding windows, speculative decoding, attention over encoders, and options that rawattn has not.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from .. import serving
from ..errors import UnsupportedError
from ..serving import api as caches


class RawattnBackend(AttentionBackend):
    """Steps, and attention of each layer. ``forward_metadata`` is the step of the batch."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.pool, self.requests = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        if getattr(model_runner, "use_mla_backend", False):
            raise UnsupportedError("use_mla_backend is True; rawattn does not serve it in SGLang.")
        if hasattr(self.pool, "swa_kv_pool"):
            raise UnsupportedError("the model has a pool for sliding windows; rawattn does not serve it in SGLang.")
        self.page_size, self.device = model_runner.page_size, model_runner.device
        self.longest = model_runner.model_config.context_len
        self.forward_metadata: Any = None
        self._caches: dict[int, tuple[int, serving.KVCache]] = {}  # of each layer, by its memory
        self._steps: dict[int, serving.Step] = {}  # of captured graphs, by the number of sequences

    # ---- steps

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the step of a batch that no graph replays."""
        count, mode = forward_batch.batch_size, forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        lens = forward_batch.seq_lens[:count].int()
        if mode.is_decode():
            starts, longest = torch.arange(count + 1, dtype=torch.int32, device=lens.device), 1
        else:
            _check_extend(forward_batch)
            new = forward_batch.extend_seq_lens[:count]
            starts, longest = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int(), max(forward_batch.extend_seq_lens_cpu)
        table = self._pages(forward_batch, count)
        self.forward_metadata = serving.Step(lens, table.int().contiguous(), starts, max_q_len=longest)

    def _pages(self, forward_batch: Any, count: int) -> Any:
        """The pages of each sequence: SGLang has the place of each token, of which a page's first says which it is."""
        longest = int(forward_batch.seq_lens_cpu[:count].max())
        rows = self.requests.req_to_token[forward_batch.req_pool_indices[:count]]
        return rows[:, : longest : self.page_size] // self.page_size

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the arrays that graphs read."""
        self._lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        pages = -(-self.longest // self.page_size)
        self._table = torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the arrays of a graph before it is captured or replayed."""
        if not forward_batch.forward_mode.is_decode_or_idle() or getattr(forward_batch, "spec_info", None) is not None:
            raise UnsupportedError(
                f"a graph of {forward_batch.forward_mode!r} was asked for; rawattn has those of decoding in SGLang."
            )
        count = forward_batch.batch_size
        self._lens[:count].copy_(forward_batch.seq_lens[:count])
        pages = self._pages(forward_batch, count)
        self._table[:count, : pages.shape[1]].copy_(pages)
        if in_capture or count not in self._steps:
            self._steps[count] = serving.Step(self._lens[:count], self._table[:count], self._starts[: count + 1], max_q_len=1)
        self.forward_metadata = self._steps[count]

    # ---- attention

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """Computes o, (tokens, heads * head_dim_v), of one query of each sequence."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """Computes o of prompts, of parts of them, and of single queries beside."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def _attend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, more: dict[str, Any]) -> Any:
        sinks = more.pop("sinks", None)
        _check_layer(layer, more)
        if save and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, layer.k_scale, layer.v_scale)
        options: dict[str, Any] = {"scale": layer.scaling, "softcap": layer.logit_cap or None}
        if layer.sliding_window_size is not None and layer.sliding_window_size >= 0:
            options["window"] = (layer.sliding_window_size, 0)
        if sinks is not None:
            options["sinks"] = sinks.float()
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        o = caches.attention_kvcache(rows, self._cache_of(layer), self.forward_metadata, **options)
        return o.flatten(1)

    def _cache_of(self, layer: Any) -> serving.KVCache:
        k, v = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        found = self._caches.get(layer.layer_id)
        if found is None or found[0] != k.data_ptr():
            k, v = (x.unflatten(0, (-1, self.page_size)) for x in (k, v))
            scales = (layer.k_scale_float, layer.v_scale_float) if k.element_size() == 1 else (None, None)
            cache = serving.KVCache(k, v, "NHD", *(1.0 if x is None else x for x in scales))
            found = self._caches[layer.layer_id] = (k.data_ptr(), cache)
        return found[1]


def _check_extend(forward_batch: Any) -> None:
    mode = forward_batch.forward_mode
    if getattr(forward_batch, "spec_info", None) is not None or mode.is_target_verify():
        raise UnsupportedError(f"a step of {mode!r} was asked for; rawattn does not serve speculative decoding in SGLang.")


def _check_layer(layer: Any, more: dict[str, Any]) -> None:
    """Raises UnsupportedError for what a layer asks for beyond a decoder's attention."""
    refused = {name: value for name, value in more.items() if value is not None and value is not False}
    if layer.is_cross_attention:
        refused["is_cross_attention"] = True
    if getattr(layer.attn_type, "value", layer.attn_type) != "decoder":
        refused["attn_type"] = layer.attn_type
    if getattr(layer, "xai_temperature_len", -1) > 0:
        refused["xai_temperature_len"] = layer.xai_temperature_len
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        refused["logit_capping_method"] = layer.logit_capping_method
    for name, value in refused.items():
        found = f"a {type(value).__name__}" if hasattr(value, "shape") else repr(value)
        raise UnsupportedError(f"{name} is {found}; rawattn does not serve it in SGLang.")

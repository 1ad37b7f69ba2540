"""The class that SGLang asks for attention, written to the contract of version 0.5.23: over the pool of tokens that its requests
have, by ``attention_kvcache``.

New keys and values are written by SGLang's pool. Served are decoders with one pool, or with a second one for layers with a
window, and MLA over a pool of latent rows; what else a model asks for is refused by name: speculative decoding, attention over
encoders, and options that rawattn has not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from .. import serving
from ..api import attention
from ..errors import UnsupportedError
from ..serving.attention import attention_kvcache


@dataclasses.dataclass
class RawattnMetadata:
    """The step of a batch, and where layers with a window have a pool of their own, their step and their slots of new keys."""

    step: serving.Step
    window_step: serving.Step | None = None
    window_slots: Any = None


class RawattnBackend(AttentionBackend):
    """A backend of SGLang: it makes the steps of batches and computes layers' attention. ``forward_metadata`` is the batch's."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.pool, self.requests = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self.page_size, self.device = model_runner.page_size, model_runner.device
        self.longest = model_runner.model_config.context_len
        self.has_window_pool = hasattr(self.pool, "swa_kv_pool")
        self.window = model_runner.sliding_window_size if self.has_window_pool else None
        self.is_latent = bool(getattr(model_runner, "use_mla_backend", False))
        self.invariant = bool(model_runner.server_args.enable_deterministic_inference)
        _check_runner(model_runner, self.pool)
        self.forward_metadata: Any = None
        self._caches: dict[int, tuple[int, serving.KVCache]] = {}  # of each layer, by its memory
        self._metadata: dict[int, RawattnMetadata] = {}  # of captured graphs, by the number of sequences

    # ---- steps

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of a batch that no graph replays."""
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
        tokens = self._find_tokens(forward_batch, count)
        metadata = self.forward_metadata = RawattnMetadata(self._make_step(lens, tokens // self.page_size, starts, longest))
        if self.has_window_pool:
            begin = self._find_begin(lens, starts)
            metadata.window_step = self._make_step(lens, self._translate(tokens) // self.page_size, starts, longest, begin)
            metadata.window_slots = self._translate(forward_batch.out_cache_loc)

    def _make_step(self, lens: Any, table: Any, starts: Any, longest: int, begin: Any = None) -> serving.Step:
        return serving.Step(lens, table.int().contiguous(), starts, begin, max_q_len=longest)

    def _find_tokens(self, forward_batch: Any, count: int) -> Any:
        """Finds the place of each page's first token in each sequence, (count, pages)."""
        longest = int(forward_batch.seq_lens_cpu[:count].max())
        return self.requests.req_to_token[:, : longest : self.page_size][forward_batch.req_pool_indices[:count]]

    def _translate(self, places: Any) -> Any:
        """Translates places in the pool of all tokens to places in the pool of windows."""
        return self.pool.translate_loc_from_full_to_swa(places)

    def _find_begin(self, lens: Any, starts: Any) -> Any:
        """Finds the first key that a window keeps of each sequence: the pages before it may be another's by now."""
        return (lens - starts.diff() - self.window).clamp(min=0).int()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes the arrays that graphs read."""
        zeros = {"dtype": torch.int32, "device": self.device}
        self._lens, self._begins = torch.zeros(2, max_bs, **zeros)
        pages = -(-self.longest // self.page_size)
        self._tables = torch.zeros(2 if self.has_window_pool else 1, max_bs, pages, **zeros)
        self._starts = torch.arange(max_bs + 1, **zeros)
        self._slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the arrays of a graph before it is captured or replayed."""
        if not forward_batch.forward_mode.is_decode_or_idle() or getattr(forward_batch, "spec_info", None) is not None:
            raise UnsupportedError(
                f"a graph of {forward_batch.forward_mode!r} was asked for; rawattn has those of decoding in SGLang."
            )
        count = forward_batch.batch_size
        lens, starts, begins = self._lens[:count], self._starts[: count + 1], self._begins[:count]
        lens.copy_(forward_batch.seq_lens[:count])
        tokens = self._find_tokens(forward_batch, count)
        self._tables[0, :count, : tokens.shape[1]].copy_(tokens // self.page_size)
        if self.has_window_pool:
            self._tables[1, :count, : tokens.shape[1]].copy_(self._translate(tokens) // self.page_size)
            begins.copy_(self._find_begin(lens, starts))
            slots = self._translate(forward_batch.out_cache_loc)
            self._slots[: len(slots)].copy_(slots)
            self._slots[len(slots) :].zero_()
        if in_capture or count not in self._metadata:
            metadata = self._metadata[count] = RawattnMetadata(self._make_step(lens, self._tables[0, :count], starts, 1))
            if self.has_window_pool:
                metadata.window_step = self._make_step(lens, self._tables[1, :count], starts, 1, begins)
                metadata.window_slots = self._slots
        self.forward_metadata = self._metadata[count]

    # ---- attention

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """Computes o, (tokens, heads * head_dim_v), of one query of each sequence."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """Computes o of prompts, of parts of them, and of single queries among them."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, more)

    def _attend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, more: dict[str, Any]) -> Any:
        sinks, metadata = more.pop("sinks", None), self.forward_metadata
        ropes = [more.pop(name, None) for name in ("q_rope", "k_rope")] if self.is_latent else [None, None]
        _check_layer(layer, more)
        if self.is_latent and layer.v_head_dim != self.pool.kv_lora_rank:
            return self._attend_prompts(q, k, v, layer, forward_batch, metadata.step)
        if save and k is not None:
            self._write(layer, KVWriteLoc.for_batch(forward_batch, swa_loc=metadata.window_slots), k, v, ropes[1])
        options: dict[str, Any] = {"scale": layer.scaling, "softcap": layer.logit_cap or None, "invariant": self.invariant}
        if layer.sliding_window_size is not None and layer.sliding_window_size >= 0:
            options["window"] = (layer.sliding_window_size, 0)
        if sinks is not None:
            options["sinks"] = sinks.float()  # each time: SGLang does not say when weights are loaded anew
        heads, columns = layer.tp_q_head_num, layer.qk_head_dim
        if ropes[0] is not None:  # q is the columns before these
            columns = layer.v_head_dim
            ropes[0] = ropes[0].reshape(-1, heads, layer.qk_head_dim - columns)
        rows = q.reshape(-1, heads, columns)
        rows = rows if ropes[0] is None else (rows, ropes[0])
        in_window_pool = self.has_window_pool and self.pool.layers_mapping[layer.layer_id][1]
        step = metadata.window_step if in_window_pool else metadata.step
        return attention_kvcache(rows, self._find_cache(layer), step, **options).flatten(1)

    def _write(self, layer: Any, loc: Any, k: Any, v: Any, k_rope: Any) -> None:
        if not self.is_latent:
            self.pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        elif k_rope is None:
            self.pool.set_kv_buffer(layer, loc, k, v)
        else:
            self.pool.set_mla_kv_buffer(layer, loc, k, k_rope)

    def _attend_prompts(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, step: serving.Step) -> Any:
        """Computes o of whole prompts, whose keys and values were projected from latent rows, without the pool."""
        if k is None or any(forward_batch.extend_prefix_lens_cpu or ()):
            raise UnsupportedError(
                "extend_prefix_lens are not 0 beside projected keys; rawattn reads earlier ones as latent rows alone."
            )
        sizes = (
            (layer.tp_q_head_num, layer.qk_head_dim),
            (layer.tp_k_head_num, layer.qk_head_dim),
            (layer.tp_k_head_num, layer.v_head_dim),
        )
        q, k, v = (x.reshape(-1, *size) for x, size in zip((q, k, v), sizes, strict=True))
        starts, longest = step.cu_seqlens_q, step.max_q_len
        options = {"scale": layer.scaling, "softcap": layer.logit_cap or None, "invariant": self.invariant, "causal": True}
        return attention.attention_varlen(q, k, v, starts, starts, longest, longest, **options).flatten(1)

    def _find_cache(self, layer: Any) -> serving.KVCache:
        k, v = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        kept = self._caches.get(layer.layer_id)
        if kept is None or kept[0] != k.data_ptr():
            k, v = (x.unflatten(0, (-1, self.page_size)) for x in (k, v))
            v = k[..., : layer.v_head_dim] if self.is_latent else v
            scales = (layer.k_scale_float, layer.v_scale_float) if k.element_size() == 1 else (None, None)
            cache = serving.KVCache(k, v, "NHD", *(1.0 if x is None else x for x in scales))
            kept = self._caches[layer.layer_id] = (k.data_ptr(), cache)
        return kept[1]


def _check_runner(model_runner: Any, pool: Any) -> None:
    """Raises UnsupportedError for what a model's runner asks for beyond what is served."""
    if getattr(model_runner, "use_mla_backend", False):
        if getattr(pool, "use_dsa", False):
            raise UnsupportedError("use_dsa is True; rawattn does not serve an indexer's keys in SGLang, whose own backends do.")
        if pool.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise UnsupportedError(f"kv_cache_dtype is {pool.dtype}; beside MLA rawattn serves pools of 16 bits in SGLang.")
    if type(pool).__name__.startswith("Unified"):  # its tables hold virtual numbers
        raise UnsupportedError(f"the pool is a {type(pool).__name__}, whose memory is unified; rawattn does not serve it.")
    if hasattr(pool, "swa_kv_pool") and getattr(pool, "swa_req_ring_size", None) is not None:
        raise UnsupportedError(
            "the pool for sliding windows has a ring for each request; rawattn does not serve it in SGLang. "
            "Start with --disable-hybrid-swa-memory."
        )
    graphs = getattr(model_runner.server_args, "cuda_graph_config", None)
    if graphs is not None and graphs.prefill.backend == "full":
        raise UnsupportedError(
            "cuda_graph_backend_prefill is 'full'; rawattn has full graphs of decoding in SGLang. "
            "Start with --cuda-graph-backend-prefill=breakable."
        )
    dtype, device = getattr(model_runner, "kv_cache_dtype", None), torch.device(model_runner.device)
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise UnsupportedError(
            "kv_cache_dtype is torch.float8_e4m3fn, which needs compute capability 8.9 or newer. "
            "Start with --kv-cache-dtype fp8_e5m2."
        )


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
        words = f"a {type(value).__name__}" if hasattr(value, "shape") else repr(value)
        raise UnsupportedError(f"{name} is {words}; rawattn does not serve it in SGLang.")

"""The backend for vLLM, driven as vLLM does: with its own classes where it can be imported, else with ones of their form."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import rawattn  # noqa: E402
import rawattn_plugins  # noqa: E402
from rawattn.errors import UnsupportedError  # noqa: E402
from tests.integrations import vllm_like  # noqa: E402
from tests.versions import since  # noqa: E402

ADAPTER = "rawattn.integrations.vllm_backend"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's module of base classes, and the class that its registry finds."""
    try:
        importlib.import_module("vllm.v1.attention.backend")
    except ImportError:
        for name, module in vllm_like.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    rawattn_plugins.vllm()
    rawattn_plugins.vllm()
    yield importlib.import_module("vllm.v1.attention.backend"), importlib.import_module(ADAPTER).RawattnBackend
    sys.modules.pop(ADAPTER, None)


LENGTHS = [(1, 30), (7, 7), (5, 21), (1, 1)]  # queries and keys of each sequence: decoding, a prompt, its next part
SIZE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32


def common(base: Any, device: str, table: Any, padding: int = 0) -> Any:
    """Returns what vLLM's runner says of a batch; with padding rows behind it that belong to no sequence."""
    starts = torch.tensor([0, *torch.tensor([q for q, _ in LENGTHS]).cumsum(0)], dtype=torch.int32)
    slots = [int(table[i, at // SIZE]) * SIZE + at % SIZE for i, (q, kv) in enumerate(LENGTHS) for at in range(kv - q, kv)]
    rows = len(slots) + padding
    return base.CommonAttentionMetadata(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts, num_reqs=len(LENGTHS), num_actual_tokens=rows,
        seq_lens=torch.tensor([kv for _, kv in LENGTHS], dtype=torch.int32, device=device), max_query_len=7, max_seq_len=30,
        block_table_tensor=table, slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
    )  # fmt: skip


def expected(q: Any, keys: list[Any], values: list[Any], options: dict[str, Any]) -> Any:
    """Returns what torch computes of each sequence's rows, the last at the last key."""
    found, first = [], 0
    for (rows, n), k, v in zip(LENGTHS, keys, values, strict=True):
        distance = torch.arange(n - rows, n)[:, None] - torch.arange(n)
        window = options.get("sliding_window") or n + 1
        kept = (distance >= 0) & (distance < window)
        given = [x.float().transpose(0, 1) for x in (q[first : first + rows], k, v)]
        found.append(F.scaled_dot_product_attention(*given, attn_mask=kept, scale=0.25, enable_gqa=True).transpose(0, 1))
        first += rows
    return torch.cat(found)


@since(2, 5)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_a_step(options: dict[str, Any], backend: Any, device: str) -> None:
    """Old keys lie in the cache, new ones are written, and rows of padding are left alone."""
    (base, adapter), random = backend, torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" or "kv_cache_dtype" in options else torch.float32
    table = torch.tensor([[3, 1], [0, 9], [5, 2], [4, 9]], dtype=torch.int32)
    q = torch.randn(14 + 2, HEADS, DIM, generator=random).to(dtype)
    keys, values = ([torch.randn(n, KV_HEADS, DIM, generator=random).to(dtype) for _, n in LENGTHS] for _ in range(2))
    pool = torch.full((6, KV_HEADS, SIZE, 2 * DIM), 77.0, dtype=dtype)
    layer = types.SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    for i, (rows, n) in enumerate(LENGTHS):
        for at in range(n - rows):
            pool[table[i, at // SIZE], :, at % SIZE] = torch.cat([keys[i][at], values[i][at]], -1)
    new = [
        torch.cat([x[n - rows :] for x, (rows, n) in zip(each, LENGTHS, strict=True)] + [each[0][:2]]) for each in (keys, values)
    ]
    wanted = expected(q, keys, values, options)
    if "kv_cache_dtype" in options:
        pool = pool.to(torch.float8_e4m3fn).view(torch.uint8)
        eight = [[x.to(torch.float8_e4m3fn).to(dtype) for x in each] for each in (keys, values)]
        wanted = expected(q, *eight, options)
    table, q, pool, (k, v) = table.to(device), q.to(device), pool.to(device), (x.to(device) for x in new)
    impl = adapter.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, **options)
    output = torch.full_like(q, torch.nan)
    assert torch.equal(impl.forward(layer, q, k, v, pool, None, output), torch.zeros_like(q))
    output.fill_(5)
    builder = adapter.get_builder_cls()(None, ["layer"], None, torch.device(device))
    for metadata in (
        builder.build(0, common(base, device, table, 2)),
        builder.build_for_cudagraph_capture(common(base, device, table, 2)),
    ):
        assert impl.forward(layer, q, k, v, pool, metadata, output) is output
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output[:14].float().cpu(), wanted, rtol=tolerance, atol=tolerance)
        assert (output[14:] == 5).all()


def test_sinks_and_shared_caches(backend: Any) -> None:
    base, adapter = backend
    table = torch.tensor([[3, 1], [0, 9], [5, 2], [4, 9]], dtype=torch.int32)
    metadata = adapter.get_builder_cls()(None, [], None, None).build(0, common(base, "cpu", table))
    q, pool = torch.randn(14, HEADS, DIM), torch.zeros(6, KV_HEADS, SIZE, 2 * DIM)
    shares = adapter.get_impl_cls()(
        HEADS, DIM, 0.25, KV_HEADS, kv_sharing_target_layer_name="0", sinks=torch.full((HEADS,), 50.0)
    )
    output = shares.forward(None, q, q[:, :2], q[:, :2], pool, metadata, torch.empty_like(q))
    assert not pool.any() and output.abs().max() < 1e-6
    causal = torch.tensor([True, False, True, True])
    step = (
        adapter.get_builder_cls()(None, [], None, None)
        .build(0, base.CommonAttentionMetadata(**{**vars(common(base, "cpu", table)), "causal": causal}))
        .step
    )
    assert step.causal.tolist() == [1, 0, 1, 1]


def one(base: Any, rows: int, causal: Any = True, device: str = "cpu") -> Any:
    """Returns what vLLM's runner says of one prompt, on page 1."""
    lens, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([rows], [0, rows]))
    return base.CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=1, num_actual_tokens=rows, seq_lens=lens, max_query_len=rows,
        max_seq_len=rows, block_table_tensor=torch.ones_like(lens)[None], causal=causal,
        slot_mapping=torch.arange(SIZE, SIZE + rows, device=device),
    )  # fmt: skip


def attend(
    backend: Any, impl: Any, causal: Any = True, layer: Any = None, pool: Any = None, device: str = "cpu"
) -> tuple[Any, Any, Any]:
    """A prompt's q and keys, which are its values, and what the layer gives."""
    (base, adapter), random = backend, torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k = (torch.randn(12, n, DIM, generator=random).to(device, dtype) for n in (HEADS, KV_HEADS))
    pool = torch.zeros(2, KV_HEADS, SIZE, 2 * DIM, dtype=dtype, device=device) if pool is None else pool
    metadata = adapter.get_builder_cls()(None, [], None, None).build(0, one(base, 12, causal, device))
    return q, k, impl.forward(layer, q, k, k, pool, metadata, torch.empty_like(q))


def test_sinks_that_are_loaded_late(backend: Any) -> None:
    """vLLM makes layers before it has weights, and may load weights again, which graphs must see."""
    given = torch.nn.Parameter(torch.full((HEADS,), -torch.inf, dtype=torch.bfloat16), requires_grad=False)
    impl, places = backend[1].get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, sinks=given), set()
    for number in (0.0, 3.0):
        given.data.fill_(number)
        impl.process_weights_after_loading(torch.bfloat16)
        q, k, o = attend(backend, impl)
        places.add(impl.options["sinks"].data_ptr())
        wanted = rawattn.attention(q[None], k[None], k[None], causal=True, scale=0.25, sinks=given.float())[0]
        torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-5)
    assert len(places) == 1


def test_alibi(backend: Any) -> None:
    slopes = [0.5, 0.25, 0.125, 0.0625]
    q, k, o = attend(backend, backend[1].get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, slopes))
    wanted = rawattn.attention(q[None], k[None], k[None], causal=True, scale=0.25, alibi=torch.tensor(slopes))[0]
    torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-5)


@since(2, 5)
@pytest.mark.parametrize("causal", [True, False, torch.tensor([0]), torch.tensor([1])], ids=str)
def test_windows_of_queries_that_are_not_causal(causal: Any, backend: Any, device: str) -> None:
    """They see as many keys after them as before, as in vLLM's own backends."""
    impl = backend[1].get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, sliding_window=4)
    given = causal.to(device) if isinstance(causal, torch.Tensor) else causal
    q, k, o = (x.cpu().float() for x in attend(backend, impl, given, device=device))
    distance = torch.arange(12)[:, None] - torch.arange(12)
    kept = (distance < 4) & (distance >= (0 if causal else -3))
    given = (x.transpose(0, 1) for x in (q, k, k))
    wanted = F.scaled_dot_product_attention(*given, attn_mask=kept, scale=0.25, enable_gqa=True).transpose(0, 1)
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(o, wanted, rtol=tolerance, atol=tolerance)


def test_scales_that_are_loaded_late(backend: Any) -> None:
    """The same cache under other scales of e4m3."""
    impl = backend[1].get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, kv_cache_dtype="fp8")
    layer, pool = types.SimpleNamespace(), torch.zeros(2, KV_HEADS, SIZE, 2 * DIM, dtype=torch.uint8)
    for scale in (1.0, 0.125):
        layer._k_scale_float = layer._v_scale_float = scale
        _, k, _ = attend(backend, impl, layer=layer, pool=pool)
        stored = pool.view(torch.float8_e4m3fn)[1, :, :12, :DIM].transpose(0, 1).float() * scale
        torch.testing.assert_close(stored, k, rtol=0.07, atol=0.01)


def test_batch_invariance(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = backend[1]
    module, asked = importlib.import_module(ADAPTER), []
    monkeypatch.setattr(module, "attention_kvcache", lambda *given, **options: asked.append(options["invariant"]))
    for found in (False, True):
        monkeypatch.setattr(module, "envs", types.SimpleNamespace(VLLM_BATCH_INVARIANT=found))
        attend(backend, adapter.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS))
    assert asked == [False, True] and adapter.supports_batch_invariance()


def test_drafts_are_read_where_they_are(backend: Any) -> None:
    """vLLM updates metadata within a graph and builds none: the step has to have vLLM's own arrays."""
    base, adapter = backend
    builder, batch = adapter.get_builder_cls()(None, [], None, None), one(base, 5)
    metadata = builder.build_for_cudagraph_capture(batch)
    for array in (batch.seq_lens, batch.query_start_loc, batch.block_table_tensor, batch.slot_mapping):
        array += 3
    assert builder.supports_draft_decode_metadata_update
    builder.update_draft_decode_metadata(metadata)
    step = metadata.step
    assert step.kv_lens.tolist() == [8] and step.cu_seqlens_q.tolist() == [3, 8] and step.page_table.tolist() == [[4]]
    assert metadata.slot_mapping[0] == SIZE + 3


def test_graphs(backend: Any) -> None:
    """A graph of prompts and decoding takes all batches, but not those whose masks have ranges of images."""
    support = importlib.import_module("vllm.v1.attention.backend").AttentionCGSupport
    for ranges, found in ((False, support.ALWAYS), (True, support.UNIFORM_SINGLE_TOKEN_DECODE)):
        config = types.SimpleNamespace(model_config=types.SimpleNamespace(is_mm_prefix_lm=ranges))
        assert backend[1].get_builder_cls().get_cudagraph_support(config, None) is found


@since(2, 5)
def test_a_graph_of_a_mixed_batch(backend: Any, device: str) -> None:
    """A graph that was captured with a bound of all rows on one sequence, as vLLM's runners do, computes any batch of so many."""
    (base, adapter), random = backend, torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    table = torch.tensor([[3, 1], [0, 9], [5, 2], [4, 9]], dtype=torch.int32)
    batch = common(base, device, table.to(device))
    batch.max_query_len, batch.max_seq_len = 14, 32
    captured = adapter.get_builder_cls()(None, [], None, None).build_for_cudagraph_capture(batch)
    impl = adapter.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS)
    pool = torch.randn(10, KV_HEADS, SIZE, 2 * DIM, generator=random).to(device, dtype)
    for lengths in ([(1, 9), (11, 11), (2, 20), (0, 0)], [(14, 30), (0, 0), (0, 0), (0, 0)], [(4, 4), (3, 9), (3, 32), (4, 12)]):
        starts = torch.tensor([0, *torch.tensor([q for q, _ in lengths]).cumsum(0)], dtype=torch.int32)
        batch.query_start_loc.copy_(starts)
        batch.seq_lens.copy_(torch.tensor([kv for _, kv in lengths]))
        at = [int(table[i, p // SIZE]) * SIZE + p % SIZE for i, (q, kv) in enumerate(lengths) for p in range(kv - q, kv)]
        batch.slot_mapping.copy_(torch.tensor(at))
        q, k, v = (torch.randn(14, n, DIM, generator=random).to(device, dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        o = impl.forward(None, q, k, v, pool, captured, torch.full_like(q, torch.nan)).float().cpu()
        for i, (rows, n) in enumerate(lengths):
            first = int(starts[i])
            keys = torch.cat([pool[p].transpose(0, 1) for p in table[i]])[:n].float().cpu()
            given = (x.transpose(0, 1) for x in (q[first : first + rows].float().cpu(), keys[..., :DIM], keys[..., DIM:]))
            kept = torch.arange(n - rows, n)[:, None] >= torch.arange(n)
            wanted = F.scaled_dot_product_attention(*given, attn_mask=kept, scale=0.25, enable_gqa=True).transpose(0, 1)
            tolerance = 1e-5 if device == "cpu" else 2e-2
            torch.testing.assert_close(o[first : first + rows], wanted, rtol=tolerance, atol=tolerance)


@since(2, 5)
@pytest.mark.parametrize("kind", ["ENCODER", "ENCODER_ONLY"])
@pytest.mark.parametrize("window", [None, 3])
def test_encoders(window: int | None, kind: str, backend: Any, device: str) -> None:
    """Without a cache, in both directions."""
    (base, adapter), random = backend, torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    lengths, batch = [5, 1, 6], one(base, 14, False, device)  # and two rows of padding
    batch.query_start_loc = torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=device)
    batch.seq_lens, batch.num_reqs = torch.tensor(lengths, dtype=torch.int32, device=device), 3
    batch.block_table_tensor = torch.zeros(3, 1, dtype=torch.int32, device=device)
    impl = adapter.get_impl_cls()(
        HEADS, DIM, 0.25, KV_HEADS, sliding_window=window, attn_type=getattr(base.AttentionType, kind)
    )  # fmt: skip
    q, k, v = (torch.randn(14, n, DIM, generator=random).to(device, dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    output = torch.full_like(q, 5)
    metadata = adapter.get_builder_cls()(None, [], None, None).build(0, batch)
    impl.forward(None, q, k, v, torch.empty(0, dtype=dtype, device=device), metadata, output)
    first = 0
    for n in lengths:
        given = (x[first : first + n].transpose(0, 1).float().cpu() for x in (q, k, v))
        kept = (torch.arange(n)[:, None] - torch.arange(n)).abs() < (window or 99)
        wanted = F.scaled_dot_product_attention(*given, attn_mask=kept, scale=0.25, enable_gqa=True).transpose(0, 1)
        tolerance = 1e-5 if device == "cpu" else 2e-2
        torch.testing.assert_close(output[first : first + n].float().cpu(), wanted, rtol=tolerance, atol=tolerance)
        first += n
    assert (output[12:] == 5).all()


@since(2, 5)
def test_queries_of_a_decoder_to_an_encoder(backend: Any) -> None:
    """vLLM writes other slots into the metadata: as many as the encoder gave keys, or none where they are in the cache."""
    (base, adapter), random = backend, torch.Generator().manual_seed(0)
    batch = one(base, 2, False)
    batch.seq_lens = torch.tensor([9], dtype=torch.int32)
    batch.max_seq_len = 9
    impl = adapter.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, attn_type=base.AttentionType.ENCODER_DECODER)
    q, k, v = (torch.randn(n, h, DIM, generator=random) for n, h in ((2, HEADS), (9, KV_HEADS), (9, KV_HEADS)))
    metadata = adapter.get_builder_cls()(None, [], None, None).build(0, batch)
    metadata.slot_mapping = torch.arange(SIZE, SIZE + 9)
    pool = torch.zeros(2, KV_HEADS, SIZE, 2 * DIM)
    given = (x.transpose(0, 1) for x in (q, k, v))
    wanted = F.scaled_dot_product_attention(*given, scale=0.25, enable_gqa=True).transpose(0, 1)
    for keys, slots in (((k, v), metadata.slot_mapping), ((None, None), torch.empty(0, dtype=torch.int64))):
        metadata.slot_mapping = slots
        o = impl.forward(None, q, *keys, pool, metadata, torch.full_like(q, torch.nan))
        torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-5)


@since(2, 5)
@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_ranges_of_images(window: int | None, clamps: bool, backend: Any, device: str) -> None:
    """Tokens of a range of positions see each other, those behind this step's rows too, where they are in the cache."""
    (base, adapter), random = backend, torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    table = torch.tensor([[3, 1], [0, 9], [5, 2], [4, 9]], dtype=torch.int32)
    ranges = {0: [(2, 9)], 1: [(1, 3), (5, 6), (4, 4)], 2: [(2, 17), (19, 30)], 3: []}  # of which the last key counts
    batch, layer = common(base, device, table.to(device)), types.SimpleNamespace(mm_prefix_clamp_sliding_window=clamps)
    batch.mm_req_doc_ranges, batch.seq_lens_cpu_upper_bound = ranges, batch.seq_lens.cpu()
    q = torch.randn(14, HEADS, DIM, generator=random).to(device, dtype)
    keys, values = ([torch.randn(n, KV_HEADS, DIM, generator=random).to(dtype) for _, n in LENGTHS] for _ in range(2))
    pool = torch.zeros(6, KV_HEADS, SIZE, 2 * DIM, dtype=dtype)
    for i, (_, n) in enumerate(LENGTHS):
        for at in range(n):
            pool[table[i, at // SIZE], :, at % SIZE] = torch.cat([keys[i][at], values[i][at]], -1)
    new = [torch.cat([x[n - rows :] for x, (rows, n) in zip(each, LENGTHS, strict=True)]) for each in (keys, values)]
    impl = adapter.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, sliding_window=window)
    builder = adapter.get_builder_cls()(None, [], None, None)
    metadata, output = builder.build(0, batch), torch.full_like(q, torch.nan)
    impl.forward(layer, q, *(x.to(device) for x in new), pool.to(device), metadata, output)
    first = 0
    for i, (rows, n) in enumerate(LENGTHS):
        at, kv = torch.arange(n - rows, n)[:, None], torch.arange(n)
        kept, near = kv <= at, at - kv < (window or 99)
        inside = torch.zeros_like(kept)
        for begin, last in ranges[i]:
            if begin < last:
                inside |= (begin <= at) & (at <= last) & (begin <= kv) & (kv <= last)
        kept = near & (kept | inside) if clamps else (near & kept) | inside
        given = (x.transpose(0, 1).float().cpu() for x in (q[first : first + rows], keys[i], values[i]))
        wanted = F.scaled_dot_product_attention(*given, attn_mask=kept, scale=0.25, enable_gqa=True).transpose(0, 1)
        tolerance = 1e-5 if device == "cpu" else 2e-2
        torch.testing.assert_close(output[first : first + rows].float().cpu(), wanted, rtol=tolerance, atol=tolerance)
        first += rows
    batch.mm_req_doc_ranges = {0: [(2, 9)], 3: []}  # in none of which a row is
    assert builder.build(0, batch).prefix is None and builder.build(0, batch).step.causal is True


def test_capture_builds_as_a_subclass_does(backend: Any) -> None:
    """vLLM's classes override build, to show layers another batch; a graph's steps have no bound of keys."""
    base, adapter = backend

    class Builder(adapter.get_builder_cls()):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            longer = base.CommonAttentionMetadata(**{**vars(common), "seq_lens": common.seq_lens + 2})
            return super().build(common_prefix_len, longer, fast_build)

    builder = Builder(None, [], None, None)
    captured, built = builder.build_for_cudagraph_capture(one(base, 5)).step, builder.build(0, one(base, 5)).step
    assert captured.kv_lens.tolist() == built.kv_lens.tolist() == [7]
    assert captured.max_kv_len is None and built.max_kv_len == 8


def test_a_vllm_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM of another version starts without the backend, and one warning says so."""
    monkeypatch.setattr(rawattn_plugins, "_warned", set())
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    with pytest.warns(UserWarning, match="this vLLM has no registry"):
        rawattn_plugins.vllm()
    registry.AttentionBackendEnum = vllm_like.AttentionBackendEnum  # type: ignore[attr-defined]
    registry.register_backend = lambda backend: None  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rawattn_plugins.vllm()
    monkeypatch.setattr(rawattn_plugins, "_warned", set())
    with pytest.warns(UserWarning, match="takes 1 positional argument"):
        rawattn_plugins.vllm()


def test_refusals(backend: Any) -> None:
    adapter = backend[1]
    impl = adapter.get_impl_cls()
    with pytest.raises(UnsupportedError, match="output_scale was given"):
        impl(HEADS, DIM, 0.25).forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    assert [adapter.supports_head_size(n) for n in (8, 16, 80, 256, 288, 72)] == [False, True, True, True, False, False]
    more = (16, False, False, False, False, None)
    eight = (torch.float16, "fp8", *more)
    assert adapter.supports_combination(80, *eight) and not adapter.supports_combination(96, *eight)
    assert "computes in torch.bfloat16" in adapter.supports_combination(64, torch.bfloat16, "float16", *more)
    assert not any(adapter.supports_combination(64, torch.bfloat16, name, *more) for name in ("auto", "bfloat16"))
    assert not adapter.supports_compute_capability(types.SimpleNamespace(major=7))
    for major, minor, names in ((8, 6, ["fp8", "fp8_e4m3"]), (8, 9, []), (9, 0, [])):
        given = (*more[:-1], types.SimpleNamespace(major=major, minor=minor))
        kinds = "auto", "fp8", "fp8_e4m3", "fp8_e5m2"
        assert [x for x in kinds if adapter.supports_combination(64, torch.float16, x, *given)] == names


METHODS = {
    "__init__", "forward", "process_weights_after_loading", "build", "build_for_cudagraph_capture", "get_cudagraph_support",
    "update_draft_decode_metadata",
}  # fmt: skip


def test_the_contract(backend: Any) -> None:
    """Methods take what vLLM's own classes say; where vLLM is, the classes of this test's form are as its own."""
    base, adapter = backend
    for ours, theirs in ((adapter.get_impl_cls(), "AttentionImpl"), (adapter.get_builder_cls(), "AttentionMetadataBuilder")):
        for source in (getattr(base, theirs), getattr(vllm_like, theirs)):
            for name in METHODS & {*dir(source)}:
                own, asked = ([*inspect.signature(getattr(each, name)).parameters] for each in (ours, source))
                assert own[: len(asked)] == asked
    if base.AttentionImpl is not vllm_like.AttentionImpl:
        from vllm.platforms.interface import DeviceCapability

        names = inspect.signature(adapter.validate_configuration).parameters
        given = {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "fp8", "block_size": 16, "attn_type": "decoder"}
        given |= {"device_capability": DeviceCapability(9, 0), "has_sink": True, "has_sliding_window": True}
        given |= {"use_batch_invariant": True, "use_mm_prefix": True, "use_adaptive_verification": True}
        assert adapter.validate_configuration(**{name: given.get(name, False) for name in names}) == []


def test_entry_point() -> None:
    """It imports nothing of rawattn, in whose place other people's servers would wait."""
    code = "import sys, rawattn_plugins; assert 'rawattn' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).resolve().parents[2])
    text = (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert re.search(r'\[project.entry-points."vllm.general_plugins"\]\nrawattn = "rawattn_plugins:vllm"', text)
    assert rawattn_plugins.PATHS["RAWATTN"].startswith(ADAPTER)

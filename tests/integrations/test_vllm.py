"""The backend for vLLM, driven as vLLM does: with its own classes where it can be imported, else with ones of their form."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import rawattn  # noqa: E402
from rawattn.errors import UnsupportedError  # noqa: E402
from rawattn.integrations import vllm as plugin  # noqa: E402
from tests.integrations import vllm_like  # noqa: E402
from tests.versions import since  # noqa: E402

DOOR = "rawattn.integrations.vllm_backend"


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
    monkeypatch.delitem(sys.modules, DOOR, raising=False)
    plugin.register()
    plugin.register()
    yield importlib.import_module("vllm.v1.attention.backend"), importlib.import_module(DOOR).RawattnBackend
    sys.modules.pop(DOOR, None)


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
    (base, door), random = backend, torch.Generator().manual_seed(0)
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
    impl = door.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, **options)
    output = torch.full_like(q, torch.nan)
    assert torch.equal(impl.forward(layer, q, k, v, pool, None, output), torch.zeros_like(q))
    output.fill_(5)
    builder = door.get_builder_cls()(None, ["layer"], None, torch.device(device))
    for metadata in (
        builder.build(0, common(base, device, table, 2)),
        builder.build_for_cudagraph_capture(common(base, device, table, 2)),
    ):
        assert impl.forward(layer, q, k, v, pool, metadata, output) is output
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output[:14].float().cpu(), wanted, rtol=tolerance, atol=tolerance)
        assert (output[14:] == 5).all()


def test_sinks_and_shared_caches(backend: Any) -> None:
    base, door = backend
    table = torch.tensor([[3, 1], [0, 9], [5, 2], [4, 9]], dtype=torch.int32)
    metadata = door.get_builder_cls()(None, [], None, None).build(0, common(base, "cpu", table))
    q, pool = torch.randn(14, HEADS, DIM), torch.zeros(6, KV_HEADS, SIZE, 2 * DIM)
    shares = door.get_impl_cls()(HEADS, DIM, 0.25, KV_HEADS, kv_sharing_target_layer_name="0", sinks=torch.full((HEADS,), 50.0))
    output = shares.forward(None, q, q[:, :2], q[:, :2], pool, metadata, torch.empty_like(q))
    assert not pool.any() and output.abs().max() < 1e-6
    causal = torch.tensor([True, False, True, True])
    step = (
        door.get_builder_cls()(None, [], None, None)
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
    (base, door), random = backend, torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k = (torch.randn(12, n, DIM, generator=random).to(device, dtype) for n in (HEADS, KV_HEADS))
    pool = torch.zeros(2, KV_HEADS, SIZE, 2 * DIM, dtype=dtype, device=device) if pool is None else pool
    metadata = door.get_builder_cls()(None, [], None, None).build(0, one(base, 12, causal, device))
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


def test_capture_builds_as_a_subclass_does(backend: Any) -> None:
    """vLLM's classes override build, to show layers another batch; a graph's steps have no bound of keys."""
    base, door = backend

    class Builder(door.get_builder_cls()):  # type: ignore[misc]
        def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            longer = base.CommonAttentionMetadata(**{**vars(common), "seq_lens": common.seq_lens + 2})
            return super().build(common_prefix_len, longer, fast_build)

    builder = Builder(None, [], None, None)
    captured, built = builder.build_for_cudagraph_capture(one(base, 5)).step, builder.build(0, one(base, 5)).step
    assert captured.kv_lens.tolist() == built.kv_lens.tolist() == [7]
    assert captured.max_kv_len is None and built.max_kv_len == 8


def test_a_vllm_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM of another version starts without the backend, and one warning says so."""
    monkeypatch.setattr(plugin, "_warned", False)
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    with pytest.warns(UserWarning, match="this vLLM has no registry"):
        plugin.register()
    registry.AttentionBackendEnum = vllm_like.AttentionBackendEnum  # type: ignore[attr-defined]
    registry.register_backend = lambda backend: None  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
    monkeypatch.setattr(plugin, "_warned", False)
    with pytest.warns(UserWarning, match="takes 1 positional argument"):
        plugin.register()


def test_refusals(backend: Any) -> None:
    base, door = backend
    impl = door.get_impl_cls()
    with pytest.raises(UnsupportedError, match=r"attn_type is .*encoder_only"):
        impl(HEADS, DIM, 0.25, KV_HEADS, attn_type=base.AttentionType.ENCODER_ONLY)
    with pytest.raises(UnsupportedError, match="output_scale was given"):
        impl(HEADS, DIM, 0.25).forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    assert [door.supports_head_size(n) for n in (8, 16, 80, 256, 288, 72)] == [False, True, True, True, False, False]
    more = (16, False, False, False, False, None)
    eight = (torch.float16, "fp8", *more)
    assert door.supports_combination(80, *eight) and not door.supports_combination(96, *eight)
    assert "computes in torch.bfloat16" in door.supports_combination(64, torch.bfloat16, "float16", *more)
    assert not any(door.supports_combination(64, torch.bfloat16, name, *more) for name in ("auto", "bfloat16"))
    assert not door.supports_compute_capability(types.SimpleNamespace(major=7))


METHODS = {"__init__", "forward", "process_weights_after_loading", "build", "build_for_cudagraph_capture"}


def test_the_contract(backend: Any) -> None:
    """Methods take what vLLM's own classes say; where vLLM is, the classes of this test's form are as its own."""
    base, door = backend
    for ours, theirs in ((door.get_impl_cls(), "AttentionImpl"), (door.get_builder_cls(), "AttentionMetadataBuilder")):
        for source in (getattr(base, theirs), getattr(vllm_like, theirs)):
            for name in METHODS & {*dir(source)}:
                own, asked = ([*inspect.signature(getattr(each, name)).parameters] for each in (ours, source))
                assert own[: len(asked)] == asked
    if base.AttentionImpl is not vllm_like.AttentionImpl:
        from vllm.platforms.interface import DeviceCapability

        names = inspect.signature(door.validate_configuration).parameters
        given = {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "fp8", "block_size": 16, "attn_type": "decoder"}
        given |= {"device_capability": DeviceCapability(9, 0), "has_sink": True, "has_sliding_window": True}
        assert door.validate_configuration(**{name: given.get(name, False) for name in names}) == []


def test_entry_point() -> None:
    text = (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert re.search(r'\[project.entry-points."vllm.general_plugins"\]\nrawattn = "rawattn.integrations.vllm:register"', text)
    assert plugin.PATH.startswith(DOOR) and callable(plugin.register)

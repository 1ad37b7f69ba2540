"""The backend for vLLM, driven as vLLM does: with its own classes where it can be imported, else with ones of their form."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from rawattn.errors import UnsupportedError  # noqa: E402
from rawattn.integrations import vllm as plugin  # noqa: E402
from tests.integrations import vllm_like  # noqa: E402

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
    """What vLLM's runner says of a batch; with padding rows behind it that belong to no sequence."""
    starts = torch.tensor([0, *torch.tensor([q for q, _ in LENGTHS]).cumsum(0)], dtype=torch.int32)
    slots = [int(table[i, at // SIZE]) * SIZE + at % SIZE for i, (q, kv) in enumerate(LENGTHS) for at in range(kv - q, kv)]
    rows = len(slots) + padding
    return base.CommonAttentionMetadata(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts, num_reqs=len(LENGTHS), num_actual_tokens=rows,
        seq_lens=torch.tensor([kv for _, kv in LENGTHS], dtype=torch.int32, device=device), max_query_len=7, max_seq_len=30,
        block_table_tensor=table, slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
    )  # fmt: skip


def expected(q: Any, keys: list[Any], values: list[Any], options: dict[str, Any]) -> Any:
    """What torch computes of each sequence's rows, the last at the last key."""
    found, first = [], 0
    for (rows, n), k, v in zip(LENGTHS, keys, values, strict=True):
        distance = torch.arange(n - rows, n)[:, None] - torch.arange(n)
        window = options.get("sliding_window") or n + 1
        kept = (distance >= 0) & (distance < window)
        given = [x.float().transpose(0, 1) for x in (q[first : first + rows], k, v)]
        found.append(F.scaled_dot_product_attention(*given, attn_mask=kept, scale=0.25, enable_gqa=True).transpose(0, 1))
        first += rows
    return torch.cat(found)


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


def test_refusals(backend: Any) -> None:
    base, door = backend
    impl = door.get_impl_cls()
    with pytest.raises(UnsupportedError, match="alibi_slopes were given"):
        impl(HEADS, DIM, 0.25, KV_HEADS, [0.1] * HEADS)
    with pytest.raises(UnsupportedError, match=r"attn_type is .*encoder_only"):
        impl(HEADS, DIM, 0.25, KV_HEADS, attn_type=base.AttentionType.ENCODER_ONLY)
    with pytest.raises(UnsupportedError, match="output_scale was given"):
        impl(HEADS, DIM, 0.25).forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    assert [door.supports_head_size(n) for n in (8, 16, 80, 256, 288, 72)] == [False, True, True, True, False, False]
    more = (torch.float16, "fp8", 16, False, False, False, False, None)
    assert door.supports_combination(80, *more) and not door.supports_combination(96, *more)
    assert not door.supports_compute_capability(types.SimpleNamespace(major=7))


def test_the_contract(backend: Any) -> None:
    """Methods take what vLLM's own classes say; where vLLM is, the classes of this test's form are as its own."""
    base, door = backend
    for ours, theirs in ((door.get_impl_cls(), "AttentionImpl"), (door.get_builder_cls(), "AttentionMetadataBuilder")):
        for source in (getattr(base, theirs), getattr(vllm_like, theirs)):
            for name in {"__init__", "forward", "build", "build_for_cudagraph_capture"} & {*dir(source)}:
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

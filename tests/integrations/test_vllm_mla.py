"""The backends for MLA in vLLM, driven as vLLM does: with its own classes where they can be imported, else with stand-ins."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import rawattn_plugins  # noqa: E402
from rawattn import FP8_DS_MLA, UnsupportedError  # noqa: E402
from rawattn.reference.records import dequantize, quantize  # noqa: E402
from tests.integrations import asked, vllm_like, vllm_mla_like  # noqa: E402
from tests.integrations.test_flash_mla import attend, check, check_out  # noqa: E402

ADAPTER = "rawattn.integrations.vllm_mla_backend"
HEADS, SIZE = 4, 16


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    try:
        importlib.import_module(ADAPTER)
    except ImportError:
        vllm_mla_like.install(monkeypatch)
        monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    yield importlib.import_module(ADAPTER)
    sys.modules.pop(ADAPTER, None)


def is_real() -> bool:
    return hasattr(sys.modules["vllm.model_executor.layers.attention.mla_attention"], "MLAAttention")


def impl_of(cls: Any, **more: Any) -> Any:
    """A layer's attention. vLLM's own bases ask a running server for its configuration, and are not asked here."""
    options = {"scale": 0.05, "softcap": None, "invariant": False}
    found = object.__new__(cls)
    vars(found).update({"scale": 0.05, "options": options, "need_to_return_lse_for_decode": False} | more)
    return found


LENGTHS = [(1, 30), (3, 7), (2, 40)]  # queries and keys of each sequence that decodes
TABLE = torch.tensor([[3, 1, 99], [0, 99, 98], [5, 2, 4]], dtype=torch.int32)


def filled() -> tuple[Any, Any, list[Any]]:
    """q, (rows, heads, 576), latent blocks, and the rows of each sequence."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(sum(n for n, _ in LENGTHS) + 2, HEADS, 576, generator=random).bfloat16()
    blocks = torch.full((6, SIZE, 576), torch.nan, dtype=torch.bfloat16)
    rows = [torch.randn(n, 576, generator=random).bfloat16() for _, n in LENGTHS]
    for own, table in zip(rows, TABLE.tolist(), strict=True):
        for j, x in enumerate(own):
            blocks[table[j // SIZE], j % SIZE] = x
    return q, blocks, rows


def decode_arguments() -> dict[str, Any]:
    starts = torch.tensor([0, *torch.tensor([n for n, _ in LENGTHS]).cumsum(0)], dtype=torch.int32)
    return {
        "block_table_tensor": TABLE, "seq_lens_device": torch.tensor([n for _, n in LENGTHS], dtype=torch.int32),
        "max_seq_len": 40, "query_start_loc_cpu": starts, "query_start_loc_device": starts, "num_decode_tokens": 6,
        "max_query_len": 3, "dcp_tot_seq_lens_device": None,
    }  # fmt: skip


def stored_as_records(blocks: Any) -> tuple[Any, Any]:
    """The bytes that say these blocks, and what they say."""
    stored = quantize(FP8_DS_MLA, blocks.float().numpy())
    return torch.from_numpy(stored), torch.from_numpy(dequantize(FP8_DS_MLA, stored))


@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("is_pair", [True, False])
@pytest.mark.parametrize("returns_lse", [True, False])
def test_decode(is_pair: bool, is_fp8: bool, returns_lse: bool, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with other numbers of queries; rows of padding behind them belong to none. A pair stays one, and GPUs have
    kernels for it."""
    q, blocks, rows = filled()
    if is_fp8:
        blocks, rows = stored_as_records(blocks)[0], [stored_as_records(x)[1] for x in rows]
    ops = asked.watch(monkeypatch, adapter)
    builder = object.__new__(adapter.RawattnMLAMetadataBuilder)
    metadata = builder._build_decode(**decode_arguments())
    assert (metadata.step.max_q_len, metadata.step.max_kv_len, metadata.step.is_causal) == (3, 64, True)
    builder._captures = True
    assert builder._build_decode(**decode_arguments()).step.max_kv_len is None
    impl = impl_of(adapter.RawattnMLAImpl, need_to_return_lse_for_decode=returns_lse)
    given = (q[..., :512].contiguous(), q[..., 512:].contiguous()) if is_pair else q
    for _ in range(2):
        o, lse = impl.forward_mqa(given, blocks, types.SimpleNamespace(decode=metadata), types.SimpleNamespace())
        first = 0
        for (n, kv_len), own in zip(LENGTHS, rows, strict=True):
            places = slice(first, first + n)
            keep = torch.arange(kv_len) <= torch.arange(kv_len - n, kv_len)[:, None]
            wanted, wanted_lse, _ = attend(q[places], own[:, None].expand(n, kv_len, 1, 576), 0.05, keep)
            check("o", o[places], wanted.bfloat16(), 2e-3, 2.01 / 128, 2e-5)
            if returns_lse:
                check("lse", lse[places], wanted_lse, 1e-5, 8.01 / 65536)
            first += n
        assert (lse is not None) == returns_lse and o.shape == (len(q), HEADS, 512)
    for op in ops:
        assert (op.q_rope, op.kv_element is FP8_DS_MLA) == (is_pair, is_fp8)
        assert asked.kernels(op) == ["attn_fwd_mma", "attn_mla", "attn_fwd_mma"]


@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("returns_lse", [True, False])
def test_listed_rows(is_fp8: bool, returns_lse: bool, adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has rows of the cache, some fewer; blocks have rows of another layer between them. q stays a pair, and GPUs have
    kernels for it."""
    q, blocks, _ = filled()
    latent = blocks = blocks.nan_to_num(0.5)
    if is_fp8:
        blocks, latent = stored_as_records(latent)
    wide = blocks.new_zeros(6, 2 * SIZE, blocks.shape[2])
    wide[:, :SIZE] = blocks
    random = torch.Generator().manual_seed(1)
    places = torch.randint(0, 6 * SIZE, (len(q), 20), generator=random)
    counts = torch.randint(0, 21, (len(q),), generator=random).int()
    physical = (places // SIZE * 2 * SIZE + places % SIZE).int().masked_fill(torch.arange(20) >= counts[:, None], -1)
    impl = impl_of(adapter.RawattnMLASparseImpl, need_to_return_lse_for_decode=returns_lse)
    pair = q[..., :512], q[..., 512:]
    more = {"layer": None, "block_size": SIZE, "is_decode": True}
    ops = asked.watch(monkeypatch, adapter)
    o, lse = impl._forward_mqa_kernel(pair, wide[:, :SIZE], physical, counts, **more)
    keep = torch.arange(20) < counts[:, None]
    wanted, wanted_lse, _ = attend(q, latent.flatten(0, 1)[places][:, :, None], 0.05, keep)
    check_out(o * 0.1, wanted * 0.1)
    (op,) = ops
    assert (op.q_rope, op.kv_element is FP8_DS_MLA) == (True, is_fp8)
    assert asked.kernels(op) == ["attn_fwd_mma", "attn_mla", "attn_fwd_mma"]
    assert (lse is not None) == returns_lse
    if returns_lse:
        check("lse", lse, wanted_lse.masked_fill(counts[:, None] == 0, -torch.inf), 1e-5, 8.01 / 65536)


def test_what_vllm_asks(adapter: Any) -> None:
    for cls, sparse in ((adapter.RawattnMLABackend, False), (adapter.RawattnMLASparseBackend, True)):
        assert cls.is_mla() and cls.get_supported_head_sizes() == [576] and 64 in cls.get_supported_kernel_block_sizes()
        given = (576, torch.bfloat16, "auto", 64, True, False, sparse, False, None)
        for kind, dtype in (("float16", torch.bfloat16), ("bfloat16", torch.float16), ("fp8_ds_mla", torch.float16)):
            other = "bfloat16" if dtype == torch.float16 else "float16"
            assert f"needs a model of torch.{other}" in cls.supports_combination(576, dtype, kind, *given[3:])
        for kind in ("auto", "bfloat16", "fp8_ds_mla", None):
            assert cls.supports_combination(576, torch.bfloat16, kind, *given[3:]) is None
        assert "sinks" in cls.supports_combination(*given[:5], True, *given[6:])
        assert cls.supported_kv_cache_dtypes == ["auto", "float16", "bfloat16", "fp8_ds_mla"]
        for major in (7, 8, 9, 10, 12):
            assert cls.supports_compute_capability(types.SimpleNamespace(major=major, minor=0)) == (major >= 8)
        assert not getattr(cls.get_impl_cls(), "__abstractmethods__", None)
        assert not getattr(cls.get_builder_cls(), "__abstractmethods__", None)
        assert cls.get_impl_cls().can_return_lse_for_decode
    builder = adapter.RawattnMLAMetadataBuilder
    assert builder.query_len_support.name == "VARLEN" and builder.reorder_batch_threshold > 1


def test_what_is_refused(adapter: Any) -> None:
    for arguments, message in ((([1.0], "decoder"), "alibi_slopes were given"), ((None, "encoder"), "attn_type is 'encoder'")):
        with pytest.raises(UnsupportedError, match=message):
            adapter._check_layer(*arguments)


def test_bases_are_of_the_form_that_is_tested(adapter: Any) -> None:
    """The methods that vLLM calls have the parameters of its own bases."""
    if not is_real():
        pytest.skip("vLLM is not installed")
    for module, content in vllm_mla_like.CONTENT.items():
        theirs = importlib.import_module(module)
        for ours in content:
            real = getattr(theirs, ours.__name__)
            for name in ("_build_decode", "build_for_cudagraph_capture", "forward_mqa", "_forward_mqa_kernel"):
                if name in vars(ours):
                    assert [*inspect.signature(getattr(ours, name)).parameters] == [
                        *inspect.signature(getattr(real, name)).parameters
                    ]
    real_names = inspect.signature(adapter.MLACommonImpl.__init__).parameters
    assert [*inspect.signature(adapter.RawattnMLAImpl.__init__).parameters][:11] == [*real_names][:11]


def test_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_mla_like.install(monkeypatch)
    monkeypatch.setattr(vllm_like, "REGISTERED", {})
    rawattn_plugins.vllm()
    assert {name: path.rpartition(".")[2] for name, path in vllm_like.REGISTERED.items()} == {
        "RAWATTN": "RawattnBackend", "RAWATTN_MLA": "RawattnMLABackend", "RAWATTN_MLA_SPARSE": "RawattnMLASparseBackend",
    }  # fmt: skip

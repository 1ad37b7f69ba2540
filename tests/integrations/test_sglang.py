"""The backend for SGLang, driven as its runner does, with classes of its form; their signatures are compared where SGLang is."""

from __future__ import annotations

import ast
import functools
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

import rawattn_plugins  # noqa: E402
from rawattn.errors import UnsupportedError  # noqa: E402
from tests.integrations import asked  # noqa: E402
from tests.integrations import sglang_like as like  # noqa: E402
from tests.versions import since  # noqa: E402

ADAPTER = "rawattn.integrations.sglang_backend"
HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 32, 96


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def is_installed() -> bool:
    """Says whether SGLang's own classes can be imported. Where it lacks a part, nothing of what was imported until then stays: a
    package without Python of its own reads the module of its parent, and that may be gone."""
    try:
        importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
        importlib.import_module("sglang.srt.mem_cache.memory_pool")
        importlib.import_module("sglang.srt.arg_groups.choices")
        return True
    except ImportError:
        for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        return False


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns what SGLang's registry has of rawattn. The registry and classes are its own, where they can be imported, or of
    their form."""
    if not is_installed():
        for name, module in like.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    rawattn_plugins.sglang()
    rawattn_plugins.sglang()
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    assert choices.ATTENTION_BACKEND_CHOICES.count("rawattn") == 1
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count("rawattn") == 1
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    yield registry.ATTENTION_BACKENDS["rawattn"]
    sys.modules.pop(ADAPTER, None)


def modes() -> Any:
    """SGLang's own ``ForwardMode``, or the one of its form."""
    if is_installed():
        return importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    return like.ForwardMode


def runner(device: str, page_size: int = 1) -> Any:
    """Requests whose tokens lie in pages in a random order, in a pool full of other numbers."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    pages = torch.randperm(TOKENS // page_size, generator=torch.Generator().manual_seed(3))[: 3 * 32 // page_size]
    places = (pages[:, None] * page_size + torch.arange(page_size)).reshape(3, 32).int().to(device)
    pool, config = like.Pool(TOKENS, KV_HEADS, DIM, device, dtype), types.SimpleNamespace(context_len=32)
    requests = types.SimpleNamespace(req_to_token=places)
    arguments = types.SimpleNamespace(enable_deterministic_inference=False, cuda_graph_config=None)
    return types.SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=requests, page_size=page_size, device=device, model_config=config,
        server_args=arguments, kv_cache_dtype=dtype, sliding_window_size=None,
    )  # fmt: skip


def layer(**more: Any) -> Any:
    given = {
        "layer_id": 0,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": KV_HEADS,
        "qk_head_dim": DIM,
        "v_head_dim": DIM,
        "scaling": 0.25,
    }
    given |= {"logit_cap": 0.0, "logit_capping_method": "tanh", "sliding_window_size": -1, "is_cross_attention": False}
    given |= {"attn_type": types.SimpleNamespace(value="decoder"), "k_scale": None, "v_scale": None}
    return types.SimpleNamespace(**given | {"k_scale_float": None, "v_scale_float": None} | more)


def batch(run: Any, new: list[int], lens: list[int], mode: Any) -> Any:
    """Requests 2, 0 and 1, with so many new tokens."""
    rows = [2, 0, 1][: len(lens)]
    places = run.req_to_token_pool.req_to_token
    out = torch.cat([places[row, n - x : n] for row, x, n in zip(rows, new, lens, strict=True)]).long()
    counts = {"extend_seq_lens": torch.tensor(new, device=run.device), "extend_seq_lens_cpu": new}
    given = {"seq_lens": torch.tensor(lens, device=run.device), "seq_lens_cpu": torch.tensor(lens), "out_cache_loc": out}
    indices = torch.tensor(rows, device=run.device)
    return types.SimpleNamespace(
        batch_size=len(lens), forward_mode=mode, req_pool_indices=indices, spec_info=None, out_cache_loc_is_physical=False,
        **given, **counts,
    )  # fmt: skip


def expected(q: Any, k: list[Any], v: list[Any], new: list[int], window: int = 99, scale: float = 0.25) -> Any:
    found, first = [], 0
    for rows, keys, values in zip(new, k, v, strict=True):
        distance = torch.arange(len(keys) - rows, len(keys))[:, None] - torch.arange(len(keys))
        given = [x.float().cpu().transpose(0, 1) for x in (q[first : first + rows], keys, values)]
        given[1:] = [x.repeat_interleave(len(given[0]) // len(x), 0) for x in given[1:]]  # torch 2.4 has no enable_gqa
        kept = (distance >= 0) & (distance <= window)
        found.append(F.scaled_dot_product_attention(*given, attn_mask=kept, scale=scale).transpose(0, 1))
        first += rows
    return torch.cat(found).flatten(1)


@since(2, 5)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [-1, 4])
def test_steps(window: int, page_size: int, make: Any, device: str) -> None:
    """Prompts, then decoding: eagerly, and as a graph is captured and replayed with other lengths."""
    run = runner(device, page_size)
    backend, random = make(run), torch.Generator().manual_seed(0)
    one = layer(sliding_window_size=window)
    dtype = run.token_to_kv_pool.k.dtype
    keys: list[Any] = [torch.empty(0, KV_HEADS, DIM, dtype=dtype)] * 3
    values = list(keys)
    backend.init_cuda_graph_state(4, 4)
    lens, extend, decode = [0, 0, 0], modes().EXTEND, modes().DECODE
    for new, mode, way in (
        ([5, 17, 1], extend, "eager"), ([1, 2, 9], modes().MIXED, "eager"), ([1, 1, 1], decode, "eager"),
        ([1, 1, 1], decode, "capture"), ([1, 1, 1], decode, "replay"),
    ):  # fmt: skip
        lens = [a + b for a, b in zip(lens, new, strict=True)]
        q, k, v = (torch.randn(sum(new), n, DIM, generator=random).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        keys, values = ([torch.cat(x) for x in zip(each, y.split(new), strict=True)] for each, y in ((keys, k), (values, v)))
        given = batch(run, new, lens, mode)
        if way == "eager":
            backend.init_forward_metadata(given)
        else:
            backend.init_forward_metadata_out_graph(given, in_capture=way == "capture")
            step = backend.forward_metadata if way == "capture" else step  # noqa: F821
            assert backend.forward_metadata is step
        f = backend.forward_decode if mode is decode else backend.forward_extend
        o = f(*(x.to(device) for x in (q.flatten(1), k, v)), one, given)
        tolerance = 1e-5 if device == "cpu" else 2e-2
        wanted = expected(q, keys, values, new, 99 if window < 0 else window)
        torch.testing.assert_close(o.float().cpu(), wanted, rtol=tolerance, atol=tolerance)
    backend.init_forward_metadata(batch(run, [1], [1], modes().IDLE))
    assert backend.forward_metadata is None


@since(2, 5)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_for_windows(page_size: int, make: Any, device: str) -> None:
    """Layer 1 has a pool of its own. Pages that its window has left are another's, and hold NaN."""
    run, window = runner(device, page_size), 4
    full, dtype = run.token_to_kv_pool, run.kv_cache_dtype
    order = torch.randperm(TOKENS // page_size, generator=torch.Generator().manual_seed(5))
    mapping = (order[:, None] * page_size + torch.arange(page_size)).flatten().to(device)
    run.token_to_kv_pool = like.WindowPool(full, like.Pool(TOKENS, KV_HEADS, DIM, device, dtype), mapping)
    run.sliding_window_size = window
    backend, random = make(run), torch.Generator().manual_seed(0)
    layers = layer(), layer(layer_id=1, sliding_window_size=window)
    histories: list[Any] = [[[torch.empty(0, KV_HEADS, DIM, dtype=dtype)] * 3 for _ in range(2)] for _ in layers]
    backend.init_cuda_graph_state(4, 4)
    lens, extend, decode = [0, 0, 0], modes().EXTEND, modes().DECODE
    for new, mode, way in (
        ([5, 17, 1], extend, "eager"), ([1, 2, 9], modes().MIXED, "eager"), ([1, 1, 1], decode, "eager"),
        ([1, 1, 1], decode, "capture"), ([1, 1, 1], decode, "replay"),
    ):  # fmt: skip
        lens = [a + b for a, b in zip(lens, new, strict=True)]
        given = batch(run, new, lens, mode)
        for row, n, rows in zip([2, 0, 1], lens, new, strict=True):
            places = run.req_to_token_pool.req_to_token[row, : max(n - rows - window, 0) // page_size * page_size].long()
            for pool in (run.token_to_kv_pool.swa_kv_pool.k, run.token_to_kv_pool.swa_kv_pool.v):
                pool[mapping[places]] = torch.nan
            mapping[places] = 0  # as SGLang's allocator does with what it frees
        if way == "eager":
            backend.init_forward_metadata(given)
        else:
            backend.init_forward_metadata_out_graph(given, in_capture=way == "capture")
        begins = [max(n - rows - window, 0) for n, rows in zip(lens, new, strict=True)]
        assert backend.forward_metadata.window_step.kv_begin.tolist() == begins  # a GPU would read keys before them
        f = backend.forward_decode if mode is decode else backend.forward_extend
        for one, history, kept in zip(layers, histories, (99, window), strict=True):
            q, k, v = (torch.randn(sum(new), n, DIM, generator=random).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
            for each, y in zip(history, (k, v), strict=True):
                each[:] = [torch.cat(x) for x in zip(each, y.split(new), strict=True)]
            o = f(*(x.to(device) for x in (q.flatten(1), k, v)), one, given)
            tolerance = 1e-5 if device == "cpu" else 2e-2
            torch.testing.assert_close(o.float().cpu(), expected(q, *history, new, kept), rtol=tolerance, atol=tolerance)


RANK, ROPE, SCALE = 512, 64, 576**-0.5  # columns of a latent row


def latent_runner(device: str, page_size: int) -> Any:
    run = runner(device, page_size)
    run.token_to_kv_pool = like.LatentPool(TOKENS, RANK + ROPE, RANK, device, run.kv_cache_dtype)
    run.use_mla_backend = True
    return run


@since(2, 5)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("parts", [False, True])
def test_latent_steps(parts: bool, page_size: int, make: Any, device: str) -> None:
    """MLA: queries and rows whole, or their columns apart; prompts from projected keys; steps eagerly and in graphs."""
    run = latent_runner(device, page_size)
    backend, random, dtype = make(run), torch.Generator().manual_seed(0), run.kv_cache_dtype
    one = layer(tp_k_head_num=1, qk_head_dim=RANK + ROPE, v_head_dim=RANK, scaling=SCALE)
    keys: list[Any] = [torch.empty(0, 1, RANK + ROPE, dtype=dtype)] * 3
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    backend.init_cuda_graph_state(4, 4)
    lens, extend, decode = [0, 0, 0], modes().EXTEND, modes().DECODE
    for new, mode, way in (
        ([5, 17, 1], extend, "eager"), ([1, 2, 9], modes().MIXED, "eager"), ([1, 1, 1], decode, "eager"),
        ([1, 1, 1], decode, "capture"), ([1, 1, 1], decode, "replay"),
    ):  # fmt: skip
        lens = [a + b for a, b in zip(lens, new, strict=True)]
        q, k = (torch.randn(sum(new), n, RANK + ROPE, generator=random).to(dtype) for n in (HEADS, 1))
        keys = [torch.cat(x) for x in zip(keys, k.split(new), strict=True)]
        given = batch(run, new, lens, mode)
        if way == "eager":
            backend.init_forward_metadata(given)
        else:
            backend.init_forward_metadata_out_graph(given, in_capture=way == "capture")
        f = backend.forward_decode if mode is decode else backend.forward_extend
        wanted = expected(q, keys, [x[..., :RANK] for x in keys], new, scale=SCALE)
        q, k = q.to(device), k.to(device)
        if parts:
            (q, q_rope), (k, k_rope) = (x.split((RANK, ROPE), -1) for x in (q, k))
            o = f(q, k, k, one, given, q_rope=q_rope, k_rope=k_rope)
        else:
            o = f(q.flatten(1), k, k[..., :RANK], one, given)
        torch.testing.assert_close(o.float().cpu(), wanted, **tolerance)


def test_whole_prompts_of_mla(make: Any) -> None:
    """Their keys are projected, and not read from the pool."""
    run = latent_runner("cpu", 1)
    backend, extend = make(run), modes().EXTEND
    given = batch(run, [5, 3], [5, 3], extend)
    given.extend_prefix_lens_cpu = [0, 0]
    backend.init_forward_metadata(given)
    q, k, v = torch.randn(8, HEADS, 24), torch.randn(8, HEADS, 24), torch.randn(8, HEADS, 16)
    prompts = layer(tp_k_head_num=HEADS, qk_head_dim=24, v_head_dim=16)
    before = run.token_to_kv_pool.kv.clone()
    o = backend.forward_extend(q, k, v, prompts, given, save_kv_cache=False)
    torch.testing.assert_close(o, expected(q, [*k.split([5, 3])], [*v.split([5, 3])], [5, 3]), rtol=1e-5, atol=1e-5)
    assert torch.equal(run.token_to_kv_pool.kv, before)
    given.extend_prefix_lens_cpu = [0, 2]
    with pytest.raises(UnsupportedError, match="extend_prefix_lens are not 0 beside projected keys"):
        backend.forward_extend(q, k, v, prompts, given, save_kv_cache=False)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_queries_in_two_parts_stay_so(page_size: int, parts: bool, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not joined, and GPUs have kernels for them."""
    run = latent_runner("cpu", page_size)
    run.token_to_kv_pool.kv = run.token_to_kv_pool.kv.bfloat16()
    backend, ops = make(run), asked.watch(monkeypatch, importlib.import_module(ADAPTER))
    one = layer(tp_k_head_num=1, qk_head_dim=RANK + ROPE, v_head_dim=RANK, scaling=SCALE)
    q = torch.randn(3, HEADS, RANK + ROPE).bfloat16()
    for f, new, mode in (
        (backend.forward_decode, [1, 1, 1], modes().DECODE), (backend.forward_extend, [1, 2], modes().EXTEND)
    ):  # fmt: skip
        given = batch(run, new, [5, 7, 9][: len(new)], mode)
        backend.init_forward_metadata(given)
        rope = {"q_rope": q[..., RANK:]} if parts else {}
        o = f(q[..., :RANK] if parts else q, None, None, one, given, **rope)
        assert o.shape == (3, HEADS * RANK)
    assert [op.q_rope for op in ops] == [parts, parts]
    assert [asked.kernels(op) for op in ops] == [["attn_fwd_mma", "attn_mla", "attn_fwd_mma"]] * 2


def test_latent_pools_that_are_refused(make: Any) -> None:
    for name, value, message in (
        ("use_dsa", True, "use_dsa is True"), ("dtype", torch.float8_e4m3fn, "kv_cache_dtype is torch.float8_e4m3fn; beside MLA")
    ):  # fmt: skip
        run = latent_runner("cpu", 1)
        setattr(run.token_to_kv_pool, name, value)
        with pytest.raises(UnsupportedError, match=message):
            make(run)


def test_the_latent_pool_is_of_sglangs_form() -> None:
    if not is_installed():
        pytest.skip("SGLang is not installed")
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    for name in ("set_kv_buffer", "set_mla_kv_buffer", "get_key_buffer", "get_value_buffer"):
        ours, theirs = (inspect.signature(getattr(x, name)).parameters for x in (like.LatentPool, pools.MLATokenToKVPool))
        assert [*theirs][: len(ours)] == [*ours]
    text = inspect.getsource(pools.MLATokenToKVPool.__init__)
    assert "self.kv_lora_rank = " in text and "self.use_dsa = " in text


def test_deterministic_inference(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = runner("cpu"), []
    given = batch(run, [1], [3], modes().DECODE)

    def attend(q: Any, *rest: Any, **options: Any) -> Any:
        found.append(options["invariant"])
        return q

    monkeypatch.setattr(importlib.import_module(ADAPTER), "attention_kvcache", attend)
    for wanted in (False, True):
        run.server_args.enable_deterministic_inference = wanted
        backend = make(run)
        backend.init_forward_metadata(given)
        backend.forward_decode(torch.randn(1, HEADS * DIM), None, None, layer(), given)
    assert found == [False, True]


def test_no_more_of_the_table_is_gathered_than_is_used(make: Any) -> None:
    """SGLang's table is as wide as the longest context."""
    run = runner("cpu")
    backend, asked = make(run), []

    class Table:
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return self if isinstance(index, tuple) else torch.zeros(len(index), 3, dtype=torch.int32)

    run.req_to_token_pool.req_to_token = Table()
    given = types.SimpleNamespace(seq_lens_cpu=torch.tensor([3, 1]), req_pool_indices=torch.tensor([0, 2]))
    backend._find_tokens(given, 2)
    assert asked[0] == (slice(None), slice(None, 3, 1)) and asked[1].tolist() == [0, 2]


def test_an_sglang_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang of another version starts without the backend, and one warning says so."""
    monkeypatch.setattr(rawattn_plugins, "_warned", set())
    for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    with pytest.warns(UserWarning, match="this SGLang has no registry"):
        rawattn_plugins.sglang()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rawattn_plugins.sglang()


def test_a_half_installed_sglang(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own module fails and is gone, and what that imported stays."""
    (tmp_path / "sglang/srt/layers").mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").write_text("import sglang.srt.layers\nimport a_module_that_is_missing")
    for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert not is_installed.__wrapped__()
    assert not [each for each in sys.modules if each.partition(".")[0] == "sglang"]


def test_refusals(make: Any) -> None:
    run = runner("cpu")
    backend, q = make(run), torch.randn(1, HEADS * DIM)
    given = batch(run, [1], [3], modes().DECODE)
    backend.init_forward_metadata(given)
    for more in ({"is_cross_attention": True}, {"attn_type": "encoder_only"}, {"xai_temperature_len": 4}):
        with pytest.raises(UnsupportedError, match=f"{next(iter(more))} is .*does not serve it in SGLang"):
            backend.forward_decode(q, None, None, layer(**more), given)
    with pytest.raises(UnsupportedError, match="logit_capping_method is 'other'"):
        backend.forward_decode(q, None, None, layer(logit_cap=3.0, logit_capping_method="other"), given)
    with pytest.raises(UnsupportedError, match="q_rope is a Tensor"):
        backend.forward_decode(q, None, None, layer(), given, q_rope=q)
    with pytest.raises(UnsupportedError, match="speculative decoding"):
        backend.init_forward_metadata(batch(run, [1], [3], modes().TARGET_VERIFY))
    with pytest.raises(UnsupportedError, match=r"a graph of .*EXTEND"):
        backend.init_forward_metadata_out_graph(batch(run, [1], [3], modes().EXTEND))
    run.token_to_kv_pool.k.zero_()
    sinks = backend.forward_decode(q, None, None, layer(), given, sinks=torch.full((HEADS,), 60.0))
    assert sinks.abs().max() < 1e-6
    pool = run.token_to_kv_pool
    run.token_to_kv_pool = type("UnifiedSWAKVPool", (), {})()
    with pytest.raises(UnsupportedError, match="the pool is a UnifiedSWAKVPool"):
        make(run)
    run.token_to_kv_pool = pool
    phase = types.SimpleNamespace(backend="full")
    run.server_args.cuda_graph_config = types.SimpleNamespace(prefill=phase)
    with pytest.raises(UnsupportedError, match="--cuda-graph-backend-prefill=breakable"):
        make(run)
    phase.backend = "breakable"
    assert make(run) is not None
    run.token_to_kv_pool = types.SimpleNamespace(swa_kv_pool=None, swa_req_ring_size=64)
    with pytest.raises(UnsupportedError, match="--disable-hybrid-swa-memory"):
        make(run)


def test_e4m3_on_an_older_gpu(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner("cpu")
    run.device, run.kv_cache_dtype = "cuda", torch.float8_e4m3fn
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(UnsupportedError, match="--kv-cache-dtype fp8_e5m2"):
        make(run)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert make(run) is not None


def test_the_contract(make: Any) -> None:
    """Methods take what SGLang's own class says, read in its source where it is installed."""
    adapter = importlib.import_module(ADAPTER)
    source = _source()
    for name in [each for each in vars(like.AttentionBackend) if each.startswith(("init_", "forward_d", "forward_e", "get_"))]:
        asked = [x for x in inspect.signature(getattr(like.AttentionBackend, name)).parameters if x != "kwargs"]
        assert [*inspect.signature(getattr(adapter.RawattnBackend, name)).parameters][: len(asked)] == asked
        if source:
            assert [x.arg for x in source[name].args.args][: len(asked)] == asked


def _source() -> dict[str, Any]:
    """The methods of SGLang's own base class, by name; empty where it is not installed."""
    for folder in map(pathlib.Path, sys.path):
        file = folder / "sglang/srt/layers/attention/base_attn_backend.py"
        if file.exists():
            (found,) = [x for x in ast.parse(file.read_text()).body if getattr(x, "name", "") == "AttentionBackend"]
            return {x.name: x for x in found.body if isinstance(x, ast.FunctionDef)}  # type: ignore[attr-defined]
    return {}


def test_entry_point() -> None:
    text = (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert re.search(r'\[project.entry-points."sglang.srt.plugins"\]\nrawattn = "rawattn_plugins:sglang"', text)

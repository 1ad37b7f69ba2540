"""The operators over caches that torch sees, on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import KVCache, ProblemError, Rotary, Step, reference
from tests.caches import Cached

torch = pytest.importorskip("torch")
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode
testing = pytest.importorskip("torch._dynamo.testing")
torch_serving = pytest.importorskip("rawattn.torch.caches")

ATTENTION, APPEND = torch.ops.rawattn.attention_kvcache.default, torch.ops.rawattn.append.default
CASE = Cached(((2, 9), (2, 5)), heads=4, kv_heads=2)
CAUSAL = '{"mask": {"class": "rawattn.variant.mask:Causal"}}'


def tensors(case: Cached = CASE) -> dict[str, Any]:
    cache, step = case.cache("torch"), case.step("torch")
    found = {"q": torch.from_numpy(case.rows(case.heads, 16, 1)), "k_cache": cache.k, "v_cache": cache.v}
    return found | {name: getattr(step, name) for name in step.arrays}


def new(case: Cached = CASE) -> dict[str, Any]:
    rows = {name: torch.from_numpy(case.rows(2, 16, seed)) for name, seed in (("k", 2), ("v", 3))}
    q = {"q": torch.from_numpy(case.rows(case.heads, 16, 1))}
    angles = {name: torch.from_numpy(case.normal(20, 8, seed=seed)) for name, seed in (("cos", 5), ("sin", 6))}
    return rows | angles | q


DENSE = dataclasses.replace(CASE, ragged=False, form="dense", page_size=12, layout="HND")
EIGHT = dataclasses.replace(CASE, dtype="fp16", kv_dtype="e4m3", whole=True)
OPCHECKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "table": (ATTENTION, {**tensors(), "spec": CAUSAL}),
    "dense": (ATTENTION, {**tensors(DENSE), "layout": "HND", "sinks": torch.zeros(4), "max_kv_len": 12}),
    "end to end": (ATTENTION, {**tensors(dataclasses.replace(CASE, form="indptr", pool="interleaved", causal=(0, 1)))}),
    "e4m3": (ATTENTION, {**tensors(EIGHT), "k_scales": torch.rand(2), "v_scale": 2.0, "spec": CAUSAL}),
    "append": (APPEND, {**tensors(), **new(), "q": None, "cos": None, "sin": None}),
    "append, rotated": (APPEND, {**tensors(DENSE), **new(DENSE), "layout": "HND"}),
    "append, slots": (APPEND, {**tensors(), **new(), "slots": torch.arange(4), "positions": torch.arange(4)}),
}  # fmt: skip


@pytest.mark.parametrize(("operator", "given"), OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck(operator: Any, given: dict[str, Any]) -> None:
    first = ("q", "k_cache", "v_cache") if operator is ATTENTION else ("k_cache", "v_cache", "k", "v")
    floats = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    given = given | {name: torch.nan_to_num(given[name].float()).to(given[name].dtype) for name in floats}
    args = tuple(given[name] for name in first)
    rest = {name: x for name, x in given.items() if name not in first and x is not None}
    asked = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    asked += ["test_schema"] * (given["k_cache"].itemsize > 1)  # which cannot compare numbers of eight bits
    assert set(torch.library.opcheck(operator, args, rest, test_utils=asked).values()) == {"SUCCESS"}


def test_values() -> None:
    given, cache, step = tensors(), CASE.cache("torch"), CASE.step("torch")
    o, lse = rawattn.attention_kvcache(given["q"], cache, step, return_lse=True)
    found = ATTENTION(**given, spec=CAUSAL)
    assert torch.equal(found[0], o) and torch.equal(found[1], lse)


EIGHT_POOLS = {name: x.to(torch.float8_e5m2) for name, x in tensors().items() if name.endswith("_cache")}
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "layout": (ATTENTION, {"layout": "DHN"}),
    "head_dim": (ATTENTION, {"q": torch.zeros(4, 4, 8)}),
    "rank": (ATTENTION, {"q": torch.zeros(2, 2, 4, 16)}),
    "lengths": (ATTENTION, {"kv_lens": torch.tensor([9, 5])}),
    "batch": (ATTENTION, {"page_table": torch.zeros(3, 4, dtype=torch.int32)}),
    "spec": (ATTENTION, {"spec": '{"casual": true}'}),
    "scales": (ATTENTION, {"k_scales": torch.ones(2)}),
    "scale": (ATTENTION, {"v_scale": 2.0}),
    "scales of others": (ATTENTION, {**EIGHT_POOLS, "v_scales": torch.ones(3, 2)}),
    "scales' dtype": (ATTENTION, {**EIGHT_POOLS, "v_scales": torch.ones(2, 2).double()}),
    "cast scales": (APPEND, {**EIGHT_POOLS, "k_scales": torch.ones(4)}),
    "rows": (APPEND, {"v": torch.zeros(4, 1, 16)}),
    "slots": (APPEND, {"slots": torch.zeros(4, dtype=torch.int32)}),
    "angles": (APPEND, {"sin": torch.zeros(20, 9)}),
    "no lengths": (APPEND, {"kv_lens": None, "page_table": None, "cu_seqlens_q": None}),
}


@pytest.mark.parametrize(("operator", "changes"), WRONG.values(), ids=WRONG)
def test_fake_kernels_refuse_as_the_real_ones_do(operator: Any, changes: dict[str, Any]) -> None:
    given = {**tensors(), **(new() if operator is APPEND else {}), **changes}
    with pytest.raises(ProblemError) as real:
        operator(**given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(ProblemError) as fake:
        operator(**{name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()})
    assert str(fake.value) == str(real.value)


@pytest.mark.parametrize("kv_dtype", ["", "e4m3"])
def test_a_compiled_step(kv_dtype: str) -> None:
    """One graph writes new keys and attends to them; what it writes is seen."""
    step, case = (
        CASE.step("torch"),
        dataclasses.replace(CASE, kv_dtype=kv_dtype, scales=("each", "number") if kv_dtype else ("", "")),
    )
    rows, angles = new(), Rotary(new()["cos"], new()["sin"])
    cache = case.made(*case.pools(), "torch")
    plain = case.made(*case.pools(), "torch")

    def layer(q: Any, k: Any, v: Any, cache: KVCache) -> Any:
        return rawattn.attention_append(2 * q, k, v, cache, step, rotary=angles, window=(6, 0), return_lse=True)

    for each in (cache, plain):
        for pool in (each.k, each.v):
            pool.copy_(pool.float().nan_to_num_())
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: layer(q, k, v, cache), backend=counter, fullgraph=True)
    found = compiled(rows["q"], rows["k"], rows["v"])
    wanted = layer(rows["q"], rows["k"], rows["v"], plain)
    assert counter.frame_count == 1
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(cache.k.float(), plain.k.float()) and torch.equal(cache.v.float(), plain.v.float())


def test_autocast_and_gradients() -> None:
    cache, step, rows = CASE.made(*CASE.pools(), "torch"), CASE.step("torch"), new()
    with torch.autocast("cpu", torch.bfloat16):
        assert rawattn.append(cache, step, rows["k"], rows["v"]) is None
    wanted = reference.append(CASE.made(*CASE.pools()), CASE.step(), rows["k"], rows["v"])
    np.testing.assert_array_equal(cache.k.numpy(), wanted[0])
    with pytest.raises(ProblemError, match="requires grad"):
        ATTENTION(**{**tensors(), "q": tensors()["q"].requires_grad_()})
    with pytest.raises(ProblemError, match="out was given where torch traces"), FakeTensorMode():
        rawattn.attention_kvcache(torch.empty(2, 2, 4, 16), cache, step, out=torch.empty(2))


def test_versions_of_the_cache() -> None:
    """autograd sees that the cache was written, whichever way it was."""
    cache, table, rows = CASE.made(*CASE.pools(), "torch"), tensors()["page_table"], new()
    kv_lens = torch.tensor([9, 5], dtype=torch.int32)
    k, v = (rows[name].unflatten(0, (2, 2)) for name in "kv")
    for write in (
        lambda: rawattn.append(cache, Step(kv_lens, table), k, v),
        lambda: APPEND(cache.k, cache.v, k, v, kv_lens, table),
    ):
        before = cache.k._version, cache.v._version
        write()
        assert cache.k._version > before[0] and cache.v._version > before[1]

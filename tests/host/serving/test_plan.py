"""Plans over caches, and what is recorded of calls over caches and compiled ahead."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ProblemError
from rawattn.array import making
from rawattn.compile import compiler
from rawattn.driver import counters
from rawattn.driver.device import TYPICAL
from rawattn.runtime import bound_call, call_cache, loaded_kernel
from rawattn.runtime.record import operations_of
from rawattn.runtime.select import select
from rawattn.serving import call as cache_call
from rawattn.serving import plan as planning
from rawattn.testing import _move
from tests.caches import Cached
from tests.decode import Decode
from tests.emulator.gpu import Launch, stand_in

CASE = Cached(((2, 30), (0, 5), (4, 0), (1, 1), (3, 17)), dtype="fp32", heads=4, kv_heads=2, sinks=True)
SMALL = Cached(
    ((2, 100), (0, 5), (4, 0), (1, 1)), page_size=16, dtype="bf16", heads=4, kv_heads=2, head_dim=32, head_dim_v=32, whole=True
)


def bits(found: Any) -> list[bytes]:
    return [np.asarray(x.double() if hasattr(x, "double") else x, np.float64).tobytes() for x in found]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_on_the_cpu(library: str) -> None:
    """One plan, another cache of the layer, and steps of other lengths."""
    if library == "torch":
        pytest.importorskip("torch")
    other = dataclasses.replace(CASE, seed=3, lengths=((1, 30), (3, 7), (1, 2), (5, 9), (0, 1)), layout="HND")
    pages = sum(CASE.counts())
    other = dataclasses.replace(other, lengths=(*other.lengths[:4], (0, 1 + 4 * (pages - sum(other.counts())))))
    assert sum(other.counts()) == pages
    plan: Any = None
    for case in (CASE, other, CASE):
        q, cache, sinks = (
            _move(case.rows(4, 16, 1), library, "cpu"),
            case.cache(library),
            _move(case.sink_logits(), library, "cpu"),
        )
        step = case.step(library)
        if plan is None:
            plan = rawattn.plan_kvcache(q, cache, step, sinks=sinks, return_lse=True)
        wanted = rawattn.attention_kvcache(q, cache, step, sinks=sinks, return_lse=True)
        found = plan.run(q, cache, step, sinks=sinks)
        assert bits(found) == bits(wanted)
        o, lse = (x * 0 for x in wanted)
        assert plan.run(q, cache, step, sinks=sinks, out=o, lse=lse)[0] is o and bits((o, lse)) == bits(wanted)
    eight = dataclasses.replace(CASE, kv_dtype="e4m3", scales=("number", "each"), sinks=False)
    plan = rawattn.plan_kvcache(q, eight.cache(library), eight.step(library))
    other = dataclasses.replace(eight, seed=9)
    assert eight.cache(library).scales != other.cache(library).scales
    wanted = rawattn.attention_kvcache(q, other.cache(library), other.step(library))
    assert bits([plan.run(q, other.cache(library), other.step(library))]) == bits([wanted])
    assert "kernel   cpu" in str(rawattn.explain_kvcache(q, cache, step))
    with pytest.raises(rawattn.UnsupportedError, match="no kernel computes AttentionKVCache"):
        rawattn.explain_kvcache(q, cache, step, kernel="attn_decode")
    assert plan.kernel == "cpu" and "AttentionKVCache" in repr(plan) and plan.violations() == ()


def test_functions() -> None:
    case = dataclasses.replace(CASE, sinks=False)
    q, cache, step, slopes = case.rows(4, 16, 1), case.cache(), case.step(), np.float32([0.5, 0.25, 0.1, 0.0])
    plan = rawattn.plan_kvcache(q, cache, step, score=lambda s, b, h, q, kv: s + slopes[h] * (kv - q))
    steep = 3 * slopes
    wanted = rawattn.attention_kvcache(q, cache, step, score=lambda s, b, h, q, kv: s + steep[h] * (kv - q))
    np.testing.assert_array_equal(plan.run(q, cache, step, steep), wanted)
    assert not np.array_equal(plan.run(q, cache, step, slopes), wanted)
    with pytest.raises(ProblemError, match="0 captured arrays were given; the functions among the options captured 1"):
        plan.run(q, cache, step)
    plan = rawattn.plan_kvcache(q, cache, step, alibi=slopes, softcap=3.0)
    wanted = rawattn.attention_kvcache(q, cache, step, alibi=steep, softcap=3.0)
    np.testing.assert_array_equal(plan.run(q, cache, step, steep), wanted)
    assert not np.array_equal(plan.run(q, cache, step, slopes), wanted)


def _longer(case: Cached) -> Cached:
    return dataclasses.replace(case, lengths=(*case.lengths, (1, 1)))


REFUSED: dict[str, tuple[Any, str]] = {
    "q": (lambda q, cache, step: (q[:-1], cache, step), "q is a numpy fp32 array of shape (9, 4, 16)"),
    "batch": (lambda q, cache, step: (q, cache, _longer(CASE).step()), "kv_lens is .* of shape \\(6,\\)"),
    "begins": (lambda q, cache, step: (q, cache, CASE.step(kv_begin=step.kv_lens * 0)), "kv_begin was given"),
    "bound": (lambda q, cache, step: (q, cache, CASE.step(max_q_len=4)), "max_q_len of the step gives 4, and this plan was"),
    "causal": (lambda q, cache, step: (q, cache, CASE.step(causal=False)), "causal of the step gives Full"),
    "form": (lambda q, cache, step: (q, cache, dataclasses.replace(CASE, form="indptr").step()), "kv_lens is missing"),
    "cache": (lambda q, cache, step: (q, CASE, step), "cache is a Cached; it must be a rawattn.KVCache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arrays_are_refused(name: str) -> None:
    q, cache, step = CASE.rows(4, 16, 1), CASE.cache(), CASE.step()
    plan = rawattn.plan_kvcache(q, cache, step)
    change, message = REFUSED[name]
    with pytest.raises(ProblemError, match=message if "\\" in message else message.replace("(", r"\(").replace(")", r"\)")):
        plan.run(*change(q, cache, step))
    with pytest.raises(ProblemError, match="lse was given without return_lse"):
        plan.run(q, cache, step, lse=q)
    with pytest.raises(TypeError, match="holds kernels"):
        json.loads(str(plan.__reduce__()))


def compilations(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, launched: list[Any]) -> list[str]:
    """The kernels that are compiled from now on, on a GPU that computes nothing, and notes what is ``launched``."""
    load, found = loaded_kernel.load, list[str]()
    stand_in(monkeypatch, folder)

    class Noted(Launch):
        def __call__(self) -> None:
            launched.append((self.kernel, self.grid, self.args, self.stream))

    def together(source: Any, others: Any, on_compile: Any) -> compiler.Binary:
        found.extend({source.key, *[each.key for each in others]} - set(found))
        return compiler.Binary(source.key.encode(), "", "", 0.0, "memory", source.key)

    for owner, name, value in (
        (loaded_kernel, "load", load), (loaded_kernel, "_kernels", {}), (compiler, "compile_together", together),
        (loaded_kernel, "LoadedFunction", lambda cubin, *_: cubin), (bound_call, "BoundLaunch", Noted),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    return found


def test_on_a_gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked up if arrays lie as others did, neither an operation nor a kernel, by plans and by calls; what is
    launched is the same."""
    torch, launched = pytest.importorskip("torch"), list[Any]()
    compiled, scratch = compilations(monkeypatch, tmp_path, launched), torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: scratch)
    q, cache, step = _move(SMALL.rows(4, 32, 1), "torch", "cpu"), SMALL.cache("torch"), SMALL.step("torch", max_q_len=4)
    plan = rawattn.plan_kvcache(q, cache, step, return_lse=True)
    results = plan.run(q, cache, step)
    given = [(q, cache, step), (q.clone(), SMALL.cache("torch"), SMALL.step("torch", max_q_len=4))]
    wanted, count = list[Any](), len(compiled)
    for each in given:
        monkeypatch.setattr(call_cache, "_calls", {})
        launched.clear()
        rawattn.attention_kvcache(*each, return_lse=True, out=results[0], lse=results[1])
        wanted += launched
    plan.run(q, cache, step, out=results[0], lse=results[1])
    with monkeypatch.context() as patch:
        for owner, name in ((planning, "attention_of"), (cache_call, "select")):
            patch.setattr(owner, name, None)
        launched.clear()
        for each in given:
            plan.run(*each, out=results[0], lse=results[1])
        assert launched == wanted and wanted[0] != wanted[1]
        launched.clear()
        third = (q, cache, SMALL.step("torch", max_q_len=4))
        rawattn.attention_kvcache(*third, return_lse=True, out=results[0], lse=results[1])
        plan.run(*third, out=results[0], lse=results[1])
        assert launched[0] == launched[1] not in wanted
    assert plan.kernel == "attn_decode" and len(compiled) == count == len(plan.binaries)
    monkeypatch.setattr(counters, "take_violations", lambda index: 1 | 4 if index == plan.device.index else 0)
    assert [said.partition(":")[0] for said in plan.violations()] == ["kv_len", "page"]
    with pytest.raises(ProblemError, match="q has an address or a stride that is no multiple of 16 bytes"):
        plan.run(torch.zeros(1 + q.numel(), dtype=q.dtype)[1:].view(q.shape), cache, step)


@pytest.mark.parametrize("causal", [True, (1, 0, 1, 1)])
def test_functions_on_a_gpu(causal: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured arrays that lie elsewhere need no look-up; the kernel gets them, and what the step says of its sequences."""
    torch, launched = pytest.importorskip("torch"), list[Any]()
    compilations(monkeypatch, tmp_path, launched)
    scratch = torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: scratch)
    monkeypatch.setattr(compiler, "compile", lambda source: compiler.Binary(b"", "", "", 0.0, "memory", source.key))
    case = dataclasses.replace(SMALL, causal=causal)
    q, cache, step = _move(case.rows(4, 32, 1), "torch", "cpu"), case.cache("torch"), case.step("torch", max_q_len=4)
    ids, slopes, out = torch.zeros(4, 512, dtype=torch.int32), torch.zeros(4), torch.empty_like(q)

    def options(ids: Any, slopes: Any) -> dict[str, Any]:
        return {"mask": lambda b, q, kv: ids[b, q] == ids[b, kv], "score": lambda s, h, q, kv: s + slopes[h] * (kv - q)}

    plan = rawattn.plan_kvcache(q, cache, step, **options(ids, slopes))
    plan.run(q, cache, step, ids, slopes, out=out)
    moved = ids.clone(), slopes.clone()
    with monkeypatch.context() as patch:
        patch.setattr(planning, "attention_of", None)
        launched.clear()
        for captured in ((ids, slopes), moved):
            plan.run(q, cache, step, *captured, out=out)
    found = [*launched]
    launched.clear()
    for each in ((ids, slopes), moved):
        rawattn.attention_kvcache(q, cache, step, **options(*each), out=out)
    assert found == launched and found[0] != found[-1]


def test_a_cache_that_requires_grad(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by calls that were kept before it did, and not where autograd is off."""
    torch = pytest.importorskip("torch")
    compilations(monkeypatch, tmp_path, [])
    scratch = torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: scratch)
    q, new = (_move(SMALL.rows(heads, 32, 1), "torch", "cpu") for heads in (4, 2))
    eight, step = dataclasses.replace(SMALL, kv_dtype="e4m3", scales=("each", "each")), SMALL.step("torch", max_q_len=4)
    rotary = rawattn.Rotary(torch.zeros(4096, 16), torch.ones(4096, 16))
    for cache, names in ((SMALL.cache("torch"), ("k", "v")), (eight.cache("torch"), ("k_scale", "v_scale"))):
        plan = rawattn.plan_kvcache(q, cache, step)
        calls = [lambda p=plan, c=cache: p.run(q, c, step), lambda c=cache: rawattn.attention_kvcache(q, c, step)]
        calls.append(lambda c=cache: rawattn.append(c, step, new, new, rotary=rotary))
        for call in calls:
            call()
        followed = [(getattr(cache, name), calls) for name in names] + [(x, calls[2:]) for x in (rotary.cos, rotary.sin)]
        for x, own in followed:
            x.requires_grad_()
            for call in own:
                with pytest.raises(ProblemError, match="requires grad"):
                    call()
                with torch.no_grad():
                    call()
            x.requires_grad_(False)


def test_arrays_for_other_kernels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of two kernels is not run on arrays that one of them cannot read; nor does it compile another for those that it can
    read, where others might be faster."""
    torch = pytest.importorskip("torch")
    compiled, scratch = compilations(monkeypatch, tmp_path, []), torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: scratch)
    case = dataclasses.replace(SMALL, kv_dtype="e4m3", scales=("number", "number"), lengths=((150, 200), (1, 20)))
    q, step = _move(case.rows(4, 32, 1), "torch", "cpu"), case.step("torch", max_q_len=150)
    caches = [dataclasses.replace(case, seed=seed).cache("torch") for seed in (0, 1)]
    spread = q[:1].expand_as(q)  # TMA does not read rows that lie in one place
    of_spread, out = rawattn.plan_kvcache(spread, caches[0], step, invariant=True), torch.empty_like(q)
    count = len(compiled)
    for x, cache in itertools.product((spread, q), caches):
        of_spread.run(x, cache, step, out=out)
    assert len(compiled) == count
    plan = rawattn.plan_kvcache(q, caches[0], step, invariant=True)
    assert plan.kernel == "attn_decode+attn_fwd_mma" and plan.binaries[0].key != of_spread.binaries[0].key
    for cache in caches:
        plan.run(q, cache, step, out=out)
        with pytest.raises(ProblemError, match=r"q has a row stride of 0 bytes.* make another plan, by rawattn\.plan_kvcache"):
            plan.run(spread, cache, step, out=out)


def test_scales_of_a_layer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that differ from layer to layer are values of the launch."""
    torch, launched = pytest.importorskip("torch"), list[Any]()
    compilations(monkeypatch, tmp_path, launched)
    scratch = torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: scratch)
    case = dataclasses.replace(SMALL, kv_dtype="e4m3", scales=("number", "number"))
    q, step, caches = _move(case.rows(4, 32, 1), "torch", "cpu"), case.step("torch"), []
    for seed in (0, 1, 2):
        caches.append(dataclasses.replace(case, seed=seed).cache("torch"))
    plan, out = rawattn.plan_kvcache(q, caches[0], step), torch.empty_like(q)
    for cache in (*caches, *caches):
        launched.clear()
        rawattn.attention_kvcache(q, cache, step, out=out)
        plan.run(q, cache, step, out=out)
        assert len(launched) == 2 and launched[0] == launched[1]


def serve(cases: list[Cached]) -> None:
    """Calls over caches: new keys with rotation, attention, and two results that are merged."""
    torch = pytest.importorskip("torch")
    for case in cases:
        cos = torch.zeros(4096, 16)
        q, k, v = (_move(case.rows(heads, 32, 1), "torch", "cpu") for heads in (4, 2, 2))
        step = case.step("torch", max_q_len=max(n for n, _ in case.lengths))
        cache, rotary = case.cache("torch"), rawattn.Rotary(cos, cos)
        part = rawattn.attention_append(q, k, v, cache, step, rotary=rotary, return_lse=True)
        rawattn.merge_states([part, part])


def test_nothing_compiles_after_a_warm_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process compiles ahead what another one recorded: then steps of other sizes compile nothing."""
    log = tmp_path / "operations.jsonl"
    few, many = SMALL, dataclasses.replace(SMALL, lengths=((300, 400), (1, 2)))
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    compiled = compilations(monkeypatch, tmp_path, [])
    monkeypatch.setattr(call_cache, "_calls", {})
    serve([few, many])
    recorded, lines = [*compiled], log.read_text().splitlines()
    assert len(recorded) >= 4, "attn_decode, attn_fwd, append, combine"
    others = [dataclasses.replace(case, lengths=(*case.lengths, *case.lengths[:1] * n)) for case in (few, many) for n in (1, 2)]
    serve(others)
    assert log.read_text().splitlines() == lines, "lengths of a step make no new line"
    monkeypatch.delenv("RAWATTN_LOG")
    operations = operations_of(log)
    assert {type(op).__name__ for op in operations} == {"AttentionKVCache", "Append", "Combine"}
    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setattr(loaded_kernel, "_kernels", {})
    compiled.clear()
    assert rawattn.warm_up(log) == len(operations)
    warm = [*compiled]
    serve([few, many, *others])
    assert compiled == warm and set(recorded) <= set(warm)


def test_a_bundle_takes_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded on the CPU, too: one line for each kind."""
    log, made = tmp_path / "operations.jsonl", set[str]()
    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    case = dataclasses.replace(SMALL, lengths=((1, 20),))
    for lengths in (((1, 20),), ((1, 9), (1, 20)), ((1, 3),) * 3):
        serve([dataclasses.replace(case, lengths=lengths)])
    assert len(operations_of(log)) == 3, "attention, append, combine"
    compile_ = lambda source, on_compile: made.add(source.name) or compiler.Binary(b"", "", "", 0.0, "", source.key)  # noqa: E731
    monkeypatch.setattr(rawattn.runtime.bundle.compiler, "compile", compile_)
    assert rawattn.save_bundle(log, tmp_path / "kernels.zip", ["sm_90a"]) >= 3
    assert {name.partition(".")[0] for name in made} >= {"attn_decode", "append", "combine"}, made


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_the_log_has_all_that_need_other_kernels(arch: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds on rows in any order: what is recorded compiles what every one of them launches, and most record nothing."""
    monkeypatch.setenv("RAWATTN_LOG", str(log := tmp_path / "operations.jsonl"))
    device, needed = TYPICAL[arch], set[str]()
    sources = lambda programs: {launch.source.key for program in programs for launch in program.launches}  # noqa: E731
    lengths = (1, 2, 100, 128, 70, 65, 200, 129, 255)
    for q_len in lengths:
        op = Decode(batch=4, q_len=q_len, page=4).operation
        cache_call.log(op)
        selection = select(op, device)
        needed |= sources([selection.kernel.lower(op, selection.config, device)])
    recorded = operations_of(log)
    assert needed <= sources(program for op in recorded for program in select(op, device).programs(op, device))
    assert len(recorded) < len(lengths)

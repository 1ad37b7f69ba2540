"""Calls over caches are kept by how arrays lie. A kept call launches, byte for byte, what one that nothing was kept for launches,
or raises as it would there: no address, size or device of an earlier call is left in it. torch tensors on the CPU, and a stand-in
for CuPy's arrays, are those of a GPU here; a launch is written down instead of issued."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pathlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ProblemError
from rawattn.array import conversion, making
from rawattn.runtime import call_cache
from tests.host.serving.test_plan import compilations

torch = pytest.importorskip("torch")

LAUNCHED: list[Any] = []
BATCH, PAGES = 4, 32


@pytest.fixture(autouse=True)
def gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compilations(monkeypatch, tmp_path, LAUNCHED)
    scratch = torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: scratch)
    monkeypatch.setattr(making, "_make_on_cupy", lambda device, shape, dtype: Cupy(np.empty(shape, dtype)))
    forget()
    LAUNCHED.clear()
    yield
    forget()


def forget() -> None:
    call_cache._calls.clear()


class Cupy:
    """An array of CuPy as far as ``arrays`` asks."""

    def __init__(self, of: Any) -> None:
        self.of, self.shape, self.strides, self.dtype = of, of.shape, of.strides, of.dtype
        self.data, self.device = types.SimpleNamespace(ptr=of.ctypes.data), types.SimpleNamespace(id=-1)


def ints(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


def rows(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.bfloat16)


Q, OUT, LENS, TABLE = rows(BATCH, 1, 4, 64), rows(BATCH, 1, 4, 64), ints(BATCH), ints(BATCH, 8)
POOL = rows(2, PAGES, 16, 2, 64)
HEADS_FIRST = POOL.view(2, PAGES, 2, 16, 64)
CACHE = rawattn.KVCache(*POOL)
NEW = rows(2, BATCH, 1, 2, 64)
MANY = rows(3, BATCH, 300, 4, 64)


def variations() -> dict[str, tuple[Any, Any, Any, dict[str, Any]]]:
    """q, a cache, a step and options; most are in the same memory as others."""
    lens, table, begins = LENS.clone(), TABLE.clone(), ints(BATCH)
    small = {"out": OUT[:2]}
    return {
        "first": (Q, CACHE, rawattn.Step(LENS, TABLE), {}),
        "a new step on the same arrays": (Q, CACHE, rawattn.Step(LENS, TABLE), {}),
        "other lengths": (Q, CACHE, rawattn.Step(lens, TABLE), {}),
        "another table": (Q, CACHE, rawattn.Step(LENS, table), {}),
        "fewer sequences in the same memory": (Q[:2], CACHE, rawattn.Step(LENS[:2], TABLE[:2]), small),
        "narrower tables in the same memory": (Q, CACHE, rawattn.Step(LENS, TABLE.view(-1)[:16].view(BATCH, 4)), {}),
        "a bound": (Q, CACHE, rawattn.Step(LENS, TABLE, max_kv_len=100), {}),
        "another bound": (Q, CACHE, rawattn.Step(LENS, TABLE, max_kv_len=101), {}),
        "not causal": (Q, CACHE, rawattn.Step(LENS, TABLE, causal=False), {}),
        "causal for some": (Q, CACHE, rawattn.Step(LENS, TABLE, causal=begins), {}),
        "first keys": (Q, CACHE, rawattn.Step(LENS, TABLE, kv_begin=begins), {}),
        "first keys where lengths are": (Q, CACHE, rawattn.Step(lens, TABLE, kv_begin=LENS), {}),
        "ragged": (Q.view(BATCH, 4, 64), CACHE, rawattn.Step(LENS, TABLE, ints(BATCH + 1)), {"out": OUT.view(BATCH, 4, 64)}),
        "end to end": (Q, CACHE, rawattn.Step.from_indptr(ints(BATCH + 1), TABLE.view(-1), LENS), {}),
        "another q": (Q.clone(), CACHE, rawattn.Step(LENS, TABLE), {}),
        "another cache": (Q, rawattn.KVCache(*POOL.clone()), rawattn.Step(LENS, TABLE), {}),
        "k and v the other way round": (Q, rawattn.KVCache(POOL[1], POOL[0]), rawattn.Step(LENS, TABLE), {}),
        "heads first in the same memory": (Q, rawattn.KVCache(*HEADS_FIRST, "HND"), rawattn.Step(LENS, TABLE), {}),
        "fewer pages": (Q, rawattn.KVCache(*POOL[:, :8]), rawattn.Step(LENS, TABLE), {}),
        "fp16 in the same memory": (
            Q.view(torch.float16), rawattn.KVCache(*POOL.view(torch.float16)), rawattn.Step(LENS, TABLE),
            {"out": OUT.view(torch.float16)},
        ),
        "a window": (Q, CACHE, rawattn.Step(LENS, TABLE), {"window": (64, 0)}),
        "sinks": (Q, CACHE, rawattn.Step(LENS, TABLE), {"sinks": torch.zeros(4)}),
        "other sinks": (Q, CACHE, rawattn.Step(LENS, TABLE), {"sinks": torch.zeros(4)}),
        "another out": (Q, CACHE, rawattn.Step(LENS, TABLE), {"out": OUT.clone()}),
        "many rows, by tensor maps": (MANY[0], CACHE, rawattn.Step(LENS, TABLE), {"out": MANY[1]}),
        "many rows elsewhere": (MANY[2], CACHE, rawattn.Step(LENS, TABLE), {"out": MANY[1]}),
        "many rows over other lengths": (MANY[2], CACHE, rawattn.Step(lens, TABLE), {"out": MANY[1]}),
        "many rows of fewer sequences": (MANY[0, :2], CACHE, rawattn.Step(LENS[:2], TABLE[:2]), {"out": MANY[1, :2]}),
    }  # fmt: skip


OF_ONE_PLAN = (
    "first", "a new step on the same arrays", "other lengths", "another table", "another q", "another cache",
    "k and v the other way round", "another out",
)  # fmt: skip


def of_cupy(q: Any, cache: Any, step: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The same in CuPy's arrays, in the same memory."""

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        whole = (
            x.view(torch.int16).numpy().view("bfloat16" if x.dtype == torch.bfloat16 else np.float16)
            if x.itemsize == 2
            else x.numpy()
        )
        return Cupy(whole)

    fields = {field.name: moved(getattr(step, field.name)) for field in dataclasses.fields(step) if field.init}
    return (
        moved(q),
        rawattn.KVCache(moved(cache.k), moved(cache.v), cache.layout),
        rawattn.Step(**fields),
        {k: moved(x) for k, x in options.items()},
    )


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_kept_call_launches_what_a_new_one_does(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [(*call[:3], {"out": OUT} | call[3]) for call in variations().values()]
    if library == "cupy":
        stream = types.SimpleNamespace(get_current_stream=lambda device: types.SimpleNamespace(ptr=0))
        monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Cupy, cuda=stream))
        given = [of_cupy(*call) for call in given]

    def launches(run: Callable[..., Any], call: Any) -> list[Any]:
        LAUNCHED.clear()
        run(*call[:3], **call[3])
        return [*LAUNCHED]

    cold = []
    for call in given:
        forget()
        cold.append(launches(rawattn.attention_kvcache, call))
    assert len({str(x) for x in cold}) == len(given) - 1, "only a new step on the same arrays is the same call"
    forget()
    for _ in range(2):
        for call, wanted in (*zip(given, cold, strict=True), *zip(given[::-1], cold[::-1], strict=True)):
            assert launches(rawattn.attention_kvcache, call) == wanted
    first = given[0]
    plan = rawattn.plan_kvcache(*first[:3])
    for _ in range(2):
        for name, call, wanted in zip(variations(), given, cold, strict=True):
            if name in OF_ONE_PLAN:
                assert launches(plan.run, call) == wanted


def test_results_are_of_the_callers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library that q came from: when a call is made, and when it is found."""
    stream = types.SimpleNamespace(get_current_stream=lambda device: types.SimpleNamespace(ptr=0))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Cupy, cuda=stream))
    monkeypatch.setattr(conversion, "to_library", lambda result, original: original)
    q, cache, step, _ = of_cupy(*variations()["first"])
    assert [rawattn.attention_kvcache(q, cache, step) for _ in range(2)] == [q, q]


def test_made_results_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are made come to new places, on any stream, and nothing else of the launch changes."""
    stream, kept = [0], []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0])
    place = {}
    for stream[0] in (0, 7, 0, 7):
        for lens in (LENS, LENS.clone()):
            kept += [rawattn.attention_kvcache(Q, CACHE, rawattn.Step(lens, TABLE)), lens]
            *_, args, on = LAUNCHED[-1]
            at = {name: args.find(x.data_ptr().to_bytes(8, "little")) for name, x in (("o", kept[-2]), ("lens", lens))}
            place.setdefault("at", at)
            assert on == stream[0] and min(at.values()) >= 0 and place["at"] == at
            rest = bytearray(args)
            for begin in at.values():
                rest[begin : begin + 8] = bytes(8)
            assert place.setdefault("rest", rest) == rest


def test_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses may be the same on two devices."""
    step = rawattn.Step(LENS, TABLE)
    rawattn.attention_kvcache(Q, CACHE, step)
    devices = [call._device for call in dict.fromkeys(call_cache._calls.values())]
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 1)
    with pytest.raises(ProblemError, match=r"k.* is on the CPU but .*q.* is on GPU 1"):
        rawattn.attention_kvcache(Q, CACHE, step)
    there = rawattn.KVCache(*POOL)
    with pytest.raises(ProblemError, match="kv_lens is on the CPU"):
        rawattn.attention_kvcache(Q, there, step)
    rawattn.attention_kvcache(Q, there, rawattn.Step(LENS, TABLE))
    assert [call._device for call in dict.fromkeys(call_cache._calls.values())] == [*devices, 1] and devices == [-1]
    with pytest.raises(ProblemError, match="kv_lens is on the CPU"):
        rawattn.attention_kvcache(Q, there, step)


def test_another_dtype() -> None:
    step = rawattn.Step(LENS, TABLE)
    rawattn.attention_kvcache(Q, CACHE, step)
    with pytest.raises(ProblemError, match="fp16"):
        rawattn.attention_kvcache(Q.view(torch.float16), CACHE, step)
    with pytest.raises(ProblemError, match="it must be int32"):
        rawattn.Step(LENS.view(torch.int64), TABLE)


MOVES: dict[str, Callable[[Any], Any]] = {
    "freed": lambda x: x.untyped_storage().resize_(0),
    "replaced": lambda x: setattr(x, "data", x.clone()),
    "resized": lambda x: x.resize_(1 << 18),
}


@pytest.mark.parametrize("how", MOVES)
def test_memory_that_went_away(how: str) -> None:
    """Torch can give a tensor other memory. The objects that hold it say so, and nothing is launched."""
    pools, new, angles = [rows(PAGES, 16, 2, 64) for _ in range(2)], NEW.clone(), [torch.zeros(64, 16) for _ in range(2)]
    lens, table = LENS.clone(), TABLE.clone()
    cache, step, rotary = rawattn.KVCache(*pools), rawattn.Step(lens, table), rawattn.Rotary(*angles)
    plan = rawattn.plan_kvcache(Q, cache, step)
    calls = [lambda: plan.run(Q, cache, step), lambda: rawattn.attention_kvcache(Q, cache, step)]
    calls.append(lambda: rawattn.append(cache, step, *new, rotary=rotary, q=Q))
    for call in (*calls, *calls):
        call()
    LAUNCHED.clear()
    for name, owner, x, own in (
        ("cos", "Rotary", angles[0], calls[2:]), ("page_table", "Step", table, calls), ("v", "KVCache", pools[1], calls),
    ):  # fmt: skip
        MOVES[how](x)
        for call in own:
            with pytest.raises(ProblemError, match=f"^{name} has other memory than it had when the {owner} was made"):
                call()
    assert not LAUNCHED


@pytest.mark.parametrize("is_kept", [False, True], ids=["freed", "shrunk"])
def test_views_whose_memory_went_away(is_kept: bool) -> None:
    """The address of a view in a freed storage is its offset, which is aligned as that of any other."""
    step, sinks = rawattn.Step(LENS, TABLE), torch.zeros(4)
    views = {"q": torch.zeros(2, *Q.shape).bfloat16(), "sinks": torch.zeros(2, 4), "k": torch.zeros(2, *NEW[0].shape).bfloat16()}
    plan = rawattn.plan_kvcache(Q, CACHE, step, sinks=sinks)
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "q": [
            lambda x: rawattn.attention_kvcache(x, CACHE, step, sinks=sinks),
            lambda x: plan.run(x, CACHE, step, sinks=sinks),
        ],
        "sinks": [lambda x: rawattn.attention_kvcache(Q, CACHE, step, sinks=x), lambda x: plan.run(Q, CACHE, step, sinks=x)],
        "k": [lambda x: rawattn.append(CACHE, step, x, NEW[1])],
    }
    for name, good in (("q", Q.clone()), ("sinks", sinks), ("k", NEW[0].clone())):
        for call in calls[name]:
            call(good)
    LAUNCHED.clear()
    last = {name: x[1] for name, x in views.items()}
    for name, x in views.items():
        x.untyped_storage().resize_(x.nbytes // 4 * 3 * is_kept)
        for call in calls[name]:
            with pytest.raises(ProblemError, match=f"^{name} is a"):
                call(last[name])
    assert not LAUNCHED


def test_copies() -> None:
    """A copy with other tensors is read anew."""
    for again in (copy.deepcopy(CACHE), dataclasses.replace(CACHE, k=POOL[0].clone())):
        rawattn.attention_kvcache(Q, again, rawattn.Step(LENS, TABLE))
        assert again.held.addresses[0] == again.k.data_ptr() != CACHE.held.addresses[0]


def test_what_is_appended_lies_apart_from_the_cache() -> None:
    """Rows that lie as those of a call before, but in the cache, or in a q that is rotated in place."""
    step, rotary, q = rawattn.Step(LENS, TABLE), rawattn.Rotary(*torch.zeros(2, 64, 16)), Q.clone()
    for k, v in (NEW, NEW.clone()):
        rawattn.append(CACHE, step, k, v)
        rawattn.append(CACHE, step, k, v, rotary=rotary, q=q, q_out=q)
    assert len(set(call_cache._calls.values())) == 2
    LAUNCHED.clear()
    inside = POOL[0].view(-1)[: NEW[0].numel()].view(NEW[0].shape)
    with pytest.raises(ProblemError, match="v overlaps the cache's k in memory"):
        rawattn.append(CACHE, step, NEW[0], inside)
    with pytest.raises(ProblemError, match="q overlaps the cache's k in memory"):
        rawattn.append(CACHE, step, *NEW, rotary=rotary, q=(x := POOL[0].view(-1)[: q.numel()].view(q.shape)), q_out=x)
    with pytest.raises(ProblemError, match="q_out overlaps k in memory"):
        rawattn.append(CACHE, step, q.view(-1)[: NEW[0].numel()].view(NEW[0].shape), NEW[1], rotary=rotary, q=q, q_out=q)
    with pytest.raises(ProblemError, match="q_out overlaps cos in memory"):
        angles = q.view(-1)[:512].view(torch.float32).view(16, 16), torch.zeros(16, 16)
        rawattn.append(CACHE, step, *NEW, rotary=rawattn.Rotary(*torch.zeros(2, 16, 16)), q=Q, q_out=Q)
        LAUNCHED.clear()
        rawattn.append(CACHE, step, *NEW, rotary=rawattn.Rotary(*angles), q=q, q_out=q)
    assert not LAUNCHED
    between = rows(PAGES, 16, 2, 3 * 64)  # k and v of a cache, and rows to append between them
    cache = rawattn.KVCache(between[..., :64], between[..., 64:128])
    new = between.view(-1, 2, 192)[:BATCH, None, :, 128:]
    for _ in range(2):
        rawattn.append(cache, step, new, NEW[1].as_strided(new.shape, NEW[1].stride()))
    assert len(LAUNCHED) == 2


def test_options_of_other_types_are_wrong_when_warm() -> None:
    step = rawattn.Step(LENS, TABLE)
    for wrong, right in (
        ({"window": (64.0, 0)}, {"window": (64, 0)}),
        ({"return_lse": 1}, {"return_lse": True}),
        ({"split": 64.0}, {"split": 64}),
    ):
        rawattn.attention_kvcache(Q, CACHE, step, **right)
        with pytest.raises(ProblemError, match=next(iter(wrong))):
            rawattn.attention_kvcache(Q, CACHE, step, **wrong)
    assert rawattn.attention_kvcache(Q, CACHE, step, window=[64, 0]).shape == Q.shape


def over_a_cache() -> dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Gives q, pools, what an adapter is given of a step (lengths, rows, first keys, pages), and options; most share memory."""
    lens, window = LENS.clone(), {"window_size": (64, 0)}
    few = (LENS[:2], None, None, TABLE[:2])
    return {
        "first": (Q, POOL, (LENS, None, None, TABLE), {}),
        "other lengths": (Q, POOL, (lens, None, None, TABLE), {}),
        "causal": (Q, POOL, (LENS, None, None, TABLE), {"causal": True}),
        "a window": (Q, POOL, (LENS, None, None, TABLE), window),
        "softcap": (Q, POOL, (LENS, None, None, TABLE), {"softcap": 30.0}),
        "lse": (Q, POOL, (LENS, None, None, TABLE), {"return_softmax_lse": True}),
        "first keys": (Q, POOL, (LENS, None, lens, TABLE), {}),
        "the other way round": (Q, POOL, (lens, None, LENS, TABLE), {}),
        "fewer sequences": (Q[:2], POOL, few, {}),
        "fewer pages": (Q, POOL[:, :8], (LENS, None, None, TABLE), {}),
        "other pools": (Q, POOL.clone(), (LENS, None, None, TABLE), {}),
        "v first": (Q, POOL.flip(0), (LENS, None, None, TABLE), {}),
        "fp16": (Q.view(torch.float16), POOL.view(torch.float16), (LENS, None, None, TABLE), {}),
        "dense": (Q, POOL[:, :BATCH], (LENS, None, None, None), {}),
        "rows": (Q, POOL, (LENS, lens, None, None), {}),
        "many rows": (MANY[0], POOL, (LENS, None, None, TABLE), {}),
        "many rows elsewhere": (MANY[2], POOL, (lens, None, None, TABLE), {}),
    }


def appended() -> dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Gives the same with new rows among the options."""
    lens, some = LENS.clone(), (LENS, None, None, TABLE)
    new, turned = {"k": NEW[0], "v": NEW[1]}, {"rotary_cos": torch.zeros(64, 16), "rotary_sin": torch.zeros(64, 16)}
    turned |= new | {"causal": True}
    many = dict(zip("kv", rows(2, BATCH, 300, 2, 64), strict=True))
    return {
        "first": (Q, POOL, some, new),
        "other rows": (Q, POOL, some, new | {"k": NEW[0].clone()}),
        "other lengths": (Q, POOL, (lens, None, None, TABLE), new),
        "the other way round": (Q, POOL, some, {"k": NEW[1], "v": NEW[0]}),
        "causal": (Q, POOL, some, new | {"causal": True}),
        "a window": (Q, POOL, some, new | {"window_size": (64, 0)}),
        "first keys": (Q, POOL, (LENS, None, lens, TABLE), new),
        "fewer sequences": (Q[:2], POOL, (LENS[:2], None, None, TABLE[:2]), {"k": NEW[0, :2], "v": NEW[1, :2]}),
        "other pools": (Q, POOL.clone(), some, new),
        "fewer pages": (Q, POOL[:, :8], some, new),
        "rows": (Q, POOL, (LENS, lens, None, None), new),
        "rotated": (Q, POOL, some, turned),
        "rotated by others": (Q, POOL, some, turned | {"rotary_cos": torch.zeros(64, 16)}),
        "rotated otherwise": (Q, POOL, some, turned | {"rotary_interleaved": False}),
        "many rows": (MANY[0], POOL, some, turned | many),
    }


@pytest.mark.parametrize("calls_of", [over_a_cache, appended])
def test_a_kept_call_of_an_adapter(calls_of: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches what a new one does, with neither a ``KVCache`` nor a ``Step``, and tells autograd of caches that it writes."""
    flash_attn, make, made = pytest.importorskip("rawattn.integrations.flash_attn"), making.maker, list[Any]()
    kvcache = "rawattn.integrations.flash_attn_kvcache._count_new_rows"
    monkeypatch.setattr(kvcache, lambda lens, k, starts: lens)  # whose sum lies anywhere
    monkeypatch.setattr(making, "maker", lambda *given: lambda like: (made.append(x := make(*given)(like)), x)[1])

    def said(q: Any, pools: Any, places: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Returns what was launched, but for the places of results, and how results lie."""
        LAUNCHED.clear(), made.clear()
        names, before = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"), [x._version for x in pools]
        found = flash_attn.flash_attn_with_kvcache(q, *pools, **dict(zip(names, places, strict=True)), **options)
        assert all((x._version > version) == ("k" in options) for x, version in zip(pools, before, strict=True))
        texts = [*LAUNCHED]
        for i, x in enumerate(made):
            place = x.data_ptr().to_bytes(8, "little")
            texts = [(*kernel, args.replace(place, b"result %d" % i), on) for *kernel, args, on in texts]
        return texts, [(x.shape, x.stride(), x.dtype) for x in (found if isinstance(found, tuple) else (found,))]

    calls = [*calls_of().values()]
    cold = []
    for call in calls:
        forget()
        cold.append(said(*call))
    assert len({str(x) for x in cold}) == len(calls)
    forget()
    warm = [said(*call) for call in calls]
    monkeypatch.setattr(rawattn.serving, "Step", lambda *_, **__: pytest.fail("a step was made"))
    assert [said(*call) for call in calls[::-1]] == cold[::-1] and warm == cold


def test_what_an_adapter_appends() -> None:
    """A kept call refuses what a new one refuses: rows in the cache, without memory, or rotated where they may not be."""
    adapter = pytest.importorskip("rawattn.integrations.flash_attn").flash_attn_with_kvcache
    angles, view = {"rotary_cos": torch.zeros(512, 16), "rotary_sin": torch.zeros(512, 16)}, rows(2, *NEW[0].shape)
    many, last = rows(2, BATCH, 300, 2, 64), view[1]
    for _ in range(2):
        adapter(Q, *POOL, *NEW, cache_seqlens=LENS, block_table=TABLE)
        adapter(Q, *POOL, last, NEW[1], cache_seqlens=LENS, block_table=TABLE)
        adapter(MANY[0], *POOL, *many, cache_seqlens=LENS, block_table=TABLE)
        adapter(MANY[0], *POOL, *many, cache_seqlens=LENS, block_table=TABLE, **angles, window_size=(9, 9))
    LAUNCHED.clear()
    adapter(MANY[0], *POOL, *many, cache_seqlens=LENS, block_table=TABLE, **angles)  # queries at other positions than their keys
    assert len(LAUNCHED) == 3
    LAUNCHED.clear()
    inside = POOL[0].view(-1)[: NEW[0].numel()].view(NEW[0].shape)
    with pytest.raises(ProblemError, match="v overlaps the cache's k"):
        adapter(Q, *POOL, NEW[0], inside, cache_seqlens=LENS, block_table=TABLE)
    view.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match=r"k is a Tensor .* that has no memory"):
        adapter(Q, *POOL, last, NEW[1], cache_seqlens=LENS, block_table=TABLE)
    lens = LENS.clone()
    lens.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match=r"cache_seqlens is a Tensor .* that has no memory"):
        adapter(Q, *POOL, *NEW, cache_seqlens=lens, block_table=TABLE)
    assert not LAUNCHED


def test_what_an_adapter_was_given_goes_away() -> None:
    """An adapter keeps no tensor, and looks at those that changed."""
    adapter = pytest.importorskip("rawattn.integrations.flash_attn").flash_attn_with_kvcache
    pools, views = [rows(PAGES, 16, 2, 64) for _ in range(2)], {"lens": ints(2, BATCH), "table": ints(2, BATCH, 8)}
    call = lambda **options: adapter(Q, *pools, cache_seqlens=lens, block_table=table, **options)  # noqa: E731
    lens, table = views["lens"][1], views["table"][1]
    for _ in range(3):
        call(), call(causal=True)
    count, alive = len(LAUNCHED), weakref.ref(pools[0])
    for wrong in (1, None, "yes"):
        with pytest.raises(ProblemError, match="causal is"):
            call(causal=wrong)
    with pytest.raises(ProblemError, match=r"window_size is \(64\.0, 0\); it must be a pair"):
        call(window_size=(64.0, 0))
    pools[1].requires_grad_()
    with pytest.raises(ProblemError, match="an input requires grad"):
        call()
    pools[1].requires_grad_(False)
    views["table"].untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match=r"block_table is a Tensor .* that has no memory"):
        call()
    table = TABLE
    pools[1].untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match=r"v_cache is a Tensor .* that has no memory"):
        call()
    assert len(LAUNCHED) == count
    pools.clear()
    assert alive() is None


def test_a_view_of_the_keys_is_another_cache() -> None:
    """Two caches of the same forms, of which one's v is a view of its k: what is appended to one is not what the other takes."""
    k, v = torch.zeros(2, PAGES, 16, 2, 64, dtype=torch.bfloat16)
    view, apart = rawattn.KVCache(k, k[..., :32]), rawattn.KVCache(k, v[..., :32])
    step, new = rawattn.Step(LENS, TABLE), NEW[0]
    rawattn.append(view, step, new, None), rawattn.append(apart, step, new, NEW[1][..., :32])
    with pytest.raises(ProblemError, match="v is None"):
        rawattn.append(apart, step, new, None)
    with pytest.raises(ProblemError, match="v was given, but the cache's v is a view"):
        rawattn.append(view, step, new, NEW[1][..., :32])


def test_a_plan_and_its_calls_go_together() -> None:
    plan = rawattn.plan_kvcache(Q, CACHE, step := rawattn.Step(LENS, TABLE))
    plan.run(Q, CACHE, step)
    watched = weakref.ref(plan)
    del plan
    gc.collect()
    assert watched() is None


def test_pools_that_overlap_are_refused_when_warm() -> None:
    """flash-attn's step with new rows finds its append without a ``KVCache``, which would look at its pools."""
    adapter = pytest.importorskip("rawattn.integrations.flash_attn")
    q, lens = Q.clone(), LENS.clone()
    for _ in range(2):
        adapter.flash_attn_with_kvcache(q, *POOL, *NEW, cache_seqlens=lens, block_table=TABLE, causal=True)
    LAUNCHED.clear()
    with pytest.raises(ProblemError, match="overlaps"):
        adapter.flash_attn_with_kvcache(q, POOL[0], POOL[0], *NEW, cache_seqlens=lens, block_table=TABLE, causal=True)
    assert not LAUNCHED


def test_an_out_of_another_class_that_comes_to_require_grad() -> None:
    class Named(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    step, out = rawattn.Step(LENS, TABLE), OUT.clone().as_subclass(Named)
    for _ in range(2):
        rawattn.attention_kvcache(Q, CACHE, step, out=out)
    out.requires_grad_()
    with pytest.raises(ProblemError, match="out requires grad"):
        rawattn.attention_kvcache(Q, CACHE, step, out=out)


def test_autograd_is_told_of_rows_that_are_rotated_in_place() -> None:
    q, rotary = Q.clone(), rawattn.Rotary(*torch.zeros(2, 64, 16))
    before = q._version
    rawattn.append(CACHE, rawattn.Step(LENS, TABLE), *NEW, rotary=rotary, q=q, q_out=q)
    assert q._version > before

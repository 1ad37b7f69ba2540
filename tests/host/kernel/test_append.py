"""append.cu: compiled for each architecture, and compared with its definition on the CPU, thread by thread."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn import KVCache, ProblemError, Rotary, Step, reference
from rawattn.array import array, reading
from rawattn.array.array import DTYPES
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.append import APPEND, AppendConfig
from rawattn.operation import Append
from rawattn.operation.append import width_of
from rawattn.runtime import call_cache
from rawattn.testing import _move
from rawattn.variant.element import BF16, ELEMENTS
from rawattn.variant.field import AxisStride, Pointer, Stride, View
from tests.caches import NONSENSE, Cached
from tests.emulator.gpu import emulated, stand_in
from tests.host.kernel.test_compile_matrix import is_known

Array = npt.NDArray[Any]
VIOLATED = {"kv_len": 1, "q_len": 2, "page": 4, "position": 8, "slot": 16}


CASE = Cached(((3, 9), (0, 5), (4, 0), (1, 1), (2, 30)), heads=4, kv_heads=2)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of append over a case's pools. ``half`` are the angles of a row, 0 for no rotary; ``width`` narrows the accesses."""

    case: Cached = CASE
    half: int = 0
    interleaved: bool = False
    angles: str = "fp32"
    positions: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    lengths: bool = True
    q: bool = False
    in_place: bool = False
    padded: int = 0
    width: int | None = None
    positions_count: int = 40
    first: int = 0  # the first column that is rotated
    q_rope: bool = False  # q has the columns from there on
    spread: bool = False  # k has numbers of all sizes, NaN and infinity
    record: int = 0  # bytes from a row to the next where rows are records, with a row between two pages


FP64, SLOTS = dataclasses.replace(CASE, dtype="fp64"), (5, -1, 0, 9, 2, 44, 3, -7, 1, 11)
LATENT = dataclasses.replace(CASE, kv_heads=1, pool="shared", dtype="bf16", head_dim=576, head_dim_v=512)
DENSE = dataclasses.replace(CASE, lengths=((2, 5), (2, 0), (2, 2)), ragged=False)
CALLS = {
    "plain": Call(),
    "dense": Call(dataclasses.replace(DENSE, form="dense", page_size=11, layout="HND"), half=8, q=True),
    "pages end to end": Call(dataclasses.replace(CASE, form="indptr", page_size=1, pool="interleaved"), half=3, interleaved=True),
    "v in k": Call(dataclasses.replace(CASE, pool="shared", head_dim_v=8), half=4, q=True, in_place=True),
    "bf16": Call(dataclasses.replace(CASE, dtype="bf16", head_dim=64, head_dim_v=40, layout="HND"), half=32, q=True),
    "bf16 angles": Call(dataclasses.replace(CASE, dtype="bf16", head_dim=32), half=8, angles="bf16", interleaved=True, q=True),
    "narrow": Call(dataclasses.replace(CASE, dtype="bf16", head_dim=18, head_dim_v=7), half=9, q=True, in_place=True),
    "by elements": Call(half=5, interleaved=True, q=True, width=1),
    "wide": Call(dataclasses.replace(CASE, lengths=((2, 3),), head_dim=600, head_dim_v=300), half=300, q=True, in_place=True),
    "slots": Call(
        dataclasses.replace(CASE, dtype="fp64"),
        angles="fp64",
        slots=SLOTS,
        half=8,
        q=True,
        positions=(3, -1, 39, 0, 4, 5, 6, -9, 8, 9),
    ),
    "slots alone": Call(slots=SLOTS, lengths=False),
    "slots and lengths": Call(slots=SLOTS, half=2),
    "dense slots": Call(dataclasses.replace(DENSE, layout="HND"), slots=(5, -1, 0, 9, 2, 4), lengths=False),
    "e4m3": Call(dataclasses.replace(CASE, dtype="bf16", kv_dtype="e4m3", scales=("each", "number"), head_dim=64, head_dim_v=48)),
    "e5m2": Call(
        dataclasses.replace(CASE, kv_dtype="e5m2", scales=("sequences", "heads"), form="indptr", page_size=1, pool="interleaved")
    ),
    "e4m3, slots": Call(
        dataclasses.replace(CASE, kv_dtype="e4m3", scales=("number", "heads"), lengths=((2, 5), (2, 0), (2, 2)), ragged=False),
        slots=(5, -1, 0, 9, 2, 4),
        lengths=False,
        half=4,
        q=True,
        positions=(0, 1, 2, 3, 4, 5),
    ),
    "latent": Call(LATENT, 32, q=True, first=512),
    "latent, interleaved, q_rope": Call(dataclasses.replace(LATENT, layout="HND"), 32, True, first=512, q=True, q_rope=True),
    "latent, q_rope in place": Call(
        dataclasses.replace(LATENT, page_size=1, form="indptr"), 32, first=512, q=True, q_rope=True, in_place=True
    ),
    "latent, e4m3, slots": Call(
        dataclasses.replace(LATENT, kv_dtype="e4m3", scales=("number", "number")), 32, slots=SLOTS, first=512, q=True, q_rope=True
    ),
    "narrow, from a column on": Call(
        dataclasses.replace(LATENT, head_dim=13, head_dim_v=7), 2, True, first=7, q=True, q_rope=True
    ),
    "from a column on, in a middle": Call(dataclasses.replace(CASE, head_dim=32), 4, first=8, q=True, q_rope=True, in_place=True),
    "from a column between two chunks": Call(dataclasses.replace(CASE, head_dim=32), 4, first=2, q=True),
    "records": Call(LATENT, record=656),
    "records of sizes": Call(dataclasses.replace(LATENT, seed=5), record=656, spread=True),
    "records, rotated": Call(
        dataclasses.replace(LATENT, form="indptr", page_size=1), 32, True, first=512, q=True, q_rope=True, record=656
    ),
    "records of fp16": Call(dataclasses.replace(LATENT, dtype="fp16"), record=656, slots=SLOTS, lengths=False),
    "records of fp32": Call(dataclasses.replace(LATENT, dtype="fp32"), record=656),
    "records of fp64, by pairs": Call(dataclasses.replace(LATENT, dtype="fp64"), record=656, spread=True),
    "records with bytes between": Call(LATENT, record=664),
    "records by elements": Call(LATENT, record=656, width=1, spread=True),
    "records by four": Call(LATENT, record=656, width=4, spread=True),
    "many sequences": Call(
        dataclasses.replace(CASE, lengths=((1, 1), (0, 3), (2, 2)) * 24, heads=1, kv_heads=1, head_dim=4), half=2
    ),
}


def inputs(call: Call) -> tuple[dict[str, Array], KVCache, Step | None, Rotary | None]:
    """The arrays of a call by name, without the cache's."""
    case = call.case
    found = {"k": case.rows(case.kv_heads, case.head_dim, 1), "v": case.rows(case.kv_heads, case.head_dim_v, 2)}
    if call.spread:
        size = np.exp2(case.rng().integers(-30, 30, (*found["k"].shape[:-1], 9)).repeat(64, -1)).astype(np.float32)
        found["k"] = (found["k"].astype(np.float32) * size).astype(found["k"].dtype)
        found["k"][0, 0, 3], found["k"][1, 0, 200], found["k"][2, 0, 256:384] = np.nan, np.inf, 0
        found["k"][2, 0, 384:512] = 448
    if call.q:
        found["q"] = case.rows(case.heads, case.head_dim - call.first * call.q_rope, 3)
    found = {name: np.concatenate([x, np.full_like(x[: call.padded], np.nan)]) for name, x in found.items()}
    rows = found["k"].shape[:-2]
    pages = np.full((len(case.pools()[0]), case.page_size + 1, max(call.record, 656)), 255, np.uint8)[:, : case.page_size, :656]
    cache = KVCache.records(pages) if call.record else case.made(*case.pools())
    if cache.v_in_k:
        del found["v"]
    rotary = None
    if call.half:
        cos, sin = (
            case.normal(call.positions_count, 2 * call.half, seed=seed).astype(ELEMENTS[call.angles].dtype)[:, : call.half]
            for seed in (5, 6)
        )
        rotary = Rotary(
            cos, sin, call.interleaved, None if call.positions is None else np.array(call.positions).reshape(rows), call.first
        )
    if call.slots is not None:
        found["slots"] = np.array(call.slots).reshape(rows)
    return found, cache, case.step() if call.lengths else None, rotary


def operation(found: dict[str, array.Array], call: Call, cache: KVCache) -> Append:
    rotary = "" if not call.half else "interleaved" if call.interleaved else "neox"
    op = Append.of(found, rotary, scales=cache.scales, first_column=call.first)
    return dataclasses.replace(op, width=call.width or width_of(found, rotary, call.first), in_place=call.in_place)


def run(call: Call, folder: pathlib.Path, changes: dict[str, Array] | None = None) -> tuple[KVCache, Array | None, int]:
    """Runs the kernel; the cache, the rotated queries, and the violations."""
    given, cache, step, rotary = inputs(call)
    named = {name: reading.read(x, name) for name, x in given.items()}
    named |= {} if step is None else {n: x for n, x in step.arrays.items() if n not in ("causal", "kv_begin")}
    named |= {} if rotary is None else rotary.arrays
    named |= cache.arrays_of(len(call.case.lengths))
    op = operation(named, call, cache)
    for name, x in (changes or {}).items():
        named[name] = reading.read(x, name)
    q_out = np.full_like(given["q"], np.nan) if call.q else None
    if q_out is not None and call.in_place:
        q_out[...] = given["q"]
        named["q"] = reading.read(q_out, "q")
    elif q_out is not None:
        named["q_out"] = reading.read(q_out, "q_out")
    violations = np.zeros(1, np.uint32)
    (launch,) = APPEND.lower(op, AppendConfig(64), TYPICAL["sm_90a"]).launches
    values: dict[str, Any] = {"violations": violations, **launch.values}
    for field in launch.fields:
        fill = field.fill
        if isinstance(fill, View):
            array = named.get(fill.operand)
            values[field.name] = bytes(32) if array is None else words(array)
        elif isinstance(fill, Pointer):
            values[field.name] = named[fill.operand].pointer
        elif isinstance(fill, AxisStride):
            values[field.name] = named[fill.operand].strides[fill.axis]
        elif isinstance(fill, Stride):
            assert fill.axis == "line"
            values[field.name] = named[fill.operand].strides[0]
    kernel = emulated(launch, op.number, folder)
    kernel(launch.grid, values)
    return cache, q_out, int(violations[0])


def words(array: array.Array) -> bytes:
    """The StridedTensor of an array."""
    size = DTYPES[array.dtype].itemsize
    batch = array.strides[-4] if len(array.strides) == 4 else 0
    return np.array([array.pointer, *(s * size for s in (batch, *array.strides[-3:-1]))], np.int64).tobytes()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_kernel(call: Call, tmp_path: pathlib.Path) -> None:
    given, cache, step, rotary = inputs(call)
    wanted = reference.append(cache, step, given["k"], given.get("v"), slots=given.get("slots"), rotary=rotary, q=given.get("q"))
    found, q_out, violations = run(call, tmp_path)
    assert violations == 0
    eps = {"bf16": 2.0**-8, "fp32": 2.0**-22, "fp64": 2.0**-51}[call.case.dtype] if call.half else 0
    if call.record:
        x, exact, *wanted = found.k, *wanted
        np.testing.assert_array_equal(x[..., :528], exact[..., :528])
        bf16 = [rows[..., 528:].copy().view(BF16.dtype).astype(np.float32) for rows in (x, exact)]
        np.testing.assert_allclose(*bf16, rtol=2.0**-7 if call.half else 0, atol=2.0**-7 if call.half else 0)
    for x, exact in zip((q_out,) if call.record else (found.k, found.v, q_out), wanted, strict=False):
        if x is q_out and call.in_place:  # rows that take no part stay
            exact = np.where(np.isnan(exact), given["q"], exact)
        if eps and call.case.kv_dtype and x is not q_out:  # few are the number before or after
            found, some = x.astype(np.float64), ~np.isnan(exact)
            assert np.array_equal(np.isnan(found), ~some) and np.mean(found[some] == exact[some]) > 0.98
            np.testing.assert_allclose(found[some], exact[some], rtol=0.125, atol=0.002)
            continue
        np.testing.assert_allclose(x.astype(np.float64), exact, rtol=eps, atol=8 * eps)


WRONG: dict[str, tuple[Call, dict[str, Array], str]] = {  # "indices" has more entries than the kernel is told of
    "long": (Call(), {"kv_lens": np.array([9, 5, 0, NONSENSE, 30], np.int32)}, "kv_len"),
    "negative": (Call(), {"kv_lens": np.array([-9, 5, 0, 1, 30], np.int32)}, "kv_len"),
    "shorter than its new rows": (Call(), {"kv_lens": np.array([2, 5, 0, 1, 30], np.int32)}, "kv_len"),
    "page": (Call(), {"page_table": np.full((5, 10), NONSENSE, np.int32)}, "page"),
    "negative page": (Call(half=2, q=True), {"page_table": np.full((5, 10), -1, np.int32)}, "page"),
    "indices": (CALLS["pages end to end"], {"indices": np.full(50, NONSENSE, np.int32)}, "page"),
    "indptr": (
        CALLS["pages end to end"],
        {"indptr": np.array([0, 40, 80, 90, 95, 190], np.int32), "indices": np.zeros(300, np.int32)},
        "kv_len page",
    ),
    "last_page_len": (CALLS["pages end to end"], {"last_page_len": np.full(5, 9, np.int32)}, "kv_len"),
    "falling starts": (Call(), {"cu_seqlens_q": np.array([0, 9, 3, 2, 1, 0], np.int32)}, ""),
    "wild starts": (Call(), {"cu_seqlens_q": np.array([NONSENSE] * 3 + [-NONSENSE] * 3, np.int32)}, ""),
    "slot": (Call(slots=(1 << 40, 4 * 16, *range(8)), lengths=False), {}, "slot"),
    "position": (Call(half=2, q=True, positions_count=20), {}, "position"),
    "negative positions": (Call(half=2, q=True, positions=(0, 1, -1, *range(7))), {}, "position"),
    "negative positions of slots": (Call(half=2, slots=SLOTS, positions=(0, 1, -7, *range(7)), lengths=False), {}, "position"),
    "given positions": (Call(half=2, positions=(1 << 40, -(1 << 40), *range(8))), {}, "position"),
}


@pytest.mark.parametrize(("call", "changes", "said"), WRONG.values(), ids=WRONG)
def test_what_the_cache_does_not_have(call: Call, changes: dict[str, Array], said: str, tmp_path: pathlib.Path) -> None:
    """It is said, and nothing is written but rows that the cache has: the emulator would end at a wild address."""
    cache, _, violations = run(call, tmp_path, changes)
    bits = sum(VIOLATED[word] for word in said.split())
    assert violations & bits == bits and (violations == bits or not said or "starts" in said)
    given = inputs(call)[0]
    rows = {x.tobytes() for x in given["k"].reshape(-1, call.case.head_dim)} if not call.half else None
    for x in cache.k.reshape(-1, call.case.head_dim):
        assert np.isnan(x).all() or rows is None or x.tobytes() in rows


@pytest.mark.parametrize("form", ["table", "indptr", "dense"])
def test_public_call(form: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tensors on the CPU stand for those on a GPU: from the call to the bytes that the kernel gets, and what it writes."""
    torch, word = pytest.importorskip("torch"), stand_in(monkeypatch, tmp_path)
    case = dataclasses.replace(CASE, form=form, page_size=32 if form == "dense" else 4, layout="HND")
    call = Call(case, half=4, q=True)
    given, _, _, angles = inputs(call)
    tensors = {name: torch.from_numpy(x) for name, x in given.items()}
    assert angles is not None
    rotary = Rotary(torch.from_numpy(angles.cos.copy()), torch.from_numpy(angles.sin.copy()))
    cache, step = case.made(*case.pools(), "torch"), case.step("torch")
    wanted = reference.append(cache, step, **tensors, rotary=rotary)
    before = cache.k._version
    for q_out in (None, torch.full_like(tensors["q"], np.nan), tensors["q"]):
        found = rawattn.append(cache, step, **tensors, rotary=rotary, q_out=q_out)
        kept = len(call_cache._calls)
        if q_out is not tensors["q"]:
            assert (rawattn.append(cache, step, **tensors, rotary=rotary, q_out=q_out) is q_out) == (q_out is not None)
        assert len(call_cache._calls) == kept
        assert found is q_out or q_out is None
        np.testing.assert_allclose(found.numpy()[~np.isnan(wanted[2])], wanted[2][~np.isnan(wanted[2])], atol=1e-5)
        if q_out is not tensors["q"]:
            np.testing.assert_allclose(cache.k.numpy(), wanted[0], atol=1e-5)
            np.testing.assert_allclose(cache.v.numpy(), wanted[1])
    assert cache.k._version > before and rawattn.violations() == ()
    word[0] = 1 | 4 | 16
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["kv_len", "page", "slot"]
    with pytest.raises(rawattn.UnsupportedError, match=r"(?s)AttentionKVCache .* on H200.*it takes bf16 and fp16, not fp32"):
        rawattn.attention_kvcache(tensors["q"], cache, step)


SHAPES: dict[str, Call] = {
    "llama": Call(
        dataclasses.replace(CASE, dtype="bf16", head_dim=128, head_dim_v=128, heads=32, kv_heads=8, page_size=16), 64, q=True
    ),
    "fp16, partial": Call(dataclasses.replace(CASE, dtype="fp16", head_dim=80, head_dim_v=80), 10, angles="fp16", q=True),
    "fp32, slots": Call(dataclasses.replace(CASE, head_dim=256, head_dim_v=256), slots=tuple(range(10)), lengths=False),
    "e4m3": Call(
        dataclasses.replace(CASE, dtype="bf16", kv_dtype="e4m3", scales=("each", "number"), head_dim=128, head_dim_v=128),
        64,
        q=True,
    ),
    "latent": Call(LATENT, 32, True, q=True, first=512),
    "latent, q_rope": Call(LATENT, 32, q=True, first=512, q_rope=True),
    "records": Call(LATENT, 32, True, q=True, first=512, q_rope=True, record=656),
    "records of fp16": Call(dataclasses.replace(LATENT, dtype="fp16"), slots=SLOTS, record=656),
    "end to end": Call(
        dataclasses.replace(CASE, form="indptr", dtype="bf16", head_dim=64, head_dim_v=64), 32, True, q=True, in_place=True
    ),
}


@pytest.mark.parametrize("arch", TYPICAL)
def test_compiles(arch: str) -> None:
    """No spills, no advisories, and rows move 16 bytes at a time."""
    if not is_known(arch):
        pytest.skip("this NVRTC is older than the architecture")
    for name, call in SHAPES.items() if arch == "sm_90a" else [("llama", SHAPES["llama"])]:
        given, cache, step, rotary = inputs(call)
        named = {name: reading.read(x, name) for name, x in given.items()} | ({} if rotary is None else rotary.arrays)
        named |= {} if step is None else {n: x for n, x in step.arrays.items() if n != "causal"}
        named |= cache.arrays_of(len(call.case.lengths))
        width = 2 if call.half == 10 else 16 // ELEMENTS[call.case.dtype].itemsize
        op = dataclasses.replace(operation(named, call, cache), width=width)
        (launch,) = APPEND.lower(op, AppendConfig(), TYPICAL[arch]).launches
        binary = compiler.compile(launch.source)
        assert not binary.spill_bytes and not binary.advisories
        if name == "llama":
            alone = APPEND.lower(dataclasses.replace(op, k=False, v=False, form="slots"), AppendConfig(), TYPICAL[arch])
            q_alone = compiler.compile(alone.launches[0].source)
            assert not q_alone.spill_bytes and not q_alone.advisories
            text = compiler.disassemble(binary.cubin, "-c")
            assert "STG.E.128" in text and "LDG.E.128" in text


@pytest.mark.parametrize("way", ["cpu", "gpu", "operator"])
@pytest.mark.parametrize(
    "case",
    [CASE, DENSE, dataclasses.replace(CASE, form="indptr", dtype="bf16", page_size=32)],
    ids=("packed", "dense", "end to end"),
)
@pytest.mark.parametrize("positions", [False, True], ids=("lengths", "positions"))
def test_queries_alone(positions: bool, case: Cached, way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are rotated by a step of their own, or by positions, and the cache stays as it was."""
    torch = pytest.importorskip("torch")
    q = _move(case.rows(4, 16, 3), "torch", "cpu")
    cos, sin = (torch.from_numpy(case.normal(40, 4, seed=seed).astype(np.float32)) for seed in (5, 6))
    at = torch.from_numpy(np.random.default_rng(0).integers(-2, 40, q.shape[:-2])) if positions else None
    cache, step, rotary = (
        case.made(*case.pools(), "torch"),
        None if positions else case.step("torch"),
        Rotary(cos, sin, False, at),
    )
    (*_, wanted), before = reference.append(cache, step, None, None, rotary=rotary, q=q), cache.k.clone()
    if way == "gpu":
        word = stand_in(monkeypatch, tmp_path)
    call = lambda q: rawattn.append(cache, step, None, None, rotary=rotary, q=q)  # noqa: E731
    for _ in range(2):
        found = (torch.compile(call, backend="aot_eager", fullgraph=True) if way == "operator" else call)(q)
        there = ~np.isnan(wanted)
        np.testing.assert_allclose(found.double().numpy()[there], wanted[there], atol=1e-5 if case.dtype == "fp32" else 2e-2)
    assert there.any() and not there.all()
    in_place = q.clone()
    assert rawattn.append(cache, step, None, None, rotary=rotary, q=in_place, q_out=in_place) is in_place
    assert (in_place.double().numpy()[there] == found.double().numpy()[there]).all()
    assert (cache.k._version == 0) == (way != "operator") and torch.equal(cache.k.nan_to_num(7), before.nan_to_num(7))
    assert way != "gpu" or word[0] == 0


@pytest.mark.parametrize("more", ["v", "slots", "q", "rotary"])
def test_queries_alone_refuse(more: str) -> None:
    case = DENSE
    rows, angles = case.rows(2, 16, 1), np.ones((40, 4), np.float32)
    given: dict[str, Any] = {"q": case.rows(4, 16, 3), "rotary": Rotary(angles, angles), "v": None}
    given |= {
        "v": {"v": rows},
        "slots": {"slots": np.zeros(rows.shape[:2], np.int64)},
        "q": {"q": None},
        "rotary": {"rotary": None},
    }[more]
    with pytest.raises(
        ProblemError, match="q was given without rotary" if more == "rotary" else "k is None, so q alone is rotated"
    ):
        rawattn.append(case.made(*case.pools()), case.step(), None, **given)


def test_other_rows_of_queries_than_of_keys() -> None:
    """As flash-attn has it: a sequence's row j of q stands where its row j of new keys does, also behind the last new one."""
    old, new, rows = np.array([7, 3], np.int32), 2, 5
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, heads, 8), np.float32) for n, heads in ((rows, 4), (new, 2), (new, 2)))
    pools = [rng.standard_normal((2, 16, 2, 8), np.float32) for _ in "kv"]
    cos, sin = (f(np.outer(np.arange(30), 10.0 ** -np.arange(4))).astype(np.float32) for f in (np.cos, np.sin))
    cache, rotary = KVCache(*pools), Rotary(cos, sin)
    rawattn.append(cache, Step(old + np.int32(new)), k, v, rotary=rotary)
    turned = rawattn.append(cache, Step(old + np.int32(rows)), None, None, rotary=rotary, q=q)

    def by_hand(x: Array, first: int) -> Array:
        c, s = cos[first : first + len(x), None], sin[first : first + len(x), None]
        return np.concatenate([x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * s], -1)

    for i, first in enumerate(old):
        np.testing.assert_allclose(turned[i], by_hand(q[i], first), atol=1e-6)
        np.testing.assert_allclose(cache.k[i, first : first + new], by_hand(k[i], first), atol=1e-6)


def test_packed_keys_of_other_lengths_than_the_queries() -> None:
    """New keys have a step of their own, with their own cu_seqlens; the queries' is that of the attention."""
    case = dataclasses.replace(CASE, lengths=((3, 9), (1, 5), (4, 6)))
    other = dataclasses.replace(case, lengths=((2, 9), (0, 5), (5, 6)))
    k, v, q = other.rows(2, 16, 1), other.rows(2, 16, 2), case.rows(4, 16, 3)
    cache = case.cache()
    wanted = reference.append(cache, other.step(), k, v)
    rawattn.append(cache, other.step(), k, v)
    for found, pool in zip((cache.k, cache.v), wanted, strict=True):
        np.testing.assert_array_equal(found, pool)
    assert np.isfinite(rawattn.attention_kvcache(q, cache, case.step())).all()

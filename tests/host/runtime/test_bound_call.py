"""This module tests what a plan keeps from call to call, without a GPU: torch tensors on the CPU stand for those on one, and
a launch is written down instead of issued. A call on a warm plan must launch what it would launch on a cold one, or raise as it
would there."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import rawattn
from rawattn.array import making, reading
from rawattn.array.array import Array
from rawattn.array.forms import are_held
from rawattn.compile import compiler
from rawattn.driver import context, counters, graph, tensor_map
from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError, SlowKernelWarning
from rawattn.kernel.attn_fwd import AttnFwdConfig
from rawattn.kernel.attn_fwd_mma import AttnFwdMmaConfig
from rawattn.operation import Forward
from rawattn.operation.base import three_bits
from rawattn.runtime import bound_call, call_cache, loaded_kernel, request, select
from rawattn.runtime import calls as kept_calls
from rawattn.runtime.plan import Plan
from rawattn.serving import call as cache_call
from tests.emulator import gpu as stand_ins

torch = pytest.importorskip("torch")
from rawattn.torch import dispatcher  # noqa: E402

GPU = dataclasses.replace(TYPICAL["sm_90a"], index=-1)  # of torch's tensors on the CPU
LAUNCHED: list[tuple[bytes, int]] = []  # arguments and stream
STATE = {"stream": 0, "capturing": False}
LOAD = loaded_kernel.load


class Launch(stand_ins.Launch):
    def __call__(self) -> None:
        LAUNCHED.append((self.args, self.stream))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    words = types.SimpleNamespace(take=lambda stream_id, captured: 1 << 20 | stream_id + captured)
    for owner, name, value in (
        (Array, "is_cpu", property(lambda array: array.library == "numpy")),
        (compiler, "compile_together", lambda *_: None),
        (compiler, "compile_all", lambda sources: {}),  # the first configuration is taken, whatever it spills
        (counters, "of_device", lambda index, size: words),
        (context, "current", lambda index: contextlib.nullcontext()),
        (context, "device", lambda index: GPU),
        (bound_call, "BoundLaunch", Launch),
        (graph, "stream_state", lambda stream, index: (stream, STATE["capturing"])),
        (counters, "violations", lambda index: 1 << 21),
        (tensor_map, "tensor_maps", lambda *args: lambda pointer: repr((pointer, *args)).encode().ljust(128)[-128:]),
        (loaded_kernel, "load", lambda launch, op, *_: loaded_kernel.LoadedKernel.of(None, None, launch, op)),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STATE["stream"], raising=False)
    STATE.update(stream=0, capturing=False)
    LAUNCHED.clear()
    forget()
    yield
    forget()


def forget() -> None:
    call_cache._calls.clear()


def calls_kept() -> list[Any]:
    """Each once."""
    return [*dict.fromkeys(call_cache._calls.values())]


def keys_kept(kind: str) -> list[Any]:
    """Keys of a "family" of calls, of "lengths" for which the same kernels are launched, or of forms that were read ("torch")."""
    return [key for key in call_cache._calls if kind in (key[0], key[1][0])]


def tensors(length: int = 80, heads: int = 4) -> dict[str, Any]:
    return {name: torch.randn(2, length, heads, 64).bfloat16() for name in "qkv"}


def variations() -> dict[str, dict[str, Any]]:
    """Calls that differ in one thing each, of shapes that a plan takes."""
    good = tensors()
    other, padded = tensors(), torch.randn(2, 80, 4, 72).bfloat16()[..., :64]
    found = {
        "good": good,
        "out": good | {"out": torch.empty_like(good["q"])},
        "padded out": good | {"out": torch.empty_like(padded)},
    }
    found |= {name: good | {name: other[name]} for name in "qkv"}
    found |= {f"padded {name}": good | {name: padded} for name in "qkv"}
    return found | {"heads first": good | {"q": torch.randn(2, 4, 80, 64).bfloat16().transpose(1, 2)}}


@pytest.mark.parametrize("capturing", [False, True])
def test_no_garbage_is_collected_while_a_plan_is_made_in_a_capture(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of anybody's may be among it, and to destroy that would spoil the capture."""
    seen: list[bool] = []
    for owner in (kept_calls, cache_call):
        select = owner.select
        monkeypatch.setattr(owner, "select", lambda *given, select=select: seen.append(gc.isenabled()) or select(*given))
    STATE["capturing"] = capturing
    given = tensors()
    rawattn.plan(**given)
    rawattn.merge_states([(given["q"], torch.zeros(2, 4, 80))])
    assert seen == [not capturing] * 2 and gc.isenabled()


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_warm_call_launches_what_a_cold_one_does(return_lse: bool) -> None:
    given = [{**call, "out": call.get("out", torch.empty(2, 80, 4, 64).bfloat16())} for call in variations().values()]
    calls = [(call, stream) for call in given for stream in (0, 7)]
    plan, cold, warm = rawattn.plan(**tensors(), return_lse=return_lse), [], []

    def lse_apart(said: tuple[bytes, int]) -> tuple[bytes, int]:
        """Without the address of lse, which is new at every call."""
        args, stream = bytearray(said[0]), said[1]
        if return_lse:
            at = plan.kernels[0].layout.offsets["lse"]
            args[at : at + 8] = bytes(8)
        return bytes(args), stream

    for call, stream in calls:
        forget()
        STATE["stream"] = stream
        rawattn.attention(**call, return_lse=return_lse)
        cold.append(lse_apart(LAUNCHED.pop()))
    assert len(set(cold)) == len(calls)
    for (call, stream), run in itertools.product(calls * 2, (rawattn.attention, plan.run)):
        STATE["stream"] = stream
        run(**call, **({"return_lse": return_lse} if run is rawattn.attention else {}))
        warm.append(lse_apart(LAUNCHED.pop()))
    assert warm == [said for said in cold * 2 for _ in range(2)]


DOC, TABLE = torch.arange(80, dtype=torch.int32) // 9, torch.randn(4, 120)
OF_NUMBERS: dict[str, tuple[str, Any, list[Any]]] = {  # role, what makes the function of a number, numbers
    "window": ("mask", lambda n: lambda q, kv: (DOC[q] == DOC[kv]) & (q - kv <= n), [30, 31, 5, 1 << 29, 0, 1000]),
    "negative": ("mask", lambda n: lambda q, kv: (DOC[q] == DOC[kv]) & (q - kv <= n), [-3, -4, 7, -5]),
    "built in": ("mask", lambda n: lambda q, kv: (q >= kv) & (q - kv <= n), [30, 31, -1, 2]),
    "divisor": ("mask", lambda n: lambda q, kv: q // n == kv // n, [7, 8, 64, 1, 79]),
    "an index": ("mask", lambda n: lambda q, kv: DOC[kv] <= DOC[(q + n).clip(0, n + 70)], [0, 3, 9, 10, 50, 2]),
    "a float": ("score", lambda x: lambda s, h, q, kv: s * x + TABLE[h, kv], [0.5, -1.0, -0.0, 0.0, float("inf"), 1e30, -3.4e38]),
    "a cap": ("score", lambda x: lambda s: x * torch.tanh(s / x), [30.0, 50.0, 20.0]),
    "an inverse": ("score", lambda x: lambda s, h, q, kv: s * (1.0 / x) + TABLE[h, kv], [2.0, 0.0, -0.0, 4.0]),
    "another type": ("score", lambda x: lambda s, h, q, kv: s + x * (q - kv) + TABLE[h, kv], [1, 2, 0.5, 3, 0.25]),
}


@pytest.mark.filterwarnings("error:divide by zero")
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_another_number_launches_what_it_does_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each other number: arguments, kernel and grid. Only numbers for which something else is proved need another plan."""
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})
    role, make, numbers = OF_NUMBERS[name]
    alone: list[Any] = []
    after: list[Any] = []
    calls = {number: tensors() for number in map(repr, numbers)}  # elsewhere for each number

    used, issue = list[Any](), bound_call.GpuCall.__call__
    monkeypatch.setattr(bound_call.GpuCall, "__call__", lambda self, *given: used.append(self) or issue(self, *given))

    def launched(number: Any) -> Any:
        LAUNCHED.clear()
        rawattn.attention(**calls[repr(number)], **{role: make(number)})
        bound = used[-1]
        sources = [(launch.source.key, launch.grid) for launch in bound.plan.program.launches]
        found = [bytearray(args) for args, _ in LAUNCHED]
        for args, places in zip(found, bound._places, strict=True):  # but for addresses of what is made anew
            for _, offset in [each for each in places if each[0] >= len(bound.inputs)]:
                args[offset : offset + 8] = bytes(8)
        return sources, found

    for number in numbers:
        forget()
        alone.append(launched(number))
    forget()
    for number in numbers:
        after.append(launched(number))
    assert after == alone
    assert len({str(each) for each in alone}) == len({repr(x) for x in numbers}), "the number is among the arguments"


def test_another_number_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a new length, of one kind and size; but a plan is made where an index leaves its array, and numbers that may
    overflow raise, whatever was proved of those before."""
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})
    made = [0]
    monkeypatch.setattr(Plan, "__init__", counting(Plan.__init__, made))
    call, long = {name: x[:, :80] for name, x in tensors(96).items()}, torch.zeros(4096, dtype=torch.int32)

    def attend(n: int, length: int = 80) -> int:
        rawattn.attention(call["q"], *(call[x][:, :length] for x in "kv"), mask=lambda q, kv: long[q + n] == long[kv])
        return made[0]

    assert [attend(n) for n in (5, 6, 7, 4000, 4016, 5)] == [1] * 6
    assert attend(4017) == 2, "it is clipped"
    assert [attend(n) for n in (4016, 1 << 20)] == [2, 2], "both are known"
    with pytest.raises(ProblemError, match="may reach 2147483648, and integers must fit 32 bits"):
        attend((1 << 31) - 79)
    with pytest.raises(ProblemError, match=r"39802\d*\.\.\. \(an int of 6021 digits\) was captured; an int must fit 32 bits"):
        attend(1 << 20000)
    assert [attend((1 << 31) - 80), attend(6)] == [2, 2]
    assert [attend(6, length) for length in (79, 78, 77)] == [2] * 3, "nothing is clipped for 80"


def test_lengths_are_proved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a family is resized, and its functions are proved for the new lengths; those of one step have one proof."""
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})
    made, resized = [0], [0]
    monkeypatch.setattr(Plan, "__init__", counting(Plan.__init__, made))
    monkeypatch.setattr(Plan, "resized", counting(Plan.resized, resized))
    f = lambda b, h, q, kv: kv * kv * 100 % 7 < 3  # noqa: E731
    q, k = torch.zeros(1, 1, 4, 64), torch.zeros(1, 5100, 4, 64)
    for length, wanted in ((4100, 0), (4101, 0), (4352, 0), (4353, 1), (4102, 1), (4608, 1)):
        rawattn.attention(q, k[:, :length], k[:, :length], mask=f, kernel="attn_fwd_simt")
        assert (made, resized) == ([1], [wanted])
    with pytest.raises(ProblemError, match="integers must fit 32 bits"):
        rawattn.attention(q, k, k, mask=f, kernel="attn_fwd_simt")


def counting(original: Any, count: list[int]) -> Any:
    def counted(*given: Any, **named: Any) -> Any:
        count[0] += 1
        return original(*given, **named)

    return counted


LENGTHS = st.one_of(st.integers(0, 40), st.integers(400, 700), st.integers(1000, 1300))
Q_LENGTHS = st.sampled_from([1, 1, 1, 3, 70, 71, 79, 200])
STEPS = st.lists(st.tuples(Q_LENGTHS, LENGTHS, st.integers(0, 1), st.sampled_from([0, 64, 8])), min_size=2, max_size=6)
LONG, TIGHT = torch.arange(1500, dtype=torch.int32) // 9, torch.arange(1200, dtype=torch.int32) // 9
FUNCTIONS = {  # the last one reads behind its array where there are more than 1200 keys, and is clipped there
    "documents": {"mask": lambda q, kv: (LONG[q] == LONG[kv]) & (q - kv <= 300)},
    "a table": {"score": lambda s, h, q, kv: s + TABLE[h, 119 - (q - kv).clip(0, 119)]},
    "clipped": {"mask": lambda q, kv: TIGHT[kv] <= 30},
}


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    st.sampled_from([None, "attn_fwd", "attn_fwd_simt"]), st.sampled_from([1, 2]), STEPS,
    st.sampled_from([{}, {"causal": True}, {"window": (300, 0)}, {"q_offset": 9}, *FUNCTIONS.values()]), st.booleans(),
    st.booleans(),
)  # fmt: skip
@hypothesis.example("attn_fwd", 2, [(70, 1030, 0, 0), (79, 1031, 1, 0), (71, 1031, 0, 64)], {"causal": True}, False, False)
@hypothesis.example("attn_fwd", 1, [(1, 1280, 0, 0), (1, 1200, 0, 0)], FUNCTIONS["clipped"], False, True)
def test_other_lengths_launch_what_a_new_call_does(
    kernel: str | None, batch: int, steps: Any, options: dict[str, Any], has_lens: bool, is_given: bool
) -> None:
    """Each byte of the arguments, the kernel, the grid and the size of scratch memory, of steps over two layers' keys, in which
    a program that was lowered before may serve."""
    layers = [torch.zeros(batch, 1400, 2, columns).bfloat16() for columns in (72, 80)]
    launched, scratch = list[Any](), dict[Any, Any]()
    kv_lens = torch.zeros(batch, dtype=torch.int32) if has_lens else None
    q, out = torch.zeros(batch, 200, 4, 64).bfloat16(), torch.zeros(batch, 200, 4, 64).bfloat16()

    class Noted(stand_ins.Launch):
        def __call__(self) -> None:
            launched.append((self.kernel, self.grid, self.args))

    def step(q_len: int, kv_len: int, layer: int, begin: int) -> list[Any]:
        k, v = (layers[i][:, begin : begin + kv_len, :, :64] for i in (layer, 1 - layer))
        launched.clear()
        own = out[:, :q_len] if is_given else None
        found = rawattn.attention(q[:, :q_len], k, v, kv_lens=kv_lens, out=own, kernel=kernel, **options)
        assert found.shape == (batch, q_len, 4, 64)
        return [*launched]

    def maker(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return lambda _: scratch.setdefault((shape, dtype), torch.empty(shape, dtype=torch.bfloat16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_call, "BoundLaunch", Noted)
        patch.setattr(compiler, "compile_all", lambda sources: {})
        patch.setattr(making, "maker", maker)
        patch.setattr(
            loaded_kernel, "load", lambda launch, op, *_: loaded_kernel.LoadedKernel.of(None, launch.source.key, launch, op)
        )
        patch.setattr(making, "scratch_maker", lambda like, size: lambda _: scratch.setdefault(size, torch.empty(9)))
        forget()
        warm = [step(*each) for each in steps]
        for each, found in zip(steps, warm, strict=True):
            forget()
            assert found == step(*each)


SHORT, WIDE = torch.arange(159, dtype=torch.int32), torch.zeros(6, 120)
OF_QUERIES: dict[str, dict[str, Any]] = {  # q has 6 heads, k 2
    "plain": {},
    "causal": {"causal": True, "return_lse": True},
    "a window": {"window": (30, 5), "sinks": torch.zeros(6), "softcap": 20.0},
    "at offsets": {"causal": True, "q_offset": 7, "kv_offset": 2},
    "lengths": {"q_lens": torch.zeros(2, dtype=torch.int32), "kv_lens": torch.zeros(2, dtype=torch.int32)},
    "dropout": {"dropout": 0.5, "seed": torch.zeros(1, dtype=torch.int64)},
    "invariant": {"invariant": True},
    "constant time": {"constant_time": True},
    "tensor cores": {"kernel": "attn_fwd_mma", "causal": True, "return_lse": True},
    "shared tiles": {"config": AttnFwdMmaConfig(64, 64, pack_gqa=True, split=True), "kernel": "attn_fwd_mma", "return_lse": True},
    "split keys": {"config": AttnFwdMmaConfig(64, 64, split=True), "kernel": "attn_fwd_mma", "sinks": torch.zeros(6)},
    "parts of tiles": {"config": AttnFwdConfig(192, 64, 2, 1, True, 3), "kernel": "attn_fwd", "causal": True, "return_lse": True},
    "parts by sizes": {"config": AttnFwdConfig(64, 64, kv_splits=0), "kernel": "attn_fwd", "sinks": torch.zeros(6)},
    "any array": {"kernel": "attn_fwd_simt", "window": (9, 0), "return_lse": True},
    "documents": FUNCTIONS["documents"],
    "a table": {"score": lambda s, h, q, kv: s + WIDE[h, (q - kv).clip(0, 119)]},
    "its number of queries": {"mask": lambda q, kv, q_len: q_len - q <= 40 + kv},
    "as long as an array": {"mask": lambda q, kv: SHORT[q] >= LONG[kv]},
}
# Around numbers at which tiles end, selections change, keys are no longer split, and an array ends.
QUERIES = (159, 21, 22, 24, 25, 33, 64, 65, 79, 80, 81, 96, 97, 112, 127, 128, 129, 160, 161, 192, 193, 0, 1, 200, 256, 257, 145)


@pytest.mark.parametrize("is_packed, kv_len", [(False, 90), (True, 600)])
@pytest.mark.parametrize("name", OF_QUERIES)
def test_other_queries_launch_what_a_new_call_does(
    name: str, is_packed: bool, kv_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of the arguments, the kernel, the grid and the results; numbers of one selection are lowered once."""
    options, launched, results = OF_QUERIES[name], list[Any](), dict[Any, Any]()
    q, k = torch.zeros(2, 300, 6, 64).bfloat16(), torch.zeros(2, 700, 2, 64).bfloat16()

    def maker(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return lambda _: results.setdefault((shape, dtype), torch.empty(shape, dtype=torch.bfloat16))

    class Noted(stand_ins.Launch):
        def __call__(self) -> None:
            launched.append((self.kernel, self.grid, self.args))

    def launches(q_len: int, more: int) -> list[Any]:
        launched.clear()
        queries, keys = q[:, :q_len], k[:, : kv_len + more]
        if is_packed:
            queries, keys = (x.as_strided(x.shape, (x.shape[1] * x.stride(1), *x.stride()[1:])) for x in (queries, keys))
        found = rawattn.attention(queries, keys, keys, **options)
        o, *lse = found if isinstance(found, tuple) else (found,)
        assert o.shape == (2, q_len, 6, 64) and all(x.shape == (2, 6, q_len) for x in lse)
        return [*launched]

    monkeypatch.setattr(bound_call, "BoundLaunch", Noted)
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})
    monkeypatch.setattr(
        loaded_kernel, "load", lambda launch, op, *_: loaded_kernel.LoadedKernel.of(None, launch.source.key, launch, op)
    )
    monkeypatch.setattr(making, "maker", maker)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda _: results.setdefault(size, torch.empty(9)))
    lowered = [0]
    for made in ("__init__", "resized"):
        monkeypatch.setattr(Plan, made, counting(getattr(Plan, made), lowered))
    steps = [(n, more) for i, n in enumerate(QUERIES) for more in (i % 3, 5)]
    warm, used = [launches(*each) for each in steps], lowered[0]
    for each, found in zip(steps, warm, strict=True):
        forget()
        assert found == launches(*each)
    selections = {n if n * 3 <= 64 else three_bits(n) for n in QUERIES}
    assert used == len(selections) + 1 or name == "as long as an array", "each length of keys is planned where q is empty"


def test_a_decode_loop_lowers_once_in_256_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    q, rows = torch.zeros(1, 1, 4, 64).bfloat16(), torch.zeros(1, 1600, 2, 64).bfloat16()
    rawattn.attention(q, rows[:, :1025], rows[:, :1025])
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "resized", lambda *_: pytest.fail("a program was lowered"))
        for kv_len in range(1026, 1281):
            rawattn.attention(q, rows[:, :kv_len], rows[:, :kv_len])
    for n in (1100, 1101):
        with pytest.raises(ProblemError, match="v has shape"):
            rawattn.attention(q, rows[:, :n], rows[:, : n + 1])
    rawattn.attention(q, rows[:, :1281], rows[:, :1281])
    assert len(LAUNCHED) > 257 and len(keys_kept("lengths")) == 2


def test_near_the_limit_each_length_is_looked_at() -> None:
    """A longer one may be too long for its offset, though the same would be lowered."""
    q, rows, offset = torch.zeros(1, 1, 4, 64).bfloat16(), torch.zeros(1, 1200, 2, 64).bfloat16(), (1 << 30) - 1101
    rawattn.attention(q, rows[:, :1100], rows[:, :1100], kv_offset=offset)
    with pytest.raises(ProblemError, match="kv_offset is"):
        rawattn.attention(q, rows[:, :1101], rows[:, :1101], kv_offset=offset)


def test_a_launch_is_kept_for_each_output_and_stream() -> None:
    call = variations()["out"]
    rawattn.attention(**call)
    (call_kept,) = calls_kept()
    for _ in range(3):
        rawattn.attention(**call)
    STATE["stream"] = 7
    rawattn.attention(**call)
    assert len(call_kept._launches) == 2 and len(LAUNCHED) == 5
    for _ in range(3 * bound_call.KEPT_LAUNCHES):
        rawattn.attention(**call | {"out": torch.empty_like(call["q"])})
        assert len(call_kept._launches) <= bound_call.KEPT_LAUNCHES


def test_a_captured_launch_is_not_kept() -> None:
    call = variations()["out"]
    STATE.update(stream=7, capturing=True)
    rawattn.attention(**call)
    (call_kept,) = calls_kept()
    assert not call_kept._launches
    STATE["capturing"] = False
    rawattn.attention(**call)
    STATE["capturing"] = True
    rawattn.attention(**call)
    captured, eager, again = LAUNCHED
    assert captured == again != eager, "a graph counts where no eager launch does"


def test_no_memory_is_kept_alive() -> None:
    call = variations()["out"]
    plan = rawattn.plan(call["q"], call["k"], call["v"])
    rawattn.attention(**call)
    plan.run(**call)
    watched = [weakref.ref(x.untyped_storage()) for x in call.values()] + [weakref.ref(x) for x in call.values()]
    call.clear()
    gc.collect()
    assert not any(each() is not None for each in watched)


def test_a_refused_call_keeps_nothing() -> None:
    """Neither a tensor in the place of a number nor what a function captured."""
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    side = torch.tensor(3)
    with pytest.raises(ProblemError):
        rawattn.attention(q, k, v, window=(side, 0))
    watched = weakref.ref(side)
    del side
    gc.collect()
    assert watched() is None


def test_storages_are_looked_at_whole() -> None:
    x = torch.randn(2, 80, 4, 64)[:, 40:]
    assert are_held((x, None))
    x.untyped_storage().resize_(x.nbytes)  # enough for as many numbers, but these lie behind
    assert not are_held((x, None))


def freed() -> Any:
    """A tensor whose address is its offset, as FSDP leaves a parameter's."""
    memory = torch.randn(2 * 80 * 4 * 64 + 64).bfloat16()
    found = memory[64:].view(2, 80, 4, 64)
    memory.untyped_storage().resize_(0)
    assert found.data_ptr()
    return found


def test_a_captured_array_that_was_freed() -> None:
    """It is looked at wherever a kept call finds it elsewhere than before."""
    call, rows = tensors(), torch.zeros(2, 80)
    last = rows[1]
    plan = rawattn.plan(**call, score=(add := lambda s, q, kv: s + last[kv]))
    for _ in range(2):
        rawattn.attention(**call, score=add), plan.run(*call.values(), last)
    rows.untyped_storage().resize_(0)
    LAUNCHED.clear()
    for run in (lambda: rawattn.attention(**call, score=add), lambda: plan.run(*call.values(), last)):
        with pytest.raises(ProblemError, match=r"^last, which score captured, is a"):
            run()
    assert not LAUNCHED


@pytest.mark.parametrize("lengths", [(80, 75), (75, 80)], ids=["shorter", "longer"])
def test_a_storage_that_was_freed_at_another_length(lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was made from one on tensors of another length knows where its own tensors end."""
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})
    other, call = (tensors(length) for length in lengths)
    rawattn.attention(**other)
    made = len(keys_kept("family"))
    rawattn.attention(**call)
    assert len(keys_kept("family")) == made  # it was not planned
    short = torch.randn(2 * 80 * 4 * 64).bfloat16()
    k = short[: call["k"].numel()].view(call["k"].shape)
    short.untyped_storage().resize_(2 * (k.numel() - 1))
    LAUNCHED.clear()
    with pytest.raises(ProblemError, match=r"^k is a Tensor of shape .* that has no memory for its elements"):
        rawattn.attention(**call | {"k": k})
    assert not LAUNCHED


WRONG: dict[str, Any] = {
    "k of another dtype": lambda x: {"k": x["k"].half()},
    "k of another length": lambda x: {"k": torch.cat([x["k"]] * 2, 1)},
    "v of another batch": lambda x: {"v": x["v"][:1]},
    "strided columns": lambda x: {"q": torch.randn(2, 80, 4, 128).bfloat16()[..., ::2]},
    "q requires grad": lambda x: {"q": x["q"].detach().requires_grad_(), "out": torch.empty_like(x["q"])},
    "out requires grad": lambda x: {"out": torch.empty_like(x["q"]).requires_grad_()},
    "out is q": lambda x: {"out": x["q"]},
    "out of another shape": lambda x: {"out": torch.empty_like(x["q"][:1])},
    "out of another dtype": lambda x: {"out": torch.empty_like(x["q"], dtype=torch.float16)},
    "a row stride that is no multiple of 16 bytes": lambda x: {"k": torch.randn(2, 80, 4, 65).bfloat16()[..., :64]},
    "q begins at an odd address": lambda x: {"q": torch.randn(2 * 80 * 4 * 64 + 1).bfloat16()[1:].view(2, 80, 4, 64)},
    "a storage that was freed": lambda x: {"q": freed()},
    "sparse": lambda x: {"v": x["v"].to_sparse()},
    "meta": lambda x: {"v": x["v"].to("meta")},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_wrong_when_warm(wrong: Any) -> None:
    good = tensors()
    plan = rawattn.plan(**good)
    for _ in range(2):
        rawattn.attention(**good), plan.run(**good)
        for run in (rawattn.attention, plan.run):
            with pytest.raises((ProblemError, rawattn.UnsupportedError)):
                run(**good | wrong(good))


def test_requiring_grad_is_allowed_at_times() -> None:
    """A call that autograd follows is one whatever was called before, and no plan is run where it would."""
    good = tensors()
    good["q"].requires_grad_()
    plan = rawattn.plan(**{name: x.detach() for name, x in good.items()})
    for _ in range(2):
        with torch.no_grad():
            assert not rawattn.attention(**good).requires_grad and not plan.run(**good).requires_grad
        assert rawattn.attention(**good).requires_grad
        with pytest.raises(ProblemError, match="requires grad"):
            plan.run(**good)


def test_a_call_that_autograd_follows_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    good = tensors()
    good["q"].requires_grad_()
    kept = [rawattn.attention(**good, causal=True, return_lse=True) for _ in range(2)]  # the first of all finds torch
    monkeypatch.setattr(kept_calls, "call_on", lambda *_: pytest.fail("it was planned anew"))
    assert rawattn.attention(**good, causal=True).requires_grad and all(o.requires_grad for o, _ in kept)


def test_outputs_are_compared_with_inputs_that_moved() -> None:
    """A call that lies as another one has arrays of its own, and so has what it may not write to."""
    good, other = tensors(), tensors()
    rawattn.attention(**good)
    rawattn.attention(**good | {"q": other["q"], "out": good["q"]})
    with pytest.raises(ProblemError, match="out overlaps q in memory"):
        rawattn.attention(**good | {"q": other["q"], "out": other["q"]})


def test_what_is_kept_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "KEPT_CALLS", 4)
    for length in (*range(80, 86), *[80] * 6):
        rawattn.attention(**tensors(length))
        assert 0 < len(call_cache._calls) <= 4
    assert request._make_request.cache_info().maxsize == request.KEPT_REQUESTS


def test_an_array_among_the_options_is_not_kept() -> None:
    """It is refused, and nothing remembers it."""
    call, starts = tensors(), torch.tensor([0, 80], dtype=torch.int32)
    for name in ("softcap", "scale", "q_offset", "max_seqlen_q"):
        wrong = torch.ones(())
        packed = {each: x[0] for each, x in call.items()} | {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, name: wrong}
        with pytest.raises(ProblemError, match=name):
            rawattn.attention_varlen(**packed)
        watched = weakref.ref(wrong)
        del wrong, packed
        gc.collect()
        assert watched() is None


def test_torch_sees_a_call_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    call = tensors()
    rawattn.attention(**call), rawattn.attention(**call)
    monkeypatch.setattr(dispatcher, "attention", lambda *_, **__: "seen")
    dispatch, function = torch.utils._python_dispatch.TorchDispatchMode, torch.overrides.TorchFunctionMode
    for mode in (type("Dispatch", (dispatch,), {})(), type("Function", (function,), {})(), torch.autocast("cpu", torch.float16)):
        with mode:
            assert rawattn.attention(**call) == "seen"
    seen: list[Any] = []
    torch.func.vmap(lambda q: (seen.append(rawattn.attention(**call | {"q": q})), q)[1])(call["q"][None])
    assert seen == ["seen"]
    assert rawattn.attention(**call).shape == call["q"].shape


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": 1}),
    ({"causal": False}, {"causal": 0}),
    ({"return_lse": False}, {"return_lse": 0}),
    ({"constant_time": True}, {"constant_time": 1.0}),
    ({"window": (1, 0)}, {"window": (1.0, 0)}),
    ({"window": (1, 0)}, {"window": (True, 0)}),
    ({"window": (0, 1)}, {"window": {0, 1}}),
]


@pytest.mark.parametrize("good, wrong", EQUAL, ids=str)
def test_what_equals_a_right_option_may_be_wrong(good: dict[str, Any], wrong: dict[str, Any]) -> None:
    call = tensors()
    rawattn.attention(**call, **good)
    for run in (rawattn.attention, rawattn.plan, rawattn.explain):
        with pytest.raises(ProblemError):
            run(**call, **wrong)


def test_lengths_of_another_type() -> None:
    q = torch.randn(80, 4, 64).bfloat16()
    starts = torch.tensor([0, 80], dtype=torch.int32)
    rawattn.attention_varlen(q, q, q, starts, starts, 1, 1)
    with pytest.raises(ProblemError, match="max_seqlen_q is True"):
        rawattn.attention_varlen(q, q, q, starts, starts, True, 1)


def test_a_window_may_be_a_list() -> None:
    call = tensors()
    for window in ((3, 0), [3, 0]):
        rawattn.attention(**call, window=window)
    assert len(keys_kept("torch")) == 1 and rawattn.plan(**call, window=[3, 0]) is rawattn.plan(**call, window=(3, 0))


def test_constant_time_is_a_plan_of_its_own() -> None:
    call = tensors()
    steady, plain = rawattn.plan(**call, constant_time=True), rawattn.plan(**call)
    assert steady is not plain and (steady.op.constant_time, plain.op.constant_time) == (True, False)
    assert "constant_time" in repr(steady) and "constant_time" not in repr(plain)


@pytest.mark.parametrize("call", [rawattn.plan, rawattn.explain, rawattn.plan_backward, rawattn.explain_backward])
def test_an_option_that_there_is_not(call: Any) -> None:
    given = [tensors()["q"]] * (6 if "backward" in call.__name__ else 3)
    said = rf"{call.__name__}\(\) got an unexpected keyword argument "
    with pytest.raises(TypeError, match=rf"{said}'casual'. Did you mean 'causal'\?"):
        call(*given, casual=True)
    with pytest.raises(TypeError, match=rf"{said}'out'. Its arguments are .*causal, window, .*bias"):
        call(*given, out=given[0])


def test_calls_on_arrays_that_were_read_are_kept_by_form() -> None:
    wanted = request.request_for(Forward, request.Options())
    given = {name: reading.read(x, name) for name, x in tensors().items()}
    call = kept_calls.call_on(wanted, given)
    assert kept_calls.call_on(wanted, given | {"q": given["q"]._replace(pointer=given["q"].pointer + 16)}) is call
    assert kept_calls.call_on(wanted, given | {"q": given["q"]._replace(strides=(20544, 256, 64, 1))}) is not call


# ---- outputs -------------------------------------------------------------------------------------------------------------


def test_out_on_cu_seqlens() -> None:
    memory, size = torch.zeros(80 * 4 * 64 * 2 + 12, dtype=torch.uint8), 80 * 4 * 64 * 2
    q, out = torch.randn(80, 4, 64).bfloat16(), memory[:size].view(torch.bfloat16).view(80, 4, 64)
    apart, on = torch.tensor([0, 20, 80], dtype=torch.int32), memory[size - 8 : size + 4].view(torch.int32)
    rawattn.attention_varlen(q, q, q, apart, apart, out=out)
    for name, starts in (("cu_seqlens_q", (on, apart)), ("cu_seqlens_kv", (apart, on))):
        with pytest.raises(ProblemError, match=f"out overlaps {name}"):
            rawattn.attention_varlen(q, q, q, *starts, out=out)


@pytest.mark.parametrize("offset, fits", [(8, True), (16, True), (4, False), (1, False)])
def test_misaligned_out(offset: int, fits: bool) -> None:
    out = torch.empty(2 * 80 * 4 * 64 + 16).bfloat16()[offset:][: 2 * 80 * 4 * 64].view(2, 80, 4, 64)
    with contextlib.nullcontext() if fits else pytest.raises(ProblemError, match="no multiple of 16 bytes"):
        rawattn.attention(**tensors(), out=out)


def test_a_slow_kernel_is_told_of_where_it_is_called() -> None:
    select.warned.clear()
    for run in (rawattn.attention, rawattn.plan):
        select.warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forget()
            run(**{name: x.float() for name, x in tensors().items()}, softcap=5.0)
        assert [(each.category, each.filename) for each in caught] == [(SlowKernelWarning, __file__)]


def test_another_order_of_lengths() -> None:
    """Lengths that q, k and v of an earlier call had, on others of them."""
    long, short = torch.zeros(2, 2, 128, 4, 64).bfloat16(), torch.zeros(2, 80, 4, 64).bfloat16()
    rawattn.attention(short, *long)
    with pytest.raises(ProblemError, match="v has shape"):
        rawattn.attention(*long, short)
    rawattn.attention(long[0], short, short)


def test_what_one_function_captured_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number in a cell of its closure, and an array that is replaced, resized in place, or of another dtype then: each is read
    when it is called, and launches what a call that nothing was kept for launches."""
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda _: scratch)
    scratch, call, out = torch.empty(1 << 16), tensors(), torch.empty(2, 80, 4, 64).bfloat16()
    table, n = torch.arange(160, dtype=torch.int32), 5

    def keep(q: Any, kv: Any) -> Any:
        return (table[q] // 9 == table[kv] // 9) & (q - kv <= n)

    def said() -> list[Any]:
        LAUNCHED.clear()
        rawattn.attention(**call, mask=keep, out=out)
        return [*LAUNCHED]

    def check(same: bool = False) -> None:
        warm, kept = said(), said()
        forget()
        assert warm == kept == said() and (str(warm) in seen) == same
        seen.add(str(warm))

    seen = set[str]()
    check()
    for n in (6, 5, 70, 6):
        check(str(n) in "56" and len(seen) > 1)
    for other in (table.clone(), table.long(), table.short()):
        table = other
        check()
    table.resize_(81)
    check()
    STATE["stream"] = 7
    check()
    STATE["capturing"], n = True, 8
    check()
    table.resize_(79)
    check()  # it is clipped

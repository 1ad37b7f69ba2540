"""The kernels of the backward against the reference: each thing they must do in a list of cases, and what may vary at run time by
Hypothesis. New memory holds NaN, scratch and outputs too."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import rawattn
from rawattn.array import making
from rawattn.driver import context
from rawattn.driver.device import TYPICAL, Device
from rawattn.kernel import attn_bwd_mma
from rawattn.kernel.attn_bwd import ATTN_BWD, AttnBwdConfig, config_of
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.kernel.base import Kernel
from rawattn.kernel.group import WALKS, divisors
from rawattn.kernel.program import Program
from rawattn.operation import Backward
from rawattn.runtime.plan import Plan
from rawattn.runtime.select import Selection, select
from rawattn.testing import Case, cases, expect_backward
from rawattn.variant.field import Counter
from rawattn.variant.mask import And, Causal, Window
from tests.calls import far, much_memory, poisoned_memory
from tests.options import SCORES, run_time_values

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

LAYOUTS = ("contiguous", "heads_first", "packed", "padded", "expanded")
PACKED: list[tuple[tuple[int, int], ...]] = [
    (),
    ((0, 0),),
    ((300, 300), (1, 500), (0, 40), (200, 0), (129, 129), (0, 0), (64, 1)),
    tuple((n % 139, n * n % 211) for n in range(0, 60, 3)),
]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"mask": Causal("top_left")},
    {"window": (100, 0)},
    {"window": (None, 50)},
    {"window": (0, 0)},
    {"mask": Window(10, 70, "top_left")},
    {"causal": True, "window": (200, None)},
    {"mask": And(Causal("top_left"), Window(90, 90))},
]
LENGTHS = [(500, 500), (130, 900), (900, 130), (257, 0), (0, 70), (0, 0), (1, 777), (777, 1), (64, 65), (192, 193)]


def label(parameter: Any) -> str:
    if isinstance(parameter, Kernel):
        return parameter.name
    if not isinstance(parameter, Case):
        return str(parameter)
    many = parameter.lengths is not None and len(parameter.lengths) > 8
    return f"{dataclasses.replace(parameter, lengths=None).name}, many sequences" if many else parameter.name


def listed(given: Iterable[tuple[Any, Case, bool]]) -> pytest.MarkDecorator:
    """Each: a kernel, a case, and whether lse has a gradient."""
    return pytest.mark.parametrize(("kernel", "case", "dlse"), [*given], ids=label)


def fitting(case: Case) -> Any:
    """The kernel that serves the case on Hopper."""
    return select(Backward(case.op, True), TYPICAL["sm_90a"]).kernel


class Call:
    """A backward is given this, and gives these results."""

    def __init__(self, case: Case, dlse: bool = True, inputs: tuple[Any, ...] = ()) -> None:
        self.case = case
        self.q, self.k, self.v, *starts = inputs or case.inputs("torch", "cuda")
        self.do, lse_gradient = case.output_gradients("torch", "cuda")
        self.options: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=False))
        self.options |= case.options | case.used("torch", "cuda")
        self.options |= {"sinks": case.sink_logits("torch", "cuda")} if case.sinks else {}
        forward = rawattn.attention_varlen if starts else rawattn.attention
        self.o, self.lse = forward(self.q, self.k, self.v, **self.options, return_lse=True)
        self.dlse = {"dlse": lse_gradient} if dlse else {}
        expanded = case.layout == "expanded"
        case.poison((self.do, self.q, self.o), () if expanded else (self.k, self.v), (self.lse, lse_gradient))

    @property
    def given(self) -> dict[str, Any]:
        return {"do": self.do, "q": self.q, "k": self.k, "v": self.v, "o": self.o, "lse": self.lse, **self.dlse}

    def run(self, kernel: Any = None, **options: Any) -> tuple[Any, ...]:
        with poisoned_memory():
            return rawattn.attention_backward(**self.given, **self.options, kernel=kernel and kernel.name, **options)

    def check(self, found: tuple[Any, ...]) -> None:
        expect_backward(self.do, self.q, self.k, self.v, **self.dlse, **self.options).check(*found)


def check(case: Case, kernel: Any, dlse: bool = True) -> None:
    call = Call(case, dlse)
    call.check(call.run(kernel))


def equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sizes(head_dim: int, head_dim_v: int, kernel: Any = None) -> tuple[Any, Case, bool]:
    """A case in which all of memory beside the heads is NaN, and dtype, mask and dlse alternate with the size."""
    dtype, causal = "fp16" if head_dim % 16 else "bf16", head_dim_v % 24 == 0
    case = Case(dtype, 2, 200, 333, 4, 2, head_dim, head_dim_v, causal=causal, layout="padded")
    return kernel or fitting(case), case, head_dim % 24 == 0


SIZES = [(d, d) for d in (8, 16, 40, 56, 64, 72, 96, 112, 120, 128, 136, 144, 160, 192, 200, 248, 256)]
UNEQUAL = [
    (128, 64),
    (64, 128),
    (8, 128),
    (96, 72),
    (192, 128),
    (128, 192),
    (64, 192),
    (136, 184),
    (168, 136),
    (256, 8),
    (8, 256),
]


@listed(
    sizes(*each, kernel)
    for kernel in (None, ATTN_BWD_PAIR, ATTN_BWD_MMA)
    for each in SIZES + UNEQUAL
    if kernel is not ATTN_BWD_PAIR or 128 < max(each) < 200
)
def test_head_dims(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@listed(
    (kernel, Case(dtype, 1, *lengths, 3, 1, size, size, **mask), False)
    for (kernel, dtype, size), mask, lengths in itertools.product(
        [
            (ATTN_BWD, "bf16", 64),
            (ATTN_BWD, "fp16", 128),
            (ATTN_BWD_PAIR, "bf16", 256),
            (ATTN_BWD_MMA, "bf16", 64),
            (ATTN_BWD_MMA, "fp16", 128),
            (ATTN_BWD_MMA, "bf16", 256),
        ],
        MASKS,
        LENGTHS,
    )
    if size == 128 or mask in MASKS[:4]
)
def test_masks_and_lengths(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@listed(
    (kernel, Case("bf16", batch, 170, 300, heads, kv_heads, size, size, causal=True), True)
    for kernel, size in ((ATTN_BWD, 64), (ATTN_BWD_PAIR, 192), (ATTN_BWD_MMA, 64), (ATTN_BWD_MMA, 192))
    for batch, heads, kv_heads in ((2, 4, 4), (2, 8, 2), (3, 6, 1), (1, 1, 1), (2, 40, 8), (0, 2, 2), (9, 16, 16))
)
def test_batches_and_heads(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@listed(
    (kernel, Case("fp16", 1, 300, 300, 2, 2, size, size, causal=True, softcap=softcap, scale=scale), True)
    for kernel, size in ((ATTN_BWD, 128), (ATTN_BWD_PAIR, 256), (ATTN_BWD_MMA, 128), (ATTN_BWD_MMA, 256))
    for softcap, scale in ((None, -0.1), (None, 0.0), (None, 1.0), (30.0, None), (0.5, None), (5.0, -1.0), (50.0, 1.0))
)
def test_scores(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@pytest.mark.parametrize("name", SCORES)
@listed(
    (kernel, Case("bf16", 2, 200, 333, 4, 2, size, size, causal=True), True)
    for kernel, size in ((ATTN_BWD, 64), (ATTN_BWD, 128), (ATTN_BWD_PAIR, 192), (ATTN_BWD_MMA, 64), (ATTN_BWD_SIMT, 40))
)
@hypothesis.settings(max_examples=4, derandomize=True)
@hypothesis.given(data=st.data())
def test_scores_of_ones_own(kernel: Any, case: Case, dlse: bool, name: str, data: Any) -> None:
    """Their derivatives are files in CUDA, as the definitions say."""
    check(dataclasses.replace(case, score=data.draw(SCORES[name])), kernel, dlse)


@listed(
    (kernel, Case("bf16", heads=4, kv_heads=2, head_dim=size, head_dim_v=size, lengths=lengths, **mask), True)
    for (kernel, size), mask, lengths in itertools.product(
        [(ATTN_BWD, 64), (ATTN_BWD, 128), (ATTN_BWD_PAIR, 256), *((ATTN_BWD_MMA, size) for size in (64, 128, 256))],
        [MASKS[0], MASKS[1], MASKS[3]],
        PACKED,
    )
)
def test_packed_sequences(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@listed(
    (kernel, Case(lengths=tuple((1 + n % 65, n) for n in range(200)), **mask), False)
    for kernel in (ATTN_BWD, ATTN_BWD_MMA)
    for mask in MASKS[:2]
)
def test_every_length(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


SINKS = [
    Case(sinks=True, q_len=200, kv_len=300, heads=4, kv_heads=2, causal=True),
    Case(sinks=True, batch=3, q_len=300, kv_len=200, heads=3, kv_heads=3, causal=True, dtype="fp16"),  # rows without a key
    Case(sinks=True, lengths=((100, 200), (0, 10), (30, 0), (1, 500)), heads=4, kv_heads=2, causal=True),
    Case(sinks=True, q_len=0, kv_len=30, heads=2),
    Case(sinks=True, q_len=30, kv_len=0, heads=2),
    Case(sinks=True, batch=0, heads=2),
    Case(sinks=True, lengths=(), heads=2),
    Case(sinks=True, q_len=130, kv_len=100, head_dim=256, head_dim_v=256),
    Case(sinks=True, dtype="fp64", q_len=90, kv_len=70, causal=True),
]


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("case", SINKS, ids=label)
def test_sinks(case: Case, dlse: bool) -> None:
    call = Call(case, dlse)
    found = call.run()
    assert len(found) == 4
    call.check(found)


def test_no_sink_and_an_infinite_one() -> None:
    """-inf is as no sink, and its gradient is 0; +inf leaves nothing for the keys: gradients are 0, never NaN."""
    call = Call(Case(q_len=130, kv_len=70, heads=4, kv_heads=2, causal=True))
    plain = call.run()
    call.options["sinks"] = torch.tensor([-torch.inf, torch.inf, -torch.inf, torch.inf], device="cuda")
    call.o, call.lse = rawattn.attention(call.q, call.k, call.v, **call.options, return_lse=True)
    dq, _, _, dsinks = call.run()
    assert torch.equal(dq[:, :, ::2], plain[0][:, :, ::2]) and not dq[:, :, 1::2].any()
    assert not dsinks[::2].any() and dsinks.isfinite().all()
    torch.testing.assert_close(dsinks[1::2], call.dlse["dlse"].sum((0, 2))[1::2], rtol=1e-4, atol=1e-3)


@listed(
    (kernel, Case("bf16", 2, 150, 200, 4, 2, size, 64, causal=True, layout=layout, lengths=lengths), True)
    for (kernel, size), layout, lengths in itertools.product(
        [(ATTN_BWD, 64), (ATTN_BWD_PAIR, 192), (ATTN_BWD_MMA, 64)], LAYOUTS, [None, ((150, 200), (0, 5), (70, 64))]
    )
)
def test_layouts(kernel: Any, case: Case, dlse: bool) -> None:
    """Results go to memory in the same layout, and nothing beside them is written."""
    call = Call(case, dlse)
    out = tuple(case_memory(x) for x in (call.q, call.k, call.v))
    found = call.run(kernel, out=out)
    assert all(x is y for x, y in zip(found, out, strict=True))
    call.check(found)
    for x in found:
        assert int((~x._base.isnan()).sum()) == x.numel(), "something beside it was written"


def case_memory(like: Any) -> Any:
    """Rows that are eight numbers longer than those of ``like``, all NaN, without these eight."""
    wide = torch.full((*like.shape[:-1], like.shape[-1] + 8), float("nan"), dtype=like.dtype, device="cuda")
    return wide[..., : like.shape[-1]]


GRADIENTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of heads": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "expanded heads": lambda x: x[:, :, :1].expand_as(x),
    "expanded rows": lambda x: x[:, :1].expand_as(x),
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "columns first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@listed(
    (kernel, Case(batch=2, q_len=130, kv_len=200, heads=4, kv_heads=2, causal=True), True) for kernel in (ATTN_BWD, ATTN_BWD_MMA)
)
def test_gradients_of_any_layout(kernel: Any, case: Case, dlse: bool, kind: str) -> None:
    call = Call(case, dlse)
    call.do = GRADIENTS[kind](call.do)
    call.dlse = {"dlse": call.dlse["dlse"][:, :1].expand_as(call.lse)}
    found = call.run(kernel)
    call.check(found)
    copied = rawattn.explain_backward(**call.given, **call.options).copied
    assert copied == (("do", "dlse") if "expanded" in kind or kind in ("one number", "columns first") else ("dlse",))
    call.do, call.dlse = call.do.contiguous(), {"dlse": call.dlse["dlse"].contiguous()}
    assert equal(call.run(kernel), found)


# ---- the same bits


class Narrow:
    """A kernel on fewer blocks than its own: those that draw their works from a counter."""

    def __init__(self, kernel: Any, grid: int) -> None:
        self._kernel, self._grid = kernel, grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def lower(self, op: Backward, config: Any, device: Device) -> Program:
        program = self._kernel.lower(op, config, device)
        drawn = [any(isinstance(field.fill, Counter) for field in launch.fields) for launch in program.launches]
        grids = (min(x.grid, self._grid) if is_drawn else x.grid for x, is_drawn in zip(program.launches, drawn, strict=True))
        return program._replace(launches=tuple(x._replace(grid=n) for x, n in zip(program.launches, grids, strict=True)))

    def programs(self, op: Backward, config: Any, device: Device) -> tuple[Program, ...]:
        return (self.lower(op, config, device),)


PERSISTENT = [
    (ATTN_BWD, Case("bf16", 2, 1000, 1000, 4, 2, 64, 64, causal=True), True),
    (ATTN_BWD, Case("bf16", 1, 2000, 2000, 8, 8, 128, 128), False),
    (ATTN_BWD_PAIR, Case("bf16", 1, 900, 1500, 4, 1, 256, 256, causal=True), False),
    (ATTN_BWD, Case("bf16", heads=4, kv_heads=2, head_dim=128, head_dim_v=128, causal=True, lengths=PACKED[2], sinks=True), True),
    (ATTN_BWD, Case("bf16", 1, 2500, 2500, 4, 2, 128, 128), True),  # dq is made a step later
    (ATTN_BWD, Case("bf16", 2, 900, 1500, 6, 3, 160, 160, causal=True, sinks=True), True),
    (ATTN_BWD, Case("fp16", heads=4, kv_heads=2, head_dim=192, head_dim_v=128, lengths=PACKED[2]), False),
    (ATTN_BWD, Case("bf16", 1, 2048, 2048, 2, 2, 128, 128, causal=True), True),  # parts of query tiles
    (ATTN_BWD, Case("fp16", 1, 5000, 5000, 2, 2, 96, 96), False),
    (
        ATTN_BWD,
        Case("bf16", heads=4, kv_heads=4, head_dim=128, head_dim_v=128, lengths=((1024, 1024),) * 15 + ((1030, 1030),)),
        True,
    ),
    (
        ATTN_BWD,
        Case("bf16", heads=4, kv_heads=4, head_dim=128, head_dim_v=128, lengths=((130, 130),) * 90),
        False,
    ),  # side by side
    (ATTN_BWD, Case("bf16", 64, 151, 1961, 8, 8, 128, 128), False),
]
REPEATED = [
    *PERSISTENT,
    (ATTN_BWD_MMA, Case("bf16", 2, 1000, 1000, 4, 2, 64, 64, causal=True), True),
    (ATTN_BWD_MMA, Case("fp16", 1, 2000, 2000, 8, 8, 128, 128), False),
    (ATTN_BWD_MMA, Case("bf16", 1, 900, 1500, 4, 1, 256, 256, causal=True), False),
    (ATTN_BWD_MMA, Case("bf16", heads=4, kv_heads=2, head_dim=128, causal=True, lengths=PACKED[2], sinks=True), True),
    (ATTN_BWD_SIMT, Case("fp32", 2, 300, 400, 4, 2, 40, 40, causal=True, sinks=True), True),
]
OF_EACH = [*(PERSISTENT[i] for i in (1, 2, 4, 5, 7, 10)), REPEATED[-5], REPEATED[-1]]  # every kernel, and ways of attn_bwd


@listed(REPEATED)
def test_repeats_are_equal(kernel: Any, case: Case, dlse: bool) -> None:
    call = Call(case, dlse)
    wanted = call.run(kernel)
    call.check(wanted)
    assert all(equal(call.run(kernel), wanted) for _ in range(20))


@pytest.mark.parametrize("grid", [1, 7, 61])
@listed(PERSISTENT)
def test_other_grids_give_the_same_bits(kernel: Any, case: Case, dlse: bool, grid: int) -> None:
    call = Call(case, dlse)
    plan = rawattn.plan_backward(**call.given, **call.options, kernel=kernel.name)
    narrow = Plan(plan.op, plan.device, Selection(Narrow(kernel, grid), plan.config, ""), "torch")
    given = call.given | {name: call.options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv", "sinks") if name in call.options}
    with poisoned_memory():
        assert equal(narrow.run(**given), plan.run(**given))


@listed(REPEATED)
def test_graphs_replay(kernel: Any, case: Case, dlse: bool) -> None:
    call = Call(case, dlse)
    call.run(kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rawattn.attention_backward(**call.given, **call.options, kernel=kernel.name)
    for seed in (1, 2):
        other = Call(dataclasses.replace(case, seed=seed), dlse)
        for name, x in call.given.items():
            x.copy_(other.given[name])
        if case.sinks:
            call.options["sinks"].copy_(other.options["sinks"])
        graph.replay()
        assert equal(found, other.run(kernel))


@listed(OF_EACH)
def test_repeats_under_load_are_equal(kernel: Any, case: Case, dlse: bool) -> None:
    """A second stream takes multiprocessors away, now these and now those: blocks begin late and in any order."""
    call, busy = Call(case, dlse), torch.cuda.Stream()
    wanted, products = call.run(kernel), [torch.randn(n, n, device="cuda") for n in (512, 1500, 3000)]
    torch.cuda.synchronize()
    for i in range(10):
        with torch.cuda.stream(busy):
            for x in products[i % 3 :] * 4:
                torch.mm(x, x)
        found = [rawattn.attention_backward(**call.given, **call.options, kernel=kernel.name) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(equal(each, wanted) for each in found), i


@listed(OF_EACH)
def test_streams_do_not_meet(kernel: Any, case: Case, dlse: bool) -> None:
    calls = [Call(dataclasses.replace(case, seed=seed), dlse) for seed in range(4)]
    wanted, streams = [call.run(kernel) for call in calls], [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(rawattn.attention_backward(**call.given, **call.options, kernel=kernel.name))
        torch.cuda.synchronize()
        assert all(equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("number", [0, 1, 2, -1, 0x7FFFFFFF])
@listed(OF_EACH)
def test_whatever_an_aborted_launch_left_in_scratch(
    kernel: Any, case: Case, dlse: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that a launch left half way, sums, and statistics: what must be set is set by the backward itself, each time."""
    call = Call(case, dlse)
    wanted, made, original = call.run(kernel), [], making.scratch_maker
    monkeypatch.setattr("rawattn.runtime.call_cache._calls", {})  # a plan that a test before made has its maker
    plan = rawattn.plan_backward(**call.given, **call.options, kernel=kernel.name)

    def maker(like: Any, size: int) -> Callable[[Any], Any]:
        make = original(like, size)

        def filled(x: Any) -> Any:
            made.append(make(x))
            made[-1].view(torch.uint8)[: made[-1].nbytes // 4 * 4].view(torch.int32).fill_(number)
            return made[-1]

        return filled

    given = call.given | {name: call.options[name] for name in ("cu_seqlens_q", "cu_seqlens_kv", "sinks") if name in call.options}
    monkeypatch.setattr(making, "scratch_maker", maker)  # which a plan's first call asks
    assert equal(plan.run(**given), wanted) and len(made) == 1


# ---- configurations, and kernels against each other


@pytest.mark.parametrize(
    "store, chains, direction", [("final", 1, ""), ("final", 2, "ShortestFirst"), ("ordered", 2, "Ascending")]
)
@listed([(ATTN_BWD, Case(batch=2, q_len=500, kv_len=400, heads=4, kv_heads=2, head_dim=128, head_dim_v=128, causal=True), False)])
def test_configs(kernel: Any, case: Case, dlse: bool, store: str, chains: int, direction: str) -> None:
    call = Call(case, dlse)
    config: AttnBwdConfig = dataclasses.replace(config_of(case.op, store), dq_chains=chains, direction=direction)
    found = call.run(kernel, config=config)
    call.check(found)
    assert equal(call.run(kernel, config=config), found)


GROUPS: list[dict[str, Any]] = [  # of query heads that share a key head
    {"batch": 2, "q_len": 700, "kv_len": 900, "heads": 8, "kv_heads": 2, "causal": True, "sinks": True, "layout": "padded"},
    {"batch": 1, "q_len": 900, "kv_len": 1300, "heads": 6, "kv_heads": 1, "window": (300, 40), "scale": -0.1},
    {"batch": 3, "q_len": 129, "kv_len": 333, "heads": 4, "kv_heads": 1, "lens": ((129, 0, 70), (333, 200, 0))},
    {"heads": 6, "kv_heads": 2, "lengths": PACKED[2], "causal": True, "sinks": True},
]


@listed(
    (kernel, Case(dtype, head_dim=size, head_dim_v=size, **kind), True)
    for (kernel, size, dtype), kind in itertools.product(
        [(ATTN_BWD, 64, "fp16"), (ATTN_BWD, 128, "bf16"), (ATTN_BWD_PAIR, 192, "bf16"), (ATTN_BWD_MMA, 128, "fp16"),
         (ATTN_BWD_MMA, 40, "fp32")],
        GROUPS,
    )
)  # fmt: skip
def test_parts_of_a_group(kernel: Any, case: Case, dlse: bool) -> None:
    """However its heads are shared out among works, and in whatever order a work takes their tiles, each time the same bits."""
    call = Call(case, dlse)
    config = rawattn.explain_backward(**call.given, **call.options, kernel=kernel.name).selection.config
    walks = [{"walk": walk} for walk in WALKS] if hasattr(config, "walk") else [{}]
    for parts, walk in itertools.product(divisors(case.op), walks):
        own = dataclasses.replace(config, parts=parts, **walk)
        is_plain = walk.get("walk") in (None, "by_heads", "by_tiles")
        if not is_plain and kernel.legal(own, Backward(case.op, dlse), context.device(0)) is not None:
            continue  # others are for a full or causal mask and one length
        found = call.run(kernel, config=own)
        call.check(found)
        assert all(equal(call.run(kernel, config=own), found) for _ in range(3))


BUNDLED: list[dict[str, Any]] = [{"walk": "by_heads", "bundle": n} for n in (1, 3)]  # other orders of works, which change no sum
TOGETHER: list[dict[str, Any]] = [{"walk": "by_heads", "heads_together": 3, "direction": "Ascending"}]
ROUNDS: list[dict[str, Any]] = [{"walk": "rotated", "query_parts": 1}]
CUT: list[dict[str, Any]] = [{"query_parts": 2}, {"query_parts": 5}, *ROUNDS]


@listed(
    (ATTN_BWD, Case(dtype, head_dim=size, head_dim_v=size, **kind), dlse)
    for (dtype, size, dlse), kind in itertools.product(
        [("bf16", 128, True), ("fp16", 64, False)],
        [
            {"batch": 1, "q_len": 2048, "kv_len": 2048, "heads": 1, "kv_heads": 1},
            {"batch": 2, "q_len": 700, "kv_len": 1500, "heads": 4, "kv_heads": 2, "scale": -0.1},
            {"batch": 2, "q_len": 900, "kv_len": 900, "heads": 3, "kv_heads": 3, "causal": True, "sinks": True},
            {"batch": 3, "q_len": 333, "kv_len": 333, "heads": 2, "kv_heads": 2, "lens": ((129, 0, 333), (333, 200, 0))},
            {"heads": 4, "kv_heads": 4, "lengths": ((1024, 1024),) * 16},
            {"heads": 4, "kv_heads": 4, "lengths": ((4000, 4000), *((130, 130),) * 40, (700, 900), (0, 70), (70, 0))},
            *({"heads": 6, "kv_heads": 2, "lengths": each, "sinks": True} for each in PACKED),
        ],
    )
)
def test_orders_and_parts_of_works(kernel: Any, case: Case, dlse: bool) -> None:
    """Those that the configuration may say are right, each time with the same bits: those of other orders, where sums stay."""
    call = Call(case, dlse)
    for store, changes in itertools.product(("ordered", "final"), BUNDLED + ROUNDS if case.op.varlen else TOGETHER + CUT):
        config = config_of(case.op, store)
        own = dataclasses.replace(config, parts=1, **changes)
        found = call.run(kernel, config=own)
        call.check(found)
        assert all(equal(call.run(kernel, config=own), found) for _ in range(5))
        plain = dataclasses.replace(config, parts=1, walk="by_heads", direction=own.direction)
        assert changes in CUT or equal(call.run(kernel, config=plain), found)


@listed(
    (ATTN_BWD, Case(dtype, head_dim=size, head_dim_v=size, causal=True, **kind), dlse)
    for (dtype, size, dlse), kind in itertools.product(
        [("bf16", 128, True), ("fp16", 64, False), ("bf16", 96, False)],
        [
            {"batch": 1, "q_len": 4096, "kv_len": 4096, "heads": 1, "kv_heads": 1},
            {"batch": 2, "q_len": 2100, "kv_len": 2100, "heads": 3, "kv_heads": 3, "sinks": True},
            {"batch": 2, "q_len": 700, "kv_len": 1500, "heads": 10, "kv_heads": 2, "scale": -0.1},
            {"batch": 1, "q_len": 1500, "kv_len": 700, "heads": 7, "kv_heads": 1},
            {"batch": 3, "q_len": 333, "kv_len": 333, "heads": 2, "kv_heads": 2, "lens": ((129, 0, 333), (333, 200, 0))},
        ],
    )
)
def test_parts_along_the_diagonal_and_parts_that_differ(kernel: Any, case: Case, dlse: bool) -> None:
    call = Call(case, dlse)
    changes: list[dict[str, Any]] = [
        {"walk": "bands", "query_parts": parts, "dq_sums": parts * n} for parts, n in ((2, 1), (2, 2), (3, 1), (5, 3))
    ]
    group = case.op.heads_per_kv
    changes += [{"walk": "uneven", "parts": parts} for parts in range(2, group + 1)]
    for own in (dataclasses.replace(config_of(case.op), **{"parts": 1, **each}) for each in changes):
        found = call.run(kernel, config=own)
        call.check(found)
        assert all(equal(call.run(kernel, config=own), found) for _ in range(10))


WIDE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128}
NARROWER: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_dim": 120, "head_dim_v": 120}


@listed(
    [
        (ATTN_BWD, Case("bf16", 2, 500, 400, **WIDE, causal=True), True),
        (ATTN_BWD, Case("fp16", 1, 2100, 2500, **WIDE, mask=Causal("top_left")), False),
        (ATTN_BWD, Case("fp16", 3, 70, 701, **WIDE, sinks=True, scale=-0.1), True),
        (ATTN_BWD, Case("bf16", 1, 701, 70, **WIDE, causal=True, sinks=True), False),  # rows without keys
        (ATTN_BWD, Case("bf16", 1, 1, 1, **WIDE), False),
        (ATTN_BWD, Case("bf16", 2, 257, 0, **WIDE), True),
        (ATTN_BWD, Case("bf16", 2, 0, 70, **WIDE), False),
        (ATTN_BWD, Case("bf16", 9, 64, 129, 16, 1, 128, 128, layout="padded"), True),
        (ATTN_BWD, Case("bf16", 1, 900, 1000, **WIDE, window=(130, 70)), True),
        (ATTN_BWD, Case("fp16", 1, 900, 1000, **WIDE, causal=True, window=(300, None), sinks=True), False),
        (ATTN_BWD, Case("bf16", 2, 333, 333, **NARROWER, causal=True, sinks=True), True),
        (ATTN_BWD, Case("fp16", **NARROWER, lengths=PACKED[2]), False),
        *((ATTN_BWD, Case("bf16", **WIDE, lengths=each, causal=True, sinks=True), True) for each in PACKED),
        (ATTN_BWD, Case("bf16", **WIDE, lengths=PACKED[2], window=(100, 0)), True),
        (ATTN_BWD, Case("bf16", **WIDE, lengths=PACKED[3], scale=-0.1), False),
    ]
)
def test_dq_a_step_later_has_the_same_bits(kernel: Any, case: Case, dlse: bool) -> None:
    """The order of a step's products changes no sum: every result is that of the other order, each time."""
    call = Call(case, dlse)
    config = AttnBwdConfig(dq_parts=2, dq_columns=64)
    wanted = call.run(kernel, config=config)
    call.check(wanted)
    for store, registers in itertools.product(("ordered", "final"), ((40, 232), (56, 224))):
        own = dict(zip(("producer_registers", "consumer_registers"), registers, strict=True))
        later = dataclasses.replace(config, store=store, order="step_later", **own)
        for _ in range(3):
            found = call.run(kernel, config=later)
            assert equal(found, wanted) if store == "ordered" else equal(found[1:3], wanted[1:3])
    final = [call.run(kernel, config=dataclasses.replace(later, order=order)) for order in ("at_once", "step_later")]
    assert equal(*final)


SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64}


@listed(
    [
        (ATTN_BWD, Case("bf16", 2, 500, 400, **WIDE, causal=True), True),
        (ATTN_BWD, Case("fp16", 1, 1300, 900, **WIDE, window=(300, 70), sinks=True), False),
        (ATTN_BWD, Case("bf16", 3, 1000, 1100, **SMALL, causal=True), True),
        (ATTN_BWD, Case("bf16", 1, 2600, 2600, **SMALL, causal=True, window=(700, None)), False),
        (ATTN_BWD, Case("fp16", 2, 300, 701, **SMALL), False),
        *((ATTN_BWD, Case("bf16", **WIDE, lengths=each, causal=True), True) for each in PACKED),
    ]
)
def test_steps_apart_have_the_same_bits(kernel: Any, case: Case, dlse: bool) -> None:
    """A loop for whole tiles, and products that are skipped where a warpgroup keeps no key, change no sum."""
    call = Call(case, dlse)
    for store in ("ordered", "final"):
        config = config_of(case.op, store)
        assert config.steps == "apart"
        wanted = call.run(kernel, config=dataclasses.replace(config, steps="together"))
        call.check(wanted)
        for _ in range(3):
            assert equal(call.run(kernel, config=config), wanted)


MEDIUM: dict[str, Any] = {"batch": 2, "q_len": 500, "kv_len": 700, "heads": 4, "kv_heads": 2}
WIDE_KINDS: list[tuple[dict[str, Any], bool]] = [  # and whether one kernel computes it
    (MEDIUM, True),
    (MEDIUM | {"causal": True, "layout": "padded"}, True),
    (MEDIUM | {"window": (100, 70), "dtype": "fp16", "scale": -0.1}, True),
    (MEDIUM | {"causal": True, "window": (200, None), "sinks": True}, True),
    (MEDIUM | {"causal": True, "q_offset": 300, "kv_offset": 40}, True),
    ({"heads": 6, "kv_heads": 2, "lengths": PACKED[2], "causal": True, "sinks": True}, True),
    ({"heads": 4, "kv_heads": 4, "lengths": PACKED[3], "dtype": "fp16"}, True),
    (MEDIUM | {"causal": True, "softcap": 5.0}, False),
    (MEDIUM | {"dropout": 0.3, "causal": True}, False),
    (MEDIUM | {"causal": True, "lens": ((500, 129), (333, 700))}, False),
    ({"heads": 4, "kv_heads": 2, "lengths": PACKED[2], "window": (100, 0)}, False),
]


@pytest.mark.parametrize(("kind", "is_one"), WIDE_KINDS, ids=str)
@pytest.mark.parametrize("size", [(144, 144), (160, 160), (192, 128), (128, 192), (136, 184)], ids=str)
def test_wide_heads(size: tuple[int, int], kind: dict[str, Any], is_one: bool) -> None:
    """The kernel that is chosen is right, and has the same bits each time."""
    call = Call(Case(head_dim=size[0], head_dim_v=size[1], **kind))
    chosen = rawattn.explain_backward(**call.given, **call.options).selection.kernel
    assert not ATTN_BWD.runs_on(context.device(0)) or chosen is (ATTN_BWD if is_one else ATTN_BWD_PAIR)
    found = call.run()
    call.check(found)
    assert all(equal(call.run(), found) for _ in range(5))


@listed((ATTN_BWD, Case("bf16", head_dim=168, head_dim_v=size, causal=size == 136, **MEDIUM), True) for size in (136, 152))
def test_one_place_of_q(kernel: Any, case: Case, dlse: bool) -> None:
    call = Call(case, dlse)
    found = call.run(kernel)
    call.check(found)
    assert all(equal(call.run(kernel), found) for _ in range(5))


FEW: list[tuple[dict[str, Any], dict[str, Any]]] = [  # a case, and what is chosen on an H200
    ({"batch": 1, "q_len": 2048, "kv_len": 2048, "heads": 2, "kv_heads": 2, "causal": True}, {"walk": "bands", "query_parts": 4}),
    ({"batch": 1, "q_len": 4500, "kv_len": 4500, "heads": 3, "kv_heads": 3, "causal": True}, {"walk": "bands", "query_parts": 2}),
    ({"batch": 1, "q_len": 4096, "kv_len": 4096, "heads": 2, "kv_heads": 2}, {"query_parts": 2, "dq_sums": 2}),
    ({"batch": 1, "q_len": 8192, "kv_len": 8192, "heads": 40, "kv_heads": 8, "causal": True}, {"walk": "uneven", "parts": 2}),
    ({"batch": 1, "q_len": 3000, "kv_len": 3000, "heads": 3, "kv_heads": 3, "causal": True, "sinks": True}, {"walk": "bands"}),
    ({"batch": 1, "q_len": 2048, "kv_len": 2048, "heads": 4, "kv_heads": 4, "causal": True, "sinks": True}, {"query_parts": 2}),
    ({"batch": 1, "q_len": 1500, "kv_len": 1500, "heads": 2, "kv_heads": 2, "dtype": "fp16"}, {"query_parts": 2}),
    ({"heads": 4, "kv_heads": 4, "lengths": ((1024, 1024),) * 15 + ((1030, 1030),)}, {"walk": "rotated", "bundle": 0}),
    ({"heads": 4, "kv_heads": 4, "lengths": ((130, 130),) * 90, "sinks": True}, {"walk": "by_heads", "bundle": 2}),
    ({"heads": 8, "kv_heads": 2, "lengths": ((130, 130),) * 90}, {"bundle": 0}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "wanted"), FEW, ids=str)
@pytest.mark.parametrize("size", [80, 128])
def test_works_that_are_chosen(size: int, kind: dict[str, Any], wanted: dict[str, Any]) -> None:
    call = Call(Case(head_dim=size, head_dim_v=size, **kind))
    config = rawattn.explain_backward(**call.given, **call.options, kernel="attn_bwd").selection.config
    resolved = ATTN_BWD.resolved(Backward(call.case.op, True), config, context.device(0))
    assert context.device(0).sm_count != 132 or {name: getattr(resolved, name) for name in wanted} == wanted
    found = call.run(ATTN_BWD)
    call.check(found)
    assert all(equal(call.run(ATTN_BWD), found) for _ in range(10))


LONG = [
    (ATTN_BWD, Case("bf16", 1, 300, 4500, **WIDE), True),
    (ATTN_BWD, Case("fp16", 2, 700, 2700, **WIDE, causal=True, sinks=True), False),
    (ATTN_BWD, Case("bf16", 1, 300, 2900, **NARROWER, causal=True), True),
    (ATTN_BWD, Case("bf16", **WIDE, lengths=((100, 9000), (0, 700), (333, 0), (200, 1001)), sinks=True), True),
    (ATTN_BWD, Case("fp16", **WIDE, lengths=((300, 9000), (0, 700), (200, 1001), (333, 3333)), causal=True), False),
]


@listed(LONG)
def test_dq_is_made_a_step_later_where_keys_are_many(kernel: Any, case: Case, dlse: bool) -> None:
    call = Call(case, dlse)
    plan = rawattn.plan_backward(**call.given, **call.options, kernel=kernel.name)
    assert plan.config.order == "step_later"
    wanted = call.run(kernel)
    call.check(wanted)
    assert all(equal(call.run(kernel), wanted) for _ in range(10))


@listed(
    (ATTN_BWD_MMA, Case(dtype, 2, 300, 400, 4, 2, size, size, causal=True), True)
    for dtype, size in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 64), ("fp32", 128))
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_configs_of_other_architectures(kernel: Any, case: Case, dlse: bool, arch: str) -> None:
    call = Call(case, dlse)
    config = attn_bwd_mma.config_of(case.op, TYPICAL[arch])
    found = call.run(kernel, config=config)
    call.check(found)
    assert equal(call.run(kernel, config=config), found)


FLOAT32: list[dict[str, Any]] = [
    {"q_len": 200, "kv_len": 333},
    {"q_len": 333, "kv_len": 200, "causal": True, "layout": "padded"},
    {"q_len": 300, "kv_len": 300, "window": (70, 9), "softcap": 5.0, "scale": -0.2},
    {"lengths": PACKED[2], "causal": True, "sinks": True},
    {"q_len": 3000, "kv_len": 2500, "batch": 1, "heads": 2, "kv_heads": 1},  # sums of many numbers
]


@listed(
    (
        ATTN_BWD_MMA,
        Case(**{"dtype": "fp32", "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": d, "head_dim_v": dv, **kind}),
        True,
    )
    for kind in FLOAT32
    for d, dv in ((64, 64), (128, 128), (256, 256), (40, 24), (80, 112), (192, 128))
)
def test_float32_by_tensor_cores(kernel: Any, case: Case, dlse: bool) -> None:
    """Products of three tf32 products each are as exact as those of float32, and the same on every run."""
    call = Call(case, dlse)
    found = call.run(kernel)
    call.check(found)
    assert all(equal(call.run(kernel), found) for _ in range(5))


@pytest.mark.parametrize("kernel", [ATTN_BWD, ATTN_BWD_MMA], ids=label)
def test_unordered(kernel: Any) -> None:
    call = Call(Case(batch=2, q_len=500, kv_len=400, heads=4, kv_heads=2, causal=True))
    config = config_of(call.case.op, "unordered") if kernel is ATTN_BWD else None
    call.check(call.run(kernel, config=config, deterministic=False))
    if config is None:
        asked = call.given | call.options | {"kernel": kernel.name}
        stores = [rawattn.plan_backward(**asked, deterministic=each).config.store for each in (True, False)]
        assert stores == ["ordered", "unordered"]


@listed(
    (ATTN_BWD_SIMT, Case(dtype, 2, 70, 90, 4, 2, *size, layout=layout, **kind), True)
    for (dtype, size, layout), kind in itertools.product(
        [
            ("fp32", (64, 64), "packed"),
            ("fp64", (33, 300), "contiguous"),
            ("bf16", (1, 17), "padded"),
            ("fp16", (512, 8), "padded"),
        ],
        [{}, {"causal": True}, {"window": (20, 9), "softcap": 5.0}],
    )
)
def test_plain_kernel(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@listed((ATTN_BWD_SIMT, Case(dtype, 1, 40, 50, 2, 1, 512, 512, causal=True), True) for dtype in ("fp32", "bf16"))
def test_plain_kernel_at_its_widest(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@listed([(ATTN_BWD_SIMT, Case("fp32", heads=2, lengths=PACKED[2], causal=True), True)])
def test_plain_kernel_on_packed_sequences(kernel: Any, case: Case, dlse: bool) -> None:
    check(case, kernel, dlse)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_addresses_that_are_no_multiple_of_16_bytes(dtype: str) -> None:
    """They are refused where copying would mend them, but in float32; the plain kernel computes them where it is asked for."""
    call = Call(Case(dtype, 2, 70, 90, 4, 2, 40, 40, causal=True))
    for name in ("do", "q", "k", "v", "o"):
        x = getattr(call, name)
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype, device="cuda")
        setattr(call, name, wide[..., 3:-2].copy_(x))
    if dtype == "bf16" and ATTN_BWD_MMA.runs_on(context.device(0)):
        with pytest.raises(rawattn.UnsupportedError, match="kernel='attn_bwd_simt'"):
            call.run()
    else:
        call.check(call.run())
    out = tuple(case_memory(x) for x in (call.q, call.k, call.v))
    call.check(call.run(ATTN_BWD_SIMT, out=out))


def test_a_gradient_whose_rows_begin_anywhere() -> None:
    """As that of o where a model puts three more columns beside it: it is copied, and explain says so."""
    q, k, v, do = (torch.randn(2, 70, 4, 64, device="cuda").bfloat16() for _ in range(4))
    beside = torch.cat([do.flatten(2), do[..., 0, :3]], -1)[..., :256].unflatten(-1, (4, 64))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = rawattn.attention(*leaves, causal=True, return_lse=True)
    rest = [*(x.detach() for x in (q, k, v, o, lse))]
    found = torch.autograd.grad(o, leaves, beside)
    assert all(map(torch.equal, found, rawattn.attention_backward(do, *rest, causal=True)))
    assert rawattn.explain_backward(beside, *rest, causal=True).copied == ("do",)
    assert rawattn.explain_backward(do, *rest, causal=True).copied == ()


def test_reversed_rows() -> None:
    cupy = pytest.importorskip("cupy")
    case = Case("fp32", 2, 70, 130, 2, 2, 40, 40, causal=True, layout="reversed")
    (q, k, v), (do, dlse) = case.inputs("cupy", 0), case.output_gradients("cupy", 0)
    o, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
    found = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, causal=True, kernel="attn_bwd_simt")
    assert all(isinstance(x, cupy.ndarray) for x in found)
    expect_backward(do, q, k, v, dlse=dlse, causal=True).check(*found)


@listed((kernel, Case(heads=2, lengths=((100, 100), (70, 30)), sinks=True), True) for kernel in (ATTN_BWD, ATTN_BWD_MMA))
def test_rows_after_the_last_sequence(kernel: Any, case: Case, dlse: bool) -> None:
    """They belong to nobody: what they hold is not read, and their gradients are 0."""
    call = Call(case, dlse)
    wanted = call.run(kernel)
    for name in ("do", "q", "k", "v", "o"):
        x = getattr(call, name)
        setattr(call, name, torch.cat([x, torch.full_like(x[:50], float("nan"))]))
    nan = torch.full((2, 50), float("nan"), device="cuda")
    call.lse, call.dlse = torch.cat([call.lse, nan], 1), {"dlse": torch.cat([call.dlse["dlse"], nan], 1)}
    *found, dsinks = call.run(kernel)
    for x, y in zip(found, wanted, strict=False):
        assert torch.equal(x[:-50], y) and not x[-50:].any()
    assert torch.equal(dsinks, wanted[3])


SOME, NONE = (200, 64, 3, 0), None  # rows in use
LENS = [
    {"q_len": 200, "kv_len": 333, "lens": (SOME, (333, 1, 128, 70))},
    {"q_len": 200, "kv_len": 333, "lens": (NONE, (0, 333, 65, 200)), "causal": True},
    {"q_len": 200, "kv_len": 333, "lens": (SOME, NONE), "window": (100, 20)},
    {"q_len": 333, "kv_len": 200, "lens": ((333, 130, 60, 200), SOME), "causal": True, "layout": "packed", "softcap": 9.0},
    {"q_len": 200, "kv_len": 200, "lens": (SOME, SOME), "causal": True, "q_offset": 30, "layout": "heads_first"},
    {"q_len": 200, "kv_len": 200, "lens": ((0, 0, 0, 0), SOME), "window": (0, 0)},
    {"lengths": ((200, 333), (70, 64), (5, 200), (64, 0)), "lens": (SOME, (333, 0, 70, 0)), "causal": True},
    {"lengths": ((200, 333), (70, 64), (5, 200), (64, 0)), "lens": (NONE, (128, 64, 65, 0))},
]
OF_KERNEL = [(ATTN_BWD, 64), (ATTN_BWD, 128), (ATTN_BWD, 40), (ATTN_BWD_PAIR, 256), *((ATTN_BWD_MMA, n) for n in (64, 128, 256))]


@listed(
    (kernel, Case("bf16", heads=4, kv_heads=2, head_dim=size, head_dim_v=size, sinks=True, **{"batch": 4, **kind}), True)
    for (kernel, size), kind in itertools.product([*OF_KERNEL, (ATTN_BWD_SIMT, 64)], LENS)
)
def test_rows_in_use(kernel: Any, case: Case, dlse: bool) -> None:
    """Gradients of the others are 0, and NaN that is there reaches nothing."""
    call = Call(case, dlse)
    wanted = call.run(kernel)
    call.check(wanted)
    assert all(equal(call.run(kernel), wanted) for _ in range(3))


@listed(
    (kernel, Case(batch=4, q_len=200, kv_len=333, heads=4, kv_heads=2, head_dim=size, causal=True), True)
    for kernel, size in OF_KERNEL
)
def test_lengths_on_the_device(kernel: Any, case: Case, dlse: bool) -> None:
    """They are cut to what there is, and a graph reads them when it runs. With all rows in use bits are those without lengths."""
    call = Call(case, dlse)
    whole = call.run(kernel)
    call.options |= {name: torch.full((4,), 1 << 30, dtype=torch.int32, device="cuda") for name in ("q_lens", "kv_lens")}
    found = call.run(kernel)
    assert equal(found, whole)
    call.options["q_lens"].fill_(-7)
    assert not any(x.any() for x in call.run(kernel))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rawattn.attention_backward(**call.given, **call.options, kernel=kernel.name)
    call.options["q_lens"].fill_(150)
    call.options["kv_lens"].copy_(torch.tensor([333, 0, 64, 200], dtype=torch.int32))
    for x, now in zip(
        (call.o, call.lse), rawattn.attention(call.q, call.k, call.v, **call.options, return_lse=True), strict=True
    ):
        x.copy_(now)  # of the lengths that the graph finds
    graph.replay()
    call.check(found)


@listed(
    (kernel, Case("bf16", heads=4, kv_heads=2, causal=True, lengths=((100, 100), (130, 270), (65, 200))), False)
    for kernel in (ATTN_BWD, ATTN_BWD_MMA)
)
def test_sequences_do_not_meet(kernel: Any, case: Case, dlse: bool) -> None:
    """All of one sequence NaN: the others' gradients are the same bits."""
    call = Call(case, dlse)
    clean, starts = call.run(kernel), [call.options[f"cu_seqlens_{side}"].tolist() for side in ("q", "kv", "kv")]
    for i in range(3):
        dirty = Call(case, dlse)
        spans = [slice(*cu[i : i + 2]) for cu in starts]
        for x, span in zip((dirty.q, dirty.k, dirty.v), spans, strict=True):
            x[span] = float("nan")
        for x, y, span in zip(dirty.run(kernel), clean, spans, strict=True):
            other = torch.ones(len(x), dtype=torch.bool, device="cuda")
            other[span] = False
            assert torch.equal(x[other], y[other]) and x[~other].isnan().all()


@pytest.mark.parametrize(
    "kernel, size", [(ATTN_BWD, 64), (ATTN_BWD_PAIR, 136), (ATTN_BWD_MMA, 64), (ATTN_BWD_SIMT, 64)], ids=label
)
@pytest.mark.filterwarnings("ignore::rawattn.LayoutWarning")
@pytest.mark.parametrize("shape", [(70_000, 1), (1, 70_000)], ids=str)
def test_many_heads(shape: tuple[int, int], kernel: Any, size: int) -> None:
    """One key: its weight is 1, so dv is do, and dq and dk are 0."""
    batch, heads = shape
    q, k, v, do = (torch.randn(batch, 1, heads, size, device="cuda").bfloat16() for _ in range(4))
    o, lse = rawattn.attention(q, k, v, return_lse=True)
    with poisoned_memory():
        dq, dk, dv = rawattn.attention_backward(do, q, k, v, o, lse, kernel=kernel.name)
    assert torch.equal(dv, do)
    small = 0.02 * size / 64  # delta is a sum of as many roundings
    assert float(dq.abs().max()) < small and float(dk.abs().max()) < small


@pytest.mark.parametrize(
    "kernel, size", [(ATTN_BWD, 64), (ATTN_BWD_PAIR, 136), (ATTN_BWD_MMA, 64), (ATTN_BWD_SIMT, 64)], ids=label
)
def test_more_than_32_bits_of_elements(kernel: Any, size: int) -> None:
    """Batches, rows or heads, whichever there are three of, lie gigabytes apart."""
    sizes = {"head_dim": size, "head_dim_v": size}
    for case in (
        Case("fp16", 3, 70, 90, 1, 1, **sizes),
        Case("fp16", 1, 3, 3, 2, 1, **sizes),
        Case("fp16", 1, 9, 90, 3, 3, **sizes),
    ):
        with much_memory():
            call = Call(case, inputs=tuple(map(far, case.inputs("torch", "cuda"))))
            call.do, call.o = far(call.do), far(call.o)
            call.check(call.run(kernel, out=tuple(far(x) for x in (call.q, call.k, call.v))))
            del call


@pytest.mark.parametrize("kernel", [ATTN_BWD, ATTN_BWD_MMA], ids=label)
def test_more_than_32_bits_of_sums(kernel: Any) -> None:
    """The float32 sum of dq has more than 2^31 numbers: all sequences are one, and the last one's gradients are those of the
    first alone."""
    count, length = 130, 1 << 18
    with much_memory():
        if torch.cuda.mem_get_info()[0] < 40e9:
            pytest.skip("40 GB of memory are not free")
        q, do = (torch.randn(1, length, 1, 64, device="cuda").bfloat16() for _ in range(2))
        k, v = (torch.randn(1, 3, 1, 64, device="cuda").bfloat16() for _ in range(2))
        o, lse = rawattn.attention(q, k, v, return_lse=True)
        given, config = [do, q, k, v, o, lse], None
        if kernel is ATTN_BWD:  # not what a contributor finishes by itself
            config = config_of(rawattn.plan_backward(*given).op.forward, "ordered")
        options = {"kernel": kernel.name, "config": config}
        wanted = rawattn.attention_backward(*given, **options)
        many = [x.expand(count, *x.shape[1:]) for x in given[:-1]] + [lse.repeat(count, 1, 1)]
        assert count * length * 64 > 1 << 31
        found = rawattn.attention_backward(*many, **options)
        assert all(torch.equal(x[i], y[0]) for x, y in zip(found, wanted, strict=True) for i in (0, 64, 127, 128, 129))
        del found, many


# ---- whatever varies

KINDS = [
    (ATTN_BWD, Case("bf16", causal=True), True),
    (ATTN_BWD, Case("fp16", head_dim=128, head_dim_v=128, window=(0, 0), softcap=1.0), False),
    (ATTN_BWD_PAIR, Case("bf16", head_dim=192, head_dim_v=128, mask=Causal("top_left")), True),
    (ATTN_BWD, Case("bf16", head_dim=128, head_dim_v=128, causal=True, lengths=(), sinks=True), True),
    (ATTN_BWD_PAIR, Case("fp16", head_dim=256, head_dim_v=256, mask=And(Causal("top_left"), Window(0, 0)), lengths=()), False),
    (ATTN_BWD_SIMT, Case("fp32", causal=True, sinks=True), True),
    (ATTN_BWD, Case("bf16", causal=True, sinks=True, lens=((1,), (1,))), True),
    (ATTN_BWD, Case("fp16", head_dim=128, head_dim_v=128, lens=(None, (1,))), False),
    (ATTN_BWD_PAIR, Case("bf16", head_dim=256, head_dim_v=192, causal=True, lens=((1,), (1,))), True),
    (ATTN_BWD_MMA, Case("fp16", head_dim=128, head_dim_v=128, causal=True, lens=((1,), None)), True),
    (ATTN_BWD_MMA, Case("bf16", causal=True, sinks=True), True),
    (ATTN_BWD_MMA, Case("fp16", head_dim=128, head_dim_v=96, window=(0, 0), softcap=1.0, lengths=()), True),
    (ATTN_BWD_MMA, Case("bf16", head_dim=256, head_dim_v=256, mask=Causal("top_left")), False),
]


@st.composite
def varied(draw: Any, case: Case, longest: int = 400) -> Case:
    """The case with other run-time values: the compiled kernels are the same."""
    changes = run_time_values(draw, case, longest)
    changes["scale"] = draw(st.sampled_from((1e-3, 0.1, 0.3)))
    if any(case.lens):
        pairs = changes["lengths"] if "lengths" in changes else [(changes["q_len"], changes["kv_len"])] * changes["batch"]
        each = [st.tuples(*(st.sampled_from((0, n)) | st.integers(0, n) for n in side)) for side in zip(*pairs, strict=True)]
        changes["lens"] = tuple(draw(side) if lens is not None else None for side, lens in zip(each, case.lens, strict=True))
    return dataclasses.replace(case, layout=draw(st.sampled_from(LAYOUTS)), seed=draw(st.integers(0, 2**32 - 1)), **changes)


@listed(KINDS)
@hypothesis.settings(max_examples=30, derandomize=True)
@hypothesis.given(data=st.data())
def test_whatever_the_run_time_values(kernel: Any, case: Case, dlse: bool, data: Any) -> None:
    check(data.draw(varied(case)), kernel, dlse)


@hypothesis.settings(max_examples=12, derandomize=True)  # most compile three kernels
@hypothesis.given(
    case=cases(dtypes=("bf16", "fp16"), layouts=LAYOUTS, head_dims=(8, 40, 64, 128, 256), sinks=None, lens=True, scores=SCORES)
)
def test_whatever_the_kinds(case: Case) -> None:
    call = Call(case)
    call.check(call.run())


@pytest.mark.parametrize(
    "kernel, dtypes, head_dims",
    [(ATTN_BWD_SIMT, ("fp32", "fp64"), (1, 24, 72)), (ATTN_BWD_MMA, ("bf16", "fp16"), (40, 64, 128))],
    ids=label,
)
@hypothesis.settings(max_examples=5, derandomize=True, deadline=None)  # most compile three kernels
@hypothesis.given(data=st.data())
def test_whatever_the_kinds_of_other_kernels(kernel: Any, dtypes: Any, head_dims: Any, data: Any) -> None:
    check(data.draw(cases(dtypes=dtypes, longest=130, layouts=LAYOUTS, head_dims=head_dims, sinks=None, lens=True)), kernel)


@listed([(ATTN_BWD, REPEATED[0][1], True), (ATTN_BWD_PAIR, REPEATED[2][1], False), *REPEATED[5:8]])
def test_kernels_against_each_other(kernel: Any, case: Case, dlse: bool) -> None:
    """The plain kernel computes in float32 throughout: another may differ from it by what both may from the reference."""
    call = Call(case, dlse)
    allowed = expect_backward(call.do, call.q, call.k, call.v, **call.dlse, **call.options).errors
    for name, x, y in zip(allowed, call.run(kernel), call.run(ATTN_BWD_SIMT), strict=True):
        assert (np.abs((x.double() - y.double()).cpu().numpy()) <= 2 * allowed[name]).all(), name

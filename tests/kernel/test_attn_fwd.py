"""attn_fwd.cu and attn_fwd_mma.cu against the reference: each thing they must do in a list of cases, and what may vary at run
time by Hypothesis."""

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
from rawattn.driver import context
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd import ATTN_FWD, unshifted
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.base import Kernel
from rawattn.runtime import call_cache
from rawattn.runtime.select import select
from rawattn.testing import Case, expect
from rawattn.variant.mask import And, Causal, Window
from tests.calls import attend, check, far, much_memory
from tests.options import cases, run_time_values

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

DEVICE = TYPICAL["sm_90a"]
HEAD_DIMS = range(8, 257, 8)
LAYOUTS = ("contiguous", "heads_first", "packed", "padded", "expanded")  # "reversed" has a stride that TMA does not take
LENGTHS = [(500, 500), (130, 900), (900, 130), (257, 0), (0, 70), (0, 0), (1, 1), (1, 777), (777, 1), (64, 65)]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"mask": Causal("top_left")},
    {"window": (100, 0)},
    {"window": (None, 50)},
    {"window": (50, None)},
    {"window": (0, 0)},
    {"mask": Window(10, 70, "top_left")},
    {"causal": True, "window": (200, None)},
    {"mask": And(Causal("top_left"), Window(90, 90))},
    {"mask": And(Window(30, 300), Causal())},
]
PACKED: list[tuple[tuple[int, int], ...]] = [
    (),
    ((0, 0),),
    ((1, 1),),
    ((300, 300), (1, 500), (0, 40), (200, 0), (129, 129), (0, 0), (64, 1)),
    tuple((n % 139, n * n % 211) for n in range(100)),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test with each kernel; a test of configurations has its own list of both."""
    if "config" not in metafunc.fixturenames:
        metafunc.parametrize("kernel", [ATTN_FWD, ATTN_FWD_MMA], ids=label)


def label(parameter: Any) -> str:
    if isinstance(parameter, Kernel):
        return parameter.name
    if not isinstance(parameter, Case):
        return str(parameter)
    many = parameter.lengths is not None and len(parameter.lengths) > 8
    return f"{dataclasses.replace(parameter, lengths=None).name}, many sequences" if many else parameter.name


def listed(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [*cases], ids=label)


def sizes(head_dim: int, head_dim_v: int) -> Case:
    """A case in which all of memory beside the heads is NaN, and dtype and mask alternate with the size."""
    dtype = "fp16" if head_dim % 16 else "bf16"
    case = Case(dtype, 2, 200, 333, 4, 2, head_dim, head_dim_v, causal=head_dim_v % 24 == 0, layout="padded")
    return dataclasses.replace(case, dtype="bf16") if head_dim == head_dim_v == 8 else case


@listed([sizes(d, d) for d in HEAD_DIMS] + [sizes(d, 264 - d) for d in HEAD_DIMS] + [sizes(192, 128), sizes(128, 64)])
def test_head_dims(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@listed(
    Case(dtype, 1, *lengths, 3, 1, head_dim, head_dim, **mask)
    for (dtype, head_dim), mask, lengths in itertools.product([("bf16", 64), ("fp16", 128)], MASKS, LENGTHS)
)
def test_masks_and_lengths(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@listed(
    Case("fp16", batch, 70, 300, heads, kv_heads, causal=True)
    for batch, heads, kv_heads in ((2, 4, 4), (2, 8, 2), (3, 6, 1), (1, 1, 1), (2, 40, 8), (0, 2, 2))
)
def test_batches_and_heads(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@listed(
    Case("bf16", 2, q_len, 300, heads, kv_heads, layout=layout, **mask)
    for q_len, (heads, kv_heads, layout), mask in itertools.product(
        [1, 2, 17, 33], [(8, 2, "padded"), (6, 1, "heads_first"), (40, 8, "packed")], [MASKS[1], MASKS[7], {"softcap": 9.0}]
    )
)
def test_few_queries(case: Case, kernel: Kernel) -> None:
    """Heads that share a key head may share tiles, too."""
    check(case, kernel=kernel)


@listed(
    Case("bf16", 2, 500, 800, 4, 2, head_dim, head_dim_v, softcap=softcap, **more)
    for (head_dim, head_dim_v), (softcap, more) in itertools.product(
        [(64, 64), (128, 128), (72, 40), (192, 128), (256, 256)],
        [
            *((cap, mask) for cap in (20.0, 50.0) for mask in ({}, {"causal": True}, {"window": (300, 20)})),
            *((50.0, {"causal": True, "scale": scale}) for scale in (0.5, -1.0, 1e4)),
            *((80.0, more) for more in ({"sinks": True}, {"dropout": 0.2}, {"lengths": PACKED[3]})),
        ],
    )
)
def test_softcap_without_a_reference(case: Case, kernel: Kernel) -> None:
    """Rows take it back where logits are large."""
    assert kernel is ATTN_FWD_MMA or unshifted(case.op, select(case.op, DEVICE, "attn_fwd").config)
    check(case, kernel=kernel)


@listed(
    Case(dtype, 1, 300, 300, 2, 2, causal=True, softcap=softcap, scale=scale)
    for dtype, (softcap, scale) in itertools.product(
        ["bf16", "fp16"],
        [
            *((None, x) for x in (-0.1, 0.0, 2.0, -300.0, 1e6, 1e-30, -1e-38)),
            *((x, None) for x in (30.0, 5.0, 0.5, 1e4, 1e30, 1e-30)),
            *((5.0, -1.0), (3.0, 0.0), (50.0, 1e-20), (50.0, 10.0)),
        ],
    )
)
def test_scores(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@listed(
    Case(dtype, heads=2, kv_heads=1, head_dim=64, head_dim_v=head_dim_v, lengths=lengths, **mask)
    for (dtype, head_dim_v), mask, lengths in itertools.product(
        [("bf16", 64), ("fp16", 40)], [*MASKS[:4], {"softcap": 9.0}], PACKED
    )
)
def test_packed_sequences(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@listed(Case(lengths=tuple((1 + n % 65, n) for n in range(280)), **mask) for mask in MASKS[:2])
def test_every_length(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@listed(
    Case("bf16", 2, 150, 200, 4, 2, head_dim, 64, causal=True, layout=layout, lengths=lengths)
    for layout, head_dim, lengths in itertools.product(LAYOUTS, [64, 72], [None, PACKED[3]])
)
def test_layouts(case: Case, kernel: Kernel) -> None:
    """The result goes to memory in the same layout, and nothing beside it is written."""
    inputs, out = case.inputs("torch", "cuda"), case.out("torch", "cuda")
    o, lse = attend(case, *inputs, out=out, kernel=kernel)
    assert o is out
    expect(*inputs, **case.options).check(o, lse)
    assert int((~out._base.isnan()).sum()) == out.numel()


@listed([Case("bf16", 3, 100, 90, 4, 2, causal=True)])
def test_expanded_batch(case: Case, kernel: Kernel) -> None:
    q, k, v = case.inputs("torch", "cuda")
    check(case, q, k[:1].expand_as(k), v[:1].expand_as(v), kernel=kernel)
    check(case, q[:1].expand_as(q), k, v, kernel=kernel)


@pytest.mark.filterwarnings("ignore::rawattn.LayoutWarning")
@listed([Case(batch=70_000, q_len=5, kv_len=9), Case(heads=70_000, kv_heads=35_000, q_len=5, kv_len=9, causal=True)])
def test_many_heads(case: Case, kernel: Kernel) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in (
        (case.batch, case.q_len, case.heads, 64), *[(case.batch, case.kv_len, case.kv_heads, 64)] * 2
    ))  # fmt: skip
    o, lse = attend(case, q, k, v, kernel=kernel)
    assert o.isfinite().all() and lse.isfinite().all()
    for at in (0, 2, 32_766, 34_999, 65_534, 65_535, 65_536, 69_998):
        if case.batch > 1:
            parts = (x[at : at + 1] for x in (q, k, v, o, lse))
        else:
            of_kv = slice(at // 2, at // 2 + 1)
            parts = (q[:, :, at : at + 1], k[:, :, of_kv], v[:, :, of_kv], o[:, :, at : at + 1], lse[:, at : at + 1])
        *inputs, found_o, found_lse = parts
        expect(*inputs, **case.options).check(found_o, found_lse)


@listed(
    [
        Case("fp16", 3, 70, 90, 1, 1),
        Case("fp16", 1, 3, 3, 2, 1),
        Case("fp16", 1, 9, 90, 3, 3),
        Case("fp16", lengths=((2, 1), (1, 2))),
    ]
)
def test_more_than_32_bits_of_elements(case: Case, kernel: Kernel) -> None:
    """Batches, rows or heads, whichever there are three of, lie gigabytes apart."""
    q, k, v, *starts = case.inputs("torch", "cuda")
    with much_memory():
        o, lse = attend(case, *map(far, (q, k, v)), *starts, out=far(case.out("torch", "cuda")), kernel=kernel)
        expect(q, k, v, *starts, **case.options).check(o, lse)
        del o


CONFIGURED = [
    Case("bf16", 1, 700, 900, 3, 1, 64, 64, causal=True),
    Case("fp16", 1, 500, 1100, 2, 2, 128, 128, causal=True, window=(300, None)),
    Case("bf16", 1, 300, 700, 2, 1, 192, 128, causal=True, softcap=20.0),
    Case("fp16", heads=2, head_dim=256, head_dim_v=256, lengths=((300, 700), (0, 9), (200, 150))),
]


def configs(kernel: Kernel, case: Case) -> list[Any]:
    """Returns the configurations that the library compares, and some that it leaves out."""
    lone: list[Any] = [
        kernel.config_type(64, tile_kv, stages, last) for tile_kv in (32, 112, 256) for stages in (2, 5) for last in (1, 2)
    ]
    if kernel is ATTN_FWD_MMA:
        lone = [kernel.config_type(32 * n, 16 * n, stages, 1 + n % 2, 1, 1) for n in (2, 3, 4, 8) for stages in (3, 5)]
    return kernel.candidates(case.op, DEVICE) + [c for c in lone if kernel.legal(c, case.op, DEVICE) is None]


CONFIGS = [
    (kernel, case, config) for kernel in (ATTN_FWD, ATTN_FWD_MMA) for case in CONFIGURED for config in configs(kernel, case)
]


@pytest.mark.parametrize(("kernel", "case", "config"), CONFIGS, ids=label)
def test_every_config(case: Case, kernel: Kernel, config: Any) -> None:
    check(case, config=config, kernel=kernel)


KINDS = [
    Case("bf16"),
    Case("bf16", causal=True),
    Case("fp16", head_dim=128, head_dim_v=128, causal=True),
    Case("bf16", head_dim=192, head_dim_v=128, mask=Causal("top_left")),
    Case("fp16", head_dim=72, head_dim_v=24, window=(0, 0), softcap=1.0),
    Case("bf16", head_dim=8, head_dim_v=256, causal=True, window=(0, 0), scale=-1.0),
    Case("fp16", head_dim=256, head_dim_v=8, mask=Window(0, 0, "top_left")),
    Case("bf16", lengths=()),
    Case("fp16", causal=True, lengths=()),
    Case("bf16", head_dim=96, head_dim_v=96, window=(0, 0), softcap=1.0, lengths=()),
    Case("fp16", head_dim=40, mask=And(Causal("top_left"), Window(0, 0)), scale=-1.0, lengths=()),
]
KERNELS = [
    (kernel, case, found[at])
    for kernel, case in itertools.product([ATTN_FWD, ATTN_FWD_MMA], KINDS)
    for found in [configs(kernel, case)]
    for at in (len(found) // 3, len(found) * 2 // 3)
]


@st.composite
def varied(draw: Any, case: Case, longest: int = 400) -> Case:
    """The case with other run-time values: the compiled kernel is the same."""
    changes = run_time_values(draw, case, longest)
    sign = -1 if (case.scale or 0) < 0 else 1
    changes["scale"] = sign * draw(st.sampled_from((1e-3, 0.1, 0.3, 4.0)))
    layout, seed = draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 2**32 - 1))
    return dataclasses.replace(case, layout=layout, seed=seed, **changes)


@pytest.mark.parametrize(("kernel", "case", "config"), KERNELS, ids=label)
@hypothesis.settings(max_examples=30, derandomize=True)
@hypothesis.given(data=st.data())
def test_whatever_the_run_time_values(case: Case, kernel: Kernel, config: Any, data: Any) -> None:
    check(data.draw(varied(case)), config=config, kernel=kernel)


@hypothesis.settings(max_examples=25, derandomize=True)  # most compile a kernel
@hypothesis.given(case=cases(dtypes=("bf16", "fp16"), layouts=LAYOUTS, head_dims=(8, 40, 64, 80, 128, 256)))
def test_whatever_the_kinds(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


# Logits by key, which the kernel meets from the last to the first. Whole numbers up to 256 are exact in both formats, so that no
# more error is allowed than the weights' rounding makes.
PROFILES: dict[str, Callable[[int], int]] = {
    "falling": lambda j: j * 256 // 1100,
    "rising": lambda j: 256 - j * 256 // 1100,
    "falling by 12 a tile": lambda j: j // 64 * 12,
    "rising by 4 a tile": lambda j: 80 - j // 64 * 4,
    "rising by 12 a tile": lambda j: 220 - j // 64 * 12,
    "one key of 2^360": lambda j: 250 * (j == 17),
    "one key above 2^15": lambda j: 12 * (j == 600),
    "one key below 2^15": lambda j: 10 * (j == 600),
    "up and down": lambda j: j // 100 % 2 * 128 - 64,
}


@pytest.mark.parametrize("profile", PROFILES)
@listed(
    Case(dtype, 1, 300, 1100, 2, 1, causal=causal, scale=0.125, softcap=softcap)
    for dtype, causal, softcap in [*itertools.product(["bf16", "fp16"], [False, True], [None]), ("bf16", False, 100.0)]
)
def test_logits_that_move_along_the_row(case: Case, kernel: Kernel, profile: str) -> None:
    """The running maximum follows logits that go up and down, in some rows of a warp and not in others."""
    q, k, v = (x.cpu() for x in case.inputs("torch", "cuda"))
    factors = torch.tensor([8.0, 4.0, 0.0, -8.0, 2.0, 8.0, 0.0])  # of rows: seven, so that they fall otherwise in each warp
    q[:], k[:] = 0.0, 0.0
    q[..., 0] = factors[torch.arange(case.q_len) % 7, None]
    k[..., 0] = torch.tensor([[float(PROFILES[profile](j))] for j in range(case.kv_len)])
    check(case, *(x.cuda() for x in (q, k, v)), kernel=kernel)


NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


@pytest.mark.parametrize("column", [slice(None), 3], ids=["key", "element"])
@pytest.mark.parametrize("value", NON_FINITE)
@listed(
    [
        Case("bf16", 1, 300, 300, 2, 1, causal=True),
        Case("fp16", 1, 300, 400, 2, 1, window=(40, 20)),
        Case("bf16", 1, 300, 300, 2, 1, mask=And(Causal("top_left"), Window(100, 0)), softcap=20.0),
        Case("fp16", lengths=((200, 200), (150, 300)), causal=True),
    ]
)
def test_non_finite_keys(case: Case, kernel: Kernel, value: str, column: Any) -> None:
    """They reach the rows that keep them, as the reference says, and no others."""
    q, k, v, *starts = case.inputs("torch", "cuda")
    k[..., 170, :, column] = NON_FINITE[value]
    check(case, q, k, v, *starts, kernel=kernel)


@pytest.mark.parametrize("value", NON_FINITE)
@listed([Case("bf16", 1, 300, 300, 2, 1, causal=True), Case("fp16", heads=2, lengths=((200, 200), (150, 300)))])
def test_non_finite_queries(case: Case, kernel: Kernel, value: str) -> None:
    q, k, v, *starts = case.inputs("torch", "cuda")
    q[..., 170, :, :] = NON_FINITE[value]
    check(case, q, k, v, *starts, kernel=kernel)


@pytest.mark.parametrize("value", NON_FINITE)
@listed([Case("bf16", 1, 1500, 1500, 2, 1, causal=True), Case("fp16", 1, 1500, 1500, 2, 1, window=(40, 20))])
def test_non_finite_values(case: Case, value: str, kernel: Kernel) -> None:
    """They reach the rows that keep them; of the others only rows that share a tile with a row that does, as is documented."""
    q, k, v = case.inputs("torch", "cuda")
    v[:, 700, :, 3] = NON_FINITE[value]
    o, _ = attend(case, q, k, v, kernel=kernel)
    others = [i for i in range(64) if i != 3]
    expect(q, k, v[..., others], **case.options).check(o[..., others])
    mask, queries = case.op.mask, np.arange(1500)
    begin, end = mask.interval(queries, 1500, 1500)
    kept = (begin <= 700) & (end > 700)
    config = rawattn.explain(q, k, v, **case.options, return_lse=True, kernel=kernel.name).selection.config
    near = np.abs(queries[:, None] - queries[kept]).min(1) <= config.tile_q + config.tile_kv
    exempt = torch.from_numpy(near & ~kept).to(o.device)
    assert 0 < int(exempt.sum()) < 1000
    expected = expect(q, k, v, **case.options)
    o[:, exempt] = torch.from_numpy(expected.o).to(o)[:, exempt]
    expected.check(o)


@listed([Case("bf16", heads=4, kv_heads=2, causal=True, lengths=((100, 100), (130, 270), (65, 200), (300, 300)))])
def test_sequences_do_not_meet(case: Case, kernel: Kernel) -> None:
    """All of one sequence NaN: the others' results are the same bits."""
    q, k, v, *starts = case.inputs("torch", "cuda")
    clean = attend(case, q, k, v, *starts, kernel=kernel)
    for i in range(4):
        (q_begin, q_end), (k_begin, k_end) = (start[i : i + 2].tolist() for start in starts)
        dirty = [x.clone() for x in (q, k, v)]
        for x, begin, end in zip(dirty, (q_begin, k_begin, k_begin), (q_end, k_end, k_end), strict=True):
            x[begin:end] = float("nan")
        o, lse = attend(case, *dirty, *starts, kernel=kernel)
        other = torch.ones(len(q), dtype=torch.bool, device="cuda")
        other[q_begin:q_end] = False
        assert torch.equal(o[other], clean[0][other]) and torch.equal(lse[:, other], clean[1][:, other])
        assert o[~other].isnan().all() and lse[:, ~other].isnan().all()


@listed([Case("bf16", heads=2, lengths=((100, 100), (70, 30)))])
def test_rows_after_the_last_sequence(case: Case, kernel: Kernel) -> None:
    """They belong to nobody: what they hold is not read, and o keeps what it has there."""
    q, k, v, *starts = case.inputs("torch", "cuda")
    longer = [torch.cat([x, torch.full_like(x[:50], float("nan"))]) for x in (q, k, v)]
    out = torch.full_like(longer[0], 7.0)
    o, lse = attend(case, *longer, *starts, out=out, kernel=kernel)
    expect(q, k, v, *starts, **case.options).check(o[:170], lse[:, :170])
    assert (o[170:] == 7.0).all()


@listed([Case("fp16", 1, 200, 300, 2, 2), Case("bf16", heads=2, causal=True, lengths=((200, 300), (70, 30)))])
def test_lse_changes_nothing(case: Case, kernel: Kernel) -> None:
    inputs = case.inputs("torch", "cuda")
    assert torch.equal(attend(case, *inputs, kernel=kernel)[0], attend(case, *inputs, return_lse=False, kernel=kernel))


def test_reversed_rows_are_refused(kernel: Kernel) -> None:
    pytest.importorskip("cupy")
    case = Case("fp16", layout="reversed")
    with pytest.raises(rawattn.RawattnError, match="row stride of -128 bytes"):
        rawattn.attention(*case.inputs("cupy", 0), kernel=kernel.name)


def test_other_numbers_of_queries(kernel: Kernel) -> None:
    """Of lengths that what was lowered for one serves, in turn, also while a graph is captured: the bits of a call for which
    nothing was kept."""
    if not kernel.runs_on(context.device(0)):
        pytest.skip(f"{kernel.name} does not run here")
    rows = [torch.randn(2, 700, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)]

    def attend_to(q_len: int, more: int) -> Any:
        q, k, v = (x[:, :n].contiguous() for x, n in zip(rows, (q_len, 600 + more, 600 + more), strict=True))
        return rawattn.attention(q, k, v, window=(90, 30), return_lse=True, kernel=kernel.name)

    steps = [(n, i % 5) for i, n in enumerate((320, 257, 300, 258, 319, 129, 160, 140, 16, 9, 17))]
    wanted = []
    for step in steps:
        call_cache._calls.clear()
        wanted.append(attend_to(*step))
    found = [attend_to(*step) for step in steps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend_to(n + 1, more) for n, more in steps]
    graph.replay()
    for one, two in itertools.chain(
        zip(found, wanted, strict=True), zip(captured, [attend_to(n + 1, more) for n, more in steps], strict=True)
    ):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])

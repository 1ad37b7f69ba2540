"""Arrays of which TMA moves tiles of queries and keys: by the indices of a score's elements, and by how an array lies; and
gradients that are stored so, by whole kernels on the host."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import rawattn
from rawattn import ProblemError
from rawattn.array import tma
from rawattn.array.array import Array, contiguous_strides
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_bwd, render
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_captured import arrays_with_ds_gradient
from rawattn.kernel.program import Program
from rawattn.operation import Backward, captures
from rawattn.operation.operand import Layout
from rawattn.operation.spec import Spec
from rawattn.runtime.select import select
from rawattn.trace.pair_axes import PairAxes
from rawattn.variant.element import BF16, FP16
from rawattn.variant.function import FunctionScore
from rawattn.variant.mask import Causal, Full, Window
from tests.element_gradients import expect
from tests.emulator import gpu
from tests.host.kernel import test_backward as plain
from tests.host.kernel.test_backward import Case
from tests.operations import forward
from tests.traced import function

SIZES = (2, 4, 64, 128)
X4, X3, X5 = (np.zeros(shape, np.float32) for shape in ((2, 4, 80, 160), (4, 80, 160), (2, 3, 4, 80, 160)))
ORDER = np.zeros(80, np.int32)
WHOLE = np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (2, 4, 512, 520))


@pytest.mark.parametrize(
    "score, expected",
    [
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv], PairAxes(0, 2, 1, 3)),
        (lambda s, b, h, q, kv: s * 2 + X4[b, 0, q + 3, kv + 8].tanh(), PairAxes(0, 2, None, 3, 3, 8)),
        (lambda s, b, h, q, kv: s + X3[h, q, kv], PairAxes(None, 1, 0, 2)),
        (lambda s, b, h, q, kv: s + X5[b, 0, h, q, kv], PairAxes(0, 3, 2, 4)),
        (lambda s, b, h, q, kv: s + X4[b, q, h, kv], None),  # 4 for up to 64 queries: the index is clipped
        (lambda s, b, h, q, kv: s + X4[b, h + 1, q, kv], None),
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv + q], None),
        (lambda s, b, h, q, kv: s + X4[b, h, q, 2 * kv // 2 + 0 * q] + X4[1, h, q, kv], None),
        (lambda s, b, h, q, kv: s + X4[b, h, ORDER[q], kv], None),
        (lambda s, b, h, q, kv: s + X4[b, h, kv, q], None),
        (lambda s, b, h, q, kv: s + X4[b, h, 0, kv], None),
    ],
)
def test_axes(score: Any, expected: PairAxes | None) -> None:
    option, _ = function(score, "score", SIZES)
    assert [axes for _, axes in option.pair_axes.values()] == ([] if expected is None else [expected])


def lying(strides: tuple[int, ...] | None = None, pointer: int = 0, dtype: str = "bf16", shape: Any = X4.shape) -> Array:
    return Array("torch", 0, dtype, shape, strides or contiguous_strides(shape), pointer, None)


def test_how_an_array_lies() -> None:
    option, _ = function(lambda s, b, h, q, kv: s + X4[b, h, q, kv] * X3[h, q, kv], "score", SIZES)
    plain = Layout("q begins elsewhere")
    three = {"score_1": lying(shape=X3.shape)} if option.arrays[0].shape == X4.shape else {}
    assert three

    def found(**given: Array) -> tuple[str, ...]:
        layout = captures.with_captured(plain, Spec(score=option), {**three, **given})
        assert Layout.from_json(layout.to_json()) == layout and layout[:2] == plain[:2]
        return layout.tma_captured

    assert found(score_0=lying()) == ("score_0", "score_1") and len(plain.to_json()) == 2
    for good in (lying((0, 0, 160, 1)), lying(pointer=32), lying((8, 16, 1600, 1)), lying(dtype="fp16")):
        assert found(score_0=good) == ("score_0", "score_1")
    wrong = (1, 16, 160, 1), (51200, 12800, 0, 1), (4, 8, 161, 1)
    for bad in (lying(pointer=8), lying(dtype="fp32"), *map(lying, wrong)):
        assert found(score_0=bad) == ("score_1",)


@pytest.mark.parametrize(
    "keys, moved", [(144, ("score_0", "dscore_0")), (141, ("score_0",)), (142, ("score_0",)), (136, ("score_0", "dscore_0"))]
)
def test_gradient_of_one_row(keys: int, moved: tuple[str, ...]) -> None:
    """A lone row has no stride that must be a multiple of 16 bytes. Its gradient is filled and cleared in pieces of 16 and of 8
    bytes all the same, so its length must be one."""
    one = np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (1, 1, 1, keys))
    option, _ = function(lambda s, b, h, q, kv: s + one[b, h, q, kv], "score", (1, 1, 1, 130))
    found = Backward(forward(BF16, 1, 1, 130, 1, 1, 64, 64, score=option), wrt=("score_0",)).lying()
    assert [each.layout.tma_captured for each in found] == [(), moved]


@pytest.mark.parametrize(
    "score, offsets, moved",
    [
        (lambda s, b, h, q, kv: s + WHOLE[b, h, q + 1, kv + 8], {}, {"ahead", "elements", "ds"}),
        (lambda s, b, h, q, kv: s + WHOLE[b, h, q, kv + 1], {}, set()),
        (lambda s, b, h, q, kv: s + WHOLE[b, h, q, kv], {"kv_offset": 8}, set()),
        (lambda s, b, h, q, kv: s + WHOLE[b, h, q, kv], {"q_offset": 0}, set()),
    ],
)
def test_boxes_begin_at_multiples_of_16_bytes(
    score: Any, offsets: dict[str, int], moved: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch has a tensor map of a captured array that lies otherwise, nor if offsets are run-time numbers."""
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})  # the first configuration is taken, whatever it spills
    option, _ = function(score, "score", (2, 4, 508, 512))
    op = forward(BF16, 2, 500, 512, 4, 4, 64, 64, score=option, **offsets)
    found = set[str]()
    for each in (*op.lying(), *Backward(op, wrt=("score_0",)).lying()):
        selection = select(each, TYPICAL["sm_90a"])
        assert selection.kernel.name in ("attn_fwd", "attn_bwd")
        launches = selection.kernel.lower(each, selection.config, TYPICAL["sm_90a"]).launches
        found |= {field.name for each in launches for field in each.fields if getattr(field.fill, "axes", None)}
    assert found == moved


@pytest.mark.parametrize(
    "score, expected",
    [
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv], {"score_0"}),
        (lambda s, b, h, q, kv: 5 * np.tanh((s * 2 + 2 * X4[b, h, q, kv]) / 5), {"score_0"}),
        (lambda s, b, h, q, kv: 5 * np.tanh(s / 5) + X4[b, h, q, kv], {}),
        (lambda s, b, h, q, kv: s - X4[b, h, q, kv], {}),
        (lambda s, b, h, q, kv: s * 2 + X4[b, h, q, kv], {}),
        (lambda s, b, h, q, kv: s + X3[h, q, kv], {}),  # of all sequences
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv] + X4[b, h, q, kv + 8], {}),
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv] + X5[b, 0, h, q, kv], {"score_0", "score_1"}),
    ],
)
def test_gradients_that_are_ds(score: Any, expected: Any) -> None:
    """dS is stored if a logit changes with an element as it does with s, no two pairs share one, and the format is the call's."""
    option, _ = function(score, "score", SIZES)
    narrow = dataclasses.replace(option, arrays=tuple(each._replace(element="bf16") for each in option.arrays))
    for own, element, wanted in ((narrow, BF16, expected), (narrow, FP16, {}), (option, BF16, {})):
        op = forward(element, 2, 64, 128, 4, 4, 64, 64, score=own)
        plain, *found = Backward(op, wrt=tuple(each.name for each in own.arrays)).lying()
        assert (
            not arrays_with_ds_gradient(plain)
            and all(arrays_with_ds_gradient(each).keys() == set(wanted) for each in found)
            and len(found) == (own is narrow)
        )


def test_view() -> None:
    """The tensor map has the queries as rows and the keys as columns; what all sequences share has no step."""
    axes = PairAxes(None, 0, 1, 2)
    shape, strides = axes.view((80, 4, 160), (640, 160, 1))
    assert (shape, strides) == ((1, 80, 4, 160), (0, 640, 160, 1))
    assert tma.geometry(shape, strides, 2, 64) == ((160, 80, 4, 1), (1280, 320, 16), (64, 64, 1, 1), 1, 0)


# ---- calls


class Recorded:
    """A launch that only notes where its tensor maps begin."""

    def __init__(self, launch: Any, found: list[tuple[str, dict[str, int]]]) -> None:
        self.entry, self.found = launch.entry, found
        offsets = render.layout(launch.fields).offsets
        self.offsets = {name: offsets[name] for name in ("ds", "elements") if name in offsets}

    def launch(self, blocks: int, args: bytes) -> None:
        where = {name: int.from_bytes(args[at : at + 8], "little") for name, at in self.offsets.items()}
        self.found.append((self.entry, where))


def test_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Tensor maps are of the arrays of each call; arrays that lie otherwise get launches that need none."""
    found = list[tuple[str, dict[str, int]]]()
    q, k, v, do = (torch.randn(1, n, 2, 64).bfloat16() for n in (100, 136, 136, 100))
    o, lse, room = torch.randn_like(do), torch.zeros(1, 2, 100), torch.randn(4 * 100 * 136 + 16).bfloat16()
    size = 2 * 100 * 136
    gpu.stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu, "emulated", lambda launch, *more: Recorded(launch, found))
    for begin in (0, size, 8, 1, size):
        bias = room[begin : begin + size].view(1, 2, 100, 136)
        out = None if begin != 8 else torch.empty(size + 8).bfloat16()[8:].view(bias.shape)
        given = {"score": lambda s, b, h, q, kv: s + bias[b, h, q, kv], "wrt": (bias,), "out": (None, None, None, out)}  # noqa: B023
        gradient = rawattn.attention_backward(do, q, k, v, o, lse, **given, kernel="attn_bwd")[3]
        assert out is None or gradient is out
        launches, wanted = [entry for entry, _ in found], {"ds": gradient.data_ptr()}
        assert launches == ["attn_bwd_delta", "attn_bwd"] and not any(places for _, places in found[:1])
        assert found[1][1] == wanted | ({} if begin == 1 else {"elements": bias.data_ptr()})
        found.clear()
    plan = rawattn.plan_backward(do, q, k, v, o, lse, score=given["score"], wrt=(bias,))
    plan.run(do, q, k, v, o, lse, room[8 : 8 + size].view(bias.shape))
    assert found[1][1]["elements"] == room.data_ptr() + 16
    with pytest.raises(ProblemError, match=r"bias, which score captured, lies otherwise than when the plan was made"):
        plan.run(do, q, k, v, o, lse, room[1 : 1 + size].view(bias.shape))
    wrong = torch.empty(size + 1).bfloat16()[1:].view(bias.shape)
    with pytest.raises(ProblemError, match=r"out \(dscore_0\) has a pointer or stride that is no multiple of 16 bytes"):
        rawattn.attention_backward(do, q, k, v, o, lse, **{**given, "out": (None, None, None, wrong)})


@pytest.mark.parametrize("n, m", [(100, 0), (0, 136), (100, 136)])
def test_what_is_cleared(n: int, m: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The caller's memory may begin anywhere if nothing is stored, and elements are cleared one by one."""
    found = list[tuple[str, dict[str, int]]]()
    q, k, v, do = (torch.randn(1, rows, 2, 64).bfloat16() for rows in (n, m, m, n))
    o, lse, room = torch.randn_like(do), torch.zeros(1, 2, n), torch.randn(2 * 104 * 136 + 1).bfloat16()
    bias, out = torch.randn(1, 2, 104, 136).bfloat16(), room[1:].view(1, 2, 104, 136)
    given = {"score": lambda s, b, h, q, kv: s + bias[b, h, q, kv], "wrt": (bias,), "out": (None, None, None, out)}
    launches = list[Any]()
    gpu.stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu, "emulated", lambda launch, *more: launches.append(launch) or Recorded(launch, found))
    if m:
        with pytest.raises(ProblemError, match="no multiple of 16 bytes"):
            rawattn.attention_backward(do, q, k, v, o, lse, **given, kernel="attn_bwd")
    else:
        rawattn.attention_backward(do, q, k, v, o, lse, **given, kernel="attn_bwd")
    (clear,) = [each for each in launches if each.entry == "attn_bwd_captured_clear"]
    assert clear.fields[0].ctype == ("u64*" if m else "function::Bf16*")
    assert clear.values["words"] == 2 * 104 * 136 // (4 if m else 1)


# ---- kernels


def test_nothing_spills() -> None:
    """Elements that come by TMA take no registers before their product is there."""
    option, _ = function(lambda s, b, h, q, kv: s + WHOLE[b, h, q, kv], "score", (2, 4, 512, 512))
    for size, mask in ((64, Full()), (128, Causal())):
        op = Backward(forward(BF16, 2, 512, 512, 4, 4, size, size, score=option, mask=mask), wrt=("score_0",)).lying()[-1]
        selection = select(op, TYPICAL["sm_90a"])
        assert (selection.config.gradient, selection.config.elements) == ("score_0", "score_0")
        launches = selection.kernel.lower(op, selection.config, TYPICAL["sm_90a"]).launches
        binary = compiler.compile(next(each.source for each in launches if each.entry == "attn_bwd"))
        assert not binary.spill_bytes and not binary.advisories
        alone = dataclasses.replace(op, wrt=())
        for each, ctype in ((op, "TmaTensorOnce"), (alone, "TmaTensor")):
            launches = selection.kernel.lower(each, select(each, TYPICAL["sm_90a"]).config, TYPICAL["sm_90a"]).launches
            found = {field.ctype for launch in launches for field in launch.fields if getattr(field.fill, "axes", None)}
            assert found - {"StridedOutput"} == {ctype}, "how long L2 keeps them"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Held(FunctionScore):
    """A score with the array that it captured, as the formula of test_backward.py asks it."""

    held: Any = None

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:  # type: ignore[override]
        return super().logit(torch, (self.held,), s, batch, head, q, kv, *s.shape)


class Call(plain.Call):
    """A case whose score adds an element of ``shape``'s array to each logit; its gradient is stored. NaN is in elements that
    belong to no pair."""

    def __init__(self, case: Case, shape: tuple[int, ...], is_shifted: bool = False) -> None:
        self.bias = bias = np.random.default_rng(1).standard_normal(shape).astype(ml_dtypes.bfloat16)
        self.score = lambda s, b, h, q, kv: s + bias[b, h, q, kv]
        if is_shifted:
            self.score = lambda s, b, h, q, kv: s + bias[b, h, q + 3, kv + 8]
        n, m = case.lengths[0]
        bias[:, :, n + 3 * is_shifted :] = bias[..., m + 8 * is_shifted :] = np.nan
        option, _ = function(self.score, "score", (len(case.lengths), case.heads[0], n, m))
        held = torch.from_numpy(bias.astype(np.float64))
        own = Held(option.code, option.numbers, option.arrays, option.checked, held=held)
        super().__init__(dataclasses.replace(case, kinds={**case.kinds, "score": own}))
        self.arrays |= {"score_0": bias, "dscore_0": np.full_like(bias, np.nan)}
        self.op = dataclasses.replace(self.op, wrt=("score_0",), layout=Layout(tma_captured=("score_0", "dscore_0")))

    def program(self) -> Program:
        found = attn_bwd.config_of(self.op.forward, self.case.store)
        elements, _ = attn_bwd.elements_by_tma(self.op.forward, self.op.layout)
        found = dataclasses.replace(found, gradient="score_0", elements=elements, dq_chains=self.case.chains)
        assert ATTN_BWD.legal(found, self.op, TYPICAL["sm_90a"]) is None
        return ATTN_BWD.lower(self.op, found, TYPICAL["sm_90a"])

    def check(self, folder: pathlib.Path) -> list[str]:
        """Compares all gradients, and gives the launches."""
        plain.check(self, folder)
        spec, (do, q, k, v, o, lse) = self.op.forward.spec, (self.arrays[name] for name in ("do", "q", "k", "v", "o", "lse"))
        options = {"scale": spec.scale, "mask": spec.mask, "dlse": self.arrays["dlse"]}
        options |= {name: self.arrays[name] for name in ("q_lens", "kv_lens") if name in self.arrays}
        expect(do, q, k, v, o, lse, (self.bias,), score=self.score, **options).check([self.arrays["dscore_0"]])
        return [launch.entry for launch in self.program().launches]


STORED: dict[str, tuple[Any, ...]] = {
    "longer, final": (Case((128, 128), {"scale": -0.2}, ((70, 150),), (2, 2), store="final", chains=2), (1, 2, 80, 160), True),
    "causal": (Case((64, 64), {"mask": Causal()}, ((200, 136),), (2, 1), dlse=True), (1, 2, 200, 136)),
    "all pairs": (Case((64, 64), {}, ((70, 136),) * 2, dlse=True), (2, 2, 70, 136)),
    "window": (
        Case((64, 40), {"mask": Window(20, 50), "deterministic": False}, ((200, 280),) * 2, store="unordered"),
        (2, 2, 200, 280),
    ),
    "parts of rows": (
        Case((64, 64), {"mask": Causal()}, ((200, 136),) * 2, (2, 1), lens=((150, 70), (136, 60))),
        (2, 2, 200, 136),
    ),
}
CORE = "longer, final", "causal", "parts of rows"


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in STORED])
def test_stored(name: str, tmp_path: pathlib.Path) -> None:
    launches = Call(*STORED[name]).check(tmp_path)
    is_cleared = name in ("longer, final", "parts of rows")
    assert ("attn_bwd_captured_clear" in launches) == is_cleared and "attn_bwd_captured_mma" not in launches

"""Kernels with a bias of pairs that entries of the batch share, thread by thread on the CPU: threads and copies come in any
order. What is computed is compared with the formula, and its gradients by autograd, in float64."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from perf.lib.compiling import faults
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_bwd_triangle import ATTN_BWD_TRIANGLE, AttnBwdTriangleConfig
from rawattn.kernel.attn_fwd_triangle import ATTN_FWD_TRIANGLE, AttnFwdTriangleConfig
from rawattn.kernel.triangle import bias_of
from rawattn.operation import Backward, Forward
from rawattn.runtime.select import select
from rawattn.variant.element import BF16, ELEMENTS
from rawattn.variant.mask import Causal
from tests import host_threads
from tests.emulator import gpu
from tests.operations import forward
from tests.traced import function

torch = pytest.importorskip("torch")

from rawattn.integrations.cuequivariance import triangle_attention  # noqa: E402

H200 = TYPICAL["sm_90a"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call, and what is launched for it."""

    q_len: int = 100
    kv_len: int = 130
    biases: int = 1
    shared: int = 3  # entries of the batch that share a bias
    heads: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    bias: str = "fp32"
    masked: bool = False
    key_bias: str = ""  # its format
    element: str = "bf16"
    one_head: bool = False  # the bias has no axis of heads
    scale: float = 0.3
    rows: int = 2
    consumers: int = 2
    stages: int = 3
    polynomial_each: int = 0
    kv_rows: int = 2
    q_rows: int = 3
    parts: int = 1
    wrt: bool = True  # whether the bias has a gradient
    dlse: bool = False
    larger: bool = False  # the bias has more rows than there are queries
    missing: int = 0  # entries that the last bias has less than the others
    grid: int = 2
    seed: int = 0

    @property
    def batch(self) -> int:
        return self.biases * self.shared - self.missing

    @property
    def config(self) -> AttnFwdTriangleConfig:
        return AttnFwdTriangleConfig(self.rows, self.consumers, self.stages, self.polynomial_each)

    @property
    def config_backward(self) -> AttnBwdTriangleConfig:
        stages = min(self.stages, 3)
        return AttnBwdTriangleConfig(self.kv_rows, self.q_rows, stages, stages, min(2, self.consumers), self.parts)


class Call:
    """A case's arrays: rows of q are other queries than the bias has, and some of its logits are far from the others."""

    def __init__(self, case: Case) -> None:
        self.case, rng = case, np.random.default_rng(case.seed)
        batch, dtype = case.batch, ELEMENTS[case.element].dtype
        sizes = {"q": (case.q_len, case.head_dim), "k": (case.kv_len, case.head_dim), "v": (case.kv_len, case.head_dim_v)}
        arrays = {x: rng.standard_normal((batch, n, case.heads, d), np.float32).astype(dtype) for x, (n, d) in sizes.items()}
        heads = () if case.one_head else (case.heads,)
        rows = case.q_len + 3 * case.larger
        self.pairs = 2 * rng.standard_normal((case.biases, *heads, rows, case.kv_len), np.float32)
        self.pairs[..., case.kv_len // 2 :] += np.float32(30) * (rng.random(self.pairs[..., case.kv_len // 2 :].shape) > 0.97)
        self.pairs[..., 5, :] = -np.inf
        self.pairs = self.pairs.astype(ELEMENTS[case.bias].dtype)
        self.keep = rng.random((batch, case.kv_len)) > 0.4
        self.keep[-1] = False
        self.keep[0, :64] = True
        self.arrays = {**arrays, "score_0": self.pairs, "mask_0": self.keep}
        if case.key_bias:
            kept = self.keep | ~self.keep.any(1, keepdims=True)  # where all keys have -1e9, float32 knows no difference
            numbers = np.where(kept, rng.standard_normal(self.keep.shape, np.float32), np.float32(-1e9))
            self.arrays["score_1"] = numbers.astype(ELEMENTS[case.key_bias].dtype)

    @property
    def op(self) -> Forward:
        case, pairs, keep, n = self.case, self.pairs, self.keep, self.case.shared
        sizes = (case.batch, case.heads, case.q_len, case.kv_len)
        if case.one_head:
            score = lambda s, b, h, q, kv: s + pairs[b // n, q, kv]  # noqa: E731
        elif case.key_bias:
            of_keys = self.arrays["score_1"]
            score = lambda s, b, h, q, kv: s + pairs[b // n, h, q, kv] + of_keys[b, kv]  # noqa: E731
        elif case.biases == 1:
            score = lambda s, b, h, q, kv: s + pairs[0, h, q, kv]  # noqa: E731
        else:
            score = lambda s, b, h, q, kv: pairs[b // n, h, q, kv] + s  # noqa: E731
        options = {"score": function(score, "score", sizes)[0], "scale": case.scale, "return_lse": True}
        if case.masked:
            options["mask"] = function(lambda b, h, q, kv: keep[b, kv], "mask", sizes)[0]
        size = case.head_dim, case.head_dim_v
        return forward(ELEMENTS[case.element], sizes[0], *sizes[2:], case.heads, case.heads, *size, **options)

    def leaves(self) -> dict[str, Any]:
        return {
            name: torch.tensor(self.arrays[name].astype(np.float64), requires_grad=True) for name in ("q", "k", "v", "score_0")
        }

    def formula(self, q: Any, k: Any, v: Any, score_0: Any) -> tuple[Any, Any]:
        """o, and the logarithm of the sum."""
        pairs = (score_0[:, None] if self.case.one_head else score_0)[..., : self.case.q_len, :]
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.case.scale
        s = s + pairs.repeat_interleave(self.case.shared, 0)[: self.case.batch]
        if self.case.masked:
            s = s.masked_fill(~torch.tensor(self.keep)[:, None, None], -torch.inf)
        if self.case.key_bias:
            s = s + torch.tensor(self.arrays["score_1"].astype(np.float64))[:, None, None]
        none = torch.isinf(s.amax(-1, keepdim=True))
        p = torch.where(none, 0.0, torch.where(none, 0.0, s).softmax(-1))
        return torch.einsum("bhqk,bkhd->bqhd", p, v), s.detach().logsumexp(-1)

    def run(self, folder: pathlib.Path, source: Any = lambda each: each) -> None:
        """The forward's launches; results begin as NaN."""
        op, case = self.op, self.case
        assert ATTN_FWD_TRIANGLE.supports(op, H200) == [] and ATTN_FWD_TRIANGLE.legal(case.config, op, H200) is None
        program = ATTN_FWD_TRIANGLE.lower(op, case.config, H200)
        shape = (len(self.arrays["q"]), case.q_len, case.heads, case.head_dim_v)
        self.arrays |= {
            "o": np.full(shape, np.nan, op.element.dtype),
            "lse": np.full((shape[0], shape[2], shape[1]), np.nan, np.float32),
        }
        run(program, self.arrays, folder, case, source)

    def run_backward(self, folder: pathlib.Path, source: Any = lambda each: each) -> dict[str, Any]:
        """The launches of gradients, from the formula's results; they begin as NaN. Gives the formula's gradients."""
        leaves, case, op = self.leaves(), self.case, Backward(self.op, self.case.dlse, wrt=("score_0",) * self.case.wrt)
        o, lse = self.formula(**leaves)
        rng = np.random.default_rng(1)
        do = rng.standard_normal(o.shape, np.float32).astype(op.forward.element.dtype)
        loss = (o * torch.tensor(do.astype(np.float64))).sum()
        self.arrays |= {"o": o.detach().numpy().astype(do.dtype), "lse": lse.numpy().astype(np.float32), "do": do}
        wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for operand in op.outputs:
            like = self.arrays[operand.name[1:]]
            self.arrays[operand.name] = np.full(like.shape, np.nan, like.dtype)
        config = case.config_backward
        assert ATTN_BWD_TRIANGLE.supports(op, H200) == [] and ATTN_BWD_TRIANGLE.legal(config, op, H200) is None
        run(ATTN_BWD_TRIANGLE.lower(op, config, H200), self.arrays, folder, case, source)
        return {f"d{name}": x.numpy() for name, x in wanted.items() if f"d{name}" in self.arrays}


def run(program: Any, arrays: dict[str, Any], folder: pathlib.Path, case: Case, source: Any = lambda each: each) -> None:
    scratch = {each.name: np.full(-(-each.bytes // 8), np.nan) for each in program.scratch}
    for launch in program.launches:
        grid = launch.grid if launch.entry == "attn_bwd_delta" else min(launch.grid, case.grid)  # others take works in turn
        own = launch._replace(grid=grid, source=source(launch.source))
        host_threads.run(own, folder, host_threads.arguments(own, arrays | scratch), case.grid, seed=case.seed)


CASES = {
    "plain": Case(),
    "several biases": Case(biases=2, shared=3, masked=True),
    "one head for all": Case(one_head=True, biases=2, shared=2, bias="bf16"),
    "bias of fp16": Case(bias="fp16", kv_len=64, masked=True),
    "four rows": Case(rows=4, shared=5, q_len=64, masked=True),
    "three warpgroups": Case(consumers=3, q_len=200, shared=2, heads=1),
    "one row at a time": Case(rows=1, consumers=1, shared=2, kv_len=200),
    "head_dim 64": Case(head_dim=64, head_dim_v=64, q_len=70, bias="bf16", stages=2),
    "head_dim 16": Case(head_dim=16, head_dim_v=16, rows=3, shared=3, heads=1, kv_len=17, q_len=17),
    "uneven heads": Case(head_dim=24, head_dim_v=40, heads=1, scale=-0.3),
    "bias of keys": Case(key_bias="fp32", biases=2, shared=2, seed=5),
    "polynomial": Case(polynomial_each=4, masked=True, heads=1),
    "any order": Case(masked=True, seed=7, heads=1),
}


def error_of(found: Any, wanted: Any) -> float:
    return float(np.abs(found.astype(np.float64) - wanted).max() / max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, tmp_path: pathlib.Path) -> None:
    call = Call(CASES[name])
    call.run(tmp_path)
    o, lse = (x.detach().numpy() for x in call.formula(**call.leaves()))
    assert error_of(call.arrays["o"], o) < 1e-2
    assert np.array_equal(np.isinf(call.arrays["lse"]), np.isinf(lse))
    assert np.abs(np.where(np.isinf(lse), 0, call.arrays["lse"] - np.where(np.isinf(lse), 0, lse))).max() < 1e-3
    assert not call.arrays["o"][:, 5].any() and (not call.case.masked or not call.arrays["o"][-1].any())


def test_finite_logits_count(tmp_path: pathlib.Path) -> None:
    """A row whose logits are all far below others, but finite, is the mean of its values, as of kernels that take any score."""
    call = Call(Case(heads=1, shared=2, q_len=64))
    call.pairs[..., 7, :] = -1e32
    call.run(tmp_path)
    mean = call.arrays["v"].astype(np.float64).mean(1)
    assert error_of(call.arrays["o"][:, 7], mean) < 1e-2 and np.all(call.arrays["lse"][..., 7] < -9e31)


BACKWARD = {
    "plain": Case(),
    "parts": Case(shared=7, q_rows=2, parts=2, heads=1, masked=True),
    "several biases": Case(biases=2, shared=2, q_rows=2, masked=True, kv_rows=1),
    "few entries of the last bias": Case(biases=2, shared=6, missing=4, q_rows=2, parts=3, heads=1, kv_len=64, q_len=64),
    "one head for all": Case(one_head=True, shared=2, bias="bf16", q_len=64),
    "no gradient of the bias": Case(wrt=False, kv_len=64, masked=True),
    "bias of keys": Case(key_bias="bf16", shared=2, q_rows=2, seed=5),
    "one row at a time": Case(kv_rows=1, q_rows=1, consumers=1, shared=2, heads=1),
    "more rows in the bias": Case(larger=True, shared=2, heads=1, bias="fp16", kv_len=40, q_len=40),
    "head_dim 64": Case(head_dim=64, head_dim_v=64, kv_rows=1, q_rows=2, q_len=70, heads=1),
    "head_dim 16": Case(head_dim=16, head_dim_v=16, kv_rows=3, shared=3, heads=1, kv_len=17, q_len=17),
    "uneven heads": Case(head_dim=24, head_dim_v=40, heads=1, scale=-0.3, q_rows=2),
    "any order": Case(masked=True, seed=7, heads=1),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str, tmp_path: pathlib.Path) -> None:
    call = Call(BACKWARD[name])
    wanted = call.run_backward(tmp_path)
    assert len(wanted) == 3 + call.case.wrt
    for x, expected in wanted.items():
        assert error_of(call.arrays[x], expected) < 1.5e-2, x
    for x in ("dq", "dk", "dv") if call.case.masked else ():
        assert not call.arrays[x][-1].any(), "of a row that keeps no key"


# ---- calls


@pytest.mark.parametrize("leading", [(1,), (2,)])
def test_call(leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """cuEquivariance's function goes to these kernels, with its gradients; another N among as many rows is another call."""
    gpu.stand_in(monkeypatch, tmp_path)
    launches: list[str] = []
    emulated = gpu.emulated
    monkeypatch.setattr(gpu, "emulated", lambda launch, *more: launches.append(launch.entry) or emulated(launch, *more))
    q, k, v, do = (torch.randn(*leading, 4, 2, 40, 32).bfloat16() for _ in range(4))
    bias, mask = torch.randn(*leading, 1, 2, 40, 40), torch.rand(*leading, 4, 1, 1, 40) > 0.3
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    o = triangle_attention(*leaves, mask)
    s = (q.double() @ k.double().mT / 32**0.5 + bias.double()).masked_fill(~mask, -torch.inf)
    wanted = s.softmax(-1) @ v.double()
    assert error_of(o.detach().float().numpy(), wanted.detach().numpy()) < 1e-2
    found = torch.autograd.grad(o, leaves, do)
    for x, expected in zip(found, torch.autograd.grad(wanted, leaves, do.double()), strict=True):
        assert error_of(x.float().numpy(), expected.float().numpy()) < 1.5e-2
    backward = [
        "attn_bwd_delta",
        "pair_tiles",
        "pair_tiles",
        "key_bits",
        "attn_bwd_triangle_dkdv",
        "attn_bwd_triangle_dq",
        "pair_sums",
    ]
    assert launches == ["pair_tiles", "key_bits", "attn_fwd_triangle", *backward]
    assert all(
        torch.equal(x, y) for x, y in zip(torch.autograd.grad(triangle_attention(*leaves, mask), leaves, do), found, strict=True)
    )


def test_other_numbers_and_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """How many entries share a bias is a number that the score captured, and launches depend on it."""
    gpu.stand_in(monkeypatch, tmp_path)
    x, bias = torch.randn(4, 40, 1, 16).bfloat16(), 3 * torch.randn(4, 1, 48, 48)
    for n, q_len, kv_len in ((2, 40, 40), (1, 40, 40), (4, 40, 40), (3, 40, 40), (2, 40, 37), (2, 33, 40)):
        q, k, index = x[:, :q_len], x[:, :kv_len], torch.arange(4) // n
        o = rawattn.attention(q, k, k, score=lambda s, b, h, i, j: s + bias[b // n, h, i, j])  # noqa: B023
        s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4 + bias.double()[index, :, :q_len, :kv_len]
        wanted = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), k.double())
        assert error_of(o.float().numpy(), wanted.numpy()) < 1e-2, (n, q_len, kv_len)


def test_strides_and_a_gradient_of_lse(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Parts of a larger bias, which all heads have, and a mask that all entries have are read where they lie."""
    gpu.stand_in(monkeypatch, tmp_path)
    q, kv = torch.randn(3, 40, 2, 16).bfloat16().requires_grad_(), torch.randn(3, 44, 2, 16).bfloat16().requires_grad_()
    whole = torch.randn(1, 50, 56).requires_grad_()
    bias, keep = whole[:, 3:43, 5:49].expand(2, 40, 44), (torch.rand(1, 44) > 0.3).expand(3, 44)
    o, lse = rawattn.attention(q, kv, kv, bias=bias, mask=lambda b, h, i, j: keep[b, j], return_lse=True)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), kv.double()) / 4 + bias.double()
    s = s.masked_fill(~keep[:, None, None], -torch.inf)
    wanted = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), kv.double()), s.logsumexp(-1)
    assert error_of(o.detach().float().numpy(), wanted[0].detach().numpy()) < 1e-2
    assert error_of(lse.detach().numpy(), wanted[1].detach().numpy()) < 1e-5
    do, dlse = torch.randn(o.shape).bfloat16(), torch.randn(lse.shape)
    found = torch.autograd.grad((o, lse), (q, kv, whole), (do, dlse))
    for x, expected in zip(found, torch.autograd.grad(wanted, (q, kv, whole), (do.double(), dlse.double())), strict=True):
        assert error_of(x.float().numpy(), expected.float().numpy()) < 1.5e-2


# ---- which operations


def test_reasons() -> None:
    x = np.broadcast_to(np.zeros((), np.float32), (2, 4, 64, 64))
    sizes = (8, 4, 64, 64)

    def op(score: Any, **more: Any) -> Forward:
        return forward(BF16, 8, 64, 64, 4, 4, 32, 32, score=function(score, "score", sizes)[0], **more)

    shared = op(lambda s, b, h, q, kv: s + x[b // 4, h, q, kv])
    assert select(shared, H200).kernel is ATTN_FWD_TRIANGLE and select(Backward(shared), H200).kernel is ATTN_BWD_TRIANGLE
    assert select(op(lambda s, b, h, q, kv: s + x[0, 0, q, kv]), H200).kernel is ATTN_FWD_TRIANGLE
    for other in (
        op(lambda s, b, h, q, kv: s * 2 + x[b // 4, h, q, kv]), op(lambda s, b, h, q, kv: s + x[b // 4, h, kv, q]),
        op(lambda s, b, h, q, kv: s + x[b // 4, h, q, kv - q]), op(lambda s, b, h, q, kv: s - x[b // 4, h, q, kv]),
        dataclasses.replace(shared, batch=1, total_q=64, total_kv=64), dataclasses.replace(shared, head_dim=128),
    ):  # fmt: skip
        assert select(other, H200).kernel.name != "attn_fwd_triangle"
        assert select(Backward(other), H200).kernel.name != "attn_bwd_triangle"
    for changes, said in (
        ({"mask": Causal()}, "none of a bool for each key"), ({"dropout": 0.5}, "drops weights"),
        ({"invariant": True}, "the batch"),
        ({"constant_time": True}, "depends on the data"), ({"q_offset": 1}, "offsets"),
    ):  # fmt: skip
        assert said in "; ".join(ATTN_FWD_TRIANGLE.supports(op(lambda s, b, h, q, kv: s + x[0, h, q, kv], **changes), H200))
    assert select(shared, TYPICAL["sm_80"]).kernel.name == "attn_fwd_mma"
    for config, said in (
        (AttnFwdTriangleConfig(rows=8, stages=2), "spills"), (AttnFwdTriangleConfig(consumers=4), "consumers 4"),
        (AttnFwdTriangleConfig(polynomial_each=1), "polynomial_each is 1"), (AttnFwdTriangleConfig(stages=20), "shared memory"),
    ):  # fmt: skip
        assert said in str(ATTN_FWD_TRIANGLE.legal(config, shared, H200))
    for config, said in (
        (AttnBwdTriangleConfig(kv_rows=4), "spills"), (AttnBwdTriangleConfig(consumers=3), "consumers is 3"),
        (AttnBwdTriangleConfig(q_rows=5), "shared memory"),
    ):  # fmt: skip
        assert said in str(ATTN_BWD_TRIANGLE.legal(config, Backward(shared), H200))


def shared_by(batch: int, q_len: int, kv_len: int, heads: int, head_dim: int = 32) -> Forward:
    """An operation whose whole batch has one bias."""
    x = np.broadcast_to(np.zeros((), np.float32), (heads, q_len, kv_len))
    score = function(lambda s, b, h, q, kv: s + x[h, q, kv], "score", (batch, heads, q_len, kv_len))[0]
    return forward(BF16, batch, q_len, kv_len, heads, heads, head_dim, head_dim, score=score)


@pytest.mark.parametrize("batch", [2, 3, 4, 64])
def test_no_more_entries_at_once_than_share_a_bias(batch: int) -> None:
    op = shared_by(batch, 512, 512, 4)
    assert select(op, H200).config.rows <= batch
    x = np.broadcast_to(np.zeros((), np.float32), (1, 1, 512, 512))
    score = function(lambda s, b, h, q, kv: s + x[b // (1 << 30), 0, q, kv], "score", (batch, 4, 512, 512))[0]
    found = bias_of(dataclasses.replace(op, spec=dataclasses.replace(op.spec, score=score)))
    assert found is not None and (found.shared, found.biases) == (batch, 1)
    config = select(Backward(op, wrt=("score_0",)), H200).config
    assert config.kv_rows <= batch and config.q_rows <= batch


@pytest.mark.parametrize(("length", "heads"), [(512, 1), (768, 16), (1536, 16), (2048, 16), (4096, 8), (4096, 16)])
def test_sums_take_little_memory(length: int, heads: int) -> None:
    """Parts of the batch have sums of their own; one part is as large as a bias in float32."""
    op = Backward(shared_by(length, length, length, heads), wrt=("score_0",))
    sums = {x.name: x.bytes for x in ATTN_BWD_TRIANGLE.lower(op, AttnBwdTriangleConfig(), H200).scratch}["pair_sums"]
    assert sums <= max(1 << 28, 4 * heads * length * length)


def test_few_queries_and_large_biases_go_elsewhere() -> None:
    """Most rows of a tile are none for a step of decoding; a copy of a large bias in float32 is more than a call may take."""
    for sizes, is_here in (
        ((8, 1, 512, 4), False), ((8, 12, 512, 4), False), ((8, 16, 512, 4), True),
        ((4096, 4096, 4096, 32), True), ((2, 16384, 16384, 16), False),
    ):  # fmt: skip
        op = shared_by(*sizes)
        assert (select(op, H200).kernel is ATTN_FWD_TRIANGLE) == is_here
        assert (select(Backward(op), H200).kernel is ATTN_BWD_TRIANGLE) == is_here


@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_spills_and_products_follow_each_other(head_dim: int, masked: bool) -> None:
    case = Case(head_dim=head_dim, head_dim_v=head_dim, masked=masked, shared=8)
    op = Call(case).op
    backward = Backward(op, wrt=("score_0",))
    programs = [
        kernel.lower(each, kernel.candidates(each, H200)[-1], H200)
        for kernel, each in ((ATTN_FWD_TRIANGLE, op), (ATTN_BWD_TRIANGLE, backward))
    ]
    for config in (AttnFwdTriangleConfig(2, 3), AttnFwdTriangleConfig(2, polynomial_each=4)):
        if ATTN_FWD_TRIANGLE.legal(config, op, H200) is None:
            programs.append(ATTN_FWD_TRIANGLE.lower(op, config, H200))
    for launch in (launch for program in programs for launch in program.launches):
        binary = compiler.compile(launch.source)
        assert not faults(binary), (launch.entry, faults(binary))

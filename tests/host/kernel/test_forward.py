"""This module compares what the kernels compute on the CPU, with every kind of option, with the formula in float64."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from perf import sass
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd, attn_fwd_mma, attn_fwd_simt, render
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.operation import Forward
from rawattn.variant import Option, rows, scheduler, softmax, store
from rawattn.variant.element import BF16, ELEMENTS, FP32, FP64, Element
from rawattn.variant.field import Field, Fields
from rawattn.variant.mask import And, Causal, Full, SplitMask, UsedQueriesMask, Window, of_head
from rawattn.variant.score import Scale, Softcap
from tests import emulator
from tests.operations import forward
from tests.options import EXAMPLES, Alibi, HeadWindow

Array = npt.NDArray[Any]
DEVICE = TYPICAL["sm_90a"]


ALIBI, HEAD_WINDOW = Alibi(0.9), HeadWindow(3, 21)
SEED = -(7 << 40) + 3
KERNELS = {
    "attn_fwd": (ATTN_FWD, attn_fwd.AttnFwdConfig(128, 32, 2, 1)),
    "attn_fwd_mma": (ATTN_FWD_MMA, attn_fwd_mma.AttnFwdMmaConfig(32, 32, 2, 1, 1, 1)),
    "attn_fwd_simt": (ATTN_FWD_SIMT, attn_fwd_simt.AttnFwdSimtConfig(16, 16, 16, 16, 128, 1)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, small enough to be emulated; ``wrap`` changes the options that the kernel has for it."""

    kernel: str
    q_len: int = 70
    kv_len: int = 90
    heads: int = 2
    kv_heads: int = 1
    mask: Any = dataclasses.field(default_factory=Causal)
    score: Any = dataclasses.field(default_factory=Scale)
    element: Element = BF16
    constant_time: bool = False
    sinks: tuple[float, ...] | None = None
    split_keys: int = 0
    most_splits: int = 99
    offsets: tuple[int, int] | None = None
    lens: tuple[tuple[int, int], tuple[int, int]] | None = None  # q_lens and kv_lens of both sequences
    scale: float = 0.3
    dropout: float = 0.0

    head_dim: int = 24
    head_dim_v: int = 16

    @property
    def op(self) -> Forward:
        dims = self.head_dim, self.head_dim_v
        return forward(
            self.element, 2, self.q_len, self.kv_len, self.heads, self.kv_heads, *dims, scale=self.scale, mask=self.mask,
            score=self.score, return_lse=True, constant_time=self.constant_time, q_offset=self.offsets and self.offsets[0],
            kv_offset=self.offsets and self.offsets[1], dropout=self.dropout,
        )  # fmt: skip

    @property
    def config(self) -> Any:
        config = KERNELS[self.kernel][1]
        return config if self.kernel != "attn_fwd_mma" else dataclasses.replace(config, pack_gqa=attn_fwd_mma.packs(self.op))

    @property
    def splits(self) -> int:
        return min(-(-self.kv_len // self.split_keys), self.most_splits) if self.split_keys else 1


def with_options(case: Case, found: dict[str, Option]) -> dict[str, Option]:
    if case.split_keys:
        plan = dataclasses.replace(found["Scheduler"], split=True)
        found |= {"Mask": SplitMask(found["Mask"]), "Scheduler": plan, "Store": store.StorePartial()}
    elif case.sinks is not None:
        found["Softmax"] = softmax.WithSink(found["Softmax"])
    if case.lens is not None:
        found["Rows"] = rows.UsedQueries(rows.UsedKeys(found["Rows"]))
        found["Mask"] = UsedQueriesMask(found["Mask"])
    return found


def source_of(case: Case, arch: str, config: Any = None) -> tuple[Any, Fields]:
    kernel, config = KERNELS[case.kernel][0], config or case.config
    options = kernel.options
    with mock.patch.object(kernel, "options", lambda op, config: with_options(case, options(op, config))):
        return kernel.render(case.op, config, arch), kernel.fields(case.op, config)


def combine(element: Element, head_dim_v: int, width: int, options: Mapping[str, Option], arch: str) -> tuple[Fields, Any]:
    """The fields and the source of combine.cu."""
    every: dict[str, Option] = {"Element": element, "Rows": rows.Dense(), "Softmax": softmax.Plain(), "Store": store.StoreOLse()}
    every |= {"Launch": scheduler.Dependent(), **options}
    fields = (Field("heads", "i32"), Field("batches", "i32"), *dict.fromkeys(f for each in every.values() for f in each.fields))
    config = render.config_header({"head_dim_v": head_dim_v, "width": width, "threads": 64}, fields, [], every)
    return fields, render.source("combine.cu", config, arch)


def fold(folder: pathlib.Path, case: Case, width: int, options: Mapping[str, Option], values: dict[str, Any]) -> None:
    """Runs combine.cu."""
    fields, source = combine(case.element, case.head_dim_v, width, options, "sm_90a")
    folder.mkdir()
    emulator.Kernel(source, fields, folder, case.element.lse_name)(case.heads * case.q_len, values)


def arrays(case: Case) -> tuple[Array, Array, Array]:
    rng, dtype = np.random.default_rng(0), case.element.dtype
    d, dv = case.head_dim, case.head_dim_v
    given = (case.q_len, case.heads, d), (case.kv_len, case.kv_heads, d), (case.kv_len, case.kv_heads, dv)
    q, k, v = (rng.standard_normal((2, *shape)).astype(dtype) for shape in given)
    return q, k, v


def run(case: Case, folder: pathlib.Path) -> tuple[Array, Array]:
    """o and lse of the kernel, and of combine where the keys are split."""
    kernel, config = KERNELS[case.kernel][0], case.config
    q, k, v = arrays(case)
    number = case.element.lse_dtype
    o = np.full((2, case.q_len, case.heads, case.head_dim_v), np.nan, case.element.dtype)
    lse = np.full((2, case.heads, case.q_len), np.nan, number)
    partial_rows = lse.size
    scratch = tuple(np.full((case.splits, partial_rows, *size), np.nan, number) for size in ((case.head_dim_v,), ()))
    values = {**kernel.values(case.op, config, DEVICE), "o": o, "lse": lse, "counter": np.zeros(2, np.int32)}
    values |= dict(
        zip(("o_stride_batch", "o_stride_row", "o_stride_head"), (s // o.itemsize for s in o.strides[:3]), strict=True)
    )
    values |= {"splits": case.splits, "split_keys": case.split_keys, "partial_rows": partial_rows}
    values |= dict(zip(("o_partial", "lse_partial"), scratch, strict=True))
    values |= {name: np.array(x, np.int32) for name, x in zip(("q_lens", "kv_lens"), case.lens or ((), ()), strict=True)}
    values |= {"sinks": np.array(case.sinks or (), number), "seed": np.array([SEED]), "kv_len": case.kv_len}
    tma = case.kernel == "attn_fwd"
    for name, x, box in (("q", q, config.tile_q), ("k", k, config.tile_kv), ("v", v, config.tile_kv)):
        values[name] = emulator.tma(x, box) if tma else emulator.strided(x)
    source, fields = source_of(case, "sm_90a")
    (folder / "kernel").mkdir()
    count = 2 if tma else kernel.grid(case.op, config, DEVICE) * case.splits
    emulator.Kernel(source, fields, folder / "kernel", case.element.lse_name)(count, values)
    if case.split_keys:
        assert not np.isnan(scratch[1]).any() and np.isnan(o.astype(np.float32)).all()
        sink = softmax.Plain() if case.sinks is None else softmax.WithSink(softmax.Plain())
        values |= {"q_len": case.q_len, "heads": case.heads, "batches": 2}
        fold(folder / "fold", case, 4, {"Parts": store.ScratchParts(), "Softmax": sink}, values)
    return o.astype(np.float64), lse


def dropped(case: Case, batch: int, head: int, i: Array, j: Array) -> Any:
    """Returns what dropout multiplies the weights of these queries and keys by."""
    if not case.dropout:
        return 1.0
    offsets, weight = case.offsets or (0, 0), case.op.spec.weight
    return weight.kept(SEED, batch, head, i + offsets[0], j + offsets[1]) * weight.factor


def expected(case: Case) -> tuple[Array, Array]:
    q, k, v = (x.astype(np.float64) for x in arrays(case))
    i, j = np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None]
    o, lse = np.zeros((2, case.q_len, case.heads, case.head_dim_v)), np.zeros((2, case.heads, case.q_len))
    for batch in range(2):
        for head in range(case.heads):
            kv_head = head // (case.heads // case.kv_heads)
            dots = case.scale * q[batch, :, head] @ k[batch, :, kv_head].T
            s = case.op.spec.placed_score.logit(np, dots, batch, head, i, j)
            begin, end = of_head(case.op.spec.placed_mask, head).interval(np.arange(case.q_len), case.q_len, case.kv_len)
            kept = (j >= begin[:, None]) & (j < end[:, None])
            if (keep := case.op.spec.placed_mask.keep) is not None:
                kept &= keep(np, batch, head, i, j, case.q_len, case.kv_len)
            if case.lens is not None:
                q_len, kv_len = case.lens[0][batch], case.lens[1][batch]
                begin, end = case.mask.interval(np.arange(case.q_len), q_len, kv_len)
                kept = (j >= begin[:, None]) & (j < end[:, None]) & (i < q_len)
            sink = -np.inf if case.sinks is None else case.sinks[head]
            with np.errstate(all="ignore"):
                full = np.concatenate([np.where(kept, s, -np.inf), np.full((case.q_len, 1), sink)], 1)
                top = np.clip(full.max(1, keepdims=True), -1e300, 1e300)
                p = np.exp(full - top)
                total = p.sum(1, keepdims=True)
                lse[batch, head] = (top + np.log(total))[:, 0]
                p = np.where(total > 0, p[:, :-1] / total, 0)
                p = p * dropped(case, batch, head, i, j)
                o[batch, :, head] = p @ v[batch, :, kv_head]
    return o, lse


def check(case: Case, folder: pathlib.Path) -> tuple[Array, Array]:
    o, lse = run(case, folder)
    wanted_o, wanted_lse = expected(case)
    error = {BF16: (1.2e-2, 2e-5), FP32: (2e-6, 2e-6), FP64: (1e-13, 1e-13)}[case.element]
    np.testing.assert_allclose(lse, wanted_lse, rtol=error[1], atol=error[1])
    np.testing.assert_allclose(o, wanted_o, rtol=error[0], atol=error[0])
    return o, lse


INF = float("inf")
CASES = [
    *(Case(name) for name in KERNELS),
    Case("attn_fwd_mma", q_len=13, heads=4, kv_heads=1, mask=HEAD_WINDOW, score=Softcap(2.0)),
    Case("attn_fwd_mma", q_len=13, heads=4, kv_heads=1, mask=And(And(HEAD_WINDOW, Causal()), Window(right=9))),
    *(Case(name, sinks=(0.5, 200.0)) for name in KERNELS),
    *(Case(name, q_len=95, sinks=(INF, -INF)) for name in KERNELS),
    Case("attn_fwd_mma", q_len=7, kv_len=40, heads=4, sinks=(3.0, -300.0, 100.0, -INF)),
    Case("attn_fwd", q_len=95, kv_len=3, sinks=(-5e37, 1e38)),
    Case("attn_fwd_simt", element=FP64, sinks=(0.5, 200.0), score=Softcap(5.0)),
    *(Case(name, split_keys=32) for name in KERNELS),
    *(Case(name, split_keys=64, sinks=(1.5, -2.0), mask=And(Causal(), Window(20))) for name in KERNELS),
    Case("attn_fwd_mma", 5, 200, 4, split_keys=32, mask=Causal("top_left"), score=ALIBI, sinks=(1.0, 2.0, INF, -INF)),
    Case("attn_fwd_simt", element=FP64, split_keys=16, mask=Full()),
    Case("attn_fwd_simt", split_keys=32, most_splits=2, mask=Full()),  # the last one has the rest
    *(Case(name, offsets=(40, 10)) for name in KERNELS),
    *(Case(name, offsets=(7, 30), score=ALIBI, mask=And(Causal(), Window(31, 2))) for name in KERNELS),
    Case("attn_fwd_mma", q_len=5, offsets=(7, 30), score=ALIBI, mask=Window(3, 2)),
    Case("attn_fwd_mma", q_len=5, heads=4, offsets=(1000, 950), score=ALIBI, mask=HEAD_WINDOW),
    *(Case(name, kv_heads=2, lens=((40, 0), (77, 13))) for name in KERNELS),
    *(Case(name, kv_heads=2, mask=Full(), lens=((70, 33), (64, 0)), sinks=(0.5, 1.0)) for name in KERNELS),
    Case("attn_fwd", mask=And(Causal(), Window(20)), lens=((65, 64), (90, 31)), split_keys=32),
    *(Case(name, constant_time=True, score=Softcap(1e6)) for name in KERNELS),
    *(Case(name, dropout=0.3) for name in KERNELS),
    Case("attn_fwd", dropout=0.3, offsets=(64, 32)),
    Case("attn_fwd", dropout=0.9, offsets=(7, 30), mask=Full()),
    Case("attn_fwd_mma", dropout=0.5, split_keys=32, sinks=(0.5, -1.0), mask=Full()),
    Case("attn_fwd_mma", q_len=13, heads=4, dropout=0.3, mask=HEAD_WINDOW, offsets=(35, 32)),
    Case("attn_fwd_mma", q_len=5, heads=4, dropout=0.3, offsets=(7, 3), split_keys=64, mask=Full()),
    Case("attn_fwd_simt", element=FP64, dropout=0.3),
    Case("attn_fwd", scale=-0.3, score=Softcap(1.0), mask=Window(11, 5, "top_left")),
    Case("attn_fwd_mma", element=FP32, sinks=(0.5, 2.0)),  # by tf32 in two parts
    Case("attn_fwd_mma", kv_heads=2, element=FP32, scale=-0.3, mask=Window(11, 5), lens=((40, 0), (77, 13))),
    Case("attn_fwd_mma", q_len=13, heads=4, element=FP32, split_keys=32, mask=Full(), scale=1.5),
    Case("attn_fwd_mma", element=FP32, offsets=(7, 30), score=ALIBI, mask=And(Causal(), Window(31, 2))),
    Case("attn_fwd_mma", head_dim=272, head_dim_v=288),  # above 256 two warps share rows, halves of the columns or about
    Case("attn_fwd_mma", 40, 50, 1, sinks=(0.5,), head_dim=320, head_dim_v=320),
    Case("attn_fwd_mma", 13, 50, 4, mask=HEAD_WINDOW, score=Softcap(2.0), scale=-0.3, head_dim=48, head_dim_v=512),
    Case("attn_fwd_mma", 40, 70, 1, split_keys=32, head_dim=384, head_dim_v=64),
    Case("attn_fwd_mma", 40, 70, 1, dropout=0.3, head_dim=576, head_dim_v=512),
    Case("attn_fwd_mma", 40, 50, 1, head_dim=264, head_dim_v=280),
    Case("attn_fwd_mma", 20, 50, 1, head_dim=264, head_dim_v=8),
]


OWN = {  # entries of tests/options.py, by each kernel, and where heads share a tile
    f"{kernel} {name}, heads {heads}": Case(kernel, q_len, 70, heads, **{"mask": Full(), **option})
    for name, option in EXAMPLES
    for kernel, q_len, heads in (*((kernel, 40, 2) for kernel in KERNELS), ("attn_fwd_mma", 7, 4))
}


def name_of(case: Case) -> str:
    plain = Case(case.kernel)
    changed = [
        f"{f.name}={getattr(case, f.name)}" for f in dataclasses.fields(case) if getattr(case, f.name) != getattr(plain, f.name)
    ]
    return " ".join([case.kernel, *changed])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_kernel(case: Case, tmp_path: pathlib.Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("tile_q", [192, 256])
def test_a_lane_that_comes_late(tile_q: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first warpgroup, which passes more tiles that it does not need than the ring has."""
    monkeypatch.setattr(emulator, "late_thread", 128 + 31)
    monkeypatch.setitem(KERNELS, "attn_fwd", (ATTN_FWD, attn_fwd.AttnFwdConfig(tile_q, 32, 2, 1)))
    check(Case("attn_fwd", tile_q, tile_q, 1), tmp_path)


DROPPED = [
    *(Case(name, kv_len=96, mask=Full(), dropout=0.3) for name in KERNELS),
    *(Case("attn_fwd", kv_len=96, mask=Full(), dropout=p) for p in (2.0**-8, 0.5, 0.51, 0.99)),
    *(Case(name, 40, 80, mask=Full(), dropout=0.3, offsets=offsets) for name in KERNELS for offsets in ((64, 32), (9, 17))),
    Case("attn_fwd_mma", 13, 80, heads=4, mask=Full(), dropout=0.3),
    Case("attn_fwd_mma", 13, 80, heads=4, mask=Full(), dropout=0.3, offsets=(5, 48)),
]


@pytest.mark.parametrize("case", DROPPED, ids=name_of)
def test_pairs_that_are_dropped(case: Case, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the definition, one by one: weights are equal, and a column of v has powers of two for six keys."""
    q, k, v = arrays(case)
    key, kept = np.arange(case.kv_len), np.empty((2, case.heads, case.q_len, case.kv_len), bool)
    v[...] = np.where(key[:, None] // 6 == np.arange(16), np.exp2(key[:, None] % 6), 0)[:, None]
    monkeypatch.setattr(f"{__name__}.arrays", lambda case: (q * 0, k, v))
    if case.kernel == "attn_fwd_mma" and case.heads == 2:
        monkeypatch.setitem(KERNELS, case.kernel, (ATTN_FWD_MMA, attn_fwd_mma.AttnFwdMmaConfig(64, 32, 2, 2, 1, 1)))
    for tile_kv in (32, 48) if case.kernel == "attn_fwd" else (32,):
        if case.kernel == "attn_fwd":
            monkeypatch.setitem(KERNELS, case.kernel, (ATTN_FWD, attn_fwd.AttnFwdConfig(128, tile_kv, 2, 1)))
        o, _ = run(case, _folder(tmp_path / str(tile_kv)))
        sums = np.rint(o.swapaxes(1, 2) * case.kv_len / case.op.spec.weight.factor).astype(int)
        for batch, head in np.ndindex(2, case.heads):
            kept[batch, head] = dropped(case, batch, head, np.arange(case.q_len)[:, None], key) > 0
        assert np.array_equal(sums[..., key // 6] >> key % 6 & 1, kept)


@pytest.mark.parametrize("name", OWN)
def test_entry_of_options(name: str, tmp_path: pathlib.Path) -> None:
    check(OWN[name], tmp_path)


def test_one_split_has_the_bits_of_none(tmp_path: pathlib.Path) -> None:
    """A row whose keys lie in one split comes out as without splits; so do all rows where there is one."""
    for name in KERNELS:
        whole = Case(name, 40, 70, mask=Window(0, 20, "top_left"))
        wanted = run(whole, _folder(tmp_path / name))
        for split_keys, count in ((32, 12), (96, 40)):
            found = run(dataclasses.replace(whole, split_keys=split_keys), _folder(tmp_path / f"{name}{split_keys}"))
            assert np.array_equal(found[0][:, :count], wanted[0][:, :count])
            assert np.array_equal(found[1][..., :count], wanted[1][..., :count])


def _folder(path: pathlib.Path) -> pathlib.Path:
    path.mkdir()
    return path


def test_tiny_scales_and_huge_logits(tmp_path: pathlib.Path) -> None:
    """A scale of fp64 below the smallest of fp32 is what it is, and rows of logits near -FLT_MAX have their weights."""
    check(Case("attn_fwd_simt", element=FP64, scale=1e-200), _folder(tmp_path / "tiny"))
    case = Case("attn_fwd_simt", 20, 20, element=FP32, scale=5e36)
    assert expected(case)[1].min() < -3e37
    check(case, _folder(tmp_path / "huge"))


@pytest.mark.parametrize("name, size", [("attn_fwd", 24), ("attn_fwd_mma", 24), ("attn_fwd_mma", 272)])
def test_huge_values(name: str, size: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are summed with their values before they are divided. A weight is up to 2^15, as the reference of a row may lag so
    far: a thread's part of a tile's sum is, a row has four parts, so 2^17 times the tiles (2^15 of them, of 32 keys, for 2^20
    keys) and |v| must be below 2^128. So values of 2^96 are right, and near the largest number they overflow."""
    case = Case(name, 40, 90, mask=Full(), scale=float(np.log(2.0)), head_dim=size)
    q, k, v = (x.astype(np.float64) for x in arrays(case))
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[:, :64, :, 0] = 11  # of base 2, above the keys of the last tile, which comes first
    for exponent, is_right in ((96, True), (124, False)):
        given = tuple(x.astype(case.element.dtype) for x in (q, k, np.exp2(exponent) * (1 + np.abs(v))))
        monkeypatch.setattr(f"{__name__}.arrays", lambda case, given=given: given)
        o, _ = run(case, _folder(tmp_path / str(exponent)))
        wanted, _ = expected(case)
        assert np.abs(wanted).max() < 3e38
        if is_right:
            np.testing.assert_allclose(o, wanted, rtol=1.2e-2)
        assert np.isfinite(o).all() == is_right


@pytest.mark.parametrize("element", [BF16, FP64], ids=lambda element: element.name)
def test_merge_of_arrays(tmp_path: pathlib.Path, element: Element) -> None:
    """Parts with strides of their own; one without keys, of which some rows hold NaN; one that outweighs all; sinks."""
    case, rng = Case("attn_fwd_simt", 7, 1, heads=3, element=element, sinks=(0.5, -INF, 300.0)), np.random.default_rng(1)
    number, count = element.lse_dtype, 5
    o = rng.standard_normal((count, 2, 9, 4, 16)).astype(element.dtype)[:, :, :7, 1:]
    lse = rng.standard_normal((count, 2, 4, 7)).astype(number)[:, :, :3]
    lse[1], o[1], lse[3, :, 0], lse[:, 1, 1, 2] = -INF, np.nan, 1e3, -INF
    words = [
        (o[i].ctypes.data, lse[i].ctypes.data, *(s // o.itemsize for s in o[i].strides[:3]),
         *(lse[i].strides[axis] // lse.itemsize for axis in (0, 2, 1)))
        for i in range(count)
    ]  # fmt: skip
    given = np.array(words, np.int64).tobytes()
    out, out_lse = np.full((2, 7, 3, 16), np.nan, element.dtype), np.full((2, 3, 7), np.nan, number)
    values = {"parts": given + bytes(1024 - len(given)), "part_count": count, "heads": 3, "batches": 2, "q_len": 7, "kv_len": 0}
    values |= {"o": out, "lse": out_lse, "o_stride_batch": 7 * 48, "o_stride_row": 48, "o_stride_head": 16}
    values |= {"sinks": np.array(case.sinks, number)}
    fold(tmp_path / "fold", case, 1, {"Parts": store.Arrays(), "Softmax": softmax.WithSink(softmax.Plain())}, values)
    exact, sinks = lse.astype(np.float64), np.array(case.sinks)[:, None]
    with np.errstate(all="ignore"):
        top = np.maximum(np.maximum(exact.max(0), sinks), -1e300)
        weights = np.exp(exact - top)
        total = weights.sum(0) + np.exp(sinks - top)
        mean = np.where(total > 0, weights / total, 0)
        wanted = np.einsum("pbhq,pbqhc->bqhc", mean, np.nan_to_num(o.astype(np.float64)))
        wanted_lse = top + np.log(total)
    error = 1e-2 if element is BF16 else 1e-13
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=error, atol=error)
    np.testing.assert_allclose(out_lse, wanted_lse, rtol=1e-6 if element is BF16 else 1e-13)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_combine_compiles(arch: str) -> None:
    for element in ELEMENTS.values():
        for source in (store.ScratchParts(), store.Arrays()):
            how = scheduler.Dependent() if arch in ("sm_90a", "sm_120") else scheduler.Independent()
            _, text = combine(element, 128, 4, {"Parts": source, "Launch": how}, arch)
            binary = compiler.compile(text)
            assert not binary.spill_bytes and not binary.advisories


REAL = {
    "attn_fwd": ("sm_90a", attn_fwd.AttnFwdConfig(128, 128, 2, 1)),
    "attn_fwd_mma": ("sm_80", attn_fwd_mma.AttnFwdMmaConfig(64, 64, 2, 1, 0, 2)),
    "attn_fwd_simt": ("sm_75", attn_fwd_simt.AttnFwdSimtConfig(32, 32, 64, 64, 128, 1)),
}
ADDED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sinks": {"sinks": (1.0,)},
    "splits": {"split_keys": 1024},
    "offsets": {"offsets": (1, 2)},
    "lens": {"lens": ((1, 2), (3, 4))},
    "alibi": {"score": ALIBI},
    "alibi of packed heads": {"score": ALIBI, "q_len": 4, "heads": 32},
    "masks of packed heads": {"mask": HEAD_WINDOW, "q_len": 4, "heads": 32},
}


@pytest.mark.parametrize("name", REAL)
def test_what_is_added_costs_the_main_loop_nothing(name: str) -> None:
    """No spills and no advisories at head_dim 128; sinks, splits and offsets leave the main loop as it is."""
    arch, config = REAL[name]
    loops = {}
    for added, options in ADDED.items():
        if "packed" in added and name != "attn_fwd_mma":
            continue
        case = Case(
            name, **{"q_len": 4096, "kv_len": 4096, "heads": 16, "kv_heads": 8, "head_dim": 128, "head_dim_v": 128, **options}
        )
        binary = compiler.compile(source_of(case, arch, config)[0])
        assert not binary.spill_bytes and not binary.advisories, (added, binary.spill_bytes, binary.advisories)
        loops[added] = len(sass.main_loop(sass.disassemble(binary.cubin)))
    for added in ("sinks", "splits", "offsets", "lens"):
        assert abs(loops[added] - loops["nothing"]) <= loops["nothing"] // 100 + 2, loops

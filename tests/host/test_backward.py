"""The kernels of the backward, run thread by thread on the host (tests/host_threads.py), against autograd in float64.
Outputs and scratch hold NaN before; turns hold anything."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawattn.operation import Forward
from rawattn.variant.element import BF16, FP32, FP64
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests import backward, host_threads

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, and what is launched for it: ``grid`` blocks of a persistent kernel run together."""

    size: tuple[int, int]
    kinds: dict[str, Any]
    lengths: tuple[tuple[int, int], ...]  # of q and k, of each sequence
    heads: tuple[int, int] = (2, 1)
    varlen: bool = False
    dlse: bool = False
    simt: bool = False
    store: str = "ordered"
    direction: str = ""
    chains: int = 1
    grid: int = 2


PACKED = ((0, 5), (70, 64), (64, 200), (1, 1), (130, 0), (7, 150))
SIMT = {
    "full": Case((24, 40), {"element": FP64}, ((70, 45),) * 2),
    "causal": Case((24, 24), {"element": FP64, "mask": Causal(), "scale": -0.3}, ((45, 70),) * 2, dlse=True),
    "rows without keys": Case((9, 5), {"element": FP64, "mask": Causal()}, ((70, 20),), heads=(3, 3), dlse=True),
    "no keys": Case((9, 5), {"element": FP64}, ((7, 0),)),
    "window, softcap": Case((16, 8), {"element": FP64, "mask": Window(9, 3), "score": Softcap(0.7)}, ((80, 64),), heads=(4, 2)),
    "packed": Case(
        (8, 16),
        {"element": FP64, "mask": Both(Causal("top_left"), Window(20)), "score": Softcap(1.5)},
        PACKED[:4],
        varlen=True,
        dlse=True,
    ),
    "fp32, two chunks": Case((72, 100), {"element": FP32, "mask": Causal()}, ((40, 40),)),
}
HOPPER = {
    "64": Case((64, 64), {"mask": Both(Causal(), Window(70)), "score": Softcap(2.0)}, ((300, 420),), heads=(2, 2), grid=3),
    "64, unordered": Case((64, 64), {"mask": Causal()}, ((300, 300),), heads=(4, 2), store="unordered", direction="LongestFirst"),
    "128": Case((128, 128), {"mask": Causal()}, ((150, 300),)),
    "128, rows without keys": Case((128, 128), {"mask": Causal(), "scale": -0.2}, ((200, 100),), chains=2, dlse=True),
    "128, final": Case((128, 128), {"mask": Causal(), "scale": -0.2}, ((200, 70),), heads=(2, 2), store="final", chains=2),
    "120, packed": Case((120, 120), {"mask": Causal("top_left")}, PACKED, varlen=True, chains=2, dlse=True, grid=3),
    "40, packed, final": Case((40, 24), {}, PACKED, varlen=True, store="final", direction="Alternating"),
    "96 and 64": Case((96, 64), {"mask": Window(20, 100, "top_left")}, ((90, 260),), heads=(1, 1), dlse=True),
    "256": Case((256, 256), {"mask": Causal()}, ((130, 150),)),
    "192 and 128, packed": Case((192, 128), {"mask": Window(40, 30), "score": Softcap(2.0)}, PACKED, varlen=True, dlse=True),
}
CASES = {f"simt, {name}": dataclasses.replace(case, simt=True) for name, case in SIMT.items()} | HOPPER


def formula(q: Array, k: Array, v: Array, do: Array, dlse: Array, op: Forward) -> tuple[Array, ...]:
    """o, lse, dq, dk, dv of one batch in float64, by torch."""
    q, k, v, do, dlse = (torch.tensor(x.astype(np.float64)) for x in (q, k, v, do, dlse))
    q, k, v = (x.transpose(-2, -3).requires_grad_() for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    s = q @ k.repeat_interleave(group, 0).transpose(-1, -2) * op.scale
    if isinstance(op.score, Softcap):
        s = torch.tanh(s / op.score.cap) * op.score.cap
    begin, end = op.mask.interval(np.arange(q.shape[1]), q.shape[1], k.shape[1])
    keys = np.arange(k.shape[1])
    keep = torch.from_numpy((keys >= begin[:, None]) & (keys < end[:, None]))
    e = torch.where(keep, s, -torch.inf).exp()  # logits are small
    total = e.sum(-1, keepdim=True)
    kept = total > 0
    o = e / torch.where(kept, total, 1.0) @ v.repeat_interleave(group, 0)
    lse = torch.where(kept, torch.where(kept, total, 1.0).log(), 0.0)[..., 0]
    loss = (o * do.transpose(-2, -3)).sum() + (lse * dlse).sum()
    grads = torch.autograd.grad(loss, (q, k, v)) if 0 not in s.shape else [torch.zeros_like(x) for x in (q, k, v)]
    lse = torch.where(kept[..., 0], lse, -torch.inf)
    return o.transpose(-2, -3).detach().numpy(), lse.detach().numpy(), *(g.transpose(-2, -3).numpy() for g in grads)


def split(x: Array, lengths: tuple[int, ...], varlen: bool) -> list[Array]:
    """Each sequence's part of an array, a view."""
    if not varlen:
        return list(x)
    ends = np.cumsum([0, *lengths])
    return [x[a:b] for a, b in itertools.pairwise(ends)]


def scratch(count: int, dtype: Any, value: Any) -> Array:
    """An array on a multiple of 64 bytes, as the copy engine needs."""
    space = np.empty((count + 16) * np.dtype(dtype).itemsize, np.uint8)
    start = -space.ctypes.data % 64
    found = space[start : start + count * np.dtype(dtype).itemsize].view(dtype)
    found[...] = value
    return found


class Call:
    """A case's arrays, and its kernels on them."""

    def __init__(self, case: Case) -> None:
        self.case, (d, dv), (heads, kv_heads) = case, case.size, case.heads
        self.q_lens, self.kv_lens = zip(*case.lengths, strict=True)
        kinds = {"mask": Full(), "score": Scale(), "scale": 0.3, "element": BF16, **case.kinds}
        shape = {"batch": len(case.lengths), "q_len": max(self.q_lens), "kv_len": max(self.kv_lens)}
        op = backward.operation(case.size, heads=heads, kv_heads=kv_heads, varlen=case.varlen, **shape, **kinds)
        if case.varlen:
            op = dataclasses.replace(op, total_q=sum(self.q_lens), total_kv=sum(self.kv_lens))
        self.op, self.number = op, op.element.lse_dtype
        random, dtype = np.random.default_rng(0), op.element.dtype
        q_rows = (sum(self.q_lens),) if case.varlen else (op.batch, op.q_len)
        kv_rows = (sum(self.kv_lens),) if case.varlen else (op.batch, op.kv_len)
        shapes = {
            "q": (*q_rows, heads, d),
            "k": (*kv_rows, kv_heads, d),
            "v": (*kv_rows, kv_heads, dv),
            "d_o": (*q_rows, heads, dv),
        }
        self.arrays: dict[str, Array] = {name: random.standard_normal(s).astype(dtype) for name, s in shapes.items()}
        self.arrays |= {name: np.full(shapes[name[1]], np.nan, dtype) for name in ("dq", "dk", "dv")}
        lse = (heads, *q_rows) if case.varlen else (op.batch, heads, op.q_len)
        self.arrays |= {"o": np.zeros(shapes["d_o"], dtype), "lse": np.zeros(lse, self.number)}
        self.arrays["dlse"] = random.standard_normal(lse).astype(self.number) * self.number(case.dlse)

    def wanted(self) -> list[tuple[Array, ...]]:
        """The gradients of each sequence; o and lse become those of the forward."""
        case, found = self.case, []
        lengths = {"q": self.q_lens, "k": self.kv_lens, "v": self.kv_lens, "d_o": self.q_lens, "o": self.q_lens}
        parts = [split(self.arrays[name], n, case.varlen) for name, n in lengths.items()]
        for name in ("lse", "dlse"):
            x = self.arrays[name]
            parts.append([y.swapaxes(0, 1) for y in split(x.swapaxes(0, 1), self.q_lens, True)] if case.varlen else list(x))
        for q, k, v, do, o, lse, dlse in zip(*parts, strict=True):
            o[...], lse[...], *grads = formula(q, k, v, do, dlse, self.op)
            found.append(tuple(grads))
        return found

    def values(self, tile_q: int, tile_kv: int, sums: int) -> dict[str, Any]:
        """The fields of Args; ``tile_q``: of a block of rows in scratch."""
        op, heads = self.op, self.op.heads
        blocks = op.total_q // tile_q + op.batch if op.varlen else op.batch * -(-op.q_len // tile_q)
        starts = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (self.q_lens, self.kv_lens)]
        rows = heads * blocks * tile_q
        return {
            **self.arrays, "lse_log2": scratch(rows, self.number, np.nan), "delta": scratch(rows, self.number, np.nan),
            "dq_sum": scratch(heads * blocks * sums, np.float32, np.nan), "turns": scratch(heads * blocks * 2, np.int32, 77),
            "counter": scratch(2, np.int32, 0), "scale": abs(op.scale), "heads": heads, "heads_per_kv": op.heads_per_kv,
            "q_blocks": blocks, "batches": op.batch, "q_len": op.q_len, "kv_len": op.kv_len,
            "total_q": op.total_q,
            "cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1], "q_tiles": -(-op.q_len // tile_q),
            "kv_tiles": -(-op.kv_len // tile_kv), "l2_head_group": 1, **op.mask.values, **op.score.values,
        }  # fmt: skip

    def run(self, folder: pathlib.Path) -> dict[str, Any]:
        case, op = self.case, self.op
        if case.simt:
            config: Any = backward.simt_config(op)
            kv_source, *q_sources = backward.simt(op, config)
            shape, clear, sums = config, "pair", 1
        elif max(case.size) > 128:
            config, clear, sums = backward.pair_config(op), "pair", 1
            shape = backward.Config(tile_q=config.q_block)
            kv_source, *q_sources = backward.pair(op, config, case.direction)
        else:
            config = shape = dataclasses.replace(backward.config_of(op, case.store), dq_chains=case.chains)
            clear, sums = case.store, config.tile_q * config.dq_columns * config.dq_parts
            kv_source = backward.attn_bwd(op, config, case.store, case.direction)
            q_sources = [] if case.store == "final" else [backward.attn_bwd_convert(op, config)]
        tile_kv = config.tile_kv if not hasattr(config, "q_block") else 64
        values = self.values(shape.tile_q, tile_kv, sums)
        aligned, arch = (False, "sm_75") if case.simt else (True, "sm_90a")
        delta = backward.attn_bwd_delta(op, shape, clear, dlse=case.dlse, aligned=aligned, arch=arch)
        all_heads, all_kv = op.heads * op.batch, op.heads // op.heads_per_kv * op.batch
        q_works = sum(-(-n // shape.tile_q) for n in self.q_lens) * op.heads
        kv_works = sum(-(-n // tile_kv) for n in self.kv_lens) * op.heads // op.heads_per_kv
        boxes = {"q": config.tile_q, "d_o": config.tile_q, "k": tile_kv, "v": tile_kv}
        q_values, kv_values = values | {"last_group": all_heads - 1}, values | {"last_group": all_kv - 1}
        host_threads.run(delta, folder, q_values, q_works, number=self.op.element.lse_name)
        grid = kv_works if case.simt else min(case.grid, kv_works)
        host_threads.run(kv_source, folder, kv_values, grid, number=self.op.element.lse_name, together=case.grid, boxes=boxes)
        for source in q_sources:
            grid = min(case.grid, q_works) if source.name == "attn_bwd_dq.cu" else q_works
            boxes = {"q": shape.tile_q, "d_o": shape.tile_q, "k": config.tile_kv, "v": config.tile_kv}
            host_threads.run(source, folder, q_values, grid, number=self.op.element.lse_name, together=case.grid, boxes=boxes)
        return values


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, tmp_path: pathlib.Path) -> None:
    call = Call(CASES[name])
    wanted = call.wanted()
    values = call.run(tmp_path)
    assert not values["counter"].any(), "the counter is not ready for the next launch"
    # bf16: p and ds are rounded before the products, as the results are. fp64: sums of some hundred terms.
    bound = {"bf16": 1.2e-2, "fp32": 2e-6, "fp64": 1e-11}[call.op.element.name]
    for index, (which, lengths) in enumerate((("dq", call.q_lens), ("dk", call.kv_lens), ("dv", call.kv_lens))):
        for sequence, part in enumerate(split(call.arrays[which], lengths, call.case.varlen)):
            truth = wanted[sequence][index]
            error = np.abs(part.astype(np.float64) - truth).max(initial=0)
            assert error <= bound * np.abs(truth).max(initial=1e-3), f"{which} of sequence {sequence}: {error}"

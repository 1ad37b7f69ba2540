"""Functions and packed sequences over two GPUs, by NCCL, against one GPU. tests/host/parallel asks more of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rawattn

pytestmark = pytest.mark.gpu("any")
ROWS = 384  # of each rank


def inputs(device: str, count: int) -> tuple[list[Any], list[Any], Any]:
    """The whole q, k, v and do, and what functions capture."""
    made, rows = torch.Generator().manual_seed(0), ROWS * count
    q, k, v, do = (torch.randn(2, rows, heads, 64, generator=made).to(device, torch.bfloat16) for heads in (4, 2, 2, 4))
    table = torch.randn(4, 2 * rows, generator=made).to(device)
    return [q, k, v, do], [table], (torch.arange(rows, device=device) // 250).int()


def near(name: str, found: Any, wanted: Any) -> None:
    error, size = (found.float() - wanted.float()).abs().max().item(), wanted.float().abs().max().item()
    assert error < 3e-2 * max(size, 1.0), f"{name} on rank {dist.get_rank()}: off by {error:.3g}, the largest is {size:.3g}"


def check(device: str, layout: str, method: str) -> None:
    from rawattn import parallel

    count = dist.get_world_size()
    (q, k, v, do), (table,), doc = inputs(device, count)
    rows = ROWS * count
    options = {
        "mask": lambda b, h, q, kv: (doc[q] == doc[kv]) & (q >= kv),
        "score": lambda s, b, h, q, kv: s + table[h, kv - q + rows],
    }
    whole = [x.requires_grad_() for x in (q, k, v, table)]
    want = rawattn.attention(q, k, v, **options)
    wanted = [want.detach(), *torch.autograd.grad(want, whole, do)]
    part = lambda x, dim=1: parallel.split(x.detach(), layout=layout, dim=dim)  # noqa: E731
    parts = [*(part(x).requires_grad_() for x in (q, k, v)), table]
    if method == "heads":
        o = parallel.head_attention(*parts[:3], layout=layout, **options)
    else:
        o = parallel.context_attention(*parts[:3], layout=layout, method=method, **options)
    found = [o.detach(), *torch.autograd.grad(o, parts, part(do))]
    dist.all_reduce(found[4])
    for name, x, y in zip(("o", "dq", "dk", "dv", "dtable"), found, [*map(part, wanted[:4]), wanted[4]], strict=True):
        near(f"{layout}, {method}: {name}", x, y)
    starts = torch.tensor([0, 100, 100, rows - 130, rows], dtype=torch.int32, device=device)
    others = torch.tensor([0, 90, 200, rows - 300, rows], dtype=torch.int32, device=device)
    own = [part(x[0], 0) for x in (q, k, v)]
    for starts_kv in (starts, others):
        want = rawattn.attention_varlen(q[0], k[0], v[0], starts, starts_kv, causal=True)
        more = {} if starts_kv is starts else {"cu_seqlens_kv": others}
        o = parallel.context_attention_varlen(*own, starts, causal=True, layout=layout, **more)
        near(f"{layout}, packed: o", o, part(want, 0))
    if method == "ring":
        check_sums(layout, part, (q, k, v), do)


def check_sums(layout: str, part: Any, whole: Any, do: Any) -> None:
    """Results that are added to float32 sums, as with many ranks, twice with the same bits; and after a call that failed on one
    rank alone."""
    from rawattn.parallel import context, context_attention, partial

    options = {"causal": True, "layout": layout, "method": "ring"}
    want, lse = rawattn.attention(*whole, causal=True, return_lse=True)
    wanted = [want.detach(), lse.detach(), *torch.autograd.grad(want, whole, do)]
    parts, results = [part(x).requires_grad_() for x in whole], []
    for _ in range(2):
        with mock.patch.multiple(partial, HELD_BYTES=0, MOST_HELD=2, FEW_RANKS=1):
            o, own_lse = context_attention(*parts, return_lse=True, **options)
        results.append([o.detach(), own_lse.detach(), *torch.autograd.grad(o, parts, part(do))])
        if dist.get_rank() == 0:
            fault = mock.patch.object(context, "_attend", side_effect=rawattn.UnsupportedError("planted"))
            with fault, pytest.raises(rawattn.UnsupportedError, match="planted"):
                context_attention(*parts, **options)
        else:
            context_attention(*parts, **options)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    expected = [part(wanted[0]), part(wanted[1], 2), *map(part, wanted[2:])]
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), results[0], expected, strict=True):
        near(f"{layout}, sums: {name}", x, y)


def work(rank: int, count: int, store: str, device: str) -> None:
    """Runs in each of the processes."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", init_method=f"file://{store}", rank=rank, world_size=count)
    for layout in ("zigzag", "contiguous"):
        for method in ("ring", "all_gather", "heads"):
            check(device, layout, method)
    dist.destroy_process_group()


def test_two_gpus(tmp_path: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = [[str(rank), "2", str(tmp_path / "store"), "cuda"] for rank in range(2)]
    running = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, *each], env=os.environ) for each in given]
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:  # one may wait for the other, which has failed
            process.kill()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

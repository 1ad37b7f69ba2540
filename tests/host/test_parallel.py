"""Attention split over processes gives the results and gradients of one process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest

import rawattn
from rawattn.variant import mask as masks
from rawattn.variant.offset import OffsetMask
from rawattn.variant.score import Scale

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from rawattn import parallel  # noqa: E402
from rawattn.parallel import context, schedule  # noqa: E402

ROWS = 8  # of a process
BOUND = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Slope(Scale):
    """ALiBi: it sees positions and heads."""

    def logit(self, xp: Any, s: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return s - 0.25 * (head + 1) * abs(q - kv)

    def slope(self, xp: Any, s: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return s * 0 + 1.0


@dataclasses.dataclass(frozen=True)
class HeadWindow(masks.Window):
    """Head h keeps h + 2 keys back from its own position."""

    type: ClassVar[str] = "HeadWindow"

    @property
    def of_head(self) -> Any:
        return lambda head: masks.Window(head + 1, 0)

    def interval(self, q: Any, q_len: int, kv_len: int) -> Any:
        return masks.Window(64, 0).interval(q, q_len, kv_len)


FULL: dict[str, Any] = {}
CAUSAL = {"causal": True}
# options, heads of q, of k, batch, rows of k for each of q, dtype
CASES: list[tuple[dict[str, Any], int, int, int, int, Any]] = [
    (CAUSAL, 4, 2, 2, 1, torch.float64),
    (FULL, 4, 4, 1, 1, torch.float64),
    (CAUSAL, 4, 1, 1, 1, torch.float32),
    ({"causal": True, "window": (5, 0), "softcap": 3.0}, 4, 2, 1, 1, torch.float64),
    ({"window": (2, 3), "scale": 0.3}, 2, 2, 2, 1, torch.float64),
    ({"window": (0, 0)}, 2, 2, 1, 1, torch.float64),
    (CAUSAL, 4, 2, 1, 2, torch.float64),
    ({"mask": masks.Window(9, 1, align="top_left")}, 4, 2, 1, 2, torch.float64),
    ({"causal": True, "score": Slope()}, 4, 2, 1, 1, torch.float64),
    ({"mask": HeadWindow()}, 4, 2, 1, 1, torch.float64),
    (CAUSAL, 4, 2, 1, 1, torch.bfloat16),
]


def inputs(case: Any, count: int) -> tuple[list[Any], Any, Any]:
    """The whole q, k, v and sinks, and the whole gradients by o and lse: the same in each process."""
    _, heads, kv_heads, batch, ratio, dtype = case
    made = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)

    rows = count * ROWS
    q, k, v = normal(batch, rows, heads, 8), normal(batch, rows * ratio, kv_heads, 8), normal(batch, rows * ratio, kv_heads, 16)
    sinks = normal(heads).to(torch.promote_types(dtype, torch.float32))
    return [q, k, v, sinks], normal(batch, rows, heads, 16), normal(batch, heads, rows).to(sinks.dtype)


def gradients(compute: Any, given: list[Any], do: Any, dlse: Any) -> list[Any]:
    """o, lse and the gradients of q, k, v and sinks."""
    given = [x.detach().clone().requires_grad_() for x in given]
    o, lse = compute(*given)
    return [o.detach(), lse.detach(), *torch.autograd.grad((o, lse), given, (do, dlse))]


def check_case(case: Any, layout: str, method: str) -> None:
    """One call, both ways: what each process has is its part of the whole."""
    options, dtype, count = case[0], case[5], dist.get_world_size()
    given, do, dlse = inputs(case, count)
    want = gradients(lambda q, k, v, sinks: rawattn.attention(q, k, v, sinks=sinks, return_lse=True, **options), given, do, dlse)

    def part(x: Any, dim: int = 1) -> Any:
        return parallel.split(x, layout=layout, dim=dim)

    def compute(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        given = {"layout": layout, "return_lse": True, **options}
        if method == "heads":
            return parallel.head_attention(q, k, v, sinks=sinks, **given)
        return parallel.context_attention(q, k, v, sinks=sinks, method=method, **given)

    parts = [*map(part, given[:3]), given[3]], part(do), part(dlse, 2)
    found, again = gradients(compute, *parts), gradients(compute, *parts)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    dist.all_reduce(found[5])
    wanted = [part(want[0]), part(want[1], 2), *map(part, want[2:5]), want[5]]
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        size = y.abs().max().item() if name[0] == "d" else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=BOUND[dtype] * max(size, 1.0), msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(parallel.join(parts[0][0], layout=layout), given[0])


def work(rank: int, count: int, store: str) -> None:
    """Runs in each of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    for case in CASES:
        plain = "score" not in case[0] and "mask" not in case[0]
        for layout in schedule.LAYOUTS:
            for method in ("ring", "all_gather", *["heads"] * (plain and case[1] % count == 0)):
                try:
                    check_case(case, layout, method)
                except BaseException:
                    print(f"rank {rank} of {count}: {case}, {layout}, {method}", flush=True)
                    raise
    check_groups(rank, count)
    dist.destroy_process_group()


def check_groups(rank: int, count: int) -> None:
    """Meshes, groups of some of the processes, what is sent and kept, and wrong arguments."""


def run(count: int, tmp_path: Any) -> None:
    command = [sys.executable, "-W", "ignore", __file__]
    given = [[str(rank), str(count), str(tmp_path / "store")] for rank in range(count)]
    running = [subprocess.Popen([*command, *each], env=os.environ) for each in given]
    try:
        assert [process.wait(timeout=100) for process in running] == [0] * count
    finally:
        for process in running:  # one may wait for the other, which has failed
            process.kill()


@pytest.mark.parametrize("count", [2, 4])
def test_processes(count: int, tmp_path: Any) -> None:
    run(count, tmp_path)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

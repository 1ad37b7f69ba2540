"""Training on several processes: DDP, FSDP2 and DTensor give the losses and gradients of one process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

import pytest

import rawattn
from rawattn.cpu.loops import load_lanes
from tests.versions import since

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("rawattn.torch.operators")
BOUND = 1e-12  # of a float64 loss or gradient, whose sums are taken in another order


class Block(torch.nn.Module):
    """Self-attention with sinks and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 64, dtype=torch.float64)
        self.back = torch.nn.Linear(32, 32, dtype=torch.float64)
        self.sinks = torch.nn.Parameter(torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), dim=-2)
        return x + self.back(rawattn.attention(q, k, v, causal=True, sinks=self.sinks).flatten(-2))


def model() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(32, 32, dtype=torch.float64))


def train(network: Any, x: Any, steps: int = 3) -> tuple[list[Any], list[Any]]:
    """The losses, and the gradients of the last step."""
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (network(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [parameter.grad for parameter in network.parameters()]


def check_training(rank: int) -> None:
    """Each process trains on its half of the batch, and the mean is what one has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    x = torch.randn(4, 12, 32, dtype=torch.float64)
    wanted_losses, wanted = train(model(), x)
    wrapped = {"ddp": DistributedDataParallel(model())}
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        pass
    else:
        wrapped["fsdp"], mesh = model(), init_device_mesh("cpu", (2,))
        for block in wrapped["fsdp"][:2]:
            block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
            fully_shard(block, mesh=mesh)
        fully_shard(wrapped["fsdp"], mesh=mesh)
    for name, network in wrapped.items():
        losses, found = train(network, x.chunk(2)[rank])
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / 2, torch.stack(wanted_losses), rtol=0, atol=BOUND, msg=name)
        for each, want in zip(whole, wanted, strict=True):
            torch.testing.assert_close(each, want, rtol=0, atol=BOUND, msg=name)
    assert mean[-1] < mean[0]


def check_dtensor() -> None:
    """Heads, a batch, and what is whole: the gradients of each part together are those of one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for heads, kv_heads, place, sinks_place in (
        (8, 4, Shard(2), Shard(0)), (8, 4, Shard(0), Replicate()), (12, 3, Shard(2), Shard(0)), (8, 2, Replicate(), Replicate()),
    ):  # fmt: skip
        whole = [torch.randn(4, 16, n, 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
        whole = [x.requires_grad_() for x in (*whole, torch.randn(heads, dtype=torch.float64))]
        places = (place, place, place, sinks_place)
        parts = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(whole, places, strict=True)]
        lens = torch.tensor([16, 3, 0, 9], dtype=torch.int32)
        of_batch = distribute_tensor(lens, mesh, [place if place == Shard(0) else Replicate()])
        found, wanted = (gradients(*given, kv_lens=n) for given, n in ((parts, of_batch), (whole, lens)))
        for each, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(each.full_tensor(), want, rtol=0, atol=BOUND)


def gradients(q: Any, k: Any, v: Any, sinks: Any, **lens: Any) -> Any:
    o, lse = rawattn.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, **lens)
    return torch.autograd.grad(o.sin().sum() + lse.cos().sum(), (q, k, v, sinks))


def work(rank: int, store: str) -> None:
    """Runs in each of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    check_training(rank)
    check_dtensor()
    dist.destroy_process_group()


@since(2, 5)
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_processes(tmp_path: Any) -> None:
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path / "store")]
    subprocess.run(command, check=True, env=os.environ, timeout=250)


def start(store: str) -> bool:
    """Runs ``work`` in forks of this process, which has imported all that they need, and says whether both succeed."""
    load_lanes()
    fork = multiprocessing.get_context("fork").Process
    running = [fork(target=work, args=(rank, store), daemon=True) for rank in range(2)]
    for each in running:
        each.start()
    end = time.monotonic() + 200
    for each in running:  # one may wait for the other, which has failed: it ends with this process
        each.join(max(0, end - time.monotonic()))
    return all(each.exitcode == 0 for each in running)


# mesh, placements of q, of k and v, heads of q and of k, wanted of dq
SHARDINGS: list[tuple[tuple[int, ...], str, str, int, int, str]] = [
    ((4,), "r", "r", 8, 8, "r"),
    ((4,), "2", "2", 16, 4, "2"),
    ((4,), "0", "0", 8, 8, "0"),
    ((4,), "2", "r", 8, 2, "r"),
    ((2, 2), "02", "02", 8, 4, "02"),
    ((2, 2), "22", "22", 12, 6, "rr"),
]


@since(2, 5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SHARDINGS, ids=str)
def test_placements_of_gradients(case: Any, world: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    from tests.host.torch.test_operators import placements

    shape, q_names, kv_names, heads, kv_heads, wanted = case
    mesh = init_device_mesh("cpu", shape)
    given = [
        distribute_tensor(torch.randn(4, 8, n, 8), mesh, placements(names)).requires_grad_()
        for n, names in ((heads, q_names), (kv_heads, kv_names), (kv_heads, kv_names))
    ]
    o, lse = rawattn.attention(*given, causal=True, return_lse=True)
    found = torch.ops.rawattn.attention_backward(o.detach(), *(x.detach() for x in (*given, o, lse)))
    for each, x in zip(found, given, strict=False):
        assert list(each.placements) == placements(wanted) and each.shape == x.shape
    assert found[3].shape == (0,)
    assert [x.shape for x in torch.autograd.grad((o.sum(), lse.sum()), given)] == [x.shape for x in given]


@since(2, 5)
def test_placements_of_gradients_of_varlen(world: None) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    q = distribute_tensor(torch.randn(20, 8, 8), mesh, [Shard(1)])
    starts = distribute_tensor(torch.tensor([0, 5, 20], dtype=torch.int32), mesh, [Replicate()])
    o, lse = torch.ops.rawattn.attention(q, q, q, None, starts, starts)
    found = torch.ops.rawattn.attention_backward(o, q, q, q, o, lse, lse, None, starts, starts)
    assert [list(x.placements) for x in found[:3]] == [[Shard(1)]] * 3 and found[0].to_local().shape == (20, 2, 8)


@since(2, 5)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_captured_tensors_are_refused(world: None) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    q = distribute_tensor(torch.randn(2, 8, 4, 8), mesh, [Shard(2)])
    bias = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    wanted = rawattn.attention(q, q, q, bias=bias)
    assert wanted.shape == q.shape
    with pytest.raises(rawattn.ProblemError, match="which score captured, requires grad, and q is a DTensor"):
        rawattn.attention(q, q, q, bias=bias.requires_grad_())


if __name__ == "__main__":
    sys.exit(not start(sys.argv[1]))

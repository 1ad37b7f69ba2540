"""Masks whose tiles are lists with holes, on every kernel: hand-written ones against the formula in float64, and masks whose
tiles are an interval, which must have the same bits either way. Small shapes come first: where a kernel waits for ever, this says
where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.driver import context
from rawattn.driver.launch import BoundLaunch, LoadedFunction
from rawattn.kernel import pyramid, render
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.runtime.select import select
from rawattn.variant.field import AxisStride, Pointer, Scratch, Value
from rawattn.variant.mask import And, Causal, Full, Window
from tests import lists
from tests.calls import poisoned_memory
from tests.host.kernel.test_pyramid import CASES as PYRAMIDS
from tests.host.kernel.test_pyramid import DTYPES, Captured

pytestmark = pytest.mark.gpu("any")

FORWARD = [pytest.param(ATTN_FWD, marks=pytest.mark.gpu), ATTN_FWD_MMA, ATTN_FWD_SIMT]
HOPPER = [pytest.param(kernel, marks=pytest.mark.gpu) for kernel in (ATTN_BWD, ATTN_BWD_PAIR)]
BACKWARD = [*HOPPER, ATTN_BWD_MMA, ATTN_BWD_SIMT]
SHAPES = [  # batch, q_len, kv_len, heads, kv_heads, head_dim
    (1, 64, 64, 1, 1, 64), (1, 70, 300, 2, 1, 64), (2, 200, 410, 2, 2, 128), (1, 1000, 3000, 4, 1, 128), (2, 300, 700, 2, 1, 256),
    (1, 4096, 4096, 4, 2, 64),
]  # fmt: skip


class Call:
    """Inputs, a mask of ``lists.MASKS`` over arrays on the device, and the truth."""

    def __init__(self, name: str, shape: tuple[int, ...], seed: int = 0) -> None:
        import torch

        batch, q_len, kv_len, heads, kv_heads, head_dim = shape
        random = torch.Generator("cuda").manual_seed(seed)
        sizes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads), (q_len, heads))
        made = (torch.randn(batch, n, h, head_dim, generator=random, device="cuda", dtype=torch.bfloat16) for n, h in sizes)
        self.q, self.k, self.v, self.do = made
        self.held = lists.arrays(name, batch, heads, max(q_len, kv_len), seed)
        self.on_device = [torch.from_numpy(x).cuda() for x in self.held]  # whose addresses the mask holds
        self.mask = lists.mask(name, tuple(x.shape for x in self.held), tuple(x.data_ptr() for x in self.on_device))
        q, kv = np.arange(q_len)[:, None], np.arange(kv_len)[None]
        kept = np.stack([np.stack([self.mask.keep(self.held, b, h, q, kv) for h in range(heads)]) for b in range(batch)])
        self.kept = torch.from_numpy(kept).cuda()

    def truth(self) -> tuple[Any, ...]:
        """o, lse, dq, dk, dv in float64."""
        import torch

        q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        s = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
        s = torch.where(self.kept, s, -torch.inf)
        lse = s.logsumexp(-1)
        p = torch.where(self.kept, (s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp(), 0.0)
        o = p @ v.repeat_interleave(group, 1)
        gradients = torch.autograd.grad((o * self.do.double().transpose(1, 2)).sum(), (q, k, v))
        return o.detach().transpose(1, 2), lse.detach(), *(x.transpose(1, 2) for x in gradients)


def compare(found: Any, wanted: Any, bound: float, what: str) -> None:
    error = (found.double() - wanted).abs().max().item()
    assert error <= bound * max(1.0, wanted.abs().max().item()), f"{what}: {error}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", lists.MASKS)
@pytest.mark.parametrize("kernel", FORWARD, ids=str)
def test_forward(kernel: Any, name: str, shape: tuple[int, ...]) -> None:
    import torch

    call = Call(name, shape)
    with poisoned_memory():
        o, lse = rawattn.attention(call.q, call.k, call.v, mask=call.mask, return_lse=True, kernel=kernel.name)
        again, _ = rawattn.attention(call.q, call.k, call.v, mask=call.mask, return_lse=True, kernel=kernel.name)
    wanted, wanted_lse = call.truth()[:2]
    assert torch.equal(o, again), "the bits differ from run to run"
    assert ((lse == -torch.inf) == (wanted_lse == -torch.inf)).all()
    kept = wanted_lse != -torch.inf
    compare(lse[kept], wanted_lse[kept], 1e-4, "lse")
    compare(o, wanted, 1.2e-2, "o")


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@pytest.mark.parametrize("name", lists.MASKS)
@pytest.mark.parametrize("kernel", BACKWARD, ids=str)
def test_backward(kernel: Any, name: str, shape: tuple[int, ...]) -> None:
    import torch

    if kernel is ATTN_BWD and shape[-1] > 128:
        pytest.skip("attn_bwd takes head sizes up to 128")
    call = Call(name, shape)
    truth = call.truth()
    o, lse = truth[0].to(torch.bfloat16), truth[1].float()
    with poisoned_memory():
        found, again = (
            rawattn.attention_backward(call.do, call.q, call.k, call.v, o, lse, mask=call.mask, kernel=kernel.name)
            for _ in range(2)
        )
    for which, x, y, wanted in zip(("dq", "dk", "dv"), found, again, truth[2:], strict=True):
        compare(x, wanted, 2e-2, which)
        assert torch.equal(x, y), f"the bits of {which} differ from run to run"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 70, 300, 3, 1, 128), (2, 700, 1300, 4, 2, 128), (1, 300, 4100, 6, 2, 112), (4, 1500, 1500, 16, 4, 128)], ids=str
)
@pytest.mark.parametrize("name", lists.MASKS)
def test_every_configuration_has_the_same_bits(name: str, shape: tuple[int, ...]) -> None:
    """Registers and the order of a step are found by compiling for wide heads: no result depends on them. The last shape
    has more works than there are blocks."""
    import torch

    call = Call(name, shape)
    truth = call.truth()
    given = (call.do, call.q, call.k, call.v, truth[0].to(torch.bfloat16), truth[1].float())
    plan = rawattn.plan_backward(*given, mask=call.mask, kernel="attn_bwd")
    found = []
    with poisoned_memory():
        for config in ATTN_BWD.candidates(plan.op, plan.device):
            found += [rawattn.attention_backward(*given, mask=call.mask, kernel="attn_bwd", config=config) for _ in range(3)]
    assert len(found) == 12
    for which, x, wanted in zip(("dq", "dk", "dv"), found[0], truth[2:], strict=True):
        compare(x, wanted, 2e-2, which)
    for others in found:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", lists.MASKS)
def test_many_works_for_a_block(name: str, head_dim: int) -> None:
    """Works of very different lengths, some without a tile, more than there are blocks: rings, turns and lists go on from one to
    the next."""
    import torch

    call = Call(name, (4, 1500, 1500, 16, 4, head_dim), 5)
    with poisoned_memory():
        o, lse = rawattn.attention(call.q, call.k, call.v, mask=call.mask, return_lse=True)
        gradients = rawattn.attention_backward(call.do, call.q, call.k, call.v, o, lse, mask=call.mask)
        for _ in range(20):
            others = rawattn.attention_backward(call.do, call.q, call.k, call.v, o, lse, mask=call.mask)
            assert all(torch.equal(x, y) for x, y in zip(gradients, others, strict=True))
    truth = call.truth()
    compare(o, truth[0], 1.2e-2, "o")
    for which, x, wanted in zip(("dq", "dk", "dv"), gradients, truth[2:], strict=True):
        compare(x, wanted, 2e-2, which)


@pytest.mark.gpu
@pytest.mark.parametrize("name", lists.MASKS)
@pytest.mark.parametrize("config", [(64, 64, 4, 2), (128, 128, 4, 1), (192, 64, 8, 2), (192, 112, 4, 1)], ids=str)
def test_one_warp_finds_what_another_loads(config: tuple[int, ...], name: str) -> None:
    """Works that end at any place in the rings, again and again, with one to three warpgroups: always the same bits."""
    import torch

    call = Call(name, (4, 1500, 4100, 16, 4, 64), 6)
    options = {"mask": call.mask, "kernel": "attn_fwd", "config": AttnFwdConfig(*config), "return_lse": True}
    with poisoned_memory():
        o, lse = rawattn.attention(call.q, call.k, call.v, **options)
    for _ in range(50):
        again = rawattn.attention(call.q, call.k, call.v, **options)
        assert torch.equal(again[0], o) and torch.equal(again[1], lse)
    plain = {**options, "kernel": "attn_fwd_simt", "config": None}
    wanted = rawattn.attention(call.q, call.k, call.v, **plain)
    compare(o, wanted[0].double(), 1.2e-2, "o")
    torch.testing.assert_close(lse, wanted[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100, 3), And(Causal(), Window(300))], ids=str)
@pytest.mark.parametrize("kernel", FORWARD, ids=str)
def test_an_interval_as_a_list_has_the_same_bits(kernel: Any, mask: Any, head_dim: int) -> None:
    import torch

    call = Call("checkerboard", (2, 700, 1300, 4, 2, head_dim))
    op = rawattn.plan(call.q, call.k, call.v, mask=lists.Listed(mask), kernel=kernel.name).op
    config = select(op, context.device(0), kernel.name).config
    found, wanted = (
        rawattn.attention(call.q, call.k, call.v, mask=way, return_lse=True, kernel=kernel.name, config=config)
        for way in (lists.Listed(mask), mask)
    )
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_a_graph_replays_with_other_documents() -> None:
    """The device finds the tiles to visit: a graph that was captured follows what its arrays hold when it runs."""
    import torch

    call, other = Call("documents", (1, 600, 600, 2, 2, 64)), Call("documents", (1, 600, 600, 2, 2, 64), 9)
    plan = rawattn.plan(call.q, call.k, call.v, mask=call.mask)
    plan.run(call.q, call.k, call.v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = plan.run(call.q, call.k, call.v)
    for mine, its in zip(call.on_device, other.on_device, strict=True):
        mine.copy_(its)
    graph.replay()
    call.kept = other.kept
    compare(o, call.truth()[0], 1.2e-2, "o")


@pytest.mark.parametrize(
    ("element", "shape", "axes"), [*PYRAMIDS, ("int32", (3, 1_500_000), 1), ("bool", (2, 3000, 5000), 2)], ids=str
)
def test_pyramid(element: str, shape: tuple[int, ...], axes: int) -> None:
    """pyramid.cu as one launch, twice: the counters are ready for the second."""
    import torch

    device, rng = context.device(0), np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 100).astype(DTYPES[element])
    captured = Captured("mask_0", element, shape, axes)
    launch, size = pyramid.launch(captured, device), pyramid.buffer(captured).bytes
    function = LoadedFunction(compiler.compile(launch.source).cubin, launch.entry, 0)
    array = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).ravel()).cuda()
    counters = torch.zeros(max(2, launch.grid), dtype=torch.int32, device="cuda")
    wanted = lists.pyramid(x, axes)
    for _ in range(2):
        found = torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda")
        places = {Pointer: array.data_ptr(), Scratch: found.data_ptr()}
        values = [
            launch.values[name] if isinstance(fill, Value)
            else x.strides[fill.axis] // x.itemsize if isinstance(fill, AxisStride)
            else places.get(type(fill), counters.data_ptr())
            for name, _, fill in launch.fields
        ]  # fmt: skip
        args = render.layout(launch.fields).pack.pack(*values)
        BoundLaunch(function, launch.grid, args, torch.cuda.current_stream().cuda_stream)()
        torch.cuda.synchronize()
        got = found.cpu().numpy().view(DTYPES[element]).reshape(wanted.shape)
        np.testing.assert_array_equal(got, wanted)
        assert not counters.any()

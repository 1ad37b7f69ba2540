"""Masks that are intervals, on every kernel, against the formula in float64. Small shapes come first: where a kernel waits for
ever, this says where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.kernel.attn_bwd_wide import ATTN_BWD_WIDE
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.kernel.attn_fwd_wide import ATTN_FWD_WIDE
from rawattn.mask import And, Causal, Full, Intervals, Window
from tests import intervals
from tests.calls import poisoned_memory

pytestmark = pytest.mark.gpu("any")

FORWARD = [pytest.param(ATTN_FWD, marks=pytest.mark.gpu), ATTN_FWD_MMA, ATTN_FWD_SIMT]
HOPPER = [pytest.param(kernel, marks=pytest.mark.gpu) for kernel in (ATTN_BWD, ATTN_BWD_PAIR)]
BACKWARD = [*HOPPER, ATTN_BWD_MMA, ATTN_BWD_SIMT]
SHAPES = [  # batch, q_len, kv_len, heads, kv_heads, head_dim
    (1, 64, 64, 1, 1, 64), (1, 70, 300, 2, 1, 64), (2, 200, 410, 2, 2, 128), (1, 1000, 3000, 4, 1, 128), (2, 300, 700, 2, 1, 256),
    (1, 4096, 4096, 4, 2, 64),
]  # fmt: skip


class Call:
    """Inputs, arrays of a kind on the device, by head where ``by_head``, and the truth."""

    def __init__(self, kind: str, shape: tuple[int, ...], seed: int = 0, by_head: bool = False, **of_mask: Any) -> None:
        import torch

        batch, q_len, kv_len, heads, kv_heads, head_dim = shape
        random = torch.Generator("cuda").manual_seed(seed)
        sizes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads), (q_len, heads))
        made = (torch.randn(batch, n, h, head_dim, generator=random, device="cuda", dtype=torch.bfloat16) for n, h in sizes)
        self.q, self.k, self.v, self.do = made
        held = intervals.arrays(kind, seed, q_len, kv_len, batch, heads if by_head else 1)
        self.first, self.end = (torch.from_numpy(x).cuda() for x in held)
        self.mask = Intervals(self.first, self.end, **of_mask)
        kv, own = (torch.arange(n, device="cuda") for n in (kv_len, q_len))
        kept = (self.first[..., None] <= kv) & (kv < self.end[..., None])
        if of_mask.get("causal"):
            kept = kept & (kv <= own[:, None] + kv_len - q_len)
        self.kept = kept.expand(batch, heads, q_len, kv_len)

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

    def gradients(self, o: Any, lse: Any, **options: Any) -> Any:
        return rawattn.attention_backward(self.do, self.q, self.k, self.v, o, lse, **{"mask": self.mask, **options})


def compare(found: Any, wanted: Any, bound: float, what: str) -> None:
    assert found.shape == wanted.shape, what
    if wanted.numel():
        error = (found.double() - wanted).abs().max().item()
        assert error <= bound * max(1.0, wanted.abs().max().item()), f"{what}: {error}"


def check_forward(call: Call, kernel: str | None) -> None:
    import torch

    options = {"mask": call.mask, "return_lse": True, "kernel": kernel}
    with poisoned_memory():
        o, lse = rawattn.attention(call.q, call.k, call.v, **options)
        again, _ = rawattn.attention(call.q, call.k, call.v, **options)
    wanted, wanted_lse = call.truth()[:2]
    assert torch.equal(o, again), "the bits differ from run to run"
    assert ((lse == -torch.inf) == (wanted_lse == -torch.inf)).all()
    kept = wanted_lse != -torch.inf
    compare(lse[kept], wanted_lse[kept], 1e-4, "lse")
    compare(o, wanted, 1.2e-2, "o")


def check_backward(call: Call, kernel: str | None) -> None:
    import torch

    truth = call.truth()
    o, lse = truth[0].to(torch.bfloat16), truth[1].float()
    with poisoned_memory():
        found, again = (call.gradients(o, lse, kernel=kernel) for _ in range(2))
    for which, x, y, wanted in zip(("dq", "dk", "dv"), found, again, truth[2:], strict=True):
        compare(x, wanted, 2e-2, which)
        assert torch.equal(x, y), f"the bits of {which} differ from run to run"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", intervals.KINDS)
@pytest.mark.parametrize("kernel", FORWARD, ids=str)
def test_forward(kernel: Any, kind: str, shape: tuple[int, ...]) -> None:
    check_forward(Call(kind, shape), kernel.name)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@pytest.mark.parametrize("kind", intervals.KINDS)
@pytest.mark.parametrize("kernel", BACKWARD, ids=str)
def test_backward(kernel: Any, kind: str, shape: tuple[int, ...]) -> None:
    if kernel is ATTN_BWD and shape[-1] > 128:
        pytest.skip("attn_bwd takes head sizes up to 128")
    check_backward(Call(kind, shape), kernel.name)


@pytest.mark.parametrize("kind", ("documents", "random", "padded"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_heads_of_their_own(kind: str, head_dim: int) -> None:
    call = Call(kind, (2, 700, 900, 4, 2, head_dim), 3, by_head=True, causal=True)
    check_forward(call, None)
    check_backward(call, None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("documents", "sliding", "random"))
def test_wide_heads(kind: str) -> None:
    call = Call(kind, (1, 300, 700, 2, 1, 512))
    check_forward(call, ATTN_FWD_WIDE.name)
    check_backward(call, ATTN_BWD_WIDE.name)
    check_backward(Call(kind, (1, 300, 700, 2, 1, 160)), ATTN_BWD.name)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("kind", intervals.KINDS)
def test_many_works_for_a_block(kind: str, head_dim: int) -> None:
    """Works of very different lengths, some without a tile, more than there are blocks: rings and turns go on to the next."""
    import torch

    call = Call(kind, (4, 1500, 1500, 16, 4, head_dim), 5)
    with poisoned_memory():
        o, lse = rawattn.attention(call.q, call.k, call.v, mask=call.mask, return_lse=True)
        gradients = call.gradients(o, lse)
        for _ in range(20):
            assert all(torch.equal(x, y) for x, y in zip(gradients, call.gradients(o, lse), strict=True))
    truth = call.truth()
    compare(o, truth[0], 1.2e-2, "o")
    for which, x, wanted in zip(("dq", "dk", "dv"), gradients, truth[2:], strict=True):
        compare(x, wanted, 2e-2, which)


@pytest.mark.parametrize("length", (300, 5000))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_bits_of_built_in_masks(head_dim: int, length: int) -> None:
    """Arrays that say what a built-in mask says give its bits in the same configurations."""
    import torch

    call = Call("all", (2, length, length, 4, 2, head_dim))
    q = torch.arange(length, device="cuda", dtype=torch.int32)
    arrays = call.q, call.k, call.v
    for mask, first, end in (
        (Full(), q * 0, q * 0 + length), (Causal(), q * 0, q + 1), (Window(100, 30), q - 100, q + 31),
        (And(Causal(), Window(200)), q - 200, q + 1),
    ):  # fmt: skip
        config = rawattn.plan(*arrays, mask=Intervals(first, end), return_lse=True).config
        o, lse = rawattn.attention(*arrays, mask=mask, return_lse=True, config=config)
        found = rawattn.attention(*arrays, mask=Intervals(first, end), return_lse=True, config=config)
        assert torch.equal(found[0], o) and torch.equal(found[1], lse)
        chosen = rawattn.plan_backward(call.do, *arrays, o, lse, mask=Intervals(first, end)).config
        pairs = (call.gradients(o, lse, mask=each, config=chosen) for each in (mask, Intervals(first, end)))
        for which, x, y in zip(("dq", "dk", "dv"), *pairs, strict=True):
            compare(y, x.double(), 1e-2, which)  # key tiles of a built-in mask may add to dq in another order


@pytest.mark.parametrize("head_dim", (64, 128))
def test_documents_are_packed_sequences(head_dim: int) -> None:
    import torch

    ends = torch.tensor([0, 5, 300, 301, 1000, 1500], dtype=torch.int32, device="cuda")
    ids = torch.repeat_interleave(torch.arange(5, device="cuda"), ends.diff())
    call = Call("all", (1, 1500, 1500, 4, 2, head_dim))
    mask = Intervals.documents(ids, causal=True)
    o, lse = rawattn.attention(call.q, call.k, call.v, mask=mask, return_lse=True)
    one = [x[0] for x in (call.q, call.k, call.v)]
    wanted, wanted_lse = rawattn.attention_varlen(*one, ends, ends, 1500, 1500, causal=True, return_lse=True)
    compare(o[0], wanted.double(), 1.2e-2, "o")
    compare(lse[0], wanted_lse.double(), 1e-4, "lse")


@pytest.mark.parametrize("used", (False, True))
@pytest.mark.parametrize("kind", ("documents", "random", "few", "padded"))
def test_packed_and_partly_used(kind: str, used: bool) -> None:
    """Packed sequences, and such that use a part of their rows, against each sequence alone."""
    import torch

    lengths = ((300, 410), (0, 7), (64, 64), (500, 130), (1, 900))
    q_ends, kv_ends = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device="cuda") for x in zip(*lengths, strict=True))
    each = [intervals.arrays(kind, i, q, kv, 1) for i, (q, kv) in enumerate(lengths)]
    first, end = (torch.from_numpy(np.concatenate(x, 1)).cuda() for x in zip(*each, strict=True))
    q, k, v, do = (
        torch.randn(n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in ((865, 4), (1511, 2), (1511, 2), (865, 4))
    )
    lens = {}
    if used:
        given = (("q_lens", (290, 0, 64, 3, 1)), ("kv_lens", (410, 7, 5, 100, 0)))
        lens = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in given}
    o, lse = rawattn.attention_varlen(q, k, v, q_ends, kv_ends, 500, 900, mask=Intervals(first, end), return_lse=True, **lens)
    packed = {"cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends, "max_seqlen_q": 500, "max_seqlen_kv": 900}
    gradients = rawattn.attention_backward(do, q, k, v, o, lse, mask=Intervals(first, end), **packed, **lens)
    for i, (n, m) in enumerate(lengths):
        if n * m == 0:
            continue
        a, b = int(q_ends[i]), int(kv_ends[i])
        alone = [x[None, at : at + rows] for x, at, rows in ((q, a, n), (k, b, m), (v, b, m), (do, a, n))]
        mask = Intervals(first[:, a : a + n].contiguous(), end[:, a : a + n].contiguous())
        own = {name: x[i : i + 1] for name, x in lens.items()}
        wanted, wanted_lse = rawattn.attention(*alone[:3], mask=mask, return_lse=True, **own)
        compare(o[a : a + n], wanted[0].double(), 1.2e-2, "o")
        found = rawattn.attention_backward(alone[3], *alone[:3], wanted, wanted_lse, mask=mask, **own)
        for x, y, at in zip(gradients, found, (a, b, b), strict=True):
            compare(x[at : at + y.shape[1]], y[0].double(), 2e-2, "gradients")


def test_a_graph_replays_with_other_arrays() -> None:
    """The device finds the tiles to visit: a graph that was captured follows what its arrays hold when it runs."""
    import torch

    call, other = Call("documents", (1, 600, 600, 2, 2, 64)), Call("random", (1, 600, 600, 2, 2, 64), 9)
    rawattn.attention(call.q, call.k, call.v, mask=call.mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rawattn.attention(call.q, call.k, call.v, mask=call.mask)
    call.first.copy_(other.first)
    call.end.copy_(other.end)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, rawattn.attention(call.q, call.k, call.v, mask=other.mask))


def test_autograd_and_compile() -> None:
    """torch follows to q, k and v, also in a whole graph, and new arrays compile nothing."""
    import torch

    call = Call("documents", (2, 300, 300, 4, 2, 64))
    leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    mask = call.mask
    compiled = torch.compile(lambda q, k, v: rawattn.attention(q, k, v, mask=mask), fullgraph=True)
    o = compiled(*leaves)
    found = torch.autograd.grad((o * call.do).sum(), leaves)
    for which, x, wanted in zip(("dq", "dk", "dv"), found, call.truth()[2:], strict=True):
        compare(x, wanted, 2e-2, which)

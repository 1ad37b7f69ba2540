"""Attention split over processes gives the results and gradients of one process."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest

import rawattn
from rawattn.cpu.loops import load_lanes
from rawattn.variant import mask as masks
from rawattn.variant.offset import OffsetMask
from rawattn.variant.score import Scale

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from rawattn import parallel  # noqa: E402
from rawattn.parallel import context, partial, schedule  # noqa: E402

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


@dataclasses.dataclass(frozen=True)
class Runs(masks.Window):
    """A query keeps several runs of keys, which the interval does not say."""

    type: ClassVar[str] = "Runs"
    lists: ClassVar[bool] = True


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
    joined = parallel.join(parts[0][0], layout=layout)
    dsinks = found[5].clone()
    dist.all_reduce(dsinks)
    # Nothing is sent from here on: one process may fail alone.
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True)) and torch.equal(joined, given[0])
    found[5] = dsinks
    wanted = [part(want[0]), part(want[1], 2), *map(part, want[2:5]), want[5]]
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv", "dsinks"), found, wanted, strict=True):
        size = y.abs().max().item() if name[0] == "d" else 1.0
        torch.testing.assert_close(
            x, y, rtol=0, atol=BOUND[dtype] * max(size, 1.0), msg=lambda text, name=name: f"{name}: {text}"
        )


def check_cases(chosen: list[Any]) -> None:
    for case in chosen:
        plain = "score" not in case[0] and "mask" not in case[0]
        for layout in schedule.LAYOUTS:
            for method in ("ring", "all_gather", *["heads"] * (plain and case[1] % dist.get_world_size() == 0)):
                try:
                    check_case(case, layout, method)
                except BaseException:
                    print(f"rank {dist.get_rank()}: {case}, {layout}, {method}", flush=True)
                    raise


def function_options(rows: int, kv_rows: int, heads: int) -> list[tuple[dict[str, Any], list[Any]]]:
    """Functions as options, and the tensors that a score captured and whose gradients are wanted."""
    made = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_()

    doc, table, gate, slopes, bias = (
        torch.arange(rows) // 7,
        normal(heads, 2 * kv_rows),
        normal(rows),
        normal(heads),
        normal(1, kv_rows),
    )
    documents = rawattn.mask.Documents(doc, causal=True)
    relative = lambda s, b, h, q, kv: s * gate[q] + table[h, kv - q + rows]  # noqa: E731
    return [
        ({"mask": lambda b, h, q, kv: documents(b, h, q, kv) & (kv >= q - 5 - h)}, []),
        ({"mask": documents, "score": relative}, [table, gate]),
        ({"mask": lambda q, kv: q >= kv, "score": lambda s, q, kv, q_len: s - (q_len - q) * kv * 1e-3}, []),
        ({"causal": True, "score": relative}, [table, gate]),
        ({"alibi": slopes, "bias": bias, "softcap": 5.0, "window": (9, 4)}, [slopes, bias]),
    ]  # fmt: skip


def check_functions() -> None:
    """Functions see the whole, and gradients of what scores captured are summed over the processes."""
    count = dist.get_world_size()
    every_way = [*itertools.product(schedule.LAYOUTS, ("ring", "all_gather", "heads"))]
    for i, (layout, method) in enumerate(every_way if count == 2 else every_way[::5]):
        given, do, dlse = inputs(({}, 4, 2, 2, 1, torch.float64), count)
        for options, wrt in function_options(count * ROWS, count * ROWS, 4)[i % 2 :: 2 if count > 2 else 1]:
            every = [x.requires_grad_() for x in given] + wrt

            def attend(
                q: Any, k: Any, v: Any, sinks: Any, compute: Any = rawattn.attention, options: Any = options, **more: Any
            ) -> Any:
                return compute(q, k, v, sinks=sinks, return_lse=True, **options, **more)

            want = attend(*given)
            want = [*(x.detach() for x in want), *torch.autograd.grad(want, every, (do, dlse))]
            part = lambda x, dim=1, layout=layout: parallel.split(x.detach(), layout=layout, dim=dim)  # noqa: E731
            parts = [*(part(x).requires_grad_() for x in given[:3]), given[3]]
            compute = parallel.head_attention if method == "heads" else parallel.context_attention
            more = {"layout": layout, **({} if method == "heads" else {"method": method})}
            found = attend(*parts, compute=compute, **more)
            found = [*(x.detach() for x in found), *torch.autograd.grad(found, [*parts, *wrt], (part(do), part(dlse, 2)))]
            for x in found[5:]:
                dist.all_reduce(x)
            wanted = [part(want[0]), part(want[1], 2), *map(part, want[2:5]), *want[5:]]
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-11, msg=lambda text, at=(i, options): f"{at}: {text}")


def check_packed() -> None:
    """Packed sequences, of which one is empty, one on several processes, and rows behind the last one; in one of the layouts with
    other numbers of keys, some less than of queries, and none."""
    count = dist.get_world_size()
    rows = count * ROWS
    options = {"causal": True, "window": (6, 0)} if count == 2 else {"window": (None, 4), "softcap": 3.0}
    for layout, ratio in zip(schedule.LAYOUTS, (1, 2) if count == 2 else (2, 1), strict=True):
        given, do, dlse = inputs(({}, 4, 2, 1, ratio, torch.float64), count)
        starts = torch.tensor([0, 3, 3, rows - 6, rows - 4, rows - 2], dtype=torch.int32)
        others = starts if ratio == 1 else torch.tensor([0, 2, 6, rows, rows, 2 * rows - 3], dtype=torch.int32)

        def whole(q: Any, k: Any, v: Any, sinks: Any, starts: Any = starts, others: Any = others) -> Any:
            o, lse = rawattn.attention_varlen(q[0], k[0], v[0], starts, others, sinks=sinks, return_lse=True, **options)
            return torch.cat([o[: rows - 2], 0 * q[0, rows - 2 :].repeat(1, 1, 2)])[None], lse[None]

        kept = slice(0, rows - 2)
        with torch.no_grad():
            do[:, rows - 2 :], dlse[..., rows - 2 :] = 0, 0
        want = gradients(whole, given, do, dlse)

        def compute(q: Any, k: Any, v: Any, sinks: Any, layout: str = layout, starts: Any = starts, others: Any = others) -> Any:
            more = {"sinks": sinks, "layout": layout, "return_lse": True, **options}
            more |= {} if others is starts else {"cu_seqlens_kv": others}
            return parallel.context_attention_varlen(q[0], k[0], v[0], starts, **more)

        def part(x: Any, dim: int = 1, layout: str = layout) -> Any:
            return parallel.split(x, layout=layout, dim=dim)

        found = gradients(compute, [*map(part, given[:3]), given[3]], part(do)[0], part(dlse, 2)[0])
        o, lse = parallel.join(found[0][None], layout=layout), parallel.join(found[1][None], layout=layout, dim=2)
        dsinks = found[5].clone()
        dist.all_reduce(dsinks)
        wanted = want[0][:, kept], want[1][..., kept], *map(part, want[2:5]), want[5]
        for x, y in zip((o[:, kept], lse[..., kept], *found[2:5], dsinks), wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


def check_faults() -> None:
    """A fault that is planted in all processes is noticed in one of them at least."""
    no_mask = mock.patch.object(context.ContextCall, "options", lambda self, task, captured: {"scale": self.spec.scale})
    no_gradients = mock.patch.object(context, "_add_returned", lambda found, dk, dv: list(found))
    one_part = mock.patch.object(context.PartialResults, "make_room", lambda self, task: self._results.clear())
    for fault in (no_mask, no_gradients, one_part):
        noticed = torch.zeros(1)
        with fault:
            try:
                check_case(CASES[0], "zigzag", "ring")
            except AssertionError:
                noticed += 1
        dist.all_reduce(noticed)
        assert noticed > 0, fault


def check_timing() -> None:
    """A process that is slow changes no bit, and the ring's buffers are at most 1.2 of one process's k and v."""
    (q, k, v, _), do, _ = inputs(CASES[-1], dist.get_world_size())
    parts, do = [parallel.split(x) for x in (q, k, v)], parallel.split(do)
    made, attend, buffers = [0], context._attend, context._Transfers._make_buffers

    def compute(*given: Any) -> Any:
        given = [x.detach().clone().requires_grad_() for x in given]
        o = parallel.context_attention(*given, causal=True, method="ring")
        return [o.detach(), *torch.autograd.grad(o, given, do)]

    def slow(*given: Any) -> Any:
        time.sleep(0.02 * ((dist.get_rank() + made[0]) % 2))
        return attend(*given)

    def counted(self: Any, rows: int) -> Any:
        found = buffers(self, rows)
        made[0] += sum(x.nbytes for x in found)
        return found

    want = compute(*parts)
    with mock.patch.object(context, "_attend", slow), mock.patch.object(context._Transfers, "_make_buffers", counted):
        o = parallel.context_attention(*parts, causal=True, method="ring")
        assert 0 < made[0] <= 1.2 * (parts[1].nbytes + parts[2].nbytes)
        found = compute(*parts)
    assert torch.equal(o, want[0]) and all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    with mock.patch.multiple(partial, HELD_BYTES=0, MOST_HELD=2, FEW_RANKS=1):  # sums, as with many processes
        check_case(CASES[0], "zigzag", "ring")


def check_failure() -> None:
    """A call that fails on one process keeps no other waiting, and what comes next is as ever."""
    (q, k, v, _), do, _ = inputs(CASES[1], dist.get_world_size())
    parts, do = [parallel.split(x).requires_grad_() for x in (q, k, v)], parallel.split(do)
    want = parallel.context_attention(*parts, method="ring")
    wanted = torch.autograd.grad(want, parts, do)
    fails, again = dist.get_rank() == 0, True
    for owner, name in ((context, "_attend"), (context._Gradients, "compute")):
        made, real = itertools.count(), getattr(owner, name)

        def planted(*given: Any, real: Any = real, made: Any = made, **options: Any) -> Any:
            if fails and next(made) == 1:
                raise rawattn.UnsupportedError("planted")
            return real(*given, **options)

        found = None if name == "_attend" else parallel.context_attention(*parts, method="ring")
        with mock.patch.object(owner, name, planted):
            try:
                if found is None:
                    again &= torch.equal(parallel.context_attention(*parts, method="ring"), want) and not fails
                else:
                    dq, dk, dv = torch.autograd.grad(found, parts, do)
                    again &= torch.equal(dq, wanted[0]) and dk.isnan().any().item() and dv.isnan().any().item() and not fails
            except rawattn.UnsupportedError:
                again &= fails
    found = parallel.context_attention(*parts, method="ring")
    found = [found, *torch.autograd.grad(found, parts, do)]
    assert again and all(torch.equal(x, y) for x, y in zip(found, [want, *wanted], strict=True))


def check_one_stream() -> None:
    """The same where a backend does as NCCL does: a batch begins when the one before it has ended, and all of it is one work."""
    batch, stream = dist.batch_isend_irecv, concurrent.futures.ThreadPoolExecutor(1)

    def queued(ops: Any) -> list[Any]:
        def transfer() -> None:
            for each in batch(ops):
                each.wait()

        found = stream.submit(transfer)
        return [mock.Mock(wait=lambda: found.result(timeout=20))]

    with mock.patch.object(dist, "batch_isend_irecv", queued):
        check_cases([CASES[0]])
    stream.shutdown()


def check_groups() -> None:
    """A mesh, groups of two of the processes, checkpointing, gradients of lse alone, and torch.compile."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    count, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(rawattn.ProblemError, match=r"mesh of 2 dimensions .*'dp', 'cp'.*mesh\['cp'\]"):
        parallel.split(torch.zeros(1, 8), mesh)
    torch.manual_seed(rank // 2)
    whole = [torch.randn(1, 16, 2, 8, dtype=torch.float64) for _ in range(3)]
    parts = [parallel.split(x, mesh["cp"]).requires_grad_() for x in whole]
    o = checkpoint(parallel.context_attention, *parts, mesh["cp"], causal=True, use_reentrant=False)
    whole = [x.requires_grad_() for x in whole]
    want, lse = rawattn.attention(*whole, causal=True, return_lse=True)
    torch.testing.assert_close(parallel.join(o.detach(), mesh["cp"]), want, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(want.sin().sum() + lse.sum(), whole)
    _, own_lse = parallel.context_attention(*parts, mesh["cp"].get_group(), causal=True, return_lse=True)
    found = torch.autograd.grad(o.sin().sum() + own_lse.sum(), parts)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, parallel.split(y, mesh["cp"]), rtol=0, atol=1e-12)
    if count == 2:
        (first,) = torch.autograd.grad(parallel.context_attention(*parts).sum(), parts[:1], create_graph=True)
        with pytest.raises(rawattn.ProblemError, match="a second derivative was asked for"):
            torch.autograd.grad(first.sum() + parts[0].sum(), parts[:1])
        for compute in (parallel.context_attention, parallel.head_attention):
            with torch.autocast("cpu", torch.bfloat16):
                assert compute(*[x.detach().float() for x in parts]).dtype == torch.float32
            compiled = torch.compile(lambda *x, compute=compute: compute(*x, causal=True).sin(), backend="eager")
            assert torch.equal(compiled(*parts), compute(*parts, causal=True).sin())
    for layout in schedule.LAYOUTS:
        places = parallel.split(torch.arange(4 * count), layout=layout, dim=0)
        assert torch.equal(parallel.positions(4, layout=layout), places)


def work(rank: int, count: int, store: str) -> None:
    """Runs in each of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    check_cases(CASES if count == 2 else [CASES[i] for i in (0, 3, 9)])
    check_functions()
    check_packed()
    if count == 2:
        check_faults()
    check_timing()
    check_one_stream()
    check_failure()
    check_groups()
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [2, 4])
def test_processes(count: int, tmp_path: Any) -> None:
    command = [sys.executable, "-W", "ignore", __file__, str(count), str(tmp_path / "store")]
    subprocess.run(command, check=True, env=os.environ, timeout=250)


def start(count: int, store: str) -> bool:
    """Runs ``work`` in forks of this process, which has imported all that they need, and says whether all succeed."""
    load_lanes()
    fork = multiprocessing.get_context("fork").Process
    running = [fork(target=work, args=(rank, count, store), daemon=True) for rank in range(count)]
    for each in running:
        each.start()
    end = time.monotonic() + 200
    for each in running:  # one may wait for the other, which has failed: it ends with this process
        each.join(max(0, end - time.monotonic()))
    return all(each.exitcode == 0 for each in running)


# ---- who computes and sends what


MASKS = [
    masks.Full(), masks.Causal(), masks.Causal("top_left"), masks.Window(5, 0), masks.Window(0, 0),
    masks.Window(2, 3, "top_left"), masks.And(masks.Causal(), masks.Window(6)),
]  # fmt: skip


def pairs(mask: Any, q_len: int, kv_len: int) -> Any:
    begin, end = mask.interval(np.arange(q_len), q_len, kv_len)
    keys = np.arange(kv_len)
    return (keys >= begin[:, None]) & (keys < end[:, None])


def places(spans: Any) -> Any:
    return np.concatenate([np.arange(s.position, s.position + s.end - s.begin) for s in spans])


def count_pairs(whole: Any, rank: int, plan: Any) -> Any:
    """Counts how often the calls of a rank compute each pair of its queries and of all keys."""
    mask, found = whole.masks[0], np.zeros((whole.q_len, whole.count * whole.kv_len), int)
    q, own = places(whole.spans(rank, whole.q_len)), places(whole.spans(rank, whole.kv_len))
    steps = [(plan.local, own)]
    for step in plan.steps:
        keys = np.full(step.rows, -1)
        for piece in (*step.recvs, *step.copies):
            theirs = places(whole.spans(piece.peer, whole.kv_len))
            keys[piece.at : piece.at + piece.end - piece.begin] = theirs[piece.begin : piece.end]
        assert (keys >= 0).all()
        steps.append((step.tasks, keys))
    for task, keys in ((task, keys) for tasks, keys in steps for task in tasks):
        (a, b), (c, d) = task.q, task.kv
        kept = mask if task.masked else masks.Full()
        kept = kept if task.offsets is None else OffsetMask(kept, *task.offsets)
        found[a:b, keys[c:d]] += pairs(kept, b - a, d - c)
        if whole.positional:
            at = task.offsets or (0, 0)
            assert (q[a:b] == at[0] + np.arange(b - a)).all() and (keys[c:d] == at[1] + np.arange(d - c)).all()
    return found


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", schedule.LAYOUTS)
def test_schedule(layout: str, mask: Any) -> None:
    """Each pair that the mask keeps is computed once, and what one rank sends another expects in the same step."""
    for count, positional, (q_len, kv_len) in itertools.product((2, 3, 5), (False, True), ((4, 4), (6, 6), (4, 8), (8, 4))):
        whole = schedule.Whole((mask,), positional, count, q_len, kv_len, layout)
        if positional and q_len != kv_len:
            continue
        truth = pairs(mask, count * q_len, count * kv_len)
        for make in (schedule.ring, schedule.all_gather):
            plans = [make(whole, rank) for rank in range(count)]
            for rank, plan in enumerate(plans):
                assert (count_pairs(whole, rank, plan) == truth[places(whole.spans(rank, q_len))]).all()
            for steps in zip(*(plan.steps for plan in plans), strict=True):
                for a, b in itertools.product(range(count), repeat=2):
                    sent = [piece[1:3] for piece in steps[a].sends if piece.peer == b]
                    assert sent == [piece[1:3] for piece in steps[b].recvs if piece.peer == a]


def test_schedule_wastes_nothing() -> None:
    """Under a causal mask ranks of the zigzag do the same work in each step, in one call of all; a window sends what it needs."""
    whole = schedule.Whole((masks.Causal(),), False, 4, 32, 32, "zigzag")
    for rank in range(4):
        plan = schedule.ring(whole, rank)
        assert len(plan.local) == 1 and plan.local[0].offsets is None
        for two in zip(plan.steps[::2], plan.steps[1::2], strict=True):
            tasks = [task for step in two for task in step.tasks]
            assert sum((t.q[1] - t.q[0]) * (t.kv[1] - t.kv[0]) for t in tasks) == 32 * 16 and not any(t.masked for t in tasks)
            assert len(tasks) == (1 if two[0].recvs[0].peer < rank else 2)
    whole = schedule.Whole((masks.Window(5, 0),), False, 8, 32, 32, "contiguous")
    for rank in range(8):
        plan = schedule.ring(whole, rank)
        received = [(i, *piece) for i, step in enumerate(plan.steps) for piece in step.recvs]
        assert received == ([(1, rank - 1, 27, 32, 0)] if rank else [])
        assert sum(len(step.sends) for step in plan.steps) == (rank < 7)


# ---- results over different keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_partial_results(limit: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, they take four times the bytes of o at most, with their sum, unless all are few bytes; and o is
    rounded once."""
    monkeypatch.setattr(partial, "HELD_BYTES", limit)
    made, rows, held = torch.Generator().manual_seed(0), 24, []
    tasks = [schedule.Task(((0, 12), (12, 22), (0, 22), (3, 9), (0, 12))[i % 5], (0, 1), False, None) for i in range(41)]
    q, v = torch.zeros(2, rows, 3, 8, dtype=dtype), torch.zeros(2, 1, 3, 16, dtype=dtype)
    whole, found = [], partial.PartialResults(q, v, tasks, 8)
    for task in tasks:
        o = torch.full((2, rows, 3, 16), torch.nan, dtype=dtype)
        lse = torch.full((2, 3, rows), -torch.inf)
        a, b = task.q
        o[:, a:b] = torch.randn(2, b - a, 3, 16, generator=made).to(dtype)
        lse[..., a:b] = torch.randn(2, 3, b - a, generator=made)
        whole.append((o, lse))
        found.make_room(task)
        found.add(task, (o[:, a:b].clone(), lse[..., a:b].clone()))
        having = found._results + [found._sum] * (found._sum is not None)
        held.append(sum(x.o.nbytes for x in having) / (2 * q.nbytes))
        assert len(having) <= 16
    assert max(held) <= 4 if limit == 0 else len(having) == 1 + 41 % 15
    for sinks in (None, torch.tensor([0.5, -torch.inf, 3.0])):
        wanted = rawattn.reference.merge_states(whole, sinks=sinks)
        o, lse = (x.double().numpy() for x in found.merge(sinks))
        np.testing.assert_allclose(o, wanted[0], rtol=2.0**-7.95 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, wanted[1], rtol=1e-5)
        assert not o[:, 22:].any()


# ---- one process, and wrong arguments


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def among_four() -> Iterator[None]:
    """Four processes, of which this is one; the others are made up."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=1, world_size=4, store=fake.FakeStore())
    yield
    dist.destroy_process_group()


def test_one_process(alone: None) -> None:
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    want = rawattn.attention(q, q, q, causal=True)
    for compute in (parallel.context_attention, parallel.head_attention):
        found = compute(q, q, q, causal=True)
        assert torch.equal(found, want) and found.requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compute(q, q, q, causal=True), want)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(parallel.context_attention_varlen(q[0], q[0], q[0], starts, causal=True), want[0])
    assert torch.equal(parallel.join(parallel.split(q.detach())), q)
    last = torch.randn(1, 8, 4, 8).to(memory_format=torch.channels_last)
    assert all(parallel.split(last, layout=layout).is_contiguous() for layout in schedule.LAYOUTS)


def test_gradient_of_sinks() -> None:
    """That of this rank's queries is what one call has, whatever the sinks are."""
    q = torch.randn(2, 6, 4, 8)
    sinks = torch.tensor([0.5, torch.inf, -torch.inf, 2.0])
    do, dlse = torch.randn(2, 6, 4, 8), torch.randn(2, 4, 6)
    options = {"mask": masks.Causal("top_left"), "sinks": sinks}
    o, lse = rawattn.attention(q, q[:, :3], q[:, :3], return_lse=True, **options)
    *_, want = rawattn.attention_backward(do, q, q[:, :3], q[:, :3], o, lse, dlse=dlse, **options)
    torch.testing.assert_close(context._compute_sinks_gradient(do, dlse, o, lse, sinks), want)


def refused(words: str, compute: Any, *given: Any, **options: Any) -> None:
    with pytest.raises(rawattn.ProblemError, match=words):
        compute(*given, **options)


def test_no_group() -> None:
    q = torch.zeros(1, 8, 4, 8)
    refused("there is no process group; call torch.distributed.init_process_group", parallel.context_attention, q, q, q)


def test_wrong_arguments(among_four: None) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    q = torch.zeros(1, 8, 4, 8)
    placed = distribute_tensor(torch.zeros(1, 8, 4, 8), init_device_mesh("cpu", (4,)), [Shard(1)])
    for compute in (parallel.context_attention, parallel.head_attention):
        refused("layout is 'ring'; it must be one of 'zigzag', 'contiguous'", compute, q, q, q, layout="ring")
        refused("Packed sequences are for context_attention_varlen", compute, q[0], q[0], q[0])
        refused("q is a ndarray; it must be a torch tensor", compute, q.numpy(), q, q)
        refused("q is a DTensor; it must be a torch tensor, of a DTensor its to_local", compute, placed, placed, placed)
        refused("k has 7 rows on this rank; for layout='zigzag' it must be an even number", compute, q, q[:, :7], q[:, :7])
        refused("q has no rows on this rank", compute, q[:, :0], q, q)
        refused("group is 'cp'; it must be a ProcessGroup", compute, q, q, q, "cp")
        refused("window is 5", compute, q, q, q, window=5)
        refused("v", compute, q, q, q[:, :6])
        short, grad = torch.zeros(8, dtype=torch.int32), torch.ones(32, requires_grad=True)
        refused(r"ids has shape \(8,\); it must be \(32,\)", compute, q, q, q, mask=rawattn.mask.Documents(short))
        refused(r"alibi has shape \(8,\); it must be \(4,\)", compute, q, q, q, alibi=grad[:8])
        refused("ids, which mask captured, is a numpy", compute, q, q, q, mask=rawattn.mask.Documents(np.zeros(32, np.int32)))
        mask = rawattn.mask.function(lambda q, kv, x=grad: x[q] > x[kv])
        refused("requires grad, and a mask has no gradient", compute, q, q, q, mask=mask)
    starts = torch.tensor([0, 5, 32], dtype=torch.int32)
    refused(r"q is of shape \(1, 8, 4, 8\); it must be", parallel.context_attention_varlen, q, q, q, starts)
    refused(r"v is of shape \(7, 4, 8\); .* as many rows as k", parallel.context_attention_varlen, q[0], q[0], q[0, :7], starts)
    refused(
        r"k is of shape \(6, 4, 8\); .* as q; other lengths of keys need cu_seqlens_kv",
        parallel.context_attention_varlen,
        q[0],
        q[0, :6],
        q[0, :6],
        starts,
    )
    packed = functools.partial(parallel.context_attention_varlen, q[0], q[0, :6], q[0, :6], starts)
    refused("cu_seqlens_kv is .* end with at most 24", packed, cu_seqlens_kv=starts)
    refused("cu_seqlens_kv has 2 elements but cu_seqlens 3", packed, cu_seqlens_kv=starts[:2])
    refused("cu_seqlens is torch.int64 of shape", parallel.context_attention_varlen, *[q[0]] * 3, starts.long())
    refused("end with at most 32, the rows of all ranks", parallel.context_attention_varlen, *[q[0]] * 3, starts + 1)
    refused(r"mask is Runs.*, which keeps several runs of keys", parallel.context_attention, q, q, q, mask=Runs())
    refused("method is 'tree'; it must be one of", parallel.context_attention, q, q, q, method="tree")
    refused("q has 6 heads; it must be a multiple of the 4 ranks", parallel.head_attention, *[torch.zeros(1, 8, 6, 8)] * 3)
    refused(
        "k has 3 heads; it must be a multiple or a divisor", parallel.head_attention, torch.zeros(1, 8, 12, 8), *[q[:, :, :3]] * 2
    )
    refused("score may treat heads differently", parallel.head_attention, q, q, q, score=Slope())
    refused("mask may treat heads differently", parallel.head_attention, q, q, q, mask=HeadWindow())
    refused(
        "x has 6 rows along dim 1; for layout='contiguous' it must be a multiple of 4",
        parallel.split,
        q[:, :6],
        layout="contiguous",
    )
    refused("x has 7 rows on this rank; for layout='zigzag' it must be an even number", parallel.join, q[:, :7])
    refused("length is 7 rows on this rank; for layout='zigzag' it must be an even number", parallel.positions, 7)
    refused("x requires grad, and join has no gradient", parallel.join, q.clone().requires_grad_())
    other = dist.new_group([0, 2])
    refused("group does not have this process|group is .*; it must be", parallel.context_attention, q, q, q, other)
    refused("group is a mesh that does not have this process", parallel.split, q, DeviceMesh("cpu", [0, 2]))


def test_wrong_dimensions_and_lengths(among_four: None) -> None:
    q = torch.zeros(1, 8, 4, 8)
    for call in (parallel.split, parallel.join):
        refused("dim is 7; it must be a dimension of x, an int from -4 to 3", call, q, dim=7)
        refused("dim is '1'; it must be a dimension of x", call, q, dim="1")
        refused("x is a ndarray; it must be a torch tensor", call, q.numpy())
    refused("length is 'x'; it must be an int >= 0", parallel.positions, "x")
    refused("length is -2; it must be an int >= 0", parallel.positions, -2)


def test_what_is_kept_for_calls_of_one_shape(among_four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape, option, type of an option, layout, method or group has its own; what is wrong stays wrong; a group that is
    gone is forgotten."""
    q, group = torch.zeros(1, 8, 4, 8), dist.group.WORLD
    plain = {"causal": True, "window": None, "scale": None}

    def found(x: Any = q, layout: str = "zigzag", method: str = "ring", among: Any = group, **options: Any) -> Any:
        return context._prepare(x, x, x, None, plain | options, (), among, layout, method)

    found()  # a library's first call of all is not kept
    made = found()
    assert found(torch.zeros(1, 8, 4, 8)) is made and found(q.clone().requires_grad_()) is made
    own = dist.new_group([0, 1, 2, 3])
    others = (
        {"x": torch.zeros(1, 16, 4, 8)},
        {"layout": "contiguous"},
        {"method": "all_gather"},
        {"causal": False},
        {"among": own},
    )
    for other in (*others, {"scale": 2.0}, {"window": (3, 0)}, {"mask": masks.Causal("top_left"), "causal": False}):
        assert found(**other) is not made and found(**other) is found(**other), other
    refused("causal is 1", found, causal=1)
    refused("7 rows on this rank", found, q[:, :7])
    refused("a pending negation", found, torch._neg_view(q))
    monkeypatch.setattr(context, "KEPT", 4)
    for rows in range(2, 40, 2):
        found(torch.zeros(1, rows, 4, 8))
        assert 0 < len(context._kept[group]) <= 4
    count = len(context._kept)
    dist.destroy_process_group(own)
    del own, others, other
    gc.collect()
    assert len(context._kept) == count - 1


if __name__ == "__main__":
    sys.exit(not start(int(sys.argv[1]), sys.argv[2]))

"""Parts of the query heads that share a key head: how many there are, what is launched for them, and what they take."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from rawattn.device import TYPICAL
from rawattn.errors import ProblemError
from rawattn.kernel import attn_bwd, group
from rawattn.kernel.attn_bwd import ATTN_BWD, Config
from rawattn.operation import Backward
from rawattn.program import Buffer
from rawattn.select import select
from rawattn.variant.element import FP32, FP64
from rawattn.variant.mask import Causal, Full, Window
from tests import operations
from tests.options import HeadWindow

H200 = TYPICAL["sm_90a"]


def backward(batch: int, length: int, heads: tuple[int, int], mask: Any, size: int = 128, **more: Any) -> Backward:
    of_batch = {"batch": batch, "q_len": length, "kv_len": length, "heads": heads[0], "kv_heads": heads[1]}
    return operations.backward((size, size), **{**of_batch, "mask": mask, **more})


PACKED: dict[str, Any] = {"varlen": True, "total_q": 16384, "total_kv": 16384}
CHOSEN = {  # perf/notes/attn_bwd.md
    "fills the GPU": (backward(4, 4096, (32, 8), Causal()), 1),
    "as many works as multiprocessors": (backward(4, 4096, (32, 1), Full()), 1),
    "the same, of all lengths": (backward(4, 4096, (32, 1), Causal()), 2),
    "half as many": (backward(1, 8192, (8, 1), Full()), 2),
    "half as many, of all lengths": (backward(1, 8192, (8, 1), Causal()), 4),
    "few": (backward(1, 4096, (8, 1), Causal()), 8),
    "short ones of one length": (backward(1, 16384, (8, 1), Window(1024, 0)), 1),
    "no group": (backward(1, 1024, (8, 8), Causal()), 1),
    "packed": (backward(16, 2162, (8, 1), Causal(), **PACKED), 4),
    "packed, many": (backward(16, 2162, (32, 8), Causal(), **PACKED), 1),
    "no keys": (backward(1, 4096, (8, 1), Full(), kv_len=0), 1),
    "no queries": (backward(1, 4096, (8, 1), Full(), q_len=0), 1),
    "no sequence": (backward(0, 4096, (8, 1), Full(), varlen=True, total_q=0, total_kv=0), 1),
}


def chosen(op: Backward) -> int:
    return group.parts(op.forward, 64, 128, H200, ATTN_BWD.cost(Config(), op, H200) / attn_bwd.REACHED)


@pytest.mark.parametrize("op, wanted", CHOSEN.values(), ids=CHOSEN)
def test_parts(op: Backward, wanted: int) -> None:
    assert chosen(op) == wanted


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(40, 70), Causal("top_left"), Window(0, 0)], ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(300, 300), (100, 470), (470, 100), (1, 130), (130, 1)])
def test_steps(mask: Any, q_len: int, kv_len: int) -> None:
    """Query tiles of a key tile: those with a pair in the runs of keys that their first and last queries bound."""
    begin, end = mask.interval(np.arange(q_len), q_len, kv_len)
    wanted = np.zeros(-(-kv_len // 128))
    for first in range(0, q_len, 64):
        keys = [k for q in range(first, min(first + 64, q_len)) for k in range(begin[q], end[q])]
        wanted[np.unique(np.array(keys, int) // 128)] += 1
    assert (group._steps(mask, q_len, kv_len, 64, 128) == wanted).all()


def test_steps_of_long_sequences_are_sampled() -> None:
    found = group._steps(Causal(), 1 << 20, 1 << 20, 64, 128)
    assert abs(found.sum() / (len(found) * (len(found) + 1)) - 1) < 0.01


def test_makespan() -> None:
    assert group.makespan(np.array([3.0, 5, 4, 4]), 2) == 8
    assert group.makespan(np.array([9.0]), 132) == 9 and group.makespan(np.array([]), 4) == 0


LAUNCHES = {
    "attn_bwd": ({}, ["attn_bwd_delta", "attn_bwd", "attn_bwd_sum"], 4),
    "attn_bwd_pair": ({"size": 256}, ["attn_bwd_delta", "attn_bwd_dkdv", "attn_bwd_sum", "attn_bwd_dq"], 4),
    "attn_bwd_mma": ({"element": FP32}, ["attn_bwd_delta", "attn_bwd_mma", "attn_bwd_sum", "attn_bwd_convert"], 4),
    "attn_bwd_simt": ({"element": FP64}, ["attn_bwd_delta", "attn_bwd_dkdv_simt", "attn_bwd_sum", "attn_bwd_dq_simt"], 8),
}


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_launches(kernel: str) -> None:
    """All works and buffers are there, and only how many parts there are is a run-time number."""
    more, names, number_bytes = LAUNCHES[kernel]
    op = backward(2, 300, (8, 2), Causal(), **more)
    found = select(op, H200)
    programs = [found.kernel.lower(op, dataclasses.replace(found.config, parts=parts), H200) for parts in (1, 2, 4)]
    whole, two, four = programs
    assert found.kernel.name == kernel and [launch.entry for launch in two.launches] == names
    assert all(a.source is b.source and a.fields is b.fields for a, b in zip(two.launches, four.launches, strict=True))
    assert [launch.entry for launch in whole.launches] == [name for name in names if name != "attn_bwd_sum"]
    for parts, made in ((2, two), (4, four)):
        bytes_each = number_bytes * parts * 2 * 2 * 300 * op.forward.head_dim
        assert {*made.scratch} - {*whole.scratch} == {Buffer("dk_parts", bytes_each), Buffer("dv_parts", bytes_each)}
        main, add = made.launches[1:3]
        assert main.grid == min(parts * whole.launches[1].grid, H200.sm_count if "simt" not in kernel else 1 << 30)
        assert main.values["heads_per_kv"] * parts == 4 and add.values["heads_per_kv"] == 4 and add.values["group_parts"] == parts


def test_all_that_lengths_may_need_is_compiled_together() -> None:
    """Works of whole groups and of parts, where there are groups."""
    for heads, wanted in (((8, 2), [False, True]), ((8, 8), [False]), ((9, 3), [False, True])):
        op = backward(1, 300, heads, Causal())
        found = select(op, H200)
        made = [any(x.entry == "attn_bwd_sum" for x in program.launches) for program in found.programs(op, H200)]
        assert [key for key, _ in itertools.groupby(made)][: len(wanted)] == wanted


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_numbers_of_parts_that_do_not_divide(kernel: str) -> None:
    op = backward(1, 300, (8, 2), Causal(), **LAUNCHES[kernel][0])
    config = select(op, H200).config
    with pytest.raises(ProblemError, match="parts is 3; it must be 0 or divide the 4 query heads of a key head"):
        select(op, H200, kernel, dataclasses.replace(config, parts=3))


@pytest.mark.parametrize("walk, mask", [("by_columns", Causal()), ("by_tiles", HeadWindow(3, 1))])
def test_orders_that_do_not_fit(walk: str, mask: Any) -> None:
    op = backward(1, 300, (8, 2), mask)
    assert group.walk_of(op.forward) == ("by_heads" if walk == "by_tiles" else "by_tiles")
    with pytest.raises(ProblemError, match=f"walk is '{walk}'; it must be of .* needs one mask for all heads"):
        select(op, H200, "attn_bwd", Config(walk=walk))


def test_no_kernel_with_many_blocks() -> None:
    """Scratch is bounded: nothing is split into more works than a few for each block that runs at once."""
    for batch, length, kv_heads in itertools.product((1, 3, 16), (256, 2048, 16384), (1, 4)):
        op = backward(batch, length, (32, kv_heads), Causal())
        works = batch * kv_heads * -(-length // 128)
        parts = chosen(op)
        assert parts == 1 or parts * works <= group.MOST_WORKS * H200.sm_count

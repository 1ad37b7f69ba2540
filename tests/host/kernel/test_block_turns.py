"""The launches that say in which order key tiles add to dq over lists of blocks, run thread by thread on the CPU."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError
from rawattn.kernel.attn_bwd import AttnBwdConfig
from rawattn.kernel.block_gradients import ATTN_BWD_BLOCKS
from rawattn.operation import Backward
from rawattn.operation.keys import KeyLists, ListSizes
from rawattn.runtime.select import select
from tests import emulator, operations
from tests.block_lists import BACKWARD

BLOCKS = 3  # thread blocks that run at once
DEVICE = dataclasses.replace(TYPICAL["sm_90a"], sm_count=BLOCKS)
CONFIG = dataclasses.replace(BACKWARD[64], turns="by_time")
WORDS = ("listed_steps", "tile_steps", "tile_begins", "work_starts")


def operation(most: int, heads: int, kv_heads: int, block: int, tiles: int, batch: int = 2, list_heads: int = 0) -> Backward:
    """Gradients over lists of blocks of so many queries and keys, ``tiles`` key tiles of 128 a sequence."""
    length = 128 * tiles - 30
    spec: dict[str, Any] = {"keys": KeyLists(False, block, block)}
    op = operations.backward((64, 64), batch=batch, q_len=length, kv_len=length, heads=heads, kv_heads=kv_heads, **spec)
    sizes = ListSizes(most, list_heads or heads, -(-length // block))
    return dataclasses.replace(op, forward=dataclasses.replace(op.forward, keys=sizes))


def run(op: Backward, numbers: Any, folder: pathlib.Path, config: AttnBwdConfig = CONFIG) -> dict[str, Any]:
    """What the launches before attn_bwd leave in scratch."""
    program = ATTN_BWD_BLOCKS.lower(op, config, DEVICE)
    arrays: dict[str, Any] = {x.name: np.full(x.bytes // 4, -7, np.int32) for x in program.scratch if x.name in WORDS}
    strides = dict(zip(("keys_sequence", "keys_head", "keys_row"), np.array(numbers.strides) // 4, strict=False))
    arrays |= {"keys": numbers, "violations": np.zeros(2, np.uint32), "counter": np.zeros(2, np.int32), **strides}
    arrays |= {"q_len": op.forward.q_len, "kv_len": op.forward.kv_len}
    launches = [x for x in program.launches if x.entry.startswith("block")]
    assert [x.entry for x in launches] == ["block_steps", "block_lists", "block_starts", "block_turns"]
    for launch in launches:
        (folder / launch.entry).mkdir()
        emulator.Kernel(launch.source, launch.fields, folder / launch.entry)(launch.grid, {**launch.values, **arrays})
    (main,) = (x for x in program.launches if x.entry == "attn_bwd")
    assert main.grid == BLOCKS and "StaticPersistent" in main.source.text + "".join(dict(main.source.headers).values())
    return arrays | main.values


def works_of(op: Backward, found: dict[str, Any]) -> list[list[list[tuple[int, int, int, int]]]]:
    """The steps (sequence, head, block of queries, turn) of each work, and the works of each thread block."""
    forward, tiles = op.forward, found["listed_tiles"]
    steps, begins = found["tile_steps"].reshape(-1, 2), found["tile_begins"].reshape(-1, tiles + 1)
    size = forward.keys.blocks * forward.keys.most  # type: ignore[union-attr]
    order, pairs = [], [divmod(n, forward.kv_heads) for n in range(forward.batch * forward.kv_heads)]
    groups = [pairs[n : n + found["l2_head_group"]] for n in range(0, len(pairs), found["l2_head_group"])]
    for group in groups:
        for tile in reversed(range(tiles)):
            for sequence, kv_head in group:
                work = []
                for head in range(kv_head * forward.heads_per_kv, (kv_head + 1) * forward.heads_per_kv):
                    own = sequence * forward.heads + head
                    for n in range(begins[own, tile], begins[own, tile + 1]):
                        work.append((sequence, head, steps[own * size + n, 0] >> 2, steps[own * size + n, 1]))
                order.append(work)
    return [order[n::BLOCKS] for n in range(BLOCKS)]


def count_rounds(blocks: list[Any]) -> int:
    """The rounds in which blocks make all steps: in a round each makes its next one if its turn has come."""
    queues, turns, rounds = [[step for work in works for step in work] for works in blocks], dict[Any, int](), 0
    while any(queues):
        heads = [(queue, queue[0]) for queue in queues if queue]
        ready = [(queue, step) for queue, step in heads if turns.get(step[:3], 0) == step[3]]
        assert ready, "every block waits"
        came = {step[:3]: (queue, step) for queue, step in ready}
        assert len(came) == len(ready), "two have the same turn"
        for place, (queue, _) in came.items():
            turns[place] = turns.get(place, 0) + 1
            queue.pop(0)
        rounds += 1
    return rounds


@pytest.mark.parametrize("kind", ["random", "duplicates", "near", "one", "some empty"])
@pytest.mark.parametrize(
    "sizes", [(5, 2, 2, 128, 12), (9, 4, 2, 64, 7), (2, 4, 4, 128, 2)], ids=["128", "64, groups", "heads together"]
)
def test_turns_by_time(kind: str, sizes: Any, tmp_path: pathlib.Path) -> None:
    """Every block makes its steps, each of which has a turn of its own, and they are in the order of time."""
    op, rng = operation(*sizes), np.random.default_rng(3)
    keys: Any = op.forward.keys
    shape, there = (op.forward.batch, keys.heads, keys.blocks, keys.most), keys.blocks
    numbers = rng.integers(0, there, shape)
    if kind == "random":
        numbers = np.argsort(rng.random((*shape[:3], there)))[..., : keys.most]
    elif kind == "near":
        numbers = np.clip(np.arange(there)[:, None] - keys.most // 2, 0, there - keys.most) + np.zeros(shape, int)
        numbers += np.arange(keys.most)
    elif kind == "one":
        numbers = np.full(shape, there - 1)
    elif kind == "some empty":
        numbers = np.where(rng.random(shape) < 0.5, -1, numbers)
    elif kind == "duplicates":
        numbers = np.where(rng.random(shape) < 0.6, numbers[..., :1], numbers)
    found = run(op, np.ascontiguousarray(numbers, dtype=np.int32), tmp_path)
    blocks = works_of(op, found)
    wanted, times = dict[Any, list[Any]](), []
    for number, works in enumerate(blocks):
        time = len(works[0]) * number // BLOCKS
        for work in works:
            times.append(time)
            for step in work:
                wanted.setdefault(step[:3], []).append((time, step[3], number))
                time += 1
    for steps in wanted.values():
        assert sorted(turn for _, turn, _ in steps) == [*range(len(steps))]
        assert [time for time, *_ in sorted(steps, key=lambda step: step[1])] == sorted(time for time, *_ in steps)
    assert sorted(times) == sorted(found["work_starts"])
    rounds, longest = count_rounds(blocks), max(sum(map(len, works)) for works in blocks)
    assert rounds <= (longest if kind == "one" else 1.5 * longest) * (BLOCKS if kind in ("one", "duplicates") else 1)


def test_what_is_refused() -> None:
    for op, changes in (
        (operation(5, 4, 2, 128, 3, list_heads=2), {}), (operation(5, 2, 2, 128, 3), {"turns": "by_tiles"}),
        (operation(5, 2, 2, 128, 3), {"store": "unordered"}),
    ):  # fmt: skip
        with pytest.raises(ProblemError, match=r"turns is|store is 'unordered'"):
            select(op, DEVICE, "attn_bwd", dataclasses.replace(CONFIG, **changes))
    with pytest.raises(ProblemError, match="turns is 'by_time'; it must be '', but over lists of blocks"):
        select(operations.backward((64, 64)), DEVICE, "attn_bwd", CONFIG)

"""The watchdog of GPU tests (tests/watchdog): kernels compile with it, and it knows the barriers' names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.runtime.select import select
from rawattn.variant.element import BF16
from rawattn.variant.mask import Causal
from tests import watchdog
from tests.decode import Decode, config_of, source
from tests.operations import backward, forward

H100 = TYPICAL["sm_90a"]


def attn_fwd() -> compiler.Source:
    op = forward(BF16, 2, 512, 512, 4, 4, 64, 64)
    return ATTN_FWD.render(op, select(op, H100, "attn_fwd").config, "sm_90a")


def attn_bwd() -> compiler.Source:
    op = backward((64, 64), mask=Causal())
    launches = ATTN_BWD.lower(op, ATTN_BWD.candidates(op, H100)[0], H100).launches
    return next(each.source for each in launches if each.entry == "attn_bwd")


def attn_decode() -> compiler.Source:
    op = Decode()
    return source(op, config_of(op, "sm_90a"), "sm_90a")


KERNELS: dict[str, tuple[Any, set[str]]] = {
    "attn_fwd": (attn_fwd, {"q_full", "k_empty", "work_full"}),
    "attn_bwd": (attn_bwd, {"kv_full", "ds_empty", "dq_sum", "board"}),
    "attn_decode": (attn_decode, {"k_full", "given", "listed"}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name: str) -> None:
    """No call takes registers or serializes products, and barriers are found by where they are."""
    make, names = KERNELS[name]
    plain = make()
    found = watchdog.watched(plain, 0.5, 1 << 40)
    assert not compiler.compile(found).advisories
    assert found != plain and watchdog.PATIENT[-1] == plain
    places = watchdog.places(plain)
    assert names <= places.keys() and list(places.values()) == sorted(places.values())
    for place, parity in ((places[x], i) for i, x in enumerate(sorted(names))):
        note = watchdog.Note(len(watchdog.PATIENT), 0, 7, 70, place, parity)
        (barrier,) = (x for x in names if places[x] == place)
        assert watchdog.words(note) == f"{name}.cu: block 7, warp 2, lane 6 waits for parity {parity} of {barrier}, 0 barriers on"
    turn = watchdog.words(watchdog.Note(len(watchdog.PATIENT), 1, 0, 32, 9, 3))
    assert turn == f"{name}.cu: block 0, warp 1, lane 0 waits for its turn at place 9 of args.turns, which says 3"


def test_a_wait_that_it_does_not_know() -> None:
    plain = attn_fwd()
    headers = {**dict(plain.headers), "ptx/mbarrier.cuh": "while (!finished)"}
    with pytest.raises(ValueError, match=r"ptx/mbarrier.cuh has not once, but 0 times: while"):
        watchdog.watched(dataclasses.replace(plain, headers=tuple(headers.items())), 1.0, 0)


def test_every_wait_is_edited() -> None:
    """A loop that waits for another thread is in one of the files that the watchdog knows."""
    from rawattn.kernel.render import FOLDER

    waits = ("try_wait", "test_wait", "load_acquire(")
    found = {
        path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu*") if any(each in path.read_text() for each in waits)
    }
    assert found == watchdog.EDITS.keys()
    for path, edits in watchdog.EDITS.items():
        assert all((FOLDER / path).read_text().count(old) == 1 for old, _ in edits), path

"""This module compares kernels over lists of blocks, run thread by thread on the CPU, with the dense formula."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rawattn.kernel import block_gradients
from rawattn.kernel.attn_fwd import AttnFwdConfig
from rawattn.testing import _move
from tests.block_lists import BACKWARD, CASES, BlockCase, block_cases
from tests.emulator.gpu import stand_in

torch = pytest.importorskip("torch")
ALONE, PAIR = AttnFwdConfig(64, 64, 3, 1, ctas_per_sm=2), AttnFwdConfig(128, 64, 2, 1)
FEW = ("duplicates", "wrong", "some empty", "causal", "packed", "lengths", "blocks of 128", "sinks")


def put(x: Any) -> Any:
    return _move(x, "torch", "cpu")


def configs_of(case: BlockCase) -> list[AttnFwdConfig]:
    """A tile of a block's queries, and one of two blocks or of the whole block."""
    return [ALONE, PAIR] if case.block_kv == 64 else [ALONE, AttnFwdConfig(128, case.block_kv, 2, 1)]


def names(few: tuple[str, ...] = FEW) -> Any:
    return pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in few else pytest.mark.slow) for n in CASES])


@names()
@pytest.mark.parametrize("form", [0, 1], ids=["alone", "pair"])
def test_forward(name: str, form: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, word = CASES[name], stand_in(monkeypatch, tmp_path, sm_count=2)
    results = case.forward(put, kernel="attn_fwd", config=configs_of(case)[form])
    case.check(("o", "lse"), results)
    assert word[0] == (256 if case.kind == "wrong" else 0)


@pytest.mark.parametrize("config", [ALONE, PAIR], ids=["alone", "pair"])
def test_any_lists(config: AttnFwdConfig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, sm_count=2)

    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(block_cases(("bf16",), wrong=True))
    def run(case: BlockCase) -> None:
        case = dataclasses.replace(case, block_q=64, block_kv=64, window=None, softcap=None)
        case.check(("o", "lse"), case.forward(put, kernel="attn_fwd", config=config))

    run()


def test_all_blocks_in_order_have_the_bits_of_a_list_of_tiles(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms have the same bits, whatever shares a tile."""
    stand_in(monkeypatch, tmp_path, sm_count=2)
    results = [CASES["duplicates"].forward(put, kernel="attn_fwd", config=config) for config in (ALONE, PAIR)]
    assert all(np.array_equal(a.float(), b.float()) for a, b in zip(*results, strict=True))


def rounded(case: BlockCase, name: str) -> Any:
    """A result of the forward, rounded as a kernel rounds it."""
    each = [case.wanted(i)[name] for i in range(len(case.lengths))]
    joined = np.concatenate(each, 1 if name == "lse" else 0) if case.packed else np.stack(each)
    return put(joined.astype(case.element.lse_dtype if name == "lse" else case.element.dtype))


@names(
    ("duplicates", "wrong", "some empty", "heads", "packed", "lengths", "blocks of 128", "sinks", "128 x 64", "one block each")
)
def test_backward(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, word = CASES[name], stand_in(monkeypatch, tmp_path, sm_count=1)  # blocks run one after the other
    gradients = case.backward(put, rounded(case, "o"), rounded(case, "lse"), kernel="attn_bwd")
    case.check(case.gradient_names(), gradients)
    assert word[0] == (256 if case.kind == "wrong" else 0)


@names(("duplicates", "some empty", "heads", "packed", "blocks of 128"))
def test_several_sums_of_dq(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tiles of dq have fewer contributors than sums."""
    case = CASES[name]
    stand_in(monkeypatch, tmp_path, sm_count=1)  # blocks run one after the other
    config = dataclasses.replace(BACKWARD[64], dq_sums=3)
    case.check(
        case.gradient_names(), case.backward(put, rounded(case, "o"), rounded(case, "lse"), kernel="attn_bwd", config=config)
    )


@names(("duplicates", "heads", "packed", "blocks of 128", "one block each", "head_dim 128"))
@pytest.mark.parametrize("sums", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_turns_by_time(name: str, sums: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks at once, which wait for each other."""
    case = dataclasses.replace(CASES[name], list_heads=CASES[name].heads)
    stand_in(monkeypatch, tmp_path, sm_count=3)
    config = dataclasses.replace(BACKWARD[case.head_dim], dq_sums=sums, turns="by_time")
    case.check(
        case.gradient_names(), case.backward(put, rounded(case, "o"), rounded(case, "lse"), kernel="attn_bwd", config=config)
    )


@names(("duplicates", "some empty", "heads", "packed", "blocks of 128"))
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_backward_by_mma(name: str, dtype: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASES[name], dtype=dtype)
    word = stand_in(monkeypatch, tmp_path, sm_count=1)  # blocks run one after the other
    gradients = case.backward(put, rounded(case, "o"), rounded(case, "lse"), kernel="attn_bwd_mma")
    case.check(case.gradient_names(), gradients, None if dtype == "bf16" else 1e-4)
    assert word[0] == (256 if case.kind == "wrong" else 0)


@pytest.mark.parametrize("kind", ["duplicates", "one"])
def test_lists_of_more_tiles_than_are_counted_at_once(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 key tiles, 32 at a time, by two warps that sort 32 columns each."""
    stand_in(monkeypatch, tmp_path, sm_count=1)  # blocks run one after the other
    for name, value in (("STEPS_THREADS", 32), ("STEPS_CHUNK", 32), ("SORT_THREADS", 64), ("SORT_COLUMNS", 32)):
        monkeypatch.setattr(block_gradients, name, value)
    monkeypatch.setattr(block_gradients.ATTN_BWD_BLOCKS, "_cache", {})
    case = BlockCase(
        kind,
        40 if kind == "duplicates" else 3,
        lengths=((200, 5000),),
        heads=1,
        head_dim=16,
        head_dim_v=16,
        counts=kind == "duplicates",
    )
    gradients = case.backward(put, rounded(case, "o"), rounded(case, "lse"), kernel="attn_bwd")
    case.check(case.gradient_names(), gradients)

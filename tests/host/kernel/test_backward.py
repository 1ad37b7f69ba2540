"""The kernels of the backward, run thread by thread on the host, against autograd in float64: those of Hopper by
tests/host_threads.py, others by tests/emulator. Outputs and scratch hold NaN before; turns hold anything."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from perf.lib.altered import patched_bwd_mma
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_bwd
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA, AttnBwdMmaConfig
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.kernel.program import Program
from rawattn.operation import Forward
from rawattn.variant.element import ELEMENTS, FP32, FP64
from rawattn.variant.mask import And, Causal, Full, Window, of_head
from rawattn.variant.score import Scale, Softcap
from tests import emulator, host_threads
from tests.operations import backward
from tests.options import EXAMPLES, Alibi, Fading

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation, and what is launched for it: ``grid`` blocks of a persistent kernel run together."""

    size: tuple[int, int]
    kinds: dict[str, Any]
    lengths: tuple[tuple[int, int], ...]  # of q and k, of each sequence
    heads: tuple[int, int] = (2, 1)
    varlen: bool = False
    dlse: bool = False
    simt: bool = False
    mma: AttnBwdMmaConfig | None = None
    patch: str = ""  # one of perf/ablations/attn_bwd_mma/
    store: str = "ordered"
    direction: str = ""
    chains: int = 1
    grid: int = 2
    sinks: bool = False
    order: str = "at_once"
    parts: int = 1  # of the query heads of a key head
    walk: str = ""
    sums: int = 1  # of each tile of dq
    query_parts: int = 1  # of the query tiles of a key tile
    bundle: int = 0
    lens: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)  # q_lens and kv_lens; NaN is behind them


SEED = -(5 << 40) + 11
THREADED = ("attn_bwd", "attn_bwd_dkdv", "attn_bwd_dq")  # wgmma, and blocks that wait for each other
PADDING = 3  # rows behind the last packed sequence
AROUND = 1 << 14  # numbers on either side of outputs
SHORT = ((0, 5), (33, 64), (64, 130), (1, 1), (70, 0), (7, 90))  # borders as in PACKED, for cases that run in every run
PACKED = ((0, 5), (70, 64), (64, 200), (1, 1), (130, 0), (7, 150))
SIMT = {
    "full": Case((24, 40), {"element": FP64}, ((70, 45),) * 2),
    "causal": Case((24, 24), {"element": FP64, "mask": Causal(), "scale": -0.3}, ((45, 70),) * 2, dlse=True),
    "rows without keys": Case((9, 5), {"element": FP64, "mask": Causal()}, ((70, 20),), heads=(3, 3), dlse=True),
    "no keys": Case((9, 5), {"element": FP64}, ((7, 0),)),
    "window, softcap": Case((16, 8), {"element": FP64, "mask": Window(9, 3), "score": Softcap(0.7)}, ((80, 64),), heads=(4, 2)),
    "packed": Case(
        (8, 16),
        {"element": FP64, "mask": And(Causal("top_left"), Window(80)), "score": Softcap(1.5)},
        SHORT[:4],
        varlen=True,
        dlse=True,
    ),
    "dropout": Case((24, 17), {"element": FP64, "dropout": 0.4, "q_offset": 5}, ((50, 70),) * 2, heads=(2, 1), dlse=True),
    "sinks": Case((24, 17), {"element": FP64, "mask": Causal()}, ((90, 70), (90, 70)), heads=(4, 2), dlse=True, sinks=True),
    "sinks, packed": Case((8, 8), {"element": FP64, "mask": Causal()}, PACKED, varlen=True, dlse=True, sinks=True),
    "no keys, sinks": Case((9, 5), {"element": FP64}, ((7, 0),), dlse=True, sinks=True),
    "no queries": Case((9, 5), {"element": FP64}, ((0, 40),), sinks=True),
    "fp64, wide": Case((200, 1), {"element": FP64}, ((20, 20),)),
    "fp32, two chunks": Case((72, 100), {"element": FP32, "mask": Causal()}, ((40, 40),)),
}
HOPPER = {
    "64": Case((64, 64), {"mask": And(Causal(), Window(70)), "score": Softcap(2.0)}, ((300, 420),), heads=(2, 2), grid=3),
    "64, unordered": Case((64, 64), {"mask": Causal()}, ((300, 300),), (4, 2), store="unordered", direction="ShortestFirst"),
    "128": Case((128, 128), {"mask": Causal()}, ((150, 300),)),
    "128, rows without keys": Case((128, 128), {"mask": Causal(), "scale": -0.2}, ((200, 100),), chains=2, dlse=True),
    "128, final": Case((128, 128), {"mask": Causal(), "scale": -0.2}, ((200, 70),), heads=(2, 2), store="final", chains=2),
    "120, packed": Case((120, 120), {"mask": Causal("top_left")}, PACKED, varlen=True, chains=2, dlse=True, grid=3),
    "64, packed, groups": Case((64, 64), {"mask": Causal()}, PACKED[1:3], heads=(5, 5), varlen=True),
    "128, packed, one way": Case(
        (128, 128), {"mask": Causal()}, PACKED, (1, 1), True, store="final", direction="AlternatingLong", grid=3
    ),
    "64, packed, longest first": Case(
        (64, 64), {"mask": Causal()}, PACKED[1:3], (4, 2), True, direction="LongestFirst", walk="by_tiles"
    ),
    "40, packed, final": Case((40, 24), {}, PACKED, varlen=True, store="final", direction="Alternating"),
    "96 and 64": Case((96, 64), {"mask": Window(20, 100, "top_left")}, ((90, 260),), heads=(1, 1), dlse=True),
    "256": Case((256, 256), {"mask": Causal()}, ((130, 150),)),
    "64, sinks": Case((64, 64), {"mask": Causal()}, ((100, 70),), dlse=True, sinks=True),
    "128, dropout, packed, final": Case((128, 120), {"dropout": 0.5}, PACKED, varlen=True, store="final"),
    "64, dropout, offsets": Case(
        (64, 64), {"dropout": 0.3, "q_offset": 96, "kv_offset": 32}, ((70, 140),), dlse=True, sinks=True
    ),
    "64, dropout, offsets between": Case((64, 64), {"dropout": 0.3, "q_offset": 41, "kv_offset": 19}, ((70, 70),)),
    "192 and 128, dropout": Case((192, 128), {"mask": Causal(), "dropout": 0.3}, ((130, 150),) * 2),
    "64, no keys": Case((64, 64), {}, ((70, 0),)),
    "128, no queries": Case((128, 128), {}, ((0, 70),)),
    "256, no keys": Case((256, 256), {}, ((70, 0),), sinks=True),
    "128, later": Case((128, 128), {"scale": -0.2}, ((200, 300), (200, 300)), heads=(4, 2), order="step_later", dlse=True),
    "128, later, final": Case((128, 128), {}, ((150, 300),), store="final", order="step_later", grid=3),
    "128, later, causal": Case((128, 128), {"mask": Causal()}, ((300, 200),), order="step_later", sinks=True, dlse=True),
    "120, later, packed": Case((120, 120), {"mask": Causal()}, PACKED, varlen=True, order="step_later", grid=3, sinks=True),
    "192 and 128, packed": Case((192, 128), {"mask": Window(40, 30), "score": Softcap(2.0)}, SHORT, varlen=True, dlse=True),
}
HOPPER |= {
    "64, alibi, offsets": Case((64, 64), {"mask": Causal(), "score": Alibi(1.0), "q_offset": 41}, ((70, 140),), heads=(4, 2)),
    "192 and 128, fading, packed": Case((192, 128), {"mask": Causal(), "score": Fading(0.1)}, PACKED[1:4], varlen=True),
}
SIMT |= {
    "alibi, packed": Case((8, 9), {"element": FP64, "score": Alibi(1.0), "kv_offset": 7}, PACKED[:4], varlen=True),
}
HOPPER |= {  # weights dropped as they are packed
    "64, dropout": Case((64, 64), {"mask": Causal(), "dropout": 0.3}, ((150, 260),), dlse=True),
    "128, dropout": Case((128, 128), {"dropout": 0.7}, ((200, 150),)),
}
HOPPER |= {  # wide heads in one kernel
    "160, one kernel": Case(
        (160, 160), {"mask": Causal(), "scale": -0.2}, ((200, 300),) * 2, (4, 2), order="dp_later", dlse=True
    ),
    "192 and 128, one kernel": Case((192, 128), {}, ((150, 300),), (1, 1), order="dp_later", grid=3),
    "168 and 136, one kernel, one stage": Case((168, 136), {}, ((150, 300),), (2, 1), order="dp_later", grid=3),
    "136 and 184, one kernel, packed": Case(
        (136, 184), {"mask": Window(90, 70)}, PACKED, varlen=True, order="dp_later", grid=3, sinks=True
    ),
    "144 and 176, one kernel, rotated": Case((144, 176), {}, ((450, 700),), (1, 1), order="dp_later", grid=6, walk="rotated"),
    "128 and 192, one kernel, parts": Case((128, 192), {"mask": Causal()}, ((70, 200),) * 2, (2, 1), order="dp_later", parts=2),
}
HOPPER |= {  # works of a part of the query heads of a key head
    "64, parts": Case((64, 40), {"mask": Causal()}, ((130, 200),) * 2, (4, 1), dlse=True, parts=2),
    "128, later, packed, parts": Case((128, 128), {}, SHORT, (6, 2), varlen=True, order="step_later", grid=3, parts=3),
    "192 and 128, parts": Case((192, 128), {"mask": Causal()}, ((70, 100),) * 2, (2, 1), parts=2),
    "64, uneven parts": Case((64, 64), {"mask": Causal()}, ((200, 450),) * 2, (10, 2), dlse=True, parts=2, walk="uneven", grid=3),
    "128, uneven parts": Case((128, 128), {}, ((130, 300),), (7, 1), store="final", parts=3, walk="uneven", grid=3),
}
HOPPER |= {  # key tiles that begin at query tiles of their own
    "128, rotated": Case((128, 128), {}, ((450, 700),), (1, 1), grid=6, walk="rotated"),
    "64, rotated, causal": Case((64, 64), {"mask": Causal()}, ((200, 1000),), (2, 1), grid=4, walk="rotated", dlse=True),
    "128, later, rotated": Case((128, 128), {}, ((200, 400),) * 2, (2, 2), order="step_later", grid=5, walk="rotated"),
    "128, final, rotated": Case((128, 128), {"mask": Causal()}, ((300, 500),), (2, 1), store="final", grid=4, walk="rotated"),
    "128, rotated, query parts": Case((128, 128), {}, ((450, 700),) * 2, (2, 1), grid=7, query_parts=3),
    "64, query parts, lens": Case((64, 64), {}, ((200, 300),) * 2, (1, 1), grid=6, query_parts=2, lens=((200, 70), (131, 300))),
    "64, query parts, sums": Case((64, 64), {}, ((500, 450),) * 2, (2, 2), grid=6, query_parts=2, sums=3, dlse=True),
    "64, query parts": Case((64, 64), {"mask": Causal()}, ((300, 420),), (1, 1), store="final", grid=6, query_parts=2),
    "128, rotated, parts": Case((128, 128), {}, ((130, 600),), (4, 1), parts=2, grid=5, walk="rotated"),
}
HOPPER |= {  # several sums of each tile of dq, not all of which every tile has
    "64, sums": Case((64, 64), {"mask": Causal()}, ((150, 700),) * 2, (2, 1), dlse=True, grid=4, sums=3),
    "128, later, sums": Case((128, 128), {"mask": Causal()}, ((400, 300),), order="step_later", chains=2, grid=3, sums=2),
    "80, rotated, sums": Case((80, 80), {}, ((450, 700),), (1, 1), grid=6, walk="rotated", sums=4),
    "40, packed, sums": Case((40, 24), {"mask": Window(60, 40)}, PACKED, varlen=True, grid=3, sums=2),
}
HOPPER |= {  # query tiles in parts along the diagonal, which have sums of dq of their own
    "64, bands": Case(
        (64, 64), {"mask": Causal()}, ((450, 450),) * 2, (2, 2), grid=3, walk="bands", query_parts=2, sums=2, dlse=True
    ),
    "128, later, bands": Case(
        (128, 128), {"mask": Causal()}, ((460, 700),), (2, 1), order="step_later", grid=4, walk="bands", query_parts=3, sums=3
    ),
    "96, bands": Case(
        (96, 80), {"mask": Causal("top_left"), "scale": -0.2}, ((700, 300),), grid=3, walk="bands", query_parts=4, sums=8
    ),
    "128, bands, lens": Case(
        (128, 128), {"mask": Causal()}, ((300, 400),) * 3, (1, 1), grid=3, walk="bands", query_parts=2, sums=2,
        lens=((300, 3, 130), (129, 400, 70)),
    ),
}  # fmt: skip
HOPPER |= {  # packed sequences whose key tiles go round, or side by side
    "40, packed, rotated": Case((40, 24), {}, PACKED, varlen=True, store="final", grid=3, walk="rotated", dlse=True),
    "128, later, packed, rotated": Case(
        (128, 128), {}, ((70, 300), (130, 700), (0, 9), (300, 260)), (2, 2), True, order="step_later", grid=5, walk="rotated"
    ),
    "40, packed, bundles": Case((40, 24), {}, PACKED, varlen=True, store="final", grid=3, bundle=1),
    "128, later, packed, bundles": Case((128, 128), {}, PACKED, (4, 2), varlen=True, order="step_later", grid=3, bundle=2),
}
LENS: Any = ((70, -1, 9999, 0), (9999, 40, 0, 131))  # out of range ones are cut
HOPPER |= {
    "64, lens": Case((64, 64), {"mask": Causal()}, ((150, 200),) * 4, dlse=True, sinks=True, lens=LENS),
    "128, later, lens": Case((128, 128), {}, ((150, 200),) * 3, order="step_later", lens=((150, 3, 130), (129, 200, 70)), grid=3),
    "128, final, kv_lens": Case((128, 128), {"mask": Window(60, 40)}, ((90, 150),) * 2, store="final", lens=(None, (150, 61))),
    "128, rotated, lens": Case(
        (128, 128), {"mask": Causal()}, ((300, 500),) * 2, (1, 1), lens=((300, 70), (131, 500)), grid=5, walk="rotated"
    ),
    "40, packed, lens": Case(
        (40, 24), {"mask": Causal()}, PACKED[1:5], varlen=True, sinks=True, lens=((33, 64, 1, 9), (64, 1, 0, 3))
    ),
    "256, lens": Case((256, 256), {"mask": Causal()}, ((130, 150),) * 2, sinks=True, dlse=True, lens=((5, 99), (150, 70))),
    "192 and 128, packed, q_lens": Case((192, 128), {}, PACKED[1:5], varlen=True, lens=((33, 64, 0, 9), None)),
}
SIMT |= {
    "lens": Case((24, 17), {"element": FP64, "mask": Causal()}, ((90, 70),) * 4, (4, 2), dlse=True, sinks=True, lens=LENS),
    "packed, lens": Case(
        (8, 8), {"element": FP64}, PACKED[:5], varlen=True, lens=((0, 33, 64, 1, 9), (3, 64, 1, 0, 0)), dlse=True
    ),
}
LONE = AttnBwdMmaConfig(warps=4, sharing=1, ctas_per_sm=2)  # a warp has its keys alone
PAIRS = AttnBwdMmaConfig()
FOURS = AttnBwdMmaConfig(sharing=4, chunk_q=16)
SMALL = AttnBwdMmaConfig(m_tiles_per_warp=1, do_stages=1, dq_row_warps=4, dq_vector=1)
ONE_STAGE = AttnBwdMmaConfig(warps=4, sharing=1, q_stages=1, do_stages=1, dq_vector=1)
LEAST = AttnBwdMmaConfig(tile_q=32, warps=4, m_tiles_per_warp=1, chunk_q=16, do_stages=1)
WIDE = AttnBwdMmaConfig(32, 8, 1, 4, 32, q_stages=1, do_stages=1)
MMA: dict[str, tuple[AttnBwdMmaConfig, Case]] = {
    "64": (LONE, Case((64, 64), {}, ((100, 140),))),
    "64, one stage, heads of a group": (ONE_STAGE, Case((64, 64), {"mask": Causal()}, ((150, 200),), heads=(4, 2))),
    "64, window, softcap": (
        LONE, Case((64, 64), {"mask": Window(40, 10), "score": Softcap(2.0)}, ((200, 300),), heads=(1, 1), dlse=True),
    ),
    "40 and 24, packed": (
        LONE, Case((40, 24), {"mask": Causal("top_left"), "scale": -0.3}, PACKED, varlen=True, dlse=True, sinks=True),
    ),
    "8 and 72, one stage": (AttnBwdMmaConfig(warps=4, dq_row_warps=4, do_stages=1), Case((8, 72), {}, ((70, 70),))),
    "64, offsets": (LONE, Case((64, 64), {"mask": Causal(), "q_offset": 40, "kv_offset": 9}, ((100, 140),), sinks=True)),
    "64, dropout": (LONE, Case((64, 64), {"mask": Causal(), "dropout": 0.3}, ((100, 140),), heads=(4, 2))),
    "96 and 128, dropout, packed": (PAIRS, Case((96, 128), {"dropout": 0.5, "kv_offset": 9}, PACKED[1:4], varlen=True)),
    "64, lens": (LONE, Case((64, 64), {"mask": Causal()}, ((100, 140),) * 4, dlse=True, sinks=True, lens=LENS)),
    "96 and 128, packed, lens": (
        PAIRS, Case((96, 128), {}, PACKED[1:5], varlen=True, lens=((33, 64, 1, 9), (64, 1, 0, 3))),
    ),
    "64, no keys": (LONE, Case((64, 64), {}, ((70, 0),))),
    "64, no queries": (LONE, Case((64, 64), {}, ((0, 70),))),
    "128, causal": (PAIRS, Case((128, 128), {"mask": Causal(), "scale": -0.2}, ((150, 260),))),
    "128, shortest first": (PAIRS, Case((128, 128), {"mask": Causal()}, ((150, 260),), direction="ShortestFirst")),
    "128, small tiles": (SMALL, Case((128, 128), {"mask": Causal()}, ((130, 100),), heads=(2, 2))),
    "96 and 128, packed": (PAIRS, Case((96, 128), {"mask": And(Causal(), Window(60))}, PACKED, heads=(1, 1), varlen=True)),
    "80 and 112, unordered": (SMALL, Case((80, 112), {}, ((70, 150),), heads=(1, 1), store="unordered")),
    "256": (FOURS, Case((256, 256), {"mask": Causal()}, ((130, 100),), heads=(1, 1))),
    "192 and 136, softcap": (FOURS, Case((192, 136), {"mask": Window(70), "score": Softcap(2.0)}, ((80, 150),), heads=(2, 1))),
    "64, lens, parts": (LONE, Case((64, 40), {"mask": Causal()}, ((70, 140),) * 4, (4, 2), lens=LENS, parts=2)),
    "fp32, 40, parts": (LEAST, Case((40, 24), {"element": FP32}, ((50, 70),), (3, 1), parts=3)),
    "256, one stage": (
        AttnBwdMmaConfig(sharing=4, chunk_q=16, q_stages=1, do_stages=1), Case((256, 256), {}, ((70, 40),), heads=(1, 1)),
    ),
    "256, least memory": (LEAST, Case((256, 256), {}, ((70, 40),), heads=(1, 1))),
    "512": (WIDE, Case((512, 512), {"mask": Causal()}, ((70, 50),), heads=(1, 1))),  # by columns, as all above 256
    "272 and 296, dropout, packed": (
        dataclasses.replace(WIDE, do_stages=2),
        Case((272, 296), {"dropout": 0.3}, ((40, 70), (33, 1), (0, 5)), varlen=True, sinks=True),
    ),
    "40 and 320, small tiles": (
        AttnBwdMmaConfig(16, 4, 1, 4, 16, do_stages=1, dq_row_warps=1, dq_vector=1),
        Case((40, 320), {"mask": Window(20, 9), "score": Softcap(2.0), "scale": -0.3}, ((50, 70),), dlse=True),
    ),
    "320, eight warps": (AttnBwdMmaConfig(32, 8, 1, 8, 32), Case((320, 64), {}, ((70, 40),), parts=2)),
    "fp32, 64": (
        AttnBwdMmaConfig(warps=4, q_stages=1, do_stages=1, ctas_per_sm=2),
        Case((64, 40), {"element": FP32, "mask": Causal()}, ((50, 40),), heads=(1, 1), dlse=True),
    ),
    "fp32, 128": (
        AttnBwdMmaConfig(sharing=4, chunk_q=16, do_stages=1), Case((128, 80), {"element": FP32, "dropout": 0.3}, ((70, 130),)),
    ),
    "fp32, 256": (
        AttnBwdMmaConfig(m_tiles_per_warp=1, sharing=4, chunk_q=16, q_stages=1, do_stages=1),
        Case((256, 200), {"element": FP32, "mask": Causal()}, ((70, 40),), heads=(1, 1)),
    ),
    "fp32, 128, least memory": (LEAST, Case((128, 72), {"element": FP32}, ((70, 40),), heads=(2, 2))),
    "fp32, 16 and 8, alone": (
        AttnBwdMmaConfig(tile_q=32, warps=4, m_tiles_per_warp=1, sharing=1, chunk_q=16),
        Case((16, 8), {"element": FP32, "score": Softcap(2.0)}, ((50, 70),)),
    ),
    "fp32, 40 and 24, packed": (
        AttnBwdMmaConfig(m_tiles_per_warp=1, sharing=4, chunk_q=16, dq_vector=1),
        Case((40, 24), {"element": FP32, "mask": Causal("top_left"), "scale": -0.3}, SHORT, varlen=True, dlse=True, sinks=True),
    ),
    "fp32, 64, lens, unordered": (
        AttnBwdMmaConfig(tile_q=32, warps=4, chunk_q=16),
        Case((64, 64), {"element": FP32, "mask": Causal()}, ((50, 70),) * 3, store="unordered", lens=((33, -1, 99), (99, 40, 0))),
    ),
}  # fmt: skip
CASES = {f"simt, {name}": dataclasses.replace(case, simt=True) for name, case in SIMT.items()} | HOPPER
CASES |= {f"mma, {name}": dataclasses.replace(case, mma=config) for name, (config, case) in MMA.items()}
CASES |= {f"mma, {patch}": dataclasses.replace(CASES["mma, 128, causal"], patch=patch) for patch in ("fenced", "asked_late")}


OWN = {  # entries of tests/options.py, by each kernel
    f"{kernel} {name}": pytest.param(dataclasses.replace(case, kinds=case.kinds | option), marks=marks, id=f"{kernel} {name}")
    for name, option in EXAMPLES
    for kernel, case, marks in (
        ("attn_bwd_simt", Case((9, 5), {"element": FP64}, ((40, 70),), simt=True), ()),
        ("attn_bwd", Case((64, 64), {}, ((70, 140),)), pytest.mark.slow),
        ("attn_bwd_pair", Case((192, 128), {}, ((70, 140),)), pytest.mark.slow),
        ("attn_bwd_mma", Case((64, 64), {}, ((70, 140),), mma=LONE), pytest.mark.slow),
    )
}


def dropped(op: Forward, batch: int, q_len: int, kv_len: int) -> Array:
    """Returns what the weights of one batch are multiplied by, (heads, q_len, kv_len)."""
    if not op.spec.dropout:
        return np.ones((1, 1, 1))
    q, kv = (np.arange(n) + offset for n, offset in zip((q_len, kv_len), op.spec.offsets or (0, 0), strict=True))
    weight: Any = op.spec.weight
    return np.stack([weight.kept(SEED, batch, head, q[:, None], kv[None]) for head in range(op.heads)]) * weight.factor


def formula(
    q: Array, k: Array, v: Array, do: Array, dlse: Array, sinks: Array, op: Forward, batch: int = 0, kept: Array | None = None
) -> tuple[Array, ...]:
    """o, lse, dq, dk, dv, dsinks of one batch in float64, by torch. ``kept``: the pairs of each head, else the mask's.

    Gradients are those for an o that was rounded, as the kernels get it: what is lost of do times o acts as a gradient of lse.
    Where a row has few keys, dp - delta cancels, and nothing else may be left."""
    weights = torch.tensor(dropped(op, batch, len(q), len(k)))
    q, k, v, do, dlse, sinks = (torch.tensor(x.astype(np.float64)) for x in (q, k, v, do, dlse, sinks))
    q, k, v, sinks = (x.requires_grad_() for x in (*(x.transpose(-2, -3) for x in (q, k, v)), sinks))
    group = q.shape[0] // k.shape[0]
    s = q @ k.repeat_interleave(group, 0).transpose(-1, -2) * op.scale
    score: Any = op.spec.placed_score
    rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    s = torch.stack([score.logit(torch, s[h], batch, h, rows, keys) for h in range(op.heads)])
    if kept is None:
        masks = [of_head(op.spec.placed_mask, head) for head in range(op.heads)]
        begin, end = np.moveaxis([mask.interval(np.arange(q.shape[1]), q.shape[1], k.shape[1]) for mask in masks], 1, 0)
        keys = np.arange(k.shape[1])
        kept = (keys >= begin[..., None]) & (keys < end[..., None])
        if (keep := op.spec.placed_mask.keep) is not None:
            kept &= keep(np, batch, 0, np.arange(q.shape[1])[:, None], keys, q.shape[1], k.shape[1])
    keep = torch.from_numpy(kept)
    e = torch.where(keep, s, -torch.inf).exp()  # logits are small
    total = e.sum(-1, keepdim=True) + sinks[:, None, None].exp()
    any_key = total > 0
    o = e / torch.where(any_key, total, 1.0) * weights @ v.repeat_interleave(group, 0)
    lse = torch.where(any_key, torch.where(any_key, total, 1.0).log(), 0.0)[..., 0]
    exact = o.detach().numpy()
    rounding = torch.from_numpy(exact - exact.astype(op.element.dtype).astype(np.float64))
    of_rounding = (rounding * do.transpose(-2, -3)).sum(-1)
    loss = (o * do.transpose(-2, -3)).sum() + (lse * (dlse + of_rounding)).sum()
    grads = torch.autograd.grad(loss, (q, k, v, sinks))
    lse = torch.where(any_key[..., 0], lse, -torch.inf)
    gradients = (*(g.transpose(-2, -3).numpy() for g in grads[:3]), grads[3].numpy())
    return o.transpose(-2, -3).detach().numpy(), lse.detach().numpy(), *gradients


def split(x: Array, lengths: tuple[int, ...], varlen: bool) -> list[Array]:
    """Each sequence's part of an array, a view."""
    if not varlen:
        return list(x)
    ends = np.cumsum([0, *lengths])
    return [x[a:b] for a, b in itertools.pairwise(ends)]


def scratch(count: int, dtype: Any, value: Any) -> Array:
    """An array on a multiple of 64 bytes, as TMA needs."""
    space = np.empty((count + 16) * np.dtype(dtype).itemsize, np.uint8)
    start = -space.ctypes.data % 64
    found = space[start : start + count * np.dtype(dtype).itemsize].view(dtype)
    found[...] = value
    return found


class Call:
    """A case's arrays, and its program on them."""

    def __init__(self, case: Case) -> None:
        self.case, (heads, kv_heads) = case, case.heads
        self.q_lens, self.kv_lens = zip(*case.lengths, strict=True)
        kinds = {"mask": Full(), "score": Scale(), "scale": 0.3, **case.kinds}
        self.used = [
            lengths if lens is None else tuple(max(0, min(n, used)) for n, used in zip(lengths, lens, strict=True))
            for lengths, lens in zip((self.q_lens, self.kv_lens), case.lens, strict=True)
        ]
        lens = {name: x is not None for name, x in zip(("q_lens", "kv_lens"), case.lens, strict=True)}
        shape = {**lens, "batch": len(case.lengths), "q_len": max(self.q_lens), "kv_len": max(self.kv_lens), "sinks": case.sinks}
        if case.varlen:
            shape |= {"total_q": sum(self.q_lens) + PADDING, "total_kv": sum(self.kv_lens) + PADDING}
        self.op = backward(case.size, heads=heads, kv_heads=kv_heads, varlen=case.varlen, dlse=case.dlse, **shape, **kinds)
        forward, random = self.op.forward, np.random.default_rng(0)
        dtypes = {"int32": np.int32, "int64": np.int64, **{element.name: element.dtype for element in ELEMENTS.values()}}
        self.number = forward.element.lse_dtype
        self.arrays: dict[str, Array] = {}
        for operand in self.op.inputs:
            self.arrays[operand.name] = random.standard_normal(operand.shape).astype(dtypes[operand.element])
        for name, lengths in (("cu_seqlens_q", self.q_lens), ("cu_seqlens_kv", self.kv_lens))[: 2 * case.varlen]:
            self.arrays[name][...] = np.cumsum([0, *lengths])
        self.arrays |= {"seed": np.array([SEED])}
        for name, of_case in zip(lens, case.lens, strict=True):
            if of_case is not None:
                self.arrays[name] = np.array(of_case, np.int32)
        self.arrays |= {each.name: np.full(each.shape, np.nan, dtypes[each.element]) for each in self.op.outputs}
        self.arrays.setdefault("dlse", np.zeros_like(self.arrays["lse"]))
        self.arrays.setdefault("sinks", np.full(heads, -np.inf, self.number))

    def wanted(self) -> list[tuple[Array, ...]]:
        """The gradients of each sequence; o and lse become those of the forward, and NaN is in all rows that are not used."""
        case, found = self.case, []
        lengths = {"q": self.q_lens, "k": self.kv_lens, "v": self.kv_lens, "do": self.q_lens, "o": self.q_lens}
        parts = [split(self.arrays[name], n, case.varlen) for name, n in lengths.items()]
        for name in ("lse", "dlse"):
            x = self.arrays[name].swapaxes(-1, -2)
            parts.append(split(x, self.q_lens, case.varlen))
        for batch, (n, m, *own) in enumerate(zip(*self.used, *parts, strict=True)):
            for x, end in zip(own, (n, m, m, n, n, n, n), strict=True):
                x[end:] = np.nan
            q, k, v, do, o, lse, dlse = (x[:end] for x, end in zip(own, (n, m, m, n, n, n, n), strict=True))
            rest = self.arrays["sinks"], self.op.forward, batch, self.kept(batch)
            o[...], of_rows, *grads = formula(q, k, v, do, dlse.T, *rest)
            lse[...] = of_rows.T
            found.append(tuple(grads))
        return found

    def kept(self, sequence: int) -> Array | None:
        """The pairs that each head keeps, where the mask's interval does not say it."""
        return None

    def program(self) -> Program:
        case, kernel = self.case, ATTN_BWD_PAIR if max(self.case.size) > 128 and self.case.order != "dp_later" else ATTN_BWD
        if case.mma:
            config = dataclasses.replace(case.mma, store=case.store, direction=case.direction, parts=case.parts, walk=case.walk)
            reason = ATTN_BWD_MMA.legal(config, self.op, TYPICAL["sm_90a"])
            assert reason is None or (case.store == "unordered" and "deterministic=False" in reason)
            altered = patched_bwd_mma(case.patch) if case.patch else ATTN_BWD_MMA
            return altered.lower(self.op, config, TYPICAL["sm_90a"])
        if case.simt:
            return ATTN_BWD_SIMT.lower(self.op, ATTN_BWD_SIMT.candidates(self.op, TYPICAL["sm_75"])[0], TYPICAL["sm_75"])
        found: Any = kernel.candidates(self.op, TYPICAL["sm_90a"])[0]
        if kernel is ATTN_BWD:
            found = attn_bwd.config_of(self.op.forward, case.store)
            steps = "together" if case.order == "step_later" else found.steps
            found = dataclasses.replace(found, steps=steps, dq_sums=case.sums)
            found = dataclasses.replace(found, dq_chains=case.chains, order=case.order, walk=case.walk)
            found = dataclasses.replace(found, query_parts=case.query_parts, bundle=case.bundle)
        found = dataclasses.replace(found, direction=case.direction, parts=case.parts)
        assert kernel is not ATTN_BWD or ATTN_BWD.legal(found, self.op, TYPICAL["sm_90a"]) is None or case.store == "unordered"
        device, is_of_grid = TYPICAL["sm_90a"], case.walk == "rotated" or case.query_parts > 1 or case.bundle
        device = dataclasses.replace(device, sm_count=case.grid) if is_of_grid else device
        return kernel.lower(self.op, found, device)

    def run(self, folder: pathlib.Path) -> Program:
        case, program = self.case, self.program()
        buffers = self.scratch = {each.name: scratch(each.bytes // 4, np.float32, np.nan) for each in program.scratch}
        self.arrays |= {"counter": scratch(2, np.int32, 0), "violations": scratch(1, np.uint32, 0)}
        for launch in program.launches:
            args = host_threads.arguments(launch, self.arrays | buffers, self.op.number)
            if launch.entry in THREADED:
                host_threads.run(launch, folder, args, case.grid)
            else:
                own = folder / launch.source.key[:16]
                emulator.Kernel(launch.source, launch.fields, own, self.op.number).launch(launch.grid, args)
        return program


# Every kernel with every option, once.
CORE = (
    "64", "64, sinks", "64, dropout, offsets", "128, rows without keys", "128, final", "128, later, causal",
    "192 and 128, packed", "256", "256, no keys", "mma, fp32, 64", "mma, 64, window, softcap", "mma, 64, dropout",
    "mma, 128, small tiles", "mma, 512", "mma, 40 and 320, small tiles",
    "simt, packed", "64, parts", "simt, fp64, wide", "simt, no keys, sinks",
    "simt, dropout", "64, sums", "64, bands", "64, dropout", "128, dropout", "160, one kernel",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in CASES])
def test_gradients(name: str, tmp_path: pathlib.Path) -> None:
    check(Call(CASES[name]), tmp_path)


@pytest.mark.parametrize(
    ("name", "lengths"), [("64, sums", (70, 900)), pytest.param("64, bands", (330, 700), marks=pytest.mark.slow)]
)
def test_sums_have_the_same_bits_on_any_grid(name: str, lengths: tuple[int, int], tmp_path: pathlib.Path) -> None:
    """A key tile adds to a sum of a tile of dq that the mask sets, in its order; the blocks that run change neither."""
    calls = [Call(dataclasses.replace(CASES[name], lengths=(lengths,), grid=grid)) for grid in (1, 3)]
    for call in calls:
        call.wanted(), call.run(tmp_path / str(call.case.grid))
    assert calls[0].scratch["dq_sum"].tobytes() == calls[1].scratch["dq_sum"].tobytes()  # dq itself is rounded


def test_sequences_side_by_side_have_the_same_bits(tmp_path: pathlib.Path) -> None:
    """Works come in another order, and key tiles add to dq in the same one."""
    case = dataclasses.replace(CASES["40, packed, bundles"], lengths=((70, 200), (7, 150), (64, 130)), store="ordered")
    calls = [Call(dataclasses.replace(case, bundle=bundle, grid=grid)) for bundle, grid in ((0, 2), (1, 4), (9, 1))]
    for i, call in enumerate(calls):
        call.wanted(), call.run(tmp_path / str(i))
        assert call.scratch["dq_sum"].tobytes() == calls[0].scratch["dq_sum"].tobytes()
        assert all(call.arrays[name].tobytes() == calls[0].arrays[name].tobytes() for name in ("dk", "dv"))


@pytest.mark.parametrize(
    "name", ["64, dropout, offsets", "64, dropout", "192 and 128, dropout", "mma, 64, dropout", "simt, dropout"]
)
def test_pairs_that_are_dropped(name: str, tmp_path: pathlib.Path) -> None:
    """They are those of the definition, one by one: weights are equal, and a row of dO has a power of two in one column."""
    case = dataclasses.replace(CASES[name], kinds=CASES[name].kinds | {"mask": Full()}, sinks=False, dlse=False)
    call = Call(case)
    queries, columns = np.arange(call.q_lens[0]), call.op.forward.head_dim_v
    call.arrays["q"][...], call.arrays["do"][...] = 0, 0
    call.arrays["do"][:, queries, :, queries % columns] = 4.0 ** (queries // columns)[:, None, None]
    call.wanted()
    call.run(tmp_path)
    (heads, kv_heads), kv_len = case.heads, call.kv_lens[0]
    sums = np.rint(call.arrays["dv"].astype(np.float64) * kv_len / call.op.forward.spec.weight.factor).astype(int)
    for batch in range(len(case.lengths)):
        kept = dropped(call.op.forward, batch, len(queries), kv_len) > 0
        counts = kept.reshape(kv_heads, heads // kv_heads, len(queries), kv_len).sum(1)
        wanted = np.zeros((kv_heads, kv_len, columns))
        for i in queries:
            wanted[..., i % columns] += counts[:, i] * 4.0 ** (i // columns)
        assert np.array_equal(sums[batch].swapaxes(0, 1), wanted)


WRONG: dict[str, Callable[[Array, int], Any]] = {  # cu_seqlens whose sequences from some number on do not lie in so many rows
    "beyond": lambda starts, rows: starts + np.where(starts > starts[2], rows + 1, 0),
    "falling": lambda starts, rows: np.where(starts > starts[2], 1, starts),
    "again": lambda starts, rows: np.array([0, rows, 0, *[rows] * (len(starts) - 3)]),
    "below": lambda starts, rows: starts - 1,
    "wild": lambda starts, rows: np.array([*starts[:3], *[-(2**31), 2**31 - 1] * len(starts)])[: len(starts)],
}


LATE = [pytest.param(name, marks=pytest.mark.slow) for name in ("120, packed", "192 and 128, packed", "40, packed, final")]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["simt, packed", "mma, fp32, 40 and 24, packed", *LATE])
def test_what_lies_in_no_order_is_left_out(name: str, wrong: str, tmp_path: pathlib.Path) -> None:
    """Others have their gradients, nothing around them is written, and no block waits for ever."""
    call, around = Call(CASES[name]), {}

    def change(call: Call) -> int:
        for i, side in enumerate(("q", "kv")[: 1 + (wrong == "below")]):
            starts, rows = call.arrays[f"cu_seqlens_{side}"], sum((call.q_lens, call.kv_lens)[i]) + PADDING
            starts[...] = WRONG[wrong](starts.astype(np.int64), rows)
        for operand in call.op.outputs:
            x = call.arrays[operand.name]
            space = around[operand.name] = np.full(x.size + 2 * AROUND, np.nan, x.dtype)
            call.arrays[operand.name] = space[AROUND:-AROUND].reshape(x.shape)
        return {"again": 0, "below": 0}.get(wrong, 2)  # again: the first sequence is another, of all rows

    check(call, tmp_path, change)
    assert all(np.isnan(x[:AROUND]).all() and np.isnan(x[-AROUND:]).all() for x in around.values())


@pytest.mark.parametrize("case", OWN.values())
def test_entry_of_options(case: Case, tmp_path: pathlib.Path) -> None:
    check(Call(case), tmp_path)


def check(call: Call, tmp_path: pathlib.Path, change: Callable[[Call], int] | None = None) -> None:
    """Compares a call's results with the truth, those of the first sequences where ``change`` says how many are not left out."""
    case, wanted = call.case, call.wanted()
    count = len(wanted) if change is None else change(call)
    call.run(tmp_path)
    assert not call.arrays["counter"].any(), "the counter is not ready for the next launch"
    assert call.arrays["violations"][0] == (0 if change is None else 128)
    # bf16: p and ds are rounded before the products, as the results are. fp64: sums of some hundred terms.
    bound = {"bf16": 1.2e-2, "fp32": 2e-6, "fp64": 1e-11}[call.op.forward.element.name]
    for index, (which, lengths) in enumerate((("dq", call.q_lens), ("dk", call.kv_lens), ("dv", call.kv_lens))):
        found = call.arrays[which]
        for sequence, part in enumerate(split(found, lengths, case.varlen)[:count]):
            truth, used = wanted[sequence][index], call.used[index > 0][sequence]
            assert not part[used:].any(), f"{which} of unused rows of sequence {sequence} is not 0"
            error = np.abs(part[:used].astype(np.float64) - truth).max(initial=0)
            assert error <= bound * np.abs(truth).max(initial=1e-3), f"{which} of sequence {sequence}: {error}"
        if case.varlen and change is None:
            assert not found[sum(lengths) :].any() and len(found) == sum(lengths) + PADDING, "rows of no sequence are not 0"
    if case.sinks and count:
        truth = sum(each[3] for each in wanted[:count])
        close = min(bound, 1e-4)  # nothing of them is rounded to 16 bits
        assert np.abs(call.arrays["dsinks"] - truth).max() <= close * np.abs(truth).max()

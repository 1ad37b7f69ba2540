"""Few rows over many keys: attn_fwd splits the keys of a tile, and heads share tiles. On the CPU, thread by thread; and what
follows from sizes alone: the number of splits, the kernel, and the time."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from perf import sass
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import few_rows
from rawattn.kernel.attn_decode import ATTN_DECODE
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.attn_fwd_kvcache import ATTN_FWD_KVCACHE
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.program import Buffer
from rawattn.operation.operand import Layout
from rawattn.runtime.select import config_set, nearest, select
from rawattn.testing import expect
from rawattn.variant import store
from rawattn.variant.element import BF16
from rawattn.variant.mask import And, Causal, SplitTilesMask, Window
from tests.decode import Decode
from tests.emulator.gpu import stand_in
from tests.host.kernel.test_attn_fwd_kvcache import CHUNKS, attend, check, of
from tests.operations import forward, replace
from tests.options import Alibi, HeadWindow

H200 = TYPICAL["sm_90a"]
FEW = forward(BF16, 1, 32, 16384, 32, 8, 128, 128, mask=Causal(), return_lse=True)
SHARED = AttnFwdConfig(64, 32, 2, 1, True)

CALLS: dict[str, tuple[dict[str, int], dict[str, Any], AttnFwdConfig]] = {  # sizes, options, configuration
    "causal": ({}, {"causal": True}, dataclasses.replace(SHARED, kv_splits=3)),
    "shared tiles alone": ({}, {"causal": True}, SHARED),
    "parts of one head": ({"heads": 3, "kv_heads": 3, "q_len": 70}, {"causal": True}, AttnFwdConfig(128, 32, 2, 1, kv_splits=4)),
    "more splits than tiles": ({}, {"window": (20, 0), "sinks": True}, dataclasses.replace(SHARED, kv_splits=9)),
    "window": ({"q_len": 40}, {"window": (90, 7), "softcap": 2.0}, AttnFwdConfig(128, 48, 2, 1, True, 2)),
    "lengths": ({}, {"causal": True, "kv_lens": (170, 0)}, dataclasses.replace(SHARED, kv_splits=3)),
    "lengths of queries": ({}, {"q_lens": (20, 3), "kv_lens": (170, 33)}, AttnFwdConfig(64, 32, 2, 1, kv_splits=3)),
    "offsets": ({}, {"causal": True, "q_offset": 150, "kv_offset": 9}, dataclasses.replace(SHARED, kv_splits=2)),
    "masks of heads": ({}, {"mask": HeadWindow(9, 40), "score": Alibi(0.9)}, dataclasses.replace(SHARED, kv_splits=3)),
    "dropout": ({}, {"dropout": 0.3, "seed": 5}, dataclasses.replace(SHARED, kv_splits=3)),
    "no keys": ({"kv_len": 0}, {}, dataclasses.replace(SHARED, kv_splits=2)),
    "constant time": ({}, {"constant_time": True}, dataclasses.replace(SHARED, kv_splits=3)),
    "one tile of queries": ({"q_len": 1, "heads": 128, "kv_heads": 1, "batch": 1}, {}, AttnFwdConfig(128, 32, 2, 1, True, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_call(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fewer multiprocessors than works, so that blocks draw several."""
    torch = pytest.importorskip("torch")
    stand_in(monkeypatch, tmp_path, sm_count=3)
    sizes, options, config = CALLS[name]
    size = {"batch": 2, "q_len": 21, "kv_len": 210, "heads": 8, "kv_heads": 2, **sizes}
    rng = np.random.default_rng(0)
    shapes = [
        (size["batch"], size[f"{side}_len"], size[heads], 32) for side, heads in (("q", "heads"), *[("kv", "kv_heads")] * 2)
    ]
    q, k, v = (torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16() for shape in shapes)
    given = dict(options)
    if given.pop("sinks", False):
        given["sinks"] = torch.linspace(-2, 3, size["heads"])
    given |= {side: torch.tensor(given[side], dtype=torch.int32) for side in ("q_lens", "kv_lens") if side in given}
    wanted = expect(q, k, v, **{name: x for name, x in given.items() if name != "constant_time"})
    for i, kv_len in enumerate(options.get("kv_lens", ())):
        k[i, kv_len:] = v[i, kv_len:] = float("nan")
    wanted.check(*rawattn.attention(q, k, v, **given, return_lse=True, kernel="attn_fwd", config=config))


SAME = of(CHUNKS, lengths=((33, 300), (33, 40), (33, 0)), ragged=False)
CACHES = {
    "pages": SAME,
    "large pages": of(SAME, page_size=256, sinks=True),
    "small pages of two panels": of(SAME, lengths=((33, 203), (33, 65)), head_dim=128, head_dim_v=128, page_size=8),
    "dense": of(SAME, form="dense", page_size=301, heads=3, kv_heads=1),
    "one query of many heads": of(SAME, lengths=((1, 300), (1, 40), (1, 0)), heads=128, kv_heads=1, page_size=32),
    "end to end": of(SAME, form="indptr", layout="HND", window=(70, 0)),
    "first keys, causal for some": of(SAME, causal=(0, 1, 1), begins=(131, 5, 0), whole=False),
}


@pytest.mark.parametrize("name", CACHES)
def test_public_call_over_caches(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of other lengths, each of which is cut by its own; two numbers of splits."""
    word = stand_in(monkeypatch, tmp_path, sm_count=5)
    for splits in (2, 7):
        check(CACHES[name], *attend(CACHES[name], config=AttnFwdConfig(128, 48, 2, 1, kv_splits=splits))[:2])
    assert word[0] == 0


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "negative": ({"kv_splits": -1}, {}, "kv_splits is -1; it must be from 0 to 64"),
    "too many": ({"kv_splits": 65}, {}, "kv_splits is 65; it must be from 0 to 64"),
    "packed": ({"kv_splits": 2}, {"varlen": True, "total_q": 32, "total_kv": 16384}, "it must be 1 for packed sequences"),
    "invariant": ({"kv_splits": 0}, {"invariant": True}, "it must be 1 for .* invariant calls"),
    "one head each": ({"pack_gqa": True}, {"kv_heads": 32}, "pack_gqa is True; it needs several query heads"),
    "no divisor": ({"pack_gqa": True}, {"heads": 24}, "a divisor of 128"),
    "used queries": ({"pack_gqa": True}, {"q_lens": True}, "without q_lens"),
    "repeated": ({"pack_gqa": True}, {"layout": Layout(repeats_heads=True)}, "pack_gqa is True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    fields, changes, said = REFUSED[name]
    with pytest.raises(rawattn.ProblemError, match=said):
        select(replace(FEW, **changes), H200, "attn_fwd", AttnFwdConfig(**fields))


def test_over_caches_heads_share_tiles_anyway() -> None:
    op = Decode(page=16, q_len=64).operation
    with pytest.raises(rawattn.ProblemError, match="over caches heads share tiles wherever they can"):
        select(op, H200, "attn_fwd", AttnFwdConfig(pack_gqa=True))
    with pytest.raises(rawattn.ProblemError, match="kv_splits is 2; it must be 1 for packed sequences"):
        select(dataclasses.replace(op, ragged=True, total_q=64), H200, "attn_fwd", AttnFwdConfig(kv_splits=2))


@pytest.mark.parametrize("cached", [False, True])
def test_two_launches(cached: bool) -> None:
    """A work for each split of each tile, results in scratch, and their fold; one launch where one split is best."""
    kernel: Any = ATTN_FWD_KVCACHE if cached else ATTN_FWD
    op: Any = (
        Decode(2, 33, 32, 8, page=64, kv_len=8192, sinks=True).operation
        if cached
        else replace(FEW, batch=2, q_len=33, sinks=True)
    )
    config = AttnFwdConfig(128, pack_gqa=not cached, kv_splits=4)
    program = kernel.lower(op, config, H200)
    main, fold = program.launches
    rows = 2 * 32 * (33 if cached else 40)  # those of all numbers of queries that are lowered as one
    assert program.scratch == (Buffer("o_partial", 4 * rows * 128 * 4), Buffer("lse_partial", 4 * rows * 4))
    assert (main.grid, fold.entry, fold.grid) == (2 * 8 * 2 * 4, "combine", -(-2 * 32 * 33 // 4))
    assert [(x.values["splits"], x.values["partial_rows"], x.values["q_len"]) for x in program.launches] == [(4, rows, 33)] * 2
    options = kernel.options(op, config)
    assert type(options["Mask"]) is SplitTilesMask and type(options["Store"]) is store.StorePartial
    names = [{field.name for field in launch.fields} for launch in program.launches]
    assert "sinks" in names[1] - names[0], "a sink joins once"
    assert len(kernel.lower(op, dataclasses.replace(config, kv_splits=1), H200).launches) == 1
    every = kernel.programs(op, dataclasses.replace(config, kv_splits=0), H200)
    assert [len(each.launches) for each in every] == [1, 2]
    assert every[1].launches[0].source == main.source, "numbers of splits share a kernel"
    many = dataclasses.replace(op, batch=999)
    assert len(kernel.lower(many, dataclasses.replace(config, kv_splits=0), H200).launches) == 1


@pytest.mark.parametrize(
    "changes, tile_q, splits",
    [
        ({}, 128, 16),  # 8 tiles on 132 multiprocessors
        ({"q_len": 16}, 64, 8),  # 64 works
        ({"q_len": 16, "heads": 4, "kv_heads": 1}, 64, 16),  # of 1024 keys
        ({"q_len": 16, "heads": 128, "kv_heads": 32}, 64, 4),
        ({"q_len": 16, "head_dim": 256}, 64, 16),
        ({"q_len": 64}, 128, 8),
        ({"q_len": 128}, 128, 4),
        ({"batch": 4, "kv_len": 4096}, 128, 4),
        ({"batch": 16}, 128, 1),
        ({"kv_len": 100}, 128, 1),
        ({"mask": And(Causal(), Window(500, 0))}, 128, 5),  # each has a key tile, whatever lies before
        ({"kv_heads": 32, "q_len": 512}, 128, 1),
    ],
    ids=str,
)
def test_number_of_splits(changes: dict[str, Any], tile_q: int, splits: int) -> None:
    """As many as fill the multiprocessors, while the fold costs less than they save."""
    op, config = replace(FEW, **changes), AttnFwdConfig(tile_q, pack_gqa=changes.get("kv_heads") != 32, kv_splits=0)
    assert ATTN_FWD.count_splits(config, op, H200, op.heads_per_kv) == splits


MEASURED = {  # microseconds of attn_decode on an H200, by batch, queries, keys, heads, key heads, head_dim
    (1, 1, 8192, 16, 1, 128): 12.3,
    (1, 1, 8192, 128, 1, 128): 16.0,
    (16, 1, 8192, 32, 1, 128): 34.4,
    (16, 1, 8192, 128, 1, 128): 68.1,
    (64, 1, 8192, 128, 1, 128): 217.3,
    (16, 1, 8192, 64, 1, 64): 33.6,
    (16, 1, 8192, 64, 1, 192): 82.9,
    (16, 1, 8192, 64, 1, 256): 109.1,
    (1, 1, 8192, 32, 8, 128): 15.7,
    (1, 16, 8192, 32, 8, 128): 32.8,
    (1, 64, 8192, 32, 8, 128): 72.7,
    (16, 8, 4096, 32, 8, 128): 72.7,
    (16, 16, 4096, 32, 8, 128): 136.0,
    (16, 64, 4096, 32, 8, 128): 526.5,
    (64, 1, 8192, 64, 2, 128): 134.9,
}
MEASURED_OF_ATTN_FWD = {  # ... and of attn_fwd, in the best number of parts
    (1, 16, 8192, 32, 8, 128): 65.0,  # up to 64 rows whole
    (1, 64, 8192, 32, 8, 128): 25.4,
    (16, 8, 4096, 32, 8, 128): 69.8,
    (16, 16, 4096, 32, 8, 128): 70.7,
    (16, 32, 4096, 32, 8, 128): 71.9,
    (16, 64, 4096, 32, 8, 128): 112.9,
    (64, 1, 8192, 64, 1, 128): 68.0,
    (64, 1, 8192, 128, 1, 128): 78.5,
    (16, 1, 8192, 128, 1, 128): 28.3,
    (16, 1, 8192, 64, 1, 256): 100.4,
}


def step(batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, dim: int) -> Any:
    return Decode(batch, q_len, heads, kv_heads, dim, dim, page=64, kv_len=kv_len).operation


def expected(kernel: Any, op: Any) -> float:
    """Microseconds in the configuration that a call gets."""
    return 1e6 * nearest(kernel, config_set(kernel, kernel.tuning_shapes(op), H200), op, H200)[1]


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_expected_time_of_attn_decode(sizes: Any) -> None:
    assert 0.7 < expected(ATTN_DECODE, step(*sizes)) / MEASURED[sizes] < 1.25


@pytest.mark.parametrize("sizes", MEASURED_OF_ATTN_FWD, ids=str)
def test_expected_time_of_attn_fwd(sizes: Any) -> None:
    assert 0.85 < expected(ATTN_FWD_KVCACHE, step(*sizes)) / MEASURED_OF_ATTN_FWD[sizes] < 1.1


@pytest.mark.parametrize("q_len", [1, 16, 17, 64, 256, 257, 512])
@pytest.mark.parametrize("kv_len", [800, 1024, 16384])
def test_who_computes_few_rows(q_len: int, kv_len: int) -> None:
    """attn_fwd_mma has up to 16 rows of a key head that no other shares, and 64 over few keys; above them splits are for a GPU
    that is not full."""
    op = replace(FEW, heads=8, kv_heads=8, q_len=q_len, kv_len=kv_len)
    kernel, config = select(op, H200)[:2]
    assert kernel is (ATTN_FWD_MMA if q_len <= (16 if kv_len >= 1024 else 64) else ATTN_FWD)
    if kernel is ATTN_FWD:
        assert config.kv_splits == (0 if kv_len >= 1024 else 1)


def test_what_tma_cannot_read_goes_to_attn_fwd_mma() -> None:
    """As before keys were split: no copy is asked for."""
    for changes in (
        {"q_len": 8},
        {"heads": 8, "kv_heads": 8, "q_len": 32},
        {"heads": 8, "kv_heads": 8, "q_len": 64, "kv_len": 64},
    ):
        op = replace(FEW, layout=Layout(tma_unsupported="a row stride of 0"), **changes)
        assert select(op, H200).kernel is ATTN_FWD_MMA


def test_splits_of_few_rows_follow_from_the_sequence() -> None:
    """Whatever the batch: a row has the same bits in any. A length is selected by three bits, and lowered in steps of 256."""
    for q_len, kv_len in itertools.product((1, 4, 5, 16), (1024, 7168, 7169, 8000, 14337, 16384)):
        found = set()
        for batch in (1, 2, 4, 16):
            op = replace(FEW, batch=batch, q_len=q_len, kv_len=kv_len)
            kernel, config = select(op, H200)[:2]
            values = kernel.lower(op.to_lower, config, H200).launches[0].values
            found.add((kernel, *(values.get(name) for name in ("splits", "split_tiles", "split_keys"))))
        assert len(found) == 1, (q_len, kv_len, found)
    for batch in (1, 3, 16, 64):
        op = replace(FEW, batch=batch, q_len=16)
        kernel, config = select(op, H200)[:2]
        main = kernel.lower(op, config, H200).launches[0]
        assert config == AttnFwdConfig(64, 128, 3, 2, True, 0), config
        assert main.values["splits"] == 8 and main.values["split_tiles"] == 8


FASTEST = {  # queries: rows of a tile, whether heads share it, splits; of those that an H200 has timed, within 4 % of the best
    (1, 16384): {
        16: (64, True, 8), 32: (128, True, 16), 48: (192, True, 16), 64: (128, True, 8), 96: (128, True, 5),
        128: (128, False, 4), 192: (192, False, 4), 256: (128, False, 2), 512: (128, False, 1),
    },
    (4, 4096): {**dict.fromkeys((8, 16), (64, True, 4)), 32: (128, True, 4), 64: (64, True, 1), 96: (128, True, 1)},
}  # fmt: skip


@pytest.mark.parametrize("batch, kv_len", FASTEST)
def test_what_was_fastest_is_chosen(batch: int, kv_len: int) -> None:
    for q_len, wanted in FASTEST[batch, kv_len].items():
        op = replace(FEW, batch=batch, q_len=q_len, kv_len=kv_len)
        kernel, config = select(op, H200)[:2]
        main = kernel.lower(op, config, H200).launches[0]
        assert (config.tile_q, config.pack_gqa, main.values.get("splits", 1)) == wanted, q_len


COMPARED = {  # heads, key heads, head_dim, queries, keys, window: rows of a tile, whether heads share it, us by the model
    (32, 1, 128, 128, 16384, 0): (128, False, 57),
    (32, 1, 128, 200, 30000, 0): (128, False, 176),
    (128, 4, 64, 128, 65536, 0): (192, True, 521),
    (24, 8, 128, 64, 65536, 0): (64, False, 116),  # heads that cannot share tiles
    (24, 8, 64, 48, 8192, 0): (64, False, 17),
    (24, 8, 128, 48, 8192, 0): (64, False, 22),
    (28, 4, 128, 128, 65536, 0): (128, False, 191),
    (32, 8, 128, 192, 2048, 1024): (64, True, 13),
    (32, 8, 128, 256, 1024, 0): (64, True, 12.1),
    (16, 2, 64, 512, 2048, 0): (64, True, 14.7),
    (8, 2, 192, 256, 65536, 0): (128, True, 128),
}


@pytest.mark.parametrize("sizes", COMPARED, ids=str)
def test_shared_and_own_tiles_are_compared(sizes: tuple[int, ...]) -> None:
    heads, kv_heads, dim, q_len, kv_len, window = sizes
    mask = And(Causal(), Window(window)) if window else Causal()
    op = forward(BF16, 1, q_len, kv_len, heads, kv_heads, dim, min(dim, 128), mask=mask)
    config = select(op, H200).config
    assert (config.tile_q, config.pack_gqa) == COMPARED[sizes][:2] and config.kv_splits == 0
    assert 1e6 * ATTN_FWD.cost(config, op, H200) < COMPARED[sizes][2]


TALL = {  # heads, key heads, head_dim, queries, keys: rows of a tile, splits, us on an H200
    (8, 8, 64, 1024, 32768): (128, 2, 147),  # of 192 rows, in three splits, 194: two waves, though some tiles are short
    (8, 8, 80, 1024, 32768): (128, 2, 162),
    (16, 16, 64, 96, 32768): (128, 8, 44.5),  # 49.2: one warpgroup of three has no rows
    (24, 8, 64, 96, 32768): (128, 5, 63.2),
    (16, 16, 64, 160, 16384): (192, 8, 35.0),
    (16, 16, 128, 384, 32768): (192, 4, 140),
    (64, 8, 64, 192, 16384): (192, 2, 102),
    (24, 8, 128, 160, 16384): (192, 5, 62.2),
    (32, 8, 64, 96, 32768): (192, 8, 55.3),
}


@pytest.mark.parametrize("sizes", TALL, ids=str)
def test_tiles_of_192_rows(sizes: tuple[int, ...]) -> None:
    """They are chosen where they are faster, and the model knows how fast."""
    heads, kv_heads, dim, q_len, kv_len = sizes
    op = forward(BF16, 1, q_len, kv_len, heads, kv_heads, dim, dim, mask=Causal())
    config, (tile_q, splits, measured) = select(op, H200).config, TALL[sizes]
    assert (config.tile_q, ATTN_FWD.count_splits(config, op, H200, heads // kv_heads if config.pack_gqa else 1)) == (
        tile_q,
        splits,
    )
    assert 0.9 < 1e6 * ATTN_FWD.cost(config, op, H200) / measured < 1.15
    binary = compiler.compile(ATTN_FWD.render(op, config, "sm_90a"))
    assert (binary.spill_bytes, binary.advisories) == (0, ())


def test_over_caches_tiles_of_192_rows_are_whole() -> None:
    for config in ATTN_FWD_KVCACHE.candidates(step(1, 384, 8192, 32, 8, 64), H200):
        assert config.kv_splits == 1 or config.tile_q <= 128


UNEVEN = forward(BF16, 2, 2833, 10836, 8, 8, 64, 64)


def test_uneven_waves() -> None:
    """192 tiles of 256 rows are two waves, of which the second is not half full: 240 of 192 rows are two, and parts are three."""

    def chosen(**changes: Any) -> tuple[int, int, int]:
        op = replace(UNEVEN, **changes)
        config = select(op, H200).config
        return config.tile_q, config.tile_kv, ATTN_FWD.count_splits(config, op, H200, 1)

    assert chosen() == chosen(mask=Causal()) == (192, 128, 1) and chosen(head_dim=128, head_dim_v=128) == (192, 64, 1)
    long = {"batch": 1, "heads": 12, "kv_heads": 12, "q_len": 3000, "kv_len": 16384}
    assert chosen(**long) == (256, 64, 6) and chosen(**long, mask=Causal()) == (256, 64, 5)
    assert chosen(q_len=4096) == (256, 64, 1), "waves that are nearly full"
    assert chosen(kv_len=4096) == (256, 64, 1), "not measured"
    assert chosen(batch=1, heads=64, q_len=384, kv_len=32768) == (192, 128, 1)
    assert chosen(batch=1, heads=4, kv_heads=4, q_len=4901, kv_len=45505, head_dim=128, head_dim_v=128)[2] > 1


def test_kinds_have_shapes_of_their_own() -> None:
    """Uneven waves, few rows, shared and own, short sequences, and all others."""
    few, short = forward(BF16, 1, 64, 8192, 8, 8, 64, 64), forward(BF16, 999, 64, 64, 8, 8, 64, 64)
    ops = (UNEVEN, few, replace(few, heads=32, q_len=128), short, forward(BF16, 8, 2048, 2048, 8, 8, 64, 64))
    shapes = [shape for op in ops for shape in ATTN_FWD.tuning_shapes(op)]
    assert len(shapes) == len(set(shapes)) == 3 + 1 + 5 + 1 + 3


@pytest.mark.parametrize("q_len, most", [(512, 32), (8192, 2), (65536, 1)])
def test_scratch_is_bounded(q_len: int, most: int) -> None:
    op = forward(BF16, 1, q_len, 1 << 20, 16, 16, 128, 128)
    assert max(few_rows.numbers(op, 8192)) == most and 4 * most * q_len * 16 * 128 <= max(128 << 20, 4 * q_len * 16 * 128)


@pytest.mark.parametrize("dim, tile", [(128, (128, 128)), (256, (64, 80))], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_splits_cost_the_main_loop_nothing(cached: bool, dim: int, tile: tuple[int, int]) -> None:
    """No spills, and as many instructions."""
    kernel: Any = ATTN_FWD_KVCACHE if cached else ATTN_FWD
    op: Any = step(16, 64, 4096, 32, 8, dim) if cached else replace(FEW, head_dim=dim, head_dim_v=dim)
    configs = [AttnFwdConfig(*tile, 2, 1, not cached, kv_splits) for kv_splits in (1, 0)]
    binaries = [compiler.compile(kernel.render(op, config, "sm_90a")) for config in configs]
    assert not any(binary.spill_bytes or binary.advisories for binary in binaries)
    whole, split = (len(sass.main_loop(sass.disassemble(binary.cubin))) for binary in binaries)
    assert abs(split - whole) <= whole // 100 + 2


def test_heads_that_cannot_share_tiles() -> None:
    """Few queries of 12, 52 or 83 heads for each key head: attn_fwd would have a tile of 64 rows for each head. Rows of any
    number of heads lie side by side in attn_fwd_mma's tiles."""
    rows = [(154, 1, 161, 104, 2, 72), (425, 2, 544, 48, 4, 200), (303, 4, 2559, 83, 1, 128)]
    steps = [Decode(b, q, h, kv, dim, dim, page=64, kv_len=n).operation for b, q, n, h, kv, dim in rows]
    tensors = [forward(BF16, b, q, n, h, kv, dim, dim, mask=Causal()) for b, q, n, h, kv, dim in rows[1:]]
    for op in (*steps, *tensors):
        assert select(op, H200).kernel.name == "attn_fwd_mma"
        many = dataclasses.replace(op, q_len=64)
        assert select(many, H200).kernel.name == "attn_fwd"
    for op in (dataclasses.replace(steps[2], heads=64), replace(tensors[1], heads=64), replace(tensors[1], invariant=True)):
        assert select(op, H200).kernel.name != "attn_fwd_mma"
    few_blocks = Decode(10, 1, 108, 3, 56, 56, page=128, kv_len=33152), Decode(1, 10, 42, 1, 64, 64, kv_len=13129)
    assert {select(step.operation, H200).kernel.name for step in few_blocks} == {"attn_fwd"}


@pytest.mark.parametrize("head_dim, tile_kv", [(64, 64), (128, 32)])
def test_tiles_of_keys_of_32_rows(head_dim: int, tile_kv: int) -> None:
    assert select(Decode(16, 8, 32, 8, head_dim, head_dim, page=64).operation, H200).config.tile_kv == tile_kv

"""This module tests what kernels make of operations: launches, their arguments, the scratch memory between them, and tiles
that can be counted."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.array.array import CPU, Array
from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.kernel import attn_fwd, attn_fwd_mma, attn_fwd_simt, render, tiling
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.kernel.backward import loads
from rawattn.kernel.program import Buffer, Launch, Program, offsets
from rawattn.kernel.tiling import MOST_TILES
from rawattn.operation.operand import Layout
from rawattn.runtime.fill import addresses_in, tensor_map_of, value_of
from rawattn.runtime.select import select
from rawattn.variant import softmax, store
from rawattn.variant.element import BF16, FP32
from rawattn.variant.field import (
    AxisStride,
    Counter,
    Dim,
    Field,
    PackedHeads,
    PageBoxes,
    PagePool,
    PageRows,
    Parts,
    Pointer,
    Scratch,
    Stride,
    TensorMap,
    Value,
    View,
)
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests.operations import forward, replace

H200 = TYPICAL["sm_90a"]
OP = forward(BF16, 2, 300, 400, 4, 2, 64, 128)
VARLEN = replace(OP, varlen=True, total_q=500, total_kv=700)
SMALLEST = {ATTN_FWD: 64, ATTN_FWD_MMA: 32, ATTN_FWD_SIMT: 8}  # tiles, in rows


# ---- scratch and launches ------------------------------------------------------------------------------------------------


def test_fills_of_different_types_differ() -> None:
    """Fields are keys of caches: a counter must not be taken for a number, nor a view for a pointer."""
    fills = [Value(), Counter(), Pointer("q"), View("q"), Scratch("q"), Stride("q", "row"), TensorMap("q", 1), TensorMap("q", 2)]
    fills += [Dim("q", 0), Dim("q", 1), AxisStride("q", 0)]
    assert len(set(fills)) == len(fills) and not any(a == b for a, b in itertools.combinations(fills, 2))
    assert len({Field("x", "i64", fill) for fill in fills}) == len(fills)
    assert Pointer("q") == Pointer("q")


def test_lengths_and_strides_of_any_array() -> None:
    array = Array("numpy", CPU, "int32", (2, 3, 4), (100, 20, 1), 64, None)
    assert [value_of(Dim("x", axis), array) for axis in range(3)] == [2, 3, 4]
    assert [value_of(AxisStride("x", axis), array) for axis in range(3)] == [100, 20, 1]
    pages = Array("numpy", CPU, "fp32", (7, 3, 4, 5), (1000, 100, 20, 1), 64, None)
    assert struct.unpack("<5q", value_of(PagePool("x", 0), pages)) == (0, 4000, 400, 80, 7), "strides in bytes, then the pages"
    assert struct.unpack("<4q", value_of(View("x"), pages)) == (0, 4000, 400, 80)
    assert [value_of(Stride("x", axis), pages) for axis in ("batch", "row", "head", "line")] == [1000, 100, 20, 20]
    packed = Array("numpy", CPU, "fp32", (9, 4, 5), (100, 20, 1), 64, None)
    assert struct.unpack("<4q", value_of(View("x"), packed)) == (0, 0, 400, 80), "which has no batch"


def test_addresses_in_a_field() -> None:
    """By operand or buffer, and where in the field; a tensor map has its own."""
    assert addresses_in(Parts(2)) == [("o_0", 0), ("lse_0", 8), ("o_1", 64), ("lse_1", 72)]
    assert [addresses_in(fill) for fill in (Pointer("q"), View("k"), PagePool("v", 0))] == [[("q", 0)], [("k", 0)], [("v", 0)]]
    assert addresses_in(Scratch("a")) == [("scratch a", 0)]
    assert [addresses_in(fill) for fill in (PagePool("v", 16), TensorMap("q", 64), Value(), Stride("q", "row"))] == [[]] * 4


def test_what_follows_a_tensor_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an empty pool nothing is read: its map is another array's, and no page lies in it. L2 is asked for 128 bytes at a time,
    and for 64 of pages whose keys are read once."""
    monkeypatch.setattr("rawattn.driver.tensor_map.tensor_maps", lambda *args: lambda pointer: args[-1])
    q = Array("numpy", CPU, "bf16", (1, 9, 4, 64), (2304, 256, 64, 1), 64, None)
    pool = Array("numpy", CPU, "bf16", (7, 16, 2, 64), (4096, 128, 64, 1), 128, None)
    none = pool._replace(shape=(0, 16, 2, 64))
    for fill, k, name, rest in (
        (PageRows("k", 16), pool, "k", (7, 1, 32, 1)),
        (PageRows("k", 16), none, "q", (0, 0)),
        (PageBoxes("k"), pool, "k", (7, 64, 1)),
        (PageBoxes("k"), none, "q", (0, 0)),
        (PagePool("k", 16), pool, "k", (7,)),
        (PackedHeads("q", 64, 4), pool, "q", (4, 0)),
        (TensorMap("k", 64), pool, "k", (1, 1)),
    ):
        found, made, more = tensor_map_of(fill, {"q": q, "k": k})
        assert made(0) == (64 if isinstance(fill, PagePool) else 128)
        assert (found, struct.unpack(f"<{len(more) // 4}i", more)) == (name, rest)
    assert tensor_map_of(loads(OP, 64, 64)[0].fill, {"q": q})[1](0) == 128


def test_scratch() -> None:
    assert offsets(()) == ({}, 0)
    buffers = Buffer("a", 1), Buffer("b", 256), Buffer("c", 257), Buffer("d", 0), Buffer("e", 10)
    assert offsets(buffers) == ({"a": 0, "b": 256, "c": 512, "d": 1024, "e": 1024}, 1280)
    assert offsets(buffers, 8) == ({"a": 0, "b": 8, "c": 264, "d": 528, "e": 528}, 544)
    assert Program((), buffers).scratch_bytes == 1280 and Program(()).scratch_bytes == 0


@pytest.mark.parametrize("kernel", SMALLEST, ids=repr)
@pytest.mark.parametrize("op", [OP, VARLEN], ids=["dense", "varlen"])
def test_lower(kernel: Any, op: Any) -> None:
    config = kernel.candidates(op, H200)[0]
    program = kernel.lower(op, config, H200)
    (launch,) = program.launches
    assert (launch.entry, launch.source, launch.grid) == (
        kernel.name,
        kernel.render(op, config, "sm_90a"),
        kernel.grid(op, config, H200),
    )
    assert launch.fields == kernel.fields(op, config) and launch.values == kernel.values(op, config, H200)
    assert str(launch) == f"{kernel.name}, {launch.grid} blocks" and program.scratch_bytes == 0
    assert kernel.lower(replace(op, heads=8), config, H200).launches[0].source is launch.source, "rendered once for a kind"
    assert kernel.lower(replace(op, return_lse=True), config, H200).launches[0].source != launch.source


@pytest.mark.parametrize("kernel", SMALLEST, ids=repr)
def test_nothing_to_compute_is_no_launch(kernel: Any) -> None:
    config = kernel.candidates(OP, H200)[0]
    for changes in ({"q_len": 0}, {"batch": 0}, {"varlen": True, "total_q": 0}, {"varlen": True, "batch": 0}):
        assert kernel.lower(replace(OP, **changes), config, H200) == Program(())
    assert kernel.lower(replace(OP, kv_len=0), config, H200).launches, "rows without keys are written, too"


@pytest.mark.parametrize("kernel", SMALLEST, ids=repr)
def test_a_field_says_where_it_comes_from(kernel: Any) -> None:
    for op in (OP, VARLEN, replace(OP, return_lse=True)):
        config = kernel.candidates(op, H200)[0]
        (launch,) = kernel.lower(op, config, H200).launches
        fills = {field.name: field.fill for field in launch.fields}
        tensor = TensorMap if kernel is ATTN_FWD else View
        assert [type(fills[name]) for name in "qkv"] == [tensor] * 3 and fills["o"] == Pointer("o")
        assert {name for name, fill in fills.items() if type(fill) is Value} <= set(launch.values)
        assert any(type(fill) is Counter for fill in fills.values()) == (kernel is ATTN_FWD)
        render.layout(launch.fields).pack.pack(*(_some(fill, launch, name) for name, fill in fills.items()))
    if kernel is ATTN_FWD:
        assert [fills[name].box_rows for name in "qkv"] == [config.tile_q, config.tile_kv, config.tile_kv]


def _some(fill: Any, launch: Launch, name: str) -> Any:
    return launch.values[name] if type(fill) is Value else b"" if isinstance(fill, (View, TensorMap)) else 1


def test_layout_of_arguments() -> None:
    """Each field at a multiple of its alignment, the whole at a multiple of the widest."""
    fields = (Field("a", "i32"), Field("b", "i64"), Field("n", "Number"), Field("q", "TmaTensor"), Field("c", "i32"))
    found = render.layout(fields)
    assert found.offsets == {"a": 0, "b": 8, "n": 16, "q": 64, "c": 256} and found.pack.size == 320
    assert found.formats == {"a": "<i", "b": "<q", "n": "<f", "q": "<192s", "c": "<i"}
    memory = found.pack.pack(-1, 1 << 40, 0.5, b"q", 7)
    for name, value in {"a": -1, "b": 1 << 40, "n": 0.5, "c": 7}.items():
        assert struct.unpack_from(found.formats[name], memory, found.offsets[name]) == (value,)
    double = render.layout(fields, "fp64")
    assert double.offsets["n"] == 16 and double.formats["n"] == "<d"
    assert render.layout((Field("a", "i32"), Field("n", "Number")), "fp64").offsets["n"] == 8
    assert render.layout((Field("a", "i32"), Field("n", "Number"))).offsets["n"] == 4
    assert render.layout(()).pack.size == 0


def test_pointers_are_8_bytes() -> None:
    for ctype, (size, alignment, form) in render.CTYPES.items():
        assert size == struct.calcsize(f"<{form}"), ctype
        assert size % alignment == 0 and (not ctype.endswith("*") or (size, alignment) == (8, 8))


# ---- tiles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, tile_q", SMALLEST.items(), ids=map(repr, SMALLEST))
def test_more_tiles_than_can_be_counted(kernel: Any, tile_q: int) -> None:
    """The number of a tile and the size of the grid fit an int32 together."""
    assert MOST_TILES + 65_535 < 1 << 31
    most = forward(BF16, MOST_TILES, tile_q, 1, 1, 1, 64, 64)
    assert kernel.supports(most, H200) == []
    said = f"it counts up to {MOST_TILES} tiles of {tile_q} rows, and here are"
    for changes, count in (
        ({"batch": MOST_TILES + 1}, MOST_TILES + 1),
        ({"q_len": tile_q + 1}, 2 * MOST_TILES),
        ({"heads": 2}, 2 * MOST_TILES),
        ({"varlen": True, "total_q": tile_q, "total_kv": 1}, MOST_TILES + 1),
    ):
        op = replace(most, **changes)
        assert kernel.supports(op, H200) == [f"{said} {count}"]
    with pytest.raises(UnsupportedError, match=f"{kernel.name}: .*{said}"):
        select(op, H200, kernel.name)


@pytest.mark.parametrize("kernel, tile_q", SMALLEST.items(), ids=map(repr, SMALLEST))
def test_no_candidate_has_smaller_tiles(kernel: Any, tile_q: int) -> None:
    for op in (OP, VARLEN, replace(OP, q_len=1, heads=8), replace(OP, head_dim=8, head_dim_v=256)):
        assert min(config.tile_q for config in kernel.candidates(op, H200)) >= tile_q


@pytest.mark.parametrize(
    "kernel, config, rows",
    [
        (ATTN_FWD, attn_fwd.AttnFwdConfig(64, 64), 64),
        (ATTN_FWD_MMA, attn_fwd_mma.AttnFwdMmaConfig(32, 32, m_tiles_per_warp=1), 32),
        (ATTN_FWD_MMA, attn_fwd_mma.AttnFwdMmaConfig(32, 32, m_tiles_per_warp=1, pack_gqa=True), 32),
        (ATTN_FWD_SIMT, attn_fwd_simt.AttnFwdSimtConfig(2, 16, 64, 64, 32), 2),  # smaller than any candidate's
    ],
    ids=str,
)
def test_every_configuration_counts_its_tiles(kernel: Any, config: Any, rows: int) -> None:
    """A configuration that the caller gives is refused where its own tiles are too many."""
    group = 1 + getattr(config, "pack_gqa", False)
    fits = forward(BF16, MOST_TILES, rows // group, 64, group, 1, 64, 64)
    assert kernel.legal(config, fits, H200) is None
    over = replace(fits, batch=MOST_TILES + 1)
    assert kernel.legal(config, over, H200) == f"it counts up to {MOST_TILES} tiles of {rows} rows, and here are {MOST_TILES + 1}"


def test_a_configuration_of_smaller_tiles_is_refused() -> None:
    op = forward(BF16, MOST_TILES // 2, 8, 64, 1, 1, 64, 64)
    select(op, H200, "attn_fwd_simt")
    with pytest.raises(ProblemError, match=f"cannot run here: it counts up to {MOST_TILES} tiles of 2 rows"):
        select(op, H200, "attn_fwd_simt", attn_fwd_simt.AttnFwdSimtConfig(2, 16, 64, 64, 32))


def test_a_kernel_is_refused_for_its_tiles_alone() -> None:
    huge = forward(FP32, MOST_TILES, 64, 64, 2, 1, 1, 1)
    with pytest.raises(UnsupportedError) as caught:
        select(huge, H200)
    assert str(caught.value).count(f"it counts up to {MOST_TILES} tiles") == 4


@pytest.mark.parametrize("tile_q", [8, 64, 192])
def test_tiles(tile_q: int) -> None:
    assert tiling.tiles(replace(OP, q_len=0), tile_q) == 0
    for length, each in ((1, 1), (tile_q, 1), (tile_q + 1, 2), (10 * tile_q - 1, 10)):
        op = replace(OP, q_len=length)
        assert tiling.tiles(op, tile_q) == tiling.most_tiles(op, tile_q) == each * 2 * 4
        packed = replace(op, varlen=True, total_q=2 * length, total_kv=9)
        assert each * 2 * 4 <= tiling.most_tiles(packed, tile_q) == (2 * length // tile_q + 2) * 4
        assert tiling.tiles(packed, tile_q) == each * 2 * 4


def test_tiles_of_varlen_are_those_of_the_longest() -> None:
    op = replace(VARLEN, batch=17, q_len=512, total_q=528)
    assert tiling.tiles(op, 128) == 4 * 4, "a chunk of a prompt beside 16 that decode"
    assert tiling.tiles(replace(op, total_q=3 * 512 + 14), 128) == 3 * 4 * 4
    assert tiling.tiles(replace(op, total_q=1 << 20), 128) == 17 * 4 * 4 and tiling.tiles(replace(op, q_len=1000), 64) == 16 * 4
    assert tiling.tiles(op, 128, rows_each=2) == 8 * 2, "two heads share a tile"


def test_options() -> None:
    own = store.StoreO()
    for op, rows in ((OP, "Dense"), (VARLEN, "Varlen")):
        found = tiling.options(op, Store=own)
        assert {axis: option.cuda_type for axis, option in found.items()} == {
            "Element": "Bf16", "Rows": rows, "Mask": "Full", "Score": "Scale", "Weight": "Identity", "Store": "StoreO"
        }  # fmt: skip
        assert (found["Element"], found["Store"]) == (BF16, own)
    steady = tiling.options(replace(OP, constant_time=True, score=Softcap(2.0)), Softmax=softmax.SpeculativeMax())
    assert (steady["Softmax"].cuda_type, steady["Score"].cuda_type) == ("ConstantTime", "ConstantTimeSoftcap")
    assert tiling.options(replace(OP, sinks=True), Softmax=softmax.Plain())["Softmax"] == softmax.WithSink(softmax.Plain())


@pytest.mark.parametrize(
    "changes, splits, keys",
    [
        ({"q_len": 1, "kv_len": 511}, 1, 511),  # fewer than two splits' keys
        ({"q_len": 1, "kv_len": 0}, 1, 1),
        ({"q_len": 1, "kv_len": 512}, 2, 256),
        ({"q_len": 1, "kv_len": 513}, 3, 256),
        ({"q_len": 1, "kv_len": 32 * 256 + 1}, 17, 512),  # at most 32
        ({"q_len": 1, "kv_len": 1 << 20}, 32, 1 << 15),
        ({"q_len": 1, "kv_len": 1 << 20, "heads": 64, "kv_heads": 64}, 2, 1 << 19),  # a tile for each multiprocessor
        ({"q_len": 1, "kv_len": 1 << 20, "heads": 200, "kv_heads": 200}, 1, 1 << 20),
        ({"q_len": 1, "kv_len": 1 << 20, "batch": 99}, 32, 1 << 15),  # the batch changes nothing
        ({"q_len": 32, "kv_len": 512}, 2, 256),
        ({"q_len": 33, "kv_len": 512}, 1, 512),  # not few
        ({"q_len": 0, "kv_len": 512}, 1, 512),
    ],
    ids=str,
)
def test_splits(changes: dict[str, Any], splits: int, keys: int) -> None:
    assert tiling.splits(replace(OP, **changes), H200) == (splits, keys)


def test_splits_are_two_launches() -> None:
    """The partial results lie in scratch memory, and are folded; of a row where there is one split nothing is."""
    op, config = replace(OP, q_len=5, kv_len=3000, sinks=True, return_lse=True), attn_fwd_mma.AttnFwdMmaConfig(32, 64, split=True)
    splits, keys = tiling.splits(op, H200)
    program = ATTN_FWD_MMA.lower(op, config, H200)
    main, fold = program.launches
    rows, whole = 2 * 4 * 5, ATTN_FWD_MMA.grid(op, config, H200)
    assert program.scratch == (Buffer("o_partial", splits * rows * 128 * 4), Buffer("lse_partial", splits * rows * 4))
    assert (main.grid, fold.entry, fold.grid) == (splits * whole, "combine", -(-rows // 4))
    for launch in program.launches:
        assert (launch.values["splits"], launch.values["partial_rows"]) == (splits, rows)
        assert {"o_partial", "lse_partial"} <= {field.name for field in launch.fields if type(field.fill) is Scratch}
    assert main.values["split_keys"] == keys
    names = [{field.name for field in launch.fields} for launch in program.launches]
    assert {"o", "lse", "sinks"} <= names[1] and not {"o", "lse", "sinks"} & names[0], "a sink joins once"
    (alone,) = ATTN_FWD_MMA.lower(replace(op, kv_len=100), config, H200).launches
    assert {"o", "lse", "sinks"} <= {field.name for field in alone.fields} and alone.grid == whole
    assert len(ATTN_FWD_MMA.programs(op, config, H200)) == 2


LOWERED: list[tuple[Any, dict[str, Any], Any]] = [(each, {}, each.candidates(OP, H200)[0]) for each in SMALLEST]
LOWERED += [
    (ATTN_FWD_MMA, {"q_len": 1}, attn_fwd_mma.AttnFwdMmaConfig(32, 64, pack_gqa=True, split=True)),
    (ATTN_FWD_MMA, {"q_len": 9}, attn_fwd_mma.AttnFwdMmaConfig(64, split=True)),
]


@given(st.sampled_from(LOWERED), st.one_of(st.integers(0, 1200), st.integers(0, 1 << 17)), st.sampled_from([2, 8, 64, 200]))
def test_what_is_lowered_serves_each_length_of_a_step(lowered: Any, kv_len: int, heads: int) -> None:
    """But for the groups of heads that share L2, which are no matter of results. Kernels read the number of keys from k."""
    kernel, changes, config = lowered
    op = replace(OP, kv_len=kv_len, heads=2 * heads, kv_heads=heads, **changes)
    found, wanted = (kernel.lower(each, config, H200) for each in (op.to_lower, op))
    assert op.kv_len <= op.to_lower.kv_len and found.scratch == wanted.scratch
    assert select(op, H200)[:2] == select(op.to_lower, H200)[:2]
    for a, b in zip(found.launches, wanted.launches, strict=True):
        assert a[:3] == b[:3] and a.grid == b.grid
        hints = {name: b.values[name] for name in ("l2_head_group", "last_group") if name in b.values}
        assert {**a.values, **hints} == b.values and "kv_len" not in a.values
        assert {field.fill for field in a.fields if field.name == "kv_len"} == {Dim("k", -3)}


def test_max_seqlen_bounds_no_tiles() -> None:
    """Whatever max_seqlen says, each kernel has as many blocks, and no packing needs more."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(0, 300, rng.integers(1, 9))
        op = replace(VARLEN, batch=len(lengths), total_q=int(lengths.sum()), total_kv=9)
        for tile_q in (8, 64, 128):
            needed = sum(-(-int(n) // tile_q) for n in lengths) * op.heads
            assert {tiling.most_tiles(replace(op, q_len=n), tile_q) for n in (0, 1, 300, 10**6)} == {
                tiling.most_tiles(op, tile_q)
            }
            assert needed <= tiling.most_tiles(op, tile_q)
        for kernel in SMALLEST:
            config = kernel.candidates(op, H200)[0]
            grids = {kernel.grid(replace(op, q_len=n), config, H200) for n in (0, 1, 300)}
            assert len(grids) == 1 and (kernel is ATTN_FWD or grids.pop() >= needed // -(-config.tile_q // 8))


def test_grid() -> None:
    assert ATTN_FWD.grid(OP, ATTN_FWD.config_type(128), H200) == 3 * 2 * 4
    assert ATTN_FWD.grid(replace(OP, batch=100), ATTN_FWD.config_type(128), H200) == 132, "as many as multiprocessors"
    for kernel in (ATTN_FWD_MMA, ATTN_FWD_SIMT):
        assert kernel.grid(OP, kernel.config_type(128), H200) == 3 * 2 * 4
    shared = attn_fwd_mma.AttnFwdMmaConfig(128, pack_gqa=True)
    assert ATTN_FWD_MMA.grid(OP, shared, H200) == 5 * 2 * 2, "600 rows of two heads each"


# ---- what kernels share --------------------------------------------------------------------------------------------------


def test_tensor_cores_take() -> None:
    for size in (8, 16, 248, 256):
        assert tiling.tensor_core_reasons(replace(OP, head_dim=size, head_dim_v=size)) == []
    for size in (4, 7, 12, 264, 257):
        said = [f"{which} is {size}; it takes multiples of 8 from 8 to 256" for which in ("head_dim", "head_dim_v")]
        assert tiling.tensor_core_reasons(replace(OP, head_dim=size, head_dim_v=size)) == said
    assert tiling.tensor_core_reasons(replace(OP, element=FP32)) == ["it takes bf16 and fp16, not fp32"]
    assert tiling.reasons(None, "a", None, "b") == ["a", "b"]


def test_shared_memory_of_blocks() -> None:
    room = H200.smem_bytes + 1024  # of a multiprocessor, of which each block takes 1024 more
    assert tiling.too_much_smem(H200.smem_bytes, 1, H200) is None and tiling.too_much_smem(room // 2 - 1024, 2, H200) is None
    said = f"1 blocks need {room + 1} bytes of shared memory; there are {room}"
    assert tiling.too_much_smem(H200.smem_bytes + 1, 1, H200) == said
    assert tiling.too_much_smem(room // 2 - 1023, 2, H200) == f"2 blocks need {room + 2} bytes of shared memory; there are {room}"


def test_one_tuning_shape_where_bits_follow_from_the_row_alone() -> None:
    """One configuration serves all lengths, and packed sequences."""
    (shape,) = tiling.tuning_shapes(replace(OP, invariant=True, q_lens=True, kv_lens=True))
    assert shape.varlen and not shape.q_lens and not shape.kv_lens


def test_offsets_are_run_time_numbers() -> None:
    numbers = tiling.values(replace(OP, q_offset=3, kv_offset=5), 64, H200)
    assert (numbers["q_offset"], numbers["kv_offset"]) == (3, 5)
    assert "q_offset" not in tiling.values(OP, 64, H200)


def test_tuning_shapes_have_nothing_of_the_call() -> None:
    """Another length, batch, window, cap, layout or number of heads is compared by the same operations."""
    window = replace(OP, mask=Window(5, 5))
    for a, b in (
        (OP, replace(OP, batch=7, q_len=9, kv_len=1, heads=6, kv_heads=3)),
        (window, replace(window, mask=And(Causal(), Window(9)))),
    ):
        assert tiling.tuning_shapes(a) == tiling.tuning_shapes(b)
    shapes = tiling.tuning_shapes(window)
    assert [(op.batch, op.q_len, op.kv_len, op.heads, op.kv_heads) for op in shapes] == [
        (8, 2048, 2048, 16, 16), (1, 4096, 4096, 8, 8), (1, 512, 512, 8, 8)
    ]  # fmt: skip
    assert {op.mask for op in shapes} == {Causal()} and {op.mask for op in tiling.tuning_shapes(OP)} == {Full()}
    for op, rows in zip(tiling.tuning_shapes(replace(VARLEN, layout=Layout("a"))), (16384, 4096, 512), strict=True):
        assert (op.total_q, op.total_kv, op.head_dim, op.head_dim_v, op.varlen) == (rows, rows, 64, 128, True)


def test_values() -> None:
    op = replace(OP, scale=-0.5, mask=Window(3, 4))
    found = tiling.values(op, 128, H200)
    assert found == {
        "scale": 0.5, "heads": 4, "heads_per_kv": 2, "batches": 2, "q_len": 300, "q_tiles": 3, "window_left": 3,
        "window_right": 4, "l2_head_group": 8, "last_group": 0,
    }  # fmt: skip
    assert tiling.values(replace(OP, score=Softcap(2.0)), 100, H200)["softcap"] == 2.0
    assert tiling.values(VARLEN, 128, H200) == {
        "scale": 0.125,
        "heads": 4,
        "heads_per_kv": 2,
        "batches": 2,
        "total_q": 500,
        "total_kv": 700,
    }


@pytest.mark.parametrize(
    "changes, group, groups",
    [
        ({}, 8, 0),  # all heads at once
        ({"batch": 64, "kv_len": 2000}, 2 * ((4 << 20) // (2000 * 192 * 2)), (256 - 132 // 3) // 10),
        ({"batch": 64, "kv_len": 1 << 20}, 2, (256 - 44) // 2),  # longer than a group: one key head
        ({"batch": 64, "kv_len": 0}, 256, 0),
        ({"batch": 64, "kv_len": 2000, "mask": Causal()}, 10, (256 - 108) // 10),  # the last group has half of L2
        ({"batch": 64, "kv_len": 3000, "mask": Causal()}, 6, (256 - 72) // 6),
        ({"batch": 64, "kv_len": 1 << 18, "mask": Causal()}, 176, 0),  # long: as many as even out
        ({"batch": 64, "q_len": 0, "kv_len": 2000}, 10, (256 - 132) // 10),
        ({"batch": 64, "kv_len": 21845, "mask": Causal()}, 2, (256 - 44) // 2),  # just not long
        ({"batch": 64, "kv_len": 21846, "mask": Causal()}, 176, 0),
        ({"kv_heads": 4, "kv_len": 1 << 20}, 1, 0),
    ],
    ids=str,
)
def test_head_groups(changes: dict[str, Any], group: int, groups: int) -> None:
    op = replace(OP, **changes)
    found, _ = tiling.query_tiles(op, 100, H200).at(op.q_len)
    assert (found["l2_head_group"], found["last_group"]) == (group, groups)


def test_kept_keys_of_strips() -> None:
    begin, end = tiling.kept_keys(Causal(), 256, 256, 128)
    assert begin.tolist() == [[0, 0]] * 2 and end.tolist() == [[64, 128], [192, 256]]
    begin, end = tiling.kept_keys(Window(10, 0), 200, 200, 128)
    assert begin.tolist() == [[0, 54], [118, 182]] and end.tolist() == [[64, 128], [192, 200]]
    begin, end = tiling.kept_keys(Full(), 0, 7, 32)
    assert (begin.tolist(), end.tolist()) == ([[0]], [[7]])
    begin, end = tiling.kept_keys(Full(), 65, 7, 128)
    assert (end - begin).tolist() == [[7, 7]]
    begin, end = tiling.kept_keys(Full(), 64, 7, 128)
    assert (end - begin).tolist() == [[7, 0]], "the second strip has no row"
    assert tiling.kept_keys(Causal(), 1 << 20, 1 << 20, 128)[1].shape == (64, 2), "tiles are sampled"
    _, end = tiling.kept_keys(Causal(), 40, 100, 128, 4)
    assert end.tolist() == [[76, 92], [100, 0]], "four rows of a query keep the same keys; the last strip has no row"

"""Kernels whose bias of pairs is shared by many entries of the batch have this in common: which scores and masks are such, and
the launches before them, pair_tiles.cu and key_bits.cu."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..trace.expressions import Expr
from ..variant import Option
from ..variant.element import FP32, Item
from ..variant.field import AxisStride, Dim, Field, Fields, Pointer, Scratch
from ..variant.function import FunctionMask, FunctionScore
from ..variant.mask import Full
from ..variant.scheduler import launch_of
from .program import Buffer, Launch
from .render import config_header, source

SIDE, TILE_BYTES = 64, 4 * 64 * 64  # of tile/pair_tile.cuh
FEW_QUERIES = 16  # below so many most rows of a tile are none
MOST_BYTES = 1 << 32  # of the bias in float32, of which gradients have two, and a sum of as many
THREADS = 128


class PairBias(NamedTuple):
    """A score that adds an element of an array for each pair: along which axes the array has biases, heads and queries, None for
    none, how many entries of the batch share a bias, and how many biases these have."""

    array: Any  # rawattn.variant.function.Captured
    batch: int | None
    head: int | None
    query: int
    shared: int
    biases: int
    is_shared: bool  # whether its code lets entries share one
    keys: Any = None  # the array of a bias for each key of an entry, if the score adds one, too


@functools.lru_cache(maxsize=256)
def _find_bias(score: FunctionScore, batch: int) -> PairBias | None:
    terms = _find_terms(score.code.root)
    loads = [x for x in terms if x.op == "load"]
    of_keys = [x for x in loads if _is_of_keys(x)]
    of_pairs = [x for x in loads if not _is_of_keys(x)]
    numbers = {x.args[0] for x in loads}
    if len(of_pairs) != 1 or len(of_keys) > 1 or len(terms) != 1 + len(loads) or not any(_is_variable(x, "s") for x in terms):
        return None
    if score.checked or len(numbers) != len(loads) or {score.arrays[i].element for i in numbers} - {"fp32", "bf16", "fp16"}:
        return None
    array, keys = score.arrays[of_pairs[0].args[0]], [score.arrays[x.args[0]] for x in of_keys]
    indices, axes, shared = of_pairs[0].args[2:], dict[str, int](), max(1, batch)
    for axis, index in enumerate(indices):
        name = next((name for name in ("b", "h", "q", "kv") if _is_variable(index, name)), None)
        count = None if name else _find_divisor(index, score.numbers)
        if count is not None:
            name, shared = "b", min(count, shared)
        elif name == "b":
            shared = 1
        elif name is None and index.op == "const" and index.args[0] == 0:
            continue
        if name is None or name in axes:
            return None
        axes[name] = axis
    if "q" not in axes or axes.get("kv") != len(indices) - 1:
        return None
    is_shared = "b" not in axes or not _is_variable(indices[axes["b"]], "b")
    biases = -(-batch // shared)
    return PairBias(array, axes.get("b"), axes.get("h"), axes["q"], shared, biases, is_shared, keys[0] if keys else None)


def _find_terms(x: Expr) -> list[Expr]:
    """The terms of a sum."""
    return [term for each in x.args for term in _find_terms(each)] if x.op == "add" and x.type == "float" else [x]


def _is_of_keys(load: Expr) -> bool:
    """Says whether an element is that of a key of an entry of the batch."""
    return len(load.args) == 4 and _is_variable(load.args[2], "b") and _is_variable(load.args[3], "kv")


def _is_variable(x: Any, name: str) -> bool:
    return isinstance(x, Expr) and x.op == "var" and x.args[0] == name


def _find_divisor(index: Expr, numbers: tuple[Any, ...]) -> int | None:
    """The number by which the number of the batch entry is divided; None where it is another expression."""
    if index.op != "floordiv" or not _is_variable(index.args[0], "b"):
        return None
    by = index.args[1]
    value = numbers[by.args[0]] if by.op == "param" else by.args[0] if by.op == "const" else None
    return value if isinstance(value, int) and value > 0 else None


def bias_of(op: Forward) -> PairBias | None:
    """The bias of pairs that the operation's score is, where it is such and nothing else."""
    return _find_bias(op.score, op.batch) if isinstance(op.score, FunctionScore) else None


def is_shared(op: Forward) -> bool:
    """Says whether the operation's score is a bias of pairs that entries of its batch may share. It follows from its kind, and
    from the batch."""
    bias = bias_of(op)
    return bias is not None and op.batch > 1 and bias.is_shared


def prefers(op: Forward) -> bool:
    """Says whether queries fill a good part of a tile, and a bias in float32 is not too much memory. Other kernels come first
    where not: they may split the keys, and read a bias where it lies."""
    return op.q_len >= FEW_QUERIES and TILE_BYTES * count_tiles(op) <= MOST_BYTES


def keeps_by_bits(op: Forward) -> bool:
    """Says whether the operation's mask reads a bool for each key of an entry of the batch, and nothing else."""
    mask = op.mask
    if not isinstance(mask, FunctionMask) or mask.checked or len(mask.arrays) != 1 or mask.arrays[0].element != "bool":
        return False
    return mask.code.root.op == "load" and _is_of_keys(mask.code.root)


def reasons(op: Forward) -> list[str]:
    """The reasons why no kernel of this kind computes the operation."""
    refusals = []
    if not is_shared(op):
        refusals.append("no entries of its batch share a bias of pairs, as s + bias[h, q, kv]")
    if not (isinstance(op.mask, Full) or keeps_by_bits(op)):
        refusals.append("its mask is none of a bool for each key, as lambda b, h, q, kv: keep[b, kv]")
    elif isinstance(keys_option(op), KeyBias) and not isinstance(op.mask, Full):
        refusals.append("its keys have a bias and a mask")
    for wrong, words in (
        (op.varlen or any(op.lens), "its sequences have lengths of their own"), (op.sinks, "it has sinks"),
        (op.spec.dropout, "it drops weights"), (op.spec.offsets is not None, "its rows have offsets"),
        (op.constant_time, "its time depends on the data"), (op.invariant, "which kernel serves follows from the batch"),
        (op.heads != op.kv_heads, "query heads share key heads"),
        (not (op.q_len and op.kv_len and op.batch), "it has no rows"),
    ):  # fmt: skip
        refusals += [words] * bool(wrong)
    return refusals


def count_tiles(op: Forward) -> int:
    """The tiles of the bias."""
    bias = bias_of(op)
    assert bias is not None
    return bias.biases * op.heads * -(-op.q_len // SIDE) * -(-op.kv_len // SIDE)


def count_works(op: Forward, n_each: int, length: int, rows: int) -> int:
    """The works of ``rows`` of ``length`` queries or keys of one head, for ``n_each`` entries of the batch that share a bias."""
    bias = bias_of(op)
    assert bias is not None
    return bias.biases * op.heads * -(-bias.shared // n_each) * -(-length // rows)


class EveryKey(Option):
    """Every key is kept."""

    source: ClassVar[str] = "variant/keys/every.cuh"


class KeyBits(Option):
    """A key is kept where its bit is set."""

    source: ClassVar[str] = "variant/keys/bits.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("bits", "u64*", Scratch("key_bits")),)


class KeyBias(Option):
    """Each key has a bias."""

    source: ClassVar[str] = "variant/keys/bias.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("key_bias", "float*", Scratch("key_bias")),)


class Ex2(Option):
    """Every exponential is made by the instruction for it."""

    source: ClassVar[str] = "variant/exponent/ex2.cuh"


@dataclasses.dataclass(frozen=True)
class MixedEx2(Option):
    """One exponential of ``each`` is made by a polynomial."""

    each: int
    source: ClassVar[str] = "variant/exponent/mixed.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"polynomial_each": self.each}


class TilesOfQueries(Option):
    """Rows of a tile of the bias are queries."""

    source: ClassVar[str] = "variant/pair_tiles/of_queries.cuh"


class TilesOfKeys(Option):
    """Rows of a tile of the bias are keys."""

    source: ClassVar[str] = "variant/pair_tiles/of_keys.cuh"


KV_LEN = Field("kv_len", "i32", Dim("k", -3))
SIZES: Fields = (*(Field(name, "i32") for name in ("q_len", "heads", "biases", "shared", "batches")), KV_LEN)
TILES = {TilesOfQueries(): "bias_tiles", TilesOfKeys(): "bias_tiles_of_keys"}  # buffers


def keys_option(op: Forward) -> Option:
    """The option that says which keys are kept, or what is added for them."""
    bias = bias_of(op)
    return KeyBias() if bias is not None and bias.keys is not None else KeyBits() if keeps_by_bits(op) else EveryKey()


def values(op: Forward) -> dict[str, float]:
    """The run-time numbers of all launches."""
    bias = bias_of(op)
    assert bias is not None
    numbers = {"q_len": op.q_len, "heads": op.heads, "biases": bias.biases, "shared": bias.shared, "batches": op.batch}
    return {**numbers, "scale": op.scale, "batch_stride": 0, "head_stride": 0}


def before(op: Forward, device: Device, orders: tuple[Option, ...]) -> tuple[list[Launch], list[Buffer]]:
    """The launches before a kernel, which make tiles of the bias in each of ``orders``, and bits of the mask; their scratch."""
    bias, count, numbers = bias_of(op), count_tiles(op), values(op)
    assert bias is not None
    launches, buffers = [], []
    for order in orders:
        rendered = _render_tiles(bias.array.name, bias.array.element, bias.batch, bias.head, bias.query, order, device.arch)
        launches.append(Launch("pair_tiles", *rendered, numbers, min(count, 16 * device.sm_count)))
        buffers.append(Buffer(TILES[order], TILE_BYTES * count))
    if bias.keys is not None:
        count = op.batch * -(-op.kv_len // SIDE) * SIDE
        rendered = _render_key_bias(bias.keys.name, bias.keys.element, device.arch)
        launches.append(Launch("key_bias", *rendered, numbers, min(-(-count // THREADS), 16 * device.sm_count)))
        buffers.append(Buffer("key_bias", 4 * count))
    if keeps_by_bits(op):
        words = op.batch * -(-op.kv_len // SIDE)
        grid = min(-(-words * 32 // THREADS), 16 * device.sm_count)
        launches.append(Launch("key_bits", *_render_bits(device.arch), numbers, grid))
        buffers.append(Buffer("key_bits", 8 * words))
    return launches, buffers


@functools.lru_cache(maxsize=64)
def _render_tiles(
    name: str, element: str, batch: int | None, head: int | None, query: int, order: Option, arch: str
) -> tuple[Source, Fields]:
    item = Item(element)
    strides = {"batch_stride": batch, "head_stride": head, "row_stride": query}
    fields: Fields = (
        Field("bias", f"const {item.cuda_type}*", Pointer(name)),
        *(Field(x, "i64") if axis is None else Field(x, "i64", AxisStride(name, axis)) for x, axis in strides.items()),
        Field("tiles", "float*", Scratch(TILES[order])), *SIZES,
    )  # fmt: skip
    options: dict[str, Option] = {"Element": FP32, "Item": item, "PairTiles": order, "Launch": launch_of(arch)}
    return source("pair_tiles.cu", config_header({"threads": THREADS, "m_tiles_per_warp": 1}, fields, [], options), arch), fields


@functools.lru_cache(maxsize=16)
def _render_key_bias(name: str, element: str, arch: str) -> tuple[Source, Fields]:
    item = Item(element)
    fields: Fields = (
        Field("bias", f"const {item.cuda_type}*", Pointer(name)), Field("bias_stride", "i64", AxisStride(name, 0)),
        Field("key_bias", "float*", Scratch("key_bias")), Field("batches", "i32"), KV_LEN,
    )  # fmt: skip
    options: dict[str, Option] = {"Element": FP32, "Item": item, "Launch": launch_of(arch)}
    return source("key_bias.cu", config_header({"threads": THREADS}, fields, [], options), arch), fields


@functools.lru_cache(maxsize=8)
def _render_bits(arch: str) -> tuple[Source, Fields]:
    fields: Fields = (
        Field("keep", "const function::Bool*", Pointer("mask_0")), Field("keep_stride", "i64", AxisStride("mask_0", 0)),
        Field("bits", "u64*", Scratch("key_bits")), Field("batches", "i32"), KV_LEN,
    )  # fmt: skip
    options: dict[str, Option] = {"Element": FP32, "Launch": launch_of(arch)}
    return source("key_bits.cu", config_header({"threads": THREADS}, fields, [], options), arch), fields


def least_seconds(op: Forward, clocks: float, device: Device) -> float:
    """The time of all units of 64 queries by 64 keys, of so many clocks each, and of the launches."""
    units = op.batch * op.heads * -(-op.q_len // SIDE) * -(-op.kv_len // SIDE)
    return math.ceil(units / device.sm_count) * clocks / 1.755e9 + 8e-6

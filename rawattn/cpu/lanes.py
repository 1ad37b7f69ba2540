"""The loops of the CPU path: attention for a tile of rows, in Numba, on vectors of lanes.

``Lanes`` is a Numba type of our own: a vector of 64 bytes, which LLVM lays on whatever vector registers the machine has. Each
lane is a row of q, so nothing is reduced across lanes, and a row's result does not depend on its neighbours. The products
broadcast numbers of k or v against vectors of lanes, ``BLOCK`` sums at a time in registers: the register tile of BLIS (Van Zee
and van de Geijn, ACM TOMS 41(3), 2015).

Numba is imported here, so only ``loops.load_lanes`` imports this file, and only for a call.
"""
# mypy: ignore-errors
# The types here are Numba's, inferred and checked by it.

from __future__ import annotations

import math
import operator
import pathlib
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from .units import BATCH, BEFORE, BEHIND, BOUNDS, HEAD, KEY, KEYS, KV_HEAD, PAGE, POSITION, QUERIES, QUERY, ROW, SEQUENCE

_WIDE = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
BYTES = 128 if _WIDE else 64  # of a vector: two registers of AVX or AVX-512, four of NEON
BLOCK = 8 if _WIDE else 6  # vectors of sums that a product keeps in registers: 16 of 32, 12 of the 16 that AVX has, 24 of 32
SQUARE = 64 if _WIDE else 32  # bytes of a row of a square that is transposed in registers: 16 of them hold it, or 8
TILE_KV, GROUP = 96, 256 // BYTES  # keys and panels of rows for which the backward has S and dS at once
CHUNK = 64  # terms of a sum in its order; sums of sums round less
MACHINE = f"{numba.__version__}-{llvmlite.binding.get_host_cpu_name()}"  # what compiled code is good for
FUSE = ("contract",)  # a multiplication and an addition may become one instruction; nothing is reordered


class Lanes(types.Type):
    """A vector of float32 or float64."""

    def __init__(self, scalar):
        self.scalar = scalar
        super().__init__(f"Lanes({scalar})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        scalar = manager.lookup(lanes.scalar).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(scalar, BYTES * 8 // lanes.scalar.bitwidth))


def lanes_of(array):
    """The numbers of a vector of the array's format, a constant for LLVM, which ``itemsize`` is not."""


@overload(lanes_of)
def _lanes_of(array):
    count = BYTES * 8 // array.dtype.bitwidth
    return lambda array: count


def square_of(array):
    """The rows of a square that ``transpose`` takes, of the array's format."""


@overload(square_of)
def _square_of(array):
    count = SQUARE * 8 // array.dtype.bitwidth
    return lambda array: count


def _pointer(context, builder, signature, args):
    """To args[1] of the array args[0]."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


def _broadcast(builder, vector, x):
    i32, undefined = ir.IntType(32), ir.Constant(vector, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(i32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(undefined, x, i32(0)), undefined, zeros)


@intrinsic
def load(typing, array, index):
    """The vector that begins at array[index], which is flat."""

    def emit(context, builder, signature, args):
        vector = context.get_value_type(signature.return_type).as_pointer()
        return builder.load(builder.bitcast(_pointer(context, builder, signature, args), vector), align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), emit


@intrinsic
def store(typing, array, index, x):
    """Writes the vector x to where array[index] begins."""

    def emit(context, builder, signature, args):
        pointer = builder.bitcast(_pointer(context, builder, signature, args), args[2].type.as_pointer())
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, x), emit


@intrinsic
def spread(typing, array, index):
    """array[index] in every lane."""

    def emit(context, builder, signature, args):
        number = builder.load(_pointer(context, builder, signature, args))
        return _broadcast(builder, context.get_value_type(signature.return_type), number)

    return Lanes(array.dtype)(array, types.intp), emit


@intrinsic
def fill(typing, like, x):
    """The number x in every lane of a vector such as ``like``."""

    def emit(context, builder, signature, args):
        return _broadcast(builder, args[0].type, context.cast(builder, args[1], x, like.scalar))

    return like(like, x), emit


@intrinsic
def less(typing, a, b, x, y):
    """x where a < b, else y; so y where a or b is NaN."""

    def emit(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return a(a, a, a, a), emit


def _operator(op, instruction):
    @intrinsic
    def apply(typing, a, b):
        return a(a, b), lambda context, builder, signature, args: getattr(builder, instruction)(*args, flags=FUSE)

    @overload(op)
    def typed(a, b):
        return (lambda a, b: apply(a, b)) if isinstance(a, Lanes) and a == b else None


for _op, _instruction in {"add": "fadd", "iadd": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}.items():
    _operator(getattr(operator, _op), _instruction)


def _exp(minus_one):
    @intrinsic
    def power(typing, x):
        bits, mantissa, bias, degree = (32, 23, 127, 7) if x.scalar == types.float32 else (64, 52, 1023, 13)

        def emit(context, builder, signature, args):
            vector = args[0].type
            integers = ir.VectorType(ir.IntType(bits), vector.count)

            def constant(value, kind=vector):
                return ir.Constant(kind, [value] * kind.count)

            def fma(a, b, c):
                return builder.fadd(builder.fmul(a, b, flags=FUSE), c, flags=FUSE)

            low, rounder = constant(-bias * math.log(2)), constant(1.5 * 2.0**mantissa)
            y = builder.select(builder.fcmp_ordered("<", args[0], low), low, args[0])  # NaN stays
            shifted = fma(y, constant(math.log2(math.e)), rounder)  # n, the integer next to y / ln(2), is in its low bits
            n = builder.fsub(shifted, rounder)
            high_bits = round(math.log(2) * 2.0 ** (mantissa - 11)) / 2.0 ** (mantissa - 11)  # of ln(2): n times it is exact
            low_bits = math.log(2) - high_bits + 2.3190468138462996e-17  # what float64 leaves of ln(2)
            r = fma(n, constant(-low_bits), fma(n, constant(-high_bits), y))  # y - n ln(2), at most ln(2) / 2
            rest = constant(1 / math.factorial(degree))
            for k in range(degree - 1, 1, -1):
                rest = fma(rest, r, constant(1 / math.factorial(k)))
            rest = fma(builder.fmul(r, r), rest, r)  # e^r - 1
            exponent = builder.add(builder.bitcast(shifted, integers), constant(bias, integers))
            two_n = builder.bitcast(builder.shl(exponent, constant(mantissa, integers)), vector)  # 0 where y is low
            return fma(rest, two_n, builder.fsub(two_n, constant(1.0)) if minus_one else two_n)

        return x(x), emit

    return power


exp = _exp(False)  # e^x for x < 88, to a unit in the last place; 1 for 0, and 0 below the normal numbers
expm1 = _exp(True)  # e^x - 1, as exact near 0


@njit(forceinline=True)
def tanh(x):
    high = fill(x, 20.0)  # tanh is 1 from here on
    x = less(high, x, high, x)
    e = expm1(x + x)
    return e / (e + fill(x, 2.0))


@njit(forceinline=True)
def within(lo, hi, position, x, other):
    """x in the lanes with lo <= position < hi, else other."""
    return less(position, lo, other, less(position, hi, x, other))


@intrinsic
def place(typing, array, i, j, k):
    """The address of array[i, j, k], from which on further dimensions are contiguous."""

    def emit(context, builder, signature, args):
        view = context.make_array(array)(context, builder, args[0])
        address = builder.ptrtoint(view.data, args[1].type)
        for axis in range(3):
            address = builder.add(address, builder.mul(builder.extract_value(view.strides, axis), args[1 + axis]))
        return address

    return types.intp(array, types.intp, types.intp, types.intp), emit


def _at(builder, address, index, scalar, kind):
    """The pointer to a ``kind`` at the number ``index`` from an address on."""
    start = builder.inttoptr(address, scalar.as_pointer())
    return builder.bitcast(builder.gep(start, [index]), kind.as_pointer())


@intrinsic
def read(typing, like, address, index):
    """The number ``index`` of those of the array's format from an address on."""

    def emit(context, builder, signature, args):
        scalar = context.get_value_type(like.dtype)
        return builder.load(_at(builder, *args[1:], scalar, scalar), align=1)

    return like.dtype(like, types.intp, types.intp), emit


@intrinsic
def write(typing, like, address, index, x):
    """Writes a number, where ``read`` reads it."""

    def emit(context, builder, signature, args):
        scalar = context.get_value_type(like.dtype)
        builder.store(context.cast(builder, args[3], x, like.dtype), _at(builder, *args[1:3], scalar, scalar), align=1)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.intp, x), emit


@intrinsic
def read_lanes(typing, like, address, index):
    """The vector that begins where ``read`` reads."""

    def emit(context, builder, signature, args):
        scalar, kind = context.get_value_type(like.dtype), context.get_value_type(signature.return_type)
        return builder.load(_at(builder, *args[1:], scalar, kind), align=1)

    return Lanes(like.dtype)(like, types.intp, types.intp), emit


@intrinsic
def write_lanes(typing, like, address, index, x):
    """Writes the vector x to where ``write`` writes."""

    def emit(context, builder, signature, args):
        scalar = context.get_value_type(like.dtype)
        builder.store(args[3], _at(builder, *args[1:3], scalar, args[3].type), align=1)
        return context.get_dummy_value()

    return types.void(like, types.intp, types.intp, x), emit


@intrinsic
def transpose(typing, x, first, step, y, at, pitch):
    """Writes the rows x[first + i step], each SQUARE bytes, as the columns of the rows y[at + i pitch]."""

    def emit(context, builder, signature, args):
        x, y = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3))
        size, bits = SQUARE * 8 // signature.args[0].dtype.bitwidth, signature.args[0].dtype.bitwidth
        kind, i32 = ir.VectorType(x.type.pointee, size), ir.IntType(32)

        def pointer(start, first, step, i):
            place = builder.gep(start, [builder.add(first, builder.mul(step, ir.Constant(step.type, i)))])
            return builder.bitcast(place, kind.as_pointer())

        def chosen(a, b, lanes):
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(i32, size), lanes))

        rows = [builder.load(pointer(x, args[1], args[2], i), align=bits // 8) for i in range(size)]
        for k in [1 << i for i in range(size.bit_length() - 1)]:  # squares of k x k change places across the diagonal
            for i in [i for i in range(size) if not i & k]:
                a, b = rows[i], rows[i + k]
                rows[i] = chosen(a, b, [size + (lane ^ k) if lane & k else lane for lane in range(size)])
                rows[i + k] = chosen(a, b, [size + lane if lane & k else lane ^ k for lane in range(size)])
        for i, row in enumerate(rows):
            builder.store(row, pointer(y, args[4], args[5], i), align=bits // 8)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, y, types.intp, types.intp), emit


def _unowned(context, builder, kind, x):
    if isinstance(kind, types.BaseTuple):
        each = [_unowned(context, builder, kind[i], builder.extract_value(x, i)) for i in range(len(kind))]
        return context.make_tuple(builder, kind, each)
    if not isinstance(kind, types.Array):
        return x
    array = context.make_array(kind)(context, builder, x)
    array.meminfo, array.parent = ir.Constant(array.meminfo.type, None), ir.Constant(array.parent.type, None)
    return array._getvalue()


@intrinsic
def borrow(typing, x):
    """The same array, or a tuple of such, without its owner, to be passed to functions until ``keep``. References are counted at
    every call, with atomic instructions, which took a fifth of the time."""
    return x(x), lambda context, builder, signature, args: _unowned(context, builder, x, args[0])


@intrinsic
def keep(typing, x):
    """Has the owners of arrays live until here."""
    return types.void(x), lambda context, builder, signature, args: context.get_dummy_value()


def widen(x, table):
    """x as a number to compute with; 16-bit formats come as their bits, and are looked up."""


@overload(widen)
def _widen(x, table):
    return (lambda x, table: table[x]) if isinstance(x, types.Integer) else (lambda x, table: x)


@intrinsic
def product(typing, a, first, row, column, b, start, step, depth):
    """For r < BLOCK, the sum over i < depth of a[first + r row + i column] times the vector that begins at b[start + i step]."""
    vector, index = Lanes(b.dtype), types.intp

    def emit(context, builder, signature, args):
        a, first, row, column, b, start, step, depth = args
        a, b = (
            context.make_array(kind)(context, builder, x).data for kind, x in ((signature.args[0], a), (signature.args[4], b))
        )
        lanes, align = context.get_value_type(vector), signature.args[0].dtype.bitwidth // 8
        sums = [cgutils.alloca_once_value(builder, ir.Constant(lanes, None)) for _ in range(BLOCK)]
        with cgutils.for_range(builder, depth) as loop:
            place = builder.gep(b, [builder.add(start, builder.mul(loop.index, step))])
            x = builder.load(builder.bitcast(place, lanes.as_pointer()), align=align)
            at = builder.add(first, builder.mul(loop.index, column))
            for total in sums:
                number = _broadcast(builder, lanes, builder.load(builder.gep(a, [at])))
                term = builder.fmul(number, x, flags=FUSE)
                builder.store(builder.fadd(builder.load(total), term, flags=FUSE), total)
                at = builder.add(at, row)
        return context.make_tuple(builder, signature.return_type, [builder.load(total) for total in sums])

    return types.UniTuple(vector, BLOCK)(a, index, index, index, b, index, index, index), emit


@njit
def copy_row(x, address, columns, tile, at):
    """Copies numbers that lie from an address of x on to tile[at]; gives 0, in the lanes where all were finite, else NaN."""
    lanes = lanes_of(tile)
    whole, wrong = columns // lanes * lanes, fill(load(tile, at), 0.0)
    for i in range(0, whole, lanes):
        y = read_lanes(x, address, i)
        wrong += y - y
        store(tile, at + i, y)
    rest = wrong
    for i in range(whole, columns):
        y = read(x, address, i)
        rest += fill(rest, y - y)
        tile[at + i] = y
    return wrong + rest


def bring(x, address, columns, table, tile, at):
    """``copy_row``, where 16-bit formats come as their bits."""


@overload(bring)
def _bring(x, address, columns, table, tile, at):
    if not isinstance(x.dtype, types.Integer):
        return lambda x, address, columns, table, tile, at: copy_row(x, address, columns, tile, at)

    def looked_up(x, address, columns, table, tile, at):
        wrong = table[0] - table[0]
        for i in range(columns):
            y = table[read(x, address, i)]
            wrong += y - y
            tile[at + i] = y
        return fill(load(tile, at), wrong)

    return looked_up


@njit
def fetch(k, v, pages, unit, first, begin, keys, table, tile_k, tile_v, width, flags):
    """Brings a unit's keys first + begin to first + keys to tile_k (key, head_dim), and values to tile_v (key, width); gives
    whether the values are finite. Keys before these are only in the first tile, as zeros."""
    head_dim, page_size, key, kv_head = k.shape[3], k.shape[1], unit[KEY] + first, unit[KV_HEAD]
    for i in range(begin * head_dim):
        tile_k[i] = 0
    for i in range(begin * width):
        tile_v[i] = 0
    at, row, wrong = (key + begin) // page_size, (key + begin) % page_size, fill(load(flags, 0), 0.0)
    for j in range(begin, keys):
        bring(k, place(k, pages[at], row, kv_head), head_dim, table, tile_k, j * head_dim)
        wrong += bring(v, place(v, pages[at], row, kv_head), v.shape[3], table, tile_v, j * width)
        row += 1
        if row == page_size:
            at, row = at + 1, 0
    store(flags, 0, wrong)
    finite = True
    for lane in range(lanes_of(tile_v)):
        finite &= flags[lane] == 0
    return finite


@njit
def dots(tile, first, keys, width, panels, at, depth, scale, s, column, pitch):
    """Writes scale times the dot products of the rows first to keys of a tile, which are width apart, and of the panel at
    panels[at]: s[key pitch + column]."""
    lanes = lanes_of(s)
    for j in range(first, keys, BLOCK):
        for i in range(0, depth, CHUNK):
            sums = product(tile, j * width + i, width, 1, panels, at + i * lanes, lanes, min(CHUNK, depth - i))
            for r in range(BLOCK):
                to = (j + r) * pitch + column
                x = sums[r] * fill(sums[r], scale)
                store(s, to, x if i == 0 else load(s, to) + x)


@njit
def logits(tile_k, keys, panel_q, at, head_dim, scale, cap, s):
    """Writes the logits of a panel: s (key, lane)."""
    lanes = lanes_of(s)
    dots(tile_k, 0, keys, head_dim, panel_q, at, head_dim, scale, s, 0, lanes)
    if cap != 0:
        for j in range(keys):
            x = load(s, j * lanes)
            store(s, j * lanes, fill(x, cap) * tanh(x))


@njit
def hide(s, keys, begin, end, bounds, rows, first, panel, lo, hi):
    """Writes -inf to s for the keys that rows of a panel do not keep: those before lo and from hi on, in each lane."""
    lanes = lanes_of(s)
    for lane in range(lanes):
        row = panel * lanes + lane
        at = bounds + row
        lo[lane], hi[lane] = (begin[at] - first, end[at] - first) if row < rows else (0, 0)
    for j in range(keys):
        x = load(s, j * lanes)
        store(s, j * lanes, within(load(lo, 0), load(hi, 0), fill(x, j), x, fill(x, -np.inf)))


@njit
def softmax(s, keys, row_max, row_sum, panel):
    """Turns the logits s to exponentials below the new maximum; gives the factor by which earlier sums shrink."""
    lanes = lanes_of(s)
    old = new = load(row_max, panel * lanes)
    for j in range(keys):
        x = load(s, j * lanes)
        new = less(new, x, x, new)
    store(row_max, panel * lanes, new)
    new = less(fill(new, -np.inf), new, new, fill(new, 0.0))  # while all is -inf: -inf - 0, and not -inf - -inf
    shrink, total = exp(old - new), fill(new, 0.0)
    for first in range(0, keys, BLOCK):
        part = fill(new, 0.0)
        for j in range(first, min(first + BLOCK, keys)):
            x = exp(load(s, j * lanes) - new)
            part += x
            store(s, j * lanes, x)
        total += part
    store(row_sum, panel * lanes, load(row_sum, panel * lanes) * shrink + total)
    return shrink


@njit
def gather(s, keys, tile_v, width, shrink, panel_o, panel):
    """Shrinks panel_o (panel, width, lane), and adds the values, weighted by s."""
    lanes = lanes_of(s)
    for i in range(0, width, BLOCK):
        sums = product(tile_v, i, 1, width, s, 0, lanes, keys)
        for r in range(BLOCK):
            at = (panel * width + i + r) * lanes
            store(panel_o, at, load(panel_o, at) * shrink + sums[r])


@njit
def gather_kept(s, keys, tile_v, width, shrink, panel_o, panel, lo, hi):
    """``gather`` where some value is inf or NaN, and 0 times it must not count."""
    lanes = lanes_of(s)
    for i in range(width):
        total = fill(shrink, 0.0)
        for j in range(keys):
            x = load(s, j * lanes) * spread(tile_v, j * width + i)
            total += within(load(lo, 0), load(hi, 0), fill(x, j), x, fill(x, 0.0))
        at = (panel * width + i) * lanes
        store(panel_o, at, load(panel_o, at) * shrink + total)


LOW = np.uint64(0xFFFFFFFF)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
WORD = np.uint64(32)


@njit
def philox(a, b, c, d, low, high):
    """The four words of a counter by a key, as ``variant.weight.philox``."""
    for _ in range(7):
        x, y = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (y >> WORD) ^ b ^ low, y & LOW, (x >> WORD) ^ d ^ high, x & LOW
        low, high = (low + STEPS[0]) & LOW, (high + STEPS[1]) & LOW
    return a, b, c, d


@njit
def find_kept(kept, first, keys, panel, group, unit, random):
    """Writes 1 where the weight of a key from ``first`` on and of a row of a panel is kept, else 0, (key, lane), as
    ``variant.weight.Dropout.kept`` says. ``group`` heads share the keys; ``random`` has the threshold, 0 for no dropout, the
    seed, and the positions of query 0 and key 0."""
    threshold, seed, sequence, lanes = random[0], random[1], unit[SEQUENCE], lanes_of(kept)
    low, high = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    start = first + unit[POSITION] + random[3]
    for lane in range(lanes if threshold > 0 else 0):
        row = min(panel * lanes + lane, unit[QUERIES] * group - 1)
        q, head = row // group + unit[QUERY] + random[2], row % group + unit[HEAD]
        for pair in range(start // 32 * 4, (start + keys + 31) // 32 * 4):
            place = np.uint64(q // 16 * 32 + q % 8 * 4 + pair % 4)
            words = philox(np.uint64(head), np.uint64(pair // 4), np.uint64(sequence), place, low, high)
            for i in range(8):
                j = pair // 4 * 32 + pair % 4 * 2 + i % 2 + i // 2 * 8 - start
                if 0 <= j < keys:
                    half = (words[i // 4 * 2 + q // 8 % 2] >> np.uint64(i % 2 * 16)) & np.uint64(0xFFFF)
                    number = np.int64((half << np.uint64(1) | half >> np.uint64(15)) >> np.uint64((1 - i // 2 % 2) * 8)) & 0xFF
                    kept[j * lanes + lane] = number >= threshold if threshold <= 128 else number < 256 - threshold


@njit
def drop(x, first, keys, column, pitch, kept, random):
    """Makes x[key pitch + column] 0 where it is dropped, whatever it is, and rescales what is kept."""
    lanes, factor = lanes_of(x), 256 / (256 - random[0])
    for j in range(first, keys if random[0] > 0 else first):
        at = j * pitch + column
        y = load(x, at)
        store(x, at, less(fill(y, 0.5), load(kept, j * lanes), y * fill(y, factor), fill(y, 0.0)))


@njit
def finish(q, unit, group, of_rows, sinks, begin, end, width, columns, rows_o, o, lse):
    """Writes o and lse of sums and their references. ``columns`` has a vector for each number of a row of ``rows_o``, and 3."""
    _, _, panel_o, row_max, row_sum, _ = of_rows
    lanes, rows, first_head = lanes_of(q), unit[QUERIES] * group, unit[KV_HEAD] * group
    pitch, square = rows_o.size // lanes, square_of(q)
    weights, totals, some = columns[pitch * lanes :], columns[(pitch + 1) * lanes :], columns[(pitch + 2) * lanes :]
    for panel in range((rows + lanes - 1) // lanes):
        for lane in range(min(lanes, rows - panel * lanes)):
            row = panel * lanes + lane
            at, head, query = unit[BOUNDS] + row, first_head + row % group, unit[ROW] + row // group
            total, largest, weight, sink = row_sum[row], row_max[row], q.dtype.type(1), sinks[head]
            if sink != -np.inf:  # the sums move to the larger of the two maxima
                largest = max(row_max[row], sink)
                weight = q.dtype.type(0 if row_max[row] == -np.inf else math.exp(row_max[row] - largest))
                total = total * weight + (1 if sink == largest else math.exp(sink - largest))
            if lse.size > 0:
                lse[unit[BATCH], head, query] = -np.inf if total == 0 else largest + math.log(total)
            weights[lane], totals[lane], some[lane] = weight, total, total != 0 and begin[at] < end[at]
        for i in range(o.shape[3]):
            x = load(panel_o, (panel * width + i) * lanes) * load(weights, 0) / load(totals, 0)
            store(columns, i * lanes, less(fill(x, 0.0), load(some, 0), x, fill(x, 0.0)))
        for i in range(0, o.shape[3], square):
            for lane in range(0, lanes, square):
                transpose(columns, i * lanes + lane, lanes, rows_o, lane * pitch + i, pitch)
        for lane in range(min(lanes, rows - panel * lanes)):
            row = panel * lanes + lane
            address = place(o, unit[BATCH], unit[ROW] + row // group, first_head + row % group)
            put_row(rows_o, lane * pitch, 1.0, o, address)


@njit
def put_row(tile, at, scale, x, address):
    """Writes the row of a tile from tile[at] on, times scale, to an address of x."""
    lanes = lanes_of(tile)
    whole = x.shape[3] // lanes * lanes
    for i in range(0, whole, lanes):
        y = load(tile, at + i)
        write_lanes(x, address, i, y * fill(y, scale))
    for i in range(whole, x.shape[3]):
        write(x, address, i, tile[at + i] * tile.dtype.type(scale))


@njit
def pack(x, unit, group, width, along, across):
    """The rows of x of a unit, query by query and head by head, twice: as rows of this width, and as panels (panel, column,
    lane). Rows past the last are zeros."""
    lanes, square, rows, columns = lanes_of(x), square_of(x), unit[QUERIES] * group, x.shape[3]
    panels = (rows + lanes - 1) // lanes
    for query in range(unit[QUERIES]):
        for head in range(group):
            address = place(x, unit[BATCH], unit[ROW] + query, unit[KV_HEAD] * group + head)
            copy_row(x, address, columns, along, (query * group + head) * width)
    for i in range(rows * width, panels * lanes * width, lanes):
        store(along, i, fill(load(along, i), 0.0))
    for panel in range(panels):
        for i in range(0, columns, square):
            for lane in range(0, lanes, square):
                transpose(along, (panel * lanes + lane) * width + i, width, across, (panel * width + i) * lanes + lane, lanes)


@njit
def find_ranges(unit, group, lanes, begin, end, ranges):
    """Writes which keys some row of each panel keeps, and which all its rows do; gives the first and one past the last that any
    row keeps."""
    rows, kv_len = unit[QUERIES] * group, unit[KEYS]
    lowest, highest = kv_len, 0
    for panel in range((rows + lanes - 1) // lanes):
        some_begin, some_end, every_begin, every_end = kv_len, 0, 0, kv_len
        for row in range(unit[BOUNDS] + panel * lanes, unit[BOUNDS] + min(rows, panel * lanes + lanes)):
            if begin[row] < end[row]:
                some_begin, some_end = min(some_begin, begin[row]), max(some_end, end[row])
            every_begin, every_end = max(every_begin, begin[row]), min(every_end, end[row])
        ranges[panel, 0], ranges[panel, 1], ranges[panel, 2], ranges[panel, 3] = some_begin, some_end, every_begin, every_end
        lowest, highest = min(lowest, some_begin), max(highest, some_end)
    return lowest, highest


@njit
def most_rows(units, group):
    """The rows of the longest unit."""
    most = 0
    for i in range(units.shape[0]):
        most = max(most, units[i, QUERIES] * group)
    return most


def attend(q, k, v, pages, units, begin, end, sinks, random, scale, cap, tile_kv, table, o, lse):
    """Attention of units, one after the other, to the keys begin to end that each row keeps: writes o and lse, if this has
    numbers. A unit has some queries of one sequence, of all heads that share a head of k and v; its rows are these queries, and
    for each its heads.

    q and o (batch, q_len, heads, columns), sinks (heads) and lse (batch, heads, q_len) are in the format that is computed with, k
    and v (pages, page_size, kv_heads, columns) in any; last dimensions are contiguous. Key j of a unit is row (KEY + j) %
    page_size of the page pages[PAGE + (KEY + j) // page_size]; those before the first and behind the last that a row keeps are
    not read. The logit is scale * q.k where cap is 0, else cap * tanh(scale * q.k). A sink of -inf is none. ``random`` is that of
    ``find_kept``.
    """
    lanes, group = lanes_of(q), q.shape[2] // max(1, k.shape[2])
    panels, pitch = (most_rows(units, group) + lanes - 1) // lanes, (o.shape[3] + lanes - 1) // lanes * lanes
    width, width_q = (o.shape[3] + BLOCK - 1) // BLOCK * BLOCK, (q.shape[3] + lanes - 1) // lanes * lanes
    row_q, panel_q = np.empty(panels * lanes * width_q, q.dtype), np.empty(panels * lanes * width_q, q.dtype)
    panel_o, row_max = np.empty(panels * lanes * width, q.dtype), np.empty(panels * lanes, q.dtype)
    row_sum, ranges = np.empty(panels * lanes, q.dtype), np.empty((panels, 4), np.int64)
    tile_k, tile_v = np.empty((tile_kv + BLOCK) * q.shape[3], q.dtype), np.empty((tile_kv + BLOCK) * width, q.dtype)
    s, kept = np.empty((tile_kv + BLOCK) * lanes, q.dtype), np.empty((tile_kv + BLOCK) * lanes, q.dtype)
    rows_o = np.empty(lanes * pitch, q.dtype)
    lo, hi, columns = np.empty(lanes, q.dtype), np.empty(lanes, q.dtype), np.empty((pitch + 3) * lanes, q.dtype)
    own = (row_q, panel_q, panel_o, row_max, row_sum, ranges), (tile_k, tile_v, s, kept, lo, hi), columns, rows_o
    given = q, k, v, pages, units, begin, end, sinks, random, table, o, lse
    q, k, v, pages, units, begin, end, sinks, random, table, o, lse = borrow(given)
    of_rows, of_tile, columns, rows_o = borrow(own)
    for i in range(units.shape[0]):
        attend_unit(q, k, v, pages, units[i], begin, end, random, scale, cap, tile_kv, table, of_rows, of_tile)
        finish(q, units[i], group, of_rows, sinks, begin, end, width, columns, rows_o, o, lse)
    keep(own)
    keep(given)


@njit
def attend_unit(q, k, v, pages, unit, begin, end, random, scale, cap, tile_kv, table, of_rows, of_tile):
    """Finds the sums of a unit's rows, and their references, in the arrays ``of_rows``."""
    row_q, panel_q, panel_o, row_max, row_sum, ranges = of_rows
    tile_k, tile_v, s, kept, lo, hi = of_tile
    lanes, head_dim, group = lanes_of(q), q.shape[3], q.shape[2] // max(1, k.shape[2])
    rows = unit[QUERIES] * group
    panels, here = (rows + lanes - 1) // lanes, pages[unit[PAGE] :]
    width, width_q = (v.shape[3] + BLOCK - 1) // BLOCK * BLOCK, (head_dim + lanes - 1) // lanes * lanes
    pack(q, unit, group, width_q, row_q, panel_q)
    for j in range(panels):
        store(row_max, j * lanes, fill(load(lo, 0), -np.inf))
        store(row_sum, j * lanes, fill(load(lo, 0), 0.0))
    for j in range(panels * width):
        store(panel_o, j * lanes, fill(load(lo, 0), 0.0))
    lowest, highest = find_ranges(unit, group, lanes, begin, end, ranges)
    for first in range(lowest // tile_kv * tile_kv, highest, tile_kv):
        keys = min(tile_kv, highest - first)
        finite = fetch(k, v, here, unit, first, max(0, lowest - first), keys, table, tile_k, tile_v, width, lo)
        for panel in range(panels):
            if ranges[panel, 0] >= first + keys or ranges[panel, 1] <= first:
                continue
            logits(tile_k, keys, panel_q, panel * width_q * lanes, head_dim, scale, cap, s)
            masked = ranges[panel, 2] > first or ranges[panel, 3] < first + keys
            if masked:
                hide(s, keys, begin, end, unit[BOUNDS], rows, first, panel, lo, hi)
            shrink = softmax(s, keys, row_max, row_sum, panel)
            find_kept(kept, first, keys, panel, group, unit, random)
            drop(s, 0, keys, 0, lanes, kept, random)
            if masked and not finite:
                gather_kept(s, keys, tile_v, width, shrink, panel_o, panel, lo, hi)
            else:
                gather(s, keys, tile_v, width, shrink, panel_o, panel)


@njit
def accumulate(a, first, row, column, b, start, step, depth, out, at, pitch, count):
    """Adds the products of count rows of a to the vectors at out[at + r pitch]."""
    for i in range(0, count, BLOCK):
        sums = product(a, first + i * row, row, column, b, start, step, depth)
        if i + BLOCK <= count:
            for r in range(BLOCK):
                to = at + (i + r) * pitch
                store(out, to, load(out, to) + sums[r])
        else:  # sums in memory, as their number is not known
            for r in range(count - i):
                to = at + (i + r) * pitch
                store(out, to, load(out, to) + sums[r])


@njit
def differentiate(s, ds, first, keys, column, pitch, lse, delta, panel, cap, masked, lo, hi):
    """Turns dot products s to probabilities, and the gradients ds of these to those of the dot products, for one panel."""
    lanes = lanes_of(s)
    row_lse, row_delta = load(lse, panel * lanes), load(delta, panel * lanes)
    for j in range(first, keys):
        at = j * pitch + column
        x, slope = load(s, at), fill(row_lse, 1.0)
        if cap != 0:
            x = tanh(x)
            slope = slope - x * x
            x = fill(x, cap) * x
        p = exp(x - row_lse)
        dx = p * (load(ds, at) - row_delta) * slope
        if masked:
            zero, position = fill(x, 0.0), fill(x, j)
            p = within(load(lo, 0), load(hi, 0), position, p, zero)
            dx = within(load(lo, 0), load(hi, 0), position, dx, zero)
        store(s, at, p)
        store(ds, at, dx)


@njit
def pack_statistics(lse, dlse, unit, group, panels, row_lse, row_delta):
    """lse, inf where it is -inf, and -dlse, 0 where there is none, of a unit's rows; inf and 0 past the last."""
    rows, first_head = unit[QUERIES] * group, unit[KV_HEAD] * group
    for row in range(panels * lanes_of(row_lse)):
        row_lse[row], row_delta[row] = np.inf, 0
        if row < rows:
            head, query = first_head + row % group, unit[ROW] + row // group
            x = lse[unit[BATCH], head, query]
            if x != -np.inf:
                row_lse[row] = x
            if dlse.size > 0:
                row_delta[row] = -dlse[unit[BATCH], head, query]


@njit
def add_dots(panel_o, panel_do, panels, columns, width, row_delta):
    """Adds the dot products of the rows of two arrays of panels to row_delta."""
    lanes = lanes_of(panel_o)
    for panel in range(panels):
        total = load(row_delta, panel * lanes)
        for first in range(0, columns, CHUNK):
            part = fill(total, 0.0)
            for i in range(first, min(first + CHUNK, columns)):
                at = (panel * width + i) * lanes
                part += load(panel_o, at) * load(panel_do, at)
            total += part
        store(row_delta, panel * lanes, total)


@njit
def find_bounds(unit, group, begin, end, first, keys, panel, lo, hi):
    """Writes which keys of a tile each row of a panel keeps, all for rows past the last. Gives the first and one past the last
    that any row keeps, in whole blocks, 0 and 0 where there is none; and whether every row keeps all of these."""
    some, least, most, latest, earliest = False, keys, 0, 0, keys
    for lane in range(lo.size):
        row = panel * lo.size + lane
        lo[lane], hi[lane] = 0, keys
        if row < unit[QUERIES] * group:
            low, high = max(begin[unit[BOUNDS] + row] - first, 0), min(end[unit[BOUNDS] + row] - first, keys)
            lo[lane], hi[lane], latest, earliest = low, high, max(latest, low), min(earliest, high)
            if low < high:
                some, least, most = True, min(least, low), max(most, high)
    least, most = (least // BLOCK * BLOCK, (most + BLOCK - 1) // BLOCK * BLOCK) if some else (0, 0)
    return least, most, latest <= least and earliest >= min(most, keys)


@njit
def clear(x, first, last):
    """Writes 0 to whole vectors of x, from first to last."""
    for i in range(first, last, lanes_of(x)):
        store(x, i, fill(load(x, i), 0.0))


@njit
def clear_panel(s, ds, first, keys, column, pitch):
    for j in range(first, keys):
        store(s, j * pitch + column, fill(load(s, 0), 0.0))
        store(ds, j * pitch + column, fill(load(s, 0), 0.0))


def backward(do, q, k, v, o, lse, dlse, units, begin, end, random, factor, cap, scale, dq, dk, dv):
    """Gradients of the rows of q and the keys of k of units, one after the other, where a row keeps the keys begin to end of its
    unit: writes dq, dk and dv. A unit has queries and keys of one sequence, as in ``attend``; PAGE is its number in the batch.

    Arrays are in one format: do and o (batch, q_len, heads, head_dim_v), q and dq (batch, q_len, heads, head_dim), k and dk
    (batch, kv_len, kv_heads, head_dim), v and dv (batch, kv_len, kv_heads, head_dim_v), lse and dlse, which may have no numbers,
    (batch, heads, q_len). Where lse is -inf, a row's probabilities are 0. Where cap is 0, the logit is scale * q.k, and factor is
    scale; else it is cap * tanh(factor * q.k), and factor is scale / cap. ``random`` is that of ``find_kept``.

    For a tile of keys and some panels of rows, S and its gradient dS are (key, row). The products S = K Q^T and dP = V dO^T have
    rows in lanes, as in ``attend``; dV = P dO, dK = dS Q and dQ = dS^T K have columns. Where no row of a panel keeps a key, it is
    left out of a tile in whole blocks.
    """
    lanes, group = lanes_of(q), q.shape[2] // max(1, k.shape[2])
    pitch, size = GROUP * lanes, (most_rows(units, group) + lanes - 1) // lanes * lanes
    width, width_v = (q.shape[3] + lanes - 1) // lanes * lanes, (v.shape[3] + lanes - 1) // lanes * lanes
    row_q, panel_q = np.empty(size * width, q.dtype), np.empty(size * width, q.dtype)
    row_do, panel_do = np.empty(size * width_v, q.dtype), np.empty(size * width_v, q.dtype)
    row_dq = np.empty(size * max(width, width_v), q.dtype)  # holds o before
    row_lse, row_delta = np.empty(size, q.dtype), np.empty(size, q.dtype)
    tile_k, tile_v = np.empty((TILE_KV + BLOCK) * width, q.dtype), np.empty((TILE_KV + BLOCK) * width_v, q.dtype)
    tile_dk, tile_dv = np.empty((TILE_KV + BLOCK) * width, q.dtype), np.empty((TILE_KV + BLOCK) * width_v, q.dtype)
    s, ds = np.empty((TILE_KV + BLOCK) * pitch, q.dtype), np.empty((TILE_KV + BLOCK) * pitch, q.dtype)
    lo, hi, kept = np.empty(lanes, q.dtype), np.empty(lanes, q.dtype), np.empty((TILE_KV + BLOCK) * lanes, q.dtype)
    own = (row_q, panel_q, row_dq, row_do, panel_do, row_lse, row_delta), (tile_k, tile_v, tile_dk, tile_dv, s, ds, lo, hi, kept)
    given = do, q, k, v, o, lse, dlse, units, begin, end, random, dq, dk, dv
    do, q, k, v, o, lse, dlse, units, begin, end, random, dq, dk, dv = borrow(given)
    of_rows, of_tile = borrow(own)
    for i in range(units.shape[0]):
        pack_unit(do, q, o, lse, dlse, units[i], group, of_rows)
        add_keys(q, k, v, units[i], group, begin, end, random, factor, cap, scale, of_rows, of_tile, dk, dv)
        put_unit(of_rows[2], width, scale, dq, units[i], group)
    keep(own)
    keep(given)


@njit
def pack_unit(do, q, o, lse, dlse, unit, group, of_rows):
    """Packs the rows of a unit, with delta, and sets their gradients to 0."""
    row_q, panel_q, row_dq, row_do, panel_do, row_lse, row_delta = of_rows
    lanes = lanes_of(q)
    panels = (unit[QUERIES] * group + lanes - 1) // lanes
    width, width_v = (q.shape[3] + lanes - 1) // lanes * lanes, (o.shape[3] + lanes - 1) // lanes * lanes
    pack_statistics(lse, dlse, unit, group, panels, row_lse, row_delta)
    pack(o, unit, group, width_v, row_do, row_dq)
    pack(do, unit, group, width_v, row_do, panel_do)
    pack(q, unit, group, width, row_q, panel_q)
    add_dots(row_dq, panel_do, panels, o.shape[3], width_v, row_delta)
    clear(row_dq, 0, panels * lanes * width)


@njit
def add_keys(q, k, v, unit, group, begin, end, random, factor, cap, scale, of_rows, of_tile, dk, dv):
    """Adds what the keys of a unit give to the gradients of its rows, and writes theirs."""
    tile_k, tile_v, tile_dk, tile_dv = of_tile[:4]
    lanes, kv_head, page = lanes_of(q), unit[KV_HEAD], unit[PAGE]
    panels = (unit[QUERIES] * group + lanes - 1) // lanes
    width, width_v = (q.shape[3] + lanes - 1) // lanes * lanes, (v.shape[3] + lanes - 1) // lanes * lanes
    for first in range(0, unit[KEYS], TILE_KV):
        keys, key = min(TILE_KV, unit[KEYS] - first), unit[KEY] + first
        for j in range(keys):
            copy_row(k, place(k, page, key + j, kv_head), k.shape[3], tile_k, j * width)
            copy_row(v, place(v, page, key + j, kv_head), v.shape[3], tile_v, j * width_v)
        clear(tile_dk, 0, (keys + BLOCK) * width)
        clear(tile_dv, 0, (keys + BLOCK) * width_v)
        for panel in range(0, panels, GROUP):
            add_panels(q, v, unit, group, begin, end, random, factor, cap, first, keys, panel, of_rows, of_tile)
        for j in range(keys):
            put_row(tile_dk, j * width, scale, dk, place(dk, page, key + j, kv_head))
            put_row(tile_dv, j * width_v, 1.0, dv, place(dv, page, key + j, kv_head))


@njit
def put_unit(rows, width, scale, x, unit, group):
    """Writes the rows of a unit, times scale, to x, and 0 to those beside them."""
    first, last = unit[ROW], unit[ROW] + unit[QUERIES]
    for query in range(first - unit[BEFORE], last + unit[BEHIND]):
        for head in range(group):
            address = place(x, unit[BATCH], query, unit[KV_HEAD] * group + head)
            if first <= query < last:
                put_row(rows, ((query - first) * group + head) * width, scale, x, address)
            else:
                for i in range(x.shape[3]):
                    write(x, address, i, 0.0)


@njit
def add_panels(q, v, unit, group, begin, end, random, factor, cap, first, keys, start, of_rows, of_tile):
    """Adds what a tile's keys and GROUP panels of rows, from ``start`` on, give each other: to row_dq, tile_dk and tile_dv."""
    row_q, panel_q, row_dq, row_do, panel_do, row_lse, row_delta = of_rows
    tile_k, tile_v, tile_dk, tile_dv, s, ds, lo, hi, kept = of_tile
    lanes, head_dim, head_dim_v = lanes_of(q), q.shape[3], v.shape[3]
    pitch, panels = GROUP * lanes, (unit[QUERIES] * group + lanes - 1) // lanes
    width, width_v = (head_dim + lanes - 1) // lanes * lanes, (head_dim_v + lanes - 1) // lanes * lanes
    active, low, high = 0, keys + BLOCK, 0  # panels from the first on that s and ds are made of, and their keys
    for panel in range(start, min(start + GROUP, panels)):
        least, most, _ = find_bounds(unit, group, begin, end, first, keys, panel, lo, hi)
        if least < most:
            active, low, high = panel - start + 1, min(low, least), max(high, most)
    for panel in range(start, start + active):
        least, most, every = find_bounds(unit, group, begin, end, first, keys, panel, lo, hi)
        column, until = (panel - start) * lanes, min(most, keys)
        clear_panel(s, ds, low, least, column, pitch)
        clear_panel(s, ds, max(low, most), high, column, pitch)
        if least == most:
            continue
        dots(tile_k, least, most, width, panel_q, panel * width * lanes, head_dim, factor, s, column, pitch)
        dots(tile_v, least, most, width_v, panel_do, panel * width_v * lanes, head_dim_v, 1.0, ds, column, pitch)
        find_kept(kept, first, until, panel, group, unit, random)
        drop(ds, least, until, column, pitch, kept, random)
        differentiate(s, ds, least, until, column, pitch, row_lse, row_delta, panel, cap, not every, lo, hi)
        drop(s, least, until, column, pitch, kept, random)
    for i in range(0, width_v * (active > 0), lanes):
        at, to = start * lanes * width_v + i, low * width_v + i
        accumulate(s, low * pitch, pitch, 1, row_do, at, width_v, active * lanes, tile_dv, to, width_v, high - low)
    for i in range(0, width * (active > 0), lanes):
        at, to = start * lanes * width + i, low * width + i
        accumulate(ds, low * pitch, pitch, 1, row_q, at, width, active * lanes, tile_dk, to, width, high - low)
        accumulate(ds, low * pitch, 1, pitch, tile_k, to, width, min(high, keys) - low, row_dq, at, width, active * lanes)


def compile(name: str, number: str, storage: str, folder: pathlib.Path | None) -> Any:
    """``attend`` for k and v of the NumPy dtype ``storage``, computed in ``number``, or ``backward`` in ``number``: some five
    seconds, or read from ``folder``.

    The folder must be for nothing else: Numba's entries have one index, which processes that compile different things overwrite
    for each other.
    """
    saved = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = "" if folder is None else str(folder)
    try:
        loops = njit(nogil=True, cache=folder is not None)({"attend": attend, "backward": backward}[name])
    finally:
        numba.config.CACHE_DIR = saved
    x = getattr(types, number)
    row, bounds, units, pages = (
        types.Array(*each, "C", readonly=True, aligned=False)
        for each in ((x, 1), (types.int64, 1), (types.int64, 2), (types.int32, 1))
    )
    given = {i: types.Array(x, i, "A", readonly=True, aligned=False) for i in (3, 4)}  # what any array may be passed as
    made = {i: types.Array(x, i, "A", aligned=False) for i in (3, 4)}
    if name == "attend":
        kv = types.Array(getattr(types, storage), 4, "A", readonly=True, aligned=False)
        inputs = (given[4], kv, kv, pages, units, bounds, bounds, row, bounds, x, x, types.intp, row)
        loops.compile((*inputs, made[4], made[3]))
    else:
        inputs = (*[given[4]] * 5, given[3], given[3], units, bounds, bounds, bounds)
        loops.compile((*inputs, x, x, x, *[made[4]] * 3))
    loops.disable_compile()
    return loops

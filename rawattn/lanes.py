"""The loops of the CPU path: attention for a tile of rows, in Numba, on vectors of lanes.

``Lanes`` is a Numba type of our own: a vector of 64 bytes, which LLVM lays on whatever vector registers the machine has. Each
lane is a row of q, so nothing is reduced across lanes, and a row's result does not depend on its neighbours. The products
broadcast numbers of k or v against vectors of lanes, ``BLOCK`` sums at a time in registers: the register tile of BLIS (Van Zee
and van de Geijn, ACM TOMS 41(3), 2015).

Numba is imported here, so only ``cpu.py`` imports this file, and only for a call.
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

_WIDE = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
BYTES = 128 if _WIDE else 64  # of a vector: two registers of AVX or AVX-512, four of NEON
BLOCK = 8 if _WIDE else 6  # vectors of sums that a product keeps in registers: 16 of 32, 12 of the 16 that AVX has, 24 of 32
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
def cell(typing, array, page, row, column):
    """array[page, row, column], where LLVM knows that rows are contiguous, and vectorises."""

    def emit(context, builder, signature, args):
        view = context.make_array(array)(context, builder, args[0])
        steps = [builder.mul(builder.extract_value(view.strides, i), args[1 + i]) for i in range(2)]
        offset = builder.add(*steps)
        start = builder.inttoptr(builder.add(builder.ptrtoint(view.data, offset.type), offset), view.data.type)
        return builder.load(builder.gep(start, [args[3]]), align=1)

    return array.dtype(array, types.intp, types.intp, types.intp), emit


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


@intrinsic
def call(typing, address, array):
    """Calls the function at an address with a pointer to an array of integers."""

    def emit(context, builder, signature, args):
        data = context.make_array(signature.args[1])(context, builder, args[1]).data
        kind = ir.FunctionType(ir.VoidType(), [data.type])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [data])
        return context.get_dummy_value()

    return types.void(types.int64, array), emit


@njit
def fetch(k, v, pages, first, begin, keys, table, tile_k, tile_v, width):
    """Brings the keys first + begin and on to tile_k (key, head_dim), and values to tile_v (key, width), up to first + keys;
    whether the values are finite. Keys before these are only in the first tile, which is zeros there, as it was made."""
    finite, head_dim, page_size = True, k.shape[2], k.shape[1]
    at, row = (first + begin) // page_size, (first + begin) % page_size
    for j in range(begin, keys):
        page = pages[at]
        for i in range(head_dim):
            tile_k[j * head_dim + i] = widen(cell(k, page, row, i), table)
        for i in range(v.shape[2]):
            x = widen(cell(v, page, row, i), table)
            tile_v[j * width + i] = x
            finite &= x - x == 0
        row += 1
        if row == page_size:
            at, row = at + 1, 0
    return finite


@njit
def dots(tile, width, keys, panels, panel, depth, scale, s, column, pitch):
    """Writes scale times the dot products of the rows of a tile, which are width apart, and of a panel: s[key pitch + column]."""
    lanes = BYTES // s.itemsize
    for j in range(0, keys, BLOCK):
        for i in range(0, depth, CHUNK):
            sums = product(tile, j * width + i, width, 1, panels, (panel * depth + i) * lanes, lanes, min(CHUNK, depth - i))
            for r in range(BLOCK):
                at = (j + r) * pitch + column
                x = sums[r] * fill(sums[r], scale)
                store(s, at, x if i == 0 else load(s, at) + x)


@njit
def logits(tile_k, keys, panel_q, panel, head_dim, scale, cap, s):
    """Writes the logits of a panel: s (key, lane)."""
    lanes = BYTES // s.itemsize
    dots(tile_k, head_dim, keys, panel_q, panel, head_dim, scale, s, 0, lanes)
    if cap != 0:
        for j in range(keys):
            x = load(s, j * lanes)
            store(s, j * lanes, fill(x, cap) * tanh(x))


@njit
def mark(s, keys, kept):
    """Writes which weights of a panel count, before they are made of the logits s."""
    for i in range(keys * BYTES // s.itemsize):
        kept[i] = s[i] != -np.inf


@njit
def hide(s, keys, begin, end, first, panel, lo, hi):
    """Writes -inf to s for the keys that rows of a panel do not keep: those before lo and from hi on, in each lane."""
    lanes = BYTES // s.itemsize
    for lane in range(lanes):
        row = panel * lanes + lane
        lo[lane], hi[lane] = (begin[row] - first, end[row] - first) if row < begin.size else (0, 0)
    for j in range(keys):
        x = load(s, j * lanes)
        store(s, j * lanes, within(load(lo, 0), load(hi, 0), fill(x, j), x, fill(x, -np.inf)))


@njit
def softmax(s, keys, row_max, row_sum, panel):
    """Turns the logits s to exponentials below the new maximum; gives the factor by which earlier sums shrink."""
    lanes = BYTES // s.itemsize
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
    lanes = BYTES // s.itemsize
    for i in range(0, width, BLOCK):
        sums = product(tile_v, i, 1, width, s, 0, lanes, keys)
        for r in range(BLOCK):
            at = (panel * width + i + r) * lanes
            store(panel_o, at, load(panel_o, at) * shrink + sums[r])


@njit
def gather_kept(s, keys, tile_v, width, shrink, panel_o, panel, lo, hi):
    """``gather`` where some value is inf or NaN, and 0 times it must not count."""
    lanes = BYTES // s.itemsize
    for i in range(width):
        total = fill(shrink, 0.0)
        for j in range(keys):
            x = load(s, j * lanes) * spread(tile_v, j * width + i)
            total += within(load(lo, 0), load(hi, 0), fill(x, j), x, fill(x, 0.0))
        at = (panel * width + i) * lanes
        store(panel_o, at, load(panel_o, at) * shrink + total)


@njit
def gather_where(s, keys, tile_v, width, shrink, panel_o, panel, counted):
    """The same, where ``counted`` is 0 for weights that do not count."""
    lanes = BYTES // s.itemsize
    for i in range(width):
        total = fill(shrink, 0.0)
        for j in range(keys):
            x = load(s, j * lanes) * spread(tile_v, j * width + i)
            total += less(fill(x, 0.0), load(counted, j * lanes), x, fill(x, 0.0))
        at = (panel * width + i) * lanes
        store(panel_o, at, load(panel_o, at) * shrink + total)


@njit
def ask(function, context, s, slopes, pitch, column, keys, first, row, is_cut):
    """Has a function make logits of the dot products of a panel: see lanes_function.py."""
    context[0], context[1], context[2], context[3] = s.ctypes.data, slopes.ctypes.data, pitch, column
    context[4], context[5], context[6], context[7] = keys, first, row, is_cut
    call(function, context)


LOW = np.uint64(0xFFFFFFFF)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
WORD = np.uint64(32)


@njit
def philox(a, b, c, d, low, high):
    """The four words of a counter by a key, as ``variant.weight.philox``."""
    for _ in range(10):
        x, y = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (y >> WORD) ^ b ^ low, y & LOW, (x >> WORD) ^ d ^ high, x & LOW
        low, high = (low + STEPS[0]) & LOW, (high + STEPS[1]) & LOW
    return a, b, c, d


@njit
def find_kept(kept, first, keys, panel, places, random):
    """Writes 1 where the weight of a key from ``first`` on and of a row of a panel is kept, else 0, (key, lane), as
    ``variant.weight.Dropout.kept`` says. ``places`` has the positions of all rows, and their heads; ``random`` the threshold, 0
    for no dropout, the seed, the sequence's number and the position of key 0."""
    threshold, seed, batch, kv_offset = random
    lanes = BYTES // kept.itemsize
    low, high = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    start = first + kv_offset
    for lane in range(lanes if threshold > 0 else 0):
        q, head = places[0, panel * lanes + lane], places[1, panel * lanes + lane]
        half = np.uint64(q // 8 % 2 * 16 + 1)
        for group in range(start // 16 * 4, (start + keys + 15) // 16 * 4):
            words = philox(np.uint64(q // 16 * 8 + q % 8), np.uint64(group), np.uint64(head), np.uint64(batch), low, high)
            for i in range(4):
                j = group // 4 * 16 + group % 4 * 2 + i // 2 + i % 2 * 8 - start
                if 0 <= j < keys:
                    kept[j * lanes + lane] = np.int64((words[i] >> half) & np.uint64(0x7FFF)) >= threshold


@njit
def drop(x, keys, column, pitch, kept, random):
    """Makes x[key pitch + column] 0 where it is dropped, whatever it is, and rescales what is kept."""
    lanes, factor = BYTES // x.itemsize, 32768 / (32768 - random[0])
    for j in range(keys if random[0] > 0 else 0):
        at = j * pitch + column
        y = load(x, at)
        store(x, at, less(fill(y, 0.5), load(kept, j * lanes), y * fill(y, factor), fill(y, 0.0)))


@njit
def finish(row_max, row_sum, sinks, begin, end, panel_o, width, o, lse):
    """Writes o and lse of sums and their references."""
    lanes = BYTES // o.itemsize
    for row in range(o.shape[0]):
        total, largest, weight = row_sum[row], row_max[row], o.dtype.type(1)
        if sinks[row] != -np.inf:  # the sums move to the larger of the two maxima
            largest = max(row_max[row], sinks[row])
            weight = o.dtype.type(0 if row_max[row] == -np.inf else math.exp(row_max[row] - largest))
            total = total * weight + (1 if sinks[row] == largest else math.exp(sinks[row] - largest))
        lse[row] = -np.inf if total == 0 else largest + math.log(total)
        for i in range(o.shape[1]):
            x = panel_o[(row // lanes * width + i) * lanes + row % lanes]
            o[row, i] = 0 if total == 0 or begin[row] >= end[row] else x * weight / total


@njit
def pack_rows(q, begin, end, panels, kv_len):
    """The rows of q as panels, (panel, head_dim, lane); which keys a row of each panel keeps, which all its rows do, and which
    any row does."""
    (rows, head_dim), lanes = q.shape, BYTES // q.itemsize
    panel_q = np.zeros(panels * head_dim * lanes, q.dtype)
    some_begin, some_end = np.full(panels, kv_len, np.int64), np.zeros(panels, np.int64)
    every_begin, every_end = np.zeros(panels, np.int64), np.full(panels, kv_len, np.int64)
    lowest, highest = kv_len, 0
    for row in range(rows):
        panel, lane = row // lanes, row % lanes
        panel_q[panel * head_dim * lanes + lane : (panel + 1) * head_dim * lanes : lanes] = q[row]
        if begin[row] < end[row]:
            some_begin[panel], some_end[panel] = min(some_begin[panel], begin[row]), max(some_end[panel], end[row])
            lowest, highest = min(lowest, begin[row]), max(highest, end[row])
        every_begin[panel], every_end[panel] = max(every_begin[panel], begin[row]), min(every_end[panel], end[row])
    return panel_q, some_begin, some_end, every_begin, every_end, lowest, highest


def attend(
    q, k, v, pages, begin, end, sinks, places, random, scale, cap, tile_kv, table, function, context, classes, o, lse
):  # fmt: skip
    """Attention of the rows of q to the keys begin[row] to end[row] of one sequence and head: writes o and lse.

    q (rows, head_dim), o (rows, head_dim_v), sinks (rows) and lse (rows) are contiguous, in the format that is computed with; k
    (pages, page_size, head_dim) and v (pages, page_size, head_dim_v) have contiguous rows. Key j is row j % page_size of the page
    pages[j // page_size]; keys before the first and behind the last that a row keeps are not read. The logit is scale * q.k where
    cap is 0, else cap * tanh(scale * q.k). A sink of -inf is none. ``places`` and ``random`` are those of ``find_kept``.

    Where ``function`` is not 0, it is the address of one which makes logits of these: -inf for pairs that do not count;
    ``context`` is its own, and classes (panels, tiles) is 0 where none counts, 2 where all do, and 1 elsewhere.
    """
    rows, head_dim = q.shape
    kv_len, head_dim_v = pages.size * v.shape[1], v.shape[2]
    lanes = BYTES // q.itemsize
    panels = (rows + lanes - 1) // lanes  # a panel is one vector of rows
    width = (head_dim_v + BLOCK - 1) // BLOCK * BLOCK

    panel_o = np.zeros(panels * width * lanes, q.dtype)
    tile_k, tile_v = np.zeros((tile_kv + BLOCK) * head_dim, q.dtype), np.zeros(tile_kv * width, q.dtype)
    s = np.zeros((tile_kv + BLOCK) * lanes, q.dtype)
    row_max, row_sum = np.full(panels * lanes, -np.inf, q.dtype), np.zeros(panels * lanes, q.dtype)
    lo, hi = np.zeros(lanes, q.dtype), np.zeros(lanes, q.dtype)
    counted, kept = np.zeros(s.size, q.dtype), np.zeros(s.size, q.dtype)
    origin = context[5]
    panel_q, some_begin, some_end, every_begin, every_end, lowest, highest = pack_rows(q, begin, end, panels, kv_len)

    for first in range(lowest // tile_kv * tile_kv, highest, tile_kv):
        keys = min(tile_kv, highest - first)
        if function != 0 and not classes[:, first // tile_kv].any():
            continue
        finite = fetch(k, v, pages, first, max(0, lowest - first), keys, table, tile_k, tile_v, width)
        for panel in range(panels):
            if some_begin[panel] >= first + keys or some_end[panel] <= first:
                continue
            kind = classes[panel, first // tile_kv] if function != 0 else 2
            if kind == 0:
                continue
            logits(tile_k, keys, panel_q, panel, head_dim, scale, cap, s)
            if function != 0:
                ask(function, context, s, s, lanes, 0, keys, origin + first, panel * lanes, kind == 1)
            masked = every_begin[panel] > first or every_end[panel] < first + keys
            if masked:
                hide(s, keys, begin, end, first, panel, lo, hi)
            if function != 0 and not finite:
                mark(s, keys, counted)
            shrink = softmax(s, keys, row_max, row_sum, panel)
            find_kept(kept, first, keys, panel, places, random)
            drop(s, keys, 0, lanes, kept, random)
            if function != 0 and not finite:
                gather_where(s, keys, tile_v, width, shrink, panel_o, panel, counted)
            elif masked and not finite:
                gather_kept(s, keys, tile_v, width, shrink, panel_o, panel, lo, hi)
            else:
                gather(s, keys, tile_v, width, shrink, panel_o, panel)
    finish(row_max, row_sum, sinks, begin, end, panel_o, width, o, lse)


@njit
def accumulate(a, first, row, column, b, start, step, depth, out, at, pitch, count):
    """Adds the products of count rows of a to the vectors at out[at + r pitch]."""
    for i in range(0, count, BLOCK):
        sums = product(a, first + i * row, row, column, b, start, step, depth)
        for r in range(BLOCK):
            place = at + (i + r) * pitch
            store(out, place, load(out, place) + sums[r])


@njit
def differentiate(s, ds, keys, column, pitch, lse, delta, panel, cap, masked, lo, hi):
    """Turns dot products s to probabilities, and the gradients ds of these to those of the dot products, for one panel."""
    lanes = BYTES // s.itemsize
    row_lse, row_delta = load(lse, panel * lanes), load(delta, panel * lanes)
    for j in range(keys):
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
def pack(x, panels, width):
    """The rows of x, query by query and head by head, twice: as panels (panel, column, lane), and as rows of this width; zeros
    where x has none."""
    (queries, heads, columns), lanes = x.shape, BYTES // x.itemsize
    across, along = np.zeros(panels * columns * lanes, x.dtype), np.zeros(panels * lanes * width, x.dtype)
    for query in range(queries):
        for head in range(heads):
            row = query * heads + head
            for i in range(columns):
                along[row * width + i] = x[query, head, i]
            for i in range(columns):
                across[(row // lanes * columns + i) * lanes + row % lanes] = along[row * width + i]
    return across, along


@njit
def pack_statistics(lse, delta, size):
    """lse, inf where it is -inf, and delta, (heads, queries), query by query and head by head; inf and 0 past the last."""
    row_lse, row_delta = np.full(size, np.inf, lse.dtype), np.zeros(size, lse.dtype)
    for head in range(lse.shape[0]):
        for query in range(lse.shape[1]):
            row = query * lse.shape[0] + head
            row_delta[row] = delta[head, query]
            if lse[head, query] != -np.inf:
                row_lse[row] = lse[head, query]
    return row_lse, row_delta


@njit
def copy_rows(x, first, keys, tile, width):
    for j in range(keys):
        for i in range(x.shape[1]):
            tile[j * width + i] = x[first + j, i]


@njit
def find_bounds(begin, end, first, keys, panel, lo, hi):
    """Writes which keys of a tile each row of a panel keeps, all for rows past the last; gives whether some row keeps any, and
    whether every row keeps all."""
    some, every = False, True
    for lane in range(lo.size):
        row = panel * lo.size + lane
        lo[lane], hi[lane] = (begin[row] - first, end[row] - first) if row < begin.size else (0, keys)
        some |= row < begin.size and lo[lane] < min(hi[lane], keys) and hi[lane] > 0
        every &= lo[lane] <= 0 and hi[lane] >= keys
    return some, every


@njit
def clear(x):
    for i in range(x.size):
        x[i] = 0


@njit
def clear_panel(s, ds, keys, column, pitch):
    for j in range(keys):
        store(s, j * pitch + column, fill(load(s, 0), 0.0))
        store(ds, j * pitch + column, fill(load(s, 0), 0.0))


@njit
def write_scaled(tile, width, scale, x, first, rows):
    for j in range(rows):
        for i in range(x.shape[1]):
            x[first + j, i] = tile[j * width + i] * scale


def backward(do, q, k, v, lse, delta, begin, end, places, random, factor, cap, scale, dq, dk, dv):
    """Gradients of the rows of q and the keys of k, where a row keeps the keys begin[row] to end[row]: writes dq, dk and dv.

    Arrays are in one format: do (queries, heads, head_dim_v), q and dq (queries, heads, head_dim), k and dk (kv_len, head_dim), v
    and dv (kv_len, head_dim_v), lse and delta (heads, queries); a row is a head of a query, and begin and end have them one after
    the other. Where lse is -inf, a row's probabilities are 0. Where cap is 0, the logit is scale * q.k, and factor is scale; else
    it is cap * tanh(factor * q.k), and factor is scale / cap.
    ``places`` and ``random`` are those of ``find_kept``.

    For a tile of keys and some panels of rows, S and its gradient dS are (key, row). The products S = K Q^T, dP = V dO^T and
    dQ = K^T dS have rows in lanes, as in ``attend``; dV = P dO and dK = dS Q have columns.
    """
    (queries, heads, head_dim), (kv_len, head_dim_v) = q.shape, v.shape
    rows, lanes, pitch = queries * heads, BYTES // q.itemsize, GROUP * (BYTES // q.itemsize)
    panels, block = (rows + lanes - 1) // lanes, (head_dim + BLOCK - 1) // BLOCK * BLOCK
    width, width_v = (head_dim + lanes - 1) // lanes * lanes, (head_dim_v + lanes - 1) // lanes * lanes
    panel_q, row_q = pack(q, panels, width)
    panel_do, row_do = pack(do, panels, width_v)
    panel_dq = np.zeros(panels * block * lanes, q.dtype)
    row_lse, row_delta = pack_statistics(lse, delta, panels * lanes)
    tile_k, tile_v = np.zeros((TILE_KV + BLOCK) * block, q.dtype), np.zeros((TILE_KV + BLOCK) * head_dim_v, q.dtype)
    tile_dk, tile_dv = np.zeros((TILE_KV + BLOCK) * width, q.dtype), np.zeros((TILE_KV + BLOCK) * width_v, q.dtype)
    s, ds = np.zeros((TILE_KV + BLOCK) * pitch, q.dtype), np.zeros((TILE_KV + BLOCK) * pitch, q.dtype)
    lo, hi, kept = np.zeros(lanes, q.dtype), np.zeros(lanes, q.dtype), np.zeros(TILE_KV * lanes, q.dtype)

    for first in range(0, kv_len, TILE_KV):
        keys = min(TILE_KV, kv_len - first)
        copy_rows(k, first, keys, tile_k, block)
        copy_rows(v, first, keys, tile_v, head_dim_v)
        clear(tile_dk)
        clear(tile_dv)
        for group in range(0, panels, GROUP):
            active = 0  # panels from the group's first on that s and ds are made of
            for panel in range(group, min(group + GROUP, panels)):
                some, every = find_bounds(begin, end, first, keys, panel, lo, hi)
                column = (panel - group) * lanes
                if not some:
                    clear_panel(s, ds, keys, column, pitch)
                    continue
                active = panel - group + 1
                dots(tile_k, block, keys, panel_q, panel, head_dim, factor, s, column, pitch)
                dots(tile_v, head_dim_v, keys, panel_do, panel, head_dim_v, 1.0, ds, column, pitch)
                find_kept(kept, first, keys, panel, places, random)
                drop(ds, keys, column, pitch, kept, random)
                differentiate(s, ds, keys, column, pitch, row_lse, row_delta, panel, cap, not every, lo, hi)
                drop(s, keys, column, pitch, kept, random)
                accumulate(tile_k, 0, 1, block, ds, column, pitch, keys, panel_dq, panel * block * lanes, lanes, block)
            for i in range(0, width_v * (active > 0), lanes):
                at = group * lanes * width_v + i
                accumulate(s, 0, pitch, 1, row_do, at, width_v, active * lanes, tile_dv, i, width_v, keys)
            for i in range(0, width * (active > 0), lanes):
                at = group * lanes * width + i
                accumulate(ds, 0, pitch, 1, row_q, at, width, active * lanes, tile_dk, i, width, keys)
        write_scaled(tile_dk, width, scale, dk, first, keys)
        write_scaled(tile_dv, width_v, 1.0, dv, first, keys)

    for row in range(rows):
        for i in range(head_dim):
            dq[row // heads, row % heads, i] = panel_dq[(row // lanes * block + i) * lanes + row % lanes] * scale


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
    row, rows, bounds, places = (types.Array(*each, "C") for each in ((x, 1), (x, 2), (types.int64, 1), (types.int64, 2)))
    if name == "attend":
        kv = types.Array(getattr(types, storage), 3, "A", readonly=True, aligned=False)  # what any array may be passed as
        pages = types.Array(types.int32, 1, "C", readonly=True, aligned=False)
        given = (rows, kv, kv, pages, bounds, bounds, row, places, bounds, x, x, types.intp, row)
        loops.compile((*given, types.int64, bounds, types.Array(types.uint8, 2, "C"), rows, row))
    else:
        given = {i: types.Array(x, i, "A", readonly=True, aligned=False) for i in (2, 3)}
        made = {i: types.Array(x, i, "A", aligned=False) for i in (2, 3)}
        inputs = (given[3], given[3], given[2], given[2], given[2], given[2])
        loops.compile((*inputs, bounds, bounds, places, bounds, x, x, x, made[3], made[2], made[2]))
    loops.disable_compile()
    return loops

"""A function as text in CUDA C: a struct of a mask or a score, as ``cuda_src/variant/interfaces.cuh`` asks for it.

Floats of a mask are float32, each operation rounded by itself: every kernel and the host find the same pairs. Those of a score
are of the kernel's Number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .arithmetic import add, mul
from .canonical import Code
from .classes import by_blocks, strengthen
from .columns import column_bytes, columns, of_queries
from .cuda_lines import Writer
from .cuda_ranges import RangeWriter, pyramids_of
from .diagonals import diagonal
from .expressions import Expr, nodes
from .fields import FieldContent
from .gradients import by_elements, slope
from .interval import interval_of
from .placement import LESS, Lowering, position


class Written(NamedTuple):
    """A struct as text; the fields that it adds to Args, as (name, C++ type, what it holds); over how many of its last axes each
    captured array has a pyramid; the bytes of a mask's columns for each key; the bytes of an element of the one array that is
    read for each pair, or 0; and whether pairs of a diagonal share part of a score."""

    text: str
    fields: tuple[tuple[str, str, FieldContent], ...]
    pyramids: tuple[int, ...]
    column_bytes: int = 0
    ahead_bytes: int = 0
    has_diagonals: bool = False


_HEAD = """\
#pragma once
// A {role} in Python: {code!r}.
{includes}

struct {name}Head : function::Sequence {{
    const Args& args;{head_members}

    __device__ {name}Head(const Args& args, const Rows& rows, const WorkTile& work)
        : function::Sequence(rows, work), args(args) {{{head}
    }}
}};
"""
_MASK_STRUCT = """\
// One query, and keys from `first` on; both are positions.
struct FunctionMaskRow : FunctionMaskHead {{
    i32 q, first, last;{row_members}

    __device__ FunctionMaskRow(const FunctionMaskHead& head, i32 query, i32 key)
        : FunctionMaskHead(head), q(min(query, last_q) + q_offset), first(key + kv_offset), last(last_kv - key) {{{row}
    }}
    __device__ bool keep(i32 offset) const {{{inside}{element}
        return {result} & (offset <= last);
    }}{with_column}
}};
struct FunctionMask : FunctionMaskHead {{
    static constexpr bool cheap = {cheap};{of_blocks}{column_type}

    using FunctionMaskHead::FunctionMaskHead;

    __device__ FunctionMaskRow row(i32 q, i32 first) const {{ return FunctionMaskRow(*this, q, first); }}{of_pairs}
    // 0: no pair of these queries, heads and keys is kept, 2: every one, 1: some, or it cannot tell.
    __device__ i32 classify(function::Range<i32> queries, function::Range<i32> heads, function::Range<i32> keys) const {{
        if (queries.lo > last_q || keys.lo > last_kv) return 0;
        const function::Range<i32> q{{queries.lo + q_offset, min(queries.hi, last_q) + q_offset}};
        const function::Range<i32> kv{{keys.lo + kv_offset, min(keys.hi, last_kv) + kv_offset}};
        function::Range<bool> kept = {{keys.hi <= last_kv, false}};
{classes}
        return kept.hi ? 1 + kept.lo : 0;
    }}
}};
"""
_COLUMN = """\
// What a key is to all queries.
struct FunctionMaskColumn {{{members}
}};
"""
_WITH_COLUMN = """
    // The same in two parts: what it is of the key alone, and whether the query keeps the key, which is there (offset <= last).
    __device__ FunctionMaskColumn column(i32 offset) const {{{inside}{lines}
        return {{{values}}};
    }}
    // Keys from another one on.
    __device__ void move(i32 key) {{
        first = key + kv_offset, last = last_kv - key;{moved}
    }}
    __device__ bool keep(i32 offset, const FunctionMaskColumn& column) const {{{rest_inside}{rest}
        return {result};
    }}"""
_PARTS = """\
// What a query is to all keys, and a key to all queries.
struct FunctionMaskQuery {{{query_members}
}};
struct FunctionMaskKey {{{key_members}
}};
"""
_OF_PAIRS = """
    // The same in three parts, for rows of a tile, of which some may be past the last ones.
    using Query = FunctionMaskQuery;
    using Key = FunctionMaskKey;
    __device__ Query query(i32 row) const {{
        const i32 q = min(row, last_q) + q_offset;{query_lines}
        return {{{query_values}}};
    }}
    __device__ Key key(i32 row) const {{
        const i32 first = min(row, last_kv) + kv_offset;{key_lines}
        return {{{key_values}}};
    }}
    __device__ bool keep(i32 q_row, i32 kv_row, const Query& query, const Key& key) const {{
        const i32 q = q_row + q_offset, first = kv_row + kv_offset;{lines}
        return {result} & (kv_row <= last_kv);
    }}"""
_BY_BLOCKS = "\n    static constexpr bool by_blocks = true;"
_COLUMN_TYPE = "\n    using Column = FunctionMaskColumn;"
_ONE_CLASS = """\
{ranges}
        kept = {{kept.lo && {root}.lo, {root}.hi}};"""
_CLASS_OF_HEADS = """\
#pragma unroll 1
        for (i32 h = heads.lo; h <= heads.hi; ++h) {{
{ranges}
            kept = {{kept.lo && {root}.lo, kept.hi || {root}.hi}};
        }}"""
_SCORE_STRUCT = """\
// One query, and keys from `first` on; both are positions.
struct FunctionScoreRow : FunctionScoreHead {{
    i32 q, first, last;{row_members}

    __device__ FunctionScoreRow(const FunctionScoreHead& head, i32 query, i32 key)
        : FunctionScoreHead(head), q(min(query, last_q + q_offset)), first(key), last(last_kv + kv_offset - key) {{{row}
    }}
    __device__ Number value(Number s, i32 offset) const {{{inside}{element}
        return {result};
    }}{pairs}{diagonal}
    __device__ Number slope(Number s, i32 offset) const {{{inside}{slope_element}
        return {slope};
    }}
}};
// The same keys, as exponents of 2: logits in log2 units, and less in one sum.
struct FunctionScoreExponents : FunctionScoreHead {{
    i32 q, first, last;
    Number less;{exponent_members}

    __device__ FunctionScoreExponents(const FunctionScoreHead& head, i32 query, i32 key, Number less)
        : FunctionScoreHead(head), q(min(query, last_q + q_offset)), first(key), last(last_kv + kv_offset - key),
          less(less) {{{exponent_row}
    }}
    __device__ Number value(Number s, i32 offset) const {{{inside}{exponent_element}
        return {exponent};
    }}{exponent_pairs}{exponent_diagonal}
}};
struct FunctionScore : FunctionScoreHead {{
    static constexpr Number scale_log2 = Number(1.4426950408889634);

    using FunctionScoreHead::FunctionScoreHead;

    __device__ FunctionScoreRow row(i32 q, i32 first) const {{ return FunctionScoreRow(*this, q, first); }}
    __device__ FunctionScoreExponents exponents(i32 q, i32 first, Number less) const {{
        return FunctionScoreExponents(*this, q, first, less);
    }}
    __device__ Number operator()(Number s, i32 q, i32 kv) const {{ return row(q, kv).value(s, 0); }}
    __device__ Number derivative(Number s, i32 q, i32 kv) const {{ return row(q, kv).slope(s, 0); }}
}};
"""
_DIAGONAL = """
    // What all pairs of a diagonal share, from one whose query and key are there if any pair's are.
    __device__ Number diagonal(i32 offset) const {{{inside}{lines}
        return {value};
    }}"""
_ON_DIAGONAL = """
    // The same value of a pair, with what its diagonal shares.
    __device__ Number value_on(Number s, i32 offset, Number diagonal) const {{{inside}{lines}
        return {result};
    }}"""
_GRADIENT_STRUCT = """\
// One query, and keys from `first` on; both are positions.
struct FunctionGradientRow : FunctionGradientHead {{
    i32 q, first, last;{row_members}

    __device__ FunctionGradientRow(const FunctionGradientHead& head, i32 query, i32 key)
        : FunctionGradientHead(head), q(min(query, last_q + q_offset)), first(key), last(last_kv + kv_offset - key) {{{row}
    }}
    __device__ Number value(Number s, i32 offset) const {{{inside}{value_lines}
        return {value};
    }}
    __device__ i64 element(Number s, i32 offset) const {{{element_inside}{element_lines}
        return {element};
    }}
}};
struct FunctionGradient : FunctionGradientHead {{
    using FunctionGradientHead::FunctionGradientHead;

    __device__ FunctionGradientRow row(i32 q, i32 first) const {{ return FunctionGradientRow(*this, q, first); }}
}};
"""
_BOUNDS_STRUCT = """\
struct FunctionBounds : FunctionBoundsHead {{
    using FunctionBoundsHead::FunctionBoundsHead;

    // The keys that a query keeps, by their numbers in the sequence.
    __device__ KeptKeys of(i32 query) const {{
        const i32 q = query + q_offset;{lines}
        if (!({keeps})) return {{0, 0}};
        return {{max({first}, kv_offset) - kv_offset, min({last}, last_kv + kv_offset) + 1 - kv_offset}};
    }}
}};
"""
_INCLUDES = (
    "function/sequence.cuh",
    "function/integer.cuh",
    "function/number.cuh",
    "function/element.cuh",
    "variant/work_tile.cuh",
)


def _include(*paths: str) -> str:
    return "\n".join(f'#include "{path}"' for path in paths)


@functools.lru_cache(maxsize=256)
def write(code: Code, checked: tuple[tuple[int, int], ...], q_below: bool = False) -> Written:
    """The struct of a mask or a score. ``checked``: number of an element among the code's nodes, and axis, of each index that is
    brought into its array. ``q_below``: whether q may be below 0."""
    order = nodes(code.root)
    return (_write_mask if code.role == "mask" else _write_score)(code, {(order[i], axis) for i, axis in checked}, q_below)


def _sort(fields: dict[str, tuple[str, FieldContent]]) -> tuple[tuple[str, str, FieldContent], ...]:
    """The fields, the widest first, so that struct Args has no gaps."""
    narrow = {"i32", "float", "Number"}
    return tuple(sorted(((name, ctype, what) for name, (ctype, what) in fields.items()), key=lambda x: (x[1] in narrow, x[0])))


def _declare(lines: Sequence[tuple[str, str, str]]) -> str:
    used = any("inside" in text.replace("function::inside", "") for _, _, text in lines)
    return "\n        const i32 inside = min(offset, last);" if used else ""


def _write_mask(code: Code, checked: set[tuple[Expr, int]], q_below: bool) -> Written:
    w = Writer(code, "float", q_below=q_below)
    result = w.add(*position(code.root, checked))
    element, pyramids = w.lines["element"], pyramids_of(code)
    ranges = RangeWriter(w, dict(enumerate(pyramids)))
    root = ranges.add(strengthen(code))
    of_heads = "h" in code.root.deps
    lines = "\n".join(f"{' ' * (12 if of_heads else 8)}{line}" for line in ranges.lines)
    column, with_column, column_bytes = _write_columns(code.root, checked, w)
    parts, of_pairs = ("", "") if _is_cheap(element) else _write_pairs(code.root, checked, w)
    of_boxes = (_CLASS_OF_HEADS if of_heads else _ONE_CLASS).format(ranges=lines, root=root)
    head = _HEAD.format(
        role="mask", code=code, name="FunctionMask", head_members=w.members("head"), head=w.assign("head"),
        includes=_include(*_INCLUDES, "function/pyramid.cuh"),
    )  # fmt: skip
    body = _MASK_STRUCT.format(
        with_column=with_column, of_pairs=of_pairs, column_type=_COLUMN_TYPE if column else "",
        of_blocks=_BY_BLOCKS if by_blocks(code) else "", row_members=w.members("row"),
        row=w.assign("row"), inside=_declare(element), element=w.body(), result=result,
        cheap=str(_is_cheap(element)).lower(), classes=of_boxes,
    )  # fmt: skip
    return Written(head + column + parts + body, _sort(w.fields), pyramids, column_bytes=column_bytes)


def _is_cheap(element: Sequence[tuple[str, str, str]]) -> bool:
    """Says whether the lines of an element are a few instructions without loads."""
    texts = [text.replace("function::within", "") for _, _, text in element]
    return len(texts) <= 8 and not any("function::" in text or " / " in text for text in texts)


def _write_columns(root: Expr, checked: set[tuple[Expr, int]], whole: Writer) -> tuple[str, str, int]:
    """The struct of a mask's columns, the members of a row that make and use them, and the struct's bytes; nothing where there
    are none, or where what is left of an element is not cheap."""
    placed, moved = position(root, checked)
    values_of_keys = columns(placed, whole.place)
    if not values_of_keys:
        return "", "", 0
    columns_writer, rest = whole.inner("c"), whole.inner("k")
    values = [columns_writer.add(x, moved) for x in values_of_keys]
    kinds = ["i32" if x.type == "bool" else whole.ctype(x.type) for x in values_of_keys]
    for i, x in enumerate(values_of_keys):
        rest.name(x, f"(column.of_{i} != 0)" if x.type == "bool" else f"column.of_{i}")
    result = rest.add(placed, moved)
    if not _is_cheap(rest.lines["element"]):
        return "", "", 0
    with_column = _WITH_COLUMN.format(
        inside=_declare(columns_writer.lines["element"]), lines=columns_writer.body(), values=", ".join(values),
        rest_inside=_declare(rest.lines["element"]), rest=rest.body(), result=result, moved=whole.assign("row", after="first"),
    )  # fmt: skip
    members = "".join(f"\n    {kind} of_{i};" for i, kind in enumerate(kinds))
    return _COLUMN.format(members=members), with_column, column_bytes(values_of_keys)


def _write_pairs(root: Expr, checked: set[tuple[Expr, int]], whole: Writer) -> tuple[str, str]:
    """The structs of what a mask makes of a query alone and of a key alone, and its members that make and use them; nothing
    where neither takes more than a few instructions, or what is left of a pair is not cheap."""
    placed, moved = position(root, checked)
    queries, keys = of_queries(placed, whole.place), columns(placed, whole.place)
    if not queries and not keys:
        return "", ""
    writers, members, values = [whole.of_pairs(prefix) for prefix in "uyz"], [], []
    for writer, name, values_of_side in zip(writers, ("query", "key"), (queries, keys), strict=False):
        values.append(", ".join([writer.add(x, moved) for x in values_of_side]))
        kinds = ["i32" if x.type == "bool" else whole.ctype(x.type) for x in values_of_side]
        members.append("".join(f"\n    {kind} of_{i};" for i, kind in enumerate(kinds)))
        for i, x in enumerate(values_of_side):
            writers[2].name(x, f"({name}.of_{i} != 0)" if x.type == "bool" else f"{name}.of_{i}")
    result = writers[2].add(placed, moved)
    if not _is_cheap([*writers[2].lines["row"], *writers[2].lines["element"]]):
        return "", ""
    bodies = [writer.whole_body() for writer in writers]
    return _PARTS.format(query_members=members[0], key_members=members[1]), _OF_PAIRS.format(
        query_lines=bodies[0], query_values=values[0], key_lines=bodies[1], key_values=values[1], lines=bodies[2], result=result
    )


def _write_score(code: Code, checked: set[tuple[Expr, int]], q_below: bool) -> Written:
    value = Writer(code, "Number", q_below=q_below)
    lowering = Lowering(value.place)
    root, moved = position(code.root, checked)
    logit = lowering(root, moved)
    result = value.add(*logit)
    derivative = Writer(code, "Number", "d", value.fields, q_below)
    slope_result = derivative.add(*lowering(*position(slope(code.root), checked)))
    exponents = Writer(code, "Number", "e", value.fields, q_below)
    power = lowering(add(mul(root, 1 / math.log(2)), LESS), moved)
    exponent = exponents.add(*power)
    shared = diagonal(value.place, logit[0], power[0])
    on_diagonal, exponent_diagonal = _write_diagonal(value, shared, *logit), _write_on_diagonal(exponents, shared, *power)
    parts = (value, derivative, exponents)
    head = _HEAD.format(
        role="score", code=code, name="FunctionScore", includes=_include(*_INCLUDES),
        head_members="".join(w.members("head") for w in parts), head="".join(w.assign("head") for w in parts),
    )  # fmt: skip
    body = _SCORE_STRUCT.format(
        row_members="".join(w.members("row") for w in parts[:2]), row="".join(w.assign("row") for w in parts[:2]),
        inside=_declare([line for w in parts for line in w.lines["element"]]), element=value.body(), result=result,
        slope_element=derivative.body(), slope=slope_result, exponent_members=exponents.members("row"),
        exponent_row=exponents.assign("row"), exponent_element=exponents.body(), exponent=exponent,
        pairs=value.pairs(result), exponent_pairs=exponents.pairs(exponent), diagonal=on_diagonal,
        exponent_diagonal=exponent_diagonal,
    )  # fmt: skip
    fields, pyramids = _sort(value.fields), (0,) * len(code.arrays)
    return Written(head + body, fields, pyramids, ahead_bytes=value.ahead_bytes, has_diagonals=shared is not None)


def _write_diagonal(whole: Writer, x: Expr | None, root: Expr, checked: set[tuple[Expr, int]]) -> str:
    """The members of a row that make what a diagonal shares, and values with it; nothing where it shares nothing."""
    if x is None:
        return ""
    writer = whole.inner("g")
    value = writer.add(x, checked)
    text = _DIAGONAL.format(inside=_declare(writer.lines["element"]), lines=writer.body(), value=value)
    return text + _write_on_diagonal(whole, x, root, checked)


def _write_on_diagonal(whole: Writer, x: Expr | None, root: Expr, checked: set[tuple[Expr, int]]) -> str:
    if x is None:
        return ""
    rest = whole.inner("k")
    rest.name(x, "diagonal")
    result = rest.add(root, checked)
    return _ON_DIAGONAL.format(inside=_declare(rest.lines["element"]), lines=rest.body(), result=result)


@functools.lru_cache(maxsize=256)
def bounds(code: Code, checked: tuple[tuple[int, int], ...], q_below: bool = False) -> Written:
    """The struct that says which keys a query keeps, of a mask for which they are an interval. ``checked`` and ``q_below`` are as
    of ``write``."""
    interval, order = interval_of(code), nodes(code.root)
    assert interval is not None
    inside = {(order[i], axis) for i, axis in checked}
    whole = Writer(code, "float", q_below=q_below)
    writer = whole.of_pairs("u")
    first, last, keeps = (
        text if x is None else writer.add(x, inside)
        for x, text in ((interval.first, "kv_offset"), (interval.last, "last_kv + kv_offset"), (interval.keeps, ""))
    )
    head = _HEAD.format(
        role="mask, as bounds of its keys", code=code, name="FunctionBounds", head_members=whole.members("head"),
        head=whole.assign("head"), includes=_include(*_INCLUDES, "tile/range.cuh"),
    )  # fmt: skip
    body = _BOUNDS_STRUCT.format(lines=writer.whole_body(), first=first, last=last, keeps=keeps)
    return Written(head + body, _sort(writer.fields), (0,) * len(code.arrays))


@functools.lru_cache(maxsize=256)
def gradient(code: Code, checked: tuple[tuple[int, int], ...], node: int) -> Written:
    """The struct of a score's derivative by the element whose number among the nodes is ``node``: its value, and the element's
    number in its array. Fields that the score has, too, have the same names."""
    order = nodes(code.root)
    inside = {(order[i], axis) for i, axis in checked}
    derivative = next(read.derivative for read in by_elements(code) if read.node == node)
    value = Writer(code, "Number", fields={name: (ctype, what) for name, ctype, what in write(code, checked).fields})
    lowering = Lowering(value.place)
    result = value.add(*lowering(*position(derivative, inside)))
    writer = Writer(code, "Number", prefix="e", fields=value.fields)
    element = writer.number_of(*Lowering(writer.place)(*position(order[node], inside)))
    head = _HEAD.format(
        role="score, by an element that it reads,", code=code, name="FunctionGradient", includes=_include(*_INCLUDES),
        head_members="".join(w.members("head") for w in (value, writer)), head="".join(w.assign("head") for w in (value, writer)),
    )  # fmt: skip
    body = _GRADIENT_STRUCT.format(
        row_members="".join(w.members("row") for w in (value, writer)), row="".join(w.assign("row") for w in (value, writer)),
        inside=_declare(value.lines["element"]), value_lines=value.body(), value=result,
        element_inside=_declare(writer.lines["element"]), element_lines=writer.body(), element=element,
    )  # fmt: skip
    return Written(head + body, _sort(value.fields), (0,) * len(code.arrays))

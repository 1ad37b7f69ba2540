"""Classes of tiles are sound, whatever the mask and the numbers in its arrays: none is taken for empty that keeps a pair, none
for full that drops one. Masks are drawn by chance; NumPy's ranges and those of the CUDA files are asked."""

from __future__ import annotations

import itertools
import math
import pathlib
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rawattn.errors import ProblemError
from rawattn.trace import expressions as expr
from rawattn.trace import ranges
from rawattn.trace.classes import CUT, EMPTY, FULL
from rawattn.trace.expressions import LOADED
from rawattn.trace.formulas import FORMULAS
from rawattn.variant.function import FunctionMask
from tests import expressions
from tests.traced import Array, Library, function

torch = pytest.importorskip("torch")
HEADS = 2


def option(tree: expressions.Tree, captured: dict[str, Array], n: int, m: int) -> tuple[Any, tuple[Array, ...]] | None:
    """The option of a mask; None where it is refused."""
    try:
        return function(expressions.mask(tree, captured), "mask", (1, HEADS, n, m))
    except ProblemError as error:
        assert "32 bits" in str(error) or "divides by 0" in str(error) or "shift" in str(error), error
        return None


def definition(found: FunctionMask, arrays: tuple[Array, ...], h: int, n: int, m: int) -> Array:
    with np.errstate(all="ignore"):
        return np.broadcast_to(found.keep(np, arrays, 0, h, np.arange(n)[:, None], np.arange(m)[None], n, m), (n, m))


def check_boxes(found: FunctionMask, arrays: tuple[Array, ...], kept: Array, h: int, rng: np.random.Generator) -> None:
    """Random boxes, and boxes inside of these, which know no less."""
    n, m = kept.shape
    ends = [np.sort(rng.integers(0, size, (2, 40)), 0) for size in (n, m)]
    inner = [np.sort(rng.integers(lo, hi + 1, (2, 40)), 0) for lo, hi in ends]
    classes = []
    for (q_lo, q_hi), (kv_lo, kv_hi) in (ends, inner):
        with np.errstate(all="ignore"):
            of = found.classify(arrays, 0, h, (q_lo, q_hi), (kv_lo, kv_hi), n, m)
        for each, a, b, c, d in zip(of, q_lo, q_hi, kv_lo, kv_hi, strict=True):
            part = kept[a : b + 1, c : d + 1]
            assert each != EMPTY or not part.any(), "a box is taken for empty that is not"
            assert each != FULL or part.all(), "a box is taken for full that is not"
        classes.append(of)
    assert ((classes[0] == 1) | (classes[0] == classes[1])).all(), "less is known of a part than of the whole"


@hypothesis.settings(
    max_examples=250, derandomize=True, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(st.data(), st.integers(1, 70), st.integers(1, 70), st.integers(0, 3), st.booleans(), st.integers(0, 9))
def test_classes_are_sound(data: Any, n: int, m: int, depth: int, tame: bool, seed: int) -> None:
    tree = expressions.boolean(lambda some: data.draw(st.sampled_from(list(some))), depth)
    rng = np.random.default_rng(seed)
    captured = expressions.arrays(rng, max(n, m), tame=tame)
    made = option(tree, captured, n, m)
    if made is None or not isinstance(made[0], FunctionMask):
        return
    for h in range(HEADS):
        kept = definition(*made, h, n, m)
        if tame:
            check_definition(tree, captured, kept, h)
        check_boxes(*made, kept, h, rng)


def check_definition(tree: expressions.Tree, captured: dict[str, Array], kept: Array, h: int) -> None:
    """The function on arrays says the same as its expression."""
    n, m = kept.shape
    with np.errstate(all="ignore"):
        found = expressions.mask(tree, captured)(np.asarray(h), np.arange(n)[:, None], np.arange(m)[None], n)
    assert (np.broadcast_to(found, (n, m)) == kept).all()


def test_indices_of_64_bits(tmp_path: pathlib.Path) -> None:
    """Elements of int64 as indices, which torch has by default: those that 32 bits do not hold are brought inside, too."""
    longs, flags = np.arange(90)[::-1].copy(), np.arange(90) % 3 == 0
    longs[7], longs[40], pairs = (1 << 40) + 5, -(1 << 40) - 5, np.arange(90 * 90).reshape(90, 90) % 7
    given = [
        lambda q, kv: flags[longs[q]],
        lambda q, kv: flags[longs[kv]] & (q >= kv),
        lambda q, kv: pairs[longs[q], kv] > 2,
        lambda q, kv: pairs[q, longs[kv]] > pairs[longs[q], longs[kv]],
        lambda h, q, kv: flags[longs[h + 39]] & (q > kv + 1),
    ]
    made = [function(each, "mask", (1, HEADS, 70, 90)) for each in given]
    library = Library([option for option, _ in made], tmp_path)
    for i, (option, arrays) in enumerate(made):
        for h in range(HEADS):
            kept = definition(option, arrays, h, 70, 90)
            assert (library.keep(i, option, arrays, 0, h, (70, 90), 30) == kept).all()
            classes = library.classify(i, option, arrays, 0, (h, h), (70, 90), (14, 18))
            tiles = kept.reshape(5, 14, 5, 18).transpose(0, 2, 1, 3).reshape(5, 5, -1)
            assert tiles[classes == FULL].all() and not tiles[classes == EMPTY].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats_are_those_of_float32(tmp_path: pathlib.Path) -> None:
    """A literal is rounded, and what float32 does not hold is infinite, or NaN where such meet."""
    n, tenth, far = 16, np.full(16, 0.1, np.float32), np.linspace(1e38, 3e38, 16).astype(np.float32)
    odd = np.array(
        [np.nan, np.inf, -np.inf, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, -0.3, 1, 2**23 + 1, 3e38, 7, 0], np.float32
    )
    given: list[Any] = [
        lambda q, kv: tenth[q] <= 0.1,
        lambda q, kv: tenth[kv] == 0.1,
        lambda q, kv: ~(tenth[q] <= 0.1) & (q >= kv),
        lambda q, kv: ~((q + 1) * 1e38 * 10 < (kv + 1) * 1e38 * 10),
        lambda q, kv: (far[q] + far[q] + far[q]) - (far[kv] + far[kv] + far[kv]) < 0,
        lambda q, kv: (q + 1.0) ** tenth[kv] < np.exp(kv * 40.0) - np.exp(q * 40.0),
        lambda q, kv: np.expm1(q * 40.0) == np.expm1(kv * 40.0),
        lambda q, kv: -np.exp(q * 40.0) < -np.exp(kv * 40.0),
        lambda q, kv: np.isnan(odd[kv]) | (odd[q] <= 0),
        lambda q, kv: ~torch.isnan(odd[q] - odd[kv]) & ~q.isnan(),
        lambda q, kv: np.round(odd[q]) <= np.trunc(odd[kv]),
        lambda q, kv: round(odd[q] / 2) == math.trunc(odd[kv]),
        lambda q, kv: np.logaddexp(odd[q], odd[kv]) < 1.7,
    ]
    made = [function(each, "mask", (1, 1, n, n)) for each in given]
    library = Library([option for option, _ in made], tmp_path)
    for i, (option, arrays) in enumerate(made):
        kept = definition(option, arrays, 0, n, n)
        assert (library.keep(i, option, arrays, 0, 0, (n, n), n) == kept).all()
        for size in (1, 4):
            ends = np.arange(0, n, size)
            rows, columns = ends[:, None], ends[None]
            tiles = kept.reshape(n // size, size, n // size, size).transpose(0, 2, 1, 3).reshape(n // size, n // size, -1)
            with np.errstate(all="ignore"):
                on_host = option.classify(arrays, 0, 0, (rows, rows + size - 1), (columns, columns + size - 1), n, n)
            for classes in (on_host, library.classify(i, option, arrays, 0, (0, 0), (n, n), (size, size))):
                assert tiles[classes == FULL].all() and not tiles[classes == EMPTY].any()


COUNT = 70  # masks in the library


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, list[Any]]:
    """Masks, each with tame arrays and with others, compiled for the host."""
    rng, found = np.random.default_rng(7), []
    while len(found) < COUNT:
        tree = expressions.boolean(lambda some: list(some)[rng.integers(len(some))], int(rng.integers(1, 4)))
        n, m = (int(x) for x in rng.integers(1, 90, 2))
        both = [option(tree, expressions.arrays(rng, max(n, m), tame=tame), n, m) for tame in (True, False)]
        if (
            all(made is not None and isinstance(made[0], FunctionMask) for made in both)
            and both[0][0].checked == both[1][0].checked
        ):  # type: ignore[index]
            found.append((both, (n, m)))
    library = Library([both[0][0] for both, _ in found], tmp_path_factory.mktemp("drawn"))
    return library, found


@pytest.mark.parametrize("i", range(COUNT))
def test_cuda_files(drawn: tuple[Library, list[Any]], i: int) -> None:
    library, found = drawn
    both, (n, m) = found[i]
    for made in both:
        for h in range(HEADS):
            expected = definition(*made, h, n, m)
            kept = library.keep(i, *made, 0, h, (n, m), 16)
            unsure = "exp" in repr(made[0].code.root) or "tanh" in repr(made[0].code.root)
            assert (kept[:, :m] == expected).mean() > (0.99 if unsure else 0.9999999)
            assert not kept[:, m:].any()
            for tile in ((16, 16), (7, 32), (64, 5)):
                classes = library.classify(i, *made, 0, (h, h), (n, m), tile)
                for x, y in np.ndindex(classes.shape):
                    part = kept[x * tile[0] : (x + 1) * tile[0], y * tile[1] : (y + 1) * tile[1]]
                    whole = (y + 1) * tile[1] <= m and part.all()
                    assert classes[x, y] != EMPTY or not part.any(), "a tile is taken for empty that is not"
                    assert classes[x, y] != FULL or whole, "a tile is taken for full that is not"


def test_offsets(drawn: tuple[Library, list[Any]]) -> None:
    """Parts of longer sequences: rows 0 are at these positions, and the lengths are of the whole."""
    library, found = drawn
    for i, (both, (n, m)) in enumerate(found):
        made, _ = both
        part = (n - n // 3, m - m // 4)
        option, arrays = made
        offsets = (n - part[0], m - part[1])
        if not any(offsets):
            continue
        longest = max(n, m)
        positions = np.arange(offsets[0], n)[:, None], np.arange(offsets[1], m)[None]
        with np.errstate(all="ignore"):
            expected = np.broadcast_to(option.keep(np, arrays, 0, 1, *positions, longest, longest), part)
        kept = library.keep(i, option, arrays, 0, 1, part, 16, offsets)
        assert (kept[:, : part[1]] == expected).mean() > 0.99


def test_classes_of_the_smallest_and_the_largest(tmp_path: pathlib.Path) -> None:
    """Sums stay exact at the edges of 32 bits."""
    far = (1 << 28) - 1
    ends = np.array([-(1 << 31), (1 << 31) - 1, far, -far, 0, 1, 2, 3] * 4, np.int32)
    long, words, n, m = ends.astype(np.int64), ends.astype(np.uint8), 7, -3
    reals = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, 3.4e38, -2.0, *np.linspace(-3, 3, 24)], np.float32)
    half = np.clip(reals, -9, 9).astype(np.float16)
    masks: list[Any] = [
        lambda q, kv: ends[q] + ends[kv] >= 1 << 28, lambda q, kv: ends[q] - ends[kv] < kv - q, lambda q, kv: ends[q] == ends[kv],
        lambda q, kv: (ends[q] < ends[kv]) & (ends[kv] >= -(1 << 31)), lambda q, kv: abs(ends[q]) // 3 > ends[kv] // -7,
        lambda q, kv: (ends[q] ^ ends[kv]) < 0, lambda q, kv: (ends[q] & ends[kv]) >= (ends[q] | 5),
        lambda q, kv: ends[q] >> 31 == ends[kv] >> 30, lambda q, kv: np.minimum(ends[q], ends[kv]) % 5 == 2,
        lambda q, kv: (long[q] << 31) < long[kv], lambda q, kv: (ends[q] - kv) // n != (kv - q) % n,
        lambda q, kv: (kv - q) // m <= (q - 5) % m, lambda q, kv: ~(reals[q] <= reals[kv]), lambda q, kv: abs(reals[kv]) >= 0,
        lambda q, kv: np.maximum(reals[q], 1) > reals[kv], lambda q, kv: reals[q] - reals[kv] == 0,
        lambda q, kv: (reals[q] * 0 < 1) | (np.sqrt(reals[kv]) < 2), lambda q, kv: (reals[q] / reals[kv]).int() % 2 == 0,
        lambda q, kv: ~(np.where(kv > q, reals[q], 1.0) < 3) & (np.floor(reals[kv]) != 1),
        lambda q, kv: half[q] * 2 >= half[kv], lambda q, kv: (ends[q] % 2 == 0) != (words[kv] > 200),
    ]  # fmt: skip
    made = [function(f, "mask", (1, 1, 32, 32)) for f in masks]
    library = Library([each for each, _ in made], tmp_path)
    for i, (found, arrays) in enumerate(made):
        kept = definition(found, arrays, 0, 32, 32)
        assert (library.keep(i, found, arrays, 0, 0, (32, 32), 16) == kept).all(), i
        check_boxes(found, arrays, kept, 0, np.random.default_rng(i))
        for tile in ((1, 1), (2, 3), (8, 16), (32, 20)):
            classes = library.classify(i, found, arrays, 0, (0, 0), (32, 32), tile)
            for x, y in np.ndindex(classes.shape):
                part = kept[x * tile[0] : (x + 1) * tile[0], y * tile[1] : (y + 1) * tile[1]]
                assert classes[x, y] != EMPTY or not part.any()
                assert classes[x, y] != FULL or part.all()
                assert tile != (1, 1) or classes[x, y] != 1 or i > 10, "of a single pair all is known"


# ---- classes by hand


def classes_of(f: Any, q: tuple[int, int], kv: tuple[int, int], n: int = 10) -> int:
    """The class of one box."""
    (found, arrays) = function(f, "mask", (1, 1, n, n))
    return int(found.classify(arrays, 0, 0, *(tuple(map(np.array, ends)) for ends in (q, kv)), n, n))


def test_classes_by_hand() -> None:
    """Classes say what is empty, cut and full, as kernels number it; also by what follows from two comparisons together."""
    assert (EMPTY, CUT, FULL) == (0, 1, 2)
    ids = np.array([0, 0, 0, 1, 1, 1, 0, 5, 5, 5], np.int32)
    same = lambda q, kv: ids[q] == ids[kv]  # noqa: E731
    assert [classes_of(same, (0, 2), kv) for kv in ((0, 2), (2, 3), (3, 5), (7, 9))] == [2, 1, 0, 0]
    counted = lambda q, kv: same(q, kv) & (ids[q] >= 1)  # noqa: E731
    assert classes_of(counted, (0, 5), (0, 2)) == 0 and classes_of(same, (0, 5), (0, 2)) == 1, "ids[kv] >= 1 follows"
    assert classes_of(counted, (3, 9), (3, 5)) == 1
    first, last = np.arange(5, 15, dtype=np.int32), np.arange(-5, 5, dtype=np.int32)
    between = lambda q, kv: (first[q] <= kv) & (kv <= last[q])  # noqa: E731
    assert classes_of(between, (0, 9), (0, 9), 10) == 0, "first[q] <= last[q] follows"
    reverse = lambda q, kv: (last[q] <= kv) & (kv <= first[q])  # noqa: E731
    assert (classes_of(reverse, (0, 3), (0, 4)), classes_of(reverse, (0, 9), (0, 9))) == (2, 1)
    table = np.zeros((3, 7), np.int32)
    wide = lambda q, kv: (kv < table.shape[1]) & (q >= table[0, 0])  # noqa: E731
    assert [classes_of(wide, (0, 9), kv) for kv in ((3, 6), (3, 7), (7, 9))] == [2, 1, 0]
    rows = lambda q, kv, q_start, kv_start: (q + q_start <= 5) & (kv + kv_start <= 5)  # noqa: E731
    assert [classes_of(rows, (0, 5), kv) for kv in ((0, 5), (0, 6), (6, 9))] == [2, 1, 0]
    assert [classes_of(rows, q, (0, 5)) for q in ((0, 6), (6, 9))] == [1, 0]


# ---- each rule by itself


def boxes(low: int, high: int) -> list[tuple[int, int]]:
    return [(lo, hi) for lo in range(low, high + 1) for hi in range(lo, high + 1)]


INTS = boxes(-5, 5)
TIGHT = (
    "imul",
    "neg",
    "abs",
    "min",
    "max",
    "lt",
    "le",
    "eq",
    "and",
    "or",
    "not",
    "xor",
    "sign",
    "saturate",
    "where",
    "shl",
    "shr",
)  # bounds are reached
RULES: dict[str, tuple[list[Any], ...]] = {  # the boxes of each operand
    **dict.fromkeys(("imul", "floordiv", "mod", "band", "bor", "bxor", "min", "max", "lt", "le", "eq"), (INTS, INTS)),
    **dict.fromkeys(("neg", "abs", "sign", "saturate"), (INTS,)),
    **{op: (INTS, boxes(0, 3)) for op in ("shl", "shr")},
    **{op: (boxes(0, 1), boxes(0, 1)) for op in ("and", "or", "xor")},
    "not": (boxes(0, 1),),
    "where": (boxes(0, 1), boxes(-2, 2), boxes(-2, 2)),
}


def values_of(op: str, *x: int) -> Any:
    if op == "not":
        return 1 - x[0]
    if op in ("sign", "saturate"):
        return int(np.sign(x[0])) if op == "sign" else x[0]
    with np.errstate(all="ignore"):
        return int(FORMULAS[{"and": "band", "or": "bor", "xor": "bxor"}.get(op, op)](np, *map(np.int64, x)))


@pytest.mark.parametrize("op", RULES)
def test_a_rule_bounds_all_that_there_is(op: str) -> None:
    """Every pair of small boxes, against every value in them. Where each operand stands once, bounds are reached."""
    for box in itertools.product(*RULES[op]):
        found = ranges.RULES[op](*(ranges.Range(np.int64(lo), np.int64(hi)) for lo, hi in box))
        wanted = [values_of(op, *x) for x in itertools.product(*(range(lo, hi + 1) for lo, hi in box))]
        assert found.lo <= min(wanted) and max(wanted) <= found.hi, (op, box, found)
        divides = op in ("floordiv", "mod")
        by_0 = divides and box[1][0] <= 0 <= box[1][1]
        if op in TIGHT or (op == "floordiv" and not by_0) or (not divides and all(lo == hi for lo, hi in box)):
            assert (found.lo, found.hi) == (min(wanted), max(wanted)), (op, box, found)


@pytest.mark.parametrize("divisor", [1, 3, 8, 16])
def test_a_remainder_is_known_within_a_period(divisor: int) -> None:
    for lo, hi in boxes(-20, 20):
        found = ranges.RULES["mod"](ranges.Range(np.int64(lo), np.int64(hi)), ranges.exactly(divisor, "int"))
        wanted = [x % divisor for x in range(lo, hi + 1)]
        if lo // divisor == hi // divisor:
            assert (found.lo, found.hi) == (wanted[0], wanted[-1])
        else:
            assert (found.lo, found.hi) == (0, divisor - 1)
    many = ranges.RULES["mod"](ranges.Range(np.int64(0), np.int64(4)), ranges.Range(np.int64(5), np.int64(9)))
    assert (many.lo, many.hi) == (0, 4), "what is less than its divisor is itself"
    any_ = ranges.RULES["mod"](ranges.Range(np.int64(-7), np.int64(4)), ranges.Range(np.int64(-3), np.int64(9)))
    assert (any_.lo, any_.hi) == (-9, 9)


@pytest.mark.parametrize("mask", [0, 1, 3, 7, 15])
def test_lowest_bits_are_known_within_a_period(mask: int) -> None:
    """As those of a word that a table of bits is read by; and of & with any bits what both may have."""
    for lo, hi in boxes(-20, 20):
        found = ranges.RULES["band"](ranges.Range(np.int64(lo), np.int64(hi)), ranges.exactly(mask, "int"))
        wanted = [x & mask for x in range(lo, hi + 1)]
        same = lo // (mask + 1) == hi // (mask + 1)
        assert (found.lo, found.hi) == ((wanted[0], wanted[-1]) if same else (0, mask)), (lo, hi)
    found = ranges.RULES["band"](ranges.Range(np.int64(0), np.int64(5)), ranges.Range(np.int64(-9), np.int64(40)))
    assert (found.lo, found.hi) == (0, 5), "no more than the one that is not negative"


FLOATS = [-np.inf, -3.5, -1.0, -0.0, 0.0, 0.25, 2.0, np.inf]
FLOAT_RULES = {
    **dict.fromkeys(("add", "sub", "mul", "div", "min", "max", "lt", "le", "eq", "pow"), 2),
    **dict.fromkeys(("neg", "abs", "sign", "sin", "cos", "exp", "exp2", "log", "log2", "sqrt", "tanh", "erf", "floor"), 1),
    **dict.fromkeys(("expm1", "log1p"), 1),
    "trunc": 1,
}


@pytest.mark.parametrize("op", FLOAT_RULES)
def test_a_rule_of_floats(op: str) -> None:
    """With infinities, and NaN among the operands or not: every value lies in the bounds, and NaN comes only where it is said."""
    ends = [(a, b) for a in FLOATS for b in FLOATS if a <= b]
    ends = ends if FLOAT_RULES[op] == 1 else ends[::2]
    for box in itertools.product(ends, repeat=FLOAT_RULES[op]):
        inside = [[x for x in FLOATS if lo <= x <= hi] for lo, hi in box]
        for nan in (False, True):
            operands = [ranges.Range(np.float64(lo), np.float64(hi), nan) for lo, hi in box]
            with np.errstate(all="ignore"):
                found = ranges.RULES[op](*operands)
                samples = [each + [np.nan] * nan for each in inside]
                values = [float_value(op, *x) for x in itertools.product(*samples)]
            for value in values:
                assert found.nan if np.isnan(value) else found.lo <= value <= found.hi, (op, box, nan, value, found)


def float_value(op: str, *x: float) -> float:
    if op == "trunc":
        return 0.0 if np.isnan(x[0]) else float(np.trunc(np.clip(x[0], -LOADED, LOADED)))
    return float(FORMULAS[op](np, *map(np.float64, x)))


@pytest.mark.parametrize(
    ("op", "box", "wanted"),
    [
        ("add", ((1, 2), (10, 20)), (11, 22)), ("sub", ((1, 2), (10, 20)), (-19, -8)), ("mul", ((-1, 2), (3, 4)), (-4, 8)),
        ("div", ((2, 4), (-2, -1)), (-4, -1)), ("exp", ((0, 1),), (1, np.e)), ("exp2", ((0, 3),), (1, 8)),
        ("log2", ((1, 8),), (0, 3)), ("log", ((1, np.e),), (0, 1)), ("sqrt", ((4, 9),), (2, 3)),
        ("expm1", ((0, 1),), (0, np.e - 1)), ("log1p", ((0, np.e - 1),), (0, 1)), ("pow", ((2, 3), (-1, 2)), (1 / 3, 9)),
        ("pow", ((0, 2), (0, 3)), (0, 8)), ("floor", ((-0.5, 1.5),), (-1, 1)),
        ("sin", ((0, 9),), (-1, 1)), ("cos", ((0, 9),), (-1, 1)),
        ("tanh", ((-90, 90),), (-1, 1)), ("erf", ((-90, 90),), (-1, 1)), ("trunc", ((-1.5, 2.5),), (-1, 2)),
    ],
)  # fmt: skip
def test_bounds_of_floats_are_near(op: str, box: Any, wanted: tuple[float, float]) -> None:
    """As kernels round elsewhere they are some units in the last place wider, where the function itself has no bounds there."""
    found = ranges.RULES[op](*(ranges.Range(np.float64(lo), np.float64(hi)) for lo, hi in box))
    np.testing.assert_allclose((found.lo, found.hi), wanted, rtol=3e-6, atol=1e-36)
    if op in ("add", "sub", "mul", "div"):
        assert found.lo < wanted[0] and wanted[1] < found.hi, "rounded outwards"
    assert not np.any(found.nan) or op in ("sin", "cos")


def test_bounds_of_sums_and_of_what_fits() -> None:
    """A sum of multiples is cut where nothing more is to be known, and integers to 32 bits."""
    q, kv = expr.Q, expr.KV
    for constant, c, d in itertools.product((-7, 0, 9), (-3, 2), (-1, 5)):
        tree = expr.wrap(constant) + q * c + kv * d
        for a, b in itertools.product(boxes(-3, 3), boxes(-2, 2)):
            ends = {q: a, kv: b}
            found = ranges.bounds(tree, lambda x, _, ends=ends: ranges.Range(*map(np.int64, ends[x])))[tree]
            values = [constant + c * x + d * y for x in range(a[0], a[1] + 1) for y in range(b[0], b[1] + 1)]
            assert (found.lo, found.hi) == (min(values), max(values))
    far = expr.make("lin", "long", (0, ((q, 1 << 32), (kv, 1 << 32))))
    most = ranges.bounds(far, lambda x, _: ranges.Range(np.int64(-(1 << 31)), np.int64((1 << 31) - 1)))[far]
    assert most.lo < -(1 << 60) and most.hi > 1 << 60, "a sum of two that are far is far, on its side"
    seen: list[tuple[int, int]] = []
    large = q * (1 << 30) + kv
    leaf = lambda x, _: ranges.Range(np.int64(-8), np.int64(4))  # noqa: E731
    found = ranges.bounds(large, leaf, lambda x, r: seen.append((int(r.lo), int(r.hi))))[large]
    assert (found.lo, found.hi) == (-(1 << 31), (1 << 31) - 1) and seen[-1] == (-(8 << 30) - 8, (4 << 30) + 4)
    assert ranges.LIMITS["bool"] == (0, 1) and ranges.LIMITS["long"] == (-(1 << 63), (1 << 63) - 1)


def test_ranges_of_one_value_and_of_any() -> None:
    nan, number = ranges.exactly(np.nan, "float"), ranges.exactly(2.5, "float")
    assert nan.nan and nan.lo > nan.hi and not number.nan and number.lo == number.hi == 2.5 and number.point and not nan.point
    assert not ranges.Range(np.float64(1), np.float64(1), True).point and not ranges.Range(1, 2).point
    both = ranges.hull(nan, number, ranges.exactly(-1.0, "float"))
    assert (both.lo, both.hi, bool(both.nan)) == (-1.0, 2.5, True)
    assert ranges.anything("float").nan and not ranges.anything("float", False).nan and not ranges.anything("int").nan
    assert [str(ranges.anything(kind)) for kind in ("int", "float")] == ["of any value"] * 2
    assert str(ranges.exactly(3, "int")) == "from 3 to 3"


def test_a_choice_has_the_nan_of_what_may_be_chosen() -> None:
    for never, always, a, b in itertools.product((False, True), repeat=4):
        lo, hi = (1, 1) if always else (0, 0) if never else (0, 1)
        found = ranges.RULES["where"](
            ranges.Range(np.int64(lo), np.int64(hi)), ranges.Range(np.float64(1), np.float64(2), a),
            ranges.Range(np.float64(-2), np.float64(-1), b),
        )  # fmt: skip
        assert bool(found.nan) == ((a and hi == 1) or (b and lo == 0))
        assert (found.lo, found.hi) == (1 if lo else -2, 2 if hi else -1)


@pytest.mark.parametrize(
    ("shift", "lo", "hi"), [(31, 1, 1), (31, -3, 2), (40, 1, 1), (0, -(1 << 40), 1 << 40), (3, -(1 << 31), 1 << 31)]
)
def test_a_shift_to_the_left_that_leaves_32_bits(shift: int, lo: int, hi: int) -> None:
    """By more than 31, or of more than 32 bits, nothing is known that would be wrong."""
    found = ranges.RULES["shl"](ranges.Range(np.int64(lo), np.int64(hi)), ranges.exactly(shift, "int"))
    by = 1 << min(shift, 31)
    assert found.lo <= lo * by and hi * by <= found.hi
    assert (max(abs(lo), abs(hi)) > 1 << 31) == ((found.lo, found.hi) == ranges.LIMITS["long"])

"""The arrays that masks and scores which are functions captured: their names, checks of them, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..array import reading, torch_state
from ..array.array import DTYPES, Array, contiguous
from ..array.eager import eager
from ..array.tma import begins_box, tma_unsupported_reason
from ..errors import ProblemError
from ..trace.capture import ELEMENTS
from ..trace.pair_axes import PairAxes
from ..trace.proofs import Limits
from ..variant.function import FunctionScore, option_of
from ..variant.intervals import by_intervals
from ..variant.ready import NO_ARRAY
from .functions import ROLES, among, parted, whole
from .operand import Layout, Operand, check_contiguous, describe

if TYPE_CHECKING:
    from .spec import Spec

ELEMENT_NAMES = tuple(name for name, _ in ELEMENTS.values())
FLOATS = ("fp32", "fp64", "bf16", "fp16")


def take(options: dict[str, Any], wrt: Any = ()) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The options of a call with a ``Function`` in place of each function, and the arrays that its mask and score captured; where
    ``wrt`` lists some of these, with their names as the option of that name."""
    functions = options.get("mask"), options.get("score")
    *taken, captured, numbers = parted(*functions)
    for role, before, option, role_numbers in zip(ROLES, functions, taken, numbers or ((), ()), strict=True):
        if option is not before:
            options = {**options, role: whole(option, role_numbers)}
    if type(wrt) is not tuple or wrt:
        if torch_state.is_compiling():
            raise ProblemError(
                "wrt was given where torch.compile, or torch.export with strict=True, traces the call; leave it out, and let "
                "autograd follow rawattn.attention."
            )
        options = {**options, "wrt": named_in(options, captured, wrt)}
    return options, captured


def names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the captured arrays of a call, in order."""
    return tuple(f"{role}_{i}" for role, function in among(options) for i in range(len(function.traced.labels)))


def labels(options: Mapping[str, Any]) -> dict[str, str]:
    """The captured arrays in words, by name: as their function calls them."""
    return {
        f"{role}_{i}": title(role, label) for role, function in among(options) for i, label in enumerate(function.traced.labels)
    }


def title(role: str, label: str) -> str:
    """A captured array in words."""
    return f"{label}, which {role} captured,"


def read(options: Mapping[str, Any], captured: tuple[Any, ...]) -> dict[str, Array]:
    """The captured arrays of a call by name. Raises ProblemError, which calls them as ``labels``, where one cannot be read."""
    return {name: reading.read(x, words) for (name, words), x in zip(labels(options).items(), captured, strict=True)}


def named_in(options: Mapping[str, Any], captured: Sequence[Any], wrt: Any) -> tuple[str, ...]:
    """The names of the captured arrays that ``wrt`` lists. Raises ProblemError where one is no float array that the score
    captured, or stands there twice."""
    if not isinstance(wrt, (tuple, list)):
        raise ProblemError(f"wrt is a {type(wrt).__name__}; it must be a tuple of arrays that score captured.")
    known = {name: x for name, x in zip(names(options), captured, strict=True) if name.startswith("score")}
    listed = []
    for i, x in enumerate(wrt):
        name = next((name for name, y in known.items() if y is x), None)
        if name is None:
            alike = [name for name, y in known.items() if _same_place(x, y)]
            if len(alike) > 1:
                raise ProblemError(f"wrt[{i}] lies where {len(alike)} of the captured arrays lie; give the object that is meant.")
            name = alike[0] if alike else None
        if name is None:
            words = ", ".join(labels(options)[other].partition(",")[0] for other in known) or "no arrays"
            raise ProblemError(f"wrt[{i}] is none of the arrays that score captured; it captured {words}.")
        if ELEMENTS.get(str(x.dtype).rpartition(".")[2], ("",))[0] not in FLOATS:  # torch may trace, and x have no memory
            raise ProblemError(f"wrt[{i}] is of {x.dtype}; only floats have gradients.")
        if name in listed:
            raise ProblemError(f"wrt[{i}] stands in wrt twice; give each array once.")
        listed.append(name)
    return tuple(listed)


def _same_place(x: Any, y: Any) -> bool:
    """Says whether two arrays are one, of two objects."""
    array = reading.read(x, "wrt")
    return 0 not in array.shape and array[:-1] == reading.read(y, "wrt")[:-1]


@eager  # where a graph broke, dynamo would trace what follows
def find_followed(options: Mapping[str, Any], captured: Sequence[Any]) -> tuple[str, ...]:
    """The names of the captured arrays to which autograd must follow. Raises ProblemError where a mask captured one."""
    followed = tuple(name for name, x in zip(names(options), captured, strict=True) if torch_state.requires_grad(x))
    of_score = tuple(name for name in followed if name.startswith("score"))
    if of_score != followed:
        check_no_grad(options, captured, "a mask has no gradient", of_score)
    return of_score


def check_no_grad(options: Mapping[str, Any], captured: Sequence[Any], reason: str, but: Sequence[str] = ()) -> None:
    """Raises ProblemError, with the reason, where autograd would have to follow to a captured array whose name is not among
    ``but``."""
    for (name, words), x in zip(labels(options).items(), captured, strict=True):
        if name not in but and torch_state.requires_grad(x):
            raise ProblemError(
                f"{words} requires grad, and {reason}; detach it, or call under torch.no_grad(). Nothing is detached silently."
            )


def resolve(options: Mapping[str, Any], arrays: Mapping[str, Array], limits: Limits) -> dict[str, Any]:
    """The options with an option in place of each function, for these arrays by name. Raises ProblemError where a captured array
    is none that a kernel reads, or lies elsewhere than q."""
    check(labels(options), arrays)
    check_sizes(options, arrays, limits)
    return make_options(options, arrays, limits)


def resolve_by_intervals(
    options: Mapping[str, Any], arrays: Mapping[str, Array], limits: Limits, for_gradients: bool = False
) -> dict[str, Any]:
    """The same, where a launch may find which keys each query keeps: a mask may be an ``IntervalMask``. For gradients on a GPU a
    function of one's own keeps its lists of tiles, but beside lists of blocks: its arrays may fall, and rising runs that hold
    theirs may be all tiles (cuda_src/intervals.cu)."""
    resolved = resolve(options, arrays, limits)
    own = any(role == "mask" and not function.sizes for role, function in among(options))
    if "mask" not in resolved or (for_gradients and own and options.get("keys") is None and not arrays["q"].is_cpu):
        return resolved
    return {**resolved, "mask": by_intervals(resolved["mask"])}


def check(titles: Mapping[str, str], arrays: Mapping[str, Array]) -> None:
    """Raises ProblemError where a captured array is none that a kernel reads, or lies elsewhere than q. It reads no memory."""
    q = arrays["q"]
    for name, words in titles.items():
        array = arrays.get(name)
        if array is None:
            raise ProblemError(f"{words} is missing; it must be an array.")
        found = describe(array.library, array.device, array.dtype, array.shape)
        if array.dtype not in ELEMENT_NAMES:
            raise ProblemError(f"{words} is {found}; its dtype must be one of {', '.join(ELEMENT_NAMES)}.")
        if (array.library, array.device) != (q.library, q.device):
            wanted = describe(q.library, q.device, q.dtype, q.shape)
            raise ProblemError(f"{words} is {found} but q is {wanted}; give all arrays from one library, on one device.")
        check_contiguous(words, array)
        if array.pointer % DTYPES[array.dtype].itemsize:
            size = DTYPES[array.dtype].itemsize
            raise ProblemError(f"{words} begins at an address that is no multiple of {size} bytes, its elements' size; copy it.")


def check_sizes(options: Mapping[str, Any], arrays: Mapping[str, Array], limits: Limits) -> None:
    """Raises ProblemError where an array of a ready-made function has other sizes than the call needs. Lengths of packed
    sequences and of those in a cache are not known, and where rows have positions an array may have more than are read."""
    known = "k" in arrays and "cu_seqlens_q" not in arrays
    whole = not (options.get("q_offset") or options.get("kv_offset"))
    length = max(limits.q_len, limits.kv_len) if known else 0
    queries = limits.q_len if known else arrays["q"].shape[1] if "k_cache" in arrays and len(arrays["q"].shape) == 4 else 0
    needed = {"batch": limits.batch, "heads": limits.heads, "q_len": limits.q_len, "kv_len": limits.kv_len, "length": length}
    is_packed = "k" in arrays and "cu_seqlens_q" in arrays  # whose arrays for each query are along q's rows
    needed |= {"sequences": 1 if is_packed else limits.batch, "q_rows": arrays["q"].shape[0] if is_packed else limits.q_len}
    for role, function in among(options):
        for name, place, fixed, axes in function.sizes:
            shape = tuple(fixed or arrays[f"{role}_{place}"].shape)
            wanted = [-(-needed[dim] // block) if dim in needed else n for n, (dim, block, _) in zip(shape, axes, strict=True)]
            for n, need, (dim, block, may_be_one) in zip(shape, wanted, axes, strict=True):
                is_length = dim not in ("batch", "sequences", "heads")
                if dim == "nodes" and block == 1 and queries > n:
                    raise ProblemError(f"{name} has shape {shape}, {n} nodes, but there are {queries} queries; each is a node.")
                is_known = known or (dim == "q_rows" and is_packed)
                if n == need or (may_be_one and n == 1) or (is_length and not (is_known and (whole or n < need))):
                    continue
                if place == NO_ARRAY and n > need:
                    continue
                meant = ", ".join(f"{dim} / {block}" if block > 1 else dim for dim, block, _ in axes)
                ones = " An axis of 1 is for all." * any(one for _, _, one in axes)
                raise ProblemError(f"{name} has shape {shape}; it must be {tuple(wanted)}, ({meant}).{ones}")


def make_options(options: Mapping[str, Any], arrays: Mapping[str, Array], limits: Limits) -> dict[str, Any]:
    """The options with an option in place of each function, for arrays that are not checked."""
    replaced = {}
    for role, function in among(options):
        traced, numbers = function.traced, function.numbers
        captured = [arrays[f"{role}_{i}"] for i in range(len(traced.labels))]
        replaced[role] = option_of(traced, tuple((x.dtype, tuple(x.shape)) for x in captured), numbers, limits)
    return {**options, **replaced}


def operands(*options: Any) -> tuple[Operand, ...]:
    """The operands that options captured, in order."""
    result = []
    for role, option in zip(ROLES, options, strict=True):
        for array in option.arrays:
            words = title(role, array.label or array.name)
            result.append(Operand(array.name, array.element, tuple(array.shape), label=words))
    return tuple(result)


def with_captured(layout: Layout, spec: Spec, arrays: Mapping[str, Array], alone: tuple[bool, bool] | None = None) -> Layout:
    """The facts with those of the arrays that the score captured, by name: of which of them TMA reads tiles. ``alone`` says
    whether there is but one sequence, and one head: then also to which of their gradients TMA writes tiles, since no two pairs
    share an element, and its rows, of which there may be but one, are multiples of 16 bytes. Where rows have offsets there are
    none: these are run-time numbers, and a box begins at a multiple of 16 bytes."""
    axes = spec.score.pair_axes if isinstance(spec.score, FunctionScore) and spec.offsets is None else {}
    tma_captured = list[str]()
    for i in sorted({j for j, _ in axes.values()}):
        array = arrays.get(f"score_{i}")
        pair_axes = [pair for j, pair in axes.values() if j == i]
        if array is None or array.dtype not in ("bf16", "fp16") or 0 in array.shape:  # boxes are of 16-bit formats
            continue
        tma_captured += [f"score_{i}"] * _moves_tiles(array, pair_axes)
        if alone is None or any(pair.is_shared(*alone) for pair in pair_axes):
            continue
        whole = begins_box(array.shape[-1], 2) and _moves_tiles(contiguous(tuple(array.shape), array.dtype), pair_axes)
        tma_captured += [f"dscore_{i}"] * whole
    return layout._replace(tma_captured=tuple(tma_captured)) if tma_captured else layout


def lying(layout: Layout, spec: Spec, alone: tuple[bool, bool] | None = None) -> tuple[Layout, ...]:
    """The layouts to compile for: TMA moves no tile of the arrays that the score captured, or they are contiguous."""
    none = layout._replace(tma_captured=())
    arrays = {array.name: contiguous(tuple(array.shape), array.element) for array in spec.score.arrays}
    return tuple(dict.fromkeys((none, with_captured(none, spec, arrays, alone))))


def _moves_tiles(array: Array, axes_of_pairs: Sequence[PairAxes]) -> bool:
    """Says whether TMA moves tiles of queries and keys of an array, along any of these axes."""
    views = [axes.view(tuple(array.shape), tuple(array.strides)) for axes in axes_of_pairs]
    return all(begins_box(axes.first_kv, 2) for axes in axes_of_pairs) and all(
        tma_unsupported_reason("", *view, 2, array.pointer) is None for view in views
    )

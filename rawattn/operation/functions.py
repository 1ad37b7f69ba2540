"""Masks and scores that are functions: what they captured become arrays of the call, and later operands of its operation.

A call is given a function. It leaves here as two things: a ``Function``, which is hashable and has no arrays, takes its place
among the options, and the captured arrays go beside the call's own, as ``mask_0``, ``mask_1``, ``score_0`` and so on. Nothing
that is kept holds an array. An operation makes an option of the ``Function`` when it knows the arrays' shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import trace
from ..array import reading, torch_state
from ..array.array import DTYPES, Array, contiguous
from ..array.eager import eager
from ..array.tma import begins_box, tma_unsupported_reason
from ..errors import ProblemError
from ..trace import Traced
from ..trace.arithmetic import add
from ..trace.canonical import canonical, number_keys
from ..trace.capture import ELEMENTS
from ..trace.conditions import compare, logical, rebuild
from ..trace.expressions import KV, Q, const, make, nodes, var
from ..trace.pair_axes import PairAxes
from ..trace.proofs import Limits
from ..variant import Option, Pairwise
from ..variant.function import Captures, FunctionScore, option_of
from ..variant.mask import And, Full
from ..variant.ready import NO_ARRAY, Biased, OfBlockMask, Ready, Sizes
from ..variant.recognition import may_be
from ..variant.score import Scale, number
from .operand import Layout, Operand, check_contiguous, describe

if TYPE_CHECKING:
    from .spec import Spec

ROLES = ("mask", "score")
ELEMENT_NAMES = tuple(name for name, _ in ELEMENTS.values())  # of captured arrays
FLOATS = ("fp32", "fp64", "bf16", "fp16")


class Function(tuple[Any, ...]):
    """A function among the options of a call: what was traced, and its numbers, without its arrays. Keys are made of it, so it is
    the tuple of its code, of what tells its numbers apart, of the sizes that its arrays must have (``ready.Sizes``), and of the
    arrays' names, which errors say."""

    traced: Traced
    numbers: tuple[int | float, ...]  # that it captured

    @property
    def sizes(self) -> tuple[Sizes, ...]:
        """The sizes that a ready-made function expects of what it captured; none of a user's own."""
        found: tuple[Sizes, ...] = self[2]
        return found

    @property
    def without_numbers(self) -> Function:
        """The function for whatever numbers; itself where these may make it a built-in option."""
        return self if not self.numbers or may_be(self.traced.code) else function(self.traced, (), self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_text, (self.traced.text, self.numbers, self.sizes)


def function(traced: Traced, numbers: tuple[int | float, ...] = (), sizes: tuple[Sizes, ...] = ()) -> Function:
    """Returns what takes a function's place among the options."""
    found = Function((traced.code, number_keys(numbers), sizes, traced.labels))
    found.traced, found.numbers = traced, numbers
    return found


class BoundFunction:
    """A function, the arrays that it captured, by reference, and the numbers, by value: ``rawattn.mask.function`` makes it."""

    def __init__(
        self, traced: Traced, arrays: Sequence[Any] = (), numbers: Sequence[int | float] = (), sizes: Sequence[Sizes] = ()
    ) -> None:
        self.function, self.arrays, self.role = function(traced, tuple(numbers), tuple(sizes)), tuple(arrays), traced.role
        self.without_numbers = self.function.without_numbers
        assert traced.text  # which torch.compile reads: it is made here

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebound, (self.function, self.arrays)

    def __repr__(self) -> str:
        traced, numbers = self.function.traced, self.function.numbers
        captured = f", which captured {', '.join(traced.labels)}" if traced.labels else ""
        return f"<rawattn.{self.role}.function {traced.code!r}{captured}{f', with {list(numbers)}' if numbers else ''}>"


def _rebound(own: Function, arrays: tuple[Any, ...]) -> BoundFunction:
    """A copy or a pickle of a ``BoundFunction``: of its text, so that no Python function is looked for."""
    return BoundFunction(own.traced, arrays, own.numbers, own.sizes)


class BiasText:
    """``softcap``, ``alibi`` and ``bias`` where torch.compile traces the call: their function as text, and the tensors."""

    def __init__(self, text: str, numbers: tuple[float, ...], arrays: tuple[Any, ...], sizes: tuple[Sizes, ...]) -> None:
        self.text, self.numbers, self.arrays, self.sizes = text, numbers, arrays, sizes


# ---- at the edge of a call


def biased(softcap: Any, score: Any, alibi: Any, bias: Any) -> Any:
    """The score that the shorthands ``alibi`` and ``bias`` mean, beside ``softcap``."""
    if score is not None:
        raise ProblemError("alibi or bias was given beside score; add it in the function that is the score.")
    reading.check_plain("alibi", alibi)
    reading.check_plain("bias", bias)
    if softcap is not None:
        need = "a finite number > 0, or None or 0.0 for no cap"
        if (softcap := number("softcap", softcap, need) or None) is not None and softcap < 0:
            raise ProblemError(f"softcap is {softcap}; it must be {need}.")
    if not torch_state.is_compiling():
        return Biased(softcap, alibi, bias)
    given = [x for x in (alibi, bias) if x is not None]
    forms = [(str(x.dtype).rpartition(".")[2], tuple([1 if n > 1 else 0 for n in x.shape])) for x in given]
    text, numbers, sizes = bias_text(softcap, alibi is not None, bias is not None, tuple(forms))
    return BiasText(text, numbers, tuple(given), sizes)


def bias_text(
    softcap: float | None, has_slopes: bool, has_bias: bool, forms: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[str, tuple[float, ...], tuple[Sizes, ...]]:
    """Text, numbers and sizes of ``Biased`` for arrays of these dtypes, 1 for each axis along which they are longer."""
    given = [np.zeros([1 + own for own in axes], ELEMENT_TYPES[dtype]) for dtype, axes in forms]
    slopes, bias = given[0] if has_slopes else None, given[-1] if has_bias else None
    own, _, numbers = bind_ready(Biased(softcap, slopes, bias), "score")
    return own.traced.text, tuple(numbers), own.sizes


bias_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces
ELEMENT_TYPES = {dtype: DTYPES[name] for dtype, (name, _) in ELEMENTS.items()}


def taken(options: dict[str, Any], wrt: Any = ()) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The options of a call with a ``Function`` in place of each function, and the arrays that its mask and score captured; where
    ``wrt`` lists some of these, with their names as the option of that name."""
    given = options.get("mask"), options.get("score")
    *own, captured, numbers = parted(*given)
    for role, before, each, its in zip(ROLES, given, own, numbers or ((), ()), strict=True):
        if each is not before:
            options = {**options, role: whole(each, its)}
    if type(wrt) is not tuple or wrt:
        if torch_state.is_compiling():
            raise ProblemError(
                "wrt was given where torch.compile, or torch.export with strict=True, traces the call; leave it out, and let "
                "autograd follow rawattn.attention."
            )
        options = {**options, "wrt": named_in(options, captured, wrt)}
    return options, captured


def is_function(value: Any) -> bool:
    """Says whether a mask or a score is a function, and not an option."""
    if type(value) is types.FunctionType or type(value) is BoundFunction or isinstance(value, Ready):
        return True
    if isinstance(value, (Option, type)) or not (callable(value) or is_block_mask(value)):
        return False
    return not hasattr(value, "interval") and not hasattr(value, "cuda_type")  # a class that is not derived from Option


def is_block_mask(value: Any) -> bool:
    """Says whether it is a ``torch.nn.attention.flex_attention.BlockMask``."""
    return type(value).__name__ == "BlockMask" and hasattr(value, "kv_indices")


_block_masks: weakref.WeakKeyDictionary[Any, tuple[Any, OfBlockMask]] = weakref.WeakKeyDictionary()


def of_block_mask(mask: Any) -> OfBlockMask:
    """A BlockMask as a function. Its lists of blocks become a table on their device, anew where they were changed."""
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    state = tuple(None if x is None else (x.data_ptr(), x.shape, object() if x.is_inference() else x._version) for x in lists)
    before, found = _block_masks.get(mask, (None, None))
    if found is None or before != state:
        torch, classes = sys.modules["torch"], mask.kv_indices.new_zeros(())
        for value, counts, indices in (
            (1, mask.kv_num_blocks, mask.kv_indices), (2, mask.full_kv_num_blocks, mask.full_kv_indices),
        ):  # fmt: skip
            if counts is None:
                continue
            columns = indices.shape[-1]
            there = torch.arange(columns, device=indices.device) < counts[..., None]
            rows = indices.new_zeros((*indices.shape[:-1], columns + 1), dtype=torch.uint8)  # a last column for no block
            rows.scatter_(-1, torch.where(there, indices, columns).long(), value)
            classes = torch.maximum(classes, rows[..., :columns])
        found = OfBlockMask(
            classes.to(torch.uint8).contiguous(), mask.BLOCK_SIZE, mask.mask_mod, getattr(mask, "seq_lengths", None)
        )
        _block_masks[mask] = state, found
    return found


KEPT = 1024
_last: dict[str, dict[int, tuple[Any, Traced, Function | None]]] = {"mask": {}, "score": {}}  # by the number of their code
Numbers = tuple[int | float, ...]


def parted(mask: Any, score: Any) -> tuple[Any, Any, tuple[Any, ...], tuple[Numbers, Numbers] | None]:
    """The mask and the score of a call apart from what they captured, the arrays, and the numbers of both: so new ones make no
    new key. None where there are no numbers, or they stay where they are, as they may make a built-in option of a function."""
    captured: tuple[Any, ...] = ()
    of_mask: Numbers = ()
    of_score: Numbers = ()
    if mask is not None and is_function(mask):
        mask, captured, of_mask = _parted(mask, "mask")
    if type(score) is BiasText:
        captured += score.arrays
        if not torch_state.is_compiling():  # the graph broke since
            score = from_text(score.text, score.numbers, score.sizes)
    elif score is not None and is_function(score):
        score, found, of_score = _parted(score, "score")
        captured += found
    return mask, score, captured, (of_mask, of_score) if of_mask or of_score else None


def whole(own: Any, numbers: Numbers) -> Any:
    """The mask or score of which ``parted`` took these numbers."""
    return function(own.traced, numbers, own.sizes) if numbers else own


def bind(value: Any, role: str) -> tuple[Function, tuple[Any, ...]]:
    """A function as an option, and the arrays that it captured."""
    own, captured, numbers = _parted(value, role)
    return whole(own, numbers), captured


def _parted(value: Any, role: str) -> tuple[Function, tuple[Any, ...], Numbers]:
    """A function without its numbers, the arrays that it captured, and the numbers; with them where they stay in it."""
    if type(value) is types.FunctionType and not torch_state.is_compiling():
        code = value.__code__
        _, traced, shared = _last[role].get(id(code), (None, None, None))
        found = None if traced is None else traced.bind(value)
        if traced is not None and found is not None:
            return (shared, *found) if shared is not None else (function(traced, found[1]), found[0], ())
        traced, captured, numbers = _traced_anew(value, role)
        if len(_last[role]) >= KEPT:
            _last[role].clear()
        shared = None if numbers and may_be(traced.code) else function(traced)
        _last[role][id(code)] = code, traced, shared
        return (shared, captured, numbers) if shared is not None else (function(traced, numbers), captured, ())
    if isinstance(value, Ready) and value.function is not None:
        value = value.function
    if type(value) is BoundFunction:
        if value.role != role:
            raise ProblemError(f"{role} is {value!r}; make it by rawattn.{role}.function(...).")
        if torch_state.is_compiling():
            return value.function, value.arrays, ()
        shared = value.without_numbers
        return shared, value.arrays, () if shared is value.function else value.function.numbers
    if torch_state.is_compiling():
        raise ProblemError(
            f"{role} is a Python function, and torch.compile, or torch.export with strict=True, traces the call; make "
            f"rawattn.{role}.function(f) outside of what is compiled, and give that."
        )
    own, captured, numbers = bind_ready(of_block_mask(value) if is_block_mask(value) else value, role)
    shared = own.without_numbers
    return shared, captured, () if shared is own else numbers


_bound_anew = eager(trace.bind)  # where a graph broke, dynamo would trace it


def _traced_anew(value: Any, role: str) -> trace.Bound:
    """A function traced, with its captures. Raises ProblemError for a tensor that means what its memory does not hold."""
    found = _bound_anew(value, role)
    for label, x in zip(found.traced.labels, found.arrays, strict=True):
        reading.check_plain(label, x)
    return found


def bind_ready(value: Any, role: str) -> tuple[Function, tuple[Any, ...], tuple[int | float, ...]]:
    """A function that is an object: as an option, with the arrays and the numbers that it captured."""
    traced, captured, numbers = _traced_anew(value, role)
    place = {id(x): i for i, x in enumerate(captured)} | {id(None): NO_ARRAY}
    expected = value.sizes() if isinstance(value, Ready) else ()
    sizes = tuple((name, place[id(x)], fixed, axes) for name, x, fixed, axes in expected if id(x) in place)
    return function(traced, numbers, sizes), captured, numbers


def bound(value: Any, role: str) -> BoundFunction:
    """Returns what ``rawattn.mask.function`` and ``rawattn.score.function`` give."""
    value = value.function if isinstance(value, Ready) and value.function is not None else value
    if type(value) is BoundFunction and value.role == role:
        return value
    known, found = bind(value, role)
    return BoundFunction(known.traced, found, known.numbers, known.sizes)


def among(options: Mapping[str, Any]) -> list[tuple[str, Function]]:
    """The functions among the options, with their roles."""
    return [(role, options[role]) for role in ROLES if type(options.get(role)) is Function]


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the default option in place of each function."""
    defaults = {"mask": Full(), "score": Scale()}
    return {**options, **{role: defaults[role] for role, _ in among(options)}}


def without_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """The options with functions whose numbers tell nothing apart; themselves where no function has some. It is for keys."""
    found = {role: own.without_numbers for role, own in among(options)}
    return {**options, **found} if any(own is not options[role] for role, own in found.items()) else options


def names(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the captured arrays of a call, in order."""
    return tuple(f"{role}_{i}" for role, each in among(options) for i in range(len(each.traced.labels)))


def labels(options: Mapping[str, Any]) -> dict[str, str]:
    """The captured arrays in words, by name: as their function calls them."""
    return {
        f"{role}_{i}": title(role, label) for role, function in among(options) for i, label in enumerate(function.traced.labels)
    }


def read(options: Mapping[str, Any], captured: tuple[Any, ...]) -> dict[str, Array]:
    """The captured arrays of a call by name. Raises ProblemError, which calls them as ``labels``, where one cannot be read."""
    return {name: reading.read(x, words) for (name, words), x in zip(labels(options).items(), captured, strict=True)}


def title(role: str, label: str) -> str:
    """A captured array in words."""
    return f"{label}, which {role} captured,"


def of_step(own: Function, captured: tuple[Any, ...], causal: Any) -> tuple[Function, tuple[Any, ...]]:
    """A mask that also keeps no key behind the query's own position, and what it captured then: for all sequences, or for those
    that ``causal``, an array, says."""
    each = causal is not True
    traced, arrays, numbers = _and_causal(own.traced, each)
    every = (*captured, causal) if each else captured
    sizes = tuple((name, arrays.index(place), fixed, axes) for name, place, fixed, axes in own.sizes if place in arrays)
    return function(traced, tuple(own.numbers[i] for i in numbers), sizes), tuple(every[i] for i in arrays)


@functools.lru_cache(maxsize=256)
def _and_causal(traced: Traced, each: bool) -> tuple[Traced, list[int], list[int]]:
    """Returns what ``of_step`` makes of a traced mask, and the order of its arrays and numbers."""
    kept = compare("le", KV, Q)
    if each:
        kept = logical("or", kept, compare("eq", make("load", "int", (len(traced.labels), "int32", var("b"))), const(0)))
    code, arrays, numbers = canonical(logical("and", traced.code.root, kept), "mask")
    labels = (*traced.labels, "causal")
    return Traced(code, tuple(labels[i] for i in arrays)), arrays, numbers


def of_part(own: Function, **given: int) -> tuple[Function, list[int]]:
    """A function for a part of a problem, and which of the captured arrays are left, in order: q_len and kv_len are these, those
    of the whole, and h counts heads from this one on. It asks for no sizes."""
    names = tuple(given)
    traced, arrays, numbers = _with_numbers(own.traced, own.traced.labels, names)
    every = (*own.numbers, *given.values())
    return function(traced, tuple(every[i] for i in numbers)), arrays


@functools.lru_cache(maxsize=256)
def _with_numbers(traced: Traced, labels: tuple[str, ...], names: tuple[str, ...]) -> tuple[Traced, list[int], list[int]]:
    """Returns what ``of_part`` makes of a traced function, and the order of its arrays and numbers: these names are numbers
    behind its own."""
    first = traced.code.numbers
    done: dict[Any, Any] = {}
    for node in nodes(traced.code.root):
        done[node] = rebuild(node, done)
        if node.op == "var" and node.args[0] in names:
            number = make("param", "int", (first + names.index(node.args[0]), False))
            done[node] = add(number, node) if node.args[0] == "h" else number
    code, arrays, numbers = canonical(done[traced.code.root], traced.role)
    return Traced(code, tuple(labels[i] for i in arrays)), arrays, numbers


def at_positions(option: Any) -> Any:
    """An option of a cache's step: functions see positions there, below 0 before the first key, and a built-in mask of the same
    meaning is aligned to the last key."""
    if hasattr(option, "align"):
        return dataclasses.replace(option, align="bottom_right")
    if isinstance(option, And):
        return And(at_positions(option.a), at_positions(option.b))
    return dataclasses.replace(option, q_below=True) if isinstance(option, Captures) else option


# ---- of an operation


def resolved(options: Mapping[str, Any], given: Mapping[str, Array], limits: Limits) -> dict[str, Any]:
    """The options with an option in place of each function, for these arrays by name. Raises ProblemError where a captured array
    is none that a kernel reads, or lies elsewhere than q."""
    check(labels(options), given)
    check_sizes(options, given, limits)
    return made(options, given, limits)


def made(options: Mapping[str, Any], given: Mapping[str, Array], limits: Limits) -> dict[str, Any]:
    """The options with an option in place of each function, for arrays that are not checked."""
    replaced = {}
    for role, own in among(options):
        traced, numbers = own.traced, own.numbers
        each = [given[f"{role}_{i}"] for i in range(len(traced.labels))]
        replaced[role] = option_of(traced, tuple((x.dtype, tuple(x.shape)) for x in each), numbers, limits)
    return {**options, **replaced}


def check(titles: Mapping[str, str], given: Mapping[str, Array]) -> None:
    """Raises ProblemError where a captured array is none that a kernel reads, or lies elsewhere than q. It reads no memory."""
    q = given["q"]
    for name, words in titles.items():
        array = given.get(name)
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


def check_sizes(options: Mapping[str, Any], given: Mapping[str, Array], limits: Limits) -> None:
    """Raises ProblemError where an array of a ready-made function has other sizes than the call needs. Lengths of packed
    sequences and of those in a cache are not known, and where rows have positions an array may have more than are read."""
    known = "k" in given and "cu_seqlens_q" not in given
    whole = not (options.get("q_offset") or options.get("kv_offset"))
    length = max(limits.q_len, limits.kv_len) if known else 0
    queries = limits.q_len if known else given["q"].shape[1] if "k_cache" in given and len(given["q"].shape) == 4 else 0
    needed = {"batch": limits.batch, "heads": limits.heads, "q_len": limits.q_len, "kv_len": limits.kv_len, "length": length}
    for role, own in among(options):
        for name, place, fixed, axes in own.sizes:
            shape = tuple(fixed or given[f"{role}_{place}"].shape)
            wanted = [-(-needed[dim] // block) if dim in needed else n for n, (dim, block, _) in zip(shape, axes, strict=True)]
            for n, need, (dim, block, may_be_one) in zip(shape, wanted, axes, strict=True):
                is_length = dim not in ("batch", "heads")
                if dim == "nodes" and block == 1 and queries > n:
                    raise ProblemError(f"{name} has shape {shape}, {n} nodes, but there are {queries} queries; each is a node.")
                if n == need or (may_be_one and n == 1) or (is_length and not (known and (whole or n < need))):
                    continue
                if place == NO_ARRAY and n > need:
                    continue
                meant = ", ".join(f"{dim} / {block}" if block > 1 else dim for dim, block, _ in axes)
                ones = " An axis of 1 is for all." * any(one for _, _, one in axes)
                raise ProblemError(f"{name} has shape {shape}; it must be {tuple(wanted)}, ({meant}).{ones}")


def check_no_grad(options: Mapping[str, Any], captured: Sequence[Any], reason: str, but: Sequence[str] = ()) -> None:
    """Raises ProblemError, with the reason, where autograd would have to follow to a captured array whose name is not among
    ``but``."""
    for (name, words), x in zip(labels(options).items(), captured, strict=True):
        if name not in but and torch_state.requires_grad(x):
            raise ProblemError(
                f"{words} requires grad, and {reason}; detach it, or call under torch.no_grad(). Nothing is detached silently."
            )


@eager  # where a graph broke, dynamo would trace what follows
def followed(options: Mapping[str, Any], captured: Sequence[Any]) -> tuple[str, ...]:
    """The names of the captured arrays to which autograd must follow. Raises ProblemError where a mask captured one."""
    found = tuple(name for name, x in zip(names(options), captured, strict=True) if torch_state.requires_grad(x))
    own = tuple(name for name in found if name.startswith("score"))
    if own != found:
        check_no_grad(options, captured, "a mask has no gradient", own)
    return own


def named_in(options: Mapping[str, Any], captured: Sequence[Any], wrt: Any) -> tuple[str, ...]:
    """The names of the captured arrays that ``wrt`` lists. Raises ProblemError where one is no float array that the score
    captured, or stands there twice."""
    if not isinstance(wrt, (tuple, list)):
        raise ProblemError(f"wrt is a {type(wrt).__name__}; it must be a tuple of arrays that score captured.")
    known = {name: x for name, x in zip(names(options), captured, strict=True) if name.startswith("score")}
    found = []
    for i, x in enumerate(wrt):
        name = next((name for name, y in known.items() if y is x), None)
        if name is None:
            alike = [name for name, y in known.items() if _same_place(x, y)]
            if len(alike) > 1:
                raise ProblemError(f"wrt[{i}] lies where {len(alike)} of the captured arrays lie; give the object that is meant.")
            name = alike[0] if alike else None
        if name is None:
            words = ", ".join(labels(options)[each].partition(",")[0] for each in known) or "no arrays"
            raise ProblemError(f"wrt[{i}] is none of the arrays that score captured; it captured {words}.")
        if ELEMENTS.get(str(x.dtype).rpartition(".")[2], ("",))[0] not in FLOATS:  # torch may trace, and x have no memory
            raise ProblemError(f"wrt[{i}] is of {x.dtype}; only floats have gradients.")
        if name in found:
            raise ProblemError(f"wrt[{i}] stands in wrt twice; give each array once.")
        found.append(name)
    return tuple(found)


def _same_place(x: Any, y: Any) -> bool:
    """Says whether two arrays are one, of two objects."""
    found = reading.read(x, "wrt")
    return 0 not in found.shape and found[:-1] == reading.read(y, "wrt")[:-1]


def operands(*options: Any) -> tuple[Operand, ...]:
    """The operands that options captured, in order."""
    found = []
    for role, option in zip(ROLES, options, strict=True):
        for each in option.arrays:
            words = title(role, each.label or each.name)
            found.append(Operand(each.name, each.element, tuple(each.shape), label=words))
    return tuple(found)


def with_captured(layout: Layout, spec: Spec, given: Mapping[str, Array], alone: tuple[bool, bool] | None = None) -> Layout:
    """The facts with those of the arrays that the score captured, by name: of which of them TMA reads tiles. ``alone`` says
    whether there is but one sequence, and one head: then also to which of their gradients TMA writes tiles, since no two pairs
    share an element, and its rows, of which there may be but one, are multiples of 16 bytes. Where rows have offsets there are
    none: these are run-time numbers, and a box begins at a multiple of 16 bytes."""
    axes = spec.score.pair_axes if isinstance(spec.score, FunctionScore) and spec.offsets is None else {}
    found = list[str]()
    for i in sorted({j for j, _ in axes.values()}):
        array = given.get(f"score_{i}")
        own = [each for j, each in axes.values() if j == i]
        if array is None or array.dtype not in ("bf16", "fp16") or 0 in array.shape:  # boxes are of 16-bit formats
            continue
        found += [f"score_{i}"] * _moves_tiles(array, own)
        if alone is None or any(each.is_shared(*alone) for each in own):
            continue
        whole = begins_box(array.shape[-1], 2) and _moves_tiles(contiguous(tuple(array.shape), array.dtype), own)
        found += [f"dscore_{i}"] * whole
    return layout._replace(tma_captured=tuple(found)) if found else layout


def lying(layout: Layout, spec: Spec, alone: tuple[bool, bool] | None = None) -> tuple[Layout, ...]:
    """The layouts to compile for: TMA moves no tile of the arrays that the score captured, or they are contiguous."""
    none = layout._replace(tma_captured=())
    made = {each.name: contiguous(tuple(each.shape), each.element) for each in spec.score.arrays}
    return tuple(dict.fromkeys((none, with_captured(none, spec, made, alone))))


def _moves_tiles(array: Array, every: Sequence[PairAxes]) -> bool:
    """Says whether TMA moves tiles of queries and keys of an array, along any of these axes."""
    views = [axes.view(tuple(array.shape), tuple(array.strides)) for axes in every]
    return all(begins_box(axes.first_kv, 2) for axes in every) and all(
        tma_unsupported_reason("", *view, 2, array.pointer) is None for view in views
    )


# ---- on the host


@dataclasses.dataclass(frozen=True, eq=False)
class _OnHost(Pairwise):
    """An option, the arrays that it captured, and where each sequence begins, of packed ones."""

    option: Any
    captured: tuple[Any, ...]
    starts: tuple[Any, Any]
    is_function: ClassVar[bool] = True

    def start(self, batch: int) -> tuple[int, int]:
        """The rows of q and of k with which a sequence begins."""
        q, kv = (0 if each is None else int(each[batch]) for each in self.starts)
        return q, kv


class HostMask(_OnHost):
    """A mask as the reference and the CPU path take it: ``keep`` says which keys of ``interval`` each query keeps."""

    def interval(self, q: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
        """All keys."""
        found: tuple[Any, Any] = self.option.interval(q, q_len, kv_len)
        return found

    def keep(self, xp: Any, batch: int, head: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
        """Returns which of the queries q, a column, keep which of the keys kv, a row."""
        return self.option.keep(xp, self.captured, batch, head, q, kv, q_len, kv_len, *self.start(batch))


@dataclasses.dataclass(frozen=True, eq=False)
class HostScore(_OnHost):
    """A score as they take it; ``lengths`` are those of the sequence."""

    lengths: tuple[int, int] | None = None

    def of_lengths(self, q_len: int, kv_len: int) -> HostScore:
        """The score of a sequence of these lengths; itself where they are known."""
        return self if self.lengths else dataclasses.replace(self, lengths=(q_len, kv_len))

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """The logits, in the shape of s."""
        assert self.lengths is not None
        return self.option.logit(xp, self.captured, s, batch, head, q, kv, *self.lengths, *self.start(batch))

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """Their derivatives by s."""
        assert self.lengths is not None
        return self.option.slope(xp, self.captured, s, batch, head, q, kv, *self.lengths, *self.start(batch))

    def element_gradients(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """Their derivatives by the elements of captured arrays: ``FunctionScore.element_gradients``."""
        assert self.lengths is not None
        return self.option.element_gradients(xp, self.captured, s, batch, head, q, kv, *self.lengths, *self.start(batch))


def on_host(spec: Any, given: Mapping[str, Any], starts: tuple[Any, Any] = (None, None)) -> Any:
    """The spec with its mask and score bound to the arrays that they captured, which are among these, by name. ``starts`` are
    cu_seqlens of packed sequences."""
    found = {
        role: kind(option, tuple(given[each.name] for each in option.arrays), starts)
        for role, kind in (("mask", HostMask), ("score", HostScore))
        if (option := getattr(spec, role)).is_function
    }
    return dataclasses.replace(spec, **found) if found else spec


# ---- as text


def to_json(found: Sequence[tuple[str, Function]]) -> dict[str, Any]:
    """Returns what ``among`` gives as JSON can hold it: by role the text of the code, and the numbers."""
    return {
        role: {"traced": each.traced.text, "numbers": [x.item() if isinstance(x, np.generic) else x for x in each.numbers]}
        | ({"sizes": each.sizes} if each.sizes else {})
        for role, each in found
    }


def from_json(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Function]]:
    """The inverse of ``to_json``: what else is in these fields, and the functions by role."""
    own = {role: fields[role] for role in ROLES if "traced" in fields.get(role, {})}
    rest = {name: value for name, value in fields.items() if name not in own}
    return rest, {role: _from_fields(each) for role, each in own.items()}


def _from_fields(each: Mapping[str, Any]) -> Function:
    sizes = ((name, place, fixed and tuple(fixed), tuple(map(tuple, axes))) for name, place, fixed, axes in each.get("sizes", ()))
    return from_text(each["traced"], tuple(each["numbers"]), tuple(sizes))


def from_text(text: str, numbers: tuple[int | float, ...], sizes: tuple[Sizes, ...] = ()) -> Function:
    """The function of a ``Traced`` with this text, with these numbers and sizes."""
    return function(_traced(text), numbers, sizes)


_traced = functools.lru_cache(maxsize=1024)(Traced.from_text)

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
from typing import Any

import numpy as np

from .. import trace
from ..array import reading, torch_state
from ..array.array import DTYPES
from ..array.eager import eager
from ..errors import ProblemError
from ..trace import Traced
from ..trace.arithmetic import add
from ..trace.canonical import canonical, number_keys
from ..trace.capture import ELEMENTS
from ..trace.conditions import compare, logical, rebuild
from ..trace.expressions import KV, Q, const, make, nodes, var
from ..variant import Option
from ..variant.function import Captures
from ..variant.mask import And, Full
from ..variant.ready import NO_ARRAY, Biased, OfBlockMask, Ready, Sizes
from ..variant.recognition import may_be
from ..variant.score import Scale, number

ROLES = ("mask", "score")


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
    result = Function((traced.code, number_keys(numbers), sizes, traced.labels))
    result.traced, result.numbers = traced, numbers
    return result


class BoundFunction:
    """A function, the arrays that it captured, by reference, and the numbers, by value: ``rawattn.mask.function`` makes it."""

    def __init__(
        self, traced: Traced, arrays: Sequence[Any] = (), numbers: Sequence[int | float] = (), sizes: Sequence[Sizes] = ()
    ) -> None:
        self.function, self.arrays, self.role = function(traced, tuple(numbers), tuple(sizes)), tuple(arrays), traced.role
        self.without_numbers = self.function.without_numbers
        assert traced.text  # which torch.compile reads: it is made here

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebind, (self.function, self.arrays)

    def __repr__(self) -> str:
        traced, numbers = self.function.traced, self.function.numbers
        captured = f", which captured {', '.join(traced.labels)}" if traced.labels else ""
        return f"<rawattn.{self.role}.function {traced.code!r}{captured}{f', with {list(numbers)}' if numbers else ''}>"


def _rebind(option: Function, arrays: tuple[Any, ...]) -> BoundFunction:
    """A copy or a pickle of a ``BoundFunction``: of its text, so that no Python function is looked for."""
    return BoundFunction(option.traced, arrays, option.numbers, option.sizes)


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
    arrays = [x for x in (alibi, bias) if x is not None]
    forms = [(str(x.dtype).rpartition(".")[2], tuple([1 if n > 1 else 0 for n in x.shape])) for x in arrays]
    text, numbers, sizes = bias_text(softcap, alibi is not None, bias is not None, tuple(forms))
    return BiasText(text, numbers, tuple(arrays), sizes)


def bias_text(
    softcap: float | None, has_slopes: bool, has_bias: bool, forms: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[str, tuple[float, ...], tuple[Sizes, ...]]:
    """Text, numbers and sizes of ``Biased`` for arrays of these dtypes, 1 for each axis along which they are longer."""
    arrays = [np.zeros([1 + is_longer for is_longer in axes], ELEMENT_TYPES[dtype]) for dtype, axes in forms]
    slopes, bias = arrays[0] if has_slopes else None, arrays[-1] if has_bias else None
    option, _, numbers = bind_ready(Biased(softcap, slopes, bias), "score")
    return option.traced.text, tuple(numbers), option.sizes


bias_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it while it traces
ELEMENT_TYPES = {dtype: DTYPES[name] for dtype, (name, _) in ELEMENTS.items()}


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
    before, as_function = _block_masks.get(mask, (None, None))
    if as_function is None or before != state:
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
        as_function = OfBlockMask(
            classes.to(torch.uint8).contiguous(), mask.BLOCK_SIZE, mask.mask_mod, getattr(mask, "seq_lengths", None)
        )
        _block_masks[mask] = state, as_function
    return as_function


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
        mask, captured, of_mask = _separate(mask, "mask")
    if type(score) is BiasText:
        captured += score.arrays
        if not torch_state.is_compiling():  # the graph broke since
            score = from_text(score.text, score.numbers, score.sizes)
    elif score is not None and is_function(score):
        score, by_score, of_score = _separate(score, "score")
        captured += by_score
    return mask, score, captured, (of_mask, of_score) if of_mask or of_score else None


def whole(option: Any, numbers: Numbers) -> Any:
    """The mask or score of which ``parted`` took these numbers."""
    return function(option.traced, numbers, option.sizes) if numbers else option


def bind(value: Any, role: str) -> tuple[Function, tuple[Any, ...]]:
    """A function as an option, and the arrays that it captured."""
    option, captured, numbers = _separate(value, role)
    return whole(option, numbers), captured


def _separate(value: Any, role: str) -> tuple[Function, tuple[Any, ...], Numbers]:
    """A function without its numbers, the arrays that it captured, and the numbers; with them where they stay in it."""
    if type(value) is types.FunctionType and not torch_state.is_compiling():
        code = value.__code__
        _, traced, shared = _last[role].get(id(code), (None, None, None))
        binding = None if traced is None else traced.bind(value)
        if traced is not None and binding is not None:
            captured, numbers = binding
            return (shared, captured, numbers) if shared is not None else (function(traced, numbers), captured, ())
        traced, captured, numbers = _trace_anew(value, role)
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
    option, captured, numbers = bind_ready(of_block_mask(value) if is_block_mask(value) else value, role)
    shared = option.without_numbers
    return shared, captured, () if shared is option else numbers


_bind_anew = eager(trace.bind)  # where a graph broke, dynamo would trace it


def _trace_anew(value: Any, role: str) -> trace.Bound:
    """A function traced, with its captures. Raises ProblemError for a tensor that means what its memory does not hold."""
    binding = _bind_anew(value, role)
    for label, x in zip(binding.traced.labels, binding.arrays, strict=True):
        reading.check_plain(label, x)
    return binding


def bind_ready(value: Any, role: str) -> tuple[Function, tuple[Any, ...], tuple[int | float, ...]]:
    """A function that is an object: as an option, with the arrays and the numbers that it captured."""
    traced, captured, numbers = _trace_anew(value, role)
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
    shared = {role: option.without_numbers for role, option in among(options)}
    return {**options, **shared} if any(option is not options[role] for role, option in shared.items()) else options


def of_step(mask: Function, captured: tuple[Any, ...], causal: Any) -> tuple[Function, tuple[Any, ...]]:
    """A mask that also keeps no key behind the query's own position, and what it captured then: for all sequences, or for those
    that ``causal``, an array, says."""
    by_sequence = causal is not True
    traced, arrays, numbers = _add_causal(mask.traced, by_sequence)
    all_arrays = (*captured, causal) if by_sequence else captured
    sizes = tuple((name, arrays.index(place), fixed, axes) for name, place, fixed, axes in mask.sizes if place in arrays)
    return function(traced, tuple(mask.numbers[i] for i in numbers), sizes), tuple(all_arrays[i] for i in arrays)


@functools.lru_cache(maxsize=256)
def _add_causal(traced: Traced, by_sequence: bool) -> tuple[Traced, list[int], list[int]]:
    """Returns what ``of_step`` makes of a traced mask, and the order of its arrays and numbers."""
    kept = compare("le", KV, Q)
    if by_sequence:
        kept = logical("or", kept, compare("eq", make("load", "int", (len(traced.labels), "int32", var("b"))), const(0)))
    code, arrays, numbers = canonical(logical("and", traced.code.root, kept), "mask")
    labels = (*traced.labels, "causal")
    return Traced(code, tuple(labels[i] for i in arrays)), arrays, numbers


def of_part(option: Function, **sizes: int) -> tuple[Function, list[int]]:
    """A function for a part of a problem, and which of the captured arrays are left, in order: q_len and kv_len are these, those
    of the whole, and h counts heads from this one on. It asks for no sizes."""
    names = tuple(sizes)
    traced, arrays, numbers = _put_numbers(option.traced, option.traced.labels, names)
    all_numbers = (*option.numbers, *sizes.values())
    return function(traced, tuple(all_numbers[i] for i in numbers)), arrays


@functools.lru_cache(maxsize=256)
def _put_numbers(traced: Traced, labels: tuple[str, ...], names: tuple[str, ...]) -> tuple[Traced, list[int], list[int]]:
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


# ---- as text


def to_json(by_role: Sequence[tuple[str, Function]]) -> dict[str, Any]:
    """Returns what ``among`` gives as JSON can hold it: by role the text of the code, and the numbers."""
    return {
        role: {"traced": option.traced.text, "numbers": [x.item() if isinstance(x, np.generic) else x for x in option.numbers]}
        | ({"sizes": option.sizes} if option.sizes else {})
        for role, option in by_role
    }


def from_json(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Function]]:
    """The inverse of ``to_json``: what else is in these fields, and the functions by role."""
    traced = {role: fields[role] for role in ROLES if "traced" in fields.get(role, {})}
    rest = {name: value for name, value in fields.items() if name not in traced}
    return rest, {role: _read_saved(x) for role, x in traced.items()}


def _read_saved(saved: Mapping[str, Any]) -> Function:
    sizes = (
        (name, place, fixed and tuple(fixed), tuple(map(tuple, axes))) for name, place, fixed, axes in saved.get("sizes", ())
    )
    return from_text(saved["traced"], tuple(saved["numbers"]), tuple(sizes))


def from_text(text: str, numbers: tuple[int | float, ...], sizes: tuple[Sizes, ...] = ()) -> Function:
    """The function of a ``Traced`` with this text, with these numbers and sizes."""
    return function(_read_traced(text), numbers, sizes)


_read_traced = functools.lru_cache(maxsize=1024)(Traced.from_text)

"""Merging results over several sets of keys into those over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..array import making, reading, torch_state
from ..array.array import Array
from ..array.forms import forms_of
from ..errors import ProblemError, brief
from ..operation import Combine, arguments
from ..operation.operand import check_output
from ..runtime.bound_call import addresses_of
from ..runtime.call_cache import find, keep
from ..runtime.outputs import check_written, to_libraries
from ..runtime.plan import NO_GRAD
from ..variant.element import ELEMENTS
from ..variant.store import MOST_ARRAYS
from .call import call_of


def merge_states(
    parts: Sequence[tuple[Any, Any]], *, sinks: Any = None, out: Any = None, **unknown: arguments.Unpack[arguments.Nothing]
) -> tuple[Any, Any]:
    """Attention over the union of several sets of keys, from o and lse over each of them.

    >>> o, lse = rawattn.merge_states([(o_prefix, lse_prefix), (o_rest, lse_rest)])

    lse = log(sum_p exp(lse_p) + exp(sink)) and o = sum_p exp(lse_p - lse) o_p, added in the order of the parts.

    Args:
        parts: pairs (o, lse) as ``attention``, ``attention_varlen`` and ``attention_kvcache`` give them, of the same queries over
            keys that no two parts share: o (batch, q_len, heads, head_dim_v) or (total_q, heads, head_dim_v), lse
            (batch, heads, q_len) or (heads, total_q), natural logarithms, float32 (float64 for fp64). Strides are free but for
            o's last dimension. A GPU merges 16 in one launch, and adds others to a sum in float32, 15 with each launch, in order.
        sinks: (heads,), as in ``attention``: given here once, and not to the parts.
        out: receives o. It may be float32 where the parts are bf16 or fp16, and o of the first part may then be such a sum of
            others: of many parts, some at a time, o is rounded once. It may be o of the first part itself.

    Returns:
        o in the parts' dtype, or out, and lse.

    A part with lse = -inf takes no part, whatever its o holds; a row without any has o = 0 and lse = -inf, or its sink.

    Raises:
        ProblemError: an argument is wrong.
        UnsupportedError: no kernel does this on the arrays' device.

    The formula is that of FlashAttention's splits (arXiv 2307.08691, section 3.1).
    """
    if unknown:
        arguments.refuse(merge_states, unknown)
    states: list[Any] = []
    if not hasattr(parts, "__iter__"):
        raise ProblemError(f"parts is {brief(parts)}; it must be pairs (o, lse).")
    for i, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise ProblemError(f"part {i} is {type(part).__name__}; it must be a pair (o, lse).")
        states += part
    in_place = out is not None and bool(states) and out is states[0]
    torch_state.check_untraced((*states, sinks))
    read, of_out = forms_of((*states, sinks)), forms_of((out,))
    key = None if read is None or of_out is None else ("merge", read[0], of_out[0], in_place)
    call, addresses = find(key), read[1] if read else ()
    if call is None:
        op, inputs = _prepare(states, sinks, {"out": None if out is None else reading.read(out, "out"), "in_place": in_place})
        if op.count > MOST_ARRAYS and not inputs["o_0"].is_cpu:
            return _merge_in_turn(list(zip(states[::2], states[1::2], strict=True)), sinks, out, inputs)
        call, addresses = call_of(op, inputs), addresses_of(inputs)
        keep(key, call)
    tensors = states if sinks is None else (*states, sinks)
    if in_place:
        (lse,) = call(tensors, addresses)
        torch_state.mark_written(out)
        return out, lse
    return call(tensors, addresses, None if out is None else (out, None))


def _merge_in_turn(parts: list[tuple[Any, Any]], sinks: Any, out: Any, inputs: dict[str, Array]) -> tuple[Any, Any]:
    """``merge_states`` of more parts than a launch takes: some at a time are added to a sum, in order, which is rounded once."""
    if out is not None and out is not parts[0][0]:
        array = reading.read(out, "out")
        check_written("out", array, out)
        check_output("out", array, 1, inputs.items())
    first = inputs["o_0"]
    total = making.maker(first, tuple(first.shape), ELEMENTS[first.dtype].lse_name)(first.object)
    merged = merge_states(parts[:MOST_ARRAYS], out=total)
    for i in range(MOST_ARRAYS, len(parts), MOST_ARRAYS - 1):
        rest = parts[i : i + MOST_ARRAYS - 1]
        is_last = i + len(rest) == len(parts)
        merged = merge_states([merged, *rest], **({"sinks": sinks, "out": out} if is_last else {"out": total}))
    return to_libraries(merged, (out,), parts[0][0])


def _prepare(states: list[Any], sinks: Any, options: dict[str, Any]) -> tuple[Combine, dict[str, Array]]:
    """The operation that merges ``states``, o_0, lse_0 and so on, and its inputs by name. Raises ProblemError for a wrong one."""
    names = Combine.input_names(len(states))
    named = dict(zip(names, states, strict=False)) | ({} if sinks is None else {"sinks": sinks})
    if torch_state.requires_grad(*named.values()):
        raise ProblemError(NO_GRAD)
    inputs = {name: reading.read(x, name) for name, x in named.items()}
    op = Combine.of_call(inputs, options, ())
    if op.in_place:
        check_written("out", inputs["o_0"], states[0])
    return op, inputs

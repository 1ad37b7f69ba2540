"""Appending to caches: new keys and values are written, and q is rotated beside them."""

from __future__ import annotations

import inspect
from typing import Any

from ..array import memory, reading, torch_state
from ..array.array import Array
from ..array.forms import forms_of
from ..errors import ProblemError
from ..operation import Append, arguments
from ..operation.append import rows_of
from ..runtime import front_end
from ..runtime.bound_call import addresses_of
from ..runtime.call_cache import find, keep
from ..runtime.outputs import check_written
from ..runtime.plan import NO_GRAD
from .attention import attention_kvcache, parts_of
from .cache import KVCache
from .call import call_of, check_objects, refuse_where_traced
from .rotary import Rotary
from .step import Step


def append(
    cache: KVCache, step: Step | None, k: Any, v: Any, *, slots: Any = None, rotary: Rotary | None = None, q: Any = None,
    q_out: Any = None, **unknown: arguments.Unpack[arguments.Nothing],
) -> Any:  # fmt: skip
    """Writes new keys and values into a cache, in one launch, and rotates q on the way.

    >>> q = rawattn.append(cache, step, k, v, rotary=rotary, q=q)

    Args:
        cache: a ``rawattn.KVCache``, written in place.
        step: a ``rawattn.Step`` whose kv_lens count the new rows too: row j of a sequence's n new ones is key kv_len - n + j. A
            sequence with kv_len 0 takes no part. None where ``slots`` say where rows go and ``rotary`` has positions or is None.
        k: (batch, n, kv_heads, head_dim), or (total, kv_heads, head_dim) where the step has cu_seqlens_q; in the cache's dtype.
            None where q alone is rotated, as where it has other rows than k: give another step, whose lengths are those of q.
        v: the same with head_dim_v; None where the cache's v is a view of its k, or k is None.
        slots: int64, k's shape without its last two dimensions: where each row goes instead, page * page_size + row of the page;
            a negative one is skipped. The order of rows with one slot is not defined.
        rotary: a ``rawattn.Rotary`` that is applied to k, and to q.
        q: (..., heads, head_dim) with the rows of k, to be rotated; or, of its columns, those from ``rotary.first_column`` on.
        q_out: receives the rotated q; q itself may be given. Rows without a position, such as those of sequences that take no
            part, are left as they are.

    Returns:
        The rotated q, where q is given; else None.

    A page that several sequences share must not be written: no order is kept between them.

    Raises:
        ProblemError: an argument is wrong. On the CPU so are lengths, pages and slots that the cache does not have; on a GPU
            they are on the device, where nothing beyond the cache is written.
        UnsupportedError: no kernel does this on the arrays' device.

    The specification is ``rawattn.reference.append``.
    """
    if unknown:
        arguments.refuse(append, unknown)
    if front_end.load_torch() and front_end.torch.dispatch((q if k is None else k,)) is front_end.torch.attention:
        refuse_where_traced(q_out=q_out)
        return front_end.torch.caches.append(cache, step, k, v, slots, rotary, q)
    return write(cache, step, k, v, slots, rotary, q, q_out)


def write(
    cache: KVCache, step: Step | None, k: Any, v: Any, slots: Any = None, rotary: Rotary | None = None, q: Any = None,
    q_out: Any = None,
) -> Any:  # fmt: skip
    """Computes ``append`` on arrays that have memory."""
    check_objects(cache, step, rotary, optional=True)
    read = read_append(cache, step, rotary, (k, v, slots, q), q_out)
    key, addresses = read or (None, ())
    call = find(key)
    if call is None:
        op, inputs = _prepare(cache, step, rotary, {"k": k, "v": v, "slots": slots, "q": q, "q_out": q_out})
        call, addresses = call_of(op, inputs), addresses_of(inputs)
        keep(key, call)
    in_place = q is not None and q_out is q
    results = call([x for x in (k, v, slots, q) if x is not None], addresses, None if in_place else q_out)
    for x in (*(() if k is None else (cache.k, cache.v)), q_out if in_place else None):
        torch_state.mark_written(x)
    return q_out if in_place else results[0] if results else None


def read_append(cache: KVCache, step: Step | None, rotary: Rotary | None, rows: tuple[Any, ...], q_out: Any) -> Any:
    """The key of an append of ``rows``, the torch tensors k, v, slots and q, and the addresses of its inputs; None where one of
    them is no torch tensor, or autograd would follow."""
    held = [x.held for x in (step, rotary, cache) if x is not None]
    read, of_q_out = forms_of(rows), forms_of((q_out,))
    if read is None or of_q_out is None or [x for x in held if x.requires_grad]:
        return None
    key = ("append", read[0], of_q_out[0], q_out is rows[-1], *[x.forms for x in held])
    return key, sum([x.addresses for x in held], read[1])


def _prepare(cache: KVCache, step: Step | None, rotary: Rotary | None, new: dict[str, Any]) -> tuple[Append, dict[str, Array]]:
    """The operation of an append of ``new`` arrays, and its inputs by name. Raises ProblemError for a wrong argument."""
    if cache.v_in_k and new["v"] is not None:
        raise ProblemError("v was given, but the cache's v is a view of its k; give v=None.")
    if not cache.v_in_k and new["v"] is None and new["k"] is not None:
        raise ProblemError("v is None; it must be an array, since the cache's v is no view of its k.")
    if cache.requires_grad or (rotary is not None and rotary.requires_grad) or torch_state.requires_grad(*new.values()):
        raise ProblemError(NO_GRAD)
    inputs = reading.read_named(tuple(new), tuple(new.values()))
    q_out = inputs.pop("q_out", None)
    inputs |= ({} if step is None else step.arrays) | ({} if rotary is None else rotary.arrays)
    rows = rows_of(inputs).shape
    inputs |= cache.arrays_of(step.batch if step is not None else 1 if len(rows) == 3 else rows[0])
    first = 0 if rotary is None else rotary.first_column
    style = "" if rotary is None else "interleaved" if rotary.interleaved else "neox"
    read = {name: x for name, x in inputs.items() if name not in ("causal", "kv_begin", "keys", "keys_counts")}
    read |= {} if q_out is None else {"q_out": q_out}
    op = Append.of(read, style, *((None, None) if step is None else (step.max_q_len, step.max_kv_len)), cache.scales, first)
    _check_writable(cache)
    if op.in_place and q_out is not None:
        check_written("q_out", q_out, new["q_out"])
    return op, inputs


def attention_append(q: Any, k: Any, v: Any, cache: KVCache, step: Step, *, rotary: Rotary | None = None, **options: Any) -> Any:
    """``append`` of k and v, and ``attention_kvcache`` of q over the cache that holds them then.

    >>> o = rawattn.attention_append(q, k, v, cache, step, rotary=rotary)

    Arguments as in ``append``, and ``options`` as in ``attention_kvcache``, which also says what is given back. With ``rotary`` q
    is rotated too, and stays as it was; of a pair, (q_nope, q_rope), the second is, whose first column the rotary has to say.
    """
    if unknown := [name for name in options if name not in _OPTIONS]:  # before anything is written
        arguments.refuse(attention_append, unknown, options=_OPTIONS)
    *nope, last = parts_of(q)
    if nope and rotary is not None and rotary.first_column != cache.head_dim_v:
        need = f"it must be {cache.head_dim_v}, where q_rope begins"
        raise ProblemError(f"q is a pair, (q_nope, q_rope), and the rotary's first_column {rotary.first_column}; {need}.")
    rotated = append(cache, step, k, v, rotary=rotary, q=None if rotary is None else last)
    return attention_kvcache(q if rotary is None else (*nope, rotated) if nope else rotated, cache, step, **options)


_OPTIONS = tuple(inspect.signature(attention_kvcache).parameters)[4:-1]


def _check_writable(cache: KVCache) -> None:
    """Raises ProblemError where the cache cannot be written in place."""
    for name, array in cache.arrays.items():
        pool = getattr(cache, name)
        if array.object is not pool:
            raise ProblemError(
                f"the cache's {name} is a {type(pool).__name__}, which cannot be written in place; make the cache of torch, CuPy "
                f"or NumPy arrays. A JAX array is immutable: write by {name}.at[...].set(...), and make another KVCache."
            )
        if array.is_cpu and array.library == "numpy" and not pool.flags.writeable:
            raise ProblemError(f"the cache's {name} is read-only; make the cache of a writable array.")
        if memory.overlap(array, array):
            raise ProblemError(f"several elements of the cache's {name} share one place in memory; make it of a whole array.")

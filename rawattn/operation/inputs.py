"""The arrays of a call by name, None for those that are not given."""

from __future__ import annotations

from typing import Any, NamedTuple


class ForwardInputs(NamedTuple):
    """This is what attention reads, but for the arrays that functions captured."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    sinks: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    seed: Any = None
    keys: Any = None
    keys_counts: Any = None


class BackwardInputs(NamedTuple):
    """This is what its gradients read besides: the gradients by o and lse, and these two."""

    do: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    dlse: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    sinks: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    seed: Any = None
    keys: Any = None
    keys_counts: Any = None

    @classmethod
    def of(cls, do: Any, forward: ForwardInputs, o: Any, lse: Any, dlse: Any = None) -> BackwardInputs:
        """The arrays that gradients of ``forward`` read: its own, its results, and the gradients by these."""
        return cls(do, forward.q, forward.k, forward.v, o, lse, dlse, *forward[3:])

"""DTensor splits rawattn's operators by these rules: by heads, and dense ones by batch, except where dropout or a function sees
the number of a head or of a sequence.

Where a batch is split, each part has a sum of the sinks' gradient of its own."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..operation import functions


class _Placements(NamedTuple):
    """The placements of tensors along one axis of the mesh: ``rows`` of q, k, v and all tensors of their dimensions, ``lens`` of
    q_lens and kv_lens."""

    rows: Any
    lse: Any
    sinks: Any
    dsinks: Any
    lens: Any


def register_where_loaded() -> None:
    """Registers the rules where ``torch.distributed.tensor``, which is slow to import, is loaded."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    """Registers the rules of both operators, once. That imports ``torch.distributed.tensor``, which is slow."""
    try:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # before torch 2.5; DTensor then says that it does not know the operators
        return
    whole = Replicate()

    def forward(
        q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *options: Any
    ) -> list[Any]:  # fmt: skip
        varlen, strategies, (deps, more, lens) = cu_seqlens_q is not None, [], _read_options(*options)
        for placements in _list_placements((q, k, v), varlen, deps):
            others = [placements.sinks] * (sinks is not None) + [whole] * (2 * varlen + more) + [placements.lens] * lens
            strategies.append(([placements.rows, placements.lse], [placements.rows] * 3 + others))
        return strategies

    def backward(
        do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, sinks: Any = None, cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None, *options: Any,
    ) -> list[Any]:  # fmt: skip
        varlen, strategies, (deps, more, lens) = cu_seqlens_q is not None, [], _read_options(*options)
        for placements in _list_placements((q, k, v, do, o), varlen, deps):
            others = [placements.lse] * (dlse is not None) + [placements.sinks] * (sinks is not None)
            others += [whole] * (2 * varlen + more) + [placements.lens] * lens
            results = [placements.rows] * 3 + [whole if sinks is None else placements.dsinks]
            strategies.append((results, [placements.rows] * 5 + [placements.lse, *others]))
        return strategies

    register_sharding(torch.ops.rawattn.attention.default)(forward)
    register_sharding(torch.ops.rawattn.attention_backward.default)(backward)


def _read_options(
    max_seqlen_q: Any = None, max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None, captured: Any = None,
    q_lens: Any = None, kv_lens: Any = None, keys: Any = None, keys_counts: Any = None,
) -> tuple[frozenset[str], int, int]:  # fmt: skip
    """Reads the last arguments of an operator. Returns the indices that its dropout, its functions and its lists of keys depend
    on, the number of their tensors, and the number of tensors of lengths. Those of lists come behind lengths, which are whole
    where there are lists."""
    (_, by_role), drops = functions.from_json(json.loads(spec)), seed is not None
    lists = (keys is not None) + (keys_counts is not None)
    deps = frozenset("bh" if drops or lists else "").union(*(function.traced.code.root.deps for function in by_role.values()))
    return deps, drops + len(captured or ()), (q_lens is not None) + (kv_lens is not None) + lists


def _list_placements(specs: Sequence[Any], varlen: bool, deps: frozenset[str]) -> Iterator[_Placements]:
    """Gives each choice of placements along an axis of the mesh, for an operator whose q, k, v and tensors of their dimensions
    have these ``specs``. A part counts its heads and sequences from 0: where ``deps`` has these numbers, they are not split."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield _Placements(*[Replicate()] * 5)
    # Evenly, or heads of q would meet others of k than their own.
    if "h" not in deps and specs[1].tensor_meta.shape[-2] % _count_head_parts(specs, not varlen) == 0:
        head = 1 if varlen else 2
        yield _Placements(Shard(head), Shard(head - 1), Shard(0), Shard(0), Replicate())
    if not varlen and "b" not in deps:
        yield _Placements(Shard(0), Shard(0), Replicate(), Partial(), Shard(0))


def _count_head_parts(specs: Sequence[Any], batched: bool) -> int:
    """Counts the parts into which DTensor might split the heads of tensors with these specs: it might along each axis of the mesh
    on which they are not replicated, and whose split of their batch, if any, cannot stay."""
    mesh = specs[0].mesh
    batched = batched and specs[0].tensor_meta.shape[0] >= mesh.size()
    parts = 1
    for size, *placements in zip(mesh.shape, *(spec.placements for spec in specs), strict=True):
        if not (all(x.is_replicate() for x in placements) or (batched and all(x.is_shard(0) for x in placements))):
            parts *= size
    return parts

"""DTensor splits rawattn's operators by these rules: by heads, and dense ones by batch, but not by what dropout or a function
numbers.

Along a split batch each part has its own sum of the sinks' gradient."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..operation import functions


class _Way(NamedTuple):
    """Holds the placements along one axis of the mesh: of q, k, v and their like; of lse; of sinks; of the sinks' gradient;
    of q_lens and kv_lens."""

    rows: Any
    lse: Any
    sinks: Any
    dsinks: Any
    lens: Any


def register_where_loaded() -> None:
    """Registers the rules once ``torch.distributed.tensor``, which is slow to import, is there."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    """Registers the rules of both operators; once. It imports ``torch.distributed.tensor``, which is slow."""
    try:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # before torch 2.5; DTensor then says that it does not know the operators
        return
    whole = Replicate()

    def forward(
        q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *options: Any
    ) -> list[Any]:  # fmt: skip
        varlen, found, (deps, more, lens) = cu_seqlens_q is not None, [], _beside(*options)
        for way in _ways((q, k, v), varlen, deps):
            others = [way.sinks] * (sinks is not None) + [whole] * (2 * varlen + more) + [way.lens] * lens
            found.append(([way.rows, way.lse], [way.rows] * 3 + others))
        return found

    def backward(
        do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, sinks: Any = None, cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None, *options: Any,
    ) -> list[Any]:  # fmt: skip
        varlen, found, (deps, more, lens) = cu_seqlens_q is not None, [], _beside(*options)
        for way in _ways((q, k, v, do, o), varlen, deps):
            others = [way.lse] * (dlse is not None) + [way.sinks] * (sinks is not None) + [whole] * (2 * varlen + more)
            others += [way.lens] * lens
            results = [way.rows] * 3 + [whole if sinks is None else way.dsinks]
            found.append((results, [way.rows] * 5 + [way.lse, *others]))
        return found

    register_sharding(torch.ops.rawattn.attention.default)(forward)
    register_sharding(torch.ops.rawattn.attention_backward.default)(backward)


def _beside(
    max_seqlen_q: Any = None, max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None, captured: Any = None,
    q_lens: Any = None, kv_lens: Any = None,
) -> tuple[frozenset[str], int, int]:  # fmt: skip
    """Returns what dropout and functions among an operator's last arguments depend on, how many tensors are theirs, and how many
    say which rows are used."""
    (_, own), drops = functions.from_json(json.loads(spec)), seed is not None
    deps = frozenset("bh" if drops else "").union(*(each.traced.code.root.deps for each in own.values()))
    return deps, drops + len(captured or ()), (q_lens is not None) + (kv_lens is not None)


def _ways(specs: Sequence[Any], varlen: bool, deps: frozenset[str]) -> Iterator[_Way]:
    """The ways in which tensors, of which ``specs`` are q, k, v and others of their form, may lie along an axis of the mesh. A
    part counts its heads, and its sequences, from 0: where something depends on these numbers they are not split."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield _Way(*[Replicate()] * 5)
    # Evenly, or heads of q would meet others of k than their own.
    if "h" not in deps and specs[1].tensor_meta.shape[-2] % _head_parts(specs, not varlen) == 0:
        head = 1 if varlen else 2
        yield _Way(Shard(head), Shard(head - 1), Shard(0), Shard(0), Replicate())
    if not varlen and "b" not in deps:
        yield _Way(Shard(0), Shard(0), Replicate(), Partial(), Shard(0))


def _head_parts(specs: Sequence[Any], batched: bool) -> int:
    """Counts the parts into which DTensor might split the heads of tensors that lie as their specs say: along each axis of the
    mesh that they are not replicated on. Along one that splits their batch they stay so."""
    mesh = specs[0].mesh
    batched = batched and specs[0].tensor_meta.shape[0] >= mesh.size()
    parts = 1
    for size, *placements in zip(mesh.shape, *(spec.placements for spec in specs), strict=True):
        if not (all(x.is_replicate() for x in placements) or (batched and all(x.is_shard(0) for x in placements))):
            parts *= size
    return parts

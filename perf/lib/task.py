"""A case with its data on the GPU, as every contender is given it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from rawattn.array.array import DTYPES
from rawattn.testing import Case

from .functions import FUNCTIONS


class Unserved(Exception):
    """The peer does not compute this case; the message says why."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A case with its inputs on the GPU, torch tensors of N(0, 1). ``packed`` are cu_seqlens and maximal lengths, of q and k."""

    case: Case
    q: Any
    k: Any
    v: Any
    packed: tuple[Any, ...] = ()

    @classmethod
    def make(cls, case: Case, seed: int = 0, device: str = "cuda") -> Task:
        import torch

        random, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, DTYPES[case.dtype].name)
        rows: list[tuple[int, ...]] = [(case.batch, case.q_len), (case.batch, case.kv_len)]
        packed: tuple[Any, ...] = ()
        if case.lengths is not None:
            lengths = [torch.tensor([0, *each], device=device) for each in zip(*case.lengths, strict=True)]
            rows = [(int(each.sum()),) for each in lengths]
            packed = (*(each.cumsum(0).int() for each in lengths), *(int(each.max()) for each in lengths))
        sizes = (0, case.heads, case.head_dim), (1, case.kv_heads, case.head_dim), (1, case.kv_heads, case.head_dim_v)
        q, k, v = (torch.randn(*rows[i], *rest, device=device, dtype=dtype, generator=random) for i, *rest in sizes)
        return cls(case, q, k, v, packed)

    @functools.cached_property
    def heads_first(self) -> list[Any]:
        """Copies of q, k, v as (batch, heads, length, dim), the layout of torch."""
        return [x.contiguous() for x in self.views]

    @property
    def views(self) -> list[Any]:
        """q, k, v as they lie, seen in the layout of torch."""
        return [x.transpose(1, 2) for x in (self.q, self.k, self.v)]

    @property
    def o_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.case.head_dim_v)

    @property
    def sinks(self) -> dict[str, Any]:
        """The keyword argument ``sinks`` on q's device, where the case has sinks."""
        return {"sinks": self.case.sink_logits("torch", self.q.device)} if self.case.sinks else {}

    @functools.cached_property
    def function(self) -> Any:
        """The Python function that is the case's mask or score, on what it captures on q's device; None where it has none."""
        name = getattr(self.case, "function", None)
        return None if name is None else FUNCTIONS[name].make(self.case, str(self.q.device))

    @functools.cached_property
    def keys(self) -> Any:
        """The lists of blocks that the case has on q's device; None where it has none."""
        made = getattr(self.case, "lists", None)
        return None if made is None else made(str(self.q.device), 0)

    @property
    def functions(self) -> dict[str, Any]:
        """The keyword argument ``mask`` or ``score`` for it, or ``keys``."""
        if self.keys is not None:
            return {"keys": self.keys}
        return {} if self.function is None else {FUNCTIONS[getattr(self.case, "function", "")].role: self.function}

    def refuse(self, *names: str) -> None:
        """Raises Unserved where the case has what no peer is given (a mask object, a score, sinks, offsets, a function), or what
        is named: lengths (packed sequences), window, softcap."""
        for name in ("mask", "score", "sinks", "q_offset", "kv_offset", "function", *names):
            if getattr(self.case, name, None) not in (None, False):
                raise Unserved(f"no {name}")

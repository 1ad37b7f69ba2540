"""Operations to test with: ``forward`` makes one, ``replace`` changes one, ``backward`` makes the gradients of one. All of them
know which fields are the spec's."""

from __future__ import annotations

import dataclasses
from typing import Any

from rawattn.operation import Backward, Forward
from rawattn.operation.spec import Spec
from rawattn.variant.element import BF16, Element

_OF_SPEC = {field.name for field in dataclasses.fields(Spec)}


def forward(
    element: Element,
    batch: int,
    q_len: int,
    kv_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    **fields: Any,
) -> Forward:
    """``Forward`` with these fields and the defaults; fields of ``Spec`` are put there."""
    spec = Spec(**{name: value for name, value in fields.items() if name in _OF_SPEC})
    own = {name: value for name, value in fields.items() if name not in _OF_SPEC}
    return Forward(element, batch, q_len, kv_len, heads, kv_heads, head_dim, head_dim_v, spec, **own)


def replace(op: Forward, **changes: Any) -> Forward:
    """The operation with other fields, its own or its spec's."""
    spec = dataclasses.replace(op.spec, **{name: value for name, value in changes.items() if name in _OF_SPEC})
    return dataclasses.replace(op, **{"spec": spec} | {name: value for name, value in changes.items() if name not in _OF_SPEC})


def backward(size: tuple[int, int], *, element: Element = BF16, dlse: bool = False, **fields: Any) -> Backward:
    """``Backward`` of a forward with these head sizes, fields as in ``forward``, and defaults for all others."""
    shape = {"batch": 8, "q_len": 2048, "kv_len": 2048, "heads": 16, "kv_heads": 16, **fields}
    if shape.get("varlen"):
        shape = {"total_q": shape["batch"] * shape["q_len"], "total_kv": shape["batch"] * shape["kv_len"], **shape}
    return Backward(forward(element, head_dim=size[0], head_dim_v=size[1], **shape), dlse)

"""This module knows which rows of a sequence each rank of a group has, and splits tensors into these parts and joins them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import ProblemError
from .schedule import LAYOUTS, Whole


def group_of(group: Any) -> Any:
    """Returns the process group that ``group`` means: all processes for None, the only dimension of a DeviceMesh. Raises
    ProblemError for anything else, and where this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ProblemError("there is no process group; call torch.distributed.init_process_group first.")
    process_group = dist.group.WORLD if group is None else group
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ProblemError(f"group is a mesh of {group.ndim} dimensions {names}; give one of them, such as mesh['cp'].")
        if group.get_coordinate() is None:
            raise ProblemError("group is a mesh that does not have this process; call only in its processes.")
        process_group = group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ProblemError(f"group is {group!r}; it must be a ProcessGroup, a DeviceMesh of one dimension, or None.")
    if dist.get_rank(process_group) < 0:
        raise ProblemError("group does not have this process; call only in its processes.")
    return process_group


def check_layout(layout: Any) -> None:
    """Raises ProblemError where ``layout`` is none."""
    if layout not in LAYOUTS:
        raise ProblemError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}.")


def _check_rows(name: str, length: int, layout: Any) -> None:
    """Raises ProblemError where ``length`` rows on a rank are no part of a sequence in the layout."""
    check_layout(layout)
    if layout == "zigzag" and length % 2:
        raise ProblemError(f"{name} {length} rows on this rank; for layout='zigzag' it must be an even number.")


def _check_dim(x: Any, dim: Any) -> None:
    """Raises ProblemError where x is no torch tensor with such a dimension."""
    if not isinstance(x, torch.Tensor):
        raise ProblemError(f"x is a {type(x).__name__}; it must be a torch tensor.")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ProblemError(f"dim is {dim!r}; it must be a dimension of x, an int from {-x.dim()} to {x.dim() - 1}.")


def split(x: Any, group: Any = None, *, layout: str = "zigzag", dim: int = 1) -> Any:
    """Gives the rows of this rank, of a tensor that every rank has whole.

    >>> tokens = rawattn.parallel.split(tokens, mesh["cp"])  # (batch, length) -> (batch, length / n)

    Args:
        x: a tensor whose dimension ``dim`` is the sequence. Its length is a multiple of n, the number of ranks, for "contiguous",
            and of 2n for "zigzag".
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        layout: "contiguous": rank r has rows r * length / n and on; "zigzag": of 2n equal chunks rank r has chunks r and
            2n - 1 - r, one behind the other.

    Returns:
        A new contiguous tensor with length / n rows. Autograd follows it.
    """
    check_layout(layout)
    _check_dim(x, dim)
    group = group_of(group)
    count, length = dist.get_world_size(group), x.shape[dim]
    parts = 2 * count if layout == "zigzag" else count
    if length % parts:
        raise ProblemError(f"x has {length} rows along dim {dim}; for layout={layout!r} it must be a multiple of {parts}.")
    whole = Whole((), False, count, length // count, length // count, layout)
    spans = whole.spans(dist.get_rank(group), length // count)
    pieces = [x.narrow(dim, span.position, span.end - span.begin) for span in spans]
    return torch.cat(pieces, dim).contiguous() if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def join(x: Any, group: Any = None, *, layout: str = "zigzag", dim: int = 1) -> Any:
    """Gives the whole of a tensor of which every rank has a part: the inverse of ``split``.

    >>> o = rawattn.parallel.join(o, mesh["cp"])  # (batch, length / n, ...) -> (batch, length, ...)

    It is for looking at results: x must not require grad, since whose gradient it were would be open.
    """
    _check_dim(x, dim)
    _check_rows("x has", x.shape[dim], layout)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ProblemError("x requires grad, and join has no gradient; give x.detach(), or call under torch.no_grad().")
    group = group_of(group)
    count, length = dist.get_world_size(group), x.shape[dim]
    whole = Whole((), False, count, length, length, layout)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(parts, x.contiguous(), group=group)
    pieces = {
        span.position: parts[rank].narrow(dim, span.begin, span.end - span.begin)
        for rank in range(count)
        for span in whole.spans(rank, length)
    }
    return torch.cat([pieces[position] for position in sorted(pieces)], dim)


def positions(length: int, group: Any = None, *, layout: str = "zigzag", device: Any = None) -> Any:
    """Gives the positions in the sequence of this rank's ``length`` rows, int64, (length,): for rotary embeddings.

    >>> cos, sin = rope(rawattn.parallel.positions(q.shape[1], mesh["cp"], device=q.device))
    """
    if not isinstance(length, int) or length < 0:
        raise ProblemError(f"length is {length!r}; it must be an int >= 0, the rows of this rank.")
    _check_rows("length is", length, layout)
    group = group_of(group)
    whole = Whole((), False, dist.get_world_size(group), length, length, layout)
    spans = whole.spans(dist.get_rank(group), length)
    return torch.cat([torch.arange(s.position, s.position + s.end - s.begin, device=device) for s in spans])

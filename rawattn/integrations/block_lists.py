"""Lists of blocks as adapters need them: of bools, of blocks of any size, and scores that leave out single keys."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..operation.keys import Blocks


def list_blocks(kept: Any) -> tuple[Any, Any]:
    """The numbers of the blocks that are kept, in rising order with -1 behind, and how many they are, of bools (..., blocks)."""
    order, counts = torch.argsort(~kept, dim=-1, stable=True), kept.sum(-1, dtype=torch.int32)
    places = torch.arange(kept.shape[-1], device=kept.device)
    return torch.where(places < counts[..., None], order, -1).int(), counts


def make_keys(indices: Any, counts: Any, block_q: int, block: int, end: Any) -> Blocks:
    """The lists of blocks of ``block`` keys as ``Blocks``, whose sizes are powers of two up to 128: a larger block is several,
    side by side. Those that begin at key ``end`` or later are left out, but for a block's first. Negative numbers stay."""
    size = min(block & -block, 128)
    if (parts := block // size) > 1:
        of_block = torch.arange(parts, dtype=torch.int32, device=indices.device)
        each = indices[..., None] * parts + of_block
        each = torch.where((of_block == 0) | (each * size < end), each, -1)
        indices = torch.where(indices[..., None] < 0, indices[..., None], each).flatten(-2)
        counts = None if counts is None else counts * parts
    return Blocks(indices, counts, block_q, size)


def keep_filled(sizes: Any, block: int) -> Any:
    """A score that leaves out all but the first sizes[i] keys of block i. Beside lists a score has gradients on GPUs, where a
    mask that is a function has none."""
    there = (torch.arange(block, device=sizes.device) < sizes[:, None]).flatten()
    return lambda s, kv: torch.where(there[kv], s, -math.inf)

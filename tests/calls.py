"""A ``Case``, called and checked."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import filelock

import rawattn
from rawattn.kernel.base import Kernel
from rawattn.testing import Case, expect


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New torch tensors are all NaN, so that a result that is not written shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def much_memory() -> Iterator[None]:
    """Lets one process at a time hold tens of gigabytes of the GPU, and gives them back: torch would keep them."""
    import torch

    with filelock.FileLock(pathlib.Path(tempfile.gettempdir()) / "rawattn-tests-much-memory.lock"):
        try:
            yield
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def far(x: Any) -> Any:
    """Returns a copy of a torch tensor whose batches, rows or heads, whichever there are three of, lie 2^30 elements apart."""
    apart, strides = 1 << 30, list(x.contiguous().stride())
    strides[x.shape.index(3)] = apart  # twice that is more than 31 bits count
    return x.new_empty(2 * apart + (1 << 20)).as_strided(x.shape, strides).copy_(x)


def attend(case: Case, *inputs: Any, kernel: Kernel | None = None, **options: Any) -> Any:
    """Returns what ``rawattn.attention`` or ``attention_varlen`` gives for these inputs: (o, lse) unless the options differ.
    ``kernel`` computes it; None leaves the choice to the library."""
    options = {**case.options, "return_lse": True, "kernel": kernel and kernel.name, **options}
    if case.sinks:
        options["sinks"] = case.sink_logits("torch", inputs[0].device)
    with poisoned_memory():
        if case.lengths is None:
            return rawattn.attention(*inputs, **options)
        return rawattn.attention_varlen(*inputs, case.op.q_len, case.op.kv_len, **options)


def check(case: Case, *inputs: Any, kernel: Kernel | None = None, **options: Any) -> None:
    """Compares what ``attend`` gives with the reference. ``inputs`` are the case's own, torch tensors on a GPU, unless given."""
    inputs = inputs or case.inputs("torch", "cuda")
    o, lse = attend(case, *inputs, kernel=kernel, **options)
    expect(*inputs, **case.options).check(o, lse)
    without_key = lse == -float("inf")
    assert not o.swapaxes(-2, -3)[without_key].any(), "a row without a key is not 0"

"""Violations: what launches on a GPU found wrong in lengths, pages and slots."""

from __future__ import annotations

from typing import Any

from ..array import reading
from ..driver import counters


def violations(device: Any = 0) -> tuple[str, ...]:
    """Says what launches on a GPU found wrong since the last call: lengths, pages and slots that a cache does not have, and
    ``cu_seqlens`` that lie outside of packed rows.

    >>> rawattn.violations(q.device)
    ('kv_len: a sequence is longer than its bound, its pages, or shorter than its new rows',)

    Args:
        device: the GPU's number, or as torch, CuPy and JAX name it: ``torch.device``, "cuda:0", ``cupy.cuda.Device``, a JAX
            device. "cuda" is torch's current one. A CPU gives (), since there what is wrong raises.

    It waits for the device. What was wrong was left out: nothing beyond the arrays was read or written. Raises ProblemError for
    what is no device.
    """
    number = reading.number_of_device(device)
    bits = 0 if number is None else counters.take_violations(number)
    return tuple(f"{name}: {what}" for bit, (name, what) in enumerate(VIOLATIONS.items()) if bits >> bit & 1)


VIOLATIONS = {  # in the order of the bits in tile/violated.cuh
    "kv_len": "a sequence is longer than its bound, its pages, or shorter than its new rows",
    "q_len": "a sequence has more rows of q than its bound, or cu_seqlens_q lies outside of them",
    "page": "a sequence has a page that is none of the cache's",
    "position": "a row has a position that cos and sin do not have",
    "slot": "a slot is none of the cache's",
    "kv_begin": "the first key of a sequence that counts is none of its keys",
    "torn": "lengths over a cache changed while a launch read them, and its results are undefined; it or the next launch says so",
    "cu_seqlens": "cu_seqlens_q or cu_seqlens_kv fall, or lie outside of the rows; sequences from there on were left out",
    "keys": "a list of keys has a number that is neither -1 nor a key of its sequence, or counts more numbers than it has",
}

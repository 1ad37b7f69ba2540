"""The options of ``attention`` that a bias of pairs means which several entries of the batch share, as protein models have it."""

from __future__ import annotations

from typing import Any


def pair_options(bias: Any, n: int, key_bias: Any = None, keep: Any = None) -> dict[str, Any]:
    """The options of a call on (batch n, S, heads, head_dim), where ``n`` entries that follow each other share one of the biases
    of pairs, (batch, heads, S, S_k). ``key_bias`` is added for a key, (batch n, S_k), and ``keep`` says whether it is kept."""
    n, options = max(1, n), dict[str, Any]()
    if bias is not None and key_bias is not None:
        options["score"] = lambda s, b, h, q, kv: s + bias[b // n, h, q, kv] + key_bias[b, kv]
    elif bias is not None:
        options |= {"bias": bias[0]} if len(bias) == 1 else {"score": lambda s, b, h, q, kv: s + bias[b // n, h, q, kv]}
    elif key_bias is not None:
        options["score"] = lambda s, b, h, q, kv: s + key_bias[b, kv]
    if keep is not None:
        options["mask"] = lambda b, h, q, kv: keep[b, kv]
    return options

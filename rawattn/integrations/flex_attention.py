"""torch's ``flex_attention``, with its signature, computed by rawattn.

>>> from rawattn.integrations.flex_attention import create_block_mask, flex_attention
>>> block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 4096, 4096)
>>> o = flex_attention(query, key, value, block_mask=block_mask)  # (batch, heads, length, head_dim)

A score_mod becomes a score of ``rawattn.attention``, a mask_mod a mask: each is traced once, and nothing of the size of queries x
keys is made. ``docs/functions.md`` says what a function may do. torch.compile is not needed.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from .. import mask
from ..api.naming import naming
from ..errors import ProblemError, UnsupportedError
from ..operation import functions
from ..operation.functions import BoundFunction
from ..trace.tracing import ALIASES, POSITIONAL
from . import sdpa

BlockMask, create_mask = flex.BlockMask, flex.create_mask
and_masks, or_masks, noop_mask = flex.and_masks, flex.or_masks, flex.noop_mask
AuxRequest, AuxOutput = (getattr(flex, name, None) for name in ("AuxRequest", "AuxOutput"))  # torch 2.9


@naming(q="query", k="key", v="value", score="score_mod", mask="block_mask")
def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Callable[..., Any] | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """Computes what ``torch.nn.attention.flex_attention.flex_attention`` does.

    Args:
        query: (batch, heads, q_len, head_dim). key: (batch, kv_heads, kv_len, head_dim). value: as key, with head_dim_v. They are
            read as transposed views, and nothing is copied. A key and a value of one sequence are for all of query's.
        score_mod: score_mod(score, b, h, q_idx, kv_idx), which makes a logit of scale * q.k; or ``rawattn.score.function(f)``.
            Tensors of floats that it captured get gradients where they require grad.
        block_mask: what ``create_block_mask`` of this module gives, torch's ``BlockMask``, a mask_mod itself, or
            ``rawattn.mask.function(f)``.
        scale: the factor on q.k, 1 / sqrt(head_dim) by default.
        enable_gqa: allow heads that are a multiple of those of key and value.
        return_lse: give (o, lse). kernel_options: hints to torch's kernels; ignored, with a warning.
        return_aux: an ``AuxRequest``: give (o, ``AuxOutput``). max_scores is refused, as no kernel keeps it.

    Returns:
        o, (batch, heads, q_len, head_dim_v). lse is (batch, heads, q_len), the natural logarithm of the sum of exponentials, in
        float32 (float64 for float64). A query that keeps no key gives 0, and lse -inf. Autograd follows both, once. Where
        autograd does not follow, o lies in memory as query does.

    Raises UnsupportedError where no kernel computes the call, ProblemError for a wrong argument.
    """
    if return_aux is not None and return_lse:
        raise ProblemError("return_lse was given beside return_aux; give return_aux=AuxRequest(lse=True) alone.")
    if return_aux is not None and return_aux.max_scores:
        raise UnsupportedError("return_aux asks for max_scores, which no kernel keeps; ask for lse alone.")
    if kernel_options:
        warnings.warn("kernel_options are hints to torch's kernels; rawattn ignores them.", stacklevel=3)
    _check_shapes(query, key, value, enable_gqa)
    if key.shape[0] != query.shape[0] and key.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    lse_wanted = return_lse or (return_aux is not None and return_aux.lse)
    options: dict[str, Any] = {"scale": scale, "return_lse": lse_wanted}
    if score_mod is not None:
        options["score"] = by_position(score_mod, "score")
    if block_mask is not None:
        options["mask"] = _read_mask(block_mask, query, key)
    o, lse = sdpa.attend(query, key, value, options)
    if return_aux is not None:
        return o, AuxOutput(lse=lse)  # type: ignore[misc]  # who has a request has it
    return (o, lse) if lse_wanted else o


class TracedMask:
    """The result of ``create_block_mask``: a mask_mod that was traced, and the sizes that it is for. It has no blocks."""

    def __init__(self, mask_mod: Any, sizes: tuple[int, int, int, int], device: Any, block: Any) -> None:
        self.mask_mod, self.shape, self.device, self.block = mask_mod, sizes, device, block
        self.function = mask.function(by_position(mask_mod, "mask"))

    def __repr__(self) -> str:
        return f"<TracedMask for {self.shape} (batch, heads, q_len, kv_len): {self.function!r}>"

    def to_block_mask(self) -> Any:
        """Makes torch's ``BlockMask`` of the mask_mod. That asks for every pair."""
        return flex.create_block_mask(self.mask_mod, *self.shape, device=self.device, BLOCK_SIZE=self.block)


@naming(mask="mask_mod")
def create_block_mask(
    mask_mod: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: Any = 128, _compile: bool = False, *rest: Any, **more: Any,
) -> TracedMask:  # fmt: skip
    """Traces a mask_mod for ``flex_attention`` of this module, with the signature of torch's own ``create_block_mask``.

    No pair is asked, as kernels bound a mask over tiles by themselves: it takes no time and no memory that grow with the lengths.
    B and H are those of query, or None or 1 for all. BLOCK_SIZE is for ``TracedMask.to_block_mask``; _compile and the arguments
    behind it are ignored.
    """
    return TracedMask(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), device, BLOCK_SIZE)


def by_position(mod: Any, role: str) -> Any:
    """Returns a function that gets the arguments of ``mod`` by position, as torch passes them, whatever their names say."""
    if isinstance(mod, BoundFunction) or not callable(mod):
        return mod
    wanted = POSITIONAL[role]
    if type(mod) is types.FunctionType:
        names = mod.__code__.co_varnames[: mod.__code__.co_argcount - len(mod.__defaults__ or ())]
    else:
        names = tuple(p.name for p in inspect.signature(mod).parameters.values() if p.default is p.empty)
    order = tuple(ALIASES.get(name) for name in names)
    if order == wanted or sorted(map(str, order)) != sorted(wanted):
        return mod
    if role == "score":
        return lambda s, b, h, q, kv: mod(s, b, h, q, kv)
    return lambda b, h, q, kv: mod(b, h, q, kv)


def _read_mask(block_mask: Any, query: Any, key: Any) -> Any:
    """Reads block_mask as a mask of ``rawattn.attention``. Raises ProblemError where it is for other sizes."""
    if not isinstance(block_mask, TracedMask):
        if not (callable(block_mask) or isinstance(block_mask, BoundFunction) or functions.is_block_mask(block_mask)):
            raise ProblemError(f"block_mask is a {type(block_mask).__name__}; it must be a BlockMask, a mask_mod, or None.")
        return block_mask if functions.is_block_mask(block_mask) else by_position(block_mask, "mask")
    shape, sizes = block_mask.shape, (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if any(n not in ((1, need) if axis < 2 else (need,)) for axis, (n, need) in enumerate(zip(shape, sizes, strict=True))):
        raise ProblemError(
            f"block_mask was made for {shape} (B, H, Q_LEN, KV_LEN), but query and key have {sizes}; make one for these. A "
            "B or an H of None is for all."
        )
    return block_mask.function


def _check_shapes(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.is_nested:
            kind = "nested tensor" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ProblemError(f"{name} is a {kind}; it must be a torch tensor of 4 dimensions, (batch, heads, length, d).")
        if x.dim() != 4:
            raise ProblemError(f"{name} has {x.dim()} dimensions, {tuple(x.shape)}; it must have 4, (batch, heads, length, d).")
    sdpa.check_heads(query.shape[1], key.shape[1], enable_gqa)
    if key.shape[0] not in (1, query.shape[0]):
        raise ProblemError(f"key has {key.shape[0]} sequences but query {query.shape[0]}; give as many, or one for all.")

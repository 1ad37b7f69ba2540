"""What is asked for: a frozen, hashable value without pointers or devices, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
import math

from .errors import ProblemError
from .variant import mask as masks
from .variant import score as scores
from .variant.element import Element

LONGEST = 1 << 30  # rows of a sequence or a packed tensor: positions and window bounds fit an int32 together


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem.

    Lengths are rows: of every sequence when dense, of the longest one (``max_seqlen``) when ``varlen``. ``total_q`` and
    ``total_kv`` are the rows of the whole tensors, batch * length when dense. ``constant_time`` asks for instructions that do not
    depend on the numbers. ``tma_unsupported_reason`` says why the copy engine of Hopper cannot read these strides or pointers, ``unaligned_reason``
    why threads cannot read them 16 bytes at a time; None where they can.
    """

    element: Element
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    mask: masks.Mask = dataclasses.field(default_factory=masks.Full)
    score: scores.Score = dataclasses.field(default_factory=scores.Scale)
    varlen: bool = False
    total_q: int = -1
    total_kv: int = -1
    return_lse: bool = False
    constant_time: bool = False
    tma_unsupported_reason: str | None = None
    unaligned_reason: str | None = None

    def __post_init__(self) -> None:
        if not self.varlen:
            object.__setattr__(self, "total_q", self.batch * self.q_len)
            object.__setattr__(self, "total_kv", self.batch * self.kv_len)
        for name in ("heads", "kv_heads", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"q has {self.heads} heads but k has {self.kv_heads}; the heads of q must be a multiple of those of k and v."
            )
        for name in ("q_len", "kv_len"):
            if not 0 <= getattr(self, name) < LONGEST:
                raise ProblemError(f"{name} is {getattr(self, name)}; it must be from 0 to {LONGEST - 1}.")
        if not math.isfinite(self.scale):
            raise ProblemError(f"scale is {self.scale}; it must be a finite number, or None for 1 / sqrt(head_dim).")

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    @functools.cached_property
    def pairs(self) -> int:
        """(query, key) pairs that the mask keeps, of one batch and head; for varlen as if every sequence had the mean lengths,
        since the lengths themselves are on the device."""
        q_len, kv_len = self.q_len, self.kv_len
        if self.varlen and self.batch:
            q_len, kv_len = round(self.total_q / self.batch), round(self.total_kv / self.batch)
        return masks.kept_pairs(self.mask, q_len, kv_len)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the kept pairs."""
        return 2 * (self.head_dim + self.head_dim_v) * self.batch * self.heads * self.pairs

    @property
    def bytes(self) -> int:
        """Fewest bytes that must cross device memory: each input read once, each output written once."""
        q_like = self.total_q * self.heads * (self.head_dim + self.head_dim_v)
        kv = self.total_kv * self.kv_heads * (self.head_dim + self.head_dim_v)
        return (q_like + kv) * self.element.itemsize + (4 * self.total_q * self.heads if self.return_lse else 0)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        length = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        packed = f" varlen, {self.total_q} and {self.total_kv} rows," if self.varlen else ""
        return (
            f"{self.element.name} batch {self.batch}, length {length},{packed} heads {heads}, head_dim {dim}, "
            f"{self.mask}, {self.score}, scale {self.scale:.6g}{', lse' if self.return_lse else ''}"
            f"{', constant time' if self.constant_time else ''}"
        )


def make_mask(causal: bool, window: tuple[int | None, int | None] | None, mask: masks.Mask | None) -> masks.Mask:
    """The mask that the shorthands ``causal`` and ``window`` mean, or ``mask`` itself."""
    if mask is not None:
        if causal or window is not None:
            raise ProblemError("mask was given beside causal or window; combine them as mask=rawattn.mask.Both(a, b).")
        if not hasattr(mask, "interval") or isinstance(mask, type):
            raise ProblemError(f"mask is {mask!r}; it must be a mask, such as rawattn.mask.Causal().")
        return mask
    if not isinstance(causal, bool):
        raise ProblemError(f"causal is {causal!r}; it must be True or False.")
    if window is None:
        return masks.Causal() if causal else masks.Full()
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ProblemError(f"window is {window!r}; it must be a pair (left, right) of ints >= 0 or None for unbounded.")
    band = masks.Window(*window)
    return masks.Both(masks.Causal(), band) if causal else band


def make_score(softcap: float | None, score: scores.Score | None) -> scores.Score:
    """The score that the shorthand ``softcap`` means, or ``score`` itself."""
    if score is not None:
        if softcap is not None:
            raise ProblemError("score was given beside softcap; give one of them.")
        if not hasattr(score, "cuda_type") or isinstance(score, type) or hasattr(score, "interval"):
            raise ProblemError(f"score is {score!r}; it must be a score, such as rawattn.score.Softcap(30.0).")
        return score
    return scores.Scale() if softcap is None else scores.Softcap(softcap)


def make_scale(scale: float | None, head_dim: int) -> float:
    """The factor on q.k: 1 / sqrt(head_dim) unless given."""
    if scale is None:
        return head_dim**-0.5
    try:
        return float(scale)
    except (TypeError, ValueError):
        raise ProblemError(f"scale is {scale!r}; it must be a finite number, or None for 1 / sqrt(head_dim).") from None

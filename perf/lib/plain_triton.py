"""Attention in Triton, written the obvious way: a second opinion on results and on what simplicity costs in speed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # its arguments are those of a kernel
    Q, K, V, Out, scale_log2, q_len, kv_len, heads, group,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_Q
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    rows, columns, keys = first + tl.arange(0, TILE_Q), tl.arange(0, DIM), tl.arange(0, TILE_KV)
    q_step, kv_step = heads * DIM, heads // group * DIM  # from row to row
    q_at = (batch * q_len * heads + head) * DIM + rows[:, None] * q_step + columns[None, :]
    kv_at = (batch * kv_len * (heads // group) + head // group) * DIM
    q = tl.load(Q + q_at, mask=rows[:, None] < q_len, other=0.0)
    k_at, v_at = K + kv_at + columns[:, None] + keys[None, :] * kv_step, V + kv_at + keys[:, None] * kv_step + columns[None, :]
    top, total = tl.full([TILE_Q], -1e30, tl.float32), tl.zeros([TILE_Q], tl.float32)
    o = tl.zeros([TILE_Q, DIM], tl.float32)
    end = tl.minimum(kv_len, first + TILE_Q + kv_len - q_len) if CAUSAL else kv_len
    for at in range(0, end, TILE_KV):
        k = tl.load(k_at + at * kv_step, mask=at + keys[None, :] < kv_len, other=0.0)
        s = tl.dot(q, k) * scale_log2
        keep = at + keys[None, :] < kv_len
        if CAUSAL:
            keep = keep & (at + keys[None, :] <= rows[:, None] + kv_len - q_len)
        s = tl.where(keep, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
        total, top = total * shrink + tl.sum(p, 1), higher
        v = tl.load(v_at + at * kv_step, mask=at + keys[:, None] < kv_len, other=0.0)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
    o = o / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(Out + q_at, o.to(Out.dtype.element_ty), mask=rows[:, None] < q_len)


def attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    """(batch, length, heads, head_dim), contiguous; head_dim is a power of two."""
    batch, q_len, heads, dim = q.shape
    o = torch.empty_like(q)
    tile_kv, warps, stages = (128, 8, 3) if dim <= 64 else (64, 8, 3) if dim <= 128 else (32, 8, 2)
    _forward[(triton.cdiv(q_len, 128), batch * heads)](
        q, k, v, o, scale * 1.4426950408889634, q_len, k.shape[1], heads, heads // k.shape[2],
        CAUSAL=causal, DIM=dim, TILE_Q=128, TILE_KV=tile_kv, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o

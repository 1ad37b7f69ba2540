"""The masks and scores that people use, as they would write them.

Each maker takes a random generator and lengths of queries and keys, and gives a function with fresh captured values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator


def _documents(rng: Rng, n: int, mean: int = 90) -> Any:
    lengths = rng.integers(1, 2 * mean, n // mean + 4)
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[:n].copy() if lengths.sum() >= n else np.zeros(n, np.int32)


def full(rng: Rng, n: int, m: int) -> Any:
    return lambda b, h, q, kv: q >= 0


def causal(rng: Rng, n: int, m: int) -> Any:
    return lambda b, h, q, kv: q >= kv


def causal_bottom_right(rng: Rng, n: int, m: int) -> Any:
    return lambda q, kv, q_len, kv_len: kv <= q + (kv_len - q_len)


def sliding(rng: Rng, n: int, m: int) -> Any:
    w = int(rng.integers(0, 200))
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= w)


def window(rng: Rng, n: int, m: int) -> Any:
    w = int(rng.integers(0, 100))
    return lambda b, h, q, kv: abs(q - kv) <= w


def chained(rng: Rng, n: int, m: int) -> Any:  # plain Python conditions
    w = int(rng.integers(1, 100))

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if kv < 4:
            return True
        return 0 <= q - kv < w

    mask.on_arrays = lambda b, h, q, kv: (kv < 4) | ((q - kv >= 0) & (q - kv < w))  # type: ignore[attr-defined]
    return mask


def prefix_lm(rng: Rng, n: int, m: int) -> Any:
    prefix = rng.integers(0, m, 2).astype(np.int32)
    return lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv)


def documents(rng: Rng, n: int, m: int) -> Any:
    doc, doc_kv = _documents(rng, n), _documents(rng, m)
    return lambda b, h, q, kv: doc[q] == doc_kv[kv]


def documents_causal(rng: Rng, n: int, m: int) -> Any:
    doc = _documents(rng, max(n, m))
    return lambda b, h, q, kv: (doc[q] == doc[kv]) & (q >= kv)


def documents_sliding(rng: Rng, n: int, m: int) -> Any:
    doc, w = np.stack([_documents(rng, max(n, m)) for _ in range(2)]), int(rng.integers(1, 80))
    return lambda b, h, q, kv: (doc[b, q] == doc[b, kv]) & (q >= kv) & (q - kv <= w)


def bounds_of_queries(rng: Rng, n: int, m: int) -> Any:
    begin = np.sort(rng.integers(0, m, n)).astype(np.int32)
    end = np.minimum(begin + rng.integers(0, 150, n), m).astype(np.int32)
    return lambda b, h, q, kv: (kv >= begin[q]) & (kv < end[q])


def flashmask(rng: Rng, n: int, m: int) -> Any:  # causal, and from start to end below the diagonal masked: per key
    start = np.sort(rng.integers(0, n, m)).astype(np.int32)
    end = np.minimum(start + rng.integers(0, 200, m), n).astype(np.int32)
    return lambda b, h, q, kv: (q >= kv) & ((q < start[kv]) | (q >= end[kv]))


def dilated(rng: Rng, n: int, m: int) -> Any:
    w, d = int(rng.integers(20, 200)), int(rng.integers(1, 9))
    return lambda b, h, q, kv: (abs(q - kv) <= w) & (abs(q - kv) % d == 0)


def natten_1d(rng: Rng, n: int, m: int) -> Any:
    k = 2 * int(rng.integers(1, 40)) + 1
    length = max(n, k)
    return lambda b, h, q, kv: abs(np.clip(q, k // 2, length - 1 - k // 2) - kv) <= k // 2


def natten_2d(rng: Rng, n: int, m: int) -> Any:
    width, k = int(rng.integers(16, 40)), 2 * int(rng.integers(1, 4)) + 1
    height = max(k, -(-n // width))

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        y, x = np.clip(q // width, k // 2, height - 1 - k // 2), np.clip(q % width, k // 2, width - 1 - k // 2)
        return (abs(y - kv // width) <= k // 2) & (abs(x - kv % width) <= k // 2)

    return mask


def natten_2d_tiled(rng: Rng, n: int, m: int) -> Any:  # tokens laid out tile by tile of 8 x 8
    tiles, k = int(rng.integers(2, 6)), 2 * int(rng.integers(1, 7)) + 1
    width, height = 8 * tiles, 8 * max(2, -(-n // (64 * tiles)))

    def place(i: Any) -> Any:
        tile, inside = i // 64, i % 64
        return tile % tiles * 8 + inside % 8, tile // tiles * 8 + inside // 8

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        (x, y), (x_kv, y_kv) = place(q), place(kv)
        x, y = np.clip(x, k // 2, width - 1 - k // 2), np.clip(y, k // 2, height - 1 - k // 2)
        return (abs(x - x_kv) <= k // 2) & (abs(y - y_kv) <= k // 2)

    return mask


def sta_3d(rng: Rng, n: int, m: int) -> Any:  # sliding tile attention: tokens in cubes of 4 x 4 x 4, whole cubes kept
    across, down, reach = int(rng.integers(2, 4)), int(rng.integers(2, 4)), int(rng.integers(0, 2))

    def cube(i: Any) -> Any:
        c = i // 64
        return c // (across * down), c // across % down, c % across

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (
            (abs(cube(q)[0] - cube(kv)[0]) <= reach)
            & (abs(cube(q)[1] - cube(kv)[1]) <= reach)
            & (abs(cube(q)[2] - cube(kv)[2]) <= reach)
        )

    return mask


def block_table(rng: Rng, n: int, m: int) -> Any:
    size = int(rng.choice([64, 128]))
    keep = rng.random((2, -(-n // size), -(-m // size))) < 0.4
    return lambda b, h, q, kv: keep[h, q // size, kv // size]


def top_blocks(rng: Rng, n: int, m: int) -> Any:  # as bits: a word of 32 blocks of 64 keys for each block of 64 queries
    bits = rng.integers(0, 1 << 31, (2, -(-n // 64), -(-m // 2048))).astype(np.int32)
    return lambda b, h, q, kv: (bits[h, q // 64, kv // 64 // 32] >> (kv // 64 % 32)) & 1 == 1


def top_list(rng: Rng, n: int, m: int) -> Any:  # the same as a list of the blocks of keys, as VSA has it
    keys = -(-m // 64)
    chosen = rng.integers(0, keys, (2, -(-n // 64), 3)).astype(np.int32)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (chosen[h, q // 64] == kv // 64).any()

    mask.on_arrays = lambda b, h, q, kv: (chosen[h, q // 64] == np.asarray(kv // 64)[..., None]).any(-1)  # type: ignore[attr-defined]
    return mask


def tree(rng: Rng, n: int, m: int) -> Any:  # speculative decoding: ancestors among the last keys
    nodes = min(n, m)
    ancestor, context = np.tril(rng.random((n, max(nodes, 1))) < 0.5) | np.eye(n, max(nodes, 1), dtype=bool), m - nodes
    return lambda b, h, q, kv: (kv < context) | ancestor[q, np.clip(kv - context, 0, nodes - 1)]


def tree_bits(rng: Rng, n: int, m: int) -> Any:
    nodes = min(n, m, 60)
    words, context = rng.integers(-(1 << 31), 1 << 31, (n, 2)).astype(np.int32), m - nodes
    return lambda b, h, q, kv: (kv < context) | ((words[q, (kv - context) // 32] >> ((kv - context) % 32)) & 1 == 1)


def global_tokens(rng: Rng, n: int, m: int) -> Any:
    w, important = int(rng.integers(5, 60)), rng.random(max(n, m)) < 0.004
    return lambda b, h, q, kv: (abs(q - kv) <= w) | important[q] | important[kv]


def padding(rng: Rng, n: int, m: int) -> Any:
    length = rng.integers(0, m + 1, 2).astype(np.int64)
    return lambda b, h, q, kv: kv < length[b]


def left_padding_causal(rng: Rng, n: int, m: int) -> Any:
    left = rng.integers(0, m, 2).astype(np.int32)
    return lambda b, h, q, kv: (kv >= left[b]) & (q >= kv)


def padding_array(rng: Rng, n: int, m: int) -> Any:  # the 2-D attention_mask of transformers
    attention_mask = np.arange(m) < rng.integers(0, m + 1, (2, 1))
    return lambda b, h, q, kv: attention_mask[b, kv] & (q >= kv)


def chunked(rng: Rng, n: int, m: int) -> Any:
    c = int(rng.integers(30, 300))
    return lambda b, h, q, kv: (q // c == kv // c) & (q >= kv)


def streaming(rng: Rng, n: int, m: int) -> Any:
    sink, w = int(rng.integers(1, 9)), int(rng.integers(10, 100))
    return lambda b, h, q, kv: (q >= kv) & ((kv < sink) | (q - kv < w))


def head_windows(rng: Rng, n: int, m: int) -> Any:
    reach = rng.integers(0, 300, 2).astype(np.int32)
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= reach[h])


def block_diffusion(rng: Rng, n: int, m: int) -> Any:
    half, size = max(1, n // 2), int(rng.choice([4, 16, 32]))

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_noised, kv_noised = q < half, kv < half
        q_block, kv_block = q % half // size, kv % half // size
        diagonal = (q_block == kv_block) & (q_noised == kv_noised)
        offset = (q_block > kv_block) & q_noised & ~kv_noised
        return diagonal | offset | ((q_block >= kv_block) & ~q_noised & ~kv_noised)

    return mask


def shared_prefix(rng: Rng, n: int, m: int) -> Any:  # one prompt, several continuations
    doc = _documents(rng, max(n, m), 60)
    start = np.concatenate([np.flatnonzero(np.diff(doc, prepend=-1)), [len(doc)]]).astype(np.int32)
    prompt = (np.arange(doc.max() + 1) // 3 * 3).astype(np.int32)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        mine, of = doc[q], prompt[doc[q]]
        return ((kv >= start[mine]) & (q >= kv)) | ((mine != of) & (kv >= start[of]) & (kv < start[of + 1]))

    return mask


def vision_cross(rng: Rng, n: int, m: int) -> Any:  # Flamingo: an image's tokens are seen by a span of text
    images, per = 4, max(1, -(-m // 4))
    cuts = np.sort(rng.integers(0, n + 1, images + 1)).astype(np.int32)
    image, spans = np.repeat(np.arange(images), per).astype(np.int32), np.stack([cuts[:-1], cuts[1:]], 1)
    return lambda b, h, q, kv: (q >= spans[image[kv], 0]) & (q < spans[image[kv], 1])


def image_bidirectional(rng: Rng, n: int, m: int) -> Any:
    size = max(n, m)
    image = np.full(size, -1, np.int32)
    for i in range(3):
        at = int(rng.integers(0, size))
        image[at : at + 60] = i
    return lambda b, h, q, kv: (q >= kv) | ((image[q] == image[kv]) & (image[q] >= 0))


def temporal(rng: Rng, n: int, m: int) -> Any:  # Sparse VideoGen
    prompt, frame, width = int(rng.integers(0, 50)), int(rng.integers(40, 200)), int(rng.integers(4, 20))

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < prompt) | (q < prompt) | (abs((q - prompt) % frame - (kv - prompt) % frame) < width)

    return mask


def strided(rng: Rng, n: int, m: int) -> Any:  # Sparse Transformer
    c = int(rng.integers(8, 40))
    return lambda b, h, q, kv: (q >= kv) & ((q - kv < c) | (kv % c == c - 1))


def same_segment_sorted_by_route(rng: Rng, n: int, m: int) -> Any:  # clusters of an unsorted array: little to skip
    cluster = rng.integers(0, 6, max(n, m)).astype(np.int32)
    return lambda b, h, q, kv: cluster[q] == cluster[kv]


def thresholds(rng: Rng, n: int, m: int) -> Any:  # floats decide
    time = np.sort(rng.random(max(n, m)) * 100).astype(np.float32)
    horizon = float(rng.random() * 20)
    return lambda b, h, q, kv: (time[q] >= time[kv]) & (time[q] - time[kv] <= horizon)


def dense(rng: Rng, n: int, m: int) -> Any:
    keep = rng.random((2, 1, n, m)) < 0.3
    return lambda b, h, q, kv: keep[b, 0, q, kv]


MASKS: list[Callable[[Rng, int, int], Any]] = [
    full, causal, causal_bottom_right, sliding, window, chained, prefix_lm, documents, documents_causal, documents_sliding,
    bounds_of_queries, flashmask, dilated, natten_1d, natten_2d, natten_2d_tiled, sta_3d, block_table, top_blocks, top_list, tree,
    tree_bits, global_tokens, padding, left_padding_causal, padding_array, chunked, streaming, head_windows,
    block_diffusion, shared_prefix, vision_cross, image_bidirectional, temporal, strided, same_segment_sorted_by_route,
    thresholds, dense,
]  # fmt: skip


def alibi(rng: Rng, n: int, m: int) -> Any:
    slope = (2.0 ** -np.arange(1, 3)).astype(np.float32)
    return lambda s, b, h, q, kv: s + slope[h] * (kv - q)


def alibi_computed(rng: Rng, n: int, m: int) -> Any:
    heads = 2
    return lambda s, b, h, q, kv: s + (kv - q) * np.exp2(-((h + 1) * 8.0 / heads))


def softcap(rng: Rng, n: int, m: int) -> Any:
    cap = 30.0
    return lambda s, b, h, q, kv: cap * np.tanh(s / cap)


def alibi_softcap(rng: Rng, n: int, m: int) -> Any:
    slope, cap = rng.random(2).astype(np.float32) * 0.1, 20.0
    return lambda s, b, h, q, kv: cap * np.tanh((s + slope[h] * (kv - q)) / cap)


def t5_table(rng: Rng, n: int, m: int) -> Any:
    reach = 32
    bias = rng.standard_normal((2, 2 * reach + 1)).astype(np.float32)
    return lambda s, b, h, q, kv: s + bias[h, np.clip(kv - q, -reach, reach) + reach]


def t5_buckets(rng: Rng, n: int, m: int) -> Any:
    buckets, far = 16, 128
    bias = rng.standard_normal((buckets, 2)).astype(np.float32)
    factor = (buckets // 2) / math.log(far / (buckets // 2))

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = np.maximum(q - kv, 0)
        log = buckets // 2 + np.floor(np.log(np.maximum(distance, 1) * 2.0 / buckets) * factor)
        bucket = np.where(distance < buckets // 2, distance, np.minimum(log, buckets - 1))
        return s + bias[_int(bucket), h]

    return score


def _int(x: Any) -> Any:
    return x.astype(np.int64) if isinstance(x, np.ndarray) else x.int()


def pair_bias(rng: Rng, n: int, m: int) -> Any:
    bias = rng.standard_normal((2, n, m)).astype(np.float32)
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


def key_bias(rng: Rng, n: int, m: int) -> Any:
    bias = rng.standard_normal((2, m)).astype(np.float32)
    return lambda s, b, h, q, kv: s + bias[b, kv]


def temperature(rng: Rng, n: int, m: int) -> Any:
    tau, t = rng.random(2).astype(np.float32), np.float32(0.3)
    return lambda s, b, h, q, kv: s * (tau[h] + 0.5) * np.exp(t)


def graphormer(rng: Rng, n: int, m: int) -> Any:
    distance, bias = rng.integers(0, 6, (2, n, m)).astype(np.int32), rng.standard_normal((2, 6)).astype(np.float32)
    return lambda s, b, h, q, kv: s + bias[h, distance[b, q, kv]]


def sandwich(rng: Rng, n: int, m: int) -> Any:
    size = max(n, m)
    table, ratio = rng.standard_normal(2 * size).astype(np.float32), rng.random(2).astype(np.float32)
    return lambda s, b, h, q, kv: s + table[q - kv + size - 1] * ratio[h]


def log_length(rng: Rng, n: int, m: int) -> Any:  # SSMax, Llama 4
    beta = 0.43
    return lambda s, b, h, q, kv: s * (beta * np.log(q + 2.0))


def kerple(rng: Rng, n: int, m: int) -> Any:
    r1, r2 = rng.random(2).astype(np.float32) + 0.1, rng.random(2).astype(np.float32) + 0.1
    return lambda s, b, h, q, kv: s - r1[h] * np.log(1.0 + r2[h] * abs(q - kv))


def forgetting(rng: Rng, n: int, m: int) -> Any:  # Forgetting Transformer: sums of log gates
    gate = np.cumsum(-rng.random((2, 2, max(n, m))), -1).astype(np.float32)
    return lambda s, b, h, q, kv: s + gate[b, h, q] - gate[b, h, kv]


def penalty(rng: Rng, n: int, m: int) -> Any:
    doc, cost = _documents(rng, max(n, m)), rng.random(2).astype(np.float32)
    return lambda s, b, h, q, kv: np.where(doc[q] == doc[kv], s, s - cost[h])


def swin(rng: Rng, n: int, m: int) -> Any:
    w = 8
    table = rng.standard_normal(((2 * w - 1) ** 2, 2)).astype(np.float32)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        i, j = q % (w * w), kv % (w * w)
        return s + table[(i // w - j // w + w - 1) * (2 * w - 1) + (i % w - j % w + w - 1), h]

    return score


def activation(rng: Rng, n: int, m: int) -> Any:  # sigmoid attention through the logarithm
    return lambda s, b, h, q, kv: np.log(1.0 / (1.0 + np.exp(-s)) + 1.0)


def conditional(rng: Rng, n: int, m: int) -> Any:
    near, far = np.float32(0.5), np.float32(-0.25)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * near if abs(q - kv) < 8 else s * s * far

    score.on_arrays = lambda s, b, h, q, kv: np.where(abs(q - kv) < 8, s * near, s * s * far)  # type: ignore[attr-defined]
    return score


def pooled(rng: Rng, n: int, m: int) -> Any:  # a sum over a short row
    rows = rng.standard_normal((2, 3)).astype(np.float32)
    return lambda s, b, h, q, kv: s + (rows[h] * 0.5).sum(-1) * np.tan(kv / (2.0 * m))


SCORES: list[Callable[[Rng, int, int], Any]] = [
    alibi, alibi_computed, softcap, alibi_softcap, t5_table, t5_buckets, pair_bias, key_bias, temperature, graphormer, sandwich,
    log_length, kerple, forgetting, penalty, swin, activation, conditional, pooled,
]  # fmt: skip

"""The surface of shapes: cases along axes on which one thing varies, and cases at random, drawn from what models run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from rawattn.testing import Case

from . import sets
from .sets import backward, dense, step, zipf

MASKS = (("full", False), ("causal", True))
QUERIES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
ROWS = (1, 2, 4, 8, 16, 32, 64, 65, 96, 128, 256, 512)
PAGES = (0, 256, 128, 64, 32, 16, 8, 4, 2, 1)
HEAD_DIMS = (40, 48, 72, 80, 96, 104, 112, 160, 192, (192, 128), 224)
RECTANGLES = {(151, 1961): 64, (512, 8704): 4, (2833, 10836): 2, (77, 4096): 16, (4096, 77): 16, (1024, 32768): 1}  # with batch
LONGEST, MOST_FLOPS, MOST_BYTES = 131072, 6e12, 6e9  # of a case at random: some 10 ms on an H200


@dataclasses.dataclass(frozen=True)
class Spot:
    """A case at x of an axis. The axis begins with the kind: fwd, bwd, or dec for steps over caches."""

    axis: str
    x: str
    case: Case


def both(axis: str, x: object, case: Case) -> Iterator[Spot]:
    """The forward and its gradients."""
    yield Spot(f"fwd {axis}", str(x), case)
    yield Spot(f"bwd {axis}", str(x), *backward([case]))


def packs() -> dict[str, tuple[int, ...]]:
    """Lengths of packed sequences."""
    rng = random.Random(5)
    drawn = {mean: exponential(rng, count, mean) for mean, count in ((1000, 30), (300, 100))}
    found = {"2 x 8192": (8192,) * 2, "16 x 1024": (1024,) * 16, "exp mean 1000": drawn[1000]}
    return found | {"16k and 60 x 128": (16384, *(128,) * 60), "128 x 130": (130,) * 128, "exp mean 300": drawn[300]}


def exponential(rng: random.Random, count: int, mean: float) -> tuple[int, ...]:
    return tuple(math.ceil(rng.expovariate(1 / mean)) for _ in range(count))


def together(lens: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, causal: bool, **more: Any) -> Case:
    """Packed sequences."""
    return dense(1, 0, heads, head_dim, causal, kv_heads=kv_heads, lengths=tuple((n, n) for n in lens), **more)


def tensors() -> Iterator[Spot]:
    for (heads, size), (mask, causal), n in itertools.product(((12, 64), (16, 128)), MASKS, (64, 96, 128, 192, 256, 384)):
        case = dense(32768 // n, n, heads, size, causal)
        yield from both(f"short {heads} heads D{size} {mask}, 32k tokens, by length", n, case)
    for (mask, causal), n, heads in itertools.product(MASKS, (2048, 5000, 16384), (1, 2, 3, 4, 6, 8, 12)):
        yield from both(f"B1 {n} D128 {mask}, by heads", heads, dense(1, n, heads, 128, causal))
    for (mask, causal), dims in itertools.product(MASKS, HEAD_DIMS):
        size, size_v = dims if isinstance(dims, tuple) else (dims, dims)
        case = dense(4, 4096, 16, size, causal, head_dim_v=size_v)
        yield from both(f"B4 4096 16 heads {mask}, by head_dim", size if size == size_v else f"{size}/{size_v}", case)
    for size, (mask, causal), ((q, kv), batch) in itertools.product((64, 80, 128), MASKS, RECTANGLES.items()):
        if q <= kv or not causal:  # else rows keep no key
            case = dense(batch, q, 8, size, causal, kv_len=kv)
            yield from both(f"8 heads D{size} {mask}, by queries x keys", f"{q}x{kv}", case)
    for (heads, kv_heads), (mask, causal), (x, lens) in itertools.product(((16, 16), (4, 4), (16, 2)), MASKS, packs().items()):
        yield from both(f"packed {heads}/{kv_heads} D128 {mask}", x, together(lens, heads, kv_heads, 128, causal))
    for (batch, keys), q in itertools.product(((4, 4096), (1, 16384)), QUERIES):
        case = dense(batch, q, 32, 128, True, kv_heads=8, kv_len=keys)
        yield Spot(f"fwd B{batch} kv {keys} 32/8 D128 causal, tensors, by queries", str(q), case)


def steps() -> Iterator[Spot]:
    for batch, kv_heads, group in itertools.product((1, 16, 64), (1, 2, 8), (1, 4, 8, 16, 32, 64, 128)):
        if kv_heads * group <= 128:
            case = step((8192,) * batch, heads=kv_heads * group, kv_heads=kv_heads)
            yield Spot(f"dec B{batch} kv 8192 {kv_heads} key heads D128, by group", str(group), case)
    for size, group in itertools.product((64, 192, 256), (1, 8, 16, 64)):
        case = step((8192,) * 16, heads=group, kv_heads=1, head_dim=size)
        yield Spot(f"dec B16 kv 8192 1 key head D{size}, by group", str(group), case)
    for (batch, keys, page), q in itertools.product(((1, 8192, 16), (16, 4096, 64)), ROWS):
        yield Spot(f"dec B{batch} kv {keys} 32/8 D128 page {page}, by queries", str(q), step((keys,) * batch, page, q))
    for batch, keys in itertools.product((1, 8, 64), (128, 256, 512, 1024, 2048, 4096)):
        yield Spot(f"dec B{batch} 32/8 D128, by keys", str(keys), step((keys,) * batch))


def caches() -> Iterator[Spot]:
    """Other steps: over pages of any size, in eight bits too, and chunks of a prompt, alone and beside decoding."""
    shapes = (1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 4096)
    for (batch, keys), cache, page in itertools.product(shapes, ("bf16", "e4m3", "e5m2"), PAGES):
        yield Spot(f"dec B{batch} kv {keys} 32/8 D128 {cache}, by page", str(page), step((keys,) * batch, page, cache=cache))
    for size, rows, (batch, keys), page in itertools.product((64, 128, 256), (8, 100, 2048), shapes[:3], (0, 64, 16)):
        case = step((keys + rows,) * batch, page, rows, 4096 // size, 1024 // size, size)
        yield Spot(f"dec B{batch} {rows} rows after {keys} D{size}, by page", str(page), case)
    for (batch, keys), rows, page in itertools.product(shapes[2:], (512, 2048), (64, 16)):
        case = step((*(keys,) * batch, 8192 + rows), page, chunks=(rows,))
        yield Spot(f"dec {batch} of {keys} beside {rows} rows after 8192, by page", str(page), case)


def power(rng: random.Random, low: int, high: int) -> int:
    """A number whose logarithm is uniform: no size is more likely than another."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def heads_of(rng: random.Random) -> dict[str, int]:
    group = rng.choice((1, power(rng, 1, 128)))
    kv_heads = power(rng, 1, 128 // group)
    head_dim = rng.choice((128, 128, 64, 8 * rng.randint(4, 32)))
    head_dim_v = rng.choice((head_dim,) * 6 + (8 * rng.randint(4, 32),))
    if rng.random() < 0.05:
        head_dim, head_dim_v = 192, 128
    return {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}


def lengths_of(rng: random.Random, count: int) -> tuple[str, tuple[int, ...]]:
    """Lengths of sequences, and how they were drawn."""
    mean, kind = power(rng, 1, LONGEST), rng.choice(("equal", "exp", "zipf"))
    made = {"equal": (mean,) * count, "exp": exponential(rng, count, mean), "zipf": zipf(count, count * mean)}[kind]
    return f"{kind} mean {mean}", tuple(min(n, LONGEST) for n in made)


def draw_tensors(rng: random.Random) -> tuple[str, str, Case]:
    """A kind of shape, what its label does not say, and the case."""
    kind = rng.choice(("square", "fewer queries", "fewer keys", "drafts and chunks", "packed", "window"))
    n, m = sorted(power(rng, 1, LONGEST) for _ in range(2))
    q, kv = {"fewer queries": (n, m), "fewer keys": (m, n), "drafts and chunks": (min(n, power(rng, 1, 512)), m)}.get(
        kind, (m, m)
    )
    own: dict[str, Any] = {"causal": q <= kv and rng.random() < 0.6, **heads_of(rng)}
    if kind == "window":
        own["window"] = (power(rng, 1, m), 0)
    if kind == "packed":
        words, lens = lengths_of(rng, power(rng, 2, 256))
        return kind, words, together(lens, **own)
    return kind, "", dense(power(rng, 1, 512), 0, q_len=q, kv_len=kv, **own)


def draw_step(rng: random.Random) -> tuple[str, str, Case]:
    """The same of a step over caches."""
    kind = rng.choice(("decoding", "drafts", "chunks", "window"))
    q = power(rng, *{"decoding": (1, 1), "drafts": (2, 64), "chunks": (65, 512), "window": (1, 16)}[kind])
    words, lens = lengths_of(rng, power(rng, 1, 512))
    more: dict[str, Any] = {"window": (power(rng, 16, 16384), 0)} if kind == "window" else {}
    page = rng.choice((0, 2 ** rng.randint(0, 8)))
    return kind, words, step(tuple(n + q - 1 for n in lens), page, q, **heads_of(rng), **more)


def drawn(seed: int, each: int = 75) -> list[Spot]:
    """As many forwards, gradients and steps at random; the same for a seed everywhere."""
    found = []
    for kind, draw in (("fwd", draw_tensors), ("bwd", draw_tensors), ("dec", draw_step)):
        rng = random.Random(f"{seed} {kind}")
        found += [*itertools.islice(_spots(kind, draw, rng), each)]
    return found


def _spots(kind: str, draw: Callable[[random.Random], tuple[str, str, Case]], rng: random.Random) -> Iterator[Spot]:
    while True:
        shape, words, case = draw(rng)
        (case,) = backward([case]) if kind == "bwd" else (case,)
        size = case.pool_bytes if isinstance(case, sets.StepCase) else sets.moved_bytes(case)
        if size < MOST_BYTES and sets.flops(case) < MOST_FLOPS:
            yield Spot(f"{kind} at random, {shape}", " ".join(filter(None, [sets.label(case), words])), case)


def gate() -> list[Spot]:
    """A fixed 60 cases: 57 of the axes, each of another line, and three of what only ``caches`` has."""
    axes = dict[str, list[Spot]]()
    for spot in AXES:
        axes.setdefault(spot.axis, []).append(spot)
    found = [axes[[*axes][i * len(axes) // 57]] for i in range(57)]
    others = "dec B64 kv 4096 32/8 D128 e4m3", "dec B1 2048 rows after 32768 D128", "dec 16 of 4096 beside"
    extra = (next(spot for spot in caches() if spot.axis.startswith(axis) and spot.x == "64") for axis in others)
    return [*(line[17 * i % len(line)] for i, line in enumerate(found)), *extra]


AXES = [*tensors(), *steps()]
SETS: dict[str, Callable[[], list[Spot]]] = {"map": lambda: AXES, "gate": gate, "caches": lambda: [*caches()]}

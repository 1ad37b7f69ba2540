"""Draws when the warps of attn_fwd wait for whom: a simulation of the page's loops, with one work of four key tiles.

python docs/timeline.py > timeline.svg

Who waits for which barrier, and who arrives at it, is as in cuda_src/attn_fwd.cu. Durations are made up: the drawing shows the
order, and what hides behind what.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterator
from typing import Any

TILES, STAGES, CONSUMERS = 4, 2, 2
COPY, PRODUCT, SOFTMAX, STORE = 2.0, 2.0, 3.0, 1.5  # durations
LANES = ("producer warp", "TMA", "tensor cores", "consumer 1", "consumer 2")
SCALE, HEIGHT, LEFT, TOP = 14.5, 44, 118, 24  # pixels of a unit of time and of a lane, and before the first


@dataclasses.dataclass
class Box:
    lane: str
    begin: float
    end: float
    text: str
    kind: str


class Simulation:
    """Actors are generators of steps: ("wait", barrier), ("arrive", barrier), ("work", text, kind, seconds) on their own lane,
    and ("issue", lane, text, kind, seconds, barrier), which a unit works off in turn, and then arrives at the barrier."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.arrows: list[tuple[str, str, float, str]] = []  # from a lane, to a lane, when, barrier
        self.needed: dict[Any, int] = collections.defaultdict(lambda: 1)
        self.arrivals: dict[Any, list[tuple[float, str]]] = collections.defaultdict(list)
        self.waiting: dict[Any, list[tuple[str, Iterator[Any], float]]] = collections.defaultdict(list)
        self.free: dict[str, float] = collections.defaultdict(float)
        self.queue: list[tuple[float, int, str, Iterator[Any]]] = []
        self.number = itertools.count()

    def add(self, lane: str, actor: Iterator[Any], at: float = 0.0) -> None:
        heapq.heappush(self.queue, (at, next(self.number), lane, actor))

    def run(self) -> None:
        while self.queue:
            now, _, lane, actor = heapq.heappop(self.queue)
            self.step(now, lane, actor)
        assert not any(self.waiting.values()), "somebody waits for ever"

    def step(self, now: float, lane: str, actor: Iterator[Any]) -> None:
        for kind, *rest in actor:
            if kind == "wait":
                barrier = rest[0]
                if len(self.arrivals[barrier]) < self.needed[barrier]:
                    self.waiting[barrier].append((lane, actor, now))
                    return
            elif kind == "arrive":
                self.arrive(rest[0], now, lane)
            elif kind == "work":
                text, style, seconds = rest
                self.boxes.append(Box(lane, now, now + seconds, text, style))
                self.add(lane, actor, now + seconds)
                return
            else:
                unit, text, style, seconds, barrier = rest
                begin = max(now, self.free[unit])
                self.free[unit] = begin + seconds
                self.boxes.append(Box(unit, begin, begin + seconds, text, style))
                self.add(unit, iter([("arrive", barrier)]), begin + seconds)

    def arrive(self, barrier: Any, now: float, lane: str) -> None:
        self.arrivals[barrier].append((now, lane))
        if len(self.arrivals[barrier]) == self.needed[barrier]:
            for waiter, actor, since in self.waiting.pop(barrier, []):
                if now > since:
                    self.boxes.append(Box(waiter, since, now, barrier[0], "wait"))
                    self.arrows.append((lane, waiter, now, barrier[0]))
                self.add(waiter, actor, now)


def producer() -> Iterator[Any]:
    """Producer.load: a tile's V comes after the next tile's K."""

    def load(name: str, use: int) -> Iterator[Any]:
        if use >= STAGES:
            yield "wait", (f"{name.lower()}_empty", use - STAGES)
        yield "issue", "TMA", f"{name}{TILES - 1 - use}", "load", COPY, (f"{name.lower()}_full", use)

    for tile in range(TILES):
        yield from load("K", tile)
        if tile == 0:
            yield "issue", "TMA", "Q", "load", COPY, ("q_full", 0)
        else:
            yield from load("V", tile - 1)
    yield from load("V", TILES - 1)


def consumer(index: int) -> Iterator[Any]:
    """Consumer.attend: first_step, then step for each tile, then the last tile's values."""
    style, lane = ("one", "two")[index], "tensor cores"

    def product(name: str, use: int) -> Any:
        return ("issue", lane, f"{name}{TILES - 1 - use}", style, PRODUCT, (name, index, use))

    def turn(tile: int) -> Any:  # the option Order: the consumers take turns
        return ("wait", ("turn", index, tile))

    def softmax(tile: int) -> Any:
        return ("work", f"S{TILES - 1 - tile}", style, SOFTMAX)

    other = 1 - index
    yield "wait", ("q_full", 0)
    for tile in range(TILES):
        yield "wait", ("k_full", tile)
        yield turn(tile)
        yield product("QK", tile)
        if tile:
            yield "wait", ("v_full", tile - 1)
            yield product("PV", tile - 1)
        yield "arrive", ("turn", other, tile + index)
        yield "wait", ("QK", index, tile)
        if tile == 0:
            yield "arrive", ("k_empty", tile)
        yield softmax(tile)
        if tile:
            yield "arrive", ("k_empty", tile)
            yield "wait", ("PV", index, tile - 1)
            yield "arrive", ("v_empty", tile - 1)
    yield "wait", ("v_full", TILES - 1)
    yield product("PV", TILES - 1)
    yield "wait", ("PV", index, TILES - 1)
    yield "arrive", ("v_empty", TILES - 1)
    yield "work", "o", style, STORE


def simulated() -> Simulation:
    found = Simulation()
    for name in ("k_empty", "v_empty"):
        for use in range(TILES):
            found.needed[name, use] = CONSUMERS
    found.arrivals["turn", 0, 0] = [(0.0, "")]
    found.add("producer warp", producer())
    for index in range(CONSUMERS):
        found.add(f"consumer {index + 1}", consumer(index))
    found.run()
    return found


def svg(found: Simulation) -> str:
    """The drawing; its colours are the page's."""
    width = LEFT + SCALE * max(box.end for box in found.boxes) + 8
    head = f'<svg class="timeline" viewBox="0 0 {width:.0f} {TOP + HEIGHT * len(LANES)}" role="img" aria-label="{LABEL}">'
    parts = [head, MARKER, f'<text x="{LEFT}" y="12">time, not to scale →</text>']
    for lane in LANES:
        parts.append(f'<text class="lane" x="0" y="{top(lane) + 19}">{lane}</text>')
        parts.append(f'<path class="line" d="M{LEFT} {top(lane) + 34}H{width:.0f}"/>')
    for lane, to, at, barrier in found.arrows:
        ends = (top(lane) + 28, top(to)) if top(to) > top(lane) else (top(lane), top(to) + 28)
        line = f"M{LEFT + SCALE * at:.1f} {ends[0]}V{ends[1]}"
        parts += [f'<path class="arrow" marker-end="url(#tip)" d="{line}"><title>{barrier}</title></path>'] * (lane != to)
    return "\n".join([*parts, *map(drawn, found.boxes), "</svg>"])


LABEL = "who waits for whom in attn_fwd"
MARKER = (
    '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0L6 3L0 6z"/></marker></defs>'
)


def top(lane: str) -> int:
    return TOP + HEIGHT * LANES.index(lane)


def drawn(box: Box) -> str:
    """A box, with its text where that fits, and else where the mouse is."""
    x, width, y = LEFT + SCALE * box.begin, SCALE * (box.end - box.begin), top(box.lane)
    text = box.text if width > 6.2 * len(box.text) else ""
    kind = "outside" if box.kind == "wait" else "inside"
    return (
        f'<g><title>{box.text}</title><rect class="{box.kind}" rx="3" x="{x:.1f}" y="{y}" width="{width:.1f}" height="28"/>'
        f'<text class="{kind}" text-anchor="middle" x="{x + width / 2:.1f}" y="{y + 18}">{text}</text></g>'
    )


if __name__ == "__main__":
    print(svg(simulated()))

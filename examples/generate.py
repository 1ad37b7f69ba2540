"""Generates text with a Llama-shaped model, many requests at once over a paged cache: continuous batching on rawattn.

    python examples/generate.py --requests 32
    python examples/generate.py --device cuda --dtype bfloat16 --model FOLDER --transformers

Weights are random, or those of a folder with config.json and safetensors; prompts are random. What is computed is what a server
computes: in each step every running request adds a token, and waiting ones bring a part of their prompts, all in one batch of
packed rows. Each layer is one ``rawattn.attention_append``: new keys and values go into pages, rotated, and the queries attend to
all of them. Steps in which nobody brings a prompt are CUDA graphs. At the end each token is checked against the same model on
eager attention without a cache, and ``--transformers`` times transformers' own ``generate`` beside.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import statistics
import time
from typing import Any

import rich.console
import rich.progress
import rich.table
import torch
from llama import Model, Shape, by_transformers, eager, load

import rawattn


@dataclasses.dataclass
class Request:
    """A prompt and what was generated; ``cached`` of its tokens are in the cache, in ``pages``."""

    tokens: list[int]
    prompt: int
    wanted: int
    pages: list[int] = dataclasses.field(default_factory=list)
    freed: int = 0  # pages from the first on that were given back
    cached: int = 0
    times: list[float] = dataclasses.field(default_factory=list)  # of each generated token

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.prompt + self.wanted


class Server:
    """Runs requests in batches of packed rows."""

    def __init__(self, model: Model, pages: int, page_size: int, most_rows: int, longest: int, window: int | None) -> None:
        s, self.model, self.page_size, self.most_rows, self.window = model.shape, model, page_size, most_rows, window
        pool = model.embedding.new_zeros(s.layers, 2, pages, page_size, s.kv_heads, s.head_dim)
        self.caches = [rawattn.KVCache(k, v) for k, v in pool]
        self.rotary = rawattn.Rotary(model.cos, model.sin)
        self.free = collections.deque(range(pages))
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self.widest = -(-longest // page_size)  # pages of a request
        self.tile = 128 if model.embedding.is_cuda else 1  # keys of which a GPU reads some before a window's first, too
        self.graphs: dict[int, Graph] = {}

    def warm_up(self, requests: int, longest: int) -> None:
        """Takes steps like those to come, so that no request waits for a kernel that compiles at its first call: full ones of one
        prompt and of several, short ones, and graphs."""
        most = min(requests, self.most_rows)
        for count in sorted({1 << i for i in range(most.bit_length())} | {most}):
            for rows in {2 * count, self.most_rows, 2 * self.most_rows}:
                prompt = min(max(rows // count, 1), longest)
                self.waiting.extend(Request([1] * prompt, prompt, 2) for _ in range(count))
                while self.waiting or self.running:
                    self.step()
            self.graph(count)

    def forward(self, tokens: torch.Tensor, step: rawattn.Step) -> torch.Tensor:
        """The last hidden state of each row; its keys and values are in the cache then."""
        window = None if self.window is None else (self.window - 1, 0)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return rawattn.attention_append(q, k, v, self.caches[layer], step, rotary=self.rotary, window=window)

        return self.model.forward(tokens, attend)

    def step(self) -> int:
        """Runs one batch; gives how many tokens it generated."""
        batch = self._schedule()
        if not batch:
            raise RuntimeError("no request fits the cache: give it more pages")
        if all(n == 1 for _, n in batch):
            chosen = self.graph(len(batch)).run([request for request, _ in batch])
        else:
            tokens = [token for request, n in batch for token in request.tokens[request.cached : request.cached + n]]
            ends = torch.tensor([n for _, n in batch]).cumsum(0)
            kv_lens, table = [r.cached + n for r, n in batch], [self.row(r) for r, _ in batch]
            step = rawattn.Step(*(self.integers(x) for x in (kv_lens, table, [0, *ends.tolist()])))
            hidden = self.forward(self.integers(tokens).long(), step)
            chosen = self.model.logits(hidden[ends.to(hidden.device) - 1]).argmax(-1).tolist()
        return self._take(batch, chosen)

    def graph(self, count: int) -> Graph:
        """The graph of a step of one row each for as many requests, or some more."""
        size = 1 << (count - 1).bit_length()
        if size not in self.graphs:
            self.graphs[size] = Graph(self, size)
        return self.graphs[size]

    def row(self, request: Request) -> list[int]:
        """A row of the page table. What lies behind a sequence's pages is never read, nor what lies before its window."""
        return request.pages + [-1] * (self.widest - len(request.pages))

    def integers(self, numbers: list[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.model.embedding.device)

    def _schedule(self) -> list[tuple[Request, int]]:
        """The requests of a batch and their new rows: a token of each running one, then parts of prompts."""
        batch, room = [], self.most_rows
        while self.waiting and len(self.running) < self.most_rows and self._fits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):
            n = min(room, len(request.tokens) - request.cached)
            if n > 0:
                batch.append((request, n))
                room -= n
        return batch

    def _fits(self, request: Request) -> bool:
        """Reserves the pages that a request may need, if there are as many."""
        count = -(-(request.prompt + request.wanted) // self.page_size)
        if count > len(self.free):
            return False
        request.pages = [self.free.popleft() for _ in range(count)]
        return True

    def _take(self, batch: list[tuple[Request, int]], chosen: list[int]) -> int:
        """Appends the likeliest token to each request whose tokens are all cached, and gives pages back."""
        now, count = time.perf_counter(), 0
        for (request, n), token in zip(batch, chosen, strict=True):
            request.cached += n
            if request.cached == len(request.tokens):
                request.tokens.append(token)
                request.times.append(now)
                count += 1
            unused = len(request.pages) if request.is_done else 0
            if self.window is not None:
                unused = max(unused, (request.cached + 1 - self.window) // self.tile * self.tile // self.page_size)
            for i in range(request.freed, unused):
                self.free.append(request.pages[i])
                request.pages[i] = -1
            request.freed = max(request.freed, unused)
        self.running = [request for request in self.running if not request.is_done]
        return count


class Graph:
    """A step of one row for up to ``size`` requests, over the same arrays each time: on a GPU a CUDA graph. Places that are left
    have length 0, and take no part."""

    def __init__(self, server: Server, size: int) -> None:
        self.server, self.size = server, size
        self.tokens, self.kv_lens = server.integers([0] * size), server.integers([0] * size)
        self.table, starts = server.integers([[-1] * server.widest] * size), server.integers([*range(size + 1)])
        self.step = rawattn.Step(self.kv_lens, self.table, starts, max_q_len=1)
        self.chosen, self.replay = self._choose(), self._again
        if self.tokens.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.chosen = self._choose()
            self.replay = graph.replay

    def _choose(self) -> torch.Tensor:
        return self.server.model.logits(self.server.forward(self.tokens.long(), self.step)).argmax(-1)

    def _again(self) -> None:
        self.chosen = self._choose()

    def run(self, requests: list[Request]) -> list[int]:
        """The likeliest token after each request's next one."""
        left = self.size - len(requests)
        self.tokens.copy_(torch.tensor([r.tokens[r.cached] for r in requests] + [0] * left))
        self.kv_lens.copy_(torch.tensor([r.cached + 1 for r in requests] + [0] * left))
        self.table[: len(requests)].copy_(torch.tensor([self.server.row(r) for r in requests]))
        self.replay()
        return self.chosen[: len(requests)].tolist()


def check(model: Model, request: Request, window: int | None, tolerance: float) -> None:
    """Raises where a generated token is not the likeliest one on eager attention, but for ties within the tolerance."""
    logits = eager(model, request.tokens[:-1], window)[request.prompt - 1 :]
    chosen = torch.tensor(request.tokens[request.prompt :], device=logits.device)
    behind = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
    if not bool((behind <= tolerance).all()):
        raise SystemExit(f"token {int(behind.argmax())} of a request is behind the likeliest one by {float(behind.max()):.3g}")


def report(console: rich.console.Console, requests: list[Request], seconds: float, start: float, other: list[float]) -> None:
    """Prints how long users would have waited."""
    first, wanted = [r.times[0] - start for r in requests], requests[0].wanted
    between = [b - a for r in requests for a, b in zip(r.times, r.times[1:], strict=False)] or [0.0]
    generated = sum(r.wanted for r in requests)
    lines = [[f"{statistics.median(x) * 1e3:.1f} ms, slowest {max(x) * 1e3:.1f}" for x in (first, between)]]
    lines[0].append(f"{generated / seconds:.0f}")
    if other:
        each = (other[1] - other[0]) / max(1, wanted - 1)
        lines.append([f"{other[0] * 1e3:.1f} ms", f"{each * 1e3:.1f} ms", f"{generated / other[1]:.0f}"])
    table = rich.table.Table("", "rawattn", *["transformers"] * bool(other))
    for name, *cells in zip(("time to first token", "time between tokens", "tokens/s"), *lines, strict=True):
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"{generated} tokens of {len(requests)} requests in {seconds:.2f} s")


def main(arguments: list[str] | None = None) -> list[Request]:
    parser = argparse.ArgumentParser(description="Generates text with a Llama-shaped model, on rawattn.")
    for name, default in (("requests", 16), ("tokens", 32), ("prompt", 200), ("pages", 256), ("page-size", 16), ("rows", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, help="keys that a query sees; pages before them are given back")
    parser.add_argument("--model", type=pathlib.Path, metavar="FOLDER", help="config.json and safetensors (default: random)")
    parser.add_argument("--transformers", action="store_true", help="time transformers' generate beside")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    asked = parser.parse_args(arguments)
    console, dtype = rich.console.Console(), getattr(torch, asked.dtype)
    shape, weights = load(asked.model) if asked.model else (Shape(), Shape().random())
    model, lengths, requests = Model(shape, weights, asked.device, dtype), torch.Generator().manual_seed(1), []
    for _ in range(asked.requests):
        prompt = int(torch.randint(1, asked.prompt + 1, (), generator=lengths))
        tokens = torch.randint(shape.vocab, (prompt,), generator=lengths).tolist()
        requests.append(Request(tokens, prompt, asked.tokens))
    server = Server(model, asked.pages, asked.page_size, asked.rows, asked.prompt + asked.tokens, asked.window)
    with torch.inference_mode(), rich.progress.Progress(console=console) as progress:
        server.warm_up(asked.requests, asked.prompt)
        server.waiting.extend(requests)
        bar, start = progress.add_task("tokens", total=asked.requests * asked.tokens), time.perf_counter()
        while server.waiting or server.running:
            progress.advance(bar, server.step())
        seconds = time.perf_counter() - start
        bar = progress.add_task("checked on eager attention", total=len(requests))
        for request in requests:
            check(model, request, asked.window, 1e-3 if dtype is torch.float32 else 0.3)
            progress.advance(bar)
        other: list[float] = []
        if asked.transformers:
            prompts = [request.tokens[: request.prompt] for request in requests]
            *other, tokens = by_transformers(model, weights, prompts, asked.tokens, asked.window)
    assert len(server.free) == asked.pages, "a page was not given back"
    report(console, requests, seconds, start, other)
    if other:
        same = [
            a == b for r, found in zip(requests, tokens, strict=True) for a, b in zip(r.tokens[r.prompt :], found, strict=True)
        ]
        console.print(f"{sum(same)} of {len(same)} tokens are those of transformers")
    return requests


if __name__ == "__main__":
    main()

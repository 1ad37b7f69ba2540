"""Generates text with a Llama-shaped model, many requests at once over a paged cache: continuous batching on rawattn.

    python examples/generate.py --requests 32

Weights are random, so the text means nothing, but what is computed is what a server computes: in each step every running request
adds a token, and waiting ones bring a part of their prompts, all in one batch of packed rows. Each layer is one
``rawattn.attention_append``: new keys and values go into pages, rotated, and the queries attend to all of them. At the end each
token is checked against the same model on eager attention without a cache.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress
import rich.table
import torch
import torch.nn.functional as F

import rawattn

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, q, k, v -> o


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama-shaped model."""

    layers: int = 4
    dim: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 704
    vocab: int = 1000
    longest: int = 2048


class Model:
    """Weights, and the forward of packed rows; how q, k and v of a layer become o is the caller's."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        self.shape, s = shape, shape
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device, dtype)

        self.embedding = weight(s.vocab, s.dim) * s.dim**0.5
        self.qkv = [weight((s.heads + 2 * s.kv_heads) * s.head_dim, s.dim) for _ in range(s.layers)]
        self.out = [weight(s.dim, s.heads * s.head_dim) for _ in range(s.layers)]
        self.gate_up = [weight(2 * s.hidden, s.dim) for _ in range(s.layers)]
        self.down = [weight(s.dim, s.hidden) for _ in range(s.layers)]
        angles = torch.outer(torch.arange(s.longest), 10000.0 ** -(torch.arange(0, s.head_dim, 2) / s.head_dim))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last hidden state of each row, (rows, dim)."""
        s, x = self.shape, self.embedding[tokens]
        for layer in range(s.layers):
            rows = F.linear(F.rms_norm(x, (s.dim,)), self.qkv[layer]).unflatten(-1, (-1, s.head_dim))
            q, k, v = rows.split((s.heads, s.kv_heads, s.kv_heads), -2)
            x = x + F.linear(attend(layer, q, k, v).flatten(-2), self.out[layer])
            gate, up = F.linear(F.rms_norm(x, (s.dim,)), self.gate_up[layer]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down[layer])
        return F.rms_norm(x, (s.dim,))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.embedding).float()


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

    def __init__(self, model: Model, pages: int, page_size: int, most_rows: int, window: int | None) -> None:
        s, self.model, self.page_size, self.most_rows, self.window = model.shape, model, page_size, most_rows, window
        pool = model.embedding.new_zeros(s.layers, 2, pages, page_size, s.kv_heads, s.head_dim)
        self.caches = [rawattn.KVCache(k, v) for k, v in pool]
        self.rotary = rawattn.Rotary(model.cos, model.sin)
        self.free = collections.deque(range(pages))
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []

    def step(self) -> int:
        """Runs one batch; gives how many tokens it generated."""
        batch = self._schedule()
        if not batch:
            raise RuntimeError("no request fits the cache: give it more pages")
        tokens = [token for request, n in batch for token in request.tokens[request.cached : request.cached + n]]
        step = self._step_of(batch)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            window = None if self.window is None else (self.window - 1, 0)
            return rawattn.attention_append(q, k, v, self.caches[layer], step, rotary=self.rotary, window=window)

        hidden = self.model.forward(self._integers(tokens).long(), attend)
        for request, n in batch:
            request.cached += n
        return self._sample(batch, hidden[step.cu_seqlens_q[1:].long() - 1])

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

    def _step_of(self, batch: list[tuple[Request, int]]) -> rawattn.Step:
        """Lengths and pages of a batch. What lies behind a sequence's pages is never read, nor what lies before its window."""
        kv_lens = [request.cached + n for request, n in batch]
        widest = max(len(request.pages) for request, _ in batch)
        table = [request.pages + [-1] * (widest - len(request.pages)) for request, _ in batch]
        starts = [0, *torch.tensor([n for _, n in batch]).cumsum(0).tolist()]
        return rawattn.Step(self._integers(kv_lens), self._integers(table), self._integers(starts))

    def _integers(self, numbers: list[Any]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.model.embedding.device)

    def _sample(self, batch: list[tuple[Request, int]], hidden: torch.Tensor) -> int:
        """Appends the likeliest token to each request whose tokens are all cached, and gives pages back."""
        chosen, now, count = self.model.logits(hidden).argmax(-1).tolist(), time.perf_counter(), 0
        for (request, _), token in zip(batch, chosen, strict=True):
            if request.cached == len(request.tokens):
                request.tokens.append(token)
                request.times.append(now)
                count += 1
            unused = len(request.pages) if request.is_done else 0
            if self.window is not None:
                unused = max(unused, (request.cached + 1 - self.window) // self.page_size)
            for i in range(request.freed, unused):
                self.free.append(request.pages[i])
                request.pages[i] = -1
            request.freed = max(request.freed, unused)
        self.running = [request for request in self.running if not request.is_done]
        return count


def eager(model: Model, tokens: list[int], window: int | None) -> torch.Tensor:
    """The logits of each row of one sequence, with plain attention over the whole of it."""
    n, s = len(tokens), model.shape
    i = torch.arange(n, device=model.embedding.device)
    kept = (i[:, None] >= i) & (i[:, None] - i < (window or n))

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = model.cos[:n, None], model.sin[:n, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, -2) for x in (turned(k), v))
        logits = torch.einsum("qhd,khd->hqk", turned(q), k).float() * s.head_dim**-0.5
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(~kept, -torch.inf).softmax(-1).to(v.dtype), v)

    return model.logits(model.forward(torch.tensor(tokens, device=model.embedding.device), attend))


def check(model: Model, request: Request, window: int | None, tolerance: float) -> None:
    """Raises where a generated token is not the likeliest one on eager attention, but for ties within the tolerance."""
    logits = eager(model, request.tokens[:-1], window)[request.prompt - 1 :]
    chosen = torch.tensor(request.tokens[request.prompt :], device=logits.device)
    behind = logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]
    if not bool((behind <= tolerance).all()):
        raise SystemExit(f"token {int(behind.argmax())} of a request is behind the likeliest one by {float(behind.max()):.3g}")


def report(console: rich.console.Console, requests: list[Request], start: float, end: float) -> None:
    """Prints how long users would have waited."""
    first = [r.times[0] - start for r in requests]
    between = [b - a for r in requests for a, b in zip(r.times, r.times[1:], strict=False)]
    table = rich.table.Table("", "median", "slowest")
    for name, seconds in (("time to first token", first), ("time between tokens", between or [0.0])):
        table.add_row(name, f"{statistics.median(seconds) * 1e3:.1f} ms", f"{max(seconds) * 1e3:.1f} ms")
    console.print(table)
    generated = sum(r.wanted for r in requests)
    console.print(
        f"{generated} tokens of {len(requests)} requests in {end - start:.2f} s: {generated / (end - start):.0f} tokens/s"
    )


def main(arguments: list[str] | None = None) -> list[Request]:
    parser = argparse.ArgumentParser(description="Generates text with a random Llama-shaped model, on rawattn.")
    for name, default in (("requests", 16), ("tokens", 32), ("prompt", 200), ("pages", 256), ("page-size", 16), ("rows", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, help="keys that a query sees; pages before them are given back")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    asked = parser.parse_args(arguments)
    console, dtype = rich.console.Console(), getattr(torch, asked.dtype)
    model, lengths = Model(Shape(), asked.device, dtype), torch.Generator().manual_seed(1)
    requests = []
    for _ in range(asked.requests):
        prompt = int(torch.randint(1, asked.prompt + 1, (), generator=lengths))
        tokens = torch.randint(model.shape.vocab, (prompt,), generator=lengths).tolist()
        requests.append(Request(tokens, prompt, asked.tokens))
    server = Server(model, asked.pages, asked.page_size, asked.rows, asked.window)
    with torch.inference_mode(), rich.progress.Progress(console=console) as progress:
        server.waiting.extend([Request([1, 2], 2, 1)])
        while server.waiting or server.running:  # what is compiled when it is first called is not the requests' time
            server.step()
        server.waiting.extend(requests)
        bar, start = progress.add_task("tokens", total=asked.requests * asked.tokens), time.perf_counter()
        while server.waiting or server.running:
            progress.advance(bar, server.step())
        end = time.perf_counter()
        bar = progress.add_task("checked on eager attention", total=len(requests))
        for request in requests:
            check(model, request, asked.window, 1e-3 if dtype is torch.float32 else 0.3)
            progress.advance(bar)
    assert len(server.free) == asked.pages, "a page was not given back"
    report(console, requests, start, end)
    return requests


if __name__ == "__main__":
    main()

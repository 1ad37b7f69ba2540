"""Trains a small GPT on the characters of a text, with rawattn's attention, and lets it write.

python examples/train_gpt.py                                    on a CPU a minute, on a GPU seconds
python examples/train_gpt.py --text FILE --layers 6 --width 384 --heads 6 --length 256 --steps 2000
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import rawattn

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


class Block(nn.Module):
    """A layer: causal attention, then two linear maps with a GELU between."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        # One projection, cut into heads of q, k and v: (batch, length, heads, head_dim), as attention takes them, without a copy.
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=-2)
        x = x + self.back(rawattn.attention(q, k, v, causal=True).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Gives the logits of the next token after each of (batch, length) tokens."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.last(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, tokens: Tensor, count: int) -> Tensor:
        """Adds ``count`` tokens to (1, length) tokens, each drawn by what the model gives it."""
        for _ in range(count):
            weights = self(tokens[:, -self.length :])[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(weights, 1)], 1)
        return tokens


def train(model: GPT, data: Tensor, steps: int, batch: int, rate: float, console: Console) -> list[float]:
    """Takes steps of AdamW on random parts of the data, and gives the loss of each. On a GPU it computes in bf16."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=rate), []
    for _ in track(range(steps), "training", console=console, transient=True):
        starts = torch.randint(len(data) - model.length, (batch, 1), device=data.device)
        rows = data[starts + torch.arange(model.length + 1, device=data.device)]
        with torch.autocast(data.device.type, torch.bfloat16, enabled=data.is_cuda):
            loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())  # a number here would wait for the GPU in every step
    values: list[float] = torch.stack(found).tolist()
    return values


def curve(losses: Sequence[float], columns: int = 64, rows: int = 10) -> str:
    """Draws the losses, each column the mean of a part of them."""
    parts = torch.tensor(losses).tensor_split(min(columns, len(losses)))
    means = [float(part.mean()) for part in parts]
    low, high = min(means), max(means)
    heights = [round((rows - 1) * (mean - low) / max(high - low, 1e-9)) for mean in means]
    marks = {rows - 1: f"{high:6.2f}", 0: f"{low:6.2f}"}
    lines = [marks.get(row, " " * 6) + " │" + "".join("●" if h == row else " " for h in heights) for row in range(rows)]
    return "\n".join([*reversed(lines), " " * 7 + "└" + "─" * len(means), f"        loss of {len(losses)} steps"])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, default=README, help="what to learn; by default this project's README")
    for name, value in {"layers": 4, "width": 128, "heads": 4, "length": 128, "batch": 12, "steps": 300, "write": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(argv: Sequence[str] | None = None) -> list[float]:
    options, console = arguments().parse_args(argv), Console(highlight=False)
    text = options.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text], device=options.device)
    torch.manual_seed(0)
    model = GPT(len(letters), options.length, options.layers, options.width, options.heads).to(options.device)
    size = sum(each.numel() for each in model.parameters())
    console.print(f"{len(text)} characters, {len(letters)} of them different; {size} parameters on {options.device}")
    begin = time.perf_counter()
    losses = train(model, data, options.steps, options.batch, options.rate, console)
    seconds = time.perf_counter() - begin
    tokens = options.steps * options.batch * options.length
    console.print(f"{curve(losses)}\n{seconds:.1f} s, {tokens / seconds:.0f} tokens a second, compiling included\n")
    if options.write:
        written = model.write(data[None, : options.length // 2], options.write)[0].tolist()
        console.print("".join(letters[i] for i in written), markup=False)
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])

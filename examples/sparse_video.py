"""Trains a small video transformer whose layers attend to the blocks that they choose anew in every step.

python examples/sparse_video.py                                 on a CPU or a GPU, in seconds
python examples/sparse_video.py --frames 16 --side 32 --most 12 --steps 400 --device cuda

A clip is a grid of tokens, in blocks of 4 x 4 x 4. Each block belongs to an object, and each object has a colour, which its
tokens show in the first half of the clip. Then objects are elsewhere, and the model says which colours they had: a block must
find those of its own object among all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import rawattn

OBJECTS, COLOURS, SIDE = 6, 4, 4  # a block has SIDE tokens along each axis


class Layer(nn.Module):
    """A layer: attention to the best blocks, then two linear maps with a GELU between."""

    def __init__(self, width: int, heads: int, most: int) -> None:
        super().__init__()
        self.heads, self.most = heads, most
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=-2)
        keys = rawattn.sparse.top_blocks(q, k, self.most)  # lists on the device: nothing waits for them
        x = x + self.back(rawattn.attention(q, k, v, keys=keys).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Gives the logits of the colours of (batch, tokens) objects, of which some show theirs."""

    def __init__(self, layers: int, width: int, heads: int, most: int) -> None:
        super().__init__()
        self.object, self.shown = nn.Embedding(OBJECTS, width), nn.Embedding(COLOURS + 1, width)
        self.layers = nn.Sequential(*(Layer(width, heads, most) for _ in range(layers)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, COLOURS)

    def forward(self, objects: Tensor, shown: Tensor) -> Tensor:
        return self.last(self.norm(self.layers(self.object(objects) + self.shown(shown))))


def to_blocks(x: Tensor) -> Tensor:
    """Puts (batch, frames, height, width) block by block: (batch, tokens)."""
    counts = [n // SIDE for n in x.shape[1:]]
    return x.view(-1, counts[0], SIDE, counts[1], SIDE, counts[2], SIDE).permute(0, 1, 3, 5, 2, 4, 6).flatten(1)


def draw(batch: int, frames: int, side: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draws clips: the object of each token, the colour that it shows, COLOURS for none, and the colour that it has."""
    halves = [torch.randint(OBJECTS, (batch, 1, (side // SIDE) ** 2), device=device)]
    halves.append(halves[0].gather(2, torch.rand(halves[0].shape, device=device).argsort(2)))  # they are elsewhere
    blocks = torch.cat([half.expand(-1, frames // SIDE // 2, -1) for half in halves], 1)
    objects = blocks.unflatten(2, (side // SIDE, -1))
    for axis in (1, 2, 3):
        objects = objects.repeat_interleave(SIDE, axis)
    colours = torch.rand(batch, OBJECTS, COLOURS, device=device).argmax(2).gather(1, objects.flatten(1)).view_as(objects)
    shown = colours.clone()
    shown[:, frames // 2 :] = COLOURS
    return to_blocks(objects), to_blocks(shown), to_blocks(colours)


def train(model: Model, steps: int, rate: float, clip: tuple[int, int, int], device: str) -> list[float]:
    """Takes steps of AdamW, and gives the loss of each, in nats a token that shows no colour. On a GPU it computes in bf16."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=rate), []
    for number in range(steps):
        objects, shown, colours = draw(*clip, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(objects, shown)
            hidden = shown.numel() // 2  # the second half of each clip
            loss = functional.cross_entropy(logits.chunk(2, 1)[1].reshape(hidden, -1), colours.chunk(2, 1)[1].reshape(hidden))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
        if number % 20 == 0 or number == steps - 1:
            print(f"step {number:4d}  {float(found[-1]):.3f} nats a token")
    values: list[float] = torch.stack(found).tolist()
    return values


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"frames": 8, "side": 8, "batch": 4, "layers": 1, "width": 64, "heads": 2, "most": 3, "steps": 60}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Model(options.layers, options.width, options.heads, options.most).to(options.device)
    begin = time.perf_counter()
    losses = train(model, options.steps, options.rate, (options.batch, options.frames, options.side), options.device)
    blocks = options.frames * options.side**2 // SIDE**3
    print(f"{options.most} of {blocks} blocks; {time.perf_counter() - begin:.1f} s, compiling included")
    if not sum(losses[-10:]) < sum(losses[:10]) / 2:
        raise SystemExit("it did not learn")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])

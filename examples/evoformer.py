"""An Evoformer's triangle attention: a bias of each pair, made of the pairs themselves, beside its formula in float64.

python examples/evoformer.py                                    errors of o and of all gradients, in float32
python examples/evoformer.py --length 256 --dtype bfloat16 --device cuda

Pairs of residues are (batch, length, length, width). Around the starting node each row of pairs attends to itself, and all rows
share the bias, one number of a pair for each head, as in AlphaFold 2 (algorithm 13); around the ending node columns do (14).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rawattn.integrations.cuequivariance import triangle_attention

Attention = Callable[..., Any]


class TriangleAttention(nn.Module):
    """Gated attention of the rows of pairs, or of their columns."""

    def __init__(self, width: int, heads: int, ending: bool) -> None:
        super().__init__()
        self.heads, self.ending = heads, ending
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.bias, self.gate, self.back = nn.Linear(width, heads, bias=False), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pairs: Tensor, keep: Tensor, attend: Attention) -> Tensor:
        if self.ending:
            return self.attend(pairs.transpose(1, 2), keep.transpose(1, 2), attend).transpose(1, 2)
        return self.attend(pairs, keep, attend)

    def attend(self, pairs: Tensor, keep: Tensor, attend: Attention) -> Tensor:
        x = self.norm(pairs)
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(2, 4).unbind(3)
        )  # (batch, rows, heads, length, head_dim)
        bias = self.bias(x).permute(0, 3, 1, 2)[:, None]  # (batch, 1, heads, length, length), of all rows
        o = attend(q, k, v, bias, keep[:, :, None, None])
        return self.back(o.transpose(2, 3).flatten(-2) * self.gate(x).sigmoid())


class Block(nn.Module):
    """The part of an Evoformer block that attends to pairs: both nodes, and a transition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.starting, self.ending = (TriangleAttention(width, heads, ending) for ending in (False, True))
        self.transition = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, pairs: Tensor, keep: Tensor, attend: Attention = triangle_attention) -> Tensor:
        pairs = pairs + self.starting(pairs, keep, attend)
        pairs = pairs + self.ending(pairs, keep, attend)
        return pairs + self.transition(pairs)


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def gradients(block: Block, pairs: Tensor, keep: Tensor, attend: Attention) -> dict[str, Tensor]:
    """What the block gives, and the gradients of its squares' mean by pairs and weights."""
    pairs = pairs.clone().requires_grad_()
    o = block(pairs, keep, attend)
    named = {"pairs": pairs, **dict(block.named_parameters())}
    found = torch.autograd.grad(o.square().mean(), list(named.values()))
    return {"o": o.detach(), **{f"gradient of {name}": x for name, x in zip(named, found, strict=True)}}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"batch": 1, "length": 40, "width": 64, "heads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    block = Block(options.width, options.heads).to(options.device, getattr(torch, options.dtype))
    pairs = torch.randn(options.batch, options.length, options.length, options.width).to(block.transition[1].weight)
    there = torch.arange(options.length, device=options.device) < options.length - 3  # the last residues are padding
    keep = (there[:, None] & there).expand(options.batch, -1, -1) | torch.eye(len(there), dtype=torch.bool, device=options.device)
    exact = gradients(copy.deepcopy(block).double(), pairs.double(), keep, formula)
    errors = {}
    for name, attend in (("rawattn", triangle_attention), ("formula", formula)):
        found = gradients(block, pairs, keep, attend)
        errors[name] = {key: float((x - exact[key]).abs().max() / exact[key].abs().max()) for key, x in found.items()}
    print(f"largest errors in {options.dtype} beside float64, of the largest number: by rawattn, by the formula")
    for key, error in errors["rawattn"].items():
        print(f"{key:36s} {error:.1e}  {errors['formula'][key]:.1e}")
        if not error < 3 * errors["formula"][key] + 1e-6:
            raise SystemExit(f"{key} differs from the formula")
    return errors["rawattn"]


if __name__ == "__main__":
    main(sys.argv[1:])

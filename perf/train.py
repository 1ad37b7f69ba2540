"""Times training steps of a GPT with our attention and with each peer's, in one run: tokens a second, from end to end.

python -m perf.train --fa3 fa3.so.xz                                        GPT-2's sizes, eager; writes train.json, train.md
python -m perf.train --compile --layers 1 --heads 16 --head-dim 128 --batch 8 --length 2048    compiled, of a larger one's width
python -m perf.train --blocks-alone --compile --layers 1 --heads 16 --head-dim 128 --batch 8 --length 2048      its block alone

A step is forward, backward and AdamW, in bf16 under autocast, all of the model's own time and of the host's included. Contenders
take turns, shuffled, in rounds of ``STEPS`` steps between two waits for the GPU. All begin with the same weights and see the same
tokens; ``loss`` is that of the last step, and is alike where all compute the same. ``over`` is their time over ours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from .lib import command, differentiable, machine, report
from .lib.checking import failure

PEERS, STEPS, VOCABULARY = "fa3,cudnn,fa2", 4, 50304  # GPT-2's tokens, up to a multiple of 128


def make_model(attend: differentiable.Attend, options: argparse.Namespace) -> Any:
    """A GPT whose blocks are compiled one by one, where that is asked for: all of them are one graph."""
    import torch
    from torch import nn

    heads, head_dim, alone = options.heads, options.head_dim, options.blocks_alone
    width = heads * head_dim

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, heads, head_dim)).unbind(-3)
            x = x + self.back(attend(q, k, v, True).flatten(-2))
            return x + self.mlp(self.norms[1](x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if not alone:
                self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(options.length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(options.layers)))
            if alone:
                return
            self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
            self.last.weight = self.token.weight

        def forward(self, given: Any) -> Any:
            """The loss."""
            if alone:
                return self.blocks(given).float().square().mean()
            logits = self.last(self.norm(self.blocks(self.token(given[:, :-1]) + self.place.weight)))
            return nn.functional.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())

    torch.manual_seed(0)
    model = Model()
    if not alone:
        nn.init.normal_(model.token.weight, std=0.02)
    for block in model.blocks if options.compile else ():
        block.compile(fullgraph=True)
    return model


def make_inputs(options: argparse.Namespace, device: str) -> list[Sequence[Any]]:
    """Returns what the steps of each round are given: tokens, or the numbers that a block gets, the same in all steps."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rounds = options.rounds + 1
    if options.blocks_alone:
        shape = (options.batch, options.length, options.heads * options.head_dim)
        return [[torch.randn(shape, generator=generator).to(device)] * STEPS] * rounds
    tokens = (rounds, STEPS, options.batch, options.length + 1)
    return list(torch.randint(VOCABULARY, tokens, generator=generator).to(device))


class Contender:
    """A model with its optimizer, and the times of its steps."""

    def __init__(self, model: Any, device: str) -> None:
        import torch

        self.model, self.device, self.torch = model.to(device), device, torch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
        self.ms: list[float] = []
        self.loss, self.peak = 0.0, 0.0

    def round(self, given: Sequence[Any]) -> None:
        """Takes a step on each of what is given, and notes the time of one."""
        wait = self.torch.cuda.synchronize if self.device == "cuda" else lambda: None
        wait()
        begin = time.perf_counter()
        for each in given:
            loss = self.step(each)
        wait()
        self.ms.append((time.perf_counter() - begin) * 1e3 / len(given))
        self.loss = loss.item()

    def step(self, given: Any) -> Any:
        with self.torch.autocast(self.device, self.torch.bfloat16):
            loss = self.model(given)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def peak_gib(self, given: Any) -> float:
        """GiB that a step adds at most to weights and the optimizer's state."""
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        self.step(given)
        return float(cuda.max_memory_allocated() - before) / 2**30


def measure(
    attends: dict[str, differentiable.Attend], options: argparse.Namespace, device: str = "cuda"
) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step, tokens a second, GiB and the last loss of each contender, or why it has none."""
    inputs, found = make_inputs(options, device), dict[str, dict[str, Any]]()
    contenders: dict[str, Contender] = {}
    for name, attend in attends.items():
        try:
            each = Contender(make_model(attend, options), device)
            each.round(inputs[0])  # which compiles
            each.peak = each.peak_gib(inputs[0][0]) if device == "cuda" else 0.0
            each.ms.clear()
            contenders[name] = each
        except Exception as error:  # a peer may raise anything; the others go on
            found[name] = {"failure": failure(error)}
    shuffle = random.Random(0)
    for i in range(options.rounds):
        for name in shuffle.sample(list(contenders), len(contenders)):
            contenders[name].round(inputs[i + 1])
    for name, each in contenders.items():
        ms = statistics.median(each.ms)
        rate = options.batch * options.length / ms * 1e3
        found[name] = {"ms": ms, "rounds": each.ms, "tokens_per_s": rate, "peak_gib": each.peak, "loss": each.loss}
    return {name: found[name] for name in attends}


def table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = [["attention", "ms", "tokens/s", "GiB", "over", "loss", "failure"]]
    for name, row in found.items():
        if "failure" in row:
            rows.append([name, *"-----", row["failure"]])
            continue
        over = row["ms"] / found["ours"].get("ms", float("nan"))
        numbers = f"{row['ms']:.2f} {row['tokens_per_s']:.0f} {row['peak_gib']:.2f} {over:.3f} {row['loss']:.4f}"
        rows.append([name, *numbers.split(), ""])
    return rows


def arguments() -> argparse.ArgumentParser:
    parser = command.parser("train", __doc__)
    sizes = {"layers": 12, "heads": 12, "head-dim": 64, "batch": 8, "length": 1024, "rounds": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true", help="torch.compile of every block")
    parser.add_argument("--blocks-alone", action="store_true", help="no embedding and no logits; their loss is a mean of squares")
    parser.add_argument("--peers", default=PEERS, help="comma-separated; fa3 where its library is given")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    device, facts = machine.gpu("train"), machine.facts()
    found = measure(differentiable.contenders(options.peers, options.fa3), options)
    folder, given = options.out or machine.record(device), {k: v for k, v in vars(options).items() if k not in ("out", "fa3")}
    stem = "train" + "-blocks" * options.blocks_alone + "-compiled" * options.compile
    report.write(folder / f"{stem}.json", json.dumps({"machine": facts, "arguments": given, "rows": found}, indent=1) + "\n")
    words = ", ".join(f"{name} {value}" for name, value in given.items())
    text = f"# Training steps: {words}\n\n{report.origin(facts)}\n\n{report.table(table(found), markdown=True)}\n"
    report.write(folder / f"{stem}.md", text)
    print(report.table(table(found)))
    return int("failure" in found["ours"])


if __name__ == "__main__":
    sys.exit(main())

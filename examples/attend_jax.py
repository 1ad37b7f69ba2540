"""A layer of attention in JAX, under jit and grad, that learns to copy what came a few tokens before.

python examples/attend_jax.py --steps 100
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import rawattn.jax

HEADS, WIDTH, LENGTH, SHIFT, WORDS = 2, 32, 24, 3, 8


def forward(weights: Any, tokens: Any) -> Any:
    """Logits of each position, (batch, length, words)."""
    batch, length = tokens.shape
    x = weights["words"][tokens]
    places = weights["places"][:length]
    q = (places @ weights["q"]).reshape(1, length, HEADS, -1).repeat(batch, 0)  # what is looked for is a place alone
    k = (places @ weights["k"]).reshape(1, length, HEADS, -1).repeat(batch, 0)
    v = (x @ weights["v"]).reshape(batch, length, HEADS, -1)
    o = rawattn.jax.attention(q, k, v, causal=True)
    return o.reshape(batch, length, -1) @ weights["out"]


def loss(weights: Any, tokens: Any) -> Any:
    """Nats a token, of those that have one SHIFT before them."""
    logits = jax.nn.log_softmax(forward(weights, tokens)[:, SHIFT:])
    return -jnp.take_along_axis(logits, tokens[:, :-SHIFT, None], -1).mean()


@jax.jit
def step(weights: Any, tokens: Any, rate: float) -> Any:
    value, gradients = jax.value_and_grad(loss)(weights, tokens)
    return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), value


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3.0)
    options = parser.parse_args(arguments)
    shapes = {"words": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "out": (WIDTH, WORDS)} | dict.fromkeys("qkv", (WIDTH, WIDTH))
    keys = jax.random.split(jax.random.key(0), len(shapes) + options.steps)
    weights = {
        name: jax.random.normal(key, shape) * (1.0 if name == "places" else shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    losses = []
    for number, key in enumerate(keys[len(shapes) :]):
        tokens = jax.random.randint(key, (32, LENGTH), 0, WORDS)
        weights, value = step(weights, tokens, options.rate)
        losses.append(float(value))
        if number % 20 == 0 or number == options.steps - 1:
            print(f"step {number:4d}  {losses[-1]:.3f} nats a token")
    return losses


if __name__ == "__main__":
    main()

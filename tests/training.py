"""A tiny model to train: the same weights and the same tokens for every attention and in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
VOCABULARY = 17


class Model(torch.nn.Module):
    """Two layers of attention, 4 heads on 2, over sequences that have three tokens each: which, attention alone can tell. Its
    weights are of ``dtype``, and ``attend`` is given q, k and v of ``cast``."""

    def __init__(
        self, attend: Callable[..., Any], dtype: Any, cast: Any, head_dim: int = 8, length: int = 24, device: str = "cpu"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.cast, self.head_dim, self.length, width = attend, cast, head_dim, length, 4 * head_dim
        self.token, self.place = (torch.nn.Embedding(n, width).double() for n in (VOCABULARY, length))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 2 * width).double() for _ in range(2))
        self.back = torch.nn.ModuleList(torch.nn.Linear(width, width).double() for _ in range(2))
        self.last = torch.nn.Linear(width, VOCABULARY).double()
        self.to(dtype=dtype, device=device)

    def layer(self, x: Any, i: int) -> Any:
        heads = self.qkv[i](torch.nn.functional.layer_norm(x, x.shape[-1:])).to(self.cast).unflatten(-1, (8, self.head_dim))
        return x + self.back[i](self.attend(*heads.split((4, 2, 2), -2)).flatten(-2).to(x.dtype))

    def forward(self, tokens: Any) -> Any:
        x = self.token(tokens) + self.place.weight
        for i in range(2):
            x = self.layer(x, i)
        return self.last(x)

    def loss(self, tokens: Any) -> Any:
        return torch.nn.functional.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def batches(self, steps: int) -> Iterator[Any]:
        """The tokens of each step, the same on every device."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            among = torch.rand(4, VOCABULARY, generator=generator).argsort()[:, :3]
            which = torch.randint(3, (4, self.length), generator=generator)
            yield among.gather(1, which).to(self.last.weight.device)


def sdpa(q: Any, k: Any, v: Any) -> Any:
    """Computes torch's own attention, causal."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def losses(model: Any, steps: int, lr: float = 3e-3) -> Any:
    """Trains the model by Adam, and gives the loss of each step, in float64."""
    optimizer, found = torch.optim.Adam(model.parameters(), lr=lr), []
    for tokens in model.batches(steps):
        value = model.loss(tokens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.detach())
    return torch.stack(found).double().cpu()


def gap(found: Any, exact: Any) -> float:
    """The root of the mean squared difference of two curves."""
    return float((found - exact).square().mean().sqrt())

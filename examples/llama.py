"""A Llama-shaped model in plain torch, which leaves attention to its caller: of random weights or those of a folder, on eager
attention, and in transformers. examples/generate.py serves it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, q, k, v -> o
Weights = dict[str, torch.Tensor]  # by the names that transformers has for them


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
    eps: float = 1e-5
    theta: float = 10000.0

    def random(self) -> Weights:
        generator, found = torch.Generator().manual_seed(0), {"model.norm.weight": torch.ones(self.dim)}

        def weight(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
            found[f"model.{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5 * scale

        weight("embed_tokens", self.vocab, self.dim, self.dim**0.5)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for at in (f"layers.{i}" for i in range(self.layers)):
            for name, rows, columns in (("q", q, self.dim), ("k", kv, self.dim), ("v", kv, self.dim), ("o", self.dim, q)):
                weight(f"{at}.self_attn.{name}_proj", rows, columns)
            for name, rows, columns in (
                ("gate", self.hidden, self.dim),
                ("up", self.hidden, self.dim),
                ("down", self.dim, self.hidden),
            ):
                weight(f"{at}.mlp.{name}_proj", rows, columns)
            for name in ("input", "post_attention"):
                found[f"model.{at}.{name}_layernorm.weight"] = torch.ones(self.dim)
        return found


def load(folder: pathlib.Path) -> tuple[Shape, Weights]:
    """A model that transformers saved."""
    from safetensors.torch import load_file

    c = json.loads((folder / "config.json").read_text())
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    weights = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
    if rope.get("rope_type", "default") != "default" or any(name.endswith("bias") for name in weights):
        raise SystemExit(f"{folder} has biases, or scaled rotary embeddings; this example has neither")
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    sizes = heads, c.get("num_key_value_heads") or heads, c.get("head_dim") or dim // heads, c["intermediate_size"]
    theta = rope.get("rope_theta") or c.get("rope_theta") or 10000.0
    shape = Shape(c["num_hidden_layers"], dim, *sizes, c["vocab_size"], c["max_position_embeddings"], c["rms_norm_eps"], theta)
    return shape, weights


class Model:
    """Weights, and the forward of packed rows; how q, k and v of a layer become o is the caller's."""

    def __init__(self, shape: Shape, weights: Weights, device: str, dtype: torch.dtype) -> None:
        self.shape, s = shape, shape

        def layers(*names: str) -> list[torch.Tensor]:
            found = [torch.cat([weights[f"model.layers.{i}.{name}.weight"] for name in names]) for i in range(s.layers)]
            return [x.to(device, dtype) for x in found]

        self.qkv = layers("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out, self.gate_up, self.down = (
            layers("self_attn.o_proj"),
            layers("mlp.gate_proj", "mlp.up_proj"),
            layers("mlp.down_proj"),
        )
        self.norms = layers("input_layernorm"), layers("post_attention_layernorm")
        self.norm, self.embedding = (weights[f"model.{name}.weight"].to(device, dtype) for name in ("norm", "embed_tokens"))
        self.head = weights["lm_head.weight"].to(device, dtype) if "lm_head.weight" in weights else self.embedding
        angles = torch.outer(torch.arange(s.longest), s.theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last hidden state of each row, (rows, dim)."""
        s, x = self.shape, self.embedding[tokens]
        for layer in range(s.layers):
            rows = F.linear(F.rms_norm(x, (s.dim,), self.norms[0][layer], s.eps), self.qkv[layer]).unflatten(-1, (-1, s.head_dim))
            q, k, v = rows.split((s.heads, s.kv_heads, s.kv_heads), -2)
            x = x + F.linear(attend(layer, q, k, v).flatten(-2), self.out[layer])
            gate, up = F.linear(F.rms_norm(x, (s.dim,), self.norms[1][layer], s.eps), self.gate_up[layer]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down[layer])
        return F.rms_norm(x, (s.dim,), self.norm, s.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head).float()


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


def by_transformers(
    model: Model, weights: Weights, prompts: list[list[int]], wanted: int, window: int | None
) -> tuple[float, float, list[list[int]]]:
    """Seconds to the first token and to all of them by transformers' own ``generate``, of one padded batch, and the tokens."""
    import transformers

    s, device = model.shape, model.embedding.device
    config = transformers.MistralConfig(  # a Llama whose keys may have a window
        vocab_size=s.vocab, hidden_size=s.dim, intermediate_size=s.hidden, num_hidden_layers=s.layers, head_dim=s.head_dim,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, max_position_embeddings=s.longest, rms_norm_eps=s.eps,
        rope_parameters={"rope_type": "default", "rope_theta": s.theta}, sliding_window=window,
        tie_word_embeddings="lm_head.weight" not in weights,
    )  # fmt: skip
    other = transformers.MistralForCausalLM(config)
    other.load_state_dict(weights, strict=False)
    other = other.to(device, model.embedding.dtype).eval()
    longest, found = max(map(len, prompts)), []
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    given = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for count in (1, 1, wanted):  # what is set up when it is first called is not counted
        start = time.perf_counter()
        tokens = other.generate(ids, max_new_tokens=count, **given)[:, longest:].tolist()
        found.append(time.perf_counter() - start)
    return found[1], found[2], tokens

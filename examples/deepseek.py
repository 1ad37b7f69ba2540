"""Serves a tiny DeepSeek-V3 with random weights from a latent cache, and compares its tokens with transformers' own.

    python examples/deepseek.py --requests 4
    python examples/deepseek.py --device cuda --dtype bfloat16

A token has one row of 576 columns in each layer's cache, which all heads share: 512 that keys and values are projected from,
and 64 rotated ones. W_uk is multiplied into the queries and W_uv into the results (the absorbed form), so that attention reads
the rows as they are: keys are the rows, values their first 512 columns. Each layer is one ``rawattn.attention_append``. Requests
of any lengths are packed end to end, first with their prompts, then with a token each. Everything but attention is transformers'
own modules.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
import transformers

import rawattn

RANK, ROPE, PAGE = 512, 64, 16


def make_model(layers: int, heads: int, device: str, dtype: Any) -> Any:
    """Makes a model of transformers' with random weights, on eager attention."""
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, kv_lora_rank=RANK, q_lora_rank=48, qk_rope_head_dim=ROPE, qk_nope_head_dim=32, v_head_dim=32,
        n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        vocab_size=200, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.to(device, dtype).eval()


class Server:
    """A model over latent caches, for as many requests as there are rows in the table of pages."""

    def __init__(self, model: Any, requests: int, longest: int) -> None:
        self.model, like = model, model.lm_head.weight
        pages = -(-longest // PAGE)
        pools = like.new_zeros(len(model.model.layers), requests * pages, PAGE, 1, RANK + ROPE)
        self.caches = [rawattn.KVCache(pool, pool[..., :RANK]) for pool in pools]
        self.table = torch.randperm(requests * pages, device=like.device).int().view(requests, pages)
        cos, sin = model.model.rotary_emb(like.float(), torch.arange(longest, device=like.device)[None])
        cos, sin = (x[0, :, : ROPE // 2].contiguous() for x in (cos, sin))
        self.rotary = rawattn.Rotary(cos, sin, interleaved=True, first_column=RANK)
        self.weights = [self.split(layer.self_attn) for layer in model.model.layers]

    def split(self, attention: Any) -> tuple[Any, Any]:
        """Splits the weights that project rows to keys and to values, (heads, columns, 512) each."""
        heads = attention.kv_b_proj.weight.view(self.model.config.num_attention_heads, -1, RANK)
        w_uk, w_uv = heads.split([attention.qk_nope_head_dim, attention.v_head_dim], 1)
        return w_uk, w_uv

    def attend(self, i: int, x: Any, step: rawattn.Step) -> Any:
        """Computes a layer's attention of rows x, (tokens, hidden), and adds them to its cache."""
        attention, (w_uk, w_uv) = self.model.model.layers[i].self_attn, self.weights[i]
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x))).unflatten(-1, (len(w_uk), -1))
        q_nope, q_rope = q.split([attention.qk_nope_head_dim, ROPE], -1)
        latent, k_rope = attention.kv_a_proj_with_mqa(x).split([RANK, ROPE], -1)
        row = torch.cat((attention.kv_a_layernorm(latent), k_rope), -1)[:, None]
        pair = torch.einsum("thn,hnc->thc", q_nope, w_uk), q_rope
        o = rawattn.attention_append(pair, row, None, self.caches[i], step, rotary=self.rotary, scale=attention.scaling)
        return attention.o_proj(torch.einsum("thc,hvc->thv", o, w_uv).flatten(1))

    @torch.no_grad()
    def run(self, new: list[list[int]], lengths: list[int]) -> list[int]:
        """Computes the likeliest next token of each request, which has so many tokens with its new ones."""
        device = self.table.device
        starts = torch.tensor([0, *itertools.accumulate(map(len, new))], dtype=torch.int32, device=device)
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        step = rawattn.Step(lens, self.table, starts, max_q_len=max(map(len, new)))
        x = self.model.model.embed_tokens(torch.tensor([token for each in new for token in each], device=device))
        for i, layer in enumerate(self.model.model.layers):
            x = x + self.attend(i, layer.input_layernorm(x), step)
            x = x + layer.mlp(layer.post_attention_layernorm(x)[None])[0]
        logits = self.model.lm_head(self.model.model.norm(x[starts[1:].long() - 1]))
        return [int(token) for token in logits.argmax(-1)]


def generate(server: Server, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generates tokens for all prompts together."""
    tokens = [[*prompt] for prompt in prompts]
    new = prompts
    for _ in range(count):
        new = [[token] for token in server.run(new, [len(each) for each in tokens])]
        tokens = [each + token for each, token in zip(tokens, new, strict=True)]
    return tokens


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("requests", 3), ("tokens", 8), ("prompt", 40), ("layers", 2), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(arguments)
    model = make_model(args.layers, args.heads, args.device, getattr(torch, args.dtype))
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, args.prompt + 1, (args.requests,), generator=random).tolist()
    prompts = [torch.randint(3, 200, (size,), generator=random).tolist() for size in sizes]
    found = generate(Server(model, args.requests, args.prompt + args.tokens), prompts, args.tokens)
    options = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = [model.generate(torch.tensor([prompt], device=args.device), **options)[0].tolist() for prompt in prompts]
    same = sum(a == b for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)) - sum(sizes)
    total = args.requests * args.tokens
    cache = f"{rawattn.kvcache_bytes(1, 1, RANK + ROPE, args.dtype, v_in_k=True)} bytes a token and layer"
    print(f"{same} of {total} tokens of {args.requests} requests are those of transformers' eager attention; {cache}")
    if args.dtype == "float32" and same != total:
        raise SystemExit("tokens differ in float32")


if __name__ == "__main__":
    main()

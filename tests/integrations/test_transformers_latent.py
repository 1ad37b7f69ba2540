"""Models with wide or latent heads in transformers, from tiny configurations and random weights: eager attention's tokens."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.masking_utils")
from rawattn.integrations import transformers as adapter  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 16, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
GEMMA = {
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 4, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 50, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3Config", SIZES | LATENT),
    "kimi_k25": ("Kimi_K25Config", SIZES | LATENT | {"num_attention_heads": 2, "num_key_value_heads": 2, "n_group": 1}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", SIZES | LATENT),
    "gemma4": ("Gemma4TextConfig", SIZES | GEMMA),
}


def make(name: str) -> dict[str, Any]:
    """The same model on eager attention and on rawattn, with weights that are large enough to matter."""
    cls, sizes = CONFIGS[name]
    if not hasattr(transformers, cls):
        pytest.skip(f"transformers {transformers.__version__} has no {cls}")
    adapter.enable()
    make_config = getattr(transformers, cls)
    if name == "kimi_k25":  # it sees, too; its text is a model of DeepSeek V3's form
        make_config = type(make_config().text_config)
    config = make_config(**sizes, initializer_range=0.4, max_position_embeddings=64)
    torch.manual_seed(0)
    models = {
        each: transformers.AutoModelForCausalLM.from_config(config, attn_implementation=each) for each in ("eager", "rawattn")
    }
    models["rawattn"].load_state_dict(models["eager"].state_dict())
    return {each: model.eval() for each, model in models.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_eager(name: str) -> None:
    models, ids = make(name), torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        logits = {each: model(ids, attention_mask=mask).logits[:, -1] for each, model in models.items()}
    spread = logits["eager"].std()
    assert spread > 1e-3 and (logits["eager"] - logits["rawattn"]).abs().max() < 1e-4 * spread
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = {each: model.generate(ids, attention_mask=mask, **options) for each, model in models.items()}
    assert torch.equal(found["eager"], found["rawattn"])


def test_attention_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would see an attention that is not eager's."""
    models, ids = make("deepseek_v3"), torch.randint(3, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    models["rawattn"].model.layers[0].self_attn.scaling *= 1.5
    with torch.no_grad():
        a, b = (model(ids).logits[:, -1] for model in models.values())
    assert (a - b).abs().max() > 1e-2 * a.std()

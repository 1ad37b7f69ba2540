"""transformers with attn_implementation="rawattn", on tiny random models, against its own eager attention."""

from __future__ import annotations

import collections
import copy
import inspect
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[transformers]'")
from transformers import masking_utils  # noqa: E402

from rawattn.errors import UnsupportedError  # noqa: E402
from rawattn.integrations import transformers as adapter  # noqa: E402

transformers.logging.set_verbosity_error()
SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
# Every token takes every expert of gpt-oss: in bf16, rounding would send some tokens to others than in fp32.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {"sliding_window": 9}),
    "Gemma 2": ("Gemma2Config", {"sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "Gemma 3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "Qwen 3": ("Qwen3Config", {}),
    "GPT-2": ("GPT2Config", {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Llama 4": ("Llama4TextConfig", {"attention_chunk_size": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}),
}
IDS = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones(2, 40, dtype=torch.long)
LEFT[1, :13] = 0
BOTH = LEFT * LEFT.flip(0, 1)
POSITIONS = torch.stack([torch.arange(40) % 25, torch.arange(40)])
CASES: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": IDS},
    "left": {"input_ids": IDS, "attention_mask": LEFT},
    "right": {"input_ids": IDS, "attention_mask": LEFT.flip(1)},
    "both": {"input_ids": IDS, "attention_mask": BOTH},
    "packed": {"input_ids": IDS[:1], "position_ids": POSITIONS[:1], "use_cache": False},
    "packed rows": {"input_ids": IDS, "position_ids": POSITIONS, "use_cache": False},
}  # fmt: skip


@pytest.fixture(autouse=True)
def enabled() -> None:
    adapter.enable()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """Counts how often each way to compute was taken."""
    counted: collections.Counter[str] = collections.Counter()
    for name in ("_attend_over_cache", "_attend_end_to_end"):
        original = getattr(adapter.LayerMask, name)

        def call(self: Any, *given: Any, name: str = name, original: Any = original) -> Any:
            counted[name] += 1
            return original(self, *given)

        monkeypatch.setattr(adapter.LayerMask, name, call)
    yield counted


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def make(name: str) -> Any:
    config, more = MODELS[name]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**(SMALL | more))).eval()


def logits(model: Any, implementation: str, given: dict[str, Any]) -> Any:
    model.set_attn_implementation(implementation)
    device = next(model.parameters()).device
    rows = given.get("attention_mask", torch.ones(given["input_ids"].shape)).bool()
    return model(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}).logits[
        rows.to(device)
    ]


def test_logits_and_gradients(model: Any, ways: Any) -> None:
    """Of all rows that are no padding; gradients of all parameters."""
    for name, given in CASES.items():
        found, gradients = {}, {}
        with torch.no_grad():
            assert (logits(model, "rawattn", given) - logits(model, "eager", given)).abs().max() < 2e-6, name
        for implementation in ("eager", "rawattn"):
            model.zero_grad()
            found[implementation] = logits(model, implementation, given)
            (found[implementation] ** 2).mean().backward()
            gradients[implementation] = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        assert (found["eager"] - found["rawattn"]).abs().max() < 2e-6, name
        wanted = gradients["eager"]
        assert len(wanted) and (wanted - gradients["rawattn"]).abs().max() < 3e-6 * wanted.abs().max(), name
    assert ways["_attend_end_to_end"]


def generate(model: Any, ids: Any, **given: Any) -> Any:
    """The tokens that a model adds. transformers 5.17 makes no chunked mask for a static cache, whatever the attention."""
    try:
        return model.generate(ids, max_new_tokens=12, do_sample=False, disable_compile=True, **given)
    except TypeError as error:
        if "create_chunked_causal_mask" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "padded"])
def test_generate(model: Any, mask: Any, cache: dict[str, Any]) -> None:
    """The same tokens, over more of them than a window has."""
    found = []
    for implementation in ("eager", "rawattn"):
        model.set_attn_implementation(implementation)
        found.append(generate(model, IDS, attention_mask=mask, **cache))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Bloom", "Mpt", "XGLM"])
def test_models_that_compute_attention_by_themselves(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=97, n_layer=1, num_layers=1, n_head=4, n_embd=64, rotary_dim=8)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rawattn")
    with pytest.raises(UnsupportedError, match=r"attention_mask.* by itself.*: use attn_implementation='eager' for it"):
        model(input_ids=IDS)


def test_chunks_of_a_prompt() -> None:
    """A prompt in two parts through a cache, then a token."""
    model = make("Mistral")
    for implementation in ("eager", "rawattn"):
        model.set_attn_implementation(implementation)
        cache, parts = transformers.DynamicCache(config=model.config), []
        with torch.no_grad():
            for part in (IDS[:, :7], IDS[:, 7:39], IDS[:, 39:]):
                parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        if implementation == "eager":
            wanted = torch.cat(parts, 1)
    assert (torch.cat(parts, 1) - wanted).abs().max() < 2e-6


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertConfig", {}), "ModernBERT": ("ModernBertConfig", {"local_attention": 8, "pad_token_id": 0}),
    "ViT": ("ViTConfig", {"image_size": 32, "patch_size": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_encoders(name: str) -> None:
    """Every query sees keys on both sides."""
    config, more = OTHERS[name]
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(getattr(transformers, config)(**sizes, **more)).eval()
    images = torch.randn(2, 3, 32, 32)
    for given in ({"pixel_values": images},) if name == "ViT" else tuple(CASES[case] for case in ("plain", "right", "left")):
        found = []
        for implementation in ("eager", "rawattn"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                found.append(model(**given)[0])
        rows = given.get("attention_mask", torch.ones(found[0].shape[:2])).bool()
        assert (found[0] - found[1])[rows].abs().max() < 3e-6


def test_encoder_and_decoder() -> None:
    whole = {"vocab_size": 97, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.WhisperConfig(**whole, **tokens, **layers, encoder_ffn_dim=32, decoder_ffn_dim=32)
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    given, found = {"input_features": torch.randn(2, 8, 60), "decoder_input_ids": IDS[:, :20]}, []
    for implementation in ("eager", "rawattn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(**given).logits)
    assert (found[0] - found[1]).abs().max() < 3e-6


def test_biases_of_positions(ways: Any) -> None:
    """T5, whose layers get a bias beside the mask: encoder, decoder with a cache, gradients."""
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for name, weights in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weights)
    for mask in (None, LEFT.flip(1)):
        found = []
        for implementation in ("eager", "rawattn"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            o = model(input_ids=IDS, attention_mask=mask, decoder_input_ids=IDS[:, :11]).logits
            o.square().mean().backward()
            tokens = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False)
            found.append((o.detach(), torch.cat([x.grad.flatten() for x in model.parameters()]), tokens))
        (o, d, tokens), (o_found, d_found, tokens_found) = found
        assert (o - o_found).abs().max() < 3e-6 and (d - d_found).abs().max() < 3e-6 * d.abs().max()
        assert torch.equal(tokens, tokens_found)
    assert not ways, "a bias goes with plain attention"


def test_dropout() -> None:
    """In training it follows torch's generator; rows with padding too, and a cache that is read without gradients."""
    model = make("Llama")
    model.config.attention_dropout = 0.25
    model.set_attn_implementation("rawattn")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    for name in ("plain", "left"):
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(logits(model.train(), "rawattn", {**CASES[name], "use_cache": False}))
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
        found[0].square().mean().backward()
        assert (logits(model.eval(), "rawattn", CASES[name]) - logits(model, "eager", CASES[name])).abs().max() < 2e-6


# ---- continuous batching


PROMPTS = [IDS[0, :n].tolist() for n in (3, 17, 40, 1)] + [IDS[0, :17].tolist()]  # which have pages in common


def is_new() -> bool:
    return tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 19)


def test_older_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        def __init__(self, block_size: int) -> None: ...

    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", Config)
    with pytest.raises(UnsupportedError, match=r"needs 5\.19"), adapter.continuous_batching(make("Llama")):
        pass


def serve(model: Any) -> list[list[int]]:
    pytest.importorskip("psutil", reason="transformers' paged cache needs psutil")
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    if not is_new():
        pytest.skip("continuous batching needs transformers 5.19")
    batching = ContinuousBatchingConfig(page_size=8, num_blocks=40, max_batch_tokens=32)
    greedy = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with adapter.continuous_batching(model):
        found = model.generate_batch(PROMPTS, generation_config=greedy, continuous_batching_config=batching)
    return [each.generated_tokens for each in found.values()]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "gpt-oss"])
def test_continuous_batching(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, in chunks of at most 32 tokens, over pages of 8: the tokens that each gets alone."""
    counted: collections.Counter[str] = collections.Counter()
    paged = adapter.transformers_paged
    for module, each in ((paged, "attention_kvcache"), (paged.attention, "attention_varlen")):
        original = getattr(module, each)
        call = lambda *given, each=each, original=original, **more: counted.update([each]) or original(*given, **more)  # noqa: E731
        monkeypatch.setattr(module, each, call)
    monkeypatch.setattr(paged, "_warned", set())
    model = make(name)
    model.set_attn_implementation("rawattn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name != "Llama" else "error", UserWarning)
        found = serve(model)
    assert model.config._attn_implementation == "rawattn"
    assert counted["attention_varlen"] and bool(counted["attention_kvcache"]) is (name != "Gemma 3")  # whose few layers all slide
    assert ("gathered" in paged._warned) is (name != "Llama")
    model.set_attn_implementation("eager")
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert tokens == wanted.tolist()


def test_position_bias_beside_floats() -> None:
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="position_bias was given beside a mask"):
        adapter.attention(torch.nn.Module(), q, q, q, q[..., :4], position_bias=q[..., :4])


@pytest.mark.skipif(not is_new(), reason="continuous batching needs transformers 5.19")
def test_continuous_batching_refuses() -> None:
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="cache is None; rawattn_flash serves continuous batching alone"):
        adapter.attention_paged(torch.nn.Module(), q, q, q, None)
    with pytest.raises(UnsupportedError, match="cache is a list"):
        module = torch.nn.Module()
        module.layer_idx = 0
        adapter.attention_paged(module, q, q, q, None, cache=[])
    with pytest.raises(UnsupportedError, match="attention_mask was given"):
        adapter.attention_paged(torch.nn.Module(), q, q, q, q, cache=[])
    model = make("Llama")
    with adapter.continuous_batching(model), pytest.raises(UnsupportedError, match="cache is None"):
        model(IDS)


@pytest.mark.gpu("any")
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_continuous_batching_on_a_gpu(name: str) -> None:
    """transformers captures the steps in graphs. In fp16, whose roundings may change a token late: most are those of eager."""
    model = make(name).cuda().half()
    found = serve(model)
    model.set_attn_implementation("eager")
    same = total = 0
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        wanted = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        same += sum(a == b for a, b in zip(tokens, wanted.tolist(), strict=True))
        total += len(tokens)
    assert same > 0.8 * total, f"{same} of {total}"


def test_layers_share_what_is_made(ways: Any) -> None:
    """All layers share one array of the places where sequences begin."""
    made: list[Any] = []
    model = make("Llama")
    model.set_attn_implementation("rawattn")
    original = adapter._find_starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_find_starts", lambda *given: made.append(1) or original(*given))
        model.generate(IDS, attention_mask=LEFT, max_new_tokens=3, do_sample=False)
    assert len(made) == 3 and ways == {"_attend_end_to_end": 12}


def test_nothing_is_read_from_the_device() -> None:
    """A query whose position is on the device, as with a static cache, and no mask: its length stays there."""
    kept = adapter.make_mask(2, 1, 64, q_offset=torch.tensor(20))
    assert isinstance(kept.used, torch.Tensor)
    q, k, v = (torch.randn(2, n, 2, 16) for n in (1, 64, 64))
    found = kept.attend(q, k, v, {"scale": None})
    assert torch.equal(found, adapter.attention_kvcache(q, adapter.serving.KVCache(k, v), kept._step))
    wanted = adapter.api.attention(q, k[:, :21], v[:, :21])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert adapter.make_mask(2, 7, 64, q_offset=torch.tensor(0)).used == 7


def test_copies_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows are read where they are, in a cache too; gradients through a cache make copies, which are said once."""
    monkeypatch.setattr(adapter, "_warned", set())
    model = make("Llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(model, "rawattn", {**CASES["left"], "use_cache": False})
        with torch.no_grad():
            logits(model, "rawattn", CASES["left"])
            model.generate(IDS, attention_mask=LEFT, max_new_tokens=3, do_sample=False)
    with pytest.warns(UserWarning, match="rows with padding or several sequences are copied") as seen:
        logits(model, "rawattn", CASES["left"])
    assert len(seen) == 1


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len", [1, 6, 20])
def test_padding(q_len: int, causal: bool, heads_first: bool) -> None:
    """Queries against keys of which some are padding: the last ones of the same sequence, or, not causal, of another one. Memory
    between sequences and of padding holds NaN."""
    random = torch.Generator().manual_seed(0)
    rows = torch.ones(3, 20, dtype=torch.bool)
    rows[0, :5] = rows[1, :19] = False
    if not causal:
        rows[2, 11:] = False
    q = torch.randn(3, q_len, 4, 16, generator=random)
    pool = torch.full((3, 2, 32, 16) if heads_first else (3, 32, 2, 16), torch.nan)
    k, v = ((pool.clone().transpose(1, 2) if heads_first else pool.clone()) for _ in range(2))
    for x in (k, v):
        x[:, :20] = torch.randn(3, 20, 2, 16, generator=random).masked_fill(~rows[..., None, None], torch.nan)
    function = CAUSAL if causal else masking_utils.bidirectional_mask_function
    kept = adapter.make_mask(3, q_len, 32 if causal else 20, 20 - q_len, mask_function=function, attention_mask=rows)
    found = kept.attend(q, *((k, v) if causal else (k[:, :20], v[:, :20])), {})
    pairs = rows[:, None, None].expand(-1, -1, q_len, -1)
    if causal:
        pairs = pairs & (torch.arange(20) <= torch.arange(20 - q_len, 20)[:, None])
    given = [x[:, :20].transpose(1, 2).nan_to_num() for x in (k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *given, attn_mask=pairs, enable_gqa=True
    ).transpose(1, 2)
    counted = rows[:, 20 - q_len :] if causal else torch.ones(3, q_len, dtype=torch.bool)
    torch.testing.assert_close(found[counted], wanted[counted], rtol=1e-5, atol=1e-5)


def test_mask_as_a_tensor() -> None:
    model = make("Llama")
    given = {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()}
    given["attention_mask"][:, :, 20:, :3] = False
    found = []
    for implementation in ("sdpa", "rawattn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(**given).logits)
    assert (found[0] - found[1]).abs().max() < 2e-6


# ---- what is recognised


CAUSAL = masking_utils.causal_mask_function


@pytest.mark.skipif(not hasattr(masking_utils, "packed_sequence_compatibility_function"), reason="of newer transformers")
def test_bands() -> None:
    packed, positions = torch.zeros(2, 4), torch.arange(4).expand(2, -1)
    both = masking_utils.packed_sequence_compatibility_function
    window = masking_utils.sliding_window_causal_mask_function(5)
    assert adapter._recognise(CAUSAL) == ((None, 0), None)
    assert adapter._recognise(window) == ((4, 0), None)
    assert adapter._recognise(masking_utils.bidirectional_mask_function) == ((None, None), None)
    assert adapter._recognise(masking_utils.sliding_window_bidirectional_mask_function(5)) == ((5, 5), None)
    band, found = adapter._recognise(both(window, positions, packed))
    assert band == (4, 0) and found is packed
    for function in (
        masking_utils.chunked_causal_mask_function(4, torch.zeros(2)), masking_utils.or_masks(CAUSAL, CAUSAL),
        masking_utils.and_masks(CAUSAL, lambda b, h, q, kv: q != kv), lambda b, h, q, kv: kv <= q,
        both(both(CAUSAL, positions, packed), positions, packed),
    ):  # fmt: skip
        assert adapter._recognise(function) is None


def test_masks_in_pieces() -> None:
    """Rows with holes in them, and packed rows through a cache, are left to functions."""
    holes = torch.ones(2, 10, dtype=torch.bool)
    holes[0, 4:6] = False
    kept = adapter.make_mask(2, 10, 10, attention_mask=holes)
    assert kept.has_parts and kept.parts is None
    assert adapter.make_mask(2, 10, 10, attention_mask=torch.ones(2, 10, dtype=torch.bool)).has_parts is False
    late = adapter.make_mask(2, 4, 10, 6, attention_mask=torch.ones(2, 10, dtype=torch.bool))
    assert (late.used, late.has_parts, late.band) == (10, False, (None, 0))
    early = adapter.make_mask(2, 4, 10, 2)
    assert early.used == 6
    assert adapter.make_mask(2, 4, 10, 20).band is None
    short = adapter.make_mask(2, 10, 10, attention_mask=torch.ones(2, 8, dtype=torch.bool))
    assert short.parts == [[(8, 8), (2, 2)]] * 2
    wide = masking_utils.sliding_window_bidirectional_mask_function(3)
    assert adapter.make_mask(2, 4, 10, 2, mask_function=wide).band is None
    assert adapter.make_mask(2, 1, 10, torch.tensor(2), mask_function=wide).band is None
    assert adapter.make_mask(2, 10, 10, mask_function=wide, attention_mask=holes.flip(1)).parts is None


def test_parts() -> None:
    padding = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool).numpy()
    causal, full = adapter.Band(right=0), adapter.Band()
    assert adapter._read_parts(padding, causal, 4) == [[(2, 2), (2, 2)], [(4, 4)], [(1, 1), (3, 3)]]
    assert adapter._read_parts(padding, causal, 1) == [[(0, 2), (1, 2)], [(1, 4)], [(0, 1), (1, 3)]]
    assert adapter._read_parts(padding, full, 4) == [[(0, 2), (4, 2)], [(4, 4)], [(4, 1), (0, 3)]]
    assert adapter._read_parts(padding & False, full, 3) == [[(3, 4)]] * 3
    packed = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]]).numpy()
    assert adapter._read_runs(packed, 4) == [[(2, 2), (2, 2)], [(3, 3), (1, 1)]]
    assert adapter._read_runs(packed, 2) == [[(0, 2), (2, 2)], [(1, 3), (1, 1)]]
    starts = adapter._find_starts([[(0, 2), (1, 2)], [(1, 4)]], 10, "cpu")
    assert [x.tolist() for x in starts[:2]] == [[0, 0, 1, 1, 2], [0, 2, 4, 10, 14]] and starts[2:] == (1, 4)


@pytest.mark.parametrize("name", ["cache", "output_attentions", *adapter.CHOICES])
def test_refusals(name: str) -> None:
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match=f"{name} was given"):
        adapter.attention(torch.nn.Module(), q, q, q, None, **{name: q})
    if name != "cache":
        with pytest.raises(UnsupportedError, match=f"{name} was given"):
            adapter.attention_paged(torch.nn.Module(), q, q, q, None, **{"cache": [], name: q})
    adapter.attention(torch.nn.Module(), q, q, q, None, **{name: None})


def test_layers_that_make_masks_of_their_own() -> None:
    """Doge's, which leave out rawattn's causal mask: it would be lost."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
    model = transformers.AutoModelForCausalLM.from_config(transformers.DogeConfig(**sizes, pad_token_id=0))
    model.set_attn_implementation("rawattn")
    with pytest.raises(UnsupportedError, match="DogeAttention makes a mask of its own"):
        model(IDS)


def test_masks_whose_rows_are_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_warned", set())
    q, pairs = torch.randn(1, 2, 4, 8), torch.randn(1, 4, 4, 2).permute(0, 3, 2, 1)
    for given in (pairs, pairs > 0):
        wanted = adapter.attention(torch.nn.Module(), q, q, q, given.contiguous())[0]
        assert torch.equal(adapter.attention(torch.nn.Module(), q, q, q, given)[0], wanted)
    assert adapter._warned == {"attention_mask is copied in each layer, as its last dimension is not contiguous in memory."}


# Of flash attention, which say of sequences what the mask says; hints; and what models' own functions do not read beside a mask.
NO_MATTER = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "deterministic", "sliding_window"}


def test_arguments_of_models() -> None:
    """Each argument that a model of the installed transformers gives to its attention is served, refused, or of no matter."""
    known = NO_MATTER | {*adapter.CHOICES, "output_attentions", *inspect.signature(adapter.attention).parameters}
    found: dict[str, str] = {}
    for path in pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for call in path.read_text().split("attention_interface(\n")[1:]:
            arguments = re.split(r"\n *\)", call, maxsplit=1)[0]
            found |= dict.fromkeys(re.findall(r"^ *(\w+)=", arguments, re.MULTILINE), path.stem)
    assert {name: model for name, model in found.items() if name not in known} == {} and len(found) > 10


WINDOW = masking_utils.sliding_window_causal_mask_function(4)
HOLES = torch.ones(2, 10, dtype=torch.bool)
HOLES[0, 4:6] = False
LATER = torch.arange(10).expand(2, -1) >= torch.tensor([[0], [3]])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0] * 9 + [1]])


def packed_window() -> Any:
    same = masking_utils.packed_sequence_mask_function(PACKED)
    return masking_utils.and_masks(WINDOW, same)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("padding", [None, LATER, LATER.flip(1), HOLES], ids=["whole", "left", "right", "holes"])
@pytest.mark.parametrize(
    "function",
    [masking_utils.causal_mask_function, WINDOW, masking_utils.bidirectional_mask_function, packed_window()],
    ids=["causal", "window", "both sides", "packed"],
)
def test_last_queries(function: Any, padding: Any, count: int) -> None:
    """A mask's last rows, as models take them for layers that give nothing to a cache."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 10, n, 16, generator=random) for n in (4, 2, 2))
    kept = adapter.make_mask(2, 10, 10, mask_function=function, attention_mask=padding)
    wanted = kept.attend(q, k, v, {})[:, -count:]
    last = kept[:, :, slice(-count, None), :]
    assert isinstance(last, adapter.LayerMask) and last.shape == (2, 1, count, 10) and last.band == kept.band
    rows = torch.ones(2, 10, dtype=torch.bool) if padding is None else padding
    found = last.attend(q[:, -count:], k, v, {})
    torch.testing.assert_close(found[rows[:, -count:]], wanted[rows[:, -count:]], rtol=1e-5, atol=1e-5)
    assert kept[:, :, :, :] is kept[:, :, slice(0, None), :] is kept


@pytest.mark.parametrize("index", [0, (0, 0), (slice(None), slice(None), slice(3)), (slice(None), 0, slice(None), slice(None))])
def test_other_parts_of_masks(index: Any) -> None:
    kept = adapter.make_mask(2, 10, 10)
    with pytest.raises(UnsupportedError, match=r"attention_mask\[.*\] was asked for"):
        kept[index]
    for rows in (slice(3), slice(0, 10, 2), slice(10, None), 3):
        with pytest.raises(UnsupportedError, match=r"has its last queries alone"):
            kept[:, :, rows, :]


@pytest.mark.skipif(not hasattr(transformers, "Gemma4ForCausalLM"), reason="of newer transformers")
@pytest.mark.parametrize("name", ["plain", "left"])
def test_layers_that_share_keys(name: str) -> None:
    """Gemma 4, whose last layers read earlier ones' keys, and compute the last queries alone."""
    own = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "global_head_dim": 16, "num_kv_shared_layers": 2}
    layers = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SMALL, **own, sliding_window=8, layer_types=layers)
    model, given, found = transformers.Gemma4ForCausalLM(config).eval(), CASES[name], []
    rows = given.get("attention_mask", torch.ones(2, 40)).bool()
    for implementation in ("eager", "rawattn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            o = [model(**given, logits_to_keep=n).logits[rows[:, -n:]] for n in (0, 3)]
        found.append((*o, generate(model, IDS, attention_mask=given.get("attention_mask"))))
    (*wanted, tokens), (*others, tokens_found) = found
    assert torch.equal(tokens, tokens_found)
    assert all((x - y).abs().max() < 3e-6 for x, y in zip(wanted, others, strict=True))


@pytest.mark.skipif(not is_new(), reason="continuous batching needs transformers 5.19")
def test_continuous_batching_gives_implementations_back() -> None:
    """Those of a model's parts, too, which may differ."""
    model = torch.nn.Module()
    model.config = transformers.Gemma3Config()
    model.config._attn_implementation = {"": "eager", "text_config": "rawattn", "vision_config": "sdpa"}
    parts = (model.config, model.config.text_config, model.config.vision_config)
    with adapter.continuous_batching(model):
        assert {x._attn_implementation for x in parts} == {adapter.transformers_paged.NAME}
    assert [x._attn_implementation for x in parts] == ["eager", "rawattn", "sdpa"]


@pytest.mark.gpu("any")
def test_on_a_gpu(model: Any) -> None:
    """In bf16, no further from eager attention in fp32 than eager attention in bf16 is, or twice as far; generation runs."""
    exact, model = copy.deepcopy(model).cuda(), model.cuda().to(torch.bfloat16)
    for name, given in CASES.items():
        with torch.no_grad():
            wanted = logits(exact, "eager", given)
            own, found = (logits(model, each, given).float() for each in ("eager", "rawattn"))
        assert (found - wanted).abs().max() <= 2 * (own - wanted).abs().max() + 1e-3, name
        logits(model, "rawattn", given).float().square().mean().backward()
    for cache in ({}, {"cache_implementation": "static"}):
        assert generate(model, IDS.cuda(), attention_mask=LEFT.cuda(), **cache).shape == (2, 52)


LARGE: dict[str, tuple[str, dict[str, Any]]] = {  # of 100M parameters and more
    "Llama": ("LlamaConfig", {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 9,
                              "num_attention_heads": 12, "num_key_value_heads": 4}),
    "Gemma 3": ("Gemma3TextConfig", {"vocab_size": 64000, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12,
                                     "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 128}),
}  # fmt: skip


@pytest.mark.gpu("any")
@pytest.mark.parametrize("name", LARGE)
def test_large_on_a_gpu(name: str) -> None:
    """Logits and a training step's gradients in bf16, of 512 tokens: no further from eager attention in fp32 than eager attention
    in bf16 is, or twice as far, of the norm."""
    config, sizes = LARGE[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    exact = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).cuda().train()
    assert sum(x.numel() for x in exact.parameters()) > 1e8
    model = copy.deepcopy(exact).to(torch.bfloat16)
    ids = torch.randint(2, 30000, (2, 512), device="cuda")
    found: dict[str, tuple[Any, list[Any]]] = {}
    for way, each, implementation in (("exact", exact, "eager"), ("eager", model, "eager"), ("own", model, "rawattn")):
        each.set_attn_implementation(implementation)
        each.zero_grad()
        given = each(input_ids=ids, labels=ids, use_cache=False)
        given.loss.backward()
        found[way] = given.logits.detach().float(), [x.grad.float() for x in each.parameters()]
    wanted, wanted_gradients = found["exact"]

    def off(way: str) -> tuple[float, float]:
        own, gradients = found[way]
        total = sum((a - b).square().sum() for a, b in zip(gradients, wanted_gradients, strict=True))
        return float((own - wanted).norm() / wanted.norm()), float(
            total.sqrt() / sum(x.square().sum() for x in wanted_gradients) ** 0.5
        )

    assert all(x.isfinite().all() for x in found["own"][1])
    for own, eager in zip(off("own"), off("eager"), strict=True):
        assert own <= 2 * eager and eager < 0.1, (own, eager)

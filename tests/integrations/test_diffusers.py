"""diffusers' dispatcher and timm, with tiny random models, against their native attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from rawattn.errors import ProblemError, UnsupportedError  # noqa: E402
from rawattn.integrations import sdpa  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def adapter() -> Iterator[Any]:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install -e '.[diffusers]'")
    from rawattn.integrations import diffusers as adapter

    adapter.enable()
    adapter.enable()  # once more is harmless
    yield adapter


def flux() -> tuple[Any, dict[str, Any]]:
    import diffusers

    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    widths = {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}
    shapes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 8, 32), "pooled_projections": (1, 32)}
    shapes |= {"timestep": (1,), "img_ids": (16, 3), "txt_ids": (8, 3)}
    return diffusers.FluxTransformer2DModel(**sizes, **widths), {name: torch.randn(shape) for name, shape in shapes.items()}


def wan() -> tuple[Any, dict[str, Any]]:
    import diffusers

    sizes = {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16, "ffn_dim": 32, "num_layers": 2}
    model = diffusers.WanTransformer3DModel(**sizes, num_attention_heads=2, attention_head_dim=12, rope_max_seq_len=32)
    given = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 16)}
    return model, {**given, "timestep": torch.tensor([3])}


def qwen() -> tuple[Any, dict[str, Any]]:
    """Returns which has a mask: of the second text three tokens are padding."""
    import diffusers

    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3}
    model = diffusers.QwenImageTransformer2DModel(**sizes, joint_attention_dim=16, axes_dims_rope=(8, 4, 4))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    given = {"hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 7, 16)}
    more = {"encoder_hidden_states_mask": mask, "timestep": torch.ones(2), "img_shapes": [(1, 4, 4)] * 2}
    return model, {**given, **more}


@pytest.mark.parametrize(("make", "count"), [(flux, 2), (wan, 4), (qwen, 2)], ids=["Flux", "Wan", "Qwen-Image"])
def test_models(make: Any, count: int, adapter: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of all parameters; every layer went by the adapter."""
    calls: list[int] = []
    original = adapter.api.attention
    monkeypatch.setattr(adapter.api, "attention", lambda *given, **more: calls.append(1) or original(*given, **more))
    torch.manual_seed(0)
    model, given = make()
    model = model.to(device)
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    found = []
    for backend in ("native", adapter.NAME):
        model.set_attention_backend(backend)
        model.zero_grad()
        o = model(**given, return_dict=False)[0]
        o.square().mean().backward()
        found.append((o.detach(), torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])))
    assert len(calls) == count
    for wanted, own in zip(*found, strict=True):
        assert (wanted - own).abs().max() < (2e-6 if device == "cpu" else 1e-3) * (1 + wanted.abs().max())


def test_masks_and_refusals(adapter: Any) -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 4, 16)
    rows = torch.ones(2, 7, dtype=torch.bool)
    rows[1, 4:] = False
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    wanted = F.scaled_dot_product_attention(*heads_first, attn_mask=rows[:, None, None]).transpose(1, 2)
    torch.testing.assert_close(adapter.attention(q, k, k, rows), wanted)
    o, lse = adapter.attention(q, k, k, return_lse=True)
    assert o.shape == q.shape and lse.shape == (2, 4, 5)
    with pytest.raises(ProblemError, match="query has 4 heads but key has 2"):
        adapter.attention(q, k[:, :, :2], k[:, :, :2])
    with pytest.raises(ProblemError, match=r"attn_mask is torch\.int64; it must be bool"):
        adapter.attention(q, q, q, torch.ones(q.shape[:2], dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="does not serve diffusers' context parallelism"):
        adapter.attention(q, k, k, _parallel_config=object())


def test_compiled(adapter: Any) -> None:
    torch.manual_seed(0)
    model, given = flux()
    model.set_attention_backend(adapter.NAME)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(**given, return_dict=False)[0], model(**given, return_dict=False)[0])


def test_timm(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vision transformer calls torch's own function: the adapter in its place, on a GPU below it."""
    timm = pytest.importorskip("timm", reason="needs timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.models.VisionTransformer(**sizes).to(device).eval()
    images, calls = torch.randn(2, 3, 32, 32, device=device), []
    wanted = model(images)
    if device == "cpu":
        own = sdpa.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **more: calls.append(1) or own(*x, **more))
        torch.testing.assert_close(model(images), wanted, rtol=1e-5, atol=1e-5)
        assert len(calls) == 2
        return
    model, images = model.half(), images.half()
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            torch.testing.assert_close(model(images).float(), wanted, rtol=2e-2, atol=2e-2)
    finally:
        torch.nn.attention.restore_flash_attention_impl()

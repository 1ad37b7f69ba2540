"""rawattn.integrations.flex_attention against torch's own flex_attention, forward and backward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from rawattn import mask, score  # noqa: E402
from rawattn.errors import ProblemError, UnsupportedError  # noqa: E402
from rawattn.integrations import flex_attention as adapter  # noqa: E402

if not hasattr(flex, "AuxRequest"):
    pytest.skip("needs torch 2.9, whose flex_attention has return_aux", allow_module_level=True)
N, HEADS = 40, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def torch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch refuses gradients on the CPU, where its formula computes them all the same."""
    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that return_lse is deprecated, and that torch's own is slow
        yield


def make(device: str = "cpu", kv_heads: int = HEADS, kv_len: int = N, dtype: Any = torch.float32) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, N, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 8))
    return [torch.randn(shape, generator=random).to(device, dtype).requires_grad_() for shape in shapes]


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def captured(device: str) -> dict[str, Any]:
    """Returns what mods capture: tensors without a gradient, and parameters."""
    random, at = torch.Generator().manual_seed(1), torch.arange(N)
    found = {
        "doc": at // 13, "prefix": torch.tensor([7, 19]), "keep": torch.rand(N, N, generator=random) < 0.4,
        "slopes": torch.rand(HEADS, generator=random), "table": torch.randn(HEADS, 2 * N, generator=random),
        "bias": torch.randn(2, HEADS, N, N, generator=random), "gate": torch.randn(2, N, generator=random),
    }  # fmt: skip
    return {name: x.to(device) for name, x in found.items()}


def masks(x: dict[str, Any]) -> dict[str, Any]:
    """mask_mods as FlexAttention's examples have them."""
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
    sliding = lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 5  # noqa: E731
    document = lambda b, h, q_idx, kv_idx: x["doc"][q_idx] == x["doc"][kv_idx]  # noqa: E731
    return {
        "causal": causal, "sliding": adapter.and_masks(causal, sliding), "documents": adapter.and_masks(document, causal),
        "prefix": adapter.or_masks(lambda b, h, q_idx, kv_idx: kv_idx < x["prefix"][b], causal), "none": adapter.noop_mask,
        "table": lambda b, h, q_idx, kv_idx: x["keep"][q_idx, kv_idx], "heads": lambda b, h, q, kv: (q - kv).abs() <= 3 * h,
        "no key": lambda b, h, q, kv: (kv > 9) & (q >= kv), "bound": functools.partial(lambda n, b, h, q, kv: q < kv + n, 9),
        "swapped": lambda b, h, kv, q: q >= kv,
    }  # fmt: skip


def scores(x: dict[str, Any]) -> dict[str, Any]:
    """score_mods likewise."""

    def checkerboard(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((kv - q) % 2 == 1, -1.0 * score, torch.where((kv - q) % 2 == 0, score * 0.5, score))

    return {
        "softcap": lambda score, b, h, q, kv: 4 * torch.tanh(score / 4),
        "alibi": lambda score, b, h, q, kv: score + x["slopes"][h] * (kv - q), "checkerboard": checkerboard,
        "relative": lambda score, b, h, q, kv: score + x["table"][h, kv - q + N],
        "bias": lambda score, b, h, q, kv: score + x["bias"][b, h, q, kv],
        "gate": lambda score, b, h, q, kv: score * torch.sigmoid(x["gate"][b, q]) + torch.exp(-x["gate"][b, kv] ** 2),
        "causal": lambda score, b, h, q, kv: torch.where(q >= kv, score, -float("inf")),
    }  # fmt: skip


def both(given: list[Any], wrt: list[Any], **options: Any) -> None:
    """The same of rawattn's and of torch's, with lse and with the gradients."""
    results = []
    for f in (adapter.flex_attention, flex.flex_attention):
        o, aux = f(*given, return_aux=flex.AuxRequest(lse=True), **options)
        seen = torch.where(aux.lse.isfinite(), aux.lse, 0.0)
        results.append((o, aux.lse, *torch.autograd.grad((o.float() ** 2).sum() + seen.sin().sum(), wrt)))
        assert o.shape == (2, HEADS, N, given[2].shape[-1]) and aux.max_scores is None
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 3e-2}[given[0].dtype]
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        near(found, wanted, tolerance)


@pytest.mark.parametrize("name", masks(captured("cpu")))
def test_masks(name: str, device: str) -> None:
    """A mask_mod, torch's BlockMask of it, and ours, give what torch gives of its own."""
    given, mod = make(device), masks(captured(device))[name]
    block_mask = flex.create_block_mask(mod, 2, HEADS, N, N, device=device, BLOCK_SIZE=16)
    wanted, lse = flex.flex_attention(*given, block_mask=block_mask, return_lse=True)
    dwanted = torch.autograd.grad((wanted**2).sum(), given)
    ours = adapter.create_block_mask(mod, None, None, N, N, device=device)
    for each in (mod, block_mask, ours, mask.function(adapter.by_position(mod, "mask"))):
        o, found = adapter.flex_attention(*given, block_mask=each, return_lse=True)
        near(o, wanted)
        near(found, lse)
    for x, y in zip(torch.autograd.grad((o**2).sum(), given), dwanted, strict=True):
        near(x, y, 2e-5)
    if name == "causal":
        assert (ours.to_block_mask().to_dense() == flex.create_block_mask(mod, 1, 1, N, N, device=device).to_dense()).all()


@pytest.mark.parametrize("name", scores(captured("cpu")))
def test_scores(name: str, device: str) -> None:
    """With the gradients of what the score captured."""
    x = captured(device)
    given, wrt = make(device), [each.requires_grad_() for each in (x["slopes"], x["table"], x["bias"], x["gate"])]
    mod = scores(x)[name]
    used = {"alibi": wrt[:1], "relative": wrt[1:2], "bias": wrt[2:3], "gate": wrt[3:]}.get(name, [])
    masked = {"block_mask": flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, N, N, device=device), "scale": 0.3}
    both(given, given + used, score_mod=mod, **(masked if name in ("softcap", "alibi", "gate") else {}))


def test_grouped_heads(device: str) -> None:
    x = captured(device)
    given, slopes = make(device, kv_heads=2), x["slopes"].requires_grad_()
    both(given, [*given, slopes], score_mod=scores(x)["alibi"], enable_gqa=True)
    with pytest.raises(ProblemError, match="query has 4 heads but key has 2"):
        adapter.flex_attention(*given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_formats(dtype: Any, device: str) -> None:
    given = make(device, dtype=dtype)
    both(given, given, score_mod=scores(captured(device))["softcap"])


def test_one_key_sequence_for_all(device: str) -> None:
    query, key, value = make(device)
    given = [query, key[:1].detach().requires_grad_(), value[:1].detach().requires_grad_()]
    block_mask = flex.create_block_mask(lambda b, h, q, kv: q + b >= kv, 2, None, N, N, device=device)
    both(given, given, block_mask=block_mask)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=["heads", "rows", "length"])
def test_layout_of_the_result(order: tuple[int, ...], device: str) -> None:
    """It lies as query does, unless autograd follows: also where it follows only what the score captured."""
    query, key, value = (x.detach() for x in make(device))
    query = query.permute(order).contiguous().permute(*map(order.index, range(4)))
    x = captured(device)
    alibi = scores(x)["alibi"]
    for options in ({"score_mod": alibi}, {}):
        for _ in range(2):  # a call that is kept, too
            for v in (key, value):
                o = adapter.flex_attention(query, key, v, **options)
                wanted = flex.flex_attention(query, key, v, **options)
                near(o, wanted)
                assert o.stride() == wanted.stride()
            query = query.clone()
    slopes = x["slopes"].requires_grad_()
    (found,) = torch.autograd.grad(adapter.flex_attention(query, key, key, score_mod=alibi).square().sum(), slopes)
    (wanted,) = torch.autograd.grad(flex.flex_attention(query, key, key, score_mod=alibi).square().sum(), slopes)
    near(found, wanted, 1e-4)


def test_compiled() -> None:
    """Nothing changes if graphs may break; a whole graph needs functions that were made outside."""
    x, given = captured("cpu"), make()
    mod, causal = scores(x)["alibi"], adapter.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, N, N)
    wanted = adapter.flex_attention(*given, score_mod=mod, block_mask=causal)
    broken = torch.compile(adapter.flex_attention, backend="eager")
    assert torch.equal(broken(*given, score_mod=mod, block_mask=causal), wanted)
    outside = score.function(mod)
    whole = torch.compile(
        lambda *x: adapter.flex_attention(*x, score_mod=outside, block_mask=causal), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(whole(*given), wanted)


def test_refusals() -> None:
    given = make()
    aux = flex.AuxRequest(lse=True, max_scores=True)
    with pytest.raises(UnsupportedError, match="return_aux asks for max_scores, which no kernel keeps"):
        adapter.flex_attention(*given, return_aux=aux)
    with pytest.raises(ProblemError, match="return_lse was given beside return_aux"):
        adapter.flex_attention(*given, return_lse=True, return_aux=flex.AuxRequest(lse=True))
    with pytest.raises(ProblemError, match="query is a ndarray; it must be a torch tensor of 4 dimensions"):
        adapter.flex_attention(*(x.detach().numpy() for x in given))
    with pytest.raises(ProblemError, match=r"query has 3 dimensions, \(4, 40, 16\); it must have 4"):
        adapter.flex_attention(*(x[0] for x in given))
    with pytest.raises(ProblemError, match=r"block_mask was made for \(1, 1, 40, 41\) .* have \(2, 4, 40, 40\)"):
        adapter.flex_attention(*given, block_mask=adapter.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, N, N + 1))
    with pytest.raises(ProblemError, match="the BlockMask has shape"):
        longer = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, N, N + 1, device="cpu")
        adapter.flex_attention(*given, block_mask=longer)
    with pytest.raises(ProblemError, match="block_mask is a Tensor; it must be a BlockMask"):
        adapter.flex_attention(*given, block_mask=torch.ones(N, N, dtype=torch.bool))
    with pytest.raises(ProblemError, match="key has 3 sequences but query 2"):
        adapter.flex_attention(given[0], *(torch.cat([x, x[:1]]) for x in given[1:]))
    whole = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ProblemError, match="Cannot use mask_mod from a sliced BlockMask"):
        adapter.flex_attention(given[0][:, :, :32], *given[1:], block_mask=whole[:, :, torch.tensor([0, 1])])
    with pytest.warns(UserWarning, match="kernel_options are hints to torch's kernels; rawattn ignores them") as seen:
        adapter.flex_attention(*given, kernel_options={"BLOCK_M": 64})
    assert seen[0].filename == __file__

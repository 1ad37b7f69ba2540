"""A bias of pairs that entries of the batch share, on a GPU: against the formula in float64 and its error in 16 bits, the same
bits again, where memory is NaN, by the kernels for it and by others."""

from __future__ import annotations

import math
from typing import Any

import pytest

import rawattn
from rawattn.integrations.cuequivariance import triangle_attention
from rawattn.kernel.attn_bwd_triangle import AttnBwdTriangleConfig
from rawattn.kernel.attn_fwd_triangle import AttnFwdTriangleConfig
from tests.calls import poisoned_memory

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SIZES = {  # batch, N, heads, S, S_k, head_dim
    "one tile": (1, 3, 1, 16, 16, 32), "odd": (1, 7, 3, 129, 77, 32), "256": (1, 256, 4, 256, 256, 32),
    "batch": (3, 9, 2, 200, 200, 32), "16": (1, 33, 8, 192, 192, 16), "64": (2, 5, 4, 321, 321, 64),
    "24": (1, 5, 2, 100, 100, 24), "long": (1, 5, 1, 1500, 1500, 32),
}  # fmt: skip
FORWARDS = [AttnFwdTriangleConfig(*each) for each in ((4, 2, 4), (2, 2, 4), (2, 3, 4), (1, 1, 2), (4, 2, 4, 4), (4, 2, 4, 8))]
BACKWARDS = [AttnBwdTriangleConfig(*each) for each in ((2, 3, 3, 3), (1, 1, 2, 2, 1), (2, 3, 2, 3, 2, 2), (1, 2, 3, 3, 2, 1))]


def make(name: str, dtype: Any = torch.bfloat16, pair_dtype: Any = torch.float32, masked: bool = True) -> tuple[Any, ...]:
    """q, k, v, the bias and the mask; a row of the bias is -inf, some logits are far from the others, and a row keeps no key."""
    batch, n, heads, q_len, kv_len, width = SIZES[name]
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, n, heads, x, width, device="cuda", generator=random).to(dtype) for x in (q_len, kv_len, kv_len))
    bias = 2 * torch.randn(batch, 1, heads, q_len, kv_len, device="cuda", generator=random)
    if kv_len > 64:  # of fewer keys one might have all the weight: gradients that are 0, but for the rounding of o
        bias[..., kv_len // 2 :] += 40.0 * (torch.rand(kv_len - kv_len // 2, device="cuda", generator=random) > 0.95)
    bias[..., 3, :] = -math.inf
    mask = torch.rand(batch, n, 1, 1, kv_len, device="cuda", generator=random) > 0.3 if masked else None
    if mask is not None:
        mask[0, 0] = False
    return *(x.requires_grad_() for x in (q, k, v, bias.to(pair_dtype))), mask


def formula(q: Any, k: Any, v: Any, bias: Any, mask: Any, dtype: Any) -> Any:
    s = (q.to(dtype) @ k.to(dtype).mT).to(dtype) * (1 / math.sqrt(q.shape[-1])) + bias.to(dtype)
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    none = torch.isinf(s.amax(-1, keepdim=True))
    return torch.where(none, 0.0, torch.where(none, 0.0, s).softmax(-1)) @ v.to(dtype)


def errors(found: Any, wanted: Any, ours: Any) -> None:
    """An error is at most 1.5 of the formula's in the same format."""
    for name, x, exact, plain in zip(("o", "dq", "dk", "dv", "dbias"), found, wanted, ours, strict=True):
        own, other = ((y.double() - exact).norm() / exact.norm().clamp(1e-30) for y in (x, plain))
        assert own <= 1.5 * other + 1e-4, (name, float(own), float(other))


def check(arrays: tuple[Any, ...], **chosen: Any) -> None:
    *leaves, mask = arrays
    do = torch.randn(leaves[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(leaves[0].dtype)
    results = []
    for f in (lambda: formula(*leaves, mask, torch.float64), lambda: formula(*leaves, mask, do.dtype)):
        o = f()
        results.append((o, *torch.autograd.grad(o, leaves, do.to(o.dtype))))
    with poisoned_memory():
        o = triangle_attention(*leaves, mask)
        gradients = [torch.autograd.grad(o, leaves, do, retain_graph=True) for _ in range(2)]
    errors((o, *gradients[0]), *results)
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True)), "the same bits"
    assert torch.equal(o, triangle_attention(*leaves, mask))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("pair_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_triangle(name: str, pair_dtype: Any, masked: bool) -> None:
    check(make(name, pair_dtype=pair_dtype, masked=masked))


@pytest.mark.parametrize("name", ["odd", "64", "16"])
def test_fp16(name: str) -> None:
    check(make(name, torch.float16))


@pytest.mark.parametrize("config", [*FORWARDS, *BACKWARDS], ids=str)
def test_configurations(config: Any) -> None:
    """Every configuration gives what the formula does; those of one kernel that keep other numbers of rows, the same bits."""
    q, k, v, bias, mask = (x if x is None else x.detach() for x in make("odd"))
    rows, keep, pairs = [x[0].transpose(1, 2) for x in (q, k, v)], mask[0, :, 0, 0], bias[0, 0]
    score, kept = (lambda s, b, h, i, j: s + pairs[h, i, j]), (lambda b, h, i, j: keep[b, j])
    is_forward = isinstance(config, AttnFwdTriangleConfig)
    with poisoned_memory():
        o, lse = rawattn.attention(*rows, score=score, mask=kept, return_lse=True, config=config if is_forward else None)
    wanted = formula(q, k, v, bias, mask, torch.float64)[0].transpose(1, 2)
    assert (o.double() - wanted).norm() <= 1e-2 * wanted.norm()
    if is_forward:
        plain = rawattn.attention(*rows, score=score, mask=kept, config=FORWARDS[1])
        assert config.polynomial_each or torch.equal(o, plain)
        return
    do = torch.randn_like(o)
    given = {"score": score, "mask": kept, "wrt": (pairs,)}
    with poisoned_memory():
        found = rawattn.attention_backward(do, *rows, o, lse, **given, config=config)
    other = rawattn.attention_backward(do, *rows, o, lse, **given, kernel="attn_bwd_mma")
    for x, y in zip(found, other, strict=True):
        assert (x.double() - y.double()).norm() <= 1e-2 * y.double().norm()
    assert all(torch.equal(x, y) for x, y in zip(found[:3], rawattn.attention_backward(do, *rows, o, lse, **given), strict=False))


def test_which_kernel() -> None:
    q, _, _, bias, _ = (x if x is None else x.detach() for x in make("256", masked=False))
    rows, pairs = q[0].transpose(1, 2), bias[0, 0]
    assert "attn_fwd_triangle" in str(rawattn.explain(rows, rows, rows, bias=pairs))
    assert "attn_fwd_triangle" not in str(rawattn.explain(rows[:1], rows[:1], rows[:1], bias=pairs)).partition("config")[0]


@pytest.mark.slow
def test_elements_beyond_31_bits() -> None:
    """q of 2^31 elements: the first and the last rows against the formula, and their gradients."""
    n, heads, width = 4096, 4, 32
    if torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        pytest.skip("needs 100 GB")
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, n, width, device="cuda", generator=random, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    bias = torch.randn(1, 1, heads, n, n, device="cuda", generator=random).requires_grad_()
    o = triangle_attention(q, k, v, bias)
    do = torch.zeros_like(o)
    do[:, -2:] = torch.randn(do[:, -2:].shape, device="cuda", generator=random).to(do.dtype)
    dq, dk, dv, dbias = torch.autograd.grad(o, (q, k, v, bias), do)
    assert not dq[:, :-2].any() and not dk[:, :-2].any() and not dv[:, :-2].any()
    for i in (0, n - 2, n - 1):
        wanted = formula(*(x[:, i : i + 1].detach() for x in (q, k, v)), bias.detach(), None, torch.float64)
        assert (o[:, i : i + 1].double() - wanted).norm() <= 1e-2 * wanted.norm()
    leaves = [x[:, -2:].detach().requires_grad_() for x in (q, k, v)] + [bias.detach().requires_grad_()]
    wanted = torch.autograd.grad(formula(*leaves, None, torch.float64), leaves, do[:, -2:].double())
    for x, exact in zip((dq[:, -2:], dk[:, -2:], dv[:, -2:], dbias), wanted, strict=True):
        assert (x.double() - exact).norm() <= 2e-2 * exact.double().norm()

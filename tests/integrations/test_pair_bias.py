"""Biases of pairs as protein models call for them: functions of cuEquivariance and DeepSpeed, and for JAX, beside the formula in
float64."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from rawattn.errors import ProblemError  # noqa: E402
from rawattn.integrations.cuequivariance import triangle_attention  # noqa: E402
from rawattn.integrations.deepspeed import DS4Sci_EvoformerAttention  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(*shape: int, seed: int = 0, dtype: Any = torch.float32, device: str = "cpu") -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def formula(q: Any, k: Any, v: Any, biases: Any, scale: float | None = None) -> tuple[Any, Any, Any]:
    """o, the logarithm of the sum and the largest logit, in float64; q is (..., heads, S, head_dim). A row of -inf gives 0."""
    s = q.double() @ k.double().mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = sum((x.double() for x in biases if x is not None), s)
    largest = s.amax(-1)
    none = torch.isinf(largest)[..., None]
    return torch.where(none, 0.0, torch.where(none, 0.0, s).softmax(-1)) @ v.double(), s.detach().logsumexp(-1), largest


def near(found: Any, wanted: Any, dtype: Any = None) -> None:
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3}.get(dtype or found.dtype, 3e-2)
    error = (found.double() - wanted).abs().max().item() if found.numel() else 0.0
    assert error <= tolerance * max(1.0, wanted.abs().max().item() if found.numel() else 0.0)


def check(o: Any, wanted: Any, leaves: Any, seed: int) -> None:
    near(o, wanted)
    do = make(*o.shape, seed=seed, dtype=o.dtype, device=o.device).detach()
    found, expected = torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, leaves, do.double())
    for x, g, e in zip(leaves, found, expected, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape
        near(g, e.double(), o.dtype)


@st.composite
def sizes(draw: Any) -> tuple[tuple[int, ...], int, int, int, int]:
    leading = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    return (
        leading or (1,),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from((8, 16))),
    )


@hypothesis.given(sizes(), st.sampled_from((torch.float64, torch.float32)), st.sampled_from(("all", "some", "shared", "row")))
@hypothesis.settings(max_examples=25, deadline=None)
def test_triangle_attention(size: Any, dtype: Any, masked: str) -> None:
    check_triangle(size, dtype, dtype, masked, "cpu")


@pytest.mark.parametrize("pair_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [((1,), 5, 4, 70, 32), ((2,), 3, 2, 64, 16), ((1,), 6, 2, 129, 64)])
def test_triangle_attention_in_16_bits(size: Any, pair_dtype: Any, device: str) -> None:
    check_triangle(size, torch.bfloat16, pair_dtype, "some", device)


def check_triangle(size: Any, dtype: Any, pair_dtype: Any, masked: str, device: str) -> None:
    leading, n, heads, length, width = size
    q, k, v = (make(*leading, n, heads, length, width, seed=i, dtype=dtype, device=device) for i in range(3))
    bias = make(*leading, 1, heads, length, length, seed=3, dtype=pair_dtype, device=device)
    mask = None
    if masked != "all":
        mask = make(*leading, 1 if masked == "shared" else n, 1, 1, length, seed=4, device=device) > -0.5
        if masked == "row":
            mask[(0,) * (len(leading) + 1)] = False
    off = None if mask is None else torch.zeros(mask.shape, device=device).masked_fill(~mask, -math.inf)
    wanted, *aux = formula(q, k, v, (bias, off), 0.3)
    o, *found = triangle_attention(q, k, v, bias, mask, scale=0.3, return_aux=True)
    assert o.shape == q.shape and o.dtype == dtype and o.transpose(-2, -3).flatten(-2).data_ptr() == o.data_ptr()
    for x, e in zip(found, aux, strict=True):
        assert x.shape == q.shape[:-1] and torch.equal(torch.isinf(x), torch.isinf(e)) and not x.requires_grad
        near(x.nan_to_num(neginf=0.0), e.nan_to_num(neginf=0.0), dtype)
    check(o, wanted, (q, k, v, bias), 5)


def test_the_largest_logit_is_not_rounded_to_16_bits() -> None:
    q, bias = make(1, 3, 2, 20, 16, dtype=torch.bfloat16), make(1, 1, 2, 20, 20, seed=3)
    largest = triangle_attention(q, q, q, bias, return_aux=True)[2]
    assert (largest.double() - formula(q, q, q, (bias,))[2]).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(2, 3, 2, 0, 8), (2, 0, 2, 4, 8), (0, 3, 2, 4, 8)])
def test_nothing(shape: Any) -> None:
    """Calls without rows, or without queries and keys."""
    q, bias = make(*shape), make(shape[0], 1, shape[2], shape[3], shape[3])
    assert triangle_attention(q, q, q, bias).shape == shape
    assert DS4Sci_EvoformerAttention(*[q.transpose(2, 3)] * 3, [None, bias]).transpose(2, 3).shape == shape


def test_four_dimensions_and_other_strides() -> None:
    q, k, v = (make(3, 20, 2, 16, seed=i).transpose(1, 2) for i in range(3))
    bias = make(1, 20, 20, 2, seed=3).permute(0, 3, 1, 2)  # as a projection of pairs lies
    o = triangle_attention(q, k, v, bias)
    assert o.shape == (1, 3, 2, 20, 16)
    near(o[0], formula(q, k, v, (bias,))[0])


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("leading", [(1,), (2, 2)])
def test_evoformer(given: tuple[bool, bool], leading: tuple[int, ...], device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (make(*leading, 3, 40, 2, 16, seed=i, dtype=dtype, device=device) for i in range(3))
    biases = [
        make(*leading, 3, 1, 1, 40, seed=3, dtype=dtype, device=device),
        make(*leading, 1, 2, 40, 40, seed=4, device=device),
    ]
    biases = [x if used else None for x, used in zip(biases, given, strict=True)]
    wanted = formula(*(x.transpose(-2, -3) for x in (q, k, v)), biases)[0].transpose(-2, -3)
    o = DS4Sci_EvoformerAttention(q, k, v, biases)
    check(o, wanted, [x for x in (q, k, v, *biases) if x is not None], 5)
    if not any(given):
        assert torch.equal(DS4Sci_EvoformerAttention(q, k, v, []), o)


def test_a_list_of_one_stays_as_it_is() -> None:
    q, of_keys = make(1, 2, 8, 1, 8), torch.full((1, 2, 1, 1, 8), -1e9)
    given = [of_keys]
    of_keys[..., 3:] = 0
    near(DS4Sci_EvoformerAttention(q, q, q, given), formula(*[q.transpose(-2, -3)] * 3, given)[0].transpose(-2, -3))
    assert len(given) == 1


def test_errors() -> None:
    q, bias = make(1, 3, 2, 8, 8), make(1, 1, 2, 8, 8)
    for arguments, said in (
        ((q, q[..., :4], q, bias), "k is of shape (1, 3, 2, 8, 4); it must be of shape (1, 3, 2, 8, 8)"),
        ((q, q, q, bias[:, :, :1]), "bias is of shape (1, 1, 1, 8, 8)"), ((q, q, q, None), "bias is None"),
        ((q, q, q, bias, torch.ones(1, 3, 1, 8)), "mask is of shape"), ((q[0, 0], q, q, bias), "q has shape (2, 8, 8)"),
        ((q, q, q, bias, torch.ones(1, 3, 1, 1, 8)), "mask is of torch.float32"),
    ):  # fmt: skip
        with pytest.raises(ProblemError) as error:
            triangle_attention(*arguments)
        assert said in str(error.value)
    rows = q.transpose(2, 3)
    for arguments, said in (
        ((rows, rows[:, :2], rows, []), "they must be one"), ((rows, rows, rows, [None] * 3), "3 biases"),
        ((rows, rows, rows, [bias]), "biases[0] has shape (1, 1, 2, 8, 8); it must be (1, 3, 1, 1, 8)"),
    ):  # fmt: skip
        with pytest.raises(ProblemError) as error:
            DS4Sci_EvoformerAttention(*arguments)
        assert said in str(error.value)


def test_compiled() -> None:
    """A graph of torch.compile breaks at both."""
    q, bias, mask = make(2, 3, 2, 16, 8), make(2, 1, 2, 16, 16, seed=1), make(2, 3, 1, 1, 16, seed=2) > 0
    for f, arguments in (
        (triangle_attention, (q, q, q, bias, mask)),
        (DS4Sci_EvoformerAttention, (*[q.transpose(2, 3)] * 3, [mask.float(), bias])),
    ):  # fmt: skip
        near(torch.compile(f, backend="eager")(*arguments), f(*arguments).double())


def test_jax() -> None:
    jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")
    import rawattn.jax

    q, k, v = (make(2, 3, 2, 20, 8, seed=i) for i in range(3))
    bias, mask = make(2, 1, 2, 20, 20, seed=3), make(2, 3, 1, 1, 20, seed=4) > -0.5
    given = [jax.numpy.asarray(x.detach().numpy()) for x in (q, k, v, bias, mask)]
    o = jax.jit(rawattn.jax.triangle_attention)(*given)
    wanted = formula(q, k, v, (bias, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)))[0]
    near(torch.tensor(np.asarray(o)), wanted.detach())
    found = jax.grad(lambda *x: (rawattn.jax.triangle_attention(*x, given[4]) ** 2).sum(), (0, 1, 2, 3))(*given[:4])
    for g, e in zip(found, torch.autograd.grad((wanted**2).sum(), (q, k, v, bias)), strict=True):
        near(torch.tensor(np.asarray(g)), e.double())
    with pytest.raises(ProblemError, match="bias has shape"):
        rawattn.jax.triangle_attention(*given[:3], given[3][:, :, :1])
    with pytest.raises(ProblemError, match="mask is of int32; it must be of bools"):
        rawattn.jax.triangle_attention(*given[:4], given[4].astype("int32"))
    nothing = given[0][..., :0, :]
    assert rawattn.jax.triangle_attention(*[nothing] * 3, given[3][..., :0, :0]).shape == nothing.shape

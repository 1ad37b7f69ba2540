"""rawattn.integrations.sdpa against torch's own attention, and what torch's registry reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import bias  # noqa: E402

import rawattn  # noqa: E402
from rawattn.errors import ProblemError, UnsupportedError  # noqa: E402
from rawattn.integrations import sdpa, xformers  # noqa: E402
from rawattn.variant import mask  # noqa: E402
from tests.versions import since  # noqa: E402

NAMES = ("heads_first", "rows_first", "length_first", "packed", "expanded")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(q_len: int = 20, kv_len: int = 20, kv_heads: int = 4, layout: str = "heads_first", device: str = "cpu") -> Any:
    """q, k and v, (batch, heads, length, head_dim), that lie in memory as the layout says."""
    random = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found = []
    for heads, n in ((4, q_len), (kv_heads, kv_len), (kv_heads, kv_len)):
        x = torch.randn(2, heads, n, 16, generator=random).to(device, dtype)
        if layout == "rows_first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "length_first":
            x = x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        elif layout == "packed":
            x = torch.stack([x, x], 3)[:, :, :, 0]
        elif layout == "expanded":
            x = x[:, :1].expand(-1, heads, -1, -1)
        found.append(x)
    return found


def near(found: Any, wanted: Any) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def near_gradient(found: Any, wanted: Any) -> None:
    """In 16 bits of a sum over batches, whose terms were rounded."""
    if found.dtype == torch.float32:
        near(found, wanted)
    else:
        assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5, "is_causal": True}], ids=str)
def test_function(options: dict[str, Any], layout: str, device: str) -> None:
    for lengths in ((20, 20), (20, 33), (33, 20)):
        given = make(*lengths, layout=layout, device=device)
        near(sdpa.scaled_dot_product_attention(*given, **options), F.scaled_dot_product_attention(*given, **options))
        three = [x[0] for x in given]
        near(sdpa.scaled_dot_product_attention(*three, **options), F.scaled_dot_product_attention(*three, **options))


@since(2, 5)
def test_grouped_heads(device: str) -> None:
    given = make(kv_heads=2, device=device)
    near(sdpa.scaled_dot_product_attention(*given, enable_gqa=True), F.scaled_dot_product_attention(*given, enable_gqa=True))
    with pytest.raises(ProblemError, match="query has 4 heads but key has 2"):
        sdpa.scaled_dot_product_attention(*given)


@pytest.mark.parametrize("layout", NAMES)
def test_layout_of_the_result(layout: str, device: str) -> None:
    q, k, v = make(layout=layout, device=device)
    assert sdpa.scaled_dot_product_attention(q, k, v).stride() == torch.empty_like(q).stride()
    followed = sdpa.scaled_dot_product_attention(q.detach().requires_grad_(), k, v)
    assert followed.transpose(1, 2).is_contiguous(), "autograd follows new results only"


@pytest.mark.parametrize("layout", ["heads_first", "rows_first"])
def test_gradients(layout: str, device: str) -> None:
    given = [x.detach().requires_grad_() for x in make(kv_len=33, layout=layout, device=device)]
    found, wanted = (
        torch.autograd.grad((f(*given, is_causal=True).float() ** 2).sum(), given)
        for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    for x, y in zip(found, wanted, strict=True):
        near(x, y)


def test_compiled() -> None:
    given = make()
    f = torch.compile(lambda *x: sdpa.scaled_dot_product_attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    near(f(*given), F.scaled_dot_product_attention(*given, is_causal=True))


SHAPES = {
    "one batch of keys": ((2, 4, 20, 16), (1, 4, 33, 16), (1, 4, 33, 16)), "of queries": ((1, 4, 20, 16), *[(2, 4, 33, 16)] * 2),
    "of values": ((2, 4, 20, 16), (2, 4, 33, 16), (1, 4, 33, 16)), "5": ((3, 2, 4, 20, 16), *[(3, 2, 4, 33, 16)] * 2),
    "5 and 3": ((3, 2, 4, 20, 16), *[(4, 33, 16)] * 2), "2": ((20, 16), (33, 16), (33, 16)),
    "3 and 4": ((4, 20, 16), *[(2, 4, 33, 16)] * 2), "one head of keys": ((2, 4, 20, 16), *[(2, 1, 33, 16)] * 2),
    "one of values": ((2, 4, 20, 16), (2, 4, 33, 16), (2, 1, 33, 8)), "of q": ((2, 1, 20, 16), *[(2, 4, 33, 16)] * 2),
    "6": ((1, 1, 1, 4, 20, 16), *[(5, 3, 2, 4, 33, 16)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_broadcasting(shapes: Any, device: str) -> None:
    """As torch's, forward and backward."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    results = [f(*given, is_causal=True) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention)]
    near(*results)
    for x, y in zip(*(torch.autograd.grad((o.float() ** 2).sum(), given) for o in results), strict=True):
        near_gradient(x, y)


def test_broadcasting_of_heads_and_masks() -> None:
    q, k = torch.randn(3, 2, 4, 20, 16), torch.randn(3, 2, 2, 33, 16)
    for given, mask_shapes in (
        ((q, k, k), [(20, 33), (33,), (4, 20, 33), (3, 2, 1, 20, 33), (1, 1, 4, 1, 33)]),
        ((q[0], k[0], k[0, :, :1]), [(20, 33)]), ((q[0, 0], k[0, 0], k[0, 0]), [(4, 20, 33)]),
    ):  # fmt: skip
        whole = [x.repeat_interleave(4 // x.shape[-3], -3) for x in given]
        for shape in mask_shapes:
            m = torch.randn(shape)
            wanted = F.scaled_dot_product_attention(*whole, m.expand(*given[0].shape[:-1], 33))
            near(sdpa.scaled_dot_product_attention(*given, m, enable_gqa=True), wanted)
    with pytest.raises(UnsupportedError, match="key has 2 heads but value 4; give as many of both, or one of one"):
        sdpa.scaled_dot_product_attention(q, k, torch.cat([k, k], 2), enable_gqa=True)
    for name, given in {
        "query": (torch.randn(2, 3, 2, 20, 16).transpose(0, 1), k, k), "key": (q, k[0], k[0]),
        "attn_mask": (q, k, k, torch.ones(2, 1, 20, 33)),
    }.items():  # fmt: skip
        with pytest.raises(UnsupportedError, match=rf"{name} has the shape .* batch must be one dimension .* of \(3, 2\)"):
            sdpa.scaled_dot_product_attention(*given, enable_gqa=True)


def test_errors_are_torch_errors() -> None:
    """Callers fall back by ``except RuntimeError``; and they are rawattn's."""
    q, k, v = make()
    wrong = [
        ((q, k[:, :2], v[:, :2]), {}), ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}), ((q, k.double(), v), {}),
        ((q, k[..., :8], v), {}), ((q, k, v[:, :, :9]), {}), ((q, k, v), {"attn_mask": torch.ones(20, 20, dtype=torch.int32)}),
        ((q, k, v), {"attn_mask": torch.ones(19, 20)}), ((q, k, v), {"attn_mask": torch.ones(20, 20), "is_causal": True}),
        ((q, torch.cat([k, k[:1]]), v), {}), ((q, k, v), {"dropout_p": 1.5}), ((q[0, 0, 0], k, v), {}),
    ]  # fmt: skip
    for given, options in wrong:
        with pytest.raises(RuntimeError) as caught:
            sdpa.scaled_dot_product_attention(*given, **options)
        assert isinstance(caught.value, (ProblemError, UnsupportedError)), caught.value


# ---- nested tensors


def make_nested(layout: Any, lengths: tuple[int, ...], heads: int = 4, first: str = "rows", device: str = "cpu") -> Any:
    """A leaf, whose gradient is asked for, and what it is as (batch, heads, length, head_dim)."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    parts = [torch.randn((n, heads, 16) if first == "rows" else (heads, n, 16)).to(device, dtype) for n in lengths]
    leaf = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    return leaf, leaf.transpose(1, 2) if first == "rows" else leaf


@pytest.mark.filterwarnings("ignore")  # that layouts of nested tensors are prototypes
@pytest.mark.parametrize(
    ("layout", "first"), [(torch.jagged, "rows"), (torch.strided, "rows"), (torch.strided, "heads")], ids=str
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_nested(options: dict[str, Any], layout: Any, first: str, device: str) -> None:
    """Sequence by sequence what torch gives of each, and its gradients."""
    options = {**options}
    made = [
        make_nested(layout, lengths, heads, first, device)
        for lengths, heads in (((7, 20, 1), 4), *[((9, 5, 30), 2 if options.get("enable_gqa") else 4)] * 2)
    ]
    leaves, given = zip(*made, strict=True)
    o = sdpa.scaled_dot_product_attention(*given, **options)
    assert o.is_nested and o.layout is layout and o.dim() == 4
    if layout is torch.jagged:
        assert (o + given[0]).shape == given[0].shape  # of the same lengths, which torch tells by their object
    parts = [x.detach().requires_grad_() for nested in given for x in nested.unbind()]
    is_grouped = options.pop("enable_gqa", False)
    whole = [[x.repeat_interleave(1 + (is_grouped and j > 0), 0) for j, x in enumerate(parts[i::3])] for i in range(3)]
    wanted = [F.scaled_dot_product_attention(*x, **options) for x in whole]
    for x, y in zip(o.unbind(), wanted, strict=True):
        near(x, y)
    (sum((x.float() ** 2).sum() for x in o.unbind()) if layout is torch.strided else (o.values().float() ** 2).sum()).backward()
    sum((x.float() ** 2).sum() for x in wanted).backward()
    found = [x for leaf in leaves for x in leaf.grad.unbind()]
    for x, y in zip(found, parts, strict=True):
        near_gradient(x.transpose(0, 1) if first == "rows" else x, y.grad)


@pytest.mark.filterwarnings("ignore")
def test_nested_refusals() -> None:
    _, q = make_nested(torch.jagged, (7, 20))
    dense = torch.randn(2, 4, 20, 16)
    with pytest.raises(RuntimeError, match="attn_mask was given beside nested tensors"):
        sdpa.scaled_dot_product_attention(q, q, q, torch.ones(20, 20))
    with pytest.raises(RuntimeError, match="must all be nested, of one layout"):
        sdpa.scaled_dot_product_attention(q, dense, dense)
    with pytest.raises(RuntimeError, match="query has 4 heads but key has 2"):
        sdpa.scaled_dot_product_attention(q, *[make_nested(torch.jagged, (7, 20), 2)[1]] * 2)
    with pytest.raises(RuntimeError, match="ragged in 3; it must have 4"):
        sdpa.scaled_dot_product_attention(*[q.transpose(2, 3)] * 3)
    holes = torch.nested.narrow(torch.randn(2, 20, 4, 16), 1, *torch.tensor([[0, 2], [7, 9]]), layout=torch.jagged)
    with pytest.raises(RuntimeError, match="a nested tensor has rows between its sequences"):
        sdpa.scaled_dot_product_attention(holes, holes, holes)
    batches = torch.nested.nested_tensor([torch.randn(n, 4, 20, 16) for n in (2, 3)], layout=torch.jagged)
    near(sdpa.scaled_dot_product_attention(*[batches] * 3).values(), F.scaled_dot_product_attention(*[batches.values()] * 3))
    torch.manual_seed(1)
    first = sdpa.scaled_dot_product_attention(q, q, q, dropout_p=0.5).values()
    torch.manual_seed(1)
    assert torch.equal(sdpa.scaled_dot_product_attention(q, q, q, dropout_p=0.5).values(), first)
    assert not torch.equal(sdpa.scaled_dot_product_attention(q, q, q).values(), first)


def test_refusals() -> None:
    q, k, v = make()
    with pytest.raises(ProblemError, match="attn_mask was given beside is_causal"):
        sdpa.scaled_dot_product_attention(q, k, v, q > 0, is_causal=True)
    with pytest.raises(ProblemError, match="attn_mask has 5 dimensions"):
        sdpa.scaled_dot_product_attention(q, k, v, q[None])
    with pytest.raises(ProblemError, match=r"the inputs have the shapes \(16,\).* must have 2 dimensions or more"):
        sdpa.scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_of_wrong_shapes(dtype: Any) -> None:
    """torch refuses them, too. One of fewer rows must not be read beyond its end."""
    given = make(kv_len=33)
    for shape in ((19, 33), (20, 32), (20, 40), (1, 40), (3, 4, 20, 33), (2, 3, 20, 33)):
        with pytest.raises(ProblemError, match=r"attn_mask has the shape .* it must broadcast to .*\(2, 4, 20, 33\)"):
            sdpa.scaled_dot_product_attention(*given, attn_mask=torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32], ids=str)
def test_masks_of_integers(dtype: Any) -> None:
    """They would be added, where 1 and 0 are meant to say which keys count."""
    with pytest.raises(ProblemError, match=f"attn_mask is {dtype}; it must be bool"):
        sdpa.scaled_dot_product_attention(*make(), attn_mask=torch.ones(20, 20, dtype=dtype))


@pytest.mark.parametrize("shape", [(33,), (20, 33), (1, 33), (2, 1, 20, 33), (2, 4, 20, 33), (1, 4, 1, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks(dtype: Any, shape: tuple[int, ...]) -> None:
    given, random = make(kv_len=33), torch.Generator().manual_seed(1)
    table = torch.randn(shape, generator=random)
    table = table > -1 if dtype is torch.bool else table
    whole = table.expand(20, 33) if table.dim() == 1 else table  # torch's own on the CPU takes no fewer than 2
    near(sdpa.scaled_dot_product_attention(*given, attn_mask=table), F.scaled_dot_product_attention(*given, attn_mask=whole))
    expanded = whole[..., :1].expand(whole.shape)
    wanted = F.scaled_dot_product_attention(*given, expanded).nan_to_num()  # torch 2.4 has NaN where no key is kept
    near(sdpa.scaled_dot_product_attention(*given, expanded), wanted)


class Plain(torch.Tensor):
    """A class of tensors without behaviour."""


class Odd(torch.Tensor):
    """One with behaviour."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("make_bias", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.parametrize("lengths", [(20, 20), (20, 33)])
def test_causal_bias(make_bias: Any, lengths: tuple[int, int], device: str) -> None:
    """torch's CausalBias has memory that was never set."""
    q, k, v = (x.detach().requires_grad_() for x in make(*lengths, device=device))
    kept = torch.ones(lengths, dtype=torch.bool, device=device).tril(
        lengths[1] - lengths[0] if make_bias is bias.causal_lower_right else 0
    )
    found = sdpa.scaled_dot_product_attention(q, k, v, make_bias(*lengths), scale=0.3)
    wanted = F.scaled_dot_product_attention(q, k, v, kept, scale=0.3)
    near(found, wanted)
    for x, y in zip(*(torch.autograd.grad((o.float() ** 2).sum(), (q, k, v)) for o in (found, wanted)), strict=True):
        near_gradient(x, y)
    near(sdpa.scaled_dot_product_attention(q[0], k[0], v[0], make_bias(*lengths), scale=0.3), found[0])
    compiled = torch.compile(sdpa.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    near(compiled(q, k, v, make_bias(*lengths), scale=0.3), found)
    with pytest.raises(ProblemError, match=r"attn_mask is a CausalBias of \(20, 40\) queries and keys; it must be of \(20, "):
        sdpa.scaled_dot_product_attention(q, k, v, make_bias(20, 40))
    with pytest.raises(ProblemError, match="attn_mask was given beside is_causal"):
        sdpa.scaled_dot_product_attention(q, k, v, make_bias(*lengths), is_causal=True)


def test_tensors_with_behaviour() -> None:
    """They are refused as masks and biases, wherever these are taken; plain classes of tensors are not."""
    given, table = make(), torch.randn(1, 1, 20, 20)
    rows = [x.transpose(1, 2) for x in given]
    words = "is a Odd, a tensor with a __torch_function__ of its own"
    wanted = F.scaled_dot_product_attention(*given, table)
    for plain in (table.as_subclass(Plain), torch.nn.Parameter(table)):
        near(sdpa.scaled_dot_product_attention(*given, plain), wanted)
        near(xformers.memory_efficient_attention(*rows, plain).transpose(1, 2), wanted)
    slopes = torch.zeros(4)
    odd = table.as_subclass(Odd)
    with pytest.raises(ProblemError, match=f"bias {words}"):
        rawattn.attention(*rows, bias=odd)
    with pytest.raises(Exception, match=r"bias is a Odd|Observed exception|call_function"):  # as dynamo says it
        torch.compile(lambda q, k, v, x: rawattn.attention(q, k, v, bias=x), backend="eager", fullgraph=True)(*rows, odd)
    with pytest.raises((ProblemError, NotImplementedError), match="CausalBias"):  # torch 2.4's has no shape
        rawattn.attention(*rows, bias=bias.causal_upper_left(20, 20))
    with pytest.raises(ProblemError, match=f"odd {words}"):
        rawattn.attention(*rows, score=lambda s, b, h, q, kv: s + odd[0, 0, q, kv])
    with pytest.raises(ProblemError, match=f"attn_bias {words}"):
        xformers.memory_efficient_attention(*rows, odd)
    with pytest.raises(ProblemError, match=f"attn_mask {words}"):
        sdpa.scaled_dot_product_attention(*given, table.as_subclass(Odd))
    with pytest.raises(ProblemError, match=f"alibi {words}"):
        rawattn.attention(*rows, alibi=slopes.as_subclass(Odd))


@since(2, 11)
@pytest.mark.parametrize("shape", [(20, 20), (2, 1, 1, 20)], ids=str)
def test_gradients_of_masks(shape: tuple[int, ...], device: str) -> None:
    """Of a float one, eager and compiled; a bool one is refused where torch.compile traces."""
    given = [x.detach().requires_grad_() for x in (*make(device=device), torch.randn(shape).to(device))]
    compiled = torch.compile(sdpa.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(
        (F.scaled_dot_product_attention(*given[:3], given[3].to(given[0].dtype)).float() ** 2).sum(), given
    )
    for f in (sdpa.scaled_dot_product_attention, compiled):
        for x, y in zip(torch.autograd.grad((f(*given).float() ** 2).sum(), given), wanted, strict=True):
            (near if device == "cpu" else lambda x, y: torch.testing.assert_close(x, y, rtol=0.1, atol=0.1))(x, y)
    with pytest.raises(Exception, match="attn_mask is bool where torch traces"):
        compiled(*given[:3], given[3] > 0)


@since(2, 11)
@pytest.mark.parametrize(("dtype", "strict"), [(torch.float32, True), (torch.float32, False), (torch.bool, False)], ids=str)
def test_export_of_masks(dtype: Any, strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, table: Any) -> Any:
            return sdpa.scaled_dot_product_attention(q, k, v, attn_mask=table)

    table = torch.randn(20, 20, generator=torch.Generator().manual_seed(1))
    given = (*make(), table > -1 if dtype is torch.bool else table)
    assert torch.equal(torch.export.export(Layer(), given, strict=strict).module()(*given), Layer()(*given))


# ---- below torch's own attention


needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="needs torch's registry of flash attention (2.13)"
)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions that torch calls, while rawattn is registered for tensors on the CPU, where torch has none of these."""
    names: list[str] = []

    def counted(name: str, f: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            names.append(name)
            return f(*given, **options)

        return call

    monkeypatch.setattr(sdpa, "KERNELS", {name: counted(name, f) for name, f in sdpa.KERNELS.items()})
    registration = sdpa.Registration("CPU")
    yield names
    registration.remove()


@since(2, 5)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_operators(causal: bool, layout: str, called: list[str]) -> None:
    """torch's own autograd above, rawattn below."""
    given = [x.detach().requires_grad_() for x in make(kv_heads=2 if layout == "rows_first" else 4, layout=layout)]
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=0.3)
    assert o.stride() == torch.empty_like(given[0]).stride() and lse.shape == (2, 4, 20)
    wanted = F.scaled_dot_product_attention(*given, is_causal=causal, scale=0.3, enable_gqa=True)
    near(o, wanted)
    for each, x, y in zip(given, *(torch.autograd.grad((each**2).sum(), given) for each in (o, wanted)), strict=True):
        near(x, y)
        assert x.stride() == torch.empty_like(each).stride()  # as torch's compiler expects
    assert called == ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]


@needs_registry
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
def test_varlen(window: tuple[int, int], called: list[str]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    given = [x[0].transpose(0, 1).detach().requires_grad_() for x in make()]
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    o = varlen_attn(*given, starts, starts, 13, 13, window_size=window)
    at = torch.arange(20)
    sequence = (at >= 7).int()
    ahead = at[:, None] - at
    left, right = (20 if side < 0 else side for side in window)
    kept = (sequence[:, None] == sequence) & (ahead <= left) & (-ahead <= right)
    wanted = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in given), attn_mask=kept).transpose(0, 1)
    near(o, wanted)
    for x, y in zip(*(torch.autograd.grad((each**2).sum(), given) for each in (o, wanted)), strict=True):
        near(x, y)
    assert called == ["_flash_attention_forward", "_flash_attention_backward"]


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"), reason="an operator of newer torch"
)
def test_in_place(called: list[str]) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in make())
    out = torch.full_like(q, torch.nan)
    torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, None, None, 20, 20, 0.0, True, False)
    near(out, F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2))


def test_operators_refuse(called: list[str]) -> None:
    q, k, v = make()
    with pytest.raises(UnsupportedError, match="return_debug_mask was given"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False, True)
    with pytest.raises(UnsupportedError, match=r"dropout_p is 0.5 in torch's operator without dropout"):
        sdpa._flash_attention_forward_no_dropout_inplace(None, q, k, v, None, None, 20, 20, 0.5, False, False)


def test_dropout() -> None:
    """It follows torch's generator, and what is given back sums to what dropout leaves of the values."""
    q, k, v = (x.detach() for x in make())
    results = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        results.append(sdpa.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.25))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert 0.5 < results[0].mean() < 1.5 and results[0].std() > 0


def test_dropout_below_torch(called: list[str]) -> None:
    """The backward finds the forward's seed in the state of random numbers."""
    given = [x.detach().double().requires_grad_() for x in make()]
    torch.manual_seed(5)
    o, lse, _, _, _, _, state, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.25, True)
    torch.manual_seed(5)
    wanted = sdpa.scaled_dot_product_attention(*given, dropout_p=0.25, is_causal=True)
    near(o, wanted)
    more = (None, None, 20, given[1].shape[2], 0.25, True, state, offset)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(torch.ones_like(o), *given, o, lse, *more)
    for x, y in zip(found, torch.autograd.grad(wanted.sum(), given), strict=True):
        near(x, y)


@needs_registry
def test_registry() -> None:
    """It is listed, activated and taken back; afterwards torch's own functions are there again."""
    attention = torch.nn.attention
    sdpa.register()
    assert sdpa.NAME in attention.list_flash_attention_impls()
    own = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", "CUDA")
    attention.activate_flash_attention_impl(sdpa.NAME)
    try:
        assert attention.current_flash_attention_impl() == sdpa.NAME
        for name in sdpa.KERNELS:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    finally:
        attention.restore_flash_attention_impl()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", "CUDA") == own


def test_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(UnsupportedError, match="has no register_flash_attention_impl"):
        sdpa.register()


@needs_registry
@pytest.mark.gpu("any")
def test_torch_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """F.scaled_dot_product_attention gives rawattn's bits, forward and backward, eager and compiled."""
    names: list[str] = []
    original = sdpa._compute_forward
    monkeypatch.setattr(sdpa, "_compute_forward", lambda *given, **options: names.append("") or original(*given, **options))
    given = [x.detach().requires_grad_() for x in make(300, 300, device="cuda")]
    wanted = sdpa.scaled_dot_product_attention(*given, is_causal=True)
    dwanted = torch.autograd.grad((wanted.float() ** 2).sum(), given)
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    try:
        for f in (F.scaled_dot_product_attention, torch.compile(F.scaled_dot_product_attention)):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                o = f(*given, is_causal=True)
                found = torch.autograd.grad((o.float() ** 2).sum(), given)
            assert torch.equal(o, wanted) and all(map(torch.equal, found, dwanted))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert len(names) == 2


def test_kept() -> None:
    assert sdpa.read_mask(None, False, (1, 1, 5, 5)) == {} and sdpa.read_mask(None, True, (1, 1, 5, 5)) == {"causal": True}
    assert sdpa.read_mask(None, True, (1, 1, 5, 6)) == {"mask": mask.Causal("top_left")}


def test_a_mask_that_requires_grad() -> None:
    """It is so where autograd follows it alone, too."""
    given, table = make(), torch.zeros(20, 20, requires_grad=True)
    found, wanted = (
        torch.autograd.grad((f(*given, attn_mask=table) ** 2).sum(), table)[0]
        for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    near(found, wanted)

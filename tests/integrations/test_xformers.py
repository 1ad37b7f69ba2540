"""rawattn.integrations.xformers: with xformers' own classes of biases where it is installed, and with ones of their form."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import rawattn  # noqa: E402
from rawattn.errors import ProblemError, UnsupportedError  # noqa: E402
from rawattn.integrations import xformers as adapter  # noqa: E402


@pytest.fixture
def biases() -> Any:
    return pytest.importorskip("xformers.ops.fmha.attn_bias", reason="needs xformers")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(*shape: int, seed: int = 0, device: str = "cpu") -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def near(found: Any, wanted: Any) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=tolerance)


def dense(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Returns what torch computes with a bias as a tensor, (q_len, kv_len)."""
    bias = None if bias is None else bias.to(q)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias).transpose(1, 2)


DENSE: dict[str, tuple[Any, ...]] = {
    "LowerTriangularMask": (), "LowerTriangularFromBottomRightMask": (),
    "LowerTriangularFromBottomRightLocalAttentionMask": (5,), "LocalAttentionFromBottomRightMask": (3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense_masks(name: str, biases: Any, device: str) -> None:
    bias, q, k = getattr(biases, name)(*DENSE[name]), make(2, 15, 4, 16, device=device), make(2, 20, 4, 16, device=device, seed=1)
    near(adapter.memory_efficient_attention(q, k, k, bias), dense(q, k, k, bias.materialize((15, 20))))


LENGTHS = [4, 7, 1], [6, 7, 3]
PACKED: dict[str, Any] = {
    "BlockDiagonalMask": lambda b: b.BlockDiagonalMask.from_seqlens(*LENGTHS),
    "BlockDiagonalCausalMask": lambda b: b.BlockDiagonalMask.from_seqlens(*LENGTHS).make_causal(),
    "BlockDiagonalCausalFromBottomRightMask": lambda b: b.BlockDiagonalMask.from_seqlens(*LENGTHS).make_causal_from_bottomright(),
    "BlockDiagonalCausalLocalAttentionMask": lambda b: b.BlockDiagonalMask.from_seqlens(*LENGTHS).make_local_attention(3),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda b: (
        b.BlockDiagonalMask.from_seqlens(*LENGTHS).make_local_attention_from_bottomright(3)
    ),
    "BlockDiagonalPaddedKeysMask": lambda b: b.BlockDiagonalPaddedKeysMask.from_seqlens(LENGTHS[0], 8, LENGTHS[1]),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda b: (
        b.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(LENGTHS[0], 8, LENGTHS[1])
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda b: (
        b.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(LENGTHS[0], 8, LENGTHS[1], 2, 1)
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda b: (
        b.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(LENGTHS[0], 8, LENGTHS[1], 3)
    ),
    "BlockDiagonalGappyKeysMask": lambda b: b.BlockDiagonalGappyKeysMask.from_seqlens(LENGTHS[0], [0, 8, 16, 24], LENGTHS[1]),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda b: (
        b.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(LENGTHS[0], [0, 8, 16, 24], LENGTHS[1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_masks(name: str, biases: Any, device: str) -> None:
    """The classes' own tables say what is wanted; keys behind a sequence's are NaN."""
    bias = PACKED[name](biases).to(torch.device(device))
    assert type(bias).__name__ == name
    rows = bias.k_seqinfo.seqstart_py[-1]
    q, k = make(1, 12, 4, 16, device=device), make(1, rows, 4, 16, seed=1, device=device)
    table = bias.materialize((12, rows)).to(device)
    wanted = dense(q, k, k, table)
    k[:, ~table.isfinite().any(0)] = torch.nan
    near(adapter.memory_efficient_attention(q, k, k, bias), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_pages(causal: bool, biases: Any, device: str) -> None:
    plain = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask if causal else biases.BlockDiagonalPaddedKeysMask
    paged = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask if causal else biases.PagedBlockDiagonalPaddedKeysMask
    table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=torch.int32, device=device)
    lengths = [2, 7, 1], [6, 7, 12]
    bias = plain.from_seqlens(lengths[0], 16, lengths[1], device=torch.device(device)).make_paged(table, 8, paged)
    q, k = make(1, 10, 4, 16, device=device), make(1, 48, 4, 16, seed=1, device=device)
    near(adapter.memory_efficient_attention(q, k, k, bias), dense(q, k, k, bias.materialize((10, 48)).to(device)))


@pytest.mark.parametrize("shape", [(15, 20), (1, 4, 15, 20), (2, 4, 15, 20)], ids=str)
def test_tensors_and_gradients(shape: tuple[int, ...], biases: Any) -> None:
    given = [make(2, n, 4, 16, seed=n).requires_grad_() for n in (15, 20, 20)]
    table = make(*shape, seed=9).requires_grad_()
    four, above = table[(None,) * (4 - len(shape))], ~torch.ones(15, 20).tril().bool()
    triangle = biases.LowerTriangularMask().add_bias(four)
    for bias, wanted in ((four, table), (triangle, table.masked_fill(above, -torch.inf))):
        pair = adapter.memory_efficient_attention(*given, bias), dense(*given, wanted)
        near(*pair)
        for x, y in zip(*(torch.autograd.grad((o**2).sum(), [*given, table]) for o in pair), strict=True):
            near(x, y)


# ---- without xformers


def like(name: str, **fields: Any) -> Any:
    """A bias of a class of this name."""
    return type(name, (), fields)()


def lengths(*lens: int, used: tuple[int, ...] = (), first: int = 0) -> Any:
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32) + first
    more = {"seqlen": torch.tensor(used, dtype=torch.int32), "seqlen_py": list(used)} if used else {}
    return types.SimpleNamespace(seqstart=starts, seqstart_py=starts.tolist(), max_seqlen=max(lens), **more)


def test_names_say_what_is_meant() -> None:
    q, k = make(2, 15, 4, 16), make(2, 20, 4, 16, seed=1)
    tril = torch.zeros(15, 20).masked_fill(~torch.ones(15, 20).tril().bool(), -torch.inf)
    near(adapter.memory_efficient_attention(q, k, k, like("LowerTriangularMask")), dense(q, k, k, tril))
    window = like("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=5)
    assert torch.equal(adapter.memory_efficient_attention(q, k, k, window), rawattn.attention(q, k, k, window=(4, 0)))
    blocks = like("BlockDiagonalCausalFromBottomRightMask", q_seqinfo=lengths(4, 11), k_seqinfo=lengths(9, 11))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 15], [0, 9, 20])]
    wanted = rawattn.attention_varlen(q[0], k[0], k[0], *starts, causal=True)
    assert torch.equal(adapter.memory_efficient_attention_forward(q[:1], k[:1], k[:1], blocks)[0], wanted)
    padded = like("BlockDiagonalPaddedKeysMask", q_seqinfo=lengths(4, 11), k_seqinfo=lengths(10, 10, used=(3, 8)))
    o, lse = adapter.memory_efficient_attention_partial(q[:1], k[:1], k[:1], padded)
    near(o[:, :4], dense(q[:1, :4], k[:1, :3], k[:1, :3], None))
    assert lse.shape == (1, 4, 15)
    pages = {"block_tables": torch.tensor([[1], [0]], dtype=torch.int32), "page_size": 10}
    name, infos = "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", {"q_seqinfo": lengths(1, 2), "k_seqinfo": padded.k_seqinfo}
    o = adapter.memory_efficient_attention(q[:1, :3], k[:1], k[:1], like(name, **infos, **pages | {"page_size": 10}))
    near(o[:, :1], dense(q[:1, :1], k[:1, 10:13], k[:1, 10:13], None))


def test_shapes() -> None:
    """Three dimensions for one head, five for groups, whose keys are expanded or not."""
    q, k = make(2, 15, 8, 16), make(2, 20, 2, 16, seed=1)
    wanted = rawattn.attention(q, k, k)
    groups = q.unflatten(2, (2, 4)), k.unsqueeze(3).expand(-1, -1, -1, 4, -1)
    assert torch.equal(adapter.memory_efficient_attention(groups[0], groups[1], groups[1]), wanted.unflatten(2, (2, 4)))
    whole = groups[1].contiguous()
    near(adapter.memory_efficient_attention(groups[0], whole, whole), wanted.unflatten(2, (2, 4)))
    o, lse = adapter.memory_efficient_attention_partial(groups[0], whole, whole)
    assert lse.shape == (2, 2, 4, 15)
    one = q[:, :, 0], k[:, :, 0]
    near(adapter.memory_efficient_attention(one[0], one[1], one[1], make(2, 15, 20) * 0), wanted[:, :, 0])
    o, lse = adapter.memory_efficient_attention_partial(one[0], one[1], one[1])
    assert o.shape == (2, 15, 16) and lse.shape == (2, 15)


def test_dropout_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    q = make(2, 15, 4, 16)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(adapter.memory_efficient_attention(q, q, q, p=0.3))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    with pytest.raises(UnsupportedError, match=r"output_dtype is torch\.float16"):
        adapter.memory_efficient_attention(q, q, q, output_dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="attn_bias is a PagedBlockDiagonalGappyKeysMask; rawattn has these of xformers"):
        adapter.memory_efficient_attention(q, q, q, like("PagedBlockDiagonalGappyKeysMask"))
    with pytest.raises(ProblemError, match="query has a batch of 2 with a BlockDiagonalMask"):
        adapter.memory_efficient_attention(q, q, q, like("BlockDiagonalMask"))
    with pytest.raises(ProblemError, match=r"attn_bias is a tensor of torch\.int64"):
        adapter.memory_efficient_attention(q, q, q, torch.ones(15, 15, dtype=torch.int64))
    with pytest.raises(ProblemError, match="must have 3, 4 or 5 dimensions, all as many"):
        adapter.memory_efficient_attention(q, q[0], q[0])
    paged = like("PagedBlockDiagonalPaddedKeysMask", q_seqinfo=lengths(15), k_seqinfo=lengths(15, used=(15,)), block_tables=q)
    with pytest.raises(UnsupportedError, match=r"p is 0\.5 with a PagedBlock"):
        adapter.memory_efficient_attention(q[:1], q[:1], q[:1], paged, p=0.5)
    monkeypatch.setattr("rawattn.integrations.flash_attn._ignored", set())
    with pytest.warns(UserWarning, match="op is a hint"):
        adapter.memory_efficient_attention(q, q, q, op=object())


@pytest.mark.parametrize("name", ["BlockDiagonalGappyKeysMask", "BlockDiagonalCausalWithOffsetGappyKeysMask"])
def test_gappy_keys_that_are_refused(name: str) -> None:
    """Kernels begin at the first row, and end a sequence where the next one begins."""
    q, k = make(1, 12, 4, 16), make(1, 24, 4, 16, seed=1)
    for keys, text in (
        (lengths(6, 8, 8, used=(6, 7, 3), first=2), "first sequence of keys begins at 2"),
        (lengths(4, 12, 8, used=(4, 7, 9)), "sequence 2 has 9 keys in rows 16 to 24"),
        (lengths(4, 12, 8, used=(6, 7, 3)), "sequence 0 has 6 keys in rows 0 to 4"),
    ):
        with pytest.raises(UnsupportedError, match=f"attn_bias is a {name} whose {text}"):
            adapter.memory_efficient_attention(q, k, k, like(name, q_seqinfo=lengths(4, 7, 1), k_seqinfo=keys))


@pytest.fixture
def installed() -> Iterator[Any]:
    ops = pytest.importorskip("xformers.ops", reason="needs xformers")
    own = ops.memory_efficient_attention
    adapter.install()
    adapter.install()
    yield ops
    adapter.uninstall()
    assert ops.memory_efficient_attention is own


def test_install(installed: Any) -> None:
    q = make(1, 5, 2, 16)
    assert torch.equal(installed.memory_efficient_attention(q, q, q), rawattn.attention(q, q, q))
    assert installed.fmha.memory_efficient_attention is adapter.memory_efficient_attention

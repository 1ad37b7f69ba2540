"""Errors of adapters name the arguments that the caller gave, as the adapter calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rawattn import ProblemError

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.flex_attention")
from rawattn.integrations import flash_attn, flash_attn_interface, flex_attention, sdpa, xformers  # noqa: E402

Q, K = torch.ones(2, 8, 4, 16), torch.ones(2, 8, 2, 16)
PACKED, STARTS, LENS = torch.ones(16, 4, 16), torch.tensor([0, 8, 16]).int(), torch.tensor([5, 6]).int()
CACHE, PAGES, TABLE = torch.zeros(2, 32, 2, 16), torch.zeros(8, 16, 2, 16), torch.arange(8).int().view(2, 4)
TALL, ANGLES = Q.transpose(1, 2), torch.ones(64, 4)


def fa2(**more: Any) -> Any:
    return flash_attn.flash_attn_func(Q, K, K, **more)


def packed(starts: Any = STARTS, longest: Any = 8, **more: Any) -> Any:
    return flash_attn.flash_attn_varlen_func(PACKED, PACKED, PACKED, STARTS, starts, 8, longest, **more)


def paged(starts: Any = STARTS, longest: Any = 64, table: Any = TABLE) -> Any:
    return flash_attn.flash_attn_varlen_func(PACKED, PAGES, PAGES.clone(), STARTS, starts, 8, longest, block_table=table)


def used(**more: Any) -> Any:
    return flash_attn_interface.flash_attn_varlen_func(PACKED, PACKED, PACKED, STARTS, STARTS, 8, 8, **more)


def cached(keys: Any = CACHE, values: Any = None, **more: Any) -> Any:
    values = keys.clone() if values is None else values
    return flash_attn.flash_attn_with_kvcache(Q[:, :1], keys, values, **{"cache_seqlens": LENS, "causal": True, **more})


def cached_3(**more: Any) -> Any:
    return flash_attn_interface.flash_attn_with_kvcache(Q[:, :1], PAGES, PAGES.clone(), **{"cache_seqlens": LENS, **more})


def of_rows(new_starts: Any = STARTS // 8, rotary_cos: Any = ANGLES, **more: Any) -> Any:
    """A step whose new keys are rotated, and lie end to end beside queries that do not."""
    given = {"cache_seqlens": LENS, "cu_seqlens_k_new": new_starts, "rotary_cos": rotary_cos, "rotary_sin": ANGLES, **more}
    return flash_attn_interface.flash_attn_with_kvcache(Q[:, :2], CACHE, CACHE.clone(), K[:, 0], K[:, 1], **given)


def backward(**more: Any) -> Any:
    given = {"dq": Q.clone(), "dk": K.clone(), "dv": K.clone(), "out": Q, **more}
    return flash_attn_interface._flash_attn_backward(Q, Q, K, K, softmax_lse=torch.zeros(2, 4, 8), **given)


def of_torch(**more: Any) -> Any:
    return sdpa.scaled_dot_product_attention(**{"query": TALL, "key": TALL, "value": TALL, **more})


def flex(**more: Any) -> Any:
    return flex_attention.flex_attention(**{"query": TALL, "key": TALL, "value": TALL, **more})


def xf(bias: Any = None, **more: Any) -> Any:
    return xformers.memory_efficient_attention(Q, Q, Q, bias, **more)


NEW = {"k": K[:, :1], "v": K[:, :1]}
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "slopes": (lambda: fa2(alibi_slopes=torch.ones(3)), "alibi_slopes has shape (3,); it must be (4,), (heads)."),
    "slopes' stride": (lambda: fa2(alibi_slopes=torch.ones(8)[::2]), "alibi_slopes has a stride of 2 in its last dimension"),
    "dropout": (lambda: fa2(dropout_p=1.5), "dropout_p is 1.5; it must be"),
    "scale": (lambda: fa2(softmax_scale="a"), "softmax_scale is 'a'; it must be"),
    "window": (lambda: fa2(window_size=(1, 2, 3)), "window_size is (1, 2, 3); it must be a pair"),
    "starts": (lambda: packed(STARTS.long()), "cu_seqlens_k has dtype int64; it must be int32: cu_seqlens_k.int() in torch"),
    "longest": (lambda: packed(longest=-1), "max_seqlen_k is -1; it must be"),
    "lengths in pages": (lambda: paged(STARTS * 20), "torch.diff(cu_seqlens_k)[0] is 160; it must be"),
    "longest in pages": (lambda: paged(longest="x"), "max_seqlen_k is 'x'; it must be"),
    "pages": (lambda: paged(table=TABLE.long()), "block_table has dtype int64; it must be int32: block_table.int() in torch"),
    "used keys": (lambda: used(seqused_k=LENS.long()), "seqused_k is int64 of shape (2,); it must be int32"),
    "used queries": (lambda: used(seqused_q=LENS + 9), "seqused_q[0] is 14; it must be from 0 to 8"),
    "cached": (lambda: cached(cache_seqlens=LENS + 90), "cache_seqlens[0] is 95; it must be from 0 to 32"),
    "batch": (lambda: cached(cache_seqlens=LENS[:1]), "q has batch 2 but cache_seqlens 1 sequences; they must be the same."),
    "cache": (lambda: cached(CACHE.int()), "k_cache has dtype int32; it must be bf16"),
    "caches": (lambda: cached(values=CACHE[:1]), "v_cache has shape (1, 32, 2, 16) but k_cache (2, 32, 2, 16); all"),
    "new values": (lambda: cached(**{**NEW, "v": None}), "v is None; it must be an array"),
    "table": (lambda: cached(PAGES, block_table=TABLE[0]), "block_table has shape (4,); it must be (batch, max_pa"),
    "table of 3": (lambda: cached_3(page_table=TABLE + 9), "page_table[0, 0] is 9; it must be a page of the cache"),
    "descale": (lambda: cached_3(page_table=TABLE, k_descale=torch.ones(2)), "k_descale is an array but the cache holds fp32"),
    "rows": (lambda: cached(cache_batch_idx=LENS.long()), "cache_batch_idx has dtype torch.int64 and shape (2,); it must be"),
    "a list of rows": (lambda: cached(cache_batch_idx=[0, 1]), "cache_batch_idx is a list; it must be a torch tensor."),
    "a list as table": (lambda: cached(PAGES, block_table=[[0, 1]]), "block_table is a list; it must be a torch tensor."),
    "padding": (lambda: cached(cache_leftpad=LENS + 9), "cache_leftpad[0] is 14; it must be from 0 to 5"),
    "chosen pages": (lambda: cached_3(page_table=TABLE, cache_batch_idx=LENS), "page_table[0, 0] is -1; it must be a page of"),
    "a row as chosen pages": (lambda: cached_3(page_table=TABLE[0], cache_batch_idx=LENS), "page_table has shape (4,); it must"),
    "no such row": (lambda: cached(cache_batch_idx=LENS), "cache_batch_idx[0, 0] is 5; it must be a page of the cache"),
    "window's sides": (lambda: fa2(window_size=torch.ones(2)), "window_size is tensor([1., 1.]); it must be a pair"),
    "probabilities": (lambda: fa2(return_attn_probs=3), "return_attn_probs is 3; it must be True or False."),
    "lse": (lambda: cached(return_softmax_lse=3), "return_softmax_lse is 3; it must be True or False."),
    "chunk": (lambda: cached_3(attention_chunk=-1), "attention_chunk is -1; it must be an int >= 0"),
    "new starts": (lambda: of_rows(LENS.long()), "cu_seqlens_k_new has dtype int64; it must be int32: cu_seqlens_k_new.int()"),
    "where new rows end": (lambda: of_rows(STARTS), "cu_seqlens_k_new is [ 0  8 16]; it must begin with 0, never fall"),
    "rotary's begin": (lambda: of_rows(rotary_seqlens=LENS.long()), "rotary_seqlens has dtype torch.int64 and shape (2,)"),
    "before the first": (lambda: of_rows(rotary_seqlens=LENS - 9), "rotary_seqlens has -4 for a row that goes into the cache"),
    "style": (lambda: of_rows(rotary_interleaved=3), "rotary_interleaved is 3; it must be True or False."),
    "a list of rows of q": (lambda: cached_3(cu_seqlens_q=[0, 1]), "cu_seqlens_q is a list; it must be a torch tensor."),
    "no place": (lambda: backward(dk=None), "dk is None; it must be a tensor, which receives the gradient."),
    "is_causal": (lambda: backward(is_causal=3), "is_causal is 3; it must be True or False."),
    "the forward's o": (lambda: backward(out=K), "out is a torch fp32 array of shape (2, 8, 2, 16)"),
    "angles": (lambda: cached(**NEW, rotary_cos=torch.ones(9, 4)), "rotary_sin is None; it must be an array."),
    "torch's key": (lambda: of_torch(key=TALL[..., :8]), "key has head_dim 8 but query has 16; give key head_dim 16."),
    "torch's dropout": (lambda: of_torch(dropout_p=2.0), "dropout_p is 2.0; it must be"),
    "torch's bias": (lambda: of_torch(attn_mask=torch.ones(8, 8).T), "attn_mask has a stride of 8 in its last dimension"),
    "torch's mask": (lambda: of_torch(attn_mask=torch.ones(8, 8, device="meta") > 0), "attn_mask, which mask captured, is on to"),
    "a list as mask": (lambda: of_torch(attn_mask=[[True]]), "attn_mask is a list; it must be a torch tensor."),
    "NumPy": (lambda: of_torch(query=TALL.numpy()), "query is a ndarray; it must be a torch tensor."),
    "no query": (lambda: of_torch(query=3), "query is a int; it must be a torch tensor."),
    "no value": (lambda: of_torch(value=None), "value is a NoneType; it must be a torch tensor."),
    "flex's value": (lambda: flex(value=TALL[:, :, :3]), "value has shape (2, 3, 4, 16) but key (2, 8, 4, 16); all"),
    "flex's score": (lambda: flex(score_mod=3), "score_mod is 3; it must be a score"),
    "flex's function": (lambda: flex(score_mod=lambda s, b, h, q, kv: "a"), "score_mod <lambda>"),
    "flex's mask": (lambda: flex_attention.create_block_mask(lambda b, h, q, kv: "a", 1, 1, 8, 8), "mask_mod <lambda>"),
    "xformers' bias": (lambda: xf(torch.ones(3, 3)), "attn_bias has shape (3, 3); it must be (8, 8), (q_len, kv_len)."),
    "xformers' dropout": (lambda: xf(p=2.0), "p is 2.0; it must be"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES)
def test_errors_name_the_adapters_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ProblemError) as error:
        call()
    assert str(error.value).startswith(message)


def test_errors_name_the_arguments_of_transformers() -> None:
    adapter = pytest.importorskip("rawattn.integrations.transformers")
    for given, message in (
        ({"scaling": "x"}, "scaling is 'x'; it must be a finite number"),
        ({"position_bias": torch.ones(3, 3)}, "position_bias or attention_mask has shape (3, 3); it must be (8, 8)"),
        ({"key": TALL[..., :8]}, "key has head_dim 8 but query has 16; give key head_dim 16."),
    ):
        with pytest.raises(ProblemError) as error:
            adapter.attention(torch.nn.Module(), **{"query": TALL, "key": TALL, "value": TALL, "attention_mask": None, **given})
        assert str(error.value).startswith(message)

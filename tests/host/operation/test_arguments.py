"""Public calls name the arguments that they do not have."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.operation import arguments

X = np.zeros((1, 4, 2, 8), np.float32)
CU = np.array([0, 4], np.int32)
CACHE, STEP = rawattn.KVCache(X, X), rawattn.Step(np.array([4], np.int32))
PLAN = rawattn.plan_kvcache(X, CACHE, STEP)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "attention": (rawattn.attention, (X, X, X)),
    "attention_varlen": (rawattn.attention_varlen, (X[0], X[0], X[0], CU, CU)),
    "attention_backward": (rawattn.attention_backward, (X, X, X, X, X, X[..., 0])),
    "attention_kvcache": (rawattn.attention_kvcache, (X, CACHE, STEP)),
    "attention_append": (rawattn.attention_append, (X, X, X, CACHE, STEP)),
    "append": (rawattn.append, (CACHE, STEP, X, X)),
    "plan": (rawattn.plan, (X, X, X)),
    "plan_backward": (rawattn.plan_backward, (X, X, X, X, X, X[..., 0])),
    "plan_kvcache": (rawattn.plan_kvcache, (X, CACHE, STEP)),
    "KVCachePlan.run": (PLAN.run, (X, CACHE, STEP)),
    "kvcache_bytes": (rawattn.kvcache_bytes, (4, 2, 8)),
    "explain": (rawattn.explain, (X, X, X)),
    "explain_backward": (rawattn.explain_backward, (X, X, X, X, X, X[..., 0])),
    "explain_kvcache": (rawattn.explain_kvcache, (X, CACHE, STEP)),
    "merge_states": (rawattn.merge_states, ([],)),
    "KVCache": (rawattn.KVCache, (X, X)),
    "Step": (rawattn.Step, (np.array([4], np.int32),)),
    "Step.from_indptr": (rawattn.Step.from_indptr, (CU, CU, CU)),
    "Rotary": (rawattn.Rotary, (X, X)),
    **{
        f"reference.{name}": (getattr(rawattn.reference, name), given)
        for name, given in {
            "attention": (X, X, X), "attention_backward": (X, X, X, X),
            "attention_kvcache": (X, CACHE, STEP), "append": (CACHE, STEP, X, X), "merge_states": ([],),
        }.items()
    },
}  # fmt: skip


def said(name: str, *given: Any, **options: Any) -> str:
    function, own = CALLS[name]
    with pytest.raises(TypeError) as error:
        function(*own, *given, **options)
    return str(error.value)


@pytest.mark.parametrize("name", CALLS)
def test_foreign_names(name: str) -> None:
    """Every name of the table that a call does not have gets words that help: an argument's name with the table's remark, what
    else serves it, or the names that there are."""
    known = {*inspect.signature(CALLS[name][0]).parameters}
    known |= {*inspect.signature(rawattn.attention_kvcache).parameters} if name == "attention_append" else set()
    for foreign, (own, remark) in arguments.FOREIGN.items():
        if foreign not in known:
            text = said(name, **{foreign: None})
            assert f"() got an unexpected keyword argument '{foreign}'. " in text
            meant = f"Did you mean {own!r}? {remark}".rstrip()
            assert text.endswith(meant if own in known else (remark or ".")) or "Its " in text, text


def test_words() -> None:
    for name in ("attention", "attention_varlen", "attention_backward", "plan", "explain", "reference.attention"):
        assert "Did you mean 'causal'? It aligns the last query" in said(name, is_causal=True)
        assert said(name, softmax_scale=1.0).endswith("Did you mean 'scale'?")
        assert said(name, casual=True).endswith("Did you mean 'causal'?")
    assert "rawattn.integrations.sdpa.scaled_dot_product_attention takes" in said("attention", attn_mask=None)
    assert said("attention_kvcache", block_table=None).endswith("Over a cache it is said by rawattn.Step(page_table=...).")
    assert "rawattn.Step(causal=...). It aligns" in said("attention_append", is_causal=True)
    assert said("Step", block_table=None).endswith("Did you mean 'page_table'?")
    assert said("Rotary", colour=1).endswith("'colour'. Its arguments are cos, sin, interleaved, positions, first_column.")
    assert said("Step.from_indptr", colour=1).endswith("max_q_len, max_kv_len, keys.")


def test_the_table_names_arguments_that_there_are() -> None:
    known = {name for function, _ in CALLS.values() for name in inspect.signature(function).parameters}
    assert {own for own, _ in arguments.FOREIGN.values()} - {""} <= known
    assert list(arguments.FOREIGN) == sorted(arguments.FOREIGN)


def test_by_position() -> None:
    for name in ("attention", "reference.attention"):
        text = "attention() takes 3 positional arguments but 4 were given. Give what follows v by name, as in causal=..."
        assert said(name, True) == text
    assert "takes 3 positional arguments but 4 were given" in said("attention_kvcache", None)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'k' and 'v'"):
        rawattn.attention(X)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'k' and 'v'"):
        rawattn.reference.attention(X)  # type: ignore[call-arg]


def test_those_of_jax_and_of_many_gpus() -> None:
    """Before anything is done with the arrays."""
    pytest.importorskip("torch")
    from rawattn import parallel

    calls = [parallel.context_attention, parallel.context_attention_varlen, parallel.head_attention]
    try:
        import rawattn.jax
    except ImportError:
        pass
    else:
        calls.append(rawattn.jax.attention)
    for call in calls:
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got .* 'is_causal'\. Did you mean 'causal'\?"):
            call(X, X, X, CU, is_causal=True) if "varlen" in call.__name__ else call(X, X, X, is_causal=True)


def test_errors_from_within_are_left_as_they_are() -> None:
    def within(b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise TypeError("got an unexpected keyword argument")

    with pytest.raises(TypeError, match=r"^got an unexpected keyword argument$"):
        arguments.named(within)(0, 0, 0, 0)


# ---- what is wrong with a value, and how to mend it


def refused(match: str, function: Any, *given: Any, **options: Any) -> None:
    with pytest.raises(rawattn.ProblemError, match=match):
        function(*given, **options)


def test_ways_out() -> None:
    """Messages of what newcomers give say what to write."""
    import ml_dtypes

    lens, attention, varlen = np.array([4.0], np.float32), rawattn.attention, rawattn.attention_varlen
    refused(
        r"causal is 'top_left'; .* as a mask it is rawattn\.mask\.Causal\('top_left'\)", attention, X, X, X, causal="top_left"
    )
    refused(r"causal is 'yes'; it must be True or False\.$", attention, X, X, X, causal="yes")
    refused(r"kv_lens has dtype fp32; .*kv_lens\.astype\('int32'\)", rawattn.Step, lens)
    refused(r"cu_seqlens_q has dtype fp32; .*cu_seqlens_q\.int\(\)", varlen, X[0], X[0], X[0], lens, lens)
    refused(r"cu_seqlens_q is \[4\]; .* cumulative sum of lengths, with a 0 before", varlen, X[0], X[0], X[0], CU[1:], CU[1:])
    refused(r"must have 3, .*: q\.reshape\(-1, \*q\.shape\[2:\]\) joins", varlen, X, X, X, CU, CU)
    sinks = np.zeros(2, ml_dtypes.bfloat16)
    refused(r"sinks is bf16 .* one for each head of q: sinks\.float\(\) in torch", attention, X, X, X, sinks=sinks)
    refused(r"sinks is bf16 .* sinks\.float\(\)", rawattn.attention_kvcache, X, CACHE, STEP, sinks=sinks)
    refused(r"sinks is bf16 .* sinks\.float\(\)", rawattn.merge_states, [(X, np.zeros((1, 2, 4), np.float32))], sinks=sinks)
    eight = X.astype(ml_dtypes.float8_e4m3fn)
    refused(r"q has dtype e4m3; .* are for rawattn\.KVCache", attention, eight, eight, eight)
    kept = [3, 4]
    refused("capture an array in place of a list", attention, X, X, X, mask=lambda b, h, q, kv: kv < kept[b])


def test_the_reason_of_the_device_comes_first() -> None:
    wide = np.zeros((1, 4, 2, 2048), np.float32)
    with pytest.raises(rawattn.UnsupportedError, match=r"on CPU:\n  cpu: "):
        rawattn.attention(wide, wide, wide)


# ---- arrays in torch's order


def attend(q: tuple[int, ...], k: tuple[int, ...], causal: bool = False) -> None:
    rawattn.attention(np.zeros(q, np.float32), *[np.zeros(k, np.float32)] * 2, causal=causal)


def test_torch_order_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawattn.runtime.select, "warned", set())
    with pytest.warns(rawattn.LayoutWarning) as found:
        attend((2, 8, 197, 16), (2, 2, 197, 16))
        attend((1, 4, 300, 16), (1, 4, 300, 16))
    assert [each.filename for each in found] == [__file__]
    text = str(found[0].message)
    assert "q has 8 rows of 197 heads, shape (2, 8, 197, 16), and k 2 rows of 197, (2, 2, 197, 16)" in text
    assert "rawattn.integrations.sdpa.scaled_dot_product_attention" in text and "q.transpose(1, 2)" in text
    rawattn.runtime.select.warned.clear()
    with pytest.warns(rawattn.LayoutWarning, match="q has 8 rows of 33 heads"):
        attend((2, 8, 33, 16), (2, 2, 33, 16), causal=True)
    refused(r"q has 1 heads but k has 40; .*scaled_dot_product_attention", attend, (1, 8, 1, 16), (1, 8, 40, 16))
    with pytest.raises(rawattn.ProblemError, match=r"of those of k and v\.$"):
        attend((1, 8, 6, 16), (1, 8, 4, 16))


def test_shapes_of_models_are_not() -> None:
    """Decoding and short prompts of models with many heads, and of one key head; tests turn the warning into an error."""
    for heads, kv_heads in ((32, 8), (128, 128), (128, 8), (232, 8), (256, 1)):
        for q_len, kv_len in ((1, 1), (1, 40), (3, 3), (16, 16), (16, 2)):
            for causal in (False, q_len <= kv_len):
                attend((1, q_len, heads, 8), (1, kv_len, kv_heads, 8), causal)
    attend((1, 140, 132, 8), (1, 140, 132, 8))

"""Lists of keys as torch's operators have them, and JAX: compiled, as fake tensors, mapped, over caches, with gradients."""

from __future__ import annotations

import json
from typing import Any

import pytest

import rawattn
from rawattn import Blocks, ProblemError, Step, TopK

torch = pytest.importorskip("torch")
Q, KV = torch.randn(2, 5, 4, 16), torch.randn(2, 37, 2, 16)
NUMBERS, COUNTS = torch.randint(-1, 37, (10, 9), dtype=torch.int32), torch.randint(0, 10, (10,), dtype=torch.int32)
INDICES = torch.randint(-1, 10, (2, 2, 3, 4), dtype=torch.int32)
KEYS = {"tokens": TopK(NUMBERS), "counted": TopK(NUMBERS, COUNTS), "blocks": Blocks(INDICES, None, 2, 4)}
EACH = pytest.mark.parametrize("name", KEYS)


def remade(keys: Any, numbers: Any, counts: Any) -> Any:
    return TopK(numbers, counts) if isinstance(keys, TopK) else Blocks(numbers, counts, keys.block_q, keys.block_kv)


@EACH
def test_compile_and_vmap(name: str) -> None:
    keys = KEYS[name]
    wanted = rawattn.attention(Q, KV, KV, causal=True, keys=keys)

    def attend(q: Any, *arrays: Any) -> Any:
        return rawattn.attention(q, KV, KV, causal=True, keys=remade(keys, *arrays))

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(Q, *keys.arrays), wanted)
    mapped = torch.vmap(lambda q: rawattn.attention(q, KV, KV, causal=True, keys=keys))(Q.expand(3, *Q.shape))
    assert all(torch.equal(x, wanted) for x in mapped)


@EACH
def test_the_operator(name: str) -> None:
    keys, operator = KEYS[name], torch.ops.rawattn.attention.default
    spec = json.dumps(rawattn.Spec.of(causal=True, keys=keys.lists).to_json())
    arrays = dict(zip(("keys", "keys_counts"), keys.arrays, strict=True))
    torch.library.opcheck(operator, (Q, KV, KV), {"spec": spec, **arrays}, test_utils=("test_schema", "test_faketensor"))
    for wrong in ({"keys": keys.arrays[0]}, {"spec": spec}):
        with pytest.raises(ProblemError, match="keys was given without the kind of its lists"):
            operator(Q, KV, KV, **wrong)


@EACH
def test_gradients(name: str) -> None:
    """Eager, compiled and mapped, by the operators and without them."""
    keys, results = KEYS[name], []
    attend = rawattn.attention
    for call in (attend, torch.compile(attend, backend="aot_eager"), torch.vmap(attend, (0, None, None))):
        q = Q.clone().requires_grad_()
        given = q[None] if call not in (attend,) and not hasattr(call, "_torchdynamo_orig_callable") else q
        call(given, KV, KV, causal=True, keys=keys).sum().backward()
        results.append(q.grad)
    assert all(torch.equal(x, results[0]) for x in results) and results[0].any()
    spec = json.dumps(rawattn.Spec.of(causal=True, keys=keys.lists).to_json())
    arrays = dict(zip(("keys", "keys_counts"), keys.arrays, strict=True))
    args = (Q.clone().requires_grad_(), KV, KV)
    torch.library.opcheck(torch.ops.rawattn.attention.default, args, {"spec": spec, **arrays}, test_utils="test_faketensor")


@pytest.mark.parametrize("physical", [False, True])
def test_caches(physical: bool) -> None:
    cache, table = rawattn.KVCache(*torch.randn(2, 12, 4, 2, 16)), torch.randperm(12).reshape(2, 6).int()
    lens, q = torch.tensor([21, 17], dtype=torch.int32), torch.randn(2, 3, 4, 16)
    keys = TopK(torch.randint(-1, 17, (6, 9), dtype=torch.int32), physical=physical)
    step = Step(keys=keys) if physical else Step(lens, table, keys=keys)
    wanted = rawattn.attention_kvcache(q, cache, step)
    compiled = torch.compile(lambda q: rawattn.attention_kvcache(q, cache, step), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), wanted)
    if not physical:
        o = rawattn.attention_append(q, *torch.randn(2, 2, 3, 2, 16), cache, step)
        assert torch.equal(o, rawattn.attention_kvcache(q, cache, step))


@EACH
def test_jax(name: str) -> None:
    jax, keys = pytest.importorskip("jax"), KEYS[name]
    attention = pytest.importorskip("rawattn.jax").attention
    arrays = [None if x is None else x.numpy() for x in keys.arrays]
    q, kv = Q.numpy(), KV.numpy()
    attend = jax.jit(lambda q, arrays: attention(q, kv, kv, causal=True, keys=remade(keys, *arrays)))
    assert (attend(q, arrays) == rawattn.attention(Q, KV, KV, causal=True, keys=keys).numpy()).all()
    gradient = jax.grad(lambda q: attend(q, arrays).sum())(q)
    followed = Q.clone().requires_grad_()
    rawattn.attention(followed, KV, KV, causal=True, keys=keys).sum().backward()
    assert (gradient == followed.grad.numpy()).all()

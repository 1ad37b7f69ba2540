"""This module tests lists of keys on the CPU: what they mean, by hand, and what is refused; operations, plans and caches."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import Blocks, ProblemError, Step, TopK
from rawattn.driver.device import TYPICAL
from rawattn.operation import Forward, from_json
from rawattn.runtime.select import select
from rawattn.variant.element import BF16, ELEMENTS
from rawattn.variant.field import Scratch
from tests.block_lists import CASES as BLOCKS
from tests.block_lists import BlockCase, block_cases
from tests.caches import caches
from tests.key_lists import CASES, OTHERS, STEPS, ListedCase, ListedStep, lists, to_numpy

SLOW = {"tokens, many heads", "wide"}


def put(x: Any) -> Any:
    return x


@pytest.mark.parametrize("name", sorted((CASES | OTHERS).keys() - SLOW))
def test_plain_tensors(name: str) -> None:
    case = (CASES | OTHERS)[name]
    case.check(case.call(put))


@st.composite
def listed_cases(draw: Any) -> ListedCase:
    kv_heads, group = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 3)))
    found = draw(lists(heads=(0, kv_heads, kv_heads * group)))
    found = dataclasses.replace(found, wrong=0.0)  # on the CPU it raises
    count = draw(st.integers(1, 3))
    each = draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from((0, 1, 63, 64, 65, 130))), min_size=count, max_size=count))
    return ListedCase(
        found, tuple(each), kv_heads * group, kv_heads, draw(st.sampled_from((1, 8, 20))), draw(st.sampled_from((1, 16))),
        draw(st.sampled_from(tuple(ELEMENTS))), draw(st.booleans()), sinks=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=60)
@given(listed_cases())
def test_any_lists(case: ListedCase) -> None:
    case.check(case.call(put))


def attend(step: ListedStep, attention: Any = rawattn.attention_kvcache) -> Any:
    case = step.case
    q = case.rows(case.heads, case.head_dim, 1)
    options = {"window": case.window, "softcap": case.softcap, "sinks": case.sink_logits()}
    return attention(q, step.cache(), step.step(put), **options, return_lse=True)


@pytest.mark.parametrize("attention", [rawattn.attention_kvcache, rawattn.reference.attention_kvcache])
@pytest.mark.parametrize("name", [name for name in STEPS if name != "many keys"])
def test_caches(name: str, attention: Any) -> None:
    STEPS[name].check(*attend(STEPS[name], attention), 2e-2)


@settings(max_examples=40)
@given(caches(), st.data())
def test_any_step(case: Any, data: Any) -> None:
    assume(case.lengths)
    found = data.draw(lists((1, 5, 64), heads=(0, case.kv_heads, case.heads)))
    has_positions = case.causal is not False or case.window or case.begins
    physical = data.draw(st.booleans()) and not (found.heads or has_positions or case.scales != ("", ""))
    step = ListedStep(case, dataclasses.replace(found, wrong=0.0), physical)
    step.check(*map(to_numpy, attend(step)), {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-5, "fp64": 1e-11}[case.dtype])


def test_all_keys_have_the_bits_of_dense_attention() -> None:
    q, k, v = (np.random.default_rng(0).standard_normal((2, n, h, 16)).astype(np.float32) for n, h in ((5, 4), (70, 2), (70, 2)))
    every = np.tile(np.arange(70, dtype=np.int32), (10, 1))
    dense, listed, turned = (
        rawattn.attention(q, k, v, causal=True, **keys)
        for keys in ({}, {"keys": TopK(every)}, {"keys": TopK(every[:, ::-1].copy())})
    )
    np.testing.assert_array_equal(dense, listed)
    np.testing.assert_allclose(dense, turned, atol=1e-5)


def test_a_key_counts_as_often_as_it_is_listed() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 3, 1, 4))
    twice = rawattn.attention(q, k, v, keys=TopK(np.int32([[0, 2, 0]] * 3)))
    once = rawattn.attention(
        q, k, v, keys=TopK(np.int32([[0, 2, -1]] * 3)), score=lambda s, b, h, q, kv: s + (kv == 0) * np.log(2.0)
    )
    np.testing.assert_allclose(twice, once, atol=1e-12)


Q, KV = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 9, 2, 8), np.float32)
NUMBERS, INDICES = np.zeros((10, 3), np.int32), np.zeros((2, 2, 3, 4), np.int32)
COUNTS = np.zeros(10, np.int32)
WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "type": (lambda: {"keys": NUMBERS}, "keys is a ndarray; it must be a rawattn.TopK or a rawattn.Blocks, or None"),
    "dtype": (lambda: {"keys": TopK(NUMBERS.astype(np.int64))}, "positions of keys has dtype int64; it must be int32"),
    "tokens": (lambda: {"keys": TopK(NUMBERS[:4])}, r"positions of keys has shape \(4, 3\); it must be \(10, k\)"),
    "rank": (lambda: {"keys": TopK(INDICES)}, r"positions of keys has shape \(2, 2, 3, 4\); it must be \(10, k\)"),
    "last": (lambda: {"keys": TopK(np.zeros((10, 6), np.int32)[:, ::2])}, "positions of keys has a stride of 2"),
    "heads": (lambda: {"keys": Blocks(INDICES[:, :1], block_q=2)}, r"keys has shape \(2, 1, 3, 4\); it must be \(2, 2 or 4, 3"),
    "blocks": (lambda: {"keys": Blocks(INDICES)}, r"it must be \(2, 2 or 4, 5, most\), a list for each head and 1 queries"),
    "counts": (lambda: {"keys": TopK(NUMBERS, COUNTS[:3])}, r"counts of keys has shape \(3,\); it must be \(10,\)"),
    "counts' dtype": (lambda: {"keys": TopK(NUMBERS, COUNTS * 1.0)}, "counts of keys has dtype fp64; it must be int32"),
    "number": (lambda: {"keys": TopK(NUMBERS + 9)}, "keys has 9 for query 0 of sequence 0; it must be from 0 to 8, or -1"),
    "block": (lambda: {"keys": Blocks(INDICES - 2, block_q=2)}, "keys has -2 for query 0 of sequence 0; it must be from 0 to 0"),
    "count": (lambda: {"keys": TopK(NUMBERS, COUNTS + 4)}, "counts of keys has 4; it must be from 0 to 3"),
    "physical": (lambda: {"keys": TopK(NUMBERS, physical=True)}, "keys are physical, which are rows of a cache"),
    "dropout": (lambda: {"keys": TopK(NUMBERS), "dropout": 0.5, "seed": 1}, "keys was given beside dropout 0.5"),
    "offsets": (lambda: {"keys": TopK(NUMBERS), "q_offset": 3}, "keys was given beside q_offset or kv_offset"),
    "no array": (lambda: {"keys": TopK([[1, 2]])}, "positions of TopK is .*; it must be an int32 array of shape"),
    "none": (lambda: {"keys": TopK(None)}, "positions of TopK is None; it must be an int32 array of shape"),
    "a name": (lambda: {"keys": Blocks("all")}, "indices of Blocks is 'all'; it must be an int32 array of shape"),
    "no flag": (lambda: {"keys": TopK(NUMBERS, physical=1)}, "physical is 1; it must be True or False"),
    "block_q": (lambda: {"keys": Blocks(INDICES, block_q=0)}, "block_q is 0; it must be an int from 1 up"),
    "block_kv": (lambda: {"keys": Blocks(INDICES, block_kv=48)}, "block_kv is 48; it must be a power of two up to 1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_what_is_refused(name: str) -> None:
    make, message = WRONG_CALLS[name]
    with pytest.raises(ProblemError, match=message):
        rawattn.attention(Q, KV, KV, **make())


def test_wrong_numbers_of_packed_queries() -> None:
    q, starts, keys = Q.reshape(10, 4, 8), np.int32([0, 7, 10]), Blocks(INDICES, block_q=2, block_kv=8)
    with pytest.raises(ProblemError, match="indices of keys has 3 query blocks; query 6 is in block 3"):
        rawattn.attention_varlen(q, KV[0], KV[0], starts, np.int32([0, 4, 9]), keys=keys)


CACHE = rawattn.KVCache(np.zeros((6, 4, 2, 8), np.float32), np.zeros((6, 4, 2, 8), np.float32))
LENS, TABLE = np.int32([8, 3]), np.int32([[0, 1], [2, 3]])
WRONG_STEPS: dict[str, tuple[Any, str]] = {
    "kv_lens": (lambda: Step(LENS, keys=TopK(NUMBERS, physical=True)), "kv_lens was given beside physical keys"),
    "max_kv_len": (lambda: Step(max_kv_len=9, keys=TopK(NUMBERS, physical=True)), "max_kv_len was given beside physical keys"),
    "no kv_lens": (lambda: Step(keys=TopK(NUMBERS)), "kv_lens is None"),
    "type": (lambda: Step(LENS, TABLE, keys=NUMBERS), "keys is a ndarray"),
    "tokens": (lambda: Step(LENS, TABLE, keys=TopK(NUMBERS[:3])), r"positions of keys has shape \(3, 3\); it must be \(10, k\)"),
    "number": (lambda: Step(LENS, TABLE, keys=TopK(NUMBERS + 5)), "keys has 5 for query 2 of sequence 1; it must be from 0 to 2"),
    "row": (lambda: Step(keys=TopK(NUMBERS + 24, physical=True)), "keys has 24 for query 0 of .* 0; it must be from 0 to 23"),
    "page": (lambda: Step(LENS, TABLE + 9, causal=False, keys=TopK(NUMBERS)), "sequence 0 has page 9 for key 0, which is listed"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_what_is_refused_of_steps(name: str) -> None:
    make, message = WRONG_STEPS[name]
    with pytest.raises(ProblemError, match=message):
        rawattn.attention_kvcache(Q, CACHE, make())


def test_physical_keys_have_no_positions() -> None:
    step = Step(keys=TopK(NUMBERS, physical=True))
    for options in ({"window": (3, 0)}, {"mask": lambda b, h, q, kv: q >= kv}, {"score": lambda s, b, h, q, kv: s + kv}):
        with pytest.raises(ProblemError, match="keys are physical, and have no positions"):
            rawattn.attention_kvcache(Q, CACHE, step, **options)
    assert (step.form, step.is_causal) == ("rows", False)


@pytest.mark.parametrize("name", [name for name, case in BLOCKS.items() if "wrong" not in case.kind])
def test_gradients_of_blocks(name: str) -> None:
    case = dataclasses.replace(BLOCKS[name], dtype="fp64")
    check_blocks(case)


@settings(max_examples=40)
@given(block_cases())
def test_any_gradients_of_blocks(case: BlockCase) -> None:
    check_blocks(case)


def check_blocks(case: BlockCase) -> None:
    """... and the reference."""
    o, lse = case.forward(put)
    case.check(("o", "lse"), (o, lse))
    case.check(case.gradient_names(), case.backward(put, o, lse))
    qkv, options, (do, dlse) = case.inputs(put)
    case.check(("o", "lse"), rawattn.reference.attention(**qkv, **options, return_lse=True), 1e-6)
    gradients = rawattn.reference.attention_backward(do, **qkv, dlse=dlse, **options)
    case.check(case.gradient_names(), gradients, 1e-6)


def test_gradients_of_tokens() -> None:
    """... by the case of blocks of one query and one key."""
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 2, 5, 4, 8))
    kv, numbers = rng.standard_normal((2, 9, 2, 8)), rng.integers(-1, 9, (10, 6)).astype(np.int32)
    blocks = Blocks(np.repeat(numbers.reshape(2, 1, 5, 6), 2, 1), block_q=1, block_kv=1)
    results = []
    for keys in (TopK(numbers), blocks):
        o, lse = rawattn.attention(q, kv, kv, causal=True, keys=keys, return_lse=True)
        results.append(rawattn.attention_backward(do, q, kv, kv, o, lse, causal=True, keys=keys))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(
    "keys", [TopK(NUMBERS), TopK(NUMBERS, COUNTS), Blocks(INDICES, block_q=2)], ids=["tokens", "counted", "blocks"]
)
def test_a_plan_and_its_operation(keys: Any) -> None:
    plan = rawattn.plan(Q, KV, KV, keys=keys)
    arrays = [x for x in keys.arrays if x is not None]
    np.testing.assert_array_equal(plan.run(Q, KV, KV, *arrays), rawattn.attention(Q, KV, KV, keys=keys))
    assert from_json(json.loads(json.dumps(plan.op.to_json()))) == plan.op
    assert "lists of" in str(plan.op) and "lists of" in str(rawattn.explain(Q, KV, KV, keys=keys))
    step = Step(LENS, TABLE, keys=keys)
    of_step = rawattn.plan_kvcache(Q, CACHE, step)
    np.testing.assert_array_equal(of_step.run(Q, CACHE, step), rawattn.attention_kvcache(Q, CACHE, step))
    assert from_json(json.loads(json.dumps(of_step.op.to_json()))) == of_step.op
    with pytest.raises(ProblemError, match="keys"):
        of_step.run(Q, CACHE, Step(LENS, TABLE))


def test_the_size_of_an_operation() -> None:
    keys = Blocks(INDICES, block_q=2, block_kv=64)
    op = rawattn.plan(Q, KV, KV, keys=keys).op
    assert isinstance(op, Forward) and op.pairs == 5 * 4 * 64 and op.flops == 2 * 16 * 2 * 4 * op.pairs
    assert op.element != BF16 and op.kind != rawattn.plan(Q, KV, KV).op.kind


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "tokens"])
def test_a_mask_of_intervals_beside_lists_has_the_scratch_memory_that_its_kernel_reads(blocks: bool, arch: str) -> None:
    """Kernels over lists have no launch before that finds intervals: they ask the function."""
    q, kv = np.zeros((1, 100, 2, 64), np.float16), np.zeros((1, 100, 2, 64), np.float16)
    numbers = np.zeros((1, 2, 2, 2) if blocks else (100, 2), np.int32)
    keys = Blocks(numbers, None, 64, 64) if blocks else TopK(numbers)
    mask = rawattn.mask.Intervals(np.zeros((1, 100), np.int32), np.full((1, 100), 100, np.int32))
    op, device = rawattn.plan(q, kv, kv, keys=keys, mask=mask).op, TYPICAL[arch]
    program = next(select(op, device).programs(op, device))
    read = {field.fill.name for launch in program.launches for field in launch.fields if isinstance(field.fill, Scratch)}
    assert program.launches and read <= {buffer.name for buffer in program.scratch}


def test_gradients_refuse_keys_that_are_no_lists() -> None:
    rows, lse = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 4, 5), np.float32)
    with pytest.raises(ProblemError, match=r"keys is a ndarray; it must be a rawattn\.TopK"):
        rawattn.attention_backward(rows, Q, KV, KV, rows, lse, keys=NUMBERS)

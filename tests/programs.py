"""Attention with masks and scores that are drawn by chance, against the reference: the property that tests of the CPU path and of
the GPU's kernels share. Several masks are one function of a captured number, so that one kernel computes all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import rawattn
from rawattn import trace
from rawattn.errors import ProblemError
from rawattn.testing import Case, expect, expect_backward
from rawattn.trace.expressions import nodes
from rawattn.trace.gradients import by_elements
from rawattn.variant.function import option_of
from tests import element_gradients, expressions
from tests.calls import poisoned_memory

LONGEST = 200
LENGTHS = ((130, 200), (64, 65), (1, 199))
CASE = Case("bf16", 2, 130, 200, 2, 1, 64, 64)
Move = Callable[[Any], Any]


def drawn(rng: np.random.Generator, role: str, count: int, move: Move) -> list[Any]:
    """So many functions of this role, whose integers stay in 32 bits. A score captures floats."""
    make = expressions.boolean if role == "mask" else expressions.logit
    place = expressions.mask if role == "mask" else expressions.score

    def choose(some: Sequence[Any]) -> Any:
        left = [x for x in some if x != "real"]  # steps of floats lie elsewhere in float64
        return left[int(rng.integers(len(left)))]

    numbers, found = expressions.arrays(rng, LONGEST, tame=role == "score" or bool(rng.integers(2))), []
    captured = {name: move(x) for name, x in numbers.items()}
    while len(found) < count:
        tree = make(choose, int(rng.integers(1, 4)))
        function = place(tree, captured)
        if is_taken(place(tree, numbers), role, rng) and (role == "mask" or element_gradients.floats(function)):
            found.append(function)
    return found


def is_taken(function: Any, role: str, rng: np.random.Generator) -> bool:
    """Says whether a function is no error, with the longest sequences, and of masks whether it keeps some pairs and leaves out
    others; of those that do not it takes a few."""
    try:
        traced, arrays, numbers = trace.bind(function, role)
        forms = [(element, tuple(x.shape)) for (element, _), x in zip(traced.code.arrays, arrays, strict=True)]
        option = option_of(traced, forms, numbers, (2, 2, LONGEST, LONGEST))
    except ProblemError as error:
        assert any(words in str(error) for words in ("32 bits", "divides by 0", "shift")), error
        return False
    if role == "score" or rng.random() < 0.1:
        return True
    with np.errstate(all="ignore"):
        places = np.arange(130)[:, None], np.arange(LONGEST)[None]
        kept = option.keep(np, arrays, 0, 1, *places, 130, LONGEST) if option.keep is not None else False
    return 0.02 < float(np.broadcast_to(kept, (130, LONGEST)).mean()) < 0.98


def check_forward(seed: int, place: tuple[str, Any], kernels: Sequence[str | None], move: Move, case: Case = CASE) -> None:
    """Every mask, with a score or none, in each kernel, which is compiled once."""
    rng = np.random.default_rng(seed)
    masks, scores = drawn(rng, "mask", 4, move), drawn(rng, "score", 2, move)
    q_len, kv_len = LENGTHS[seed % 3]
    inputs = dataclasses.replace(case, q_len=q_len, kv_len=kv_len).inputs(*place)
    for i in range(len(masks)):
        options = {"mask": expressions.one_of(i, masks), "score": expressions.one_score_of(i % 3, scores)}
        wanted = expect(*inputs, **options)
        for kernel in kernels:
            with poisoned_memory():
                found = rawattn.attention(*inputs, **options, return_lse=True, kernel=kernel)
            wanted.check(*found)


def check_backward(seed: int, place: tuple[str, Any], kernels: Sequence[str | None], move: Move, case: Case = CASE) -> None:
    """The gradients, those of what the score captured among them, and the same bits again."""
    rng = np.random.default_rng(seed)
    masks, (score,) = drawn(rng, "mask", 2, move), drawn(rng, "score", 1, move)
    inputs, (do, dlse), wrt = case.inputs(*place), case.output_gradients(*place), element_gradients.floats(score)
    derivatives = [each.derivative for each in by_elements(trace.bind(score, "score")[0].code)]
    operations = max((len(nodes(each)) for each in derivatives), default=0)
    for i in range(len(masks)):
        options = {"mask": expressions.one_of(i, masks), "score": score}
        o, lse = rawattn.attention(*inputs, **options, return_lse=True)
        wanted = expect_backward(do, *inputs, dlse=dlse, **options)
        captured = element_gradients.expect(do, *inputs, o, lse, wrt, dlse=dlse, operations=operations, **options)
        for kernel in kernels:
            given = {"dlse": dlse, "wrt": wrt, "kernel": kernel, **options}
            with poisoned_memory():
                found, again = (rawattn.attention_backward(do, *inputs, o, lse, **given) for _ in range(2))
            wanted.check(*found[:3])
            captured.check(found[3:])
            assert all((a == b).all() for a, b in zip(found, again, strict=True)), "the same bits"

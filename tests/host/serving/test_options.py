"""Every pair of options of a call over a cache: both count, or the call refuses the pair in words; by call, plan and operator."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import ProblemError
from rawattn.serving.attention import with_slopes
from tests.caches import Cached
from tests.host.operation.test_functions_over_caches import CASE, IDS, MASK, SCORE, SLOPES, check
from tests.options import HeadWindow

torch = pytest.importorskip("torch")
torch_serving = pytest.importorskip("rawattn.torch.caches")
ids, slopes, sinks = (torch.from_numpy(x) for x in (IDS, SLOPES, SLOPES * 9))
EACH, BEGINS = (1, 0, 1, 0, 0), (9, 2, 1, 0, 30)

Meaning = dict[str, Any]  # arguments of ``by_hand``, and fields of the case
OPTIONS: dict[str, tuple[dict[str, Any], Meaning]] = {  # what is given to the call, and what it means
    "window": ({"window": (9, 1)}, {"mask": lambda b, h, q, kv: (q - kv <= 9) & (kv - q <= 1)}),
    "softcap": ({"softcap": 0.7}, {"score": lambda s, b, h, q, kv: 0.7 * np.tanh(s / 0.7)}),
    "scale": ({"scale": 0.6}, {"scale": 0.6}),
    "mask": ({"mask": lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) | (q - kv < 3)}, {"mask": MASK}),
    "mask option": ({"mask": rawattn.mask.Window(3, 4)}, {"mask": lambda b, h, q, kv: (q - kv <= 3) & (kv - q <= 4)}),
    "score": ({"score": lambda s, b, h, q, kv: s + slopes[h] * (kv - q)}, {"score": SCORE}),
    "score option": ({"score": rawattn.score.Softcap(0.4)}, {"score": lambda s, b, h, q, kv: 0.4 * np.tanh(s / 0.4)}),
    "alibi": ({"alibi": slopes}, {"score": lambda s, b, h, q, kv: s - SLOPES[h] * abs(q - kv)}),
    "sinks": ({"sinks": sinks}, {"sinks": SLOPES * 9}),
    "split": ({"split": 64}, {}),
    "invariant": ({"invariant": True}, {}),
    "causal": ({}, {"causal": True}),
    "causal of each": ({}, {"causal": EACH}),
    "kv_begin": ({}, {"begins": BEGINS}),
}  # fmt: skip
ONE = {frozenset(("mask", "mask option")), frozenset(("score", "score option")), frozenset(("causal", "causal of each"))}
PAIRS = [
    pair for pair in itertools.combinations(OPTIONS, 2) if frozenset(pair) not in ONE
]  # which one argument cannot be both of
REFUSED = {
    ("window", "mask"): "mask was given beside", ("window", "mask option"): "mask was given beside",
    ("softcap", "score"): "score was given beside softcap", ("softcap", "score option"): "score was given beside softcap",
    ("score", "alibi"): "alibi or bias was given beside score", ("score option", "alibi"): "alibi or bias was given beside score",
}  # fmt: skip


def by_call(q: Any, case: Cached, options: dict[str, Any]) -> Any:
    return rawattn.attention_kvcache(q, case.cache("torch"), case.step("torch"), **options, return_lse=True)


def by_plan(q: Any, case: Cached, options: dict[str, Any]) -> Any:
    plan = rawattn.plan_kvcache(q, case.cache("torch"), case.step("torch"), **options, return_lse=True)
    captured = [ids] * callable(options.get("mask")) + [slopes] * (callable(options.get("score")) or "alibi" in options)
    return plan.run(q, case.cache("torch"), case.step("torch"), *captured, sinks=options.get("sinks"))


def by_operator(q: Any, case: Cached, options: dict[str, Any]) -> Any:
    score, softcap = with_slopes(options.get("softcap"), options.get("score"), options.get("alibi"), None, 0)
    named = {name: options.get(name) for name in ("window", "scale", "mask")} | {"score": score, "softcap": softcap}
    named["invariant"] = options.get("invariant", False)
    rest = options.get("sinks"), options.get("split", "auto")
    return torch_serving.attention_kvcache(q, case.cache("torch"), case.step("torch"), named, *rest)


@pytest.mark.parametrize("way", [by_call, by_plan, by_operator])
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_both_count_or_are_refused(pair: tuple[str, str], way: Callable[..., Any]) -> None:
    given, meant = ({**OPTIONS[pair[0]][i], **OPTIONS[pair[1]][i]} for i in (0, 1))
    roles = {role: [OPTIONS[name][1][role] for name in pair if role in OPTIONS[name][1]] for role in ("mask", "score")}
    if len(roles["mask"]) == 2:
        first, second = roles["mask"]
        meant["mask"] = lambda *at: first(*at) & second(*at)
    if len(roles["score"]) == 2:  # a cap comes before slopes
        inner, outer = roles["score"]
        meant["score"] = lambda s, *at: outer(inner(s, *at), *at)
    changes = {name: meant.pop(name) for name in ("causal", "begins") if name in meant}
    case = dataclasses.replace(CASE, **{"causal": False, **changes})
    q = torch.from_numpy(case.rows(4, 16, 1))
    if pair in REFUSED:
        with pytest.raises(ProblemError, match=REFUSED[pair]):
            way(q, case, given)
        return
    o, lse = way(q, case, given)
    check(case, o.numpy(), lse.numpy(), **meant)


@pytest.mark.parametrize("attention", [rawattn.attention_kvcache, rawattn.reference.attention_kvcache])
def test_a_mask_that_differs_by_head_from_the_first_key_on(attention: Any) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 9, 3, 8))
    step, mask = rawattn.Step(np.int32([9]), kv_begin=np.int32([4])), HeadWindow(0, 2)
    o = attention(q[:, 6:], rawattn.KVCache(k, v), step, mask=mask)
    both = rawattn.mask.And(rawattn.mask.Causal(), mask)
    np.testing.assert_allclose(o, rawattn.reference.attention(q[:, 6:], k[:, 4:], v[:, 4:], mask=both), atol=1e-12)

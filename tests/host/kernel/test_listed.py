"""This module compares kernels over lists of keys, run thread by thread on the CPU, with attention by hand: plain tensors, packed
sequences and caches."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import UnsupportedError
from rawattn.kernel.attn_fwd_mma import AttnFwdMmaConfig
from rawattn.kernel.attn_fwd_simt import AttnFwdSimtConfig
from rawattn.testing import _move
from tests.emulator.gpu import stand_in
from tests.key_lists import CASES, OTHERS, STEPS, WRONG, ListedCase, ListedStep, Lists, to_numpy

torch = pytest.importorskip("torch")
CONFIGS = {"attn_fwd_mma": AttnFwdMmaConfig(32, 32, 2, 1, 1, 1), "attn_fwd_simt": AttnFwdSimtConfig(8, 16, 16, 16, 128, 1)}
BY = {"attn_decode": None, **CONFIGS}
REFUSED = {"attn_decode": ("blocks of heads",), "attn_fwd_simt": ("e4m3",)}
FEW = {  # the cases that are not slow
    "attn_fwd_mma": {
        "tokens, causal", "tokens, packed", "blocks of heads", "blocks, packed", "lengths", "functions", "wide", "fp64", "indptr",
        "e4m3", "rows, same", "begins",
    },
    "attn_fwd_simt": {"tokens, one head", "blocks", "fp32", "fp64", "dense", "e4m3", "rows"},
    "attn_decode": {
        "begins", "blocks of other numbers", "many keys", "rows", "blocks", "blocks, ragged", "blocks of heads", "small pages",
    },
}  # fmt: skip


def each(kernels: Any, names: Any) -> Any:
    """Every kernel with every case, of which some are slow."""
    pairs = [(kernel, name) for kernel in kernels for name in names]
    marks = {True: (), False: pytest.mark.slow}
    parameters = [pytest.param(*pair, marks=marks[pair[1] in FEW[pair[0]]], id=" ".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("kernel", "name"), parameters)


def put(x: Any) -> Any:
    return _move(x, "torch", "cpu")


@each(CONFIGS, [*CASES, *OTHERS])
def test_plain_tensors(name: str, kernel: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, word = (CASES | OTHERS)[name], stand_in(monkeypatch, tmp_path)
    if kernel == "attn_fwd_mma" and name in OTHERS:
        with pytest.raises(UnsupportedError, match="it takes"):
            case.call(put, kernel=kernel)
        return
    case.check(case.call(put, kernel=kernel, config=CONFIGS[kernel]))
    assert word[0] == 0


def attend(step: ListedStep, kernel: str, **changes: Any) -> Any:
    case, sinks = step.case, step.case.sink_logits()
    options = {"kernel": kernel, "config": BY[kernel], "window": case.window, "softcap": case.softcap}
    options["sinks"] = None if sinks is None else put(sinks)
    made, q = step.step(put, "torch"), put(case.rows(case.heads, case.head_dim, 1))
    return map(to_numpy, rawattn.attention_kvcache(q, step.cache("torch"), made, return_lse=True, **(options | changes)))


@each(BY, STEPS)
def test_caches(name: str, kernel: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = stand_in(monkeypatch, tmp_path, sm_count=5)
    if name in REFUSED.get(kernel, ()):
        with pytest.raises(UnsupportedError, match="it takes"):
            attend(STEPS[name], kernel)
        return
    STEPS[name].check(*attend(STEPS[name], kernel), 2e-2)
    assert word[0] == 0


@pytest.mark.parametrize("kernel", BY)
@pytest.mark.parametrize("wrong", ["number", "count"])
def test_violations(wrong: str, kernel: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond a sequence are no keys, and said so, and a count is cut; -1 is none without a word, as other tests see."""
    word, step = stand_in(monkeypatch, tmp_path), STEPS["table"]
    lists = dataclasses.replace(step.lists, most=20, wrong=0.3 * (wrong == "number"), none=0.5, counts=wrong == "count")
    step = dataclasses.replace(step, lists=lists)
    numbers, counts = step.numbers
    if counts is not None:
        counts[0], counts[3] = WRONG, -5
        numbers[3] = -1
        monkeypatch.setattr(Lists, "of", lambda *_: (numbers, counts))
        monkeypatch.setattr(Lists, "places", _places_of_counted(Lists.places))
    step.check(*attend(step, kernel), 2e-2)
    assert word[0] == 256


def _places_of_counted(places: Any) -> Any:
    return lambda self, numbers, counts, *rest: places(self, numbers, np.clip(counts, 0, self.most), *rest)


@pytest.mark.parametrize("kernel", CONFIGS)
def test_all_keys_have_the_bits_of_dense_attention(kernel: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... where the kernel and its tiles are the same; in another order sums round otherwise."""
    stand_in(monkeypatch, tmp_path)
    q, k, v = (torch.randn(n, dtype=torch.float32).bfloat16() for n in ((2, 3, 64, 32), (2, 90, 1, 32), (2, 90, 1, 32)))
    every = torch.arange(90, dtype=torch.int32).expand(6, 90)
    options = {"causal": True, "invariant": True, "kernel": kernel, "config": CONFIGS[kernel], "return_lse": True}
    dense, listed, turned = (
        rawattn.attention(q, k, v, **options, **keys)
        for keys in ({}, {"keys": rawattn.TopK(every.contiguous())}, {"keys": rawattn.TopK(every.flip(1).contiguous())})
    )
    assert all(torch.equal(a, b) for a, b in zip(dense, listed, strict=True))
    assert not torch.equal(dense[1], turned[1]) and torch.allclose(dense[0].float(), turned[0].float(), atol=2e-2)


def test_a_step_of_all_keys_has_the_bits_of_the_plain_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By attn_decode: pages of any size are the same tiles, split at the same keys."""
    stand_in(monkeypatch, tmp_path, sm_count=5)
    case = dataclasses.replace(STEPS["many keys"].case, lengths=((1, 700), (1, 700)), page_size=1)
    numbers = np.tile(np.arange(700, dtype=np.int32), (2, 1))
    monkeypatch.setattr(Lists, "of", lambda *_: (numbers, None))
    step = ListedStep(case, Lists(700))
    q, cache = put(case.rows(case.heads, case.head_dim, 1)), step.cache("torch")
    plain, listed = (
        rawattn.attention_kvcache(q, cache, made, kernel="attn_decode", return_lse=True)
        for made in (case.step("torch"), step.step(put, "torch"))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, listed, strict=True))


def test_a_case_without_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path)
    case = ListedCase(Lists(5), lengths=((0, 9), (0, 9)))
    assert [x.shape for x in case.call(put)[0]] == [(0, 4, 16)] * 2

"""Parts of longer sequences: ``q_offset`` and ``kv_offset`` say at which positions their first rows are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import numpy as np
import pytest

import rawattn
from rawattn import reference
from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError
from rawattn.operation.forward import LONGEST
from rawattn.operation.spec import Spec
from rawattn.runtime import select
from rawattn.variant import Option
from rawattn.variant.element import BF16
from rawattn.variant.mask import And, Causal, Full, Window
from tests.operations import forward, replace

OFFSETS = ("q_offset", "kv_offset")


@dataclasses.dataclass(frozen=True)
class Chunked(Option):
    """A mask of absolute positions: the keys of a query's own chunk."""

    size: int
    type: ClassVar[str] = "Chunked"
    source: ClassVar[str] = ""

    def interval(self, q: Any, q_len: int, kv_len: int) -> Any:
        begin = q // self.size * self.size
        return np.minimum(begin, kv_len), np.minimum(begin + self.size, kv_len)


@dataclasses.dataclass(frozen=True)
class Alibi(Option):
    type: ClassVar[str] = "Alibi"
    source: ClassVar[str] = ""

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s + 0.25 * (head + 1) * (kv - q)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return None


WHOLE: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"mask": Causal("top_left")},
    "window": {"window": (5, 3)},
    "both": {"mask": And(Causal(), Window(9, None, "top_left"))},
    "chunks": {"mask": Chunked(7)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"score": Alibi(), "causal": True},
}


@pytest.mark.parametrize("options", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("attention", [reference.attention, rawattn.attention], ids=["reference", "cpu"])
def test_parts_make_the_whole(attention: Any, options: dict[str, Any]) -> None:
    """Attention of parts of q over parts of k, folded by lse, is attention of the whole."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 2, 8))
    o, lse = reference.attention(q, k, v, **options, return_lse=True)
    for i, j in itertools.product(*(((0, 13), (13, 40)),) * 2):
        assert j[0] < j[1]
        rows = slice(*i)
        parts = [
            attention(q[:, rows], k[:, slice(*p)], v[:, slice(*p)], **options, q_offset=i[0], kv_offset=p[0], return_lse=True)
            for p in ((0, 13), j if j[0] else (13, 40))
        ]
        with np.errstate(all="ignore"):
            weights = np.exp(np.stack([part[1] for part in parts]) - lse[..., rows]).swapaxes(-1, -2)[..., None]
        found = sum(part[0] * weight for part, weight in zip(parts, weights, strict=True))
        np.testing.assert_allclose(found, o[:, rows], atol=1e-12)


@pytest.mark.parametrize("attention", [reference.attention, rawattn.attention_varlen], ids=["reference", "cpu"])
def test_packed_sequences_begin_at_the_same_position(attention: Any) -> None:
    rng, options = np.random.default_rng(0), {"causal": True, "window": (6, 0), "q_offset": 9, "kv_offset": 4}
    q, k, v = rng.standard_normal((3, 30, 2, 8))
    ends = np.array([0, 11, 30], np.int32), np.array([0, 17, 30], np.int32)
    found = attention(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], **options)
    for i in range(2):
        rows, keys = (slice(*each[i : i + 2]) for each in ends)
        np.testing.assert_allclose(found[rows], reference.attention(q[None, rows], k[None, keys], v[None, keys], **options)[0])


def test_gradients_of_a_part() -> None:
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 20, 1, 8))
    for options in WHOLE.values():
        whole = reference.attention_backward(do[:, 12:], q[:, 12:], k, v, q_offset=12, **options)
        padded = reference.attention_backward(np.where(np.arange(20)[:, None, None] < 12, 0, do), q, k, v, **options)
        for x, y in zip(whole, (padded[0][:, 12:], *padded[1:]), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-13)


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("wrong", [True, -1, 1.0, "1", np.array(1), np.int64(-2), LONGEST], ids=repr)
def test_wrong_offsets(name: str, wrong: Any) -> None:
    q = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(ProblemError, match=rf"{name} is .*it must be") as caught:
        rawattn.attention(q, q, q, **{name: wrong})
    assert ("give int(" in str(caught.value)) == isinstance(wrong, np.ndarray)


def test_the_last_position() -> None:
    """Rows may reach the position that kernels count up to, and one more is refused."""
    for name, (q_len, kv_len) in itertools.product(OFFSETS, ((7, 5), (LONGEST - 1, 3), (3, LONGEST - 1))):
        last = LONGEST - 1 - (q_len if name == "q_offset" else kv_len)
        op = forward(BF16, 1, q_len, kv_len, 1, 1, 64, 64, **{name: last})
        select.select(op, TYPICAL["sm_90a"])  # whose lengths and offsets are rounded up
        with pytest.raises(ProblemError, match=f"{name} is {last + 1}; .* from 0 to {last}"):
            replace(op, **{name: last + 1})


def test_none_is_not_0() -> None:
    """Without offsets the last query stands at the last key; with offsets of 0 the first at the first."""
    assert Spec.of().offsets is None
    assert Spec.of(q_offset=np.int32(3)).offsets == (3, 0) and Spec.of(kv_offset=2).offsets == (0, 2)
    q, k = np.ones((1, 1, 1, 8)), np.ones((1, 4, 1, 8))
    v = np.arange(4.0).repeat(8).reshape(1, 4, 1, 8)
    for options, mean in (({}, 1.5), ({"q_offset": 0}, 0.0), ({"kv_offset": 0}, 0.0), ({"q_offset": 1, "kv_offset": 0}, 0.5)):
        for attention in (rawattn.attention, reference.attention):
            np.testing.assert_allclose(attention(q, k, v, causal=True, **options), mean)


def test_flops_count_positions() -> None:
    op = forward(BF16, 1, 16, 16, 1, 1, 64, 64, mask=Causal(), q_offset=16)
    assert op.pairs == 256 and replace(op, q_offset=0).pairs == 136 and replace(op, kv_offset=16).pairs == 136
    assert replace(op, mask=Full(), kv_offset=900).pairs == 256
    assert "offsets 16 and 0" in str(op)

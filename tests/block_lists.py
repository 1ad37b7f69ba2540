"""Lists of blocks of keys for tests, benign and adversarial, and attention with its gradients over them by the dense formula, in
which a pair counts as often as its block is listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import rawattn
from rawattn.variant.element import ELEMENTS

Array = npt.NDArray[Any]
WRONG = (2147480000, -2, -2147480000)  # no block of any sequence
KINDS = ("random", "ascending", "descending", "duplicates", "one", "empty", "some empty", "wrong", "all")


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """A call with gradients; sequences are packed where their lengths differ. ``kind`` says what lists are like."""

    kind: str = "random"
    most: int = 3
    block_q: int = 64
    block_kv: int = 64
    lengths: tuple[tuple[int, int], ...] = ((130, 200),)
    heads: int = 2
    kv_heads: int = 1
    list_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "bf16"
    counts: bool = False
    causal: bool = False
    window: Any = None
    softcap: float | None = None
    sinks: bool = False
    used: Any = None  # q_lens and kv_lens
    dlse: bool = False
    seed: int = 0

    @property
    def packed(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def element(self) -> Any:
        return ELEMENTS[self.dtype]

    def used_of(self, i: int) -> tuple[int, int]:
        """The rows of q and of k that a sequence uses."""
        return self.lengths[i] if self.used is None else (self.used[0][i], self.used[1][i])

    def lists(self) -> tuple[Array, Array | None]:
        """The numbers, and how many of them count."""
        rng = np.random.default_rng((7, self.seed))
        blocks = max(-(-n // self.block_q) for n, _ in self.lengths)
        numbers = np.full((len(self.lengths), self.list_heads, blocks, self.most), -1, np.int64)
        for i in range(len(self.lengths)):
            there = -(-self.used_of(i)[1] // self.block_kv)
            if there:
                numbers[i] = self._numbers_of(rng, numbers[i].shape, there)
        counts = rng.integers(0, self.most + 1, numbers.shape[:3]).astype(np.int32) if self.counts else None
        return numbers.astype(np.int32), counts

    def _numbers_of(self, rng: Any, shape: tuple[int, ...], there: int) -> Array:
        numbers = rng.integers(0, there, shape)
        if self.kind in ("ascending", "descending"):
            numbers = np.sort(numbers)[..., :: 1 if self.kind == "ascending" else -1]
        elif self.kind == "duplicates":
            numbers = np.where(rng.random(shape) < 0.7, numbers[..., :1], numbers)
        elif self.kind == "one":
            numbers = np.full(shape, there - 1)
        elif self.kind == "empty":
            numbers = np.full(shape, -1)
        elif self.kind == "some empty":
            numbers = np.where((rng.random(shape[:2]) < 0.5)[..., None], -1, np.where(rng.random(shape) < 0.5, -1, numbers))
        elif self.kind == "wrong":
            numbers = np.where(rng.random(shape) < 0.4, rng.choice([*WRONG, there], shape), numbers)
        elif self.kind == "all":
            numbers = np.broadcast_to(np.where(np.arange(self.most) < there, np.arange(self.most), -1), shape)
        return np.asarray(numbers)

    def arrays(self) -> list[tuple[Array, ...]]:
        """q, k, v, do and dlse of each sequence."""
        rng, found = np.random.default_rng((3, self.seed)), []
        number = self.element.dtype
        for q_len, kv_len in self.lengths:
            shapes = (
                (q_len, self.heads, self.head_dim),
                (kv_len, self.kv_heads, self.head_dim),
                (kv_len, self.kv_heads, self.head_dim_v),
            )
            q, k, v, do = (rng.standard_normal(s).astype(number) for s in (*shapes, (q_len, self.heads, self.head_dim_v)))
            found.append((q, k, v, do, rng.standard_normal((self.heads, q_len)).astype(self.element.lse_dtype)))
        return found

    @property
    def sink_logits(self) -> Array | None:
        return np.linspace(-1, 2, self.heads).astype(self.element.lse_dtype) if self.sinks else None

    def times(self, i: int) -> Array:
        """Says how often each pair of a sequence counts: (heads, q_len, kv_len)."""
        (q_len, kv_len), (used, there), (numbers, counts) = self.lengths[i], self.used_of(i), self.lists()
        found = np.zeros((self.heads, q_len, kv_len))
        for h in range(self.heads):
            for j in range(min(numbers.shape[2], -(-used // self.block_q))):
                at = i, h * self.list_heads // self.heads, j
                for n in numbers[at][: self.most if counts is None else counts[at]].tolist():
                    if 0 <= n < -(-there // self.block_kv):
                        found[h, j * self.block_q : (j + 1) * self.block_q, n * self.block_kv : (n + 1) * self.block_kv] += 1
        found[:, used:], found[:, :, there:] = 0, 0
        apart = np.arange(kv_len) - np.arange(q_len)[:, None] - (there - used)
        if self.causal:
            found *= apart <= 0
        if self.window is not None:
            found *= (apart >= -self.window[0]) & (apart <= self.window[1])
        return found

    def wanted(self, i: int) -> dict[str, Array]:
        """o, lse and gradients of a sequence in float64."""
        q, k, v, do, dlse = (x.astype(np.float64) for x in self.arrays()[i])
        group, scale, times = self.heads // self.kv_heads, self.head_dim**-0.5, self.times(i)
        keys, values = np.repeat(k, group, 1), np.repeat(v, group, 1)
        s, slope = scale * np.einsum("qhd,khd->hqk", q, keys), 1.0
        if self.softcap:
            t = np.tanh(s / self.softcap)
            s, slope = self.softcap * t, 1 - t * t
        sink = np.full(self.heads, -np.inf) if self.sink_logits is None else self.sink_logits.astype(np.float64)
        top = np.maximum(np.where(times > 0, s, -np.inf).max(2, initial=-np.inf), sink[:, None])
        top = np.where(np.isfinite(top), top, 0.0)
        e, of_sink = times * np.exp(np.minimum(s - top[..., None], 0)), np.exp(sink[:, None] - top)
        total = e.sum(2) + of_sink
        with np.errstate(divide="ignore"):
            lse = top + np.log(total)
        p = e / np.where(total == 0, 1, total)[..., None]
        o = np.einsum("hqk,khd->qhd", p, values)
        delta = np.einsum("qhd,qhd->hq", do, o) - (dlse if self.dlse else 0)
        ds = p * (np.einsum("qhd,khd->hqk", do, values) - delta[..., None]) * slope
        found = {"o": o, "lse": lse, "dq": scale * np.einsum("hqk,khd->qhd", ds, keys)}
        for name, x in (("dk", scale * np.einsum("hqk,qhd->khd", ds, q)), ("dv", np.einsum("hqk,qhd->khd", p, do))):
            found[name] = x.reshape(len(k), self.kv_heads, group, x.shape[2]).sum(2)
        used = self.used_of(i)[0]  # what other rows have reaches no gradient
        weight = of_sink / np.where(total == 0, 1, total)
        return found | {"dsinks": -(weight * delta)[:, :used].sum(1)}

    def inputs(self, put: Callable[[Array], Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[Any, Any]]:
        """q, k, v by name, the options of a call, and do and dlse, of arrays that ``put`` brings to a library."""
        join, numbers, counts = np.concatenate if self.packed else np.stack, *self.lists()
        arrays = [*zip(*self.arrays(), strict=True)]
        q, k, v, do = (put(join(x)) for x in arrays[:4])
        dlse = put(np.concatenate(arrays[4], 1) if self.packed else np.stack(arrays[4]))
        keys = rawattn.Blocks(put(numbers), None if counts is None else put(counts), self.block_q, self.block_kv)
        options: dict[str, Any] = {"keys": keys, "causal": self.causal, "window": self.window, "softcap": self.softcap}
        if self.packed:
            starts = (np.cumsum([0, *n]).astype(np.int32) for n in zip(*self.lengths, strict=True))
            options |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), map(put, starts), strict=True))
        if self.used is not None:
            options |= {name: put(np.array(x, np.int32)) for name, x in zip(("q_lens", "kv_lens"), self.used, strict=True)}
        if self.sinks:
            options["sinks"] = put(self.sink_logits)
        return {"q": q, "k": k, "v": v}, options, (do, dlse if self.dlse else None)

    def forward(self, put: Callable[[Array], Any], **more: Any) -> tuple[Any, Any]:
        """o and lse of the call."""
        qkv, options, _ = self.inputs(put)
        attend = rawattn.attention_varlen if self.packed else rawattn.attention
        found: tuple[Any, Any] = attend(**qkv, **options, return_lse=True, **more)
        return found

    def backward(self, put: Callable[[Array], Any], o: Any, lse: Any, **more: Any) -> tuple[Any, ...]:
        """The gradients of the call."""
        qkv, options, (do, dlse) = self.inputs(put)
        found: tuple[Any, ...] = rawattn.attention_backward(do, *qkv.values(), o, lse, dlse=dlse, **options, **more)
        return found

    def check(self, names: tuple[str, ...], results: tuple[Any, ...], tolerance: float | None = None) -> None:
        """Compares results of these names with the formula."""
        errors = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-5, "fp64": 1e-11}
        tolerance = errors[self.dtype] if tolerance is None else tolerance
        wanted = [self.wanted(i) for i in range(len(self.lengths))]
        for name, x in zip(names, results, strict=True):
            x = np.asarray(x if isinstance(x, np.ndarray) else x.double().cpu().numpy(), np.float64)
            each = [w[name] for w in wanted]
            axis = 1 if name == "lse" else 0
            exact = sum(each) if name == "dsinks" else np.concatenate(each, axis) if self.packed else np.stack(each)
            bound = min(tolerance, 2e-3) if name == "lse" else tolerance
            size = 1.0 if name in ("o", "lse") else max(1.0, float(np.abs(exact).max(initial=0)))
            np.testing.assert_allclose(x, exact, atol=bound * size, rtol=bound, err_msg=name)

    def gradient_names(self) -> tuple[str, ...]:
        return "dq", "dk", "dv", *["dsinks"] * self.sinks


@st.composite
def block_cases(draw: Any, dtypes: tuple[str, ...] = ("fp64", "bf16"), wrong: bool = False) -> BlockCase:
    """Calls of all kinds."""
    kv_heads, group = draw(st.sampled_from(((1, 1), (1, 3), (2, 2))))
    kind = draw(st.sampled_from([kind for kind in KINDS if wrong or kind != "wrong"]))
    size = st.sampled_from((1, 63, 64, 65, 128, 200))
    lengths = draw(st.lists(st.tuples(size, size | st.just(0)), min_size=1, max_size=3))
    if draw(st.booleans()):
        lengths = lengths[:1] * len(lengths)
    used = tuple(tuple(draw(st.integers(0, n[i])) for n in lengths) for i in range(2)) if draw(st.booleans()) else None
    window = draw(st.none() | st.tuples(st.sampled_from((0, 5, 90)), st.sampled_from((0, 70))))
    return BlockCase(
        kind, draw(st.integers(1, 5)), draw(st.sampled_from((64, 128))), draw(st.sampled_from((64, 128))), tuple(lengths),
        kv_heads * group, kv_heads, draw(st.sampled_from((kv_heads, kv_heads * group))), 16, 8, draw(st.sampled_from(dtypes)),
        draw(st.booleans()), draw(st.booleans()), window, draw(st.none() | st.just(0.7)), draw(st.booleans()), used,
        draw(st.booleans()), draw(st.integers(0, 9)),
    )  # fmt: skip


CASES = {
    **{kind: BlockCase(kind) for kind in KINDS},
    "causal": BlockCase("duplicates", 4, causal=True, counts=True, lengths=((200, 200),) * 2),
    "heads": BlockCase(list_heads=4, heads=4, kv_heads=2, counts=True, causal=True),
    "window": BlockCase("all", 4, window=(70, 10), softcap=0.7),
    "sinks": BlockCase("some empty", sinks=True, dlse=True),
    "packed": BlockCase("duplicates", lengths=((130, 200), (0, 5), (64, 0), (70, 70)), causal=True, counts=True),
    "lengths": BlockCase("all", 4, lengths=((130, 200),) * 2, used=((65, 130), (200, 101)), causal=True),
    "blocks of 128": BlockCase("duplicates", 3, 128, 128, ((300, 330),), causal=True),
    "64 x 128": BlockCase("duplicates", 3, 64, 128, ((130, 330),)),
    "128 x 64": BlockCase("wrong", 4, 128, 64, ((300, 200),), counts=True),
    "one block each": BlockCase("random", 1, lengths=((460, 256),), head_dim=128, head_dim_v=128, heads=1),
    "head_dim 128": BlockCase("descending", 3, head_dim=128, head_dim_v=128, heads=1, causal=True),
}

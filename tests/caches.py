"""Caches for tests: pools full of NaN but for the keys of the sequences, tables full of nonsense but for their pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import rawattn
from rawattn.operation.spec import make_mask
from rawattn.reference.records import dequantize, quantize
from rawattn.testing import _move
from rawattn.variant.element import ELEMENTS, FP8, FP8_DS_MLA, KV_ELEMENTS
from rawattn.variant.mask import FromKey

Array = npt.NDArray[Any]
NONSENSE = 2147480000
FORMS = ("dense", "table", "indptr")
POOLS = ("apart", "interleaved", "shared")
SCALES = ("", "number", "all", "heads", "sequences", "each")


@dataclasses.dataclass(frozen=True)
class Cached:
    """Sequences over a cache, by (q_len, kv_len). ``pool`` says how k and v lie: in arrays of their own, side by side in each
    row, or v as the first columns of k."""

    lengths: tuple[tuple[int, int], ...] = ((1, 20),)
    ragged: bool = True
    form: str = "table"
    page_size: int = 4
    layout: str = "NHD"
    pool: str = "apart"
    dtype: str = "fp32"
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    head_dim_v: int = 16
    causal: Any = True
    window: Any = None
    softcap: float | None = None
    begins: tuple[int, ...] | None = None
    sinks: bool = False
    seed: int = 0
    device: Any = "cpu"
    whole: bool = False  # keys before the first that counts are there, too
    kv_dtype: str = ""  # of the cache; "": that of q
    scales: tuple[str, str] = ("", "")  # of k and v: "" for 1, "number", or what an array is for: SCALES

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def normal(self, *shape: int, seed: int = 0) -> Array:
        return np.random.default_rng((self.seed, seed)).standard_normal(shape).astype(ELEMENTS[self.dtype].dtype)

    def counts(self) -> list[int]:
        """Pages of each sequence."""
        return [1 if self.form == "dense" else -(-kv // self.page_size) for _, kv in self.lengths]

    def pages(self) -> list[Array]:
        """The pages of each sequence, in any order; of a dense cache its own."""
        return _pages(self)

    def pools(self) -> tuple[Array, Array]:
        """k and v full of NaN, in the layout."""
        element = KV_ELEMENTS[self.kv_dtype or self.dtype].dtype
        pages = sum(self.counts()) + 3
        shape = (pages, self.page_size, self.kv_heads) if self.layout == "NHD" else (pages, self.kv_heads, self.page_size)
        if self.pool == "interleaved":
            both = np.full((*shape, self.head_dim + self.head_dim_v), np.nan, element)
            return both[..., : self.head_dim], both[..., self.head_dim :]
        k = np.full((*shape, self.head_dim), np.nan, element)
        return k, k[..., : self.head_dim_v] if self.pool == "shared" else np.full((*shape, self.head_dim_v), np.nan, element)

    def row(self, pool: Array, i: int, j: int) -> Array:
        """Key j of sequence i, (kv_heads, columns)."""
        page, at = self.pages()[i][j // self.page_size], j % self.page_size
        return pool[page, at] if self.layout == "NHD" else pool[page, :, at]

    def mask(self, i: int) -> Any:
        causal = self.causal if isinstance(self.causal, bool) else bool(self.causal[i])
        mask = make_mask(causal, self.window, None)
        return mask if self.begins is None else FromKey(mask, self.begins[i])

    def kept(self, i: int) -> range:
        """The keys of sequence i from the first to the last that a query keeps."""
        q_len, kv_len = self.lengths[i]
        if self.whole:
            return range(kv_len)
        begin, end = self.mask(i).interval(np.arange(q_len), q_len, kv_len)
        some = begin < end
        return range(begin[some].min(), end[some].max()) if some.any() else range(0)

    def step_arrays(self, nonsense_before: bool = False) -> dict[str, Array]:
        """The arguments of Step. With ``nonsense_before``, pages before the first key that counts are nonsense, too."""
        found: dict[str, Any] = {}
        pages = [x.astype(np.int32) for x in self.pages()]
        for i, own in enumerate(pages):
            if nonsense_before:
                own[: self.kept(i).start // self.page_size if len(self.kept(i)) else len(own)] = -NONSENSE
        if self.form == "indptr":
            found["indptr"] = np.cumsum([2, *self.counts()], dtype=np.int32)
            found["indices"] = np.array([NONSENSE] * 2 + [x for own in pages for x in own] + [-1], np.int32)
            found["last_page_len"] = np.array([(kv - 1) % self.page_size + 1 if kv else -7 for _, kv in self.lengths], np.int32)
        else:
            found["kv_lens"] = np.array([kv for _, kv in self.lengths], np.int32)
        if self.form == "table":
            more = 2 if self.page_size & (self.page_size - 1) == 0 else 0
            found["page_table"] = np.full((len(pages), max(self.counts(), default=0) + more), NONSENSE, np.int32)
            for row, own in zip(found["page_table"], pages, strict=True):
                row[: len(own)] = own
        if self.ragged:
            found["cu_seqlens_q"] = np.cumsum([0, *(q for q, _ in self.lengths)], dtype=np.int32)
        if self.begins is not None:
            found["kv_begin"] = np.array(self.begins, np.int32)
        if not isinstance(self.causal, bool):
            found["causal"] = np.array(self.causal, np.int32)
        return found

    def step(self, library: str = "numpy", **changes: Any) -> rawattn.Step:
        found = {
            name: _move(x, library, self.device) for name, x in self.step_arrays(changes.pop("nonsense_before", False)).items()
        }
        found = {"causal": self.causal, **found, **changes}
        return rawattn.Step.from_indptr(**found) if self.form == "indptr" else rawattn.Step(**found)

    def rows(self, heads: int, columns: int, seed: int) -> Array:
        """Rows of all sequences as the call takes them."""
        if self.ragged:
            return self.normal(sum(q for q, _ in self.lengths), heads, columns, seed=seed)
        return self.normal(len(self.lengths), self.lengths[0][0] if self.lengths else 1, heads, columns, seed=seed)

    def of(self, rows: Array, i: int) -> Array:
        """The rows of a sequence."""
        if not self.ragged:
            return rows[i]
        first = sum(q for q, _ in self.lengths[:i])
        return rows[first : first + self.lengths[i][0]]

    def stored(self, i: int) -> tuple[Array, Array]:
        """k and v of a sequence, in order, as a cache holds them."""
        element = KV_ELEMENTS[self.kv_dtype or self.dtype].dtype
        k = self.normal(self.lengths[i][1], self.kv_heads, self.head_dim, seed=100 + i).astype(element)
        v = self.normal(self.lengths[i][1], self.kv_heads, self.head_dim_v, seed=200 + i).astype(element)
        return k, k[..., : self.head_dim_v] if self.pool == "shared" else v

    def keys(self, i: int) -> tuple[Array, Array]:
        """k and v of a sequence, in order."""
        k, v = self.stored(i)
        if not self.kv_dtype:
            return k, v
        scales = (np.broadcast_to(x, (len(self.lengths), self.kv_heads))[i][:, None] for x in self.scale_values())
        k, v = (x.astype(np.float64) * scale for x, scale in zip((k, v), scales, strict=True))
        return k, v

    def scale_values(self) -> tuple[Array, Array]:
        """Returns what the cache's k and v are multiplied by, to be broadcast to sequences and heads."""
        batch, heads = len(self.lengths), self.kv_heads
        shapes = {"": (), "number": (), "all": (1,), "heads": (heads,), "sequences": (batch, 1), "each": (batch, heads)}
        rng = np.random.default_rng((self.seed, 9))
        k, v = (np.exp(rng.uniform(-1, 1, shapes[x])).astype(np.float32) if x else np.float32(1) for x in self.scales)
        return k, v

    def cache(self, library: str = "numpy") -> rawattn.KVCache:
        """The cache that holds the keys that count."""
        k, v = self.pools()
        for i in range(len(self.lengths)):
            keys = self.stored(i)
            for j in self.kept(i):
                for pool, x in zip((k, v), keys, strict=True):
                    self.row(pool, i, j)[...] = x[j]
        return self.made(k, v, library)

    def made(self, k: Array, v: Array, library: str = "numpy") -> rawattn.KVCache:
        """A cache of pools that lie as those of ``pools``."""
        scales = [
            _move(x, library, self.device) if kind in SCALES[2:] else float(x)
            for kind, x in zip(self.scales, self.scale_values(), strict=True)
        ]
        if library == "numpy" or self.pool == "apart":
            return rawattn.KVCache(_move(k, library, self.device), _move(v, library, self.device), self.layout, *scales)
        whole = _move(k.base if self.pool == "interleaved" else k, library, self.device)
        if self.pool == "interleaved":
            return rawattn.KVCache(whole[..., : self.head_dim], whole[..., self.head_dim :], self.layout, *scales)
        return rawattn.KVCache(whole, whole[..., : self.head_dim_v], self.layout, *scales)

    def sink_logits(self) -> Array | None:
        return self.normal(self.heads, seed=3).astype(ELEMENTS[self.dtype].lse_dtype) if self.sinks else None


@dataclasses.dataclass(frozen=True)
class Recorded(Cached):
    """Sequences over a cache of records, whose scales are any numbers. Kernels round what these say to the format of q."""

    heads: int = 16
    head_dim: int = 576
    head_dim_v: int = 512
    dtype: str = "bf16"

    def pools(self) -> tuple[Array, Array]:
        """Records of NaN, twice the same array."""
        records = np.full((sum(self.counts()) + 3, self.page_size, 1, FP8_DS_MLA.bytes), 255, np.uint8)
        return records, records

    def stored(self, i: int) -> tuple[Array, Array]:
        latent = self.normal(self.lengths[i][1], 1, self.head_dim, seed=100 + i).astype(np.float32)
        records = quantize(FP8_DS_MLA, latent)
        scales = np.random.default_rng((self.seed, i)).uniform(0.002, 0.02, (*records.shape[:2], 4)).astype(np.float32)
        records[1::2, :, 512:528] = scales[1::2].view(np.uint8)
        return records, records

    def keys(self, i: int) -> tuple[Array, Array]:
        k = dequantize(FP8_DS_MLA, self.stored(i)[0]).astype(ELEMENTS[self.dtype].dtype)
        return k, k[..., : self.head_dim_v]

    def made(self, k: Array, v: Array, library: str = "numpy") -> rawattn.KVCache:
        return rawattn.KVCache.records(_move(k, library, self.device)[:, :, 0])


@functools.lru_cache(maxsize=64)
def _pages(case: Cached) -> list[Array]:
    if case.form == "dense":
        return [np.array([i]) for i in range(len(case.lengths))]
    order = case.rng().permutation(sum(case.counts()) + 3)
    return np.split(order, np.cumsum(case.counts()))[:-1]


_SCALE = st.sampled_from(SCALES)
FORMATS = st.just({}) | st.fixed_dictionaries({"kv_dtype": st.sampled_from(tuple(FP8)), "scales": st.tuples(_SCALE, _SCALE)})


@st.composite
def caches(draw: Any, new: bool = False) -> Cached:
    """Any sequences over any cache. ``new`` has all queries among the keys, as ``append`` needs, or no key."""
    form, ragged = draw(st.sampled_from(FORMS)), draw(st.booleans())
    page_size = draw(st.sampled_from((1, 2, 4, 8, 16, 64))) if form != "dense" else 50
    longest = 50
    batch = draw(st.integers(0, 4))
    q_lens = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    q_lens = q_lens if ragged else q_lens[:1] * batch
    kv_lens = [draw(st.sampled_from((0, 1, 15, 16, 17, longest)) | st.integers(0, longest)) for _ in range(batch)]
    if new:
        kv_lens = [max(q, kv) if kv else 0 for q, kv in zip(q_lens, kv_lens, strict=True)]
    kv_heads, head_dim = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((2, 8, 18, 64)))
    head_dim_v = draw(st.sampled_from((1, 8, 64)))
    pool = draw(st.sampled_from(POOLS if head_dim_v <= head_dim else POOLS[:2]))
    flags = st.tuples(*[st.sampled_from((0, 1, 5))] * batch)
    begins = st.tuples(*[st.integers(0, kv) if kv else st.integers(-9, longest) for kv in kv_lens])
    side = st.none() | st.integers(0, longest)
    return Cached(
        lengths=tuple(zip(q_lens, kv_lens, strict=True)), ragged=ragged, form=form, page_size=page_size,
        layout=draw(st.sampled_from(("NHD", "HND"))), pool=pool, dtype=draw(st.sampled_from(tuple(ELEMENTS))),
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))), kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
        causal=draw(st.booleans() | flags), window=draw(st.none() | st.tuples(side, side)),
        softcap=draw(st.none() | st.floats(0.5, 50.0)), sinks=draw(st.booleans()),
        begins=draw(st.none() | begins), seed=draw(st.integers(0, 2**32 - 1)),
        **draw(FORMATS),
    )  # fmt: skip

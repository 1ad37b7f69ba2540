"""Named sets of cases, and what a timing says about a case: a short label, its operation and floating-point operations."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

import rawattn
from rawattn.array.array import contiguous
from rawattn.operation import AttentionKVCache, Backward, Forward
from rawattn.operation.captures import FLOATS, with_captured
from rawattn.operation.keys import KeyLists, ListSizes
from rawattn.operation.kvcache import EVEN
from rawattn.operation.spec import Spec
from rawattn.testing import Case
from rawattn.variant.element import FP8, FP8_DS_MLA
from rawattn.variant.mask import kept_pairs

from . import functions

MASKS = (False, True)  # causal


@dataclasses.dataclass(frozen=True)
class BackwardCase(Case):
    """A case whose gradients are timed: dq, dk and dv of do, o and lse; ``kernel`` computes them, "" for the library's choice."""

    kernel: str = ""


@dataclasses.dataclass(frozen=True)
class ConstantTimeCase(Case):
    """A case that is asked for with ``constant_time``, which peers have not."""


@dataclasses.dataclass(frozen=True)
class FunctionCase(Case):
    """A case whose mask or score is the Python function of this name in ``functions.FUNCTIONS``."""

    function: str = ""

    @property
    def op(self) -> Forward:
        op, role = super().op, functions.FUNCTIONS[self.function].role
        option: Any = functions.option(self.function, self)
        spec: Any = dataclasses.replace(op.spec, **{role: option})
        captured = {each.name: contiguous(each.shape, each.element) for each in option.arrays}
        return dataclasses.replace(op, spec=spec, layout=with_captured(op.layout, spec, captured))

    @property
    def built_in(self) -> Case | None:
        """The case that computes the same without a function; of a score the one without it. None where there is none."""
        found = functions.FUNCTIONS[self.function].built_in(self)
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Case)}
        return None if found is None else Case(**{**own, **found})


@dataclasses.dataclass(frozen=True)
class FunctionBackwardCase(FunctionCase, BackwardCase):
    """A case with a function whose gradients are timed: dq, dk, dv, and those of the arrays of floats that its score captured."""

    @property
    def built_in(self) -> Case | None:
        found = super().built_in
        return None if found is None else backward([found])[0]


@dataclasses.dataclass(frozen=True)
class BlocksCase(Case):
    """A case in which each block of queries and each head has a list of blocks of keys, of ``block`` rows each: ``kept`` of them,
    at random, or ``near``, those around its own place, as neighbours have in common."""

    block: int = 64
    kept: float = 0.1
    near: bool = False

    @property
    def most(self) -> int:
        """The blocks of a list."""
        return max(1, round(self.kept * -(-self.kv_len // self.block)))

    @property
    def op(self) -> Forward:
        op = super().op
        spec = dataclasses.replace(op.spec, keys=KeyLists(False, self.block, self.block))
        return dataclasses.replace(op, spec=spec, keys=ListSizes(self.most, self.heads, -(-self.q_len // self.block)))

    def lists(self, device: str, seed: int) -> Any:
        """Lists that rise."""
        import torch

        blocks, count = -(-self.q_len // self.block), -(-self.kv_len // self.block)
        random = torch.Generator(device).manual_seed(seed)
        weights = torch.rand(self.batch, self.heads, blocks, count, device=device, generator=random)
        if self.near:
            places = torch.arange(blocks, device=device)[:, None] - torch.arange(count, device=device)
            weights = weights * self.most / 4 - places.abs()
        return rawattn.Blocks(weights.topk(self.most).indices.sort().values.int(), None, self.block, self.block)


@dataclasses.dataclass(frozen=True)
class BlocksBackwardCase(BlocksCase, BackwardCase):
    """The same, whose gradients are timed."""


SCALES = 1.25, 0.75  # of keys and values in eight bits


@dataclasses.dataclass(frozen=True)
class StepCase(Case):
    """A causal step in bf16 over the caches of sequences; ``page`` is 0 for a dense cache, ``cache`` its number format.
    ``chunks`` are the queries of the last sequences, which have more than the others. In a ``latent`` cache values are the first
    columns of keys; ``split`` is the call's. Where it has ``topk``, each query has a list of so many rows of the cache."""

    kv_lens: tuple[int, ...] = ()
    page: int = 0
    cache: str = "bf16"
    chunks: tuple[int, ...] = ()
    latent: bool = False
    split: str | int = "auto"
    topk: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.window is None else {"window": self.window}

    @property
    def q_lens(self) -> tuple[int, ...]:
        """The queries of each sequence."""
        return (*(self.q_len,) * (self.batch - len(self.chunks)), *self.chunks)

    @property
    def has_records(self) -> bool:
        """Says whether the cache has records."""
        return self.cache == FP8_DS_MLA.name

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value."""
        if self.has_records:
            return FP8_DS_MLA.bytes
        columns = self.head_dim + (0 if self.latent else self.head_dim_v)
        return (2 if self.cache == "bf16" else 1) * self.kv_heads * columns

    @property
    def pool_shape(self) -> tuple[int, int, int]:
        """Pages, those of a sequence, and keys in each."""
        width = -(-self.kv_len // self.page) if self.page else 1
        return self.batch * width, width, self.page or self.kv_len

    @property
    def pool_bytes(self) -> int:
        return self.pool_shape[0] * self.pool_shape[2] * self.key_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are read, those that are listed often once."""
        if self.topk:
            return min(self.pool_bytes, self.key_bytes * sum(self.q_lens) * self.topk)
        left = self.kv_len if self.window is None else self.window[0] or 0
        return self.key_bytes * sum(min(kv, left + q) for q, kv in zip(self.q_lens, self.kv_lens, strict=True))

    @property
    def op(self) -> Any:
        pages, width, rows = self.pool_shape
        of_q = (sum(self.q_lens),) if self.chunks else (self.batch, self.q_len)
        arrays = {"q": contiguous((*of_q, self.heads, self.head_dim), "bf16")}
        for name, columns in (("k_cache", self.head_dim), ("v_cache", self.head_dim_v)):
            arrays[name] = contiguous((pages, rows, self.kv_heads, columns), "bf16" if self.has_records else self.cache)
        if self.has_records:
            arrays |= {"k_cache": contiguous((pages, rows, 1, FP8_DS_MLA.bytes), "uint8")}
            del arrays["v_cache"]
        if self.topk:
            arrays["keys"] = contiguous((sum(self.q_lens), self.topk), "int32")
            return AttentionKVCache.of(arrays, Spec(keys=KeyLists(True, 1, 1, True)), max(self.q_lens), latent=self.latent)
        arrays |= {"kv_lens": contiguous((self.batch,), "int32")}
        arrays |= {"page_table": contiguous((self.batch, width), "int32")} if self.page else {}
        arrays |= {"cu_seqlens_q": contiguous((self.batch + 1,), "int32")} if self.chunks else {}
        scales = SCALES if self.cache in FP8 else (1.0, 1.0)
        spec, split_keys = Spec.of(causal=True, window=self.window), {"auto": 0, "even": EVEN}.get(str(self.split), self.split)
        return AttentionKVCache.of(arrays, spec, max(self.q_lens), None, int(split_keys), scales, self.latent)


def step(
    kv_lens: tuple[int, ...], page: int = 0, q_len: int = 1, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, **more: Any
) -> StepCase:
    """A step over the caches of sequences of these lengths, after it."""
    own: dict[str, Any] = {"batch": len(kv_lens), "kv_len": max(kv_lens), "kv_lens": kv_lens, "page": page, "q_len": q_len}
    own |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim, "causal": True}
    return StepCase(**{**own, **more})


def latent(batch: int, q_len: int, heads: int, kv_len: int, page: int = 64, **more: Any) -> StepCase:
    """A step over latent caches as DeepSeek's models have them."""
    return step((kv_len,) * batch, page, q_len, heads, 1, 576, head_dim_v=512, latent=True, **more)


def zipf(count: int, total: int) -> tuple[int, ...]:
    """``count`` lengths that fall like 1 / n, of about this total."""
    weights = [1 / n for n in range(1, count + 1)]
    return tuple(max(1, int(total * w / sum(weights))) for w in weights)


def dense(batch: int, length: int, heads: int, head_dim: int, causal: bool, **more: Any) -> Case:
    """A case with one length and one head_dim unless ``more`` says otherwise."""
    fields = {"q_len": length, "kv_len": length, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "head_dim_v": head_dim}
    return Case(batch=batch, causal=causal, **{**fields, **more})


def packed(count: int, head_dim: int, tokens: int = 16384, seed: int = 0, **more: Any) -> Case:
    """Causal attention of ``count`` sequences whose lengths are log-normal with sigma 1 and sum to ``tokens``, with 2048 columns
    of all heads unless ``more`` says otherwise."""
    weights = np.random.default_rng([seed, count]).lognormal(sigma=1.0, size=count)
    cuts = np.round(np.cumsum(weights) / weights.sum() * tokens).astype(int)
    lengths = tuple((int(n), int(n)) for n in np.diff(cuts, prepend=0))
    heads = more.pop("heads", 2048 // head_dim)
    return dense(1, 0, heads, head_dim, True, lengths=lengths, kv_heads=heads, **more)


def grid(*lengths: int) -> list[Case]:
    """The grid of the FlashAttention papers: 16k tokens, hidden size 2048."""
    return [dense(16384 // s, s, 2048 // d, d, causal) for d in (64, 128, 256) for s in lengths for causal in MASKS]


def backward(cases: list[Case], kernel: str = "") -> list[Case]:
    """The same cases, of which the backward is timed, by this kernel if one is named."""
    return [_backward(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)}, kernel=kernel) for case in cases]


def _backward(**fields: Any) -> BackwardCase:
    made: Any = FunctionBackwardCase if "function" in fields else BlocksBackwardCase if "block" in fields else BackwardCase
    found: BackwardCase = made(**fields)
    return found


def constant_time(case: Case) -> Case:
    """The same case, asked for with constant_time."""
    return ConstantTimeCase(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})


def of_functions(names: tuple[str, ...], lengths: tuple[int, ...], head_dims: tuple[int, ...] = (128, 64)) -> list[Case]:
    """Functions on 16k tokens, or one sequence where that is longer, of hidden size 2048."""
    shapes = [(max(1, 16384 // n), n, 2048 // d, d) for d in head_dims for n in lengths]
    plain = [dense(*shape, causal=False) for shape in shapes]
    own = [{f.name: getattr(case, f.name) for f in dataclasses.fields(Case)} for case in plain]
    return [FunctionCase(**each, function=name) for each in own for name in names]


SMALL = [dense(b, s, h, 64, causal) for b, s, h in ((1, 512, 8), (4, 512, 16), (8, 512, 16), (1, 2048, 16)) for causal in MASKS]
HEAD_DIMS = ((80, 80), (96, 96), (112, 112), (192, 192), (192, 128))
KINDS: tuple[dict[str, Any], ...] = ({}, {"dtype": "fp16"}, {"softcap": 30.0})
SETS = {
    "paper": grid(512, 1024, 2048, 4096, 8192, 16384),
    "small": SMALL,
    "seeds": [dense(16, 4096, 96, d, causal) for d in (128, 64) for causal in MASKS] + SMALL,
    "heads": [dense(b, s, 16, d, c, head_dim_v=dv) for d, dv in HEAD_DIMS for b, s in ((4, 4096), (1, 16384)) for c in MASKS],
    "varlen": [packed(count, head_dim) for head_dim in (128, 64) for count in (8, 16, 32, 64)],
    "gqa": [  # and what else models use: windows
        *(dense(4, 4096, 32, 128, causal, kv_heads=kv_heads) for kv_heads in (8, 1) for causal in MASKS),
        dense(1, 16384, 16, 128, True, window=(1024, 0)),
        dense(4, 4096, 32, 128, True, kv_heads=8, window=(1024, 0)),
    ],
    "kinds": [  # fp16 and softcap, beside the same without
        dense(4, 4096, 2048 // d, d, causal, **more) for d in (64, 128, 256) for causal in MASKS for more in KINDS
    ],
    "fp32": [dense(2, 4096, 16, d, causal, dtype="fp32") for d in (64, 128) for causal in MASKS],
    "mla": [  # prefill of multi-head latent attention, its projections made
        *(dense(16384 // n, n, heads, 192, True, head_dim_v=128) for heads in (16, 128) for n in (4096, 16384)),
        *(packed(8, 192, heads=heads, head_dim_v=128) for heads in (16, 128)),
    ],
    "wide": [dense(1, 16384, 16, 512, causal) for causal in MASKS],  # heads above 256
    "smoke": [dense(1, 512, 8, 64, False), dense(4, 2048, 16, 128, True), packed(8, 128)],
    "gate": [*grid(1024, 4096), dense(1, 512, 8, 64, False), dense(4, 4096, 32, 128, True, kv_heads=8), packed(16, 128)],
}
LATENT = (  # sequences, queries, heads, keys
    (64, 1, 128, 4096), (64, 1, 128, 8192), (128, 1, 128, 8192), (128, 2, 128, 4096), (64, 1, 16, 4096), (128, 1, 16, 8192),
    (16, 1, 128, 32768), (1, 1, 128, 32768), (1, 1, 16, 8192),
)  # fmt: skip
PAGED = [(batch, 1, heads, kv_len) for batch, kv_len in ((64, 4096), (128, 8192)) for heads in (16, 128)]
SETS["mla-decode"] = [latent(*shape) for shape in LATENT]
SETS["mla-long"] = [latent(batch, 1, 128, keys) for keys in (32768, 131072) for batch in (1, 2, 4, 8, 16, 32, 64, 128)]
TOPK = (128, 2, 128, 32768), (64, 1, 16, 32768)
SETS["mla-lists"] = [latent(*shape, topk=2048) for shape in TOPK]
SETS["mla-records"] = [latent(*shape, topk=2048, cache=FP8_DS_MLA.name) for shape in TOPK]
SETS["mla-records"] += [latent(*shape, cache=FP8_DS_MLA.name) for shape in LATENT[:5:4]]
SETS["mla-decode-even"] = [latent(*shape, split="even") for shape in LATENT]
SETS["mla-decode-splits"] = [latent(*shape, split=keys) for shape in LATENT[:4] for keys in (4096, 8192)]  # fewer borders
SETS["mla-sparse"] = [latent(1, 4096, heads, 65536, topk=2048) for heads in (128, 64)]  # prefill of chosen keys, and steps
SETS["mla-sparse"] += [latent(batch, q_len, 128, 65536, topk=2048) for batch, q_len in ((1, 128), (1, 1))]
SETS["mla-pages"] = [latent(*shape, page=page) for shape in PAGED for page in (1, 64)]
SETS["wide-decode"] = [  # heads of 512 over caches, of Gemma 4 and DeepSeek-V4
    step((kv_len,) * n, 64, 1, heads, kv_heads, 512, split=split)
    for heads, kv_heads in ((32, 4), (16, 1)) for kv_len in (8192, 32768) for n in (1, 8, 64) for split in ("auto", 512)
]  # fmt: skip
SETS |= {  # of functions; a bias for each pair of 64k tokens would take 137 GB
    "masks": of_functions(functions.LISTS, (4096, 16384)),
    "scores": of_functions(functions.SCORES, (4096, 16384)),
    "functions": of_functions(("causal", "sliding", "documents", "neighbours", "blocks", "alibi", "pair_bias"), (4096,), (128,)),
    "masks-64k": of_functions(functions.LISTS, (65536,)),
    "scores-64k": of_functions(tuple(name for name in functions.SCORES if name != "pair_bias"), (65536,)),
}
SETS["paper-bwd"] = backward(SETS["paper"])
SETS["mla-bwd"] = backward(SETS["mla"])
SETS["wide-bwd"] = backward(SETS["wide"])
FEW_HEADS = [dense(1, n, h, 128, True, kv_heads=kv) for n, h, kv in ((8192, 8, 1), (4096, 32, 8))]  # of a layer on several GPUs
SETS["kinds-bwd"] = backward(
    [*SETS["kinds"], *SETS["gqa"], packed(16, 128), *(dense(4, 4096, 8, 192, c, head_dim_v=128) for c in MASKS), *FEW_HEADS]
)
FEW = (
    (16384, 1),
    (16384, 2),
    (5000, 4),
    (8192, 1),
    (8192, 2),
    (8192, 3),
    (32768, 1),
    (65536, 1),
    (4096, 1),
    (4096, 4),
    (2048, 1),
)
UNEVEN = [dense(b, n, h, 128, True, kv_heads=kv) for b, n, h, kv in ((2, 8192, 28, 4), (1, 16384, 28, 4), (1, 8192, 40, 8))]
GROUPS = [dense(b, n, h, 128, True, kv_heads=8) for b, n, h in ((1, 16384, 32), (2, 8192, 32), (1, 8192, 24), (4, 4096, 32))]
SETS["few-bwd"] = backward([dense(1, n, h, size, True) for size in (64, 96, 128) for n, h in FEW] + UNEVEN + GROUPS)
SETS["few-bwd"] += backward([dense(1, n, 1, size, False) for size in (64, 128) for n in (2048, 4096, 5000, 8192)])
VIDEO: dict[str, Any] = {
    "batch": 1,
    "q_len": 40768,
    "kv_len": 40768,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 128,
    "head_dim_v": 128,
}
SETS["blocks"] = [BlocksCase(**VIDEO, block=block, near=near) for block in (64, 128) for near in (False, True)]
SETS["blocks"] += [BlocksCase(**{**VIDEO, "head_dim": 64, "head_dim_v": 64}, block=64)]
SETS["blocks-bwd"] = backward(SETS["blocks"])
SETS["masks-bwd"] = backward(of_functions(("documents+causal", "sliding", "neighbours"), (4096,), (128,)))
SETS["intervals"] = of_functions((*functions.INTERVALS, *functions.DOCUMENTS), (4096, 16384))
SETS["intervals-bwd"] = backward(SETS["intervals"])
SETS["scores-bwd"] = backward(of_functions(("alibi", "pair_bias", "t5_table"), (4096,), (128,)))
SETS["fp32-bwd"] = backward(SETS["fp32"])
TRIANGLES = [(n, 4, 32, "triangle") for n in (256, 512, 1024, 2048)]  # N = S, heads, head_dim, and the bias's format
TRIANGLES += [(n, 4, 32, "triangle16") for n in (512, 1024)] + [(512, 8, 16, "triangle"), (512, 4, 64, "triangle")]
SETS["triangle"] = [FunctionCase("bf16", n, n, n, h, h, d, d, function=name) for n, h, d, name in TRIANGLES]
SETS["triangle"] += backward(SETS["triangle"])
SETS["gate"] += of_functions(("causal", "documents", "blocks", "alibi", "pair_bias"), (4096,))
SETS["gate"] += backward([*grid(1024, 4096), packed(16, 128)])
LAYER = (4, 4096, 16, 128, True)  # batch, length, heads, head_dim, causal
GATE_KINDS = [  # one of each that the sets above have not: of the forward ...
    dense(*LAYER, dtype="fp16"),
    dense(*LAYER, softcap=30.0),
    dense(*LAYER, window=(1024, 0)),
    constant_time(dense(*LAYER)),
    dense(8, 0, 32, 128, False, kv_heads=8, q_len=16, kv_len=8192),
    *backward(  # ... and of gradients
        [
            dense(4, 4096, 32, 128, True, kv_heads=8),
            dense(*LAYER, window=(1024, 0)),
            dense(4, 4096, 8, 192, True, head_dim_v=128),
            dense(1, 2048, 16, 64, True, dtype="fp32"),
        ]
    ),
    *backward([dense(4, 4096, 2048 // d, d, True) for d in (64, 128)], kernel="attn_bwd_mma"),
]
SETS["gate"] += GATE_KINDS


def load(names: str, file: str | None) -> list[Case]:
    """The cases of comma-separated sets, and of a JSON file: a list of objects with the fields of ``rawattn.testing.Case``."""
    cases = [case for name in filter(None, names.split(",")) for case in SETS[name]]
    if file:
        cases += [from_json(entry) for entry in json.loads(pathlib.Path(file).read_text())]
    return cases


def from_json(fields: dict[str, Any]) -> Case:
    """A case from what ``to_json`` gave."""
    fields = dict(fields)
    made: Any = _backward if fields.pop("backward", False) else FunctionCase if "function" in fields else Case
    made = ConstantTimeCase if fields.pop("constant_time", False) else StepCase if "kv_lens" in fields else made
    made = BlocksCase if made is Case and "kept" in fields else made
    tuples = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    if "lengths" in tuples:
        tuples["lengths"] = tuple(map(tuple, tuples["lengths"]))
    return made(**{**fields, **tuples})


def to_json(case: Case) -> dict[str, Any]:
    """The fields that are not the defaults, as JSON can hold them. Raises TypeError for a case with a mask object."""
    if case.mask is not None:
        raise TypeError(f"{case.mask} cannot be written; cases for timing say causal and window")
    found = {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if getattr(case, f.name) != f.default}
    kinds = {"backward": is_backward(case), "constant_time": isinstance(case, ConstantTimeCase)}
    found |= {"block": case.block, "kept": case.kept} if isinstance(case, BlocksCase) else {}
    return found | {name: True for name, is_one in kinds.items() if is_one}


def label(case: Case) -> str:
    """A case in a few characters, such as ``16x1024 h16 d128 causal``."""
    length = f"{case.q_len}" if case.q_len == case.kv_len else f"{case.q_len}:{case.kv_len}"
    shape = f"{len(case.lengths)} seqs" if case.lengths is not None else f"{case.batch}x{length}"
    if isinstance(case, StepCase):
        shape += f" page {case.page}" + (f" split {case.split}" if case.split != "auto" else "")
    count = f"h{case.heads}" if case.heads == case.kv_heads else f"h{case.heads}/{case.kv_heads}"
    dim = f"d{case.head_dim}" if case.head_dim == case.head_dim_v else f"d{case.head_dim}/{case.head_dim_v}"
    rest = ["" if case.dtype == "bf16" else case.dtype, "bwd" if is_backward(case) else "", getattr(case, "kernel", "")]
    rest += ["constant_time" if isinstance(case, ConstantTimeCase) else ""]
    if isinstance(case, BlocksCase):
        rest += [f"blocks{case.block}", f"{case.kept:g}", "near" * case.near]
    return " ".join(filter(None, [shape, count, dim, mask_label(case), *rest]))


def is_backward(case: Case) -> bool:
    return isinstance(case, BackwardCase)


def mask_label(case: Case) -> str:
    if isinstance(case, FunctionCase):
        return f"f:{case.function}" + "+causal" * case.causal
    parts = ["causal" if case.causal else "full" if case.window is None else ""]
    parts += [f"window{','.join(map(str, case.window))}"] if case.window is not None else []
    parts += [f"softcap{case.softcap:g}"] if case.softcap is not None else []
    return "+".join(filter(None, parts))


def flops(case: Case) -> int:
    """Multiplications and additions of both products, or of the five of a backward, over the pairs that the mask keeps, counted
    for every sequence."""
    columns = 3 * case.head_dim + 2 * case.head_dim_v if is_backward(case) else case.head_dim + case.head_dim_v
    if isinstance(case, FunctionCase):
        return 2 * columns * functions.FUNCTIONS[case.function].pairs(case)
    if isinstance(case, BlocksCase):
        return 2 * columns * case.heads * case.batch * case.op.pairs
    lengths = case.lengths if case.lengths is not None else ((case.q_len, case.kv_len),) * case.batch
    if isinstance(case, StepCase):
        lengths = tuple(zip(case.q_lens, case.kv_lens, strict=True))
        if case.topk:
            return 2 * columns * case.heads * sum(case.q_lens) * case.topk
    kept = {pair: kept_pairs(case.op.spec.placed_mask, *pair) for pair in set(lengths)}
    return 2 * columns * case.heads * sum(kept[pair] for pair in lengths)


def operation(case: Case, constant_time: bool = False) -> Any:
    """The operation that a plain call of the case computes, or of its gradients; ``Case.op`` is the forward with lse."""
    if isinstance(case, StepCase):
        return case.op
    constant_time = constant_time or isinstance(case, ConstantTimeCase)
    spec = dataclasses.replace(case.op.spec, return_lse=False, constant_time=constant_time)
    forward = dataclasses.replace(case.op, spec=spec)
    wrt = tuple(each.name for each in spec.score.arrays if each.element in FLOATS)
    return Backward(forward, wrt=wrt) if is_backward(case) else forward


def moved_bytes(case: Case) -> int:
    """Fewest bytes that must cross device memory."""
    return case.bytes if isinstance(case, StepCase) else int(operation(case).bytes)


def pick(text: str) -> Case:
    """One case: ``paper/12`` of a set, or JSON such as ``{"q_len": 4096, "kv_len": 4096, "causal": true}``."""
    if text.lstrip().startswith("{"):
        return from_json(json.loads(text))
    name, _, index = text.partition("/")
    if name not in SETS or not (index or "0").isdecimal() or int(index or 0) >= len(SETS[name]):
        sizes = ", ".join(f"{each} ({len(cases)})" for each, cases in SETS.items())
        raise SystemExit(f"{text!r} is no case; give a set and a number in it, of {sizes}.")
    return SETS[name][int(index or 0)]

"""The contenders: our own configurations, and one small adapter for each library that computes the same.

An adapter makes a ``Call`` of a ``Task`` and raises ``Unserved`` where the library cannot do the case. It may lay out its own
copies of the inputs first: what is timed is the call alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import lzma
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import rawattn
from rawattn.choose import KERNELS
from rawattn.testing import Case

from .timing import Call

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
MATH_BYTES = 8 << 30  # most that the plain formula may take for its logits


class Unserved(Exception):
    """The peer does not compute this case; the message says why."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A case with its inputs on the GPU, torch tensors of N(0, 1)."""

    case: Case
    q: Any
    k: Any
    v: Any
    cu: tuple[Any, ...] = ()  # cu_seqlens_q, cu_seqlens_kv

    @classmethod
    def make(cls, case: Case, seed: int = 0, device: str = "cuda") -> Task:
        import torch

        problem, random = case.problem, torch.Generator(device).manual_seed(seed)
        rows_q, rows_kv = (case.batch, case.q_len), (case.batch, case.kv_len)
        cu: tuple[Any, ...] = ()
        if case.lengths is not None:
            rows_q, rows_kv = (problem.total_q,), (problem.total_kv,)  # type: ignore[assignment]  # rank 1
            cu = tuple(torch.tensor([0, *each], device=device).cumsum(0).int() for each in zip(*case.lengths, strict=True))

        def normal(rows: tuple[int, ...], heads: int, dim: int) -> Any:
            return torch.randn(*rows, heads, dim, device=device, dtype=getattr(torch, DTYPES[case.dtype]), generator=random)

        q, k = normal(rows_q, case.heads, case.head_dim), normal(rows_kv, case.kv_heads, case.head_dim)
        return cls(case, q, k, normal(rows_kv, case.kv_heads, case.head_dim_v), cu)

    @functools.cached_property
    def heads_first(self) -> tuple[Any, Any, Any]:
        """Copies of q, k, v as (batch, heads, length, dim), the layout of torch."""
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))
        return q, k, v

    @functools.cached_property
    def repeated(self) -> tuple[Any, Any, Any]:
        """``heads_first`` with k and v repeated to as many heads as q has."""
        q, k, v = self.heads_first
        times = self.case.heads // self.case.kv_heads
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    @property
    def longest(self) -> tuple[int, int]:
        return self.case.problem.q_len, self.case.problem.kv_len

    def refuse(self, *names: str) -> None:
        """Raises Unserved where the case needs one of the named features: varlen, window, softcap, mask."""
        case = self.case
        needs = {"varlen": case.lengths, "window": case.window, "softcap": case.softcap, "mask": case.mask}
        for name in ("mask", *names):
            if needs[name] is not None:
                raise Unserved(f"no {name}")


# --- ours ---------------------------------------------------------------------------------------------------------------------


def config_name(config: Any) -> str:
    """A configuration in a few characters: the tile, then the other fields by their initials, such as ``128x96s2q2``."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    tile = f"{values.pop('tile_q')}x{values.pop('tile_kv')}"
    return tile + "".join(f"{name[0]}{int(value)}" for name, value in values.items())


def parse_config(config_type: Any, text: str) -> Any:
    """The configuration that ``config_name`` shortens to ``text``; fields left away keep their defaults."""
    match = re.fullmatch(r"(\d+)x(\d+)((?:[a-z]\d+)*)", text)
    if match is None:
        raise ValueError(f"{text!r} is no configuration; write one as 128x96s2q2")
    initials = {f.name[0]: f.name for f in dataclasses.fields(config_type) if not f.name.startswith("tile_")}
    fields = {"tile_q": int(match[1]), "tile_kv": int(match[2])}
    fields |= {initials[letter]: int(number) for letter, number in re.findall(r"([a-z])(\d+)", match[3])}
    return config_type(**fields)


def our_options(case: Case, name: str) -> dict[str, Any]:
    """Keyword arguments of ``rawattn.attention`` for ``ours``, ``ours:128x96s2q2`` or ``ours:KERNEL/128x96s2q2``."""
    kernel, _, config = name.removeprefix("ours").removeprefix(":").rpartition("/")
    options = dict(case.options)
    if config:
        module = next((k for k in KERNELS if k.name == kernel), KERNELS[0])
        options |= {"kernel": module.name, "config": parse_config(module.Config, config)}
    return options


def ours(task: Task, name: str) -> Call:
    options = our_options(task.case, name)
    q, k, v = task.q, task.k, task.v
    packed = (*task.cu, *task.longest) if task.cu else ()
    detail = config_name(rawattn.plan(q, k, v, *packed, **options).config)
    if task.cu:
        return Call(lambda: rawattn.attention_varlen(q, k, v, *packed, **options), detail=detail)
    return Call(lambda: rawattn.attention(q, k, v, **options), detail=detail)


def our_plan(task: Task, name: str) -> Callable[[], Any]:
    """``Plan.run`` with ``out=``: the least that a call of ours costs the host."""
    lengths = task.longest if task.cu else ()
    plan = rawattn.plan(task.q, task.k, task.v, *task.cu, *lengths, **our_options(task.case, name))
    out = task.q.new_empty((*task.q.shape[:-1], task.v.shape[-1]))
    return lambda: plan.run(task.q, task.k, task.v, *task.cu, out=out)


# --- torch --------------------------------------------------------------------------------------------------------------------


def sdpa(backend: str, task: Task) -> Call:
    """torch.nn.functional.scaled_dot_product_attention held to one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    task.refuse("varlen", "window", "softcap")
    case = task.case
    if case.causal and case.q_len != case.kv_len:
        raise Unserved("aligns causal to the first key")
    if backend == "MATH" and 4 * case.batch * case.heads * case.q_len * case.kv_len > MATH_BYTES:
        raise Unserved("its logits do not fit")
    grouped = backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION")
    q, k, v = task.heads_first if grouped else task.repeated
    attention = torch.nn.functional.scaled_dot_product_attention
    more = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    return Call(
        lambda: attention(q, k, v, is_causal=case.causal, scale=case.scale, **more),
        lambda o: o.transpose(1, 2),
        lambda: sdpa_kernel(getattr(SDPBackend, backend)),
    )


def flex(task: Task) -> Call:
    """torch's FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    task.refuse("varlen")
    case = task.case
    (q, k, v), shift = task.heads_first, case.kv_len - case.q_len
    left, right = case.window or (None, None)
    right = 0 if case.causal else right

    def keep(batch: Any, head: Any, i: Any, j: Any) -> Any:
        after = (j >= i + shift - left) if left is not None else (j >= 0)
        return (after & (j <= i + shift + right)) if right is not None else after

    def cap(s: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
        return case.softcap * _torch().tanh(s / case.softcap)

    plain = left is None and right is None
    mask = None if plain else create_block_mask(keep, None, None, case.q_len, case.kv_len, device="cuda")
    score, grouped = (cap if case.softcap else None), q.shape[1] != k.shape[1]
    compiled = _compiled_flex()
    more = {"score_mod": score, "block_mask": mask, "scale": case.scale, "enable_gqa": grouped}
    return Call(lambda: compiled(q, k, v, **more), lambda o: o.transpose(1, 2))


def _torch() -> Any:
    import torch

    return torch


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _torch().compile(flex_attention, dynamic=False)


# --- the FlashAttention family ------------------------------------------------------------------------------------------------


PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def window_of(case: Case) -> tuple[int, int]:
    """The window as flash-attn writes it: -1 for unbounded."""
    left, right = case.window or (None, None)
    return -1 if left is None else left, -1 if right is None else right


def load_fa3(file: str) -> None:
    """Loads FlashAttention 3's torch operators from a library, ``.so`` or ``.so.xz``, after a libcudart.so.12 beside it."""
    path = pathlib.Path(file).resolve()
    if path.suffix == ".xz":
        unpacked = pathlib.Path(tempfile.gettempdir(), f"rawattn-{path.stat().st_size}-{path.stem}")
        if not unpacked.exists():
            partial = unpacked.with_suffix(".part")
            with lzma.open(path) as packed, open(partial, "wb") as out:
                shutil.copyfileobj(packed, out, 1 << 24)
            partial.rename(unpacked)
        library = unpacked
    else:
        library = path
    runtime = path.with_name("libcudart.so.12")
    if runtime.exists():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    _torch().ops.load_library(str(library))


def fa3(task: Task) -> Call:
    """FlashAttention 3 by its operator, as a library file or xformers bring it."""
    task.refuse("softcap")
    case, (left, right) = task.case, window_of(task.case)
    more: dict[str, Any] = {"window_size_left": left, "window_size_right": right} if case.window else {}
    if task.cu:
        more |= dict(zip(PACKED, (*task.cu, *task.longest), strict=True))
    forward, scale = _torch().ops.flash_attn_3.fwd, case.problem.scale
    q, k, v = task.q, task.k, task.v
    return Call(lambda: forward(q, k, v, softmax_scale=scale, is_causal=case.causal, num_splits=1, **more)[0])


def flash(dense: Any, packed: Any, task: Task, **more: Any) -> Call:
    """The functions that FlashAttention 2, 3 and 4 share."""
    case, (q, k, v) = task.case, (task.q, task.k, task.v)
    more |= {"causal": case.causal, "softmax_scale": case.scale}
    if case.window is not None:
        more["window_size"] = window_of(case)
    if case.softcap is not None:
        more["softcap"] = case.softcap

    def first(o: Any) -> Any:
        return o[0] if isinstance(o, tuple) else o

    if task.cu:
        more |= dict(zip(PACKED, (*task.cu, *task.longest), strict=True))
        return Call(lambda: packed(q, k, v, **more), first)
    return Call(lambda: dense(q, k, v, **more), first)


def flash_attn(task: Task) -> Call:
    import flash_attn

    task.refuse()
    return flash(flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, task)


def flash_attn_3(task: Task) -> Call:
    import flash_attn_interface

    task.refuse()
    return flash(flash_attn_interface.flash_attn_func, flash_attn_interface.flash_attn_varlen_func, task)


def fa4(task: Task) -> Call:
    from flash_attn import cute

    task.refuse("window")
    return flash(cute.flash_attn_func, cute.flash_attn_varlen_func, task)


# --- others -------------------------------------------------------------------------------------------------------------------


def flashinfer(task: Task) -> Call:
    """FlashInfer's prefill over ragged sequences, planned outside the timing."""
    import flashinfer

    case, torch = task.case, _torch()
    if case.window is not None and (case.window[1] != 0 or not case.causal):
        raise Unserved("windows are causal only")
    lengths = case.lengths or ((case.q_len, case.kv_len),) * case.batch
    cu = task.cu or tuple(torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0).int().cuda() for side in (0, 1))
    task.refuse()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD")
    wrapper.plan(
        *cu, case.heads, case.kv_heads, case.head_dim, case.head_dim_v, causal=case.causal, sm_scale=case.scale,
        window_left=window_of(case)[0], logits_soft_cap=case.softcap, q_data_type=task.q.dtype,
    )  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (task.q, task.k, task.v))
    return Call(lambda: wrapper.run(q, k, v), lambda o: o.view(*task.q.shape[:-1], case.head_dim_v))


def xformers(task: Task) -> Call:
    from xformers.ops import fmha

    task.refuse("window", "softcap")
    case, (q, k, v) = task.case, (task.q, task.k, task.v)
    if case.kv_heads != case.heads:
        raise Unserved("no grouped heads in this adapter")
    bias = fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
    if case.lengths is not None:
        kind = fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask if case.causal else fmha.attn_bias.BlockDiagonalMask
        bias = kind.from_seqlens(*([pair[side] for pair in case.lengths] for side in (0, 1)))
        q, k, v = (x[None] for x in (q, k, v))
    shape = (*task.q.shape[:-1], case.head_dim_v)
    return Call(lambda: fmha.memory_efficient_attention(q, k, v, attn_bias=bias, scale=case.scale), lambda o: o.view(shape))


def triton(task: Task) -> Call:
    """Our own plain Triton kernel, as a second opinion."""
    from .plain_triton import attention

    task.refuse("varlen", "window", "softcap")
    case = task.case
    if case.head_dim != case.head_dim_v or case.head_dim & (case.head_dim - 1):
        raise Unserved("head_dim is no power of two")
    return Call(lambda: attention(task.q, task.k, task.v, case.causal, case.problem.scale))


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library: the module that brings it, and the adapter."""

    module: str
    prepare: Callable[[Task], Call]


PEERS = {
    "fa3": Peer("flash_attn_interface", flash_attn_3),  # or --fa3 FILE
    "cudnn": Peer("torch", functools.partial(sdpa, "CUDNN_ATTENTION")),
    "fa2": Peer("torch", functools.partial(sdpa, "FLASH_ATTENTION")),
    "efficient": Peer("torch", functools.partial(sdpa, "EFFICIENT_ATTENTION")),
    "math": Peer("torch", functools.partial(sdpa, "MATH")),
    "flex": Peer("torch", flex),
    "flash_attn": Peer("flash_attn.flash_attn_interface", flash_attn),
    "fa4": Peer("flash_attn.cute", fa4),
    "flashinfer": Peer("flashinfer", flashinfer),
    "xformers": Peer("xformers", xformers),
    "triton": Peer("triton", triton),
}


def installed(fa3_file: str | None = None) -> dict[str, Peer]:
    """The peers that can be tried here, by name; a library file of FlashAttention 3 goes before its package."""
    found = {name: peer for name, peer in PEERS.items() if _importable(peer.module)}
    if fa3_file:
        load_fa3(fa3_file)
        found = {"fa3": Peer("torch", fa3)} | {name: peer for name, peer in found.items() if name != "fa3"}
    return found


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def prepare(name: str, task: Task, peers: dict[str, Peer]) -> Call:
    """A contender on a task. Raises Unserved, or whatever the library raises."""
    return ours(task, name) if name.partition(":")[0] == "ours" else peers[name].prepare(task)

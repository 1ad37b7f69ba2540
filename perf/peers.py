"""The contenders: our own configurations, and one small adapter for each library that computes the same.

An adapter makes a ``Call`` of a ``Task`` and raises ``Unserved`` where the library cannot do the case. It may lay out its own
copies of the inputs first: what is timed is the call alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import lzma
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import rawattn
from rawattn import driver
from rawattn.plan import Plan
from rawattn.select import KERNELS, Selection
from rawattn.testing import Case

from .timing import Call

MATH_BYTES = 8 << 30  # most that the plain formula may take for its logits
KERNEL: str | None = None  # what ours asks for; None where the library chooses
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class Unserved(Exception):
    """The peer does not compute this case; the message says why."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A case with its inputs on the GPU, torch tensors of N(0, 1). ``packed`` are cu_seqlens and maximal lengths, of q and k."""

    case: Case
    q: Any
    k: Any
    v: Any
    packed: tuple[Any, ...] = ()

    @classmethod
    def make(cls, case: Case, seed: int = 0, device: str = "cuda") -> Task:
        import torch

        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        random, dtype = torch.Generator(device).manual_seed(seed), dtypes[case.dtype]
        rows: list[tuple[int, ...]] = [(case.batch, case.q_len), (case.batch, case.kv_len)]
        packed: tuple[Any, ...] = ()
        if case.lengths is not None:
            lengths = [torch.tensor([0, *each], device=device) for each in zip(*case.lengths, strict=True)]
            rows = [(int(each.sum()),) for each in lengths]
            packed = (*(each.cumsum(0).int() for each in lengths), *(int(each.max()) for each in lengths))
        sizes = (0, case.heads, case.head_dim), (1, case.kv_heads, case.head_dim), (1, case.kv_heads, case.head_dim_v)
        q, k, v = (torch.randn(*rows[i], *rest, device=device, dtype=dtype, generator=random) for i, *rest in sizes)
        return cls(case, q, k, v, packed)

    @functools.cached_property
    def heads_first(self) -> list[Any]:
        """Copies of q, k, v as (batch, heads, length, dim), the layout of torch."""
        return [x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v)]

    @property
    def o_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.case.head_dim_v)

    def refuse(self, *names: str) -> None:
        """Raises Unserved where the case has a mask object, or what is named: lengths (packed sequences), window, softcap."""
        for name in ("mask", *names):
            if getattr(self.case, name) is not None:
                raise Unserved(f"no {name}")


def short_names(config_type: Any) -> dict[str, str]:
    """Fields of a configuration but for its tile: as many letters as tell them apart -> the name."""
    names = [f.name for f in dataclasses.fields(config_type) if not f.name.startswith("tile_")]
    return {
        next(name[:n] for n in range(1, len(name) + 1) if sum(other.startswith(name[:n]) for other in names) == 1): name
        for name in names
    }


def config_name(config: Any) -> str:
    """A configuration in a few characters: the tile, then the other fields by their first letters, such as ``128x96s2q2``."""
    rest = (f"{short}{int(getattr(config, name))}" for short, name in short_names(config).items())
    return f"{config.tile_q}x{config.tile_kv}{''.join(rest)}"


def parse_config(config_type: Any, text: str) -> Any:
    """The configuration that ``config_name`` shortens to ``text``; fields left away keep their defaults."""
    match, names = re.fullmatch(r"(\d+)x(\d+)((?:[a-z]+\d+)*)", text), short_names(config_type)
    if match is None:
        raise ValueError(f"{text!r} is no configuration; write one as 128x96s2q2")
    rest = {names[letters]: int(number) for letters, number in re.findall(r"([a-z]+)(\d+)", match[3])}
    return config_type(tile_q=int(match[1]), tile_kv=int(match[2]), **rest)


def our_options(case: Case, name: str) -> dict[str, Any]:
    """Keyword arguments of ``rawattn.attention`` for ``ours``, ``ours:128x96s2q2`` or ``ours:KERNEL/128x96s2q2``."""
    kernel, _, config = name.removeprefix("ours").removeprefix(":").rpartition("/")
    if not config:
        return case.options | ({"kernel": KERNEL} if KERNEL else {})
    module = next((k for k in KERNELS if k.name == (kernel or KERNEL)), KERNELS[0])
    return case.options | {"kernel": module.name, "config": parse_config(module.Config, config)}


def ours(task: Task, name: str) -> Call:
    options, inputs = our_options(task.case, name), (task.q, task.k, task.v, *task.packed)
    attention = rawattn.attention_varlen if task.packed else rawattn.attention
    return Call(lambda: attention(*inputs, **options), detail=config_name(rawattn.plan(*inputs, **options).config))


def our_plan(task: Task, name: str) -> Callable[[], Any]:
    """``Plan.run`` with ``out=``: the least that a call of ours costs the host."""
    inputs, out = (task.q, task.k, task.v, *task.packed[:2]), task.q.new_empty(task.o_shape)
    plan = rawattn.plan(*inputs, *task.packed[2:], **our_options(task.case, name))
    return lambda: plan.run(*inputs, out=out)


def sdpa(backend: str, task: Task) -> Call:
    """torch.nn.functional.scaled_dot_product_attention held to one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == "FLASH_ATTENTION" and task.packed:
        return packed_flash(task)
    task.refuse("lengths", "window", "softcap")
    case, (q, k, v) = task.case, task.heads_first
    if case.causal and case.q_len != case.kv_len:
        raise Unserved("aligns causal to the first key")
    if backend == "MATH" and 4 * case.batch * case.heads * case.q_len * case.kv_len > MATH_BYTES:
        raise Unserved("its logits do not fit")
    if backend in ("MATH", "EFFICIENT_ATTENTION"):
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    more = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": k.shape[1] != q.shape[1]}
    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, **more)
    return Call(call, lambda o: o.transpose(1, 2), lambda: sdpa_kernel(getattr(SDPBackend, backend)))


def packed_flash(task: Task) -> Call:
    """torch's FlashAttention 2 on packed sequences, by the operator under torch.nn.attention.varlen."""
    import torch

    task.refuse("window", "softcap")
    forward = torch.ops.aten._flash_attention_forward
    inputs = (task.q, task.k, task.v, *task.packed, 0.0, task.case.causal, False)  # no dropout, no mask of it
    return Call(lambda: forward(*inputs, scale=task.case.scale)[0])


def flex(task: Task) -> Call:
    """torch's FlexAttention, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    task.refuse("lengths", "window", "softcap")
    case, shift, mask = task.case, task.case.kv_len - task.case.q_len, None
    if case.causal:
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + shift, None, None, case.q_len, case.kv_len, device=str(task.q.device)
        )
    more = {"block_mask": mask, "scale": case.scale, "enable_gqa": case.heads != case.kv_heads}
    return Call(functools.partial(torch.compile(flex_attention), *task.heads_first, **more), lambda o: o.transpose(1, 2))


def window_of(case: Case) -> tuple[int, int]:
    """The window as flash-attn writes it: -1 for unbounded."""
    left, right = case.window or (None, None)
    return -1 if left is None else left, -1 if right is None else right


def load_fa3(file: str) -> None:
    """Loads FlashAttention 3's torch operators from a library, ``.so`` or ``.so.xz``, after a libcudart.so.12 beside it."""
    import torch

    library = packed = pathlib.Path(file).resolve()
    if packed.suffix == ".xz":
        library = pathlib.Path(tempfile.gettempdir(), f"rawattn-{packed.stat().st_size}-{packed.stem}")
        if not library.exists():
            (partial := library.with_suffix(".part")).write_bytes(lzma.decompress(packed.read_bytes()))
            partial.rename(library)
    if (runtime := packed.with_name("libcudart.so.12")).exists():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(library))


def fa3(task: Task) -> Call:
    """FlashAttention 3 by its operator, as a library file brings it."""
    import torch

    task.refuse("softcap")
    (left, right), more = window_of(task.case), dict(zip(PACKED, task.packed, strict=bool(task.packed)))
    more |= {"window_size_left": left, "window_size_right": right} if task.case.window else {}
    more |= {"softmax_scale": task.case.problem.scale, "is_causal": task.case.causal, "num_splits": 1}
    forward, q, k, v = torch.ops.flash_attn_3.fwd, task.q, task.k, task.v
    return Call(lambda: forward(q, k, v, **more)[0])


def flash(module: str, task: Task) -> Call:
    """What the packages of FlashAttention 2, 3 and 4 have in common."""
    task.refuse()
    case, library = task.case, importlib.import_module(module)
    more: dict[str, Any] = {"causal": case.causal, "softmax_scale": case.scale}
    more |= dict(zip(PACKED, task.packed, strict=bool(task.packed)))
    more |= {"window_size": case.window if "cute" in module else window_of(case)} if case.window else {}
    more |= {"softcap": case.softcap} if case.softcap else {}
    attention = library.flash_attn_varlen_func if task.packed else library.flash_attn_func
    return Call(functools.partial(attention, task.q, task.k, task.v, **more), lambda o: o[0] if isinstance(o, tuple) else o)


def flashinfer(task: Task) -> Call:
    """FlashInfer's prefill over ragged sequences, planned outside the timing."""
    import flashinfer
    import torch

    task.refuse()
    case, (left, right) = task.case, window_of(task.case)
    if case.window and not (case.causal and right <= 0):
        raise Unserved("windows are causal only")
    steps = ((case.batch, case.q_len), (case.batch, case.kv_len))
    place = task.q.device
    cu = task.packed[:2] or tuple(torch.arange(batch + 1, dtype=torch.int32, device=place) * length for batch, length in steps)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=place), "NHD")
    more = {"causal": case.causal, "sm_scale": case.scale, "window_left": left, "logits_soft_cap": case.softcap}
    wrapper.plan(*cu, case.heads, case.kv_heads, case.head_dim, case.head_dim_v, q_data_type=task.q.dtype, **more)
    inputs = [x.reshape(-1, *x.shape[-2:]) for x in (task.q, task.k, task.v)]
    return Call(functools.partial(wrapper.run, *inputs), lambda o: o.view(task.o_shape))


def xformers(task: Task) -> Call:
    from xformers.ops import fmha

    case = task.case
    task.refuse("lengths", "window", "softcap")
    if case.kv_heads != case.heads:
        raise Unserved("no grouped heads in this adapter")
    bias = fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
    return Call(functools.partial(fmha.memory_efficient_attention, task.q, task.k, task.v, attn_bias=bias, scale=case.scale))


def triton(task: Task) -> Call:
    from .plain_triton import attention

    task.refuse("lengths", "window", "softcap")
    case = task.case
    if case.head_dim != case.head_dim_v or case.head_dim & (case.head_dim - 1):
        raise Unserved("head_dim is no power of two")
    return Call(lambda: attention(task.q, task.k, task.v, case.causal, case.problem.scale))


Adapter = Callable[[Task], Call]
PEERS: dict[str, tuple[str, Adapter]] = {  # name -> the module that brings it, adapter
    "fa3": ("flash_attn_interface", functools.partial(flash, "flash_attn_interface")),  # or --fa3 FILE
    "cudnn": ("torch", functools.partial(sdpa, "CUDNN_ATTENTION")),
    "fa2": ("torch", functools.partial(sdpa, "FLASH_ATTENTION")),
    "efficient": ("torch", functools.partial(sdpa, "EFFICIENT_ATTENTION")),
    "math": ("torch", functools.partial(sdpa, "MATH")),
    "flex": ("torch", flex),
    "flash_attn": ("flash_attn_2_cuda", functools.partial(flash, "flash_attn")),
    "fa4": ("flash_attn", functools.partial(flash, "flash_attn.cute")),
    "flashinfer": ("flashinfer", flashinfer),
    "xformers": ("xformers", xformers),
    "triton": ("triton", triton),
}


def installed(fa3_file: str | None = None, names: str | None = None) -> dict[str, Adapter]:
    """The peers that can be tried here, or those of comma-separated names; a library file goes before FlashAttention 3's package.

    Raises SystemExit for a name that is not here.
    """
    found = {name: adapter for name, (module, adapter) in PEERS.items() if importlib.util.find_spec(module)}
    if fa3_file:
        load_fa3(fa3_file)
        found["fa3"] = fa3
    wanted = found if names is None else list(filter(None, names.split(",")))
    if missing := set(wanted) - set(found):
        raise SystemExit(f"no {', '.join(sorted(missing))} here; there are {', '.join(found)}, and fa3 with --fa3 FILE")
    return {name: found[name] for name in wanted}


def prepare(name: str, task: Task, peers: dict[str, Adapter]) -> Call:
    """A contender on a task. Raises Unserved, or whatever the library raises."""
    return ours(task, name) if name.startswith("ours") else peers[name](task)


def plan_of(task: Task, kernel: Any, config: Any, constant_time: bool = False) -> Plan:
    """A plan of a kernel, such as an altered one, in a configuration whose legality is not asked for."""
    problem = dataclasses.replace(task.case.problem, return_lse=False, constant_time=constant_time)
    return Plan(problem, driver.device(task.q.get_device()), Selection(kernel, config, "", ()), "torch")

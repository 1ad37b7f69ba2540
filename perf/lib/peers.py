"""The peers: one small adapter for each library that computes the same.

An adapter makes a ``Call`` of a ``Task`` and raises ``Unserved`` where the library cannot do the case. It may lay out its own
copies of the inputs first: what is timed is the call alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import lzma
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from rawattn.command.timing import Call
from rawattn.testing import Case

from .functions import FUNCTIONS, mask_mod
from .ours import built_in, ours
from .task import Task, Unserved

MATH_BYTES = 8 << 30  # most that the plain formula may take for its logits
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def sdpa(backend: str, task: Task, as_rows: bool = False) -> Call:
    """torch.nn.functional.scaled_dot_product_attention held to one backend, with heads before lengths or as ours."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == "FLASH_ATTENTION" and task.packed:
        return packed_flash(task)
    task.refuse("lengths", "window", "softcap")
    case, (q, k, v) = task.case, task.views if as_rows else task.heads_first
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


def ffpa(task: Task) -> Call:
    """ffpa-attn, which is for heads above 256 and gives others to torch."""
    from ffpa_attn import ffpa_attn_func

    task.refuse("lengths", "window", "softcap")
    case = task.case
    if max(case.head_dim, case.head_dim_v) <= 256 or case.head_dim != case.head_dim_v or case.q_len != case.kv_len:
        raise Unserved("is for square calls with equal sizes above 256")
    more = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": case.heads != case.kv_heads}
    return Call(functools.partial(ffpa_attn_func, *task.heads_first, **more), lambda o: o.transpose(1, 2))


def flex(task: Task) -> Call:
    """torch's FlexAttention, compiled, on a block mask that is made before."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if task.function is None:
        task.refuse("lengths", "window", "softcap")
    torch._dynamo.reset()  # else the ninth function in a process is not compiled
    case, shift, own = task.case, task.case.kv_len - task.case.q_len, task.functions
    mod = mask_mod(own.get("mask", lambda b, h, i, j: j <= i + shift))
    sizes: tuple[int | None, int | None] = (None, None)
    if "mask" in own:
        differs = FUNCTIONS[getattr(case, "function", "")]
        sizes = case.batch if differs.by_batch else None, case.heads if differs.by_head else None
    make = torch.compile(create_block_mask)
    before = functools.partial(make, mod, *sizes, case.q_len, case.kv_len, device=str(task.q.device))
    has_mask = "mask" in own or case.causal
    more = {"block_mask": before() if has_mask else None, "score_mod": own.get("score")}
    more |= {"scale": case.scale, "enable_gqa": case.heads != case.kv_heads}
    run = functools.partial(torch.compile(flex_attention), *task.heads_first, **more)
    return Call(run, lambda o: o.transpose(1, 2), before=before if has_mask else None)


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


def fa3(task: Task, splits: int = 1) -> Call:
    """FlashAttention 3 by its operator, as a library file brings it; 0 splits are as many as it chooses."""
    import torch

    task.refuse("softcap")
    (left, right), more = window_of(task.case), dict(zip(PACKED, task.packed, strict=bool(task.packed)))
    more |= {"window_size_left": left, "window_size_right": right} if task.case.window else {}
    more |= {"softmax_scale": task.case.op.scale, "is_causal": task.case.causal, "num_splits": splits}
    forward, q, k, v = torch.ops.flash_attn_3.fwd, task.q, task.k, task.v
    return Call(lambda: forward(q, k, v, **more)[0])


def flash(module: str, task: Task) -> Call:
    """Returns the call of a package of FlashAttention 2, 3 or 4, as far as they have it in common."""
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


Adapter = Callable[[Task], Call]
PEERS: dict[str, tuple[str, Adapter]] = {  # name -> the module that brings it, adapter
    "fa3": ("flash_attn_interface", functools.partial(flash, "flash_attn_interface")),  # or --fa3 FILE
    "cudnn": ("torch", functools.partial(sdpa, "CUDNN_ATTENTION")),
    "cudnn_nhd": ("torch", functools.partial(sdpa, "CUDNN_ATTENTION", as_rows=True)),
    "fa2": ("torch", functools.partial(sdpa, "FLASH_ATTENTION")),
    "efficient": ("torch", functools.partial(sdpa, "EFFICIENT_ATTENTION")),
    "math": ("torch", functools.partial(sdpa, "MATH")),
    "flex": ("torch", flex),
    "flash_attn": ("flash_attn_2_cuda", functools.partial(flash, "flash_attn")),
    "fa4": ("flash_attn", functools.partial(flash, "flash_attn.cute")),
    "flashinfer": ("flashinfer", flashinfer),
    "ffpa": ("ffpa_attn", ffpa),
}


def installed(fa3_file: str | None = None, names: str | None = None) -> dict[str, Adapter]:
    """The peers that can be tried here, or those of comma-separated names; a library file goes before FlashAttention 3's package.

    Raises SystemExit for a name that is not here.
    """
    found = {name: adapter for name, (module, adapter) in PEERS.items() if importlib.util.find_spec(module)}
    if fa3_file:
        load_fa3(fa3_file)
        found |= {"fa3": fa3, "fa3_auto": functools.partial(fa3, splits=0)}
    wanted = found if names is None else list(filter(None, names.split(",")))
    if missing := set(wanted) - set(found):
        raise SystemExit(f"no {', '.join(sorted(missing))} here; there are {', '.join(found)}, and fa3 with --fa3 FILE")
    return {name: found[name] for name in wanted}


def prepare(name: str, task: Task, peers: dict[str, Adapter], kernel: str | None = None) -> Call:
    """A contender on a task; ``kernel`` is what ours asks for. Raises Unserved, or whatever the library raises."""
    if name == "built_in":
        return built_in(task)
    return ours(task, name, kernel) if name.startswith("ours") else peers[name](task)

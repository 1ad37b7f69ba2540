"""The backward of a case: what every contender is given, the peers, and the check of the gradients.

A call computes dq, dk and dv from do and what the forward kept. Each peer keeps what its own forward gives, which is not timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import rawattn
import rawattn.reference
from rawattn.command.timing import Call
from rawattn.operation.captures import take

from . import peers
from .checking import part_of
from .ours import our_options, plain_of
from .peers import PACKED, window_of
from .task import Task, Unserved

TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}  # of the relative error; measured in bf16: peers to 2.6e-3, we to 3e-3


def ours(task: Task, name: str = "ours", kernel: str | None = None) -> Call:
    """``rawattn.attention_backward`` on o and lse of our own forward."""
    d_o, asked = gradient(task), our_options(task.case, name, kernel)
    own = {name: asked.pop(name) for name in ("kernel", "config", "deterministic") if name in asked}
    options = {name: value for name, value in asked.items() if name != "sinks"} | task.functions
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"), task.packed, strict=bool(task.packed)))
    attention = rawattn.attention_varlen if task.packed else rawattn.attention
    o, lse = attention(task.q, task.k, task.v, *task.packed, return_lse=True, **options)
    inputs, more = (d_o, task.q, task.k, task.v, o, lse), {**lengths, **options}
    more |= own | ({"wrt": captured(task)} if captured(task) else {})
    return Call(lambda: rawattn.attention_backward(*inputs, **more))


def captured(task: Task) -> tuple[Any, ...]:
    """The tensors of floats that the task's score captured."""
    options = {"mask": None, "score": None} | {name: x for name, x in task.functions.items() if name != "keys"}
    return tuple(x for x in take(options)[1] if x.is_floating_point()) if options["score"] is not None else ()


def flex(task: Task) -> Call:
    """FlexAttention's own backward, as autograd runs what torch.compile made of it; also of what a score captured."""
    import torch

    own = dataclasses.replace(task)  # with inputs and a function of its own, which require grad
    leaves = [x.requires_grad_() for x in (*own.heads_first, *captured(own))]
    forward = peers.flex(own)
    o = forward.run()
    d_o = torch.empty_like(o).copy_(gradient(task).transpose(1, 2))
    run = functools.partial(torch.autograd.grad, o, leaves, d_o, retain_graph=True)
    return Call(run, lambda grads: (*(x.transpose(1, 2) for x in grads[:3]), *grads[3:]), before=forward.before)


def built_in(task: Task) -> Call:
    """The backward of what computes the same without a function, or nearly (``peers.built_in``)."""
    case, inputs, packed = plain_of(task)
    call = ours(dataclasses.replace(task, case=case, q=inputs[0], k=inputs[1], v=inputs[2], packed=packed))
    shapes = [x.shape for x in (task.q, task.k, task.v)]
    view = lambda grads: tuple(x.view(shape) for x, shape in zip(grads, shapes, strict=True))  # noqa: E731
    return dataclasses.replace(call, view=view, checked="mask" in task.functions)


def gradient(task: Task) -> Any:
    """Makes do, N(0, 1), of o's shape: the same numbers for every contender."""
    import torch

    random = torch.Generator(task.q.device).manual_seed(1)
    return torch.randn(*task.o_shape, device=task.q.device, dtype=task.q.dtype, generator=random)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within it torch asks its backends for their deterministic mode."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def sdpa(backend: str, same_bits: bool, task: Task, as_rows: bool = False) -> Call:
    """The backward of torch's attention, held to one backend, as autograd runs it. do lies in memory as o does."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    task.refuse("lengths", "window", "softcap")
    case = task.case
    if case.causal and case.q_len != case.kv_len:
        raise Unserved("aligns causal to the first key")
    leaves = [x.requires_grad_() for x in (task.views if as_rows else task.heads_first)]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        more = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": case.heads != case.kv_heads}
        o = torch.nn.functional.scaled_dot_product_attention(*leaves, **more)
    d_o = torch.empty_like(o).copy_(gradient(task).transpose(1, 2))
    run = functools.partial(torch.autograd.grad, o, leaves, d_o, retain_graph=True)
    context = deterministic if same_bits else contextlib.nullcontext
    return Call(run, lambda grads: tuple(x.transpose(1, 2) for x in grads), context)


def fa3(same_bits: bool, task: Task) -> Call:
    """The backward of FlashAttention 3 by its operator."""
    import torch

    task.refuse("softcap")
    case, d_o = task.case, gradient(task)
    if same_bits and case.head_dim > 192:
        raise Unserved("no deterministic mode at this head_dim")
    (left, right), packed = window_of(case), dict(zip(PACKED, task.packed, strict=bool(task.packed)))
    more = {"softmax_scale": case.op.scale, "is_causal": case.causal, **packed}
    more |= {"window_size_left": left, "window_size_right": right} if case.window else {}
    inputs = (task.q, task.k, task.v)
    o, lse = torch.ops.flash_attn_3.fwd(*inputs, num_splits=1, **more)[:2]
    grads = tuple(torch.empty_like(x) for x in inputs)
    backward = torch.ops.flash_attn_3.bwd

    def run() -> tuple[Any, ...]:
        backward(d_o, *inputs, o, lse, *grads, deterministic=same_bits, **more)
        return grads

    return Call(run)


PEERS: dict[str, Callable[[Task], Call]] = {
    "fa3": functools.partial(fa3, False),
    "fa3_det": functools.partial(fa3, True),
    "cudnn": functools.partial(sdpa, "CUDNN_ATTENTION", False),
    "cudnn_nhd": functools.partial(sdpa, "CUDNN_ATTENTION", False, as_rows=True),
    "cudnn_det": functools.partial(sdpa, "CUDNN_ATTENTION", True),
    "fa2": functools.partial(sdpa, "FLASH_ATTENTION", False),
    "efficient": functools.partial(sdpa, "EFFICIENT_ATTENTION", False),
}


def peers_among(installed: Iterable[str]) -> list[str]:
    """The names of the peers whose forward is among those installed, each with its deterministic mode."""
    there = set(installed)
    return [name for name in PEERS if name.removesuffix("_det") in there]


def prepare(name: str, task: Task, kernel: str | None = None) -> Call:
    """A contender on a task. Raises Unserved, or whatever the library raises."""
    if name.partition(":")[0] == "ours":
        return ours(task, name, kernel)
    return {**PEERS, "built_in": built_in, "flex": flex}[name](task)


class Check:
    """The gradients of the last key head of the last batch, by the reference, made once for all contenders."""

    def __init__(self, task: Task) -> None:
        case, self.task = task.case, task
        group = case.heads // case.kv_heads
        self.batch = ... if task.packed else slice(case.batch - 1, case.batch)
        self.heads, self.kv_heads = slice(case.heads - group, case.heads), slice(case.kv_heads - 1, case.kv_heads)
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), (x.tolist() for x in task.packed[:2]), strict=bool(task.packed)))
        given = [self._of_head(x, i) for i, x in enumerate((task.q, task.k, task.v))]
        d_o = self._of_head(gradient(task), 0)
        q, k, v = given
        first = 0 if task.packed else case.batch - 1
        options = part_of(case.options | task.functions, first, case.heads - group)
        self.expected = rawattn.reference.attention_backward(d_o, q, k, v, **cu, **options)

    def _of_head(self, x: Any, index: int) -> Any:
        """Cuts out q's heads (``index`` 0), or those of k and v."""
        return x[self.batch][..., self.kv_heads if index else self.heads, :]

    def __call__(self, call: Call) -> float:
        """The largest relative error of dq, dk and dv. Raises ArithmeticError where it is above the tolerance, or where an
        element is not finite."""
        with call.context():
            grads = call.view(call.run())
        error = float(np.max([self._error(i, grad) for i, grad in enumerate(grads[:3])]))  # Python's max would lose a NaN
        error = error if all(bool(grad.isfinite().all()) for grad in grads[3:]) else math.nan  # of what a score captured
        if not error < TOLERANCE[self.task.case.dtype]:
            raise ArithmeticError(f"relative error {error:.2g}")
        return error

    def _error(self, index: int, grad: Any) -> float:
        if not bool(grad.isfinite().all()):
            return math.nan
        expected = self.expected[index]
        return float((self._of_head(grad, index).double() - expected).norm() / expected.norm())

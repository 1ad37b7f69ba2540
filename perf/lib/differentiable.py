"""Attention that autograd follows, by each contender: functions of q, k and v, (batch, length, heads, head_dim), and of whether
it is causal. torch.compile can trace all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import rawattn

from . import peers

Attend = Callable[[Any, Any, Any, bool], Any]


def ours(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return rawattn.attention(q, k, v, causal=causal)


def sdpa(backend: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """torch's attention, held to one backend, on views of the tensors as a model would give them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    is_grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped).transpose(1, 2)


@functools.cache
def fa3() -> Attend:
    """FlashAttention 3 by its operators, as operators that torch.compile and autograd know."""
    import torch

    forward, backward = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd
    define: Any = functools.partial(torch.library.custom_op, mutates_args=())
    arrays = "Tensor q, Tensor k, Tensor v"

    def options(q: Any, causal: bool) -> dict[str, Any]:
        return {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal}

    def compute(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return tuple(forward(q, k, v, num_splits=1, **options(q, causal))[:2])

    def compute_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, causal: bool) -> Any:
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        backward(do.contiguous(), q, k, v, o, lse, *grads, **options(q, causal))
        return grads

    attend = define("rawattn_perf::fa3", compute, schema=f"({arrays}, bool causal) -> (Tensor, Tensor)")
    schema = f"(Tensor d_o, {arrays}, Tensor o, Tensor lse, bool causal) -> (Tensor, Tensor, Tensor)"
    gradients = define("rawattn_perf::fa3_backward", compute_backward, schema=schema)

    def shaped(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    attend.register_fake(shaped)
    gradients.register_fake(lambda do, q, k, v, *_: tuple(torch.empty_like(x) for x in (q, k, v)))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.causal = inputs[3]

    attend.register_autograd(lambda ctx, do, _: (*gradients(do, *ctx.saved_tensors, ctx.causal), None), setup_context=keep)
    return lambda q, k, v, causal: attend(q, k, v, causal)[0]


BACKENDS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


def contenders(names: str, fa3_file: str | None = None) -> dict[str, Attend]:
    """Ours, and the peers of comma-separated names, of which FlashAttention 3 is there where its library is given.

    Raises SystemExit for another name."""
    found: dict[str, Attend] = {name: functools.partial(sdpa, backend) for name, backend in BACKENDS.items()}
    if fa3_file:
        peers.load_fa3(fa3_file)
        found = {"fa3": fa3(), **found}
    wanted = [name for name in names.split(",") if name and (name != "fa3" or fa3_file)]
    if missing := set(wanted) - set(found):
        raise SystemExit(f"no {', '.join(sorted(missing))} here; there are {', '.join(found)}")
    return {"ours": ours, **{name: found[name] for name in wanted}}

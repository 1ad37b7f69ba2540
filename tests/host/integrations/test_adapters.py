"""The adapters keep calls for tensors as they were given. Such a call launches what a new one launches, its result lies
so. The harness is that of ``tests/host/runtime/test_bound_call.py``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rawattn.errors import ProblemError
from rawattn.runtime import call_cache
from tests.host.runtime.test_bound_call import LAUNCHED, STATE, forget, gpu

torch = pytest.importorskip("torch")
sdpa = pytest.importorskip("rawattn.integrations.sdpa")
__all__ = ["gpu"]  # a fixture
B, H, N, D = 2, 4, 80, 64


def rows(offset: int = 0, **sizes: int) -> Any:
    """(b, h, n, d) in memory as (b, n, h, d)."""
    b, h, n, d = ({"b": B, "h": H, "n": N, "d": D} | sizes).values()
    return torch.zeros(b * n * h * d + offset).bfloat16()[offset:].view(b, n, h, d).transpose(1, 2)


def heads(offset: int = 0) -> Any:
    return torch.zeros(B * H * N * D + offset).bfloat16()[offset:].view(B, H, N, D)


def packed() -> tuple[Any, ...]:
    """q, k and v of one tensor."""
    return tuple(x.transpose(1, 2) for x in torch.zeros(B, N, 3, H, D).bfloat16().unbind(2))


GIVEN = {
    "rows": [(rows(), rows(), rows()), (rows(8), rows(16), rows(24))],
    "heads": [(heads(), heads(), heads()), (heads(8), heads(), heads(64))],
    "heads of q": [(heads(), rows(), heads()), (heads(), rows(), heads())],
    "packed": [packed(), packed()],
    "one head": [(rows(h=1),) * 3, (rows(8, h=1),) * 3],
    "one query": [(rows(n=1), rows(), rows()), (rows(n=1), rows(), rows()), (rows(n=1), rows(n=81), rows(n=81))],
    "other values": [(rows(), rows(), rows(d=32)), (rows(), rows(), rows(d=32))],
    "heads and other values": [(heads(), heads(), rows(d=32)), (heads(8), heads(8), rows(d=32))],
    "not aligned": [(rows(), rows(), rows()), (rows(8), rows(8), rows(8))],
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "return_lse": True, "scale": 0.5}], ids=str)
def test_a_kept_call(name: str, options: dict[str, Any]) -> None:
    def said(given: tuple[Any, ...], stream: int) -> tuple[Any, ...]:
        """Returns the launches, but for places of what is made, and how results lie."""
        STATE["stream"] = stream
        LAUNCHED.clear()
        o, lse = sdpa.attend(*given, dict(options))
        launched, call = [(bytearray(args), on) for args, on in LAUNCHED], list(call_cache._calls.values())[-1]
        for (args, _), places in zip(launched, call._places, strict=True):
            for _, offset in [each for each in places if each[0] >= len(call.inputs)]:
                args[offset : offset + 8] = bytes(8)
        lies = [None if x is None else (x.shape, x.stride(), x.dtype) for x in (o, lse)]
        assert o.shape == (*given[0].shape[:3], given[2].shape[3])
        return launched, lies

    cold = []
    every = list(itertools.product(GIVEN[name], (0, 7)))
    for each in every:
        forget()
        cold.append(said(*each))
    forget()
    assert [said(*each) for each in every] == cold
    count = len(call_cache._calls)
    assert [said(*each) for each in every] == cold and len(call_cache._calls) == count, "all are kept"


def test_a_kept_call_is_for_these_tensors() -> None:
    """A tensor that comes to require grad, loses its memory, or gets another shape in place is looked at anew; and what is wrong
    stays wrong."""
    q, k, v = GIVEN["heads"][0]
    call = lambda **options: sdpa.scaled_dot_product_attention(q, k, v, **options)  # noqa: E731
    for _ in range(3):
        call(scale=1.0)
    for wrong in (True, torch.tensor(1.0), "1.0"):
        with pytest.raises(ProblemError, match="scale is"):
            call(scale=wrong)
    with pytest.raises(ProblemError, match="causal"):
        sdpa.attend(q, k, v, {"causal": 1, "scale": None})
    q.requires_grad_()
    assert call(scale=1.0).requires_grad
    q = q.detach()
    assert not call(scale=1.0).requires_grad
    views = [torch.zeros(B * H * N * D + 64).bfloat16()[64:].view(B, H, N, D) for _ in range(3)]
    for _ in range(3):
        sdpa.scaled_dot_product_attention(*views)
    views[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):  # torch says so when it transposes
        sdpa.scaled_dot_product_attention(*views)
    views[1].untyped_storage().resize_(2 * (B * H * N * D + 64))
    LAUNCHED.clear()
    sdpa.scaled_dot_product_attention(*views)
    views[2].resize_(B, H, N // 2, D)
    with pytest.raises(ProblemError, match="value has shape"):
        sdpa.scaled_dot_product_attention(*views)
    assert len(LAUNCHED) == 1


def test_freed_memory_at_a_small_address() -> None:
    """In a storage that was freed the address is the offset, which is no alignment of a kept call."""
    views = [torch.zeros(66)[2:].view(1, 1, 1, 64) for _ in range(3)]
    sdpa.attend(*views, {})
    count = len(LAUNCHED)
    for x in views:
        x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        sdpa.attend(*views, {})
    assert len(LAUNCHED) == count


def test_a_mode_sees_the_operator() -> None:
    """A call under autocast is cast, and one that a mode sees goes through the operator."""
    given = [x.float() for x in GIVEN["rows"][0]]
    before = len(LAUNCHED)
    sdpa.attend(*GIVEN["rows"][0], {"causal": True})
    assert len(LAUNCHED) == before + 1
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa.attend(*given, {"causal": True})[0].dtype is torch.bfloat16
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        sdpa.attend(*given, {"causal": True})
    assert counter.get_total_flops() > 0

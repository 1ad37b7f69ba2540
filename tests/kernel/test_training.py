"""Training on the GPU: a tiny model's losses by our kernels in bf16 beside those in float64, eager, captured, checkpointed and
compiled. A minute at most, compiling included."""

from __future__ import annotations

import functools
import shutil
from typing import Any
from unittest import mock

import pytest

import rawattn
from tests.training import Model, gap, losses, sdpa

torch = pytest.importorskip("torch")
checkpointing = pytest.importorskip("torch.utils.checkpoint")
pytestmark = pytest.mark.gpu("any")

STEPS, LENGTH = 200, 192
LIMIT = 1e-3  # of the gap of two curves: bf16 attention stands at 0.7e-4 to 1.4e-4 on the CPU, a tile without dq at 1.4e-2
attend = functools.partial(rawattn.attention, causal=True)


def make(head_dim: int = 64, attend: Any = attend, dtype: Any = torch.float32, cast: Any = torch.bfloat16) -> Model:
    return Model(attend, dtype, cast, head_dim, LENGTH, "cuda")


def train(model: Model) -> Any:
    return losses(model, STEPS, rate(model.head_dim))


def rate(head_dim: int) -> float:
    """A wider model learns as fast in smaller steps, and errors grow faster in it."""
    return 0.064 / head_dim


@functools.cache
def curve(head_dim: int = 64) -> Any:
    return train(make(head_dim))


@pytest.mark.parametrize("head_dim", [64, 192])
def test_training_is_as_exact_as_torch_s(head_dim: int, record_property: Any) -> None:
    exact = train(make(head_dim, sdpa, torch.float64, torch.float64))
    assert exact[-20:].mean() < exact[:20].mean() - 0.5, "it learns"
    ours, torch_s = gap(curve(head_dim), exact), gap(train(make(head_dim, sdpa)), exact)
    record_property(f"gap of the loss at head_dim {head_dim}", f"{ours:.2e}, torch's {torch_s:.2e}")
    assert 0 < ours <= min(LIMIT, 1.5 * torch_s), f"gap {ours:.2e}, torch's {torch_s:.2e}"


def test_training_repeats() -> None:
    assert gap(train(make()), curve()) <= LIMIT / 10


def test_a_captured_step() -> None:
    """Three eager steps and replays of a captured one follow the curve of eager steps."""
    model, found = make(), []
    optimizer, batches = torch.optim.Adam(model.parameters(), lr=rate(64), capturable=True), [*model.batches(STEPS)]
    tokens, graph, stream = batches[0].clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def step() -> Any:
        optimizer.zero_grad()
        value = model.loss(tokens)
        value.backward()
        optimizer.step()
        return value.detach()

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for each in batches[:3]:
            tokens.copy_(each)
            found.append(step())
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        value = step()
    for each in batches[3:]:
        tokens.copy_(each)
        graph.replay()
        found.append(value.clone())
    assert gap(torch.stack(found).double().cpu(), curve()) <= LIMIT


def keep_attention(context: Any, op: Any, *args: Any, **options: Any) -> Any:
    policies = checkpointing.CheckpointPolicy
    return policies.MUST_SAVE if op is torch.ops.rawattn.attention.default else policies.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(checkpointing.create_selective_checkpoint_contexts, keep_attention)}


@pytest.mark.parametrize("options", [{}, SELECTIVE], ids=["all again", "o and lse kept"])
def test_checkpointed_layers(options: dict[str, Any]) -> None:
    model, kept = make(), list[float]()
    layer = model.layer

    def checkpointed(x: Any, i: int) -> Any:
        before = torch.cuda.memory_allocated()
        result = checkpointing.checkpoint(layer, x, i, use_reentrant=False, **options)
        kept.append((torch.cuda.memory_allocated() - before) / (x.numel() * x.element_size()))
        return result

    model.layer = checkpointed  # type: ignore[method-assign]
    assert gap(train(model), curve()) <= LIMIT
    assert max(kept[-2:]) < (1.6 if options else 1.1), (
        "a layer keeps its result in float32 and, where asked for, o in bf16 and lse"
    )


@pytest.fixture
def compiling() -> None:
    pytest.importorskip("triton", reason="torch.compile needs Triton for a GPU")
    if not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("Triton needs a C compiler, gcc or clang")
    torch._dynamo.reset()


def test_a_compiled_step(compiling: None) -> None:
    model = make()
    model.loss = torch.compile(model.loss, fullgraph=True)  # type: ignore[method-assign]
    assert gap(train(model), curve()) <= LIMIT


def test_a_compiled_step_in_trees_of_cuda_graphs(compiling: None) -> None:
    """Forward and backward are recorded as CUDA graphs and replayed, none is left out, and kernels run in them as without."""
    from torch._dynamo.utils import counters

    counters.clear()
    model = make()
    loss, fallen_back = torch.compile(model.loss, mode="reduce-overhead", fullgraph=True), counters["inductor"]

    def step(tokens: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return loss(tokens).clone()  # the next replay writes over what a graph returned

    model.loss = step  # type: ignore[method-assign]
    with mock.patch.object(torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=torch.cuda.CUDAGraph.replay) as replays:
        assert gap(train(model), curve()) <= LIMIT
    assert not fallen_back["cudagraph_skips"], dict(fallen_back)
    assert replays.call_count >= STEPS, "a graph for the forward and one for the backward, from the third step on"

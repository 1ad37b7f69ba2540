"""Arrays of every library, of any strides, on any device: read where they lie, and the same bits come out."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn.runtime.bound_call import KEPT_LAUNCHES
from rawattn.runtime.call_cache import KEPT_CALLS
from rawattn.testing import Case, expect, expect_backward
from tests.calls import attend

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASE = Case("fp16", 2, 200, 300, 4, 2, causal=True)
CASES = [CASE, dataclasses.replace(CASE, dtype="bf16"), Case("bf16", heads=2, lengths=((100, 200), (0, 5), (77, 20)))]
EACH = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def bits(x: Any) -> npt.NDArray[np.uint8]:
    """An array's bytes, whatever library it is of."""
    if isinstance(x, torch.Tensor):
        return x.contiguous().view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(x.get() if hasattr(x, "get") else np.asarray(x)).view(np.uint8)


def same(found: Any, wanted: Any) -> bool:
    return all(np.array_equal(bits(a), bits(b)) for a, b in zip(found, wanted, strict=True))


@EACH
def test_cupy(case: Case) -> None:
    cupy = pytest.importorskip("cupy")
    inputs = case.inputs("cupy", 0)
    o, lse = found = attend(case, *inputs)
    assert isinstance(o, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert (o.dtype, lse.dtype, o.device) == (inputs[0].dtype, np.float32, inputs[0].device)
    assert same(found, attend(case, *case.inputs("torch", "cuda")))
    out = case.out("cupy", 0)
    assert attend(case, *inputs, out=out)[0] is out
    assert same([out], [o])


def test_cupy_backward_into_given_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    inputs, (do, dlse) = CASE.inputs("cupy", 0), CASE.output_gradients("cupy", 0)
    o, lse = rawattn.attention(*inputs, **CASE.options, return_lse=True)
    wanted = rawattn.attention_backward(do, *inputs, o, lse, dlse=dlse, **CASE.options)
    expect_backward(do, *inputs, dlse=dlse, **CASE.options).check(*wanted)
    wide = [cupy.full((*x.shape[:-1], 2 * x.shape[-1]), 77, x.dtype) for x in inputs]
    out = tuple(x[..., : x.shape[-1] // 2] for x in wide)  # views, whose other half is left alone
    for _ in range(2):
        found = rawattn.attention_backward(do, *inputs, o, lse, dlse=dlse, out=out, **CASE.options)
        assert all(a is b for a, b in zip(found, out, strict=True)) and same(found, wanted)
        assert all((x[..., x.shape[-1] // 2 :] == 77).all() for x in wide)
        for x in out:
            x[...] = 5


@pytest.mark.parametrize("kind", ["pool", "asynchronous"])
def test_cupy_memory(kind: str) -> None:
    """Results and scratch memory come from the allocator that CuPy has at the time."""
    cupy = pytest.importorskip("cupy")
    inputs, (do, _) = CASE.inputs("cupy", 0), CASE.output_gradients("cupy", 0)
    o, lse = rawattn.attention(*inputs, **CASE.options, return_lse=True)
    wanted = rawattn.attention_backward(do, *inputs, o, lse, **CASE.options)
    try:
        pool = cupy.cuda.MemoryPool() if kind == "pool" else cupy.cuda.MemoryAsyncPool()
    except RuntimeError as error:
        pytest.skip(f"needs stream-ordered memory: {error}")
    asked: list[int] = []

    def malloc(size: int) -> Any:
        asked.append(size)
        return pool.malloc(size)

    with cupy.cuda.using_allocator(malloc):
        for _ in range(3):  # each time what was freed is used again
            own, own_lse = rawattn.attention(*inputs, **CASE.options, return_lse=True)
            found = rawattn.attention_backward(do, *inputs, own, own_lse, **CASE.options)
            assert same((own, *found), (o, *wanted))
    assert sum(asked) >= 3 * (o.nbytes + sum(x.nbytes for x in wanted))
    del own, own_lse, found


def test_cupy_captures_a_call() -> None:
    cupy = pytest.importorskip("cupy")
    inputs, out = CASE.inputs("cupy", 0), CASE.out("cupy", 0)
    rawattn.attention(*inputs, **CASE.options, out=out)  # compiles before the capture
    cupy.cuda.Device(0).synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        rawattn.attention(*inputs, **CASE.options, out=out)
        graph = stream.end_capture()
        for factor in (1, -1):
            cupy.multiply(inputs[0], factor, out=inputs[0])
            out[...] = 5
            graph.launch()
            stream.synchronize()
            assert same([out], [rawattn.attention(*inputs, **CASE.options)])


def test_cupy_streams_of_threads() -> None:
    """Each thread has a default stream of its own, and calls of several meet in kept launches."""
    cupy = pytest.importorskip("cupy")
    given = [CASE.inputs("cupy", 0), [-x for x in CASE.inputs("cupy", 0)]]
    wanted = [rawattn.attention(*each, **CASE.options) for each in given]
    cupy.cuda.get_current_stream().synchronize()

    def work(i: int) -> bool:
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds as stream:
            found = [rawattn.attention(*given[i % 2], **CASE.options) for _ in range(20)]
            stream.synchronize()
            return all(same([x], [wanted[i % 2]]) for x in found)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))


def test_cupy_on_a_device_that_is_not_current() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    here, there = CASE.inputs("cupy", 0), CASE.inputs("cupy", 1)
    with cupy.cuda.Device(0):
        o, lse = attend(CASE, *there)
        assert o.device.id == lse.device.id == 1 and cupy.cuda.Device().id == 0
        with cupy.cuda.Device(1):
            cupy.cuda.get_current_stream().synchronize()
        assert same((o, lse), attend(CASE, *here))


def test_numba() -> None:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("needs numba.cuda with a driver that it can use")
    q, k, v = (np.ascontiguousarray(x) for x in CASE.inputs())
    o, lse = attend(CASE, *map(cuda.to_device, (q, k, v)))
    assert cuda.is_cuda_array(o) and type(o).__module__.startswith("numba")
    assert same((o.copy_to_host(), lse.copy_to_host()), attend(CASE, *CASE.inputs("torch", "cuda")))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"needs a JAX that sees the GPU: {error}")

    @jax.jit
    def late(x: Any, ones: Any) -> Any:
        """x, after some milliseconds of work on JAX's own stream."""
        for _ in range(20):
            ones = ones @ ones / len(ones)
        return x * ones[0, 0].astype(x.dtype)

    wanted = attend(CASE, *CASE.inputs("torch", "cuda"))
    inputs = [jax.device_put(np.ascontiguousarray(x), device) for x in CASE.inputs()]
    ones = jax.device_put(np.ones((4096, 4096), np.float32), device)
    for _ in range(3):
        o, lse = attend(CASE, *(late(x, ones) for x in inputs))
        assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
        assert same((o, lse), wanted)


class Producer:
    """An array that can do no more than hand itself over."""

    def __init__(self, array: Any) -> None:
        self.array, self.streams = array, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.streams.append(options.get("stream"))
        return self.array.__dlpack__(**options)


class Namespace:
    @staticmethod
    def from_dlpack(x: Any) -> Producer:
        return Producer(x)


class StandardProducer(Producer):
    """One that says, as the array API standard has it, which library takes results."""

    def __array_namespace__(self) -> type:
        return Namespace


@pytest.mark.parametrize("kind", [Producer, StandardProducer])
def test_any_producer(kind: type[Producer]) -> None:
    cupy = pytest.importorskip("cupy")
    arrays = CASE.inputs("cupy", 0)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        inputs = [kind(x) for x in arrays]
        found = attend(CASE, *inputs)
        stream.synchronize()
    assert [x.streams for x in inputs] == [[stream.ptr]] * 3, "the producer was not told which stream must wait for its own"
    if kind is StandardProducer:
        assert all(isinstance(x, Producer) for x in found)
        found = [x.array for x in found]
    assert same(found, attend(CASE, *arrays))


def test_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        for case in CASES:
            there = attend(case, *case.inputs("torch", "cuda:1"))
            assert all(x.device == torch.device("cuda", 1) for x in there)
            assert same(there, attend(case, *case.inputs("torch", "cuda:0")))
        assert torch.cuda.current_device() == 0


@EACH
def test_plan_takes_other_strides(case: Case) -> None:
    inputs = case.inputs("torch", "cuda")
    plan = rawattn.plan(*inputs, **case.options, return_lse=True)
    wanted = plan.run(*inputs)
    for layout in ("contiguous", "heads_first", "packed", "padded"):
        assert same(plan.run(*dataclasses.replace(case, layout=layout).inputs("torch", "cuda")), wanted), layout
    expanded = dataclasses.replace(case, layout="expanded").inputs("torch", "cuda")
    expect(*expanded, **case.options).check(*plan.run(*expanded))


def test_plan_takes_other_pointers() -> None:
    """More of them than a plan keeps launches for."""
    inputs = CASE.inputs("torch", "cuda")
    plan = rawattn.plan(*inputs, **CASE.options)
    wanted = plan.run(*inputs)
    outs = [torch.full_like(wanted, float("nan")) for _ in range(KEPT_LAUNCHES + 10)]
    for out in outs + outs:
        plan.run(*inputs, out=out)
    assert all(torch.equal(out, wanted) for out in outs)


def test_plan_takes_other_inputs() -> None:
    """More of them than a plan stays bound to."""
    inputs, out = CASE.inputs("torch", "cuda"), None
    plan = rawattn.plan(*inputs, **CASE.options)
    wanted = plan.run(*inputs)
    many = [inputs[0].clone() for _ in range(KEPT_CALLS + 10)]
    for q in many + many:
        out = torch.full_like(wanted, float("nan"))
        plan.run(q, *inputs[1:], out=out)
        q[:] = float("nan")  # it is not read again
        assert torch.equal(out, wanted)
        q.copy_(inputs[0])


def test_memory_that_is_used_again() -> None:
    """Other tensors at the same address: the results are of those."""
    memory = torch.randn(3, 1 << 20, device="cuda").bfloat16()
    for shape in ((2, 128, 4, 64), (2, 64, 8, 64), (1, 256, 4, 64), (2, 128, 2, 128), (2, 128, 4, 64)):
        count = shape[0] * shape[1] * shape[2] * shape[3]
        q, k, v = (x[:count].view(shape) for x in memory)
        for given in ((q, k, v), (k, v, q), (q.view(torch.float16), k.view(torch.float16), v.view(torch.float16))):
            expect(*given).check(rawattn.attention(*given))
        swapped = [x.view(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2) for x in (q, k, v)]
        expect(*swapped).check(rawattn.attention(*swapped))


def test_what_the_copy_engine_cannot_read() -> None:
    q, k, v = CASE.inputs("torch", "cuda")
    plan = rawattn.plan(q, k, v)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    odd = torch.empty((*k.shape[:-1], 65), dtype=k.dtype, device="cuda")[..., :64]
    for name, given in (("q", (shifted, k, v)), ("k", (q, odd, v))):
        with pytest.raises(rawattn.UnsupportedError, match=rf"{name} .*16 bytes"):
            rawattn.attention(*given)
        with pytest.raises(rawattn.ProblemError, match=rf"{name} .*16 bytes"):
            plan.run(*given)

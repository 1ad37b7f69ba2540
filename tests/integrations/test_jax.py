"""rawattn.jax gives the bits of rawattn.attention, and what JAX's own attention gives, under every transform."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import rawattn  # noqa: E402
import rawattn.jax  # noqa: E402
from rawattn.errors import ProblemError, UnsupportedError  # noqa: E402
from rawattn.testing import Case, expect, expect_backward  # noqa: E402
from rawattn.variant.mask import And, Causal, Window  # noqa: E402

DTYPES = ("float32", "float64", "float16", "bfloat16")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (3, 0), "softcap": 2.0, "scale": 0.3},
    "mask": {"mask": And(Causal("top_left"), Window(5, 2, "top_left"))}, "offset": {"causal": True, "q_offset": 4},
}  # fmt: skip
SINKS = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu("any"))], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Gives each device on which JAX computes."""
    try:
        found = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"needs a JAX that sees the GPU: {error}")
    with jax.default_device(found), jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield found


def make(dtype: str = "float32", q_len: int = 20, kv_len: int = 24, seed: int = 0) -> tuple[Any, ...]:
    shapes = ((2, q_len, 4, 16), (2, kv_len, 2, 16), (2, kv_len, 2, 8))
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)


def gradients(f: Any, *given: Any) -> Any:
    """The gradients of a loss that depends on every element of o."""
    return jax.grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).sum(), tuple(range(len(given))))(*given)


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


def near(a: Any, b: Any, tolerance: float = 2e-5) -> bool:
    return all(np.allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_forward(name: str, dtype: str, jit: bool) -> None:
    """The bits are those of a call on the arrays themselves, which come in by DLPack or as NumPy's."""
    given = make(dtype)
    f = functools.partial(rawattn.jax.attention, **OPTIONS[name], return_lse=True)
    o, lse = (jax.jit(f) if jit else f)(*given)
    assert o.dtype == dtype and lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert o.shape == (2, 20, 4, 8) and lse.shape == (2, 4, 20)
    assert same((o, lse), plain(given, **OPTIONS[name]))


def plain(given: Any, **options: Any) -> Any:
    """Returns what rawattn.attention gives for these arrays, where they are."""
    on_gpu = given[0].devices().pop().platform != "cpu"
    inputs = given if on_gpu else [np.asarray(x) for x in given]
    return rawattn.attention(*inputs, **options, return_lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str, dtype: str) -> None:
    given = make(dtype)
    f = functools.partial(rawattn.jax.attention, **OPTIONS[name])
    found = jax.jit(functools.partial(gradients, f))(*given)
    o, lse = plain(given, **OPTIONS[name])
    do = 2 * np.asarray(o, np.float32).astype(o.dtype)
    on_gpu = given[0].devices().pop().platform != "cpu"
    inputs = (jnp.asarray(do), *given, o, lse) if on_gpu else tuple(np.asarray(x) for x in (do, *given, o, lse))
    assert same(found, rawattn.attention_backward(*inputs, dlse=inputs[-1] * 0, **OPTIONS[name]))


def test_gradients_are_those_of_jax() -> None:
    q, k, _ = make(kv_len=20)
    given = q, k, k * 0.5
    wanted = gradients(functools.partial(jax.nn.dot_product_attention, is_causal=True), *given)
    assert near(gradients(functools.partial(rawattn.jax.attention, causal=True), *given), wanted)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = make()

    def total(x: Any) -> Any:
        return (rawattn.jax.attention(x, k, v) ** 2).sum()

    for call in (jax.grad(lambda x: jax.grad(total)(x).sum()), jax.jit(jax.jacrev(jax.grad(total)))):
        with pytest.raises(ProblemError, match="a second derivative"):
            call(q)


def test_gradients_of_lse_and_sinks() -> None:
    """By finite differences in float64, along one direction of all inputs together."""
    given = (*make("float64"), jnp.asarray(SINKS, "float64").at[3].set(0.25))

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        o, lse = rawattn.jax.attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
        return (o**3).sum() + jnp.where(lse > -1e30, lse**2, 0).sum()

    random = np.random.default_rng(7)
    way, step = [jnp.asarray(random.standard_normal(x.shape)) for x in given], 1e-5
    up, down = (loss(*(x + sign * step * y for x, y in zip(given, way, strict=True))) for sign in (1, -1))
    found = sum((x * y).sum() for x, y in zip(jax.grad(loss, (0, 1, 2, 3))(*given), way, strict=True))
    assert abs(found - (up - down) / (2 * step)) < 1e-6 * abs(found)


@pytest.mark.parametrize("sinks", [False, True])
def test_vmap(sinks: bool) -> None:
    elements = [make(seed=seed) for seed in range(3)]
    stacked = tuple(jnp.stack(x) for x in zip(*elements, strict=True))
    f = functools.partial(rawattn.jax.attention, causal=True, **({"sinks": jnp.asarray(SINKS)} if sinks else {}))
    assert same(jax.vmap(f)(*stacked), [f(*x) for x in elements])
    found = jax.vmap(functools.partial(gradients, f))(*stacked)
    assert near(found, [jnp.stack(x) for x in zip(*(gradients(f, *x) for x in elements), strict=True)], 1e-6)
    _, k, v = elements[0]
    over_q = jax.vmap(f, in_axes=(0, None, None))(stacked[0], k, v)
    assert same(over_q, [f(x[0], k, v) for x in elements])
    twice = jnp.stack([stacked[0], stacked[0]], 1)
    nested = jax.vmap(jax.vmap(f, in_axes=(0, None, None)), in_axes=(0, None, None))(twice, k, v)
    assert same(nested[:, 1], [f(x[0], k, v) for x in elements])


@pytest.mark.parametrize("sinks", [False, True])
def test_shard_map(sinks: bool, device: Any) -> None:
    """Over batch and heads; the sinks are whole along the batch, so their gradients are summed."""
    devices = list(jax.devices(device.platform))
    if len(devices) < 4:
        pytest.skip(f"needs 4 devices, not {len(devices)}")
    mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("batch", "heads"))
    spec = P("batch", None, "heads", None)
    given = (*make(), *([jnp.asarray(SINKS)] if sinks else []))

    def f(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return rawattn.jax.attention(q, k, v, sinks=sinks, causal=True)

    split = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, spec, P("heads"))[: len(given)], out_specs=spec)
    assert same([jax.jit(split)(*given)], [f(*given)])
    assert near(jax.jit(functools.partial(gradients, split))(*given), gradients(f, *given), 1e-6)


def test_checkpoint_and_scan() -> None:
    """JAX calls a function again, or many times."""
    q, k, _ = make(kv_len=20)
    q = k = k.repeat(2, 2)

    def step(x: Any, _: Any) -> Any:
        return jax.checkpoint(lambda x: rawattn.jax.attention(x, k, k, causal=True))(x), None

    def loss(x: Any, reached: Any) -> Any:
        return (reached(x) ** 2).sum()

    def looped(x: Any) -> Any:
        return jax.lax.scan(step, x, None, length=3)[0]

    def unrolled(x: Any) -> Any:
        for _ in range(3):
            x = rawattn.jax.attention(x, k, k, causal=True)
        return x

    found, wanted = (jax.grad(functools.partial(loss, reached=f))(q) for f in (looped, unrolled))
    assert near([found], [wanted], 1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"local_window_size": 4}, {"is_causal": True, "local_window_size": (6, 3), "scale": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("batched", [True, False])
def test_dot_product_attention(options: dict[str, Any], batched: bool) -> None:
    q, k, _ = make()
    given = (q, k, k * 0.5) if batched else (q[0], k[0], k[0] * 0.5)
    found = rawattn.jax.dot_product_attention(*given, **options, return_residual=True)
    wanted = jax.nn.dot_product_attention(*given, **options, return_residual=True)
    assert [x.shape for x in found] == [x.shape for x in wanted] and near(found, wanted)
    assert same([rawattn.jax.dot_product_attention(*given, **options)], found[:1])


@pytest.mark.parametrize(
    ("bias", "mask"), [((2, 4, 20, 24), None), ((4, 1, 24), (1, 1, 20, 24)), (None, (2, 4, 20, 24)), ((1, 1, 20, 24), (20, 1))]
)
def test_dot_product_attention_with_arrays(bias: Any, mask: Any) -> None:
    """A bias has a gradient; both stand beside the other options. Every query keeps a key: JAX's own gives others a mean."""
    q, k, _ = make("float64")
    random = np.random.default_rng(3)
    added = None if bias is None else jnp.asarray(random.standard_normal(bias))
    kept = None if mask is None else jnp.asarray(random.random(mask) < 0.6).at[..., 0].set(True)
    given = (q, k, k * 0.5, *([] if added is None else [added]))
    for options in ({}, {"is_causal": True, "scale": 0.4}, {"local_window_size": (24, 3)}):
        found, wanted = (
            jax.jit(functools.partial(gradients, functools.partial(f, mask=kept, **options)))(*given)
            for f in (rawattn.jax.dot_product_attention, jax.nn.dot_product_attention)
        )
        assert near(found, wanted)


def test_lengths() -> None:
    q, k, _ = make(kv_len=20)
    lengths = {name: jnp.array(n, jnp.int32) for name, n in (("query_seq_lengths", [20, 7]), ("key_value_seq_lengths", [5, 20]))}
    options = {"is_causal": True, "local_window_size": (30, 0), "return_residual": True, **lengths}
    found = jax.jit(functools.partial(rawattn.jax.dot_product_attention, **options))(q, k, k)
    wanted = jax.nn.dot_product_attention(q, k, k, **options)
    kept = np.isfinite(np.asarray(found[1]))
    assert kept.sum() == 4 * (20 + 7)
    assert near([x[kept] for x in found], [x[kept] for x in wanted]) and not np.asarray(found[0])[~kept].any()

    def loss(attend: Any, q: Any, k: Any, v: Any) -> Any:
        return (jnp.where(kept[..., None], attend(q, k, v, **{**options, "return_residual": False}), 0) ** 2).sum()

    found, wanted = (
        jax.grad(functools.partial(loss, each.dot_product_attention), (0, 1, 2))(q, k, k) for each in (rawattn.jax, jax.nn)
    )
    assert near(found, wanted) and not found[0][1, 7:].any() and not found[1][0, 5:].any()
    lens = jnp.array([[3, 20], [0, 9]], jnp.int32)
    mapped = jax.vmap(jax.grad(lambda q, n: (rawattn.jax.attention(q, k, k, q_lens=n) ** 2).sum()), (None, 0))(q, lens)
    each = [jax.grad(lambda q, n=n: (rawattn.jax.attention(q, k, k, q_lens=n) ** 2).sum())(q) for n in lens]
    assert near(mapped, each, 1e-6)


def test_refusals() -> None:
    q, k, v = make()
    with pytest.raises(ProblemError, match="v has shape"):
        jax.jit(rawattn.jax.attention)(q, k, v[:, :3])
    with pytest.raises(ProblemError, match="k has dtype fp16 but q has fp32"):
        rawattn.jax.attention(q, k.astype("float16"), v)
    with pytest.raises(ProblemError, match="constant_time=True"):
        jax.grad(lambda q: rawattn.jax.attention(q, k, v, constant_time=True).sum())(q)
    with pytest.raises(ProblemError, match=r"bias has shape .* it must be \(2, 4, 20, 24\)"):
        rawattn.jax.dot_product_attention(q, k, k, jnp.ones((2, 4, 20, 23)))
    for mask in (jnp.ones((2, 4, 20, 23), bool), jnp.ones((20, 24))):
        with pytest.raises(ProblemError, match=r"mask is .* it must be of bool, and broadcast to \(2, 4, 20, 24\)"):
            rawattn.jax.dot_product_attention(q, k, k, mask=mask)
    with pytest.raises(ProblemError, match="query_seq_lengths is fp"):
        rawattn.jax.dot_product_attention(q, k, k, query_seq_lengths=jnp.ones(2))
    with pytest.raises(ProblemError, match=r"seed is None, and dropout is 0\.5; give an int"):
        rawattn.jax.attention(q, k, v, dropout=0.5)
    for seed in (0.5, True, 1 << 63, jnp.ones(1), jnp.ones(3, jnp.int32), jax.random.split(jax.random.key(0))):
        with pytest.raises(ProblemError, match="seed is "):
            rawattn.jax.attention(q, k, v, dropout=0.5, seed=seed)
    with pytest.raises(ProblemError, match="implementation is 'cudnn'"):
        rawattn.jax.dot_product_attention(q, k, k, implementation="cudnn")
    with pytest.raises(ProblemError, match="words holds uint32; its dtype must be one of"):
        words = jnp.ones(24, jnp.uint32)
        rawattn.jax.attention(q, k, v, score=lambda s, b, h, i, j: s + words[j])
    wide = jnp.ones((1, 2, 1, 1100))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)UnsupportedError.*head_dim is 1100"):
        jax.block_until_ready(rawattn.jax.attention(wide, wide, wide))
    with pytest.raises(TypeError, match=r"custom_vjp"):
        jax.jvp(lambda q: rawattn.jax.attention(q, k, v), (q,), (q,))


def test_nothing_else_is_imported() -> None:
    code = "import sys, rawattn; assert 'jax' not in sys.modules; import rawattn.jax; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


CAPTURED = """
import jax, jax.numpy as jnp, numpy as np, rawattn.api.attention, rawattn.jax
calls, run = [], rawattn.runtime.calls.run
def counted(*given, **options):
    calls.append(1)
    return run(*given, **options)
rawattn.runtime.calls.run = counted
@jax.jit
def step(x):
    for _ in range(3):
        x = rawattn.jax.attention(x, x, x, causal=True) + x
    return x
x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 300, 4, 64)), jnp.bfloat16)
for seed in range(3):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((2, 300, 4, 64)), jnp.bfloat16)
    for _ in range(4):  # XLA captures a program for the addresses that it has met
        found = step(x)
    wanted = x
    before = len(calls)
    for _ in range(3):
        wanted = rawattn.attention(wanted, wanted, wanted, causal=True) + wanted
    assert np.array_equal(np.asarray(found), np.asarray(wanted)), seed
    del calls[before:]
print(len(calls))
"""


@pytest.mark.gpu("any")
def test_command_buffer(device: Any) -> None:
    """Captured in a CUDA graph, Python is called less often than the program runs, and new numbers are seen."""
    if device.platform == "cpu":
        pytest.skip("for the GPU")
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", CAPTURED], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout) < 3 * 4 * 3


# ---- functions


def functions_of(doc: Any, slopes: Any) -> dict[str, Any]:
    mask = lambda q, kv: (doc[q] == doc[kv]) & (q - kv < 7)  # noqa: E731
    return {"mask": mask, "score": lambda s, h, q, kv: s + slopes[h] * (kv - q)}


def test_functions() -> None:
    """Captured arrays may be traced, closed over, or mapped, and must not be differentiated."""
    case = Case("fp32", 2, 40, 40, 4, 2, 16, 16)
    on_host, (q, k, v) = case.inputs(), map(jnp.asarray, case.inputs())
    doc, slopes = jnp.arange(40, dtype=jnp.int32) // 9, jnp.asarray([0.1, 0.2, -0.1, 0.3], jnp.float32)
    own = functions_of(np.asarray(doc), np.asarray(slopes))
    wanted = expect(*on_host, **own)
    attention = lambda q, k, v, doc, slopes: rawattn.jax.attention(q, k, v, **functions_of(doc, slopes))  # noqa: E731
    o = attention(q, k, v, doc, slopes)
    wanted.check(np.asarray(o))
    assert (jax.jit(attention)(q, k, v, doc, slopes) == o).all()
    assert (jax.jit(lambda q, k, v: attention(q, k, v, doc, slopes))(q, k, v) == o).all()
    found = jax.grad(lambda *given: (attention(*given, doc, slopes) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
    expect_backward(2 * np.asarray(o), *on_host, **own).check(*map(np.asarray, found))
    docs = jnp.stack([doc, doc // 2])
    mapped = jax.vmap(lambda doc: attention(q, k, v, doc, slopes))(docs)
    assert (mapped == jnp.stack([attention(q, k, v, each, slopes) for each in docs])).all()
    with pytest.raises(UnsupportedError, match="gate, which mask captured, is differentiated, and a mask has no gradient"):
        jax.grad(lambda gate: rawattn.jax.attention(q, k, v, mask=lambda b, h, i, j: gate[i] > gate[j]).sum())(q[0, :, 0, 0])
    with pytest.raises(ProblemError, match="doc, which mask captured, is a ndarray; it must be a JAX array"):
        attention(q, k, v, np.asarray(doc), slopes)
    bias = jnp.arange(40, dtype=jnp.float32)
    added = np.asarray(bias), np.asarray(slopes)
    wanted = expect(*on_host, score=lambda s, h, q, kv: s + added[0][kv] + added[1][h] * -abs(kv - q))
    wanted.check(np.asarray(rawattn.jax.attention(q, k, v, bias=bias, alibi=slopes)))


def formula(q: Any, k: Any, v: Any, table: Any, slopes: Any, gate: Any) -> Any:
    """Attention with three arrays in its score, in array operations."""
    at = jnp.arange(q.shape[1])
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k.repeat(2, 2)) / 4
    s = s * gate[:, None, :, None] + table[:, at[None] - at[:, None] + 20] + (slopes[:, None, None] * (at - at[:, None]))[None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v.repeat(2, 2))


def scored(q: Any, k: Any, v: Any, table: Any, slopes: Any, gate: Any) -> Any:
    score = lambda s, b, h, i, j: s * gate[b, i] + table[h, j - i + 20] + slopes[h] * (j - i)  # noqa: E731
    return rawattn.jax.attention(q, k, v, score=score)


def captured(dtype: str = "float64") -> tuple[Any, ...]:
    random = np.random.default_rng(2)
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in ((4, 40), (4,), (2, 20)))


def test_gradients_of_what_a_score_captured(device: Any) -> None:
    """Beside those of q, k and v, under jit, vmap and shard_map, and of some of them alone."""
    given = (*make("float64", kv_len=20), *captured())
    wanted = gradients(formula, *given)
    assert near(gradients(scored, *given), wanted, 1e-9)
    assert near(jax.jit(functools.partial(gradients, scored))(*given), wanted, 1e-9)
    assert near(gradients(lambda x: scored(*given[:4], x, given[5]), given[4]), wanted[4:5], 1e-9)
    axes = (None, None, None, 0, None, None)
    tables = jnp.stack([given[3], given[3] * 2])
    mapped = lambda f: lambda *x: jax.vmap(f, in_axes=axes)(*x)  # noqa: E731
    found, wanted = (gradients(mapped(f), *given[:3], tables, *given[4:]) for f in (scored, formula))
    assert near(found, wanted, 1e-9)
    devices = list(jax.devices(device.platform))
    if len(devices) >= 2:
        mesh, spec = Mesh(np.array(devices[:2]), ("batch",)), P("batch")
        split = jax.shard_map(scored, mesh=mesh, in_specs=(spec, spec, spec, P(), P(), spec), out_specs=spec)
        assert near(jax.jit(functools.partial(gradients, split))(*given), gradients(formula, *given), 1e-9)


def test_gradients_of_bias_and_alibi() -> None:
    q, k, v = make("float64", kv_len=20)
    at, bias = jnp.arange(20), jnp.asarray(np.random.default_rng(4).standard_normal((1, 4, 20, 20)))

    def wanted(bias: Any, slopes: Any) -> Any:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k.repeat(2, 2)) / 4 + bias - (slopes[:, None, None] * abs(at - at[:, None]))[None]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v.repeat(2, 2))

    given = (bias, captured()[1])
    found = gradients(lambda bias, slopes: rawattn.jax.attention(q, k, v, bias=bias, alibi=slopes), *given)
    assert near(found, gradients(wanted, *given), 1e-9)


def test_dropout() -> None:
    """A seed drops the same weights whatever it comes in, also in the gradients, and as rawattn.attention does."""
    given = make(kv_len=20)
    key = jax.random.key(3)
    drawn = int(np.asarray(jax.random.bits(key, (2,), jnp.uint32)).view(np.int64)[0])
    cases = [(5, 5), (-7, -7), (1 << 40, 1 << 40), (np.array([9]), 9), (jnp.array(-3, "int32"), -3), (key, drawn)]
    cases += [(jnp.array([-(1 << 40)]), -(1 << 40)), (jnp.array([1 << 31], "uint32"), 1 << 31)]
    for seed, number in cases:
        f = lambda q, k, v, seed=seed: rawattn.jax.attention(q, k, v, dropout=0.25, seed=seed)  # noqa: E731
        assert same([f(*given)], plain(given, dropout=0.25, seed=number)[:1]), seed
    traced = jax.jit(lambda q, k, v, seed: rawattn.jax.attention(q, k, v, dropout=0.25, seed=seed))
    assert same([traced(*given, jnp.array(5))], plain(given, dropout=0.25, seed=5)[:1])
    assert not same([traced(*given, jnp.array(5))], [traced(*given, jnp.array(6))])
    values = jnp.ones_like(given[2])
    (dropped,) = jax.grad(lambda v: traced(*given[:2], v, jnp.array(5)).sum(), (0,))(values)
    assert abs((dropped * values).sum() - traced(*given[:2], values, jnp.array(5)).sum()) < 1e-2
    seeds = jnp.array([5, 6])
    mapped = jax.vmap(traced, in_axes=(None, None, None, 0))(*given, seeds)
    assert same(mapped, [traced(*given, seed) for seed in seeds])


def test_caches() -> None:
    """They are read where they lie, by calls and plans. Nothing is appended to what cannot be written."""
    random = np.random.default_rng(0)
    pools, q, new = (random.standard_normal(shape) for shape in ((2, 6, 16, 2, 32), (2, 1, 4, 32), (2, 2, 1, 2, 32)))
    lens, table = np.array([20, 35], np.int32), np.array([[0, 1, 77], [2, 3, 4]], np.int32)
    rows, k, v = (jnp.asarray(x, "float16") for x in (q, *pools))
    cache, step = rawattn.KVCache(k, v), rawattn.Step(jnp.asarray(lens), jnp.asarray(table))
    wanted = rawattn.attention_kvcache(
        *(np.asarray(rows), rawattn.KVCache(np.asarray(k), np.asarray(v)), rawattn.Step(lens, table)), return_lse=True
    )
    for found in (
        rawattn.attention_kvcache(rows, cache, step, return_lse=True),
        rawattn.plan_kvcache(rows, cache, step, return_lse=True).run(rows, cache, step),
    ):
        assert all(isinstance(x, jax.Array) for x in found) and found[0].dtype == "float16" and near(found, wanted, 2e-3)
    before = np.asarray(k).copy()
    for call in (rawattn.append, functools.partial(rawattn.attention_append, rows)):
        given = (
            (cache, step, *jnp.asarray(new, "float16")) if call is rawattn.append else (*jnp.asarray(new, "float16"), cache, step)
        )
        with pytest.raises(
            ProblemError, match=r"cache's k is a ArrayImpl.* A JAX array is immutable: write by k\.at\[\.\.\.\]\.set"
        ):
            call(*given)
    with pytest.raises(ProblemError, match="q is traced by JAX"):
        jax.jit(lambda x: rawattn.attention_kvcache(x, cache, step))(rows)
    assert np.array_equal(np.asarray(k), before)
    other = rawattn.KVCache(k.at[0, 0].set(new[0, 0, 0].astype("float16")), v)
    assert not near([rawattn.attention_kvcache(rows, other, step)], wanted[:1], 2e-3)


def test_what_is_not_taken() -> None:
    """Nothing is cast, and arrays of other libraries are refused; NumPy's are taken."""
    q, _, _ = make()
    slopes, bias = np.ones(4, np.float32), np.ones((20, 20), np.float32)
    plain = {"bias": jnp.asarray(bias), "alibi": jnp.asarray(slopes)}
    wanted = rawattn.jax.attention(q, q, q, **plain)
    host = np.asarray(q)
    assert same([rawattn.jax.attention(host, q, host, bias=bias, alibi=slopes)], [wanted])
    with jax.enable_x64(False):
        for given, message in (
            ({"k": host.astype(np.float64)}, "k is a NumPy array of float64, of which JAX would make float32; give that, or set"),
            ({"kv_lens": np.array([3, 4])}, "kv_lens is a NumPy array of int64, of which JAX would make int32"),
            ({"bias": bias.astype(np.float64)}, "bias is a NumPy array of float64, of which JAX would make float32"),
            ({"v": host.tolist()}, "v is a builtins.list; it must be an array of JAX or NumPy."),
            ({"v": memoryview(host)}, "v is a builtins.memoryview; it must be an array of JAX or NumPy."),
        ):
            with pytest.raises(ProblemError) as error:
                rawattn.jax.attention(**{"q": q, "k": q, "v": q, **given})
            assert str(error.value).startswith(message)
        with pytest.raises(ProblemError, match="value is a NumPy array of float64"):
            rawattn.jax.dot_product_attention(q, q, host.astype(np.float64))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_the_other_adapter_is_named(transform: Any) -> None:
    q, _, _ = make()
    with pytest.raises(ProblemError, match=r"q is traced by JAX .* call rawattn.jax.attention instead"):
        transform(lambda x: rawattn.attention(x, x, x))(q)

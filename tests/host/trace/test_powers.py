"""Powers, and functions that are accurate near 0, in all that is written of them: CUDA C compiled for the host,
derivatives, classes of tiles, and calls on the CPU."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
import rawattn.reference
from rawattn import trace
from rawattn.compile import compiler
from rawattn.compile.compiler import Source
from rawattn.trace.classes import EMPTY, FULL
from rawattn.trace.evaluation import evaluate
from rawattn.trace.gradients import gradients
from tests.host.trace.test_compile import HEAD, struct
from tests.traced import Library, files, function

torch = pytest.importorskip("torch")
N = 16
AT = (0, 0, np.arange(N)[:, None], np.arange(N)[None], N, N)
S = np.random.default_rng(0).integers(-8, 9, (N, N)) / 4
S[:4] *= 1e-3
TABLE = np.array([2.0, 3.0, 0.0, 1.0, 1.5], np.float32)


def of_number(y: Any) -> Any:
    return lambda s: s**y


POWERS: list[tuple[Any, Any, Any]] = [  # a score, its value, its derivative
    (lambda s: s**2.0, S**2, 2 * S),
    (lambda s: s**11, S**11, 11 * S**10),
    (of_number(3), S**3, 3 * S**2),
    *((of_number(y), np.power(S, y), y * np.power(S, max(y - 1, 0))) for y in (0.0, 1.0, 2.0, 3.0)),
    (of_number(1.5), np.where(S < 0, np.nan, abs(S) ** 1.5), np.where(S < 0, np.nan, 1.5 * abs(S) ** 0.5)),
    (lambda s, kv: s ** (kv % 4), S ** (AT[3] % 4), (AT[3] % 4) * S ** np.maximum(AT[3] % 4 - 1, 0)),
    (lambda s, kv: s + TABLE[kv % 2] ** -2.0, S + np.where(AT[3] % 2, 1 / 9, 1 / 4), 1),
    (lambda s, q: s + (-2.0) ** (q % 4 - 1), S + (-2.0) ** (AT[2] % 4 - 1), 1),
    (lambda s: np.expm1(s), np.expm1(S), np.exp(S)),
    (lambda s: torch.nn.functional.softplus(s), np.log1p(np.exp(S)), 1 / (1 + np.exp(-S))),
    (lambda s: torch.nn.functional.softplus(s, beta=2), np.log1p(np.exp(2 * S)) / 2, 1 / (1 + np.exp(-2 * S))),
    (lambda s: np.logaddexp(s, 1.0), np.logaddexp(S, 1), 1 / (1 + np.exp(1 - S))),
    (lambda s: torch.round(s) + s, np.round(S) + S, 1),
    (lambda s: torch.log1p(abs(s)), np.log1p(abs(S)), np.sign(S) / (1 + abs(S))),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Library]:
    options = [function(f, "score", (1, 1, N, N))[0] for f, _, _ in POWERS]
    return [Library(options, tmp_path_factory.mktemp(number), number) for number in ("fp32", "fp64")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("place", range(len(POWERS)))
def test_scores(libraries: list[Library], place: int) -> None:
    """Near 0, too, the error is relative to the value."""
    f, value, slope = POWERS[place]
    option, arrays = function(f, "score", (1, 1, N, N))
    found: list[Any] = [
        (option.logit(np, arrays, S, *AT), option.slope(np, arrays, S, *AT), 1e-12),
        *(
            (*library.score(place, option, arrays, 0, 0, S)[:2], tolerance)
            for library, tolerance in zip(libraries, (3e-5, 1e-12), strict=True)
        ),
    ]
    for values, slopes, tolerance in found:
        np.testing.assert_allclose(np.broadcast_to(values, S.shape), value, tolerance, 1e-38)
        np.testing.assert_allclose(np.broadcast_to(slopes, S.shape), np.broadcast_to(slope, S.shape), tolerance, 1e-38)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_exponents() -> None:
    """By captured exponents: of a base of 0 they are 0, as torch has them; of a negative base there are none."""
    traced, arrays, _ = trace.bind(lambda s, q, kv: s ** TABLE[kv], "score")
    (derivative,) = (x for node, x in gradients(traced.code.root).items() if node.op == "load")
    base = np.array([-1.0, 0.0, 0.5, 2.0])[:, None]
    at = {"s": base, "q": AT[2][:4], "kv": np.arange(5)[None]}
    exponents = torch.tensor(np.tile(TABLE.astype(np.float64), (4, 1)), requires_grad=True)
    torch.pow(torch.tensor(base), exponents).sum().backward()
    wanted = exponents.grad.numpy()
    np.testing.assert_allclose(evaluate(derivative, at, arrays)[1:], wanted[1:], 1e-12)
    assert np.isnan(evaluate(derivative, at, arrays)[0]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_whole_powers_of_literals(tmp_path: pathlib.Path) -> None:
    """A whole base to the power of an integer is whole: it may be compared, and is divided without a rest."""
    masks: list[Any] = [
        lambda q, kv: (q * 27 - kv) % 3 ** (kv % 4) == 0,
        lambda q, kv: 10 ** (kv % 6) == 10 ** (q % 6),
        lambda q, kv: 5 ** (q % 8) <= 5 ** (kv % 8),
        lambda q, kv: 7 ** (q > kv) == 7,
    ]
    made = [function(f, "mask", (1, 1, N, N)) for f in masks]
    library = Library([option for option, _ in made], tmp_path)
    for i, (option, arrays) in enumerate(made):
        exact = [[bool(masks[i](q, kv)) for kv in range(N)] for q in range(N)]
        kept = option.keep(np, arrays, 0, 0, np.arange(N)[:, None], np.arange(N)[None], N, N)
        assert (np.broadcast_to(kept, (N, N)) == exact).all()
        assert (library.keep(i, option, arrays, 0, 0, (N, N), 16) == exact).all()
    traced, arrays, _ = trace.bind(lambda s, q: s + 3 ** (q - 4), "score")
    np.testing.assert_allclose(evaluate(traced.code.root, {"s": 0.0, "q": np.arange(9)}, arrays), 3.0 ** np.arange(-4, 5), 1e-12)


def test_compiled() -> None:
    """By NVRTC, in float and in double."""
    mask = function(lambda q, kv: np.expm1(TABLE[q]) ** TABLE[kv] < np.log1p(TABLE[kv]), "mask", (1, 1, 5, 5))[0]
    every = [mask, *(function(f, "score", (1, 1, N, N))[0] for f, _, _ in POWERS)]
    parts = [struct(f"f{i}", each, number) for i, each in enumerate(every) for number in ("float", "double")]
    assert not compiler.compile(Source("f.cu", HEAD + "\n".join(parts), tuple(sorted(files().items())), "sm_90a")).spill_bytes


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_classes(tmp_path: pathlib.Path) -> None:
    y, reals = 1.5, np.random.default_rng(1).standard_normal(32).astype(np.float32)
    masks: list[Any] = [
        lambda q, kv: (q + 1.0) ** y <= kv + 3,
        lambda q, kv: abs(reals[q]) ** reals[kv] > 0.5,
        lambda q, kv: reals[q] ** 3.0 < reals[kv],
        lambda q, kv: reals[kv] ** (q // 8) < 0.1,
        lambda q, kv: np.expm1(reals[q]) > np.log1p(reals[kv]),
    ]
    made = [function(f, "mask", (1, 1, 32, 32)) for f in masks]
    library = Library([option for option, _ in made], tmp_path)
    for i, (option, arrays) in enumerate(made):
        kept = np.broadcast_to(option.keep(np, arrays, 0, 0, np.arange(32)[:, None], np.arange(32)[None], 32, 32), (32, 32))
        assert (library.keep(i, option, arrays, 0, 0, (32, 32), 16) == kept).mean() > 0.995 and 0 < kept.mean() < 1
        for size in (1, 4, 16):
            q, kv = np.arange(0, 32, size)[:, None], np.arange(0, 32, size)[None]
            tiles = kept.reshape(32 // size, size, 32 // size, size).swapaxes(1, 2).reshape(32 // size, 32 // size, -1)
            on_host = option.classify(arrays, 0, 0, (q, q + size - 1), (kv, kv + size - 1), 32, 32)
            for classes in (on_host, library.classify(i, option, arrays, 0, (0, 0), (32, 32), (size, size))):
                assert not tiles[classes == EMPTY].any() and tiles[classes == FULL].all()
            assert i or size > 1 or (on_host != 1).mean() > 0.95, "of a positive base much is known"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_calls(dtype: Any) -> None:
    """On the CPU, forward and backward."""
    rng, y = np.random.default_rng(0), 2.0
    q, k, v, do = (rng.standard_normal((1, 24, 2, 16)).astype(dtype) for _ in range(4))
    slopes = np.array([0.5, 2.0], dtype)
    score = lambda s, h, q, kv: (  # noqa: E731
        s**y / 4 + slopes[h] * np.expm1(-abs(q - kv) * 1e-3) * torch.nn.functional.softplus(s) + (-0.5) ** (q * 1.0)
    )
    given: dict[str, Any] = {"score": score}
    o, lse = rawattn.attention(q, k, v, return_lse=True, **given)
    wanted = rawattn.reference.attention(q, k, v, return_lse=True, **given)
    tolerance = 2e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(o, wanted[0], tolerance, tolerance)
    found = rawattn.attention_backward(do, q, k, v, o, lse, **given, wrt=(slopes,))
    expected = rawattn.reference.attention_backward(do, q, k, v, **given, wrt=(slopes,))
    for x, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, exact, 10 * tolerance, 10 * tolerance)

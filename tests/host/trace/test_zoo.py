"""Masks and scores as people write them, traced: the option's definition, the text in CUDA C compiled for the host, and
the classes of tiles, all against the functions themselves on arrays."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest

from rawattn.trace.classes import EMPTY, FULL
from rawattn.variant.function import FunctionMask, FunctionScore
from rawattn.variant.mask import And, Causal, Full, Mask, Window
from rawattn.variant.score import Softcap
from tests import zoo
from tests.traced import Array, Library, function

BATCH = HEADS = 2
TRIALS = 3
TILES = [(128, 128), (64, 96), (64, 176), (16, 2048)]
BUILT_IN = {
    "full": Full(), "causal": Causal("top_left"), "causal_bottom_right": Causal(), "sliding": And, "window": Window,
    "softcap": Softcap(30.0),
}  # fmt: skip
FOUND = {  # the share of empty and of full tiles that one question finds, where it is not nearly all
    "dilated": 0.85, "natten_2d_tiled": 0.8, "block_diffusion": 0.85, "image_bidirectional": 0.5, "temporal": 0.4,
    "top_blocks": 0, "top_list": 0,
}  # fmt: skip


class Trial:
    """One function, the lengths of its sequence, its option and the arrays that it captured."""

    def __init__(self, maker: Any, role: str, number: int, longest: int) -> None:
        rng = np.random.default_rng([number, *maker.__name__.encode()])
        self.lengths = n, m = (int(rng.integers(1, longest)), int(rng.integers(1, longest)))
        if rng.random() < 0.5:
            self.lengths = n, m = n, n
        self.rng, self.b, self.h = rng, number % BATCH, number // 2 % HEADS
        self.function = maker(rng, n, m)
        self.option, self.arrays = function(self.function, role, (BATCH, HEADS, n, m))

    def expected(self, *s: Array) -> Array:
        """Returns what the function itself says, on arrays."""
        n, m = self.lengths
        at = {"b": self.b, "h": self.h, "q": np.arange(n)[:, None], "kv": np.arange(m)[None], "q_len": n, "kv_len": m}
        f = getattr(self.function, "on_arrays", self.function)
        names = f.__code__.co_varnames[: f.__code__.co_argcount]
        with np.errstate(all="ignore"):
            found = f(*s, *(at[name] for name in names if name != "s"))
        return np.broadcast_to(found, (n, m))

    @property
    def at(self) -> tuple[Any, ...]:
        n, m = self.lengths
        return self.b, self.h, np.arange(n)[:, None], np.arange(m)[None], n, m


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, dict[str, list[Trial]]]:
    trials = {maker.__name__: [Trial(maker, "mask", i, 600) for i in range(TRIALS)] for maker in zoo.MASKS}
    every = {name: each for name, each in trials.items() if name not in BUILT_IN}
    return Library([merged(each) for each in every.values()], tmp_path_factory.mktemp("masks")), every


def merged(trials: list[Trial]) -> Any:
    """One option for all trials: what any of them checks, is checked."""
    first = trials[0].option
    assert len({trial.option.code for trial in trials}) == 1, "new values gave a new kernel"
    checked = tuple(sorted({each for trial in trials for each in trial.option.checked}))
    for trial in trials:
        trial.option = type(first)(first.code, trial.option.numbers, trial.option.arrays, checked)
    return trials[0].option


@pytest.mark.parametrize(
    "maker", [maker for maker in (*zoo.MASKS, *zoo.SCORES) if maker.__name__ in BUILT_IN], ids=lambda x: x.__name__
)
def test_built_in(maker: Any) -> None:
    wanted = BUILT_IN[maker.__name__]
    for i in range(TRIALS):
        trial = Trial(maker, "mask" if maker in zoo.MASKS else "score", i, 300)
        found: Any = trial.option
        assert isinstance(found, wanted) if isinstance(wanted, type) else found == wanted
        if isinstance(found, Softcap):
            continue
        mask: Mask = found
        n, m = trial.lengths
        begin, end = mask.interval(np.arange(n), n, m)
        assert (((np.arange(m) >= begin[:, None]) & (np.arange(m) < end[:, None])) == trial.expected()).all()


def tiled(kept: Array, tile: tuple[int, int], f: Any) -> Array:
    n, m = kept.shape
    return np.array([[f(kept[i : i + tile[0], j : j + tile[1]]) for j in range(0, m, tile[1])] for i in range(0, n, tile[0])])


@pytest.mark.parametrize("name", [maker.__name__ for maker in zoo.MASKS if maker.__name__ not in BUILT_IN])
def test_mask(masks: tuple[Library, dict[str, list[Trial]]], name: str) -> None:
    library, every = masks
    place = list(every).index(name)
    count: collections.Counter[str] = collections.Counter()
    for trial in every[name]:
        found: FunctionMask = trial.option
        expected = trial.expected() if name != "tree_bits" else tree_bits(trial)
        kept = np.broadcast_to(found.keep(np, trial.arrays, *trial.at), trial.lengths)
        assert (kept == expected).all(), "the option's definition"
        for step in (64, 96):
            by_cuda = library.keep(place, found, trial.arrays, trial.b, trial.h, trial.lengths, step)
            assert (by_cuda[:, : trial.lengths[1]] == expected).all() and not by_cuda[:, trial.lengths[1] :].any()
        for tile in TILES:
            count += check_classes(library, place, trial, expected, tile)
    for what in ("empty", "full"):
        assert count[f"found {what}"] >= FOUND.get(name, 0.95) * count[what] - 1, (what, count)


def tree_bits(trial: Trial) -> Array:
    """The function reads outside of its array where another term holds: NumPy would raise."""
    (words,), (context,) = trial.arrays, trial.option.numbers
    expected = np.ones(trial.lengths, bool)
    own = np.arange(trial.lengths[1] - context)
    expected[:, context:] = words[:, own // 32] >> (own % 32) & 1
    return expected


def check_classes(library: Library, place: int, trial: Trial, expected: Array, tile: tuple[int, int]) -> collections.Counter[str]:
    """The classes of a sequence's tiles, on the host and by the struct. Gives how many there are, and how many were found."""
    n, m = trial.lengths
    empty = tiled(expected, tile, lambda x: not x.any())
    whole = tiled(expected, tile, lambda x: x.all()) & (np.arange(1, -(-m // tile[1]) + 1) * tile[1] <= m)
    by_cuda = library.classify(place, trial.option, trial.arrays, trial.b, (trial.h, trial.h), trial.lengths, tile)
    q, kv = np.arange(0, n, tile[0])[:, None], np.arange(0, m, tile[1])[None]
    ends = (q, np.minimum(q + tile[0], n) - 1), (kv, np.minimum(kv + tile[1], m) - 1)
    on_host = trial.option.classify(trial.arrays, trial.b, trial.h, *ends, n, m)
    on_host = np.where((on_host == FULL) & (kv + tile[1] > m), 1, on_host)
    for found in (by_cuda, on_host):
        assert not ((found == EMPTY) & ~empty).any(), "a tile is taken for empty that is not"
        assert not ((found == FULL) & ~whole).any(), "a tile is taken for full that is not"
    assert (by_cuda == on_host).mean() > 0.98
    both = library.classify(place, trial.option, trial.arrays, trial.b, (0, HEADS - 1), trial.lengths, tile)
    assert ((both == by_cuda) | (both == 1)).all(), "of more heads more is known than of one"
    return collections.Counter(
        {"empty": int(empty.sum()), "full": int(whole.sum()), "found empty": int((by_cuda == EMPTY).sum()),
         "found full": int((by_cuda == FULL).sum())}
    )  # fmt: skip


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Library], dict[str, list[Trial]]]:
    makers = [maker for maker in zoo.SCORES if maker.__name__ not in BUILT_IN]
    trials = {maker.__name__: [Trial(maker, "score", i, 90) for i in range(TRIALS)] for maker in makers}
    options = [merged(each) for each in trials.values()]
    return [Library(options, tmp_path_factory.mktemp(number), number) for number in ("fp32", "fp64")], trials


@pytest.mark.parametrize("name", [maker.__name__ for maker in zoo.SCORES if maker.__name__ not in BUILT_IN])
def test_score(scores: tuple[list[Library], dict[str, list[Trial]]], name: str) -> None:
    libraries, every = scores
    place, paired = list(every).index(name), np.zeros(2, int)
    for trial in every[name]:
        found: FunctionScore = trial.option
        s = trial.rng.standard_normal(trial.lengths) * 3
        expected = trial.expected(s)
        value, slope = found.logit(np, trial.arrays, s, *trial.at), found.slope(np, trial.arrays, s, *trial.at)
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-6)
        step = 1e-6
        ends = [found.logit(np, trial.arrays, s + sign * step, *trial.at) for sign in (1, -1)]
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-5)
        for library, tolerance in zip(libraries, (3e-5, 1e-12), strict=True):
            by_cuda, slope_by_cuda, exponent = library.score(place, found, trial.arrays, trial.b, trial.h, s / 0.5, scale=0.5)
            apart = np.abs(exponent * math.log(2) - by_cuda) / np.maximum(1, np.abs(value))
            assert apart.max() < tolerance
            paired += library.pairs
            error = np.abs(by_cuda - value) / np.maximum(1, np.abs(value))
            if name == "t5_buckets":  # floor of a logarithm: at a few distances it differs in float32
                assert (error > 1e-5).mean() < 0.1
                error = error[error < 1e-5]
            assert error.max() < tolerance
            assert (np.abs(slope_by_cuda - slope) / np.maximum(1, np.abs(slope))).max() < tolerance
    assert (paired[0] > 0) == (name in ("pair_bias", "key_bias", "forgetting")), paired
    assert (paired[1] > 0) == (name in ("t5_table", "t5_buckets", "sandwich", "kerple")), paired

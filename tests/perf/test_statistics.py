"""perf.lib.statistics on synthetic samples whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perf.lib.statistics import geometric_mean, ratio, welch_t
from rawattn.command.timing import median_of_rounds


def rounds(rng: np.random.Generator, us: float, noise: float, drift: np.ndarray, count: int = 40) -> list[list[float]]:
    return [list(us * d * (1 + noise * rng.standard_normal(count))) for d in drift]


def test_means() -> None:
    assert geometric_mean([2, 0.5]) == pytest.approx(1) and geometric_mean([4, 1]) == pytest.approx(2)
    assert math.isnan(geometric_mean([]))
    assert median_of_rounds([[1, 2, 3], [2, 2, 90], [50, 60, 70]]) == 2


def test_interval_covers_the_true_ratio() -> None:
    """Both drift together by 10 %: the interval holds the true ratio as often as it says, and is far narrower than the drift."""
    hits, widths = 0, []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        drift = 1 + 0.1 * rng.random(5)
        both = [rounds(rng, us, 0.02, drift * (1 + 0.002 * rng.standard_normal(5))) for us in (105.0, 100.0)]
        found = ratio(*both, draws=400, seed=seed)
        hits += found.low <= 1.05 <= found.high
        widths.append(found.high - found.low)
        assert found.low <= found.value <= found.high
    assert 170 <= hits <= 200
    assert np.median(widths) < 0.03


def test_interval_grows_with_the_noise() -> None:
    rng, still = np.random.default_rng(0), np.ones(5)
    narrow, wide = (ratio(rounds(rng, 100, noise, still), rounds(rng, 100, noise, still)) for noise in (0.001, 0.1))
    assert wide.high - wide.low > 10 * (narrow.high - narrow.low)
    assert ratio([[2.0] * 3] * 5, [[1.0] * 3] * 5) == ratio([[2.0] * 4] * 3, [[1.0] * 9] * 4)
    assert str(ratio([[2.0]], [[1.0]])) == "2.000 [2.000, 2.000]"


def test_one_disturbed_round_moves_little() -> None:
    rng = np.random.default_rng(1)
    slow = rounds(rng, 100, 0.01, np.array([1, 1, 1, 1, 1.5]))
    assert ratio(slow, rounds(rng, 100, 0.01, np.ones(5))).value == pytest.approx(1, abs=0.01)


def test_welch_known_answer() -> None:
    a, b = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9], [27.1, 22.0, 20.8, 23.4, 23.4, 23.5]
    means, variances = (np.mean(a), np.mean(b)), (np.var(a) / 6, np.var(b) / 6)
    assert welch_t(a, b) == pytest.approx((means[0] - means[1]) / math.sqrt(sum(variances)))


def test_welch_orders_see_what_they_should() -> None:
    rng, n = np.random.default_rng(3), 100_000
    same = [rng.normal(1000, 5, n) for _ in range(2)]
    assert all(abs(welch_t(*same, order)) < 4.5 for order in (1, 2))
    shifted, wider = rng.normal(1000.3, 5, n), rng.normal(1000, 5.3, n)
    assert abs(welch_t(same[0], shifted, 1)) > 4.5 and abs(welch_t(same[0], shifted, 2)) < 4.5
    assert abs(welch_t(same[0], wider, 1)) < 4.5 and abs(welch_t(same[0], wider, 2)) > 4.5


def test_false_alarms_are_rare() -> None:
    rng = np.random.default_rng(4)
    alarms = [abs(welch_t(rng.normal(size=200), rng.normal(size=200))) > 3 for _ in range(1000)]
    assert sum(alarms) < 15


def test_constants() -> None:
    ones, twos = [1, 1, 1], [2, 2]
    assert welch_t(ones, ones) == 0 and welch_t(ones, twos) == -math.inf and welch_t(twos, ones) == math.inf
    assert welch_t([1], twos) == 0

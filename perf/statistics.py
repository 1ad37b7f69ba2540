"""The statistics of timings: medians of rounds, intervals of ratios, geometric means, and Welch's t of first and second order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Samples = Sequence[Sequence[float]]  # by round


def percentile(samples: Iterable[float], percent: float) -> float:
    return float(np.percentile(list(samples), percent))


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios: 2 and 1/2 make 1. NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def median_of_rounds(rounds: Samples) -> float:
    """The median over rounds of each round's median: one disturbed round moves it little."""
    return float(np.median([np.median(samples) for samples in rounds]))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of two times with the interval that the run's noise leaves for it."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(numerator: Samples, denominator: Samples, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Ratio:
    """The ratio of the medians of interleaved rounds, with a bootstrap interval over the rounds.

    Round i of one was timed beside round i of the other, so both are drawn together: a clock that drifts over the rounds
    cancels. Within a drawn round the samples are drawn anew too.
    """
    rng, rounds = np.random.default_rng(seed), min(len(numerator), len(denominator))
    both = [each[:rounds] for each in (numerator, denominator)]
    medians = [np.stack([_bootstrap_medians(samples, draws, rng) for samples in each]) for each in both]
    drawn, column = rng.integers(rounds, size=(rounds, draws)), np.arange(draws)
    quotients = np.median(medians[0][drawn, column], 0) / np.median(medians[1][drawn, column], 0)
    low, high = np.quantile(quotients, [(1 - level) / 2, (1 + level) / 2])
    value = median_of_rounds(both[0]) / median_of_rounds(both[1])
    return Ratio(value, min(float(low), value), max(float(high), value))


def _bootstrap_medians(samples: Sequence[float], draws: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Medians of ``draws`` resamples, without sorting any: the rank of a resample's median is Beta distributed."""
    ordered, count = np.sort(np.asarray(samples, np.float64)), len(samples)
    rank = rng.beta((count + 1) / 2, (count + 1) / 2, draws) * count - 0.5
    return np.interp(rank, np.arange(count), ordered)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and sums of the second to fourth powers of the deviations: all that the t-tests need of a sample.

    ``a + b`` are the moments of both samples together (Pebay, SAND2008-6212), so a million samples need not be kept.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0

    @classmethod
    def of(cls, samples: npt.ArrayLike) -> Moments:
        x = np.asarray(samples, np.float64)
        if x.size == 0:
            return cls()
        deviation = x - x.mean()
        return cls(x.size, float(x.mean()), *(float((deviation**power).sum()) for power in (2, 3, 4)))

    def __add__(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        a, b, n = self.count, other.count, self.count + other.count
        d = other.mean - self.mean
        m2 = self.m2 + other.m2 + d**2 * a * b / n
        m3 = self.m3 + other.m3 + d**3 * a * b * (a - b) / n**2 + 3 * d * (a * other.m2 - b * self.m2) / n
        m4 = self.m4 + other.m4 + d**4 * a * b * (a * a - a * b + b * b) / n**3
        m4 += 6 * d**2 * (a * a * other.m2 + b * b * self.m2) / n**2 + 4 * d * (a * other.m3 - b * self.m3) / n
        return Moments(n, self.mean + d * b / n, m2, m3, m4)

    def of_order(self, order: int) -> tuple[float, float]:
        """Mean and variance of what the t-test of an order compares: x, or the squared deviation of x from its mean."""
        variance = self.m2 / self.count
        return (self.mean, variance) if order == 1 else (variance, self.m4 / self.count - variance**2)


def welch_t(a: Moments, b: Moments, order: int = 1) -> float:
    """Welch's t: how many standard errors apart two samples' means are, or for ``order`` 2 their variances.

    https://eprint.iacr.org/2015/207, section 3. Samples that are constant and equal give 0, constant and different infinity.
    """
    if min(a.count, b.count) < 2:
        return 0.0
    (mean_a, variance_a), (mean_b, variance_b) = a.of_order(order), b.of_order(order)
    error = math.sqrt(max(0.0, variance_a) / a.count + max(0.0, variance_b) / b.count)
    if error == 0:
        return 0.0 if mean_a == mean_b else math.copysign(math.inf, mean_a - mean_b)
    return (mean_a - mean_b) / error

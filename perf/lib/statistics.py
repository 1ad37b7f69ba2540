"""The statistics of timings: medians of rounds, intervals of ratios, geometric means, and Welch's t of first and second order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rawattn.command.timing import median_of_rounds

Samples = Sequence[Sequence[float]]  # by round


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios: 2 and 1/2 make 1. NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


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


def welch_t(a: npt.ArrayLike, b: npt.ArrayLike, order: int = 1) -> float:
    """Welch's t: how many standard errors apart two samples' means are, or for ``order`` 2 their variances.

    https://eprint.iacr.org/2015/207, section 3. Samples that are constant and equal give 0, constant and different infinity.
    """
    both = [np.asarray(x, np.float64) for x in (a, b)]
    if min(x.size for x in both) < 2:
        return 0.0
    both = [(x - x.mean()) ** 2 if order == 2 else x for x in both]
    error, difference = math.sqrt(sum(x.var() / x.size for x in both)), float(both[0].mean() - both[1].mean())
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0

"""An evolutionary search over the fields of a frozen dataclass. It knows nothing of kernels or of time: ``ask`` it what to try
and ``tell`` it what that cost."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

PARENTS = 4  # the best so far, from which the next come: no elite is ever lost
CROSSOVER, STEP = 0.2, 0.5  # probabilities: a child of two; a mutation to the next value, not to any


def genes(candidates: Sequence[Any]) -> dict[str, list[Any]]:
    """The values to try for each field that is not fixed: those of candidates, for numbers also those between and one beyond."""
    found: dict[str, list[Any]] = {}
    for field in dataclasses.fields(candidates[0]):
        if field.metadata.get("is_fixed"):
            continue
        values = sorted({getattr(candidate, field.name) for candidate in candidates}, key=lambda x: (x is not None, x))
        if all(type(value) is int for value in values):
            step = math.gcd(*(b - values[0] for b in values)) or max(1, values[0] // 2)
            values = list(range(values[0] - step, values[-1] + step + 1, step))
        found[field.name] = values
    return found


class Search:
    """Tries ``seeds`` first, then children of the best: one or two fields changed, or the fields of two mixed."""

    def __init__(self, seeds: Iterable[Any], domain: dict[str, list[Any]], legal: Callable[[Any], bool], seed: int = 0) -> None:
        self.costs: dict[Any, float] = {}
        self._asked: set[Any] = set()
        self._seeds, self._domain, self._legal, self._random = list(seeds), domain, legal, random.Random(seed)

    def ask(self, count: int) -> list[Any]:
        """Up to ``count`` legal configurations that were never asked for before; fewer once there are hardly any."""
        found: list[Any] = []
        for attempt in range(200 * count):
            if len(found) == count:
                break
            config = self._seeds.pop(0) if self._seeds else self._child(wild=attempt > 100 * count)
            if config not in self._asked and self._legal(config):
                self._asked.add(config)
                found.append(config)
        return found

    def tell(self, config: Any, cost: float) -> None:
        """The cost of a configuration; infinite for one that is unfit."""
        self._asked.add(config)
        self.costs[config] = cost

    def ranking(self) -> list[tuple[Any, float]]:
        return sorted(((c, cost) for c, cost in self.costs.items() if cost < math.inf), key=lambda item: item[1])

    def _child(self, wild: bool) -> Any:
        best = [config for config, _ in self.ranking()[:PARENTS]]
        if wild or not best:
            return type(next(iter(self._asked)))(**{name: self._random.choice(values) for name, values in self._domain.items()})
        parent, other = (min(self._random.choices(range(len(best)), k=2)) for _ in range(2))
        child = {name: getattr(best[parent], name) for name in self._domain}
        if self._random.random() < CROSSOVER and parent != other:
            child = {name: getattr(best[self._random.choice((parent, other))], name) for name in self._domain}
        for name in self._random.sample(list(child), self._random.choice((1, 1, 2))):
            child[name] = self._mutated(self._domain[name], child[name])
        return dataclasses.replace(best[parent], **child)

    def _mutated(self, values: list[Any], value: Any) -> Any:
        at = values.index(value) if value in values else 0
        if self._random.random() < STEP:
            return values[min(max(at + self._random.choice((-1, 1)), 0), len(values) - 1)]
        return self._random.choice(values)

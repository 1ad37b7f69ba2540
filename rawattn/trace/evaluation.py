"""The value of an expression on arrays of NumPy or torch: the definition of a function, for the reference and the CPU path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .expressions import LOADED, Expr, nodes
from .formulas import FORMULAS


def evaluate(
    x: Expr, at: Mapping[str, Any], arrays: Sequence[Any] = (), numbers: Sequence[Any] = (), xp: Any = np, dtype: Any = None
) -> Any:  # fmt: skip
    """The value of x where the variables have the values ``at``, arrays of ``xp`` that broadcast.

    Floats are computed in ``dtype``, float64 unless given. An index outside of its array is brought to the nearest one inside.
    """
    return Evaluation(at, arrays, numbers, xp, dtype or xp.float64)(x)


class Evaluation:
    """The values of expressions, each computed once."""

    def __init__(self, at: Mapping[str, Any], arrays: Sequence[Any], numbers: Sequence[Any], xp: Any, dtype: Any) -> None:
        self.at, self.arrays, self.numbers, self.xp, self.dtype = at, arrays, numbers, xp, dtype
        self._done: dict[Expr, Any] = {}
        device = next((x.device for x in (*at.values(), *arrays) if hasattr(x, "detach")), None)
        self._place = {"device": device} if device is not None else {}

    def __call__(self, x: Expr) -> Any:
        for node in nodes(x):
            if node not in self._done:
                self._done[node] = self._evaluate(node)
        return self._done[x]

    def _cast(self, x: Any, kind: str) -> Any:
        truth = self.xp.bool_ if hasattr(self.xp, "bool_") else self.xp.bool
        dtype = {"float": self.dtype, "bool": truth}.get(kind, self.xp.int64)
        if self.xp is np:
            return np.asarray(x, dtype)
        return x.to(dtype) if hasattr(x, "detach") else self.xp.asarray(x, dtype=dtype, **self._place)

    def _evaluate(self, node: Expr) -> Any:
        args, done, xp = node.args, self._done, self.xp
        match node.op:
            case "var":
                return self._cast(self.at[args[0]], node.type)
            case "const":
                return self._cast(args[0], node.type)
            case "param":
                return self._cast(self.numbers[args[0]], node.type)
            case "dim":
                return self._cast(int(self.arrays[args[0]].shape[args[1]]), "int")
            case "load":
                array, indices = self.arrays[args[0]], (done[i] for i in args[2:])
                return self._cast(array[tuple(i.clip(0, n - 1) for i, n in zip(indices, array.shape, strict=True))], node.type)
            case "lin":
                return sum((done[atom] * c for atom, c in args[1]), self._cast(args[0], "int"))
            case "saturate":
                return done[args[0]].clip(-LOADED, LOADED)
            case "cast":
                return self._cast(done[args[0]], node.type)
            case "trunc":
                x = done[args[0]]
                return self._cast(xp.where(x != x, 0, xp.trunc(x.clip(-LOADED, LOADED))), "int")
        return FORMULAS[node.op](xp, *(done[a] for a in args))

"""A request is all that a call asks for beside its arrays: options, lengths, kernel and configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..array import arrays
from ..array.arrays import Array
from ..errors import ProblemError
from ..operation import Operation, arguments, functions
from ..operation.spec import MaskLike, ScoreLike, Window, is_int, make_dropout
from . import front_end

KEPT_ASKED = 1024
OPTIONS = (
    "causal", "window", "softcap", "scale", "mask", "score", "return_lse", "constant_time", "deterministic", "q_offset",
    "kv_offset", "dropout", "invariant",
)  # fmt: skip
_WINDOW, MASK, SCORE = map(OPTIONS.index, ("window", "mask", "score"))  # a call's options are a tuple: it is its key
NO_LENGTHS = (None, None)


def options_of(
    *, causal: bool = False, window: Window | None = None, softcap: float | None = None, scale: float | None = None,
    mask: MaskLike | None = None, score: ScoreLike | None = None, return_lse: bool = False, constant_time: bool = False,
    deterministic: bool = True, q_offset: int | None = None, kv_offset: int | None = None, dropout: float = 0.0,
    invariant: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The options of a call by name, in one order."""
    return {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score,
        "return_lse": return_lse, "constant_time": constant_time, "deterministic": deterministic, "q_offset": q_offset,
        "kv_offset": kv_offset, "dropout": dropout, "invariant": invariant,
    }  # fmt: skip


class Asked:
    """This is what a call asks for beside its arrays. Calls that ask for the same share one object, which is found and compared
    quickly. ``is_kept`` is False for one that nothing else finds. ``followed`` is what ``torch/`` makes of it where autograd
    follows, by the captured arrays to which it does."""

    def __init__(
        self, operation: type[Operation], options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None, config: Any,
        is_kept: bool = True,
    ) -> None:  # fmt: skip
        self.operation, self.options, self.lengths, self.kernel, self.config = operation, options, lengths, kernel, config
        self.is_kept, self.has_functions = is_kept, bool(functions.among(options))
        self.followed: dict[tuple[str, ...], Any] = {}

    @functools.cached_property
    def numbers(self) -> tuple[functions.Numbers, functions.Numbers] | None:
        """Returns what ``without_numbers`` lacks: the numbers of the mask, and of the score. None where it is the same."""
        if self.without_numbers is self:
            return None
        own, left = self.options, self.without_numbers.options
        found = [() if own[role] == left[role] else own[role].numbers for role in functions.ROLES]  # equals may be two objects
        return found[0], found[1]

    @functools.cached_property
    def without_numbers(self) -> Asked:
        """Returns what calls ask for whose functions captured any numbers, where no number makes a built-in option of them."""
        found = functions.without_numbers(self.options)
        return self if found is self.options else asked_of(self.operation, found, self.lengths, self.kernel, self.config)

    @functools.cached_property
    def of_family(self) -> Asked:
        """Returns what calls of one family ask for."""
        coarse = self.operation.coarse(self.options)
        return self if coarse is self.options else asked_of(self.operation, coarse, self.lengths, self.kernel, self.config)


def asked_of(
    operation: type[Operation], options: Mapping[str, Any] | tuple[Any, ...], lengths: tuple[Any, ...] = NO_LENGTHS,
    kernel: str | None = None, config: Any = None,
) -> Asked:  # fmt: skip
    """Returns what a call asks for, by its options in the order of ``OPTIONS``, and for gradients ``wrt`` behind them. Their
    types count too: True, 1 and 1.0 are equal, but not all of them are right."""
    values: tuple[Any, ...] = options if type(options) is tuple else tuple(options.values())  # type: ignore[union-attr]
    types: tuple[Any, ...] = ()
    if lengths is not NO_LENGTHS or values[_WINDOW] is not None:
        types = tuple(map(type, lengths))
        if isinstance(window := values[_WINDOW] if values else None, (tuple, list)):
            values = (*values[:_WINDOW], tuple(window), *values[_WINDOW + 1 :])
            types = (*types, *map(type, window))
    try:
        return _asked(operation, kernel, config, lengths, types, *values)
    except TypeError:  # what cannot be hashed is wrong
        return Asked(operation, dict(zip((*OPTIONS, "wrt"), values, strict=False)), lengths, kernel, config, is_kept=False)


@functools.lru_cache(maxsize=KEPT_ASKED, typed=True)
def _asked(
    operation: type[Operation], kernel: str | None, config: Any, lengths: tuple[Any, ...], types: Any, *values: Any
) -> Asked:
    """Raises TypeError where something is an array, or a function that may hold some, which may not be kept."""
    window = values[_WINDOW] if len(values) > _WINDOW and isinstance(values[_WINDOW], tuple) else ()
    for value in (kernel, config, *lengths, *values, *window):
        if hasattr(value, "__dlpack__") or (value is not None and functions.is_function(value)):
            raise TypeError
    return Asked(operation, dict(zip((*OPTIONS, "wrt"), values, strict=False)), lengths, kernel, config)


def given_of(*arrays: Any) -> tuple[Any, ...]:
    """The arrays of a call, without what is None at the end."""
    count = len(arrays)
    while count and arrays[count - 1] is None:
        count -= 1
    return arrays[:count]


def seed_array(q: Any, dropout: Any, seed: Any, missing: str = "") -> Any:
    """The seed of a call as an array, which is made where an int is given, or for torch tensors nothing; None without dropout.
    ``missing`` says what to do where there is none and none may be drawn."""
    if seed is not None:
        _check_seed(seed)
    if type(dropout) is int and dropout == 0:  # the default; an int, since torch.compile would follow a float's value
        return None
    if not make_dropout(dropout):
        return None
    if front_end.load_torch() and front_end.operators.is_tensor(q):
        return front_end.operators.seed_of(q, seed, missing)
    if seed is None:
        way = missing or "give an int, or one int64 in an array of q's library: there is no generator that it may be drawn from"
        raise ProblemError(f"seed is None, and dropout is {dropout}; {way}.")
    return arrays.one_int64(q, seed) if is_int(seed) else seed


def _check_seed(seed: Any) -> None:
    """Raises ProblemError for what is no seed, also where there is no dropout that it would be for."""
    if not is_int(seed) and (tuple(seed.shape) != (1,) or str(seed.dtype).rpartition(".")[2] != "int64"):
        raise ProblemError(
            f"seed is {seed.dtype} of shape {tuple(seed.shape)}; it must be an int, or one int64 in an array of shape (1,)."
        )


def stand_in_seed(q: Any, options: Mapping[str, Any], seed: Any) -> Any:
    """A seed for a plan or an explanation, which read none."""
    return seed_array(q, options.get("dropout", 0.0), 0 if seed is None else seed)


def with_numbers(values: tuple[Any, ...], numbers: tuple[functions.Numbers, functions.Numbers]) -> tuple[Any, ...]:
    """The options of which ``functions.parted`` took these numbers."""
    return (*values[:MASK], *map(functions.whole, values[MASK : SCORE + 1], numbers), *values[SCORE + 1 :])


def arrays_and_options(
    caller: Callable[..., Any], operation: type[Operation], given: tuple[Any, ...], options: dict[str, Any], wrt: Any = ()
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a call by name, with those that its functions captured, and its options. Raises TypeError for an option that
    ``caller`` does not have, as any call does."""
    known = (*OPTIONS, "alibi", "bias")
    if unknown := options.keys() - set(known):
        arguments.refuse(caller, unknown, options=known)
    options = dict(options)
    shorthands = options.pop("alibi", None), options.pop("bias", None)
    if any(x is not None for x in shorthands):
        options["score"] = functions.biased(options.pop("softcap", None), options.get("score"), *shorthands)
    options, captured = functions.taken(options_of(**options), wrt)
    return arrays.named(operation.input_names(len(given)), given) | functions.read(options, captured), options

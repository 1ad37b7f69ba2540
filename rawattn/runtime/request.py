"""Requests: everything that selects a kernel except the arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..array import making, reading
from ..array.array import Array
from ..errors import ProblemError
from ..operation import Operation, arguments, captures, functions
from ..operation.keys import parted
from ..operation.spec import Options, is_int, make_dropout, named, with_functions
from . import front_end

KEPT_REQUESTS = 1024
NO_LENGTHS = (None, None)


def with_numbers(options: Options, numbers: tuple[functions.Numbers, functions.Numbers]) -> Options:
    """The options with the numbers that ``functions.parted`` took of the mask and of the score."""
    return with_functions(options, functions.whole(options.mask, numbers[0]), functions.whole(options.score, numbers[1]))


class Request:
    """Everything that selects a kernel except the arrays: operation, options, bounds on lengths, kernel and configuration.

    Equal requests share one object, which is found and compared quickly. ``is_kept`` is False for one that nothing else finds.
    ``followed`` is what ``torch/`` makes of it where autograd follows, by the captured arrays to which it does."""

    def __init__(
        self, operation: type[Operation], options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None, config: Any,
        is_kept: bool = True,
    ) -> None:  # fmt: skip
        self.operation, self.options, self.lengths, self.kernel, self.config = operation, options, lengths, kernel, config
        self.is_kept, self.has_functions = is_kept, bool(functions.among(options))
        self.followed: dict[tuple[str, ...], Any] = {}

    def _replace_options(self, options: dict[str, Any]) -> Request:
        """The request with other options."""
        return self if options is self.options else request_for(self.operation, options, self.lengths, self.kernel, self.config)

    @functools.cached_property
    def numbers(self) -> tuple[functions.Numbers, functions.Numbers] | None:
        """The numbers of the mask, and of the score, that ``without_numbers`` lacks; None where it lacks none."""
        if self.without_numbers is self:
            return None
        before, after = self.options, self.without_numbers.options  # in which equals may be two objects
        mask, score = [() if before[role] == after[role] else before[role].numbers for role in functions.ROLES]
        return mask, score

    @functools.cached_property
    def without_numbers(self) -> Request:
        """The request of calls whose functions captured any numbers, where no number makes a built-in option of them."""
        return self._replace_options(functions.without_numbers(self.options))

    @functools.cached_property
    def family(self) -> Request:
        """The request that calls of one family share."""
        return self._replace_options(self.operation.coarse(self.options))


def request_for(
    operation: type[Operation], options: Options | Mapping[str, Any], lengths: tuple[Any, ...] = NO_LENGTHS,
    kernel: str | None = None, config: Any = None,
) -> Request:  # fmt: skip
    """The request of a call; a mapping of options may have ``wrt`` of gradients besides. Types of options count too: True, 1 and
    1.0 are equal, but not all of them are right."""
    wrt: tuple[str, ...] = ()
    if not isinstance(options, Options):
        wrt = options.get("wrt", ())
        options = Options(**{name: value for name, value in options.items() if name != "wrt"})
    types: tuple[Any, ...] = ()
    if lengths is not NO_LENGTHS or options.window is not None:
        types = tuple(map(type, lengths))
        if isinstance(options.window, (tuple, list)):
            options = options._replace(window=tuple(options.window))  # type: ignore[arg-type]
            types = (*types, *map(type, options.window))  # type: ignore[arg-type]
    try:
        return _make_request(operation, kernel, config, lengths, types, wrt, *options)
    except TypeError:  # what cannot be hashed is wrong
        return Request(operation, _add_wrt(wrt, options), lengths, kernel, config, is_kept=False)


@functools.lru_cache(maxsize=KEPT_REQUESTS, typed=True)
def _make_request(
    operation: type[Operation], kernel: str | None, config: Any, lengths: tuple[Any, ...], types: Any, wrt: tuple[str, ...],
    *values: Any,
) -> Request:  # fmt: skip
    """The request, kept. Raises TypeError for an array, or a function that may hold some, which may not be kept."""
    options = Options(*values)
    window = options.window if isinstance(options.window, tuple) else ()
    for value in (kernel, config, *lengths, *values, *window):
        if hasattr(value, "__dlpack__") or (value is not None and functions.is_function(value)):
            raise TypeError
    return Request(operation, _add_wrt(wrt, options), lengths, kernel, config)


def _add_wrt(wrt: tuple[str, ...], options: Options) -> dict[str, Any]:
    return named(options) | ({"wrt": wrt} if wrt else {})


def seed_array(q: Any, dropout: Any, seed: Any, missing: str = "") -> Any:
    """The seed of a call as an array, which is made of an int, or drawn if ``seed`` is None and q a torch tensor; None without
    dropout. ``missing`` says what to do where there is no seed and none may be drawn."""
    if seed is not None:
        _check_seed(seed)
    if type(dropout) is int and dropout == 0:  # the default; an int, since torch.compile would follow a float's value
        return None
    if not make_dropout(dropout):
        return None
    if front_end.load_torch() and front_end.torch.is_tensor(q):
        return front_end.torch.seed_of(q, seed, missing)
    if seed is None:
        hint = missing or "give an int, or one int64 in an array of q's library: there is no generator that it may be drawn from"
        raise ProblemError(f"seed is None, and dropout is {dropout}; {hint}.")
    return making.one_int64(q, seed) if is_int(seed) else seed


def _check_seed(seed: Any) -> None:
    """Raises ProblemError for what is no seed, even in a call without dropout."""
    if not is_int(seed) and (tuple(seed.shape) != (1,) or str(seed.dtype).rpartition(".")[2] != "int64"):
        raise ProblemError(
            f"seed is {seed.dtype} of shape {tuple(seed.shape)}; it must be an int, or one int64 in an array of shape (1,)."
        )


def stand_in_seed(q: Any, options: Mapping[str, Any], seed: Any) -> Any:
    """The seed of a plan or an explanation, which do not read it."""
    return seed_array(q, options.get("dropout", 0.0), 0 if seed is None else seed)


def arrays_and_options(
    caller: Callable[..., Any], operation: type[Operation], inputs: tuple[Any, ...], options: dict[str, Any], wrt: Any = ()
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a call by name, with those that its functions captured, and its options. Raises TypeError for an option that
    ``caller`` does not have, as any call does."""
    options = dict(options)
    shorthands = options.pop("alibi", None), options.pop("bias", None)
    *lists, options["keys"] = parted(options.get("keys"))
    chosen = arguments.choose(Options, caller, options)
    if chosen.keys is not None:
        inputs = inputs._replace(keys=lists[0], keys_counts=lists[1])  # type: ignore[attr-defined]
    if any(x is not None for x in shorthands):
        score = functions.biased(chosen.softcap, chosen.score, *shorthands)
        chosen = chosen._replace(softcap=None, score=score)
    options, captured = captures.take(named(chosen), wrt)
    return reading.read_named(operation.input_names(len(inputs)), inputs) | captures.read(options, captured), options

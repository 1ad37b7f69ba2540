"""Every option of attention, once: as a caller gives it, and checked, as a frozen value without arrays, lengths or devices."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import ProblemError, brief
from ..variant import Option, weight
from ..variant import mask as masks
from ..variant import score as scores
from ..variant.offset import OffsetMask, OffsetScore
from .keys import KeyLists, make_lists

Window = tuple[int | None, int | None]
MaskLike = masks.Mask | Callable[..., Any]
ScoreLike = scores.Score | Callable[..., Any]

FLAGS = ("return_lse", "constant_time", "deterministic", "invariant")


class Options(NamedTuple):
    """The options of attention as a caller gives them, with their defaults."""

    causal: bool = False
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    mask: MaskLike | None = None
    score: ScoreLike | None = None
    return_lse: bool = False
    constant_time: bool = False
    deterministic: bool = True
    q_offset: int | None = None
    kv_offset: int | None = None
    dropout: float = 0.0
    invariant: bool = False
    keys: KeyLists | None = None


def named(options: Options) -> dict[str, Any]:
    """The options by name. This is ``_asdict``, which dynamo of torch 2.4 does not trace."""
    return dict(zip(Options._fields, options, strict=True))


def with_functions(options: Options, mask: Any, score: Any) -> Options:
    """The options with another mask and another score."""
    return Options(**{**named(options), "mask": mask, "score": score})


@dataclasses.dataclass(frozen=True)
class Spec:
    """The options of an attention call, checked. ``scale`` None stands for 1 / sqrt(head_dim); an offset of None for 0, and both
    for rows whose positions follow from the mask's alignment.

    ``Spec.of`` takes the arguments of ``rawattn.attention`` and checks them.
    """

    mask: masks.Mask = dataclasses.field(default_factory=masks.Full)
    score: scores.Score = dataclasses.field(default_factory=scores.Scale)
    scale: float | None = None
    return_lse: bool = False
    constant_time: bool = False
    deterministic: bool = True
    q_offset: int | None = None
    kv_offset: int | None = None
    dropout: float = 0.0
    invariant: bool = False
    keys: KeyLists | None = None

    def __post_init__(self) -> None:
        if self.keys is not None:
            _check_beside_keys(self)
        if self.invariant and self.dropout:
            raise ProblemError(
                f"invariant is True and dropout {self.dropout}: which weights are dropped follows from a sequence's place in the "
                "batch; give one of them."
            )

    @classmethod
    def of(cls, **values: Any) -> Spec:
        """The spec that ``Options`` of these values mean. Raises ProblemError for a wrong one."""
        options = Options(**values)
        return cls(
            make_mask(options.causal, options.window, options.mask),
            make_score(options.softcap, options.score),
            make_scale(options.scale),
            **{name: _check_flag(name, getattr(options, name)) for name in FLAGS},
            q_offset=make_offset("q_offset", options.q_offset),
            kv_offset=make_offset("kv_offset", options.kv_offset),
            dropout=make_dropout(options.dropout),
            keys=make_lists(options.keys),
        )

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what a compiled kernel depends on: all but the run-time values."""
        for name, option in (("mask", self.mask), ("score", self.score)):
            if not hasattr(option, "kind"):  # its class has no type, or no source
                raise ProblemError(f"{name} is {option!r}, {UNDERIVED}.")
        negative = self.scale is not None and self.scale < 0
        flags = (negative, self.return_lse, self.constant_time, self.offsets is not None, self.dropout > 0, self.invariant)
        return (self.mask.kind, self.score.kind, *flags, self.keys)

    @property
    def offsets(self) -> tuple[int, int] | None:
        """The positions of the first rows of q and of k; None where the mask's alignment places them."""
        return None if self.q_offset is None and self.kv_offset is None else (self.q_offset or 0, self.kv_offset or 0)

    @property
    def data_independent(self) -> bool:
        """Says whether each row's maximum is sought in every tile, whatever its numbers are and those of the rows beside it."""
        return self.constant_time or self.invariant

    @property
    def built_in(self) -> Spec:
        """These options, with the default in place of each function: their kinds say what else selections depend on."""
        defaults = {name: getattr(_DEFAULT, name) for name in ("mask", "score") if getattr(self, name).is_function}
        return dataclasses.replace(self, **defaults) if defaults else self

    def at(self, offsets: tuple[int, int] | None) -> Spec:
        """These options with other offsets."""
        q_offset, kv_offset = offsets or (None, None)
        return dataclasses.replace(self, q_offset=q_offset, kv_offset=kv_offset)

    @property
    def placed_mask(self) -> masks.Pairs:
        """The pairs of rows of q and k that the mask keeps."""
        return self.mask if self.offsets is None else OffsetMask(self.mask, *self.offsets)

    @property
    def placed_score(self) -> scores.Score:
        """The score of rows of q and k."""
        return self.score if self.offsets is None else OffsetScore(self.score, *self.offsets)

    @property
    def weight(self) -> Option:
        """The option that says what becomes of a weight."""
        return weight.make(self.dropout)

    @functools.cached_property
    def values(self) -> dict[str, float]:
        """The run-time values of mask, score and weight, by the names of fields."""
        return {**self.mask.values, **self.score.values, **self.weight.values}

    def to_json(self) -> dict[str, Any]:
        """The options that are not the defaults, as JSON can hold them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: option_to_json(value)
            if isinstance(value, Option)
            else value.to_json()
            if isinstance(value, KeyLists)
            else value
            for name, value in fields.items()
            if value != getattr(_DEFAULT, name)
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Spec:
        """The inverse of ``to_json``. A mask or score of your own must have been imported before."""
        return cls.of(**{name: option_from_json(value) if isinstance(value, dict) else value for name, value in fields.items()})

    def __str__(self) -> str:
        words = [str(self.mask), str(self.score)]
        words += [f"scale {self.scale:.6g}"] if self.scale is not None else []
        words += [f"offsets {self.offsets[0]} and {self.offsets[1]}"] if self.offsets is not None else []
        words += [f"dropout {self.dropout:.6g}"] * (self.dropout > 0)
        words += [str(self.keys)] * (self.keys is not None)
        words += [name for name in ("return_lse", "constant_time", "invariant") if getattr(self, name)]
        return ", ".join([*words, *["not deterministic"] * (not self.deterministic)])


_DEFAULT = Spec()


def _check_beside_keys(spec: Spec) -> None:
    """Raises ProblemError for an option that lists of keys do not go with."""
    if spec.dropout:
        raise ProblemError(
            f"keys was given beside dropout {spec.dropout}, which drops pairs, and a key may be listed twice; give one."
        )
    if spec.offsets is not None:
        raise ProblemError(
            "keys was given beside q_offset or kv_offset; its numbers are those of the rows of k: leave the offsets out."
        )
    if spec.keys is not None and spec.keys.physical and not (isinstance(spec.mask, masks.Full) and not spec.score.is_function):
        raise ProblemError(
            f"keys are physical, and have no positions, which {spec.mask} and {spec.score} may ask for; give none."
        )


def option_to_json(option: Option) -> dict[str, Any]:
    """The class of a mask or score and its fields."""
    fields = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
    values = {name: option_to_json(value) if isinstance(value, Option) else value for name, value in fields.items()}
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    return {"class": f"{type(option).__module__}:{type(option).__qualname__}", **values}


def option_from_json(fields: dict[str, Any]) -> Any:
    """The inverse of ``option_to_json``. It looks into modules that are imported already: a file makes nothing be imported."""
    module, _, name = fields["class"].partition(":")
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, Option)):
        raise ProblemError(f"class is {fields['class']!r}; it must be a mask or a score of a module that is imported.")
    values = {
        key: option_from_json(value) if isinstance(value, dict) else value for key, value in fields.items() if key != "class"
    }
    return cls(**values)


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        way = f"; as a mask it is rawattn.mask.Causal({value!r})" if name == "causal" and value in masks.ALIGNMENTS else ""
        raise ProblemError(f"{name} is {value!r}; it must be True or False{way}.")
    return bool(value)


UNDERIVED = (
    "of which no kernel can be made; derive its class from rawattn.variant.Option, and give it the class variables type and "
    "source (CONTRIBUTING.md has an example)"
)


def _is_option(name: str, value: Any) -> bool:
    """Says whether it is an option. Raises ProblemError for a mask or a score whose class is not derived from ``Option``."""
    if not isinstance(value, (Option, type)) and (hasattr(value, "interval") or hasattr(value, "logit")):
        raise ProblemError(f"{name} is {value!r}, {UNDERIVED}.")
    return isinstance(value, Option)


def make_mask(causal: Any, window: Any, mask: Any) -> masks.Mask:
    """The mask that the shorthands ``causal`` and ``window`` mean, or ``mask`` itself."""
    if mask is not None:
        if (not isinstance(causal, (bool, np.bool_)) or causal) or window is not None:
            itself = (
                "as lambda b, h, q, kv: f(b, h, q, kv) & (q >= kv) & (q - kv <= left); Chunked and Prefix are causal, and "
                "Documents and Intervals take causal=True"
            )
            way = f"mask is a function, which says both itself, {itself}"
            if not (isinstance(mask, Option) and mask.is_function):
                both = "combine options as mask=rawattn.mask.And(a, b)"
                way = f"{both}. A function, which And does not take, says it itself, {itself}"
            raise ProblemError(f"mask was given beside causal or window; {way}.")
        if hasattr(mask, "shape") and hasattr(mask, "dtype"):
            found = f"mask is an array, {mask.dtype} of shape {tuple(mask.shape)}"
            at = ", ".join(("b", "h", "q", "kv")[-len(mask.shape) :])
            raise ProblemError(f"{found}; give a function that reads it in place: mask=lambda b, h, q, kv: keep[{at}].")
        if not _is_option("mask", mask) or mask.interval is None:
            raise ProblemError(f"mask is {mask!r}; it must be a mask, such as rawattn.mask.Causal().")
        return mask
    causal = _check_flag("causal", causal)
    if window is None:
        return masks.Causal() if causal else masks.Full()
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ProblemError(f"window is {window!r}; it must be a pair (left, right) of ints >= 0, or None or -1 for unbounded.")
    left, right = (None if isinstance(side, (int, np.integer)) and side == -1 else side for side in window)
    if left is None and right is None:  # flash-attn's (-1, -1)
        return masks.Causal() if causal else masks.Full()
    band = masks.Window(left, right)
    return masks.And(masks.Causal(), band) if causal else band


def make_offsets(q_offset: Any, kv_offset: Any) -> tuple[int, int] | None:
    """The positions of the first rows of q and of k; None where none is given."""
    if q_offset is None and kv_offset is None:
        return None
    return make_offset("q_offset", q_offset) or 0, make_offset("kv_offset", kv_offset) or 0


def make_offset(name: str, offset: Any) -> int | None:
    """The position of a first row; None where it is not given."""
    if offset is None:
        return None
    if isinstance(offset, (bool, np.bool_)) or not isinstance(offset, (int, np.integer)) or offset < 0:
        is_array = hasattr(offset, "item") and not isinstance(offset, np.generic)
        way = f" Its value is not followed: give int({name})." if is_array else ""
        raise ProblemError(f"{name} is {brief(offset)}; it must be an int >= 0, or None.{way}")
    return int(offset)


def make_score(softcap: Any, score: Any) -> scores.Score:
    """The score that the shorthand ``softcap`` means, or ``score`` itself; a softcap of 0 is none, as in flash-attn."""
    if softcap is not None:
        softcap = scores.number("softcap", softcap, "a finite number > 0, or None or 0.0 for no cap")
    if score is not None:
        if softcap:
            raise ProblemError("score was given beside softcap; give one of them.")
        if hasattr(score, "shape") and hasattr(score, "dtype"):
            raise ProblemError(f"score is an array, {score.dtype} of shape {tuple(score.shape)}; give it as bias=.")
        if not _is_option("score", score) or score.interval is not None:
            raise ProblemError(f"score is {score!r}; it must be a score, such as rawattn.score.Softcap(30.0).")
        return score
    return scores.Softcap(softcap) if softcap else scores.Scale()


def make_scale(scale: Any) -> float | None:
    """The factor on q.k; None for the default."""
    if scale is None:
        return None
    return scores.number("scale", scale, f"a finite number up to {scores.FLOAT32_MAX}, or None for 1 / sqrt(head_dim)")


def is_int(seed: Any) -> bool:
    """Says whether a seed is a plain int. Raises ProblemError for one that 64 bits do not hold, and for what is no seed."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        if not -(1 << 63) <= seed < 1 << 63:
            raise ProblemError(f"seed is {brief(int(seed))}; an int must be from -2^63 to 2^63 - 1.")
        return True
    if not hasattr(seed, "shape"):
        raise ProblemError(f"seed is {seed!r}; it must be an int, or one int64 in an array of shape (1,).")
    return False


def make_dropout(p: Any) -> float:
    """The probability with which a weight is dropped: one that its random bits can express, rounded to their steps."""
    need = (
        f"0.0, or a number above {0.5 / weight.LEVELS} and below {1 - 0.5 / weight.LEVELS}, of which eight random bits are made"
    )
    rate = scores.number("dropout", p, need)
    if rate and not (0 < rate < 1 and 0 < round(rate * weight.LEVELS) < weight.LEVELS):
        raise ProblemError(f"dropout is {p!r}; it must be {need}.")
    return rate

"""This module says how the reference of a row's exponentials follows the row's maximum."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import Field, Fields, Pointer


class ConstantTime(Option):
    """Looks for the maximum and rescales in every tile. What is executed does not depend on the data."""

    source: ClassVar[str] = "variant/softmax/constant_time.cuh"


class SpeculativeMax(Option):
    """Trusts the first tile's maximum, and looks for another only where a sum shows that it is far off. Time depends on data."""

    source: ClassVar[str] = "variant/softmax/speculative_max.cuh"
    constant_time: ClassVar[Option] = ConstantTime()


class Unshifted(Option):
    """Weighs by exp(logit) itself, where a row weighs enough and no logit is too large. For bf16, and scores that say both."""

    source: ClassVar[str] = "variant/softmax/unshifted.cuh"


class LazyRescale(Option):
    """Looks for the maximum in every tile, and moves the reference when it lags by 2^8. Time depends on the data, a little."""

    source: ClassVar[str] = "variant/softmax/lazy_rescale.cuh"
    constant_time: ClassVar[Option] = ConstantTime()


class Plain(Option):
    """Adds nothing to a row's sum, in a kernel that finds maxima and sums by itself (attn_fwd_simt, combine)."""

    source: ClassVar[str] = "variant/softmax/plain.cuh"


class WithSink(Wrapper):
    """Adds a logit without a value to each row's sum, one for each query head."""

    source: ClassVar[str] = "variant/softmax/sink.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("sinks", "const Number*", Pointer("sinks")))


@dataclasses.dataclass(frozen=True)
class WithVScale(Wrapper):
    """Multiplies results by ``v``, the scale of values."""

    v: Option
    source: ClassVar[str] = "variant/softmax/v_scale.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}, {self.v.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.base.sources, *self.v.sources, self.source)

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, *self.v.fields)

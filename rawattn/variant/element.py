"""The number formats of q, of k and v, of o, and of captured arrays; how q becomes an operand of products."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..array.array import FLOATS
from ..trace.cuda_lines import CTYPES
from . import Option, Wrapper


@dataclasses.dataclass(frozen=True)
class Element(Option):
    """One number format; ``wgmma`` is its name in PTX, None where the tensor cores of Hopper do not take it."""

    name: str
    dtype: npt.DTypeLike
    wgmma: str | None = None
    source: ClassVar[str] = ""

    @property
    def cuda_type(self) -> str:
        return self.name.capitalize()

    @functools.cached_property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"variant/element/{self.name}.cuh",)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.name,)

    @property
    def lse_name(self) -> str:
        """The name of the format of lse."""
        return "fp64" if self.name == "fp64" else "fp32"

    @property
    def lse_bytes(self) -> int:
        """The bytes of a number of lse."""
        return 8 if self.name == "fp64" else 4

    @property
    def lse_dtype(self) -> npt.DTypeLike:
        """The dtype of lse, and of what is computed: float64 for float64 inputs, else float32."""
        return np.float64 if self.name == "fp64" else np.float32


BF16 = Element("bf16", FLOATS["bf16"], "bf16")
FP16 = Element("fp16", FLOATS["fp16"], "f16")
FP32 = Element("fp32", FLOATS["fp32"])
FP64 = Element("fp64", FLOATS["fp64"])
E4M3 = Element("e4m3", FLOATS["e4m3"])
E4M3_BITS = Element("e4m3bits", FLOATS["e4m3"])  # the same, widened without an instruction for it
E5M2 = Element("e5m2", FLOATS["e5m2"])
ELEMENTS = {element.name: element for element in (BF16, FP16, FP32, FP64)}
FP8 = {element.name: element for element in (E4M3, E5M2)}  # of caches alone
KV_ELEMENTS = ELEMENTS | FP8  # of caches


@dataclasses.dataclass(frozen=True)
class Record(Element):
    """The format of a latent cache whose rows are records of ``bytes`` bytes: the first ``head_dim_v`` columns in e4m3, a float32
    scale for each ``tile`` of them, and the rest of ``head_dim`` columns in bf16."""

    bytes: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    tile: int = 128

    @property
    def scales(self) -> int:
        """The number of scales."""
        return self.head_dim_v // self.tile

    def __str__(self) -> str:
        return f"rawattn.{self.name.upper()}"


FP8_DS_MLA = Record("fp8_ds_mla", np.uint8, bytes=656, head_dim=576, head_dim_v=512)  # DeepSeek V3.2's, FlashMLA's and vLLM's
RECORDS = {FP8_DS_MLA.bytes: FP8_DS_MLA}  # by the bytes of a row
FORMATS: dict[str, Element] = {**KV_ELEMENTS, FP8_DS_MLA.name: FP8_DS_MLA}  # by name


@dataclasses.dataclass(frozen=True)
class Item(Option):
    """The format of an array that a function among the options captured."""

    name: str
    source: ClassVar[str] = "function/element.cuh"

    @property
    def cuda_type(self) -> str:
        return CTYPES[self.name][0]

    @property
    def bytes(self) -> int:
        return CTYPES[self.name][1]


class PlainQ(Option):
    """Q is an operand as it is in memory."""

    source: ClassVar[str] = "variant/q_operand/plain.cuh"


class ScaledQ(Wrapper):
    """Q is an operand in half precision, each row times a power of two, for products with keys of eight bits; ``base`` is the
    scale of the keys."""

    source: ClassVar[str] = "variant/q_operand/scaled.cuh"

"""This package holds the fastest measured configuration on a device for each kind of operation. perf/tune.py writes it.

``DEVICE.jsonl`` in this folder (``Device.slug`` of the device, such as ``h200``) has a JSON object a line:

    kernel       name of the kernel, such as "attn_fwd"
    kind         the fields of ``Kind``: what the operations have in common that the configuration serves
    config       the fields of its configuration
    code_hash    the first 16 digits of ``Source.code_key`` of the kernel in this configuration, as it was measured
    ratio        time with the cost model's config over this one's, geometric mean over ``cases``, and [low, high] as ``interval``
    worst        the least such ratio of a case
    us           microseconds, geometric mean over ``cases``
    cases        labels of what it was measured on
    clocks       sm_mhz, power_w, celsius meanwhile
    nvrtc, commit, date

A record counts only where the kernel's code in that configuration is still what was measured; comments may differ.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

from ...driver.device import Device
from ...operation import Forward

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of operation that a tuning shape of a kernel stands for. The lengths of a call enter it only through the tuning
    shape that the call is like, so a new length needs no new configuration."""

    kernel: str
    element: str
    head_dim: int
    head_dim_v: int
    mask: str  # the C++ type
    score: str  # the C++ type
    size: str  # of the tuning shape, such as "8x2048 h16"

    @classmethod
    def of(cls, kernel: Any, shape: Forward) -> Kind:
        size = f"{shape.batch}x{shape.q_len} h{shape.heads}"
        kinds = shape.element.name, shape.head_dim, shape.head_dim_v, shape.mask.cuda_type, shape.score.cuda_type
        return cls(kernel.name, *kinds, size)

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + f"/{self.head_dim_v}" * (self.head_dim != self.head_dim_v)
        return " ".join([self.element, dims, self.mask, *[self.score] * (self.score != "Scale"), self.size])


@dataclasses.dataclass(frozen=True)
class Record:
    """A configuration that was measured, and the day of it."""

    config: Any
    date: str


def code_hash(kernel: Any, shape: Forward, config: Any, device: Device) -> str:
    """The hash of the code that NVRTC is given for a configuration; lse, the scale's sign, constant time, offsets and packed
    sequences make no difference to a kind."""
    spec = dataclasses.replace(shape.spec, return_lse=False, scale=None, constant_time=False, invariant=False).at(None)
    plain = dataclasses.replace(shape, spec=spec, varlen=False, sinks=False)
    key: str = kernel.render(plain, config, device.arch).code_key
    return key[:16]


def read(path: pathlib.Path) -> dict[Kind, dict[str, Any]]:
    """The lines of a file by kind; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {Kind(**record["kind"]): record for record in map(json.loads, lines)}


@functools.cache
def _read_installed(slug: str) -> dict[Kind, dict[str, Any]]:
    return read(FOLDER / f"{slug}.jsonl")


def find(kernel: Any, shape: Forward, device: Device) -> Record | None:
    """The record of a kernel's tuning shape on a device; None where nothing was measured, or where it counts no more."""
    record = _read_installed(device.slug).get(Kind.of(kernel, shape)) if not device.is_cpu else None
    return None if record is None else current(record, kernel, shape, device)


def current(record: dict[str, Any], kernel: Any, shape: Forward, device: Device) -> Record | None:
    """The record in a line of a file, if its configuration still is what was measured."""
    fields = dataclasses.fields(kernel.config_type)
    if [field.name for field in fields][: len(record["config"])] != [*record["config"]]:  # later ones have their defaults
        return None
    config = kernel.config_type(**record["config"])
    if kernel.legal(config, shape, device) is not None or record.get("code_hash") != code_hash(kernel, shape, config, device):
        return None
    return Record(config, record["date"][:10])

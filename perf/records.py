"""Tuning records: which configuration was measured to be the fastest, for which class of shapes.

``rawattn/records/DEVICE.jsonl`` (``DEVICE`` is ``machine.slug`` of the device's name, such as ``h200``) has a JSON object a line:

    kernel        name of the kernel, such as "attn_fwd"
    class         the fields of ``ShapeClass``
    config        the fields of the kernel's Config
    us            microseconds, median over interleaved rounds
    ratio         time of the cost model's first choice over this one's in the same run, and [low, high] as ``interval``
    case          the case it was measured on, as perf/sets.py writes it
    clocks        sm_mhz, power_w, celsius during the measurement
    nvrtc, source_hash, commit, date

A reader takes ``config`` only where the kernel's Config still has these fields and calls it legal for the problem at hand; the
cost model decides where no class matches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

from rawattn.problem import Problem

from . import machine, report

FOLDER = machine.ROOT / "rawattn" / "records"
Key = tuple[str, "ShapeClass"]  # kernel, class


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """Problems that one configuration serves best alike. ``keys`` and ``works`` are exponents of two, rounded."""

    element: str
    head_dim: int
    head_dim_v: int
    mask: str  # the C++ type
    score: str  # likewise
    varlen: bool
    keys: int  # that a query keeps, in the mean: what a window or a causal mask leaves of kv_len
    works: int  # query tiles of 128 rows over all heads and batches; 4096 and more are alike


def shape_class(problem: Problem) -> ShapeClass:
    q_len = max(1, round(problem.total_q / problem.batch)) if problem.varlen and problem.batch else max(1, problem.q_len)
    works, keys = -(-q_len // 128) * problem.batch * problem.heads, problem.pairs / q_len
    kinds = problem.mask.cuda_type, problem.score.cuda_type, problem.varlen
    exponents = round(math.log2(max(1, keys))), min(12, round(math.log2(max(1, works))))
    return ShapeClass(problem.element.name, problem.head_dim, problem.head_dim_v, *kinds, *exponents)


def _key(record: dict[str, Any]) -> Key:
    return record["kernel"], ShapeClass(**record["class"])


def read(path: pathlib.Path) -> dict[Key, dict[str, Any]]:
    """The records of a file by kernel and class."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {_key(record): record for record in records}


def add(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes a record in the place of one for the same kernel and class."""
    report.write(path, "".join(json.dumps(each) + "\n" for each in {**read(path), _key(record): record}.values()))

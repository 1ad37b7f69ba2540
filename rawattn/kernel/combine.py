"""combine.cu: folds results over different keys."""

from __future__ import annotations

from ..compiler import Source
from ..device import Device
from ..operation import Forward
from ..program import Field, Fields, Launch
from ..render import config_header, source
from ..variant import Option, launch, parts, rows, softmax, store

NAME, FILE = "combine", "combine.cu"
THREADS = 128  # four rows
WIDTH = 4  # columns that a lane reads at once; head_dim_v is a multiple of it


def options(op: Forward, arch: str) -> dict[str, Option]:
    """The option on each axis, to fold the splits of a forward operation."""
    plain = softmax.Plain()
    return {
        "Element": op.element,
        "Rows": rows.Dense(),
        "Parts": parts.Scratch(),
        "Softmax": softmax.WithSink(plain) if op.sinks else plain,
        "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        "Launch": launch.Dependent() if arch == "sm_90a" else launch.Independent(),
    }


def fields(op: Forward, arch: str) -> Fields:
    """The fields of struct Args, in order."""
    of_options = (field for option in options(op, arch).values() for field in option.fields)
    return (Field("heads", "i32"), Field("batches", "i32"), *dict.fromkeys(of_options))


def render(op: Forward, arch: str) -> Source:
    """The source that folds the splits of operations of one kind."""
    constants = {"head_dim_v": op.head_dim_v, "width": WIDTH, "threads": THREADS}
    return source(FILE, config_header(constants, fields(op, arch), [], options(op, arch)), arch)


def fold(op: Forward, splits: int, device: Device, rendered: tuple[Source, Fields]) -> Launch:
    """The launch that folds the splits of an operation."""
    result_rows = op.batch * op.heads * op.q_len
    values = {"heads": op.heads, "batches": op.batch, "q_len": op.q_len, "kv_len": op.kv_len, "splits": splits}
    values["partial_rows"] = result_rows
    return Launch(NAME, *rendered, values, -(-result_rows * 32 // THREADS))

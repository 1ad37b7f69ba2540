"""attn_decode_fold.cu: folds what blocks of attn_decode_wide.cu and attn_mla.cu left of works that several had parts of."""

from __future__ import annotations

from collections.abc import Mapping

from ..compile.compiler import Source
from ..variant import Option
from ..variant.field import Field, Fields, Scratch, Violations
from .render import config_header, source

NAME, FILE = "attn_decode_fold", "attn_decode_fold.cu"
AXES = ("Element", "Rows", "Score", "Softmax", "Store", "Launch")
CONSTANTS = ("tile_q", "tile_kv", "m_tiles_per_warp", "head_dim_v", "most_blocks")
THREADS = 256
LEFT_BYTES = 64  # of what each block says of its share
SHARED = (  # fields of this launch and of the one before
    Field("partials", "float*", Scratch("partials")),
    Field("left", "Left*", Scratch("left")),
    Field("violations", "u32*", Violations()),
    Field("scale", "Number"),
    *(Field(name, "i32") for name in ("heads", "batches", "borders", "slots", "strips")),
)


def source_and_fields(options: Mapping[str, Option], constants: Mapping[str, int], arch: str) -> tuple[Source, Fields]:
    """The source and the fields of the fold, from the options and constants of the launch before."""
    taken = {axis: options[axis] for axis in AXES}
    fields = tuple(dict.fromkeys((*SHARED, *(field for option in taken.values() for field in option.fields))))
    kept = {name: constants[name] for name in CONSTANTS}
    return source(FILE, config_header(kept | {"threads": THREADS}, fields, [], taken), arch), fields

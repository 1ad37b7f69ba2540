"""attn_decode_fold.cu: folds what blocks of attn_decode_wide.cu left of works that several of them had parts of."""

from __future__ import annotations

from collections.abc import Mapping

from ..compile.compiler import Source
from ..variant import Option
from ..variant.field import Fields
from .render import config_header, source

NAME, FILE = "attn_decode_fold", "attn_decode_fold.cu"
AXES = ("Element", "Rows", "Score", "Softmax", "Store", "Launch")
CONSTANTS = ("tile_q", "tile_kv", "m_tiles_per_warp", "head_dim_v", "most_blocks")
THREADS = 256
LEFT_BYTES = 64  # of what each block says of its share


def source_and_fields(
    options: Mapping[str, Option], common: Fields, constants: Mapping[str, int], arch: str
) -> tuple[Source, Fields]:
    """The source and the fields of the fold, from the options and constants of attn_decode_wide and the other fields of both."""
    taken = {axis: options[axis] for axis in AXES}
    fields = tuple(dict.fromkeys((*common, *(field for option in taken.values() for field in option.fields))))
    kept = {name: constants[name] for name in CONSTANTS}
    return source(FILE, config_header(kept | {"threads": THREADS}, fields, [], taken), arch), fields

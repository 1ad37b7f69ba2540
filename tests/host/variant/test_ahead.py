"""A score reads an element for each pair: format, indices and layout of the array, and the tile, decide how it comes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig, ahead_of, smem_bytes
from rawattn.operation.operand import Layout
from rawattn.testing import Case
from rawattn.trace.pair_axes import PairAxes
from rawattn.variant.ahead import ElementsAhead, NothingAhead, PrefetchedElements, TilesAhead
from rawattn.variant.field import TensorMap
from tests.host.kernel.test_render import words
from tests.traced import function

H200 = TYPICAL["sm_90a"]
X = np.zeros((2, 4, 80, 160), ml_dtypes.bfloat16)
ORDER = np.zeros(80, np.int32)
TILES = TilesAhead(2, "score_0", PairAxes(0, 2, 1, 3), 192)


def asked(score: Any, *tiles: str) -> Any:
    op = Case("bf16", 2, 64, 128, 4, 4, 128, 128).op
    option, _ = function(score, "score", (2, 4, 64, 128))
    return dataclasses.replace(op, spec=dataclasses.replace(op.spec, score=option), layout=Layout(tma_captured=tiles))


@pytest.mark.parametrize(
    "score, tiles, config, expected",
    [
        (lambda s, b, h, q, kv: s + X[b, h, q, kv], ("score_0",), AttnFwdConfig(192, 64, 3, 1), TILES),
        (lambda s, b, h, q, kv: s + X[b, h, q, kv], ("score_0",), AttnFwdConfig(128, 96, 2, 1), ElementsAhead(2)),
        (lambda s, b, h, q, kv: s + X[b, h, q, kv], (), AttnFwdConfig(192, 64, 3, 1), ElementsAhead(2)),
        (lambda s, b, h, q, kv: s + X[b, h, ORDER[q], kv], (), AttnFwdConfig(192, 64, 3, 1), ElementsAhead(2)),
        (lambda s, b, h, q, kv: s + X[b, h, q, kv] * X[b, 0, q, kv], ("score_0",), AttnFwdConfig(192, 64, 3, 1), NothingAhead()),
        (lambda s, b, h, q, kv: s + X[b, h, 0, kv], (), AttnFwdConfig(192, 64, 3, 1), NothingAhead()),
    ],
)
def test_chosen(score: Any, tiles: tuple[str, ...], config: AttnFwdConfig, expected: Any) -> None:
    op = asked(score, *tiles)
    assert ahead_of(op, config) == ATTN_FWD.options(op, config)["Ahead"] == expected
    assert ATTN_FWD.legal(config, op, H200) is None


def test_float32_is_loaded() -> None:
    wide = X.astype(np.float32)
    assert ahead_of(asked(lambda s, b, h, q, kv: s + wide[b, h, q, kv]), AttnFwdConfig(192, 64, 3, 1)) == PrefetchedElements(4)


def test_launch_by_tiles() -> None:
    """Its map, and the memory that it takes; how an array lies makes another source."""
    config, one = AttnFwdConfig(192, 64, 3, 1), lambda s, b, h, q, kv: s + X[b, 0, q + 1, kv]
    op = asked(one, "score_0")
    (launch,) = ATTN_FWD.lower(op, config, H200).launches
    (field,) = (field for field in launch.fields if field.name == "ahead")
    assert field.fill == TensorMap("score_0", 192, PairAxes(0, 2, None, 3, 1, 0))
    (other,) = ATTN_FWD.lower(asked(one), config, H200).launches
    assert other.source != launch.source and "ahead" not in [field.name for field in other.fields]
    for each, source in ((op, launch.source), (asked(one), other.source)):
        binary = compiler.compile(source)
        assert binary.spill_bytes == 0 and 0 <= smem_bytes(config, each) - words(binary.cubin, "facts")[0] < 2048

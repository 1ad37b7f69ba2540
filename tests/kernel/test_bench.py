"""``python -m rawattn bench`` on a GPU: by torch's clock and by CuPy's, which agree."""

from __future__ import annotations

import importlib.util

import pytest

from rawattn.command import bench
from rawattn.driver import context
from rawattn.runtime.model_config import Layer

pytestmark = pytest.mark.gpu("any")
LAYERS = [Layer("full", 16, 4, 128, 128), Layer("window 256", 16, 16, 64, 64, window=256)]


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_times(layer: Layer, library: str) -> None:
    pytest.importorskip(library)
    found = bench.Bench(context.device(0), library)
    found.measure(layer, 1, 512)
    found.measure(layer, 2, 8192)
    ours = [each for each in found.results if each.name == "rawattn"]
    assert len(ours) == 4 and all(each.us for each in ours), [each.reason for each in ours]
    assert ours[2].us > ours[0].us and 1 < ours[2].tflops < 5000
    if library == "torch":
        others = {each.name for each in found.results if each.us} - {"rawattn"}
        assert others & {"efficient", "flash", "cudnn", "math"}
        assert all(each.us or each.reason for each in found.results)


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "cupy"))), reason="needs torch and CuPy")
def test_clocks_agree() -> None:
    us = []
    for library in ("torch", "cupy"):
        found = bench.Bench(context.device(0), library)
        found.measure(LAYERS[0], 2, 8192)
        us += [each.us for each in found.results if each.name == "rawattn" and each.direction == "forward"]
    assert us[0] is not None and us[1] is not None and 0.7 < us[0] / us[1] < 1.4

"""Attention and its gradients in CuPy, and a CUDA graph; in NumPy where there is no GPU: the calls are the same.

python examples/attend_cupy.py --length 4096
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence

import numpy as np

import rawattn


def library() -> types.ModuleType:
    """CuPy, or NumPy where there is no CuPy or no GPU."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as error:  # no CuPy, no driver, no GPU: each raises its own
        print(f"NumPy takes CuPy's place: {str(error).partition(chr(10))[0]}")
        return np
    return cupy


def main(arguments: Sequence[str] | None = None) -> float:
    """The largest difference between a gradient and the slope of the loss along it, relative."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args(arguments)
    xp = library()
    q, k, v = (xp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 1, options.length, 8, 64), np.float32))

    o, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
    print(rawattn.explain(q, k, v, causal=True))
    dq, dk, dv = rawattn.attention_backward(2 * o, q, k, v, o, lse, causal=True)  # of the loss (o * o).sum()

    def loss(step: float) -> float:
        moved = (x + xp.float32(step) * dx for x, dx in ((q, dq), (k, dk), (v, dv)))
        return float((rawattn.attention(*moved, causal=True).astype(xp.float64) ** 2).sum())

    step = 1e-3
    slope, exact = (loss(step) - loss(-step)) / (2 * step), float(sum((dx.astype(xp.float64) ** 2).sum() for dx in (dq, dk, dv)))
    print(f"the loss rises by {slope:.6g} along its gradient, whose square is {exact:.6g}")

    if xp is not np:
        plan, out = rawattn.plan(q, k, v, causal=True), xp.empty_like(o)
        with xp.cuda.Stream(non_blocking=True) as stream:
            plan.run(q, k, v, out=out)  # what a stream needs is made before the capture
            stream.synchronize()
            stream.begin_capture()
            plan.run(q, k, v, out=out)
            graph = stream.end_capture()
            out.fill(0)
            graph.launch(stream)
            stream.synchronize()
        assert (out == o).all(), "a replayed graph gives the same bits"
        print("captured in a CUDA graph, and replayed")
    return abs(slope / exact - 1)


if __name__ == "__main__":
    main()

"""Ten masks as Python functions, and what a kernel sees of each: which tiles are empty, full, or cut.

python examples/masks.py                        the tiles as characters, and the shares of each kind
python examples/masks.py --picture masks.png    the same as a picture, which needs matplotlib
python examples/masks.py --device cuda --length 16384

Every mask is computed on the device and compared with the reference. A tile that is empty costs nothing, and one that is full
asks no pair; nothing of the size of length x length is ever made.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import rawattn
from rawattn import mask as masks
from rawattn import trace
from rawattn.trace.classes import CUT, EMPTY, FULL, classify

SIGNS = {EMPTY: "·", CUT: "▒", FULL: "█"}
Mask = Callable[..., Any]


def ten(n: int, device: str) -> dict[str, Mask]:
    """The masks, for n queries and keys. What they capture lies on the device."""
    rng = np.random.default_rng(0)

    def array(x: Any) -> Any:
        return torch.as_tensor(np.ascontiguousarray(x)).to(device)

    lengths = rng.integers(n // 12, n // 4, 16)  # of documents
    ids = array(np.repeat(np.arange(16, dtype=np.int32), lengths)[:n])
    side, window, stride = math.isqrt(n), n // 8, max(2, n // 40)
    begins = array(np.sort(rng.integers(0, n, n)).astype(np.int32))  # from which query on a key is forgotten
    blocks = array(rng.random((16, 16)) < 0.3)
    half, block = n // 2, max(1, n // 16)

    def block_diffusion(b: Any, h: Any, q: Any, kv: Any) -> Any:
        """BD3-LM: noised blocks, then clean ones; a noised block sees itself and the clean ones before it."""
        noised_q, noised_kv = q < half, kv < half
        of_q, of_kv = q % half // block, kv % half // block
        own = (of_q == of_kv) & (noised_q == noised_kv)
        return own | (noised_q & ~noised_kv & (of_q > of_kv)) | (~noised_q & ~noised_kv & (of_q >= of_kv))

    return {
        "causal": lambda q, kv: q >= kv,
        "sliding window with sinks": lambda q, kv: (q >= kv) & ((kv < 4) | (q - kv < window)),
        "documents": masks.Documents(ids),
        "documents, causal": masks.Documents(ids, causal=True),
        "prefix": masks.Prefix(n // 3),
        "chunked": masks.Chunked(n // 5),
        "neighbourhood on a grid": masks.Neighbourhood((side, -(-n // side)), 2 * (side // 8) + 1),
        "strided": lambda q, kv: (q >= kv) & ((q - kv < stride) | (kv % stride == stride - 1)),
        "block diffusion": block_diffusion,
        "blocks, and keys that are forgotten": lambda q, kv: blocks[q * 16 // n, kv * 16 // n] & (q < begins[kv]),
    }


def tiles(mask: Mask, n: int, tile: int) -> Any:
    """The class of each tile, (query tiles, key tiles), as a kernel finds it: by bounds of the function, without its pairs."""
    traced, arrays, numbers = trace.bind(mask, "mask")
    first = np.arange(0, n, tile)
    last = np.minimum(first + tile, n) - 1
    on_host = [x.cpu().numpy() for x in arrays]
    return classify(traced.code, on_host, numbers, 0, 0, (first[:, None], last[:, None]), (first, last), n, n)


def check(mask: Mask, n: int, device: str) -> float:
    """The largest error of attention under a mask, of some queries."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, 64, device=device, dtype=torch.float16) for heads in (4, 2, 2))
    rows = range(0, n, max(1, n // 64))
    o = rawattn.attention(q, k, v, mask=mask)[:, rows]
    wanted = rawattn.reference.attention(q, k, v, mask=mask, rows=rows)
    error = float((o - wanted).abs().max())
    if not error < 5e-3:
        raise SystemExit(f"a result differs from the reference by {error:.3g}.")
    return error


def picture(found: dict[str, Any], path: str) -> None:
    """Draws the tiles of all masks."""
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    figure, axes = pyplot.subplots(2, 5, figsize=(15, 6.6), constrained_layout=True)
    colours = ListedColormap(["#f4f4f4", "#f2a541", "#2e6f9e"])  # empty, cut, full
    for axis, (name, classes) in zip(axes.flat, found.items(), strict=True):
        axis.imshow(classes, cmap=colours, vmin=0, vmax=2, interpolation="nearest")
        axis.set_title(name, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle("tiles that are empty (white), full (blue) and cut (orange)")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tile", type=int, default=64, help="queries and keys of a tile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", metavar="FILE", help="draw the tiles into this file")
    options = parser.parse_args(argv)
    found = {}
    for name, mask in ten(options.length, options.device).items():
        classes = found[name] = tiles(mask, options.length, options.tile)
        shares = (f"{(classes == kind).mean():.0%} {word}" for kind, word in ((EMPTY, "empty"), (FULL, "full"), (CUT, "cut")))
        print(f"{name}: {', '.join(shares)}; error {check(mask, options.length, options.device):.1e}")
        if not options.picture:
            print("\n".join("  " + "".join(SIGNS[kind] for kind in row) for row in classes.tolist()))
    if options.picture:
        picture(found, options.picture)
    return found


if __name__ == "__main__":
    main()

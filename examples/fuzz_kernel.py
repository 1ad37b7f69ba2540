"""Fuzzes an attention of one's own: cases are drawn by Hypothesis, and a fault is shrunk to the smallest case that has it.

    python examples/fuzz_kernel.py                     a plain formula in torch, which is right
    python examples/fuzz_kernel.py --fault causal      with a fault: the mask stands at the first key, not at the last
    python examples/fuzz_kernel.py --fault scale       a scale of 0 is taken for none
    python examples/fuzz_kernel.py --fault empty       a query that keeps no key gets NaN

To fuzz a kernel, put it in the place of ``attention``. What must come out is computed in float64, and how far off a result may be
follows from the numbers of each row. The memory around q, k and v is NaN, so that a read beyond them shows.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import hypothesis
import torch
from torch import Tensor

from rawattn import testing

FAULTS = ("causal", "scale", "empty")


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, fault: str = "") -> Tensor:
    """softmax(scale q k^T) v, by the book, in float64."""
    dtype, q = q.dtype, q.double()
    k, v = (x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    is_default = not scale if fault == "scale" else scale is None
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if is_default else scale)
    if causal:
        last = 0 if fault == "causal" else s.shape[-1] - s.shape[-2]
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(last + 1), -torch.inf)
    p = s.softmax(-1)
    if fault != "empty":
        p = p.nan_to_num(0.0)  # no key is kept
    return torch.einsum("bhij,bjhd->bihd", p, v).to(dtype)


def plain(case: testing.Case) -> testing.Case:
    """A case without the options that the formula does not have."""
    return dataclasses.replace(case, window=None, mask=None, softcap=None, q_offset=None, kv_offset=None, dropout=0.0)


def fuzz(examples: int, device: str, fault: str) -> testing.Case | None:
    """The smallest case found in which the attention is wrong; None where none is."""
    smallest: list[testing.Case] = []

    @hypothesis.settings(max_examples=examples, deadline=None, database=None, report_multiple_bugs=False)
    @hypothesis.given(testing.cases(("fp32",), longest=40, layouts=("contiguous", "packed", "padded"), packed=False).map(plain))
    def check(case: testing.Case) -> None:
        q, k, v = case.inputs("torch", device)
        found = attention(q, k, v, **case.options, fault=fault)
        try:
            testing.expect(q, k, v, **case.options).check(found)
        except AssertionError:
            smallest[:] = [case]
            raise

    try:
        check()
    except AssertionError as error:
        print(error)
        return smallest[0]
    return None


def main(arguments: Sequence[str] | None = None) -> testing.Case | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--examples", type=int, default=200, help="cases that are drawn; default: 200")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    found = fuzz(options.examples, options.device, options.fault)
    print(f"{options.examples} cases are right" if found is None else f"the smallest case that is wrong: {found.name}")
    return found


if __name__ == "__main__":
    main()

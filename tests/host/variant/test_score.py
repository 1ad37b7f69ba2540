"""The score files, compiled for the host, against what the scores in Python say: values and derivatives of single logits."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from rawattn.testing.option_checks import check_score
from rawattn.variant.score import ConstantTimeSoftcap, Scale, Score, Softcap
from tests import native, options

CAP = st.sampled_from([0.5, 5.0, 30.0, 1e4])
# constant_time is not for fp64, in which the polynomial of a small logit would show
SCORES = {"scale": st.builds(Scale), "softcap": st.builds(Softcap, CAP), "constant time": st.builds(ConstantTimeSoftcap, CAP)}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, number)
        for name in (*SCORES, *options.SCORES)
        for number in ("fp32", "fp64")
        if (name, number) != ("constant time", "fp64")
    ],
)
def test_scores(name: str, number: str) -> None:
    """Of dot products of every size, in each head; the sign of the scale is in them."""
    native.needs_compiler()

    @hypothesis.settings(max_examples=10, derandomize=True)
    @hypothesis.given((SCORES | options.SCORES)[name], st.integers(0, 3), st.sampled_from([0.125, -0.5, 2.0]))
    def check(score: Score, head: int, scale: float) -> None:
        check_score(score, number, head, scale)

    check()

"""MIT's block_sparse_attn_func against its definition: a dense mask of blocks of 128, with gradients."""

from __future__ import annotations

from typing import Any

import pytest

from rawattn import ProblemError, UnsupportedError

torch = pytest.importorskip("torch")
LENGTHS = ((300, 300), (1, 140), (130, 20))


def call(types: list[int], causal: bool, **changes: Any) -> tuple[Any, list[Any], Any]:
    from rawattn.integrations.block_sparse_attn import block_sparse_attn_func

    random = torch.Generator().manual_seed(0)
    starts = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*LENGTHS, strict=True)]
    q, k, v = (
        torch.randn(int(starts[i][-1]), heads, 16, generator=random, dtype=torch.float64, requires_grad=True)
        for i, heads in ((0, len(types)), (1, 1), (1, 1))
    )
    mask = torch.rand(3, sum(x > 0 for x in types), 3, 3, generator=random) < 0.5
    options = {"base_blockmask": mask, "p_dropout": 0.0, "is_causal": causal} | changes
    head_types = torch.tensor(types, dtype=torch.int32)
    o = block_sparse_attn_func(
        q, k, v, *starts, head_types, None, max_seqlen_q_=300, max_seqlen_k_=300, **options
    )  # fmt: skip
    return o, [q, k, v], mask


@pytest.mark.parametrize("causal", [False, True])
def test_definition(causal: bool) -> None:
    types = [0, 1, 1]
    o, leaves, mask = call(types, causal)
    do = torch.randn(o.shape, dtype=o.dtype)
    found = torch.autograd.grad(o, leaves, do)
    parts, at = [], [0, 0]
    for i, (n, m) in enumerate(LENGTHS):
        q, k, v = leaves[0][at[0] : at[0] + n], leaves[1][at[1] : at[1] + m, 0], leaves[2][at[1] : at[1] + m, 0]
        at = [at[0] + n, at[1] + m]
        rows, columns = torch.arange(n)[:, None], torch.arange(m)
        for h, kind in enumerate(types):
            kept = torch.ones(n, m, dtype=torch.bool)
            if kind:
                kept = mask[i, h - 1][rows // 128, columns // 128]
            kept = kept & (columns <= rows + m - n) if causal else kept
            s = (q[:, h] @ k.T * 0.25).masked_fill(~kept, -torch.inf)
            parts.append(torch.softmax(s, 1).nan_to_num(0) @ v)
    wanted = torch.cat([torch.stack(parts[3 * i : 3 * i + 3], 1) for i in range(3)])
    assert torch.allclose(o, wanted, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad(wanted, leaves, do), strict=True):
        assert torch.allclose(a, b.nan_to_num(0), atol=1e-11)


def test_what_is_refused() -> None:
    for types, changes, error in (
        ([-1, 0], {}, "head_mask_type has -1, a streaming head"),
        ([0, 1], {"p_dropout": 0.1}, "p_dropout is 0.1"),
        ([0, 1], {"return_attn_probs": True}, "return_attn_probs is True"),
    ):
        with pytest.raises(UnsupportedError, match=error):
            call(types, False, **changes)
    with pytest.raises(ProblemError, match=r"base_blockmask has shape \(3, 1, 2, 3\); it must be \(3, 1, 3, 3\)"):
        call([0, 1], False, base_blockmask=torch.ones(3, 1, 2, 3))

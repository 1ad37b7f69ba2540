"""FlashInfer's ``BlockSparseAttentionWrapper``, by ``rawattn.attention`` over lists of blocks."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..api.attention import attention
from ..api.naming import naming
from ..errors import ProblemError, UnsupportedError
from .block_lists import make_keys


class BlockSparseAttentionWrapper:
    """Attention of (M, heads, head_dim) to (N, kv_heads, head_dim) under a sparse matrix of blocks of R queries and C keys.

    >>> wrapper = BlockSparseAttentionWrapper(torch.empty(0, device="cuda"))
    >>> wrapper.plan(indptr, indices, M, N, 64, 64, num_qo_heads, num_kv_heads, head_dim, q_data_type=torch.bfloat16)
    >>> o = wrapper.run(q, k, v)

    The buffer says the device and is used for nothing else; ``backend`` is a hint, ignored.
    """

    def __init__(self, float_workspace_buffer: Any, backend: str = "auto") -> None:
        self.device = float_workspace_buffer.device
        self._form: Any = None
        self._options: dict[str, Any] = {}

    def plan(
        self, indptr: Any, indices: Any, M: int, N: int, R: int, C: int, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        mask: Any = None, packed_mask: Any = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        o_data_type: Any = None, non_blocking: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        """Makes lists of blocks of the matrix, which all heads share, for calls of ``run``.

        Args:
            indptr, indices: int32 of (ceil(M / R) + 1,) and (nnz,): row i has blocks indices[indptr[i] : indptr[i + 1]]. They are
                copied to the buffer's device where they lie elsewhere, and the host reads how long the longest row is.
            causal: leaves out the keys behind a query's own, the last query standing on the last key. FlashInfer counts the keys
                of a row's list in their place, which is the same where each list ends with the blocks on the diagonal.
            logits_soft_cap: None or 0 is none. sm_scale: None is 1 / sqrt(head_dim).
            kv_data_type, o_data_type: None, or q_data_type; results have q's dtype.

        A block counts as often as it is listed. Masks of single pairs, encodings of positions, and what is ``more`` are refused.
        """
        refused = {"mask": mask, "packed_mask": packed_mask, "use_fp16_qk_reduction": use_fp16_qk_reduction or None}
        refused |= {"pos_encoding_mode": None if pos_encoding_mode == "NONE" else pos_encoding_mode}
        for name, value in (refused | {"rope_scale": rope_scale, "rope_theta": rope_theta} | more).items():
            if value is not None:
                shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise UnsupportedError(f"{name} is {shown}; leave it out, or call rawattn.attention with keys=rawattn.Blocks.")
        dtypes = [x if isinstance(x, torch.dtype) else getattr(torch, x) for x in (q_data_type, kv_data_type, o_data_type) if x]
        if len({*dtypes}) > 1:
            raise UnsupportedError(f"q_data_type, kv_data_type and o_data_type are {dtypes}; they must be one dtype.")
        for name, x, length in (("indptr", indptr, -(-M // R) + 1), ("indices", indices, None)):
            if x.dtype != torch.int32 or x.dim() != 1 or length not in (None, len(x)):
                need = f"torch.int32 of shape ({'nnz' if length is None else length},)"
                raise ProblemError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be {need}.")
        most = int((indptr[1:] - indptr[:-1]).max()) if len(indptr) > 1 else 0
        indptr, indices = (x.to(self.device, non_blocking=non_blocking) for x in (indptr, indices))
        counts, places = indptr[1:] - indptr[:-1], torch.arange(most, device=self.device)
        indices = torch.nn.functional.pad(indices, (0, 1), value=-1)  # so that there is a number to read
        lists = indices[(indptr[:-1, None] + places).clamp(0, len(indices) - 1)]
        lists, counts = (x.expand(1, num_kv_heads, *x.shape) for x in (lists, counts))
        keys = make_keys(lists, counts, R, C, N)
        self._form = (M, num_qo_heads, head_dim), (N, num_kv_heads, head_dim), dtypes[0]
        self._options = {"causal": causal, "softcap": logits_soft_cap or None, "scale": sm_scale, "keys": keys}

    begin_forward = plan

    @naming(softcap="logits_soft_cap", scale="sm_scale")
    def run(
        self, q: Any, k: Any, v: Any, scale_q: Any = None, scale_k: Any = None, scale_v: Any = None, out: Any = None,
        lse: Any = None, return_lse: bool = False, enable_pdl: bool | None = None,
    ) -> Any:  # fmt: skip
        """o of q's shape; with return_lse also lse, (M, heads) in float32, of base 2, as FlashInfer has it: -inf for a row
        without a block, whose o is 0. Gradients are followed where lists have them. ``enable_pdl`` is a hint, ignored."""
        for name, value in (("scale_q", scale_q), ("scale_k", scale_k), ("scale_v", scale_v)):
            if value is not None:
                raise UnsupportedError(f"{name} was given; lists of blocks take no fp8: leave it out.")
        if self._form is None:
            raise ProblemError("run was called before plan; plan says which blocks there are.")
        for name, x, shape in (("q", q, self._form[0]), ("k", k, self._form[1]), ("v", v, self._form[1])):
            if tuple(x.shape) != shape or x.dtype != self._form[2]:
                raise ProblemError(
                    f"{name} is {x.dtype} of shape {tuple(x.shape)}; by plan it must be {self._form[2]} of {shape}."
                )
        if not return_lse and lse is None:
            return attention(q[None], k[None], v[None], out=None if out is None else out[None], **self._options)[0]
        outs = None if out is None else (out[None], None)
        o, found = attention(q[None], k[None], v[None], out=outs, return_lse=True, **self._options)
        found = found[0].T / math.log(2)
        found = found.contiguous() if lse is None else lse.copy_(found)
        return (o[0], found) if return_lse else o[0]

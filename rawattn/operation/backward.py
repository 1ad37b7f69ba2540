"""The gradients of attention as a frozen, hashable value without pointers or devices, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from ..array.array import Array, contiguous_strides
from ..array.making import dense
from ..array.tma import readable
from ..errors import ProblemError
from . import captures, functions
from .base import Operation
from .forward import Forward, check_arrays, limits
from .inputs import BackwardInputs
from .operand import PLAIN, Layout, Operand, layout_of
from .spec import Spec


@dataclasses.dataclass(frozen=True)
class Backward(Operation):
    """dq, dk, dv, and where there are sinks dsinks: the gradients of a loss by the inputs of ``forward``, from do, that by o, and
    dlse, that by lse, where the loss depends on it. ``wrt`` are names of arrays that the score captured, whose gradients are
    wanted besides. Rows that ``q_lens`` and ``kv_lens`` of the forward leave unused have gradients of 0, and are in no sum.

    It reads o and lse, which the forward gave. ``layout`` has what kernels may ask of how do, q, k, v and o lie in memory.
    """

    forward: Forward
    dlse: bool = False
    layout: Layout = PLAIN
    wrt: tuple[str, ...] = ()

    names: ClassVar[tuple[str, ...]] = BackwardInputs._fields

    def __post_init__(self) -> None:
        forward = self.forward  # as it is for all gradients: lse is there, and the layout is that of more arrays
        if forward.spec.return_lse or forward.layout != PLAIN:
            plain = dataclasses.replace(forward, spec=dataclasses.replace(forward.spec, return_lse=False), layout=PLAIN)
            object.__setattr__(self, "forward", plain)

    @classmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        """All inputs, in order."""
        return cls.names

    @classmethod
    def dense(cls, inputs: Any) -> Any:
        """Copies do and dlse, of which autograd gives expanded ones: see ``making.dense``."""
        do, dlse = dense(inputs.do), None if inputs.dlse is None else dense(inputs.dlse, whole=True)
        return inputs if do is inputs.do and dlse is inputs.dlse else inputs._replace(do=do, dlse=dlse)

    @classmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> Backward:
        """The operation of a call of ``rawattn.attention_backward``. The option ``wrt`` is its own."""
        options = dict(options)
        wrt: tuple[str, ...] = options.pop("wrt", ())
        if functions.among(options):
            check_arrays(arrays, *lengths)
            options = captures.resolve_by_intervals(options, arrays, limits(arrays, options), for_gradients=True)
        spec = Spec.of(**{**options, "invariant": False})  # that is of the forward alone
        op = cls.of(arrays, spec, *lengths)
        return dataclasses.replace(op, wrt=wrt) if wrt else op

    @classmethod
    def of(cls, arrays: dict[str, Array], spec: Spec, max_q_len: Any = None, max_kv_len: Any = None) -> Backward:
        """The operation on these inputs, by name. Raises ProblemError where they contradict each other."""
        forward = Forward.of({name: arrays[name] for name in Forward.names if name in arrays}, spec, max_q_len, max_kv_len)
        q = arrays["q"]
        op = cls(forward, "dlse" in arrays)
        for operand in op.inputs:
            if operand.name not in arrays:
                raise ProblemError(f"{operand.name} is None; it must be an array.")
            operand.check(arrays[operand.name], q.library, q.device)
        return op if q.is_cpu else dataclasses.replace(op, layout=op.layout_of(arrays))

    def resized(self, batch: int, q_len: int, kv_len: int) -> Backward:
        """The operation with other lengths, which are not checked again; for dense sequences."""
        return dataclasses.replace(self, forward=self.forward.resized(batch, q_len, kv_len))

    # ---- its arrays

    @functools.cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that it reads, in order."""
        q, k, v, *rest = self.forward.inputs
        o = dataclasses.replace(self.forward, spec=dataclasses.replace(self.forward.spec, return_lse=True)).outputs
        out, lse = (operand._replace(role="in") for operand in o)
        dlse = [lse._replace(name="dlse")] * self.dlse
        return (out._replace(name="do"), q, k, v, out, lse, *dlse, *rest)

    @functools.cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The arrays that it writes, in order."""
        read = {operand.name: operand for operand in self.forward.inputs}
        names = ("q", "k", "v", *["sinks"] * self.forward.sinks, *self.wrt)
        contiguous = {*self.wrt, "sinks"}
        return tuple(read[name]._replace(name=f"d{name}", role="out", contiguous=name in contiguous, label="") for name in names)

    @property
    def captured(self) -> tuple[Operand, ...]:
        """The arrays that functions captured: those of the forward."""
        return self.forward.captured

    def layout_of(self, arrays: Mapping[str, Array]) -> Layout:
        """The facts of do, q, k, v and o, and of what the score captured, with gradients of that."""
        layout = layout_of((name, arrays[name]) for name in ("do", "q", "k", "v", "o"))
        return captures.with_captured(layout, self.forward.spec, arrays, self._alone)

    @property
    def _alone(self) -> tuple[bool, bool]:
        return self.forward.batch == 1, self.forward.heads == 1

    def lying(self) -> tuple[Backward, ...]:
        """The operation on arrays that the score captured, whatever may matter of how they lie, as ``Forward.lying``."""
        return tuple(dataclasses.replace(self, layout=x) for x in captures.lying(self.layout, self.forward.spec, self._alone))

    def check_numbers(self, arrays: Mapping[str, Any]) -> None:
        """Raises ProblemError where ``Forward.check_numbers`` does."""
        self.forward.check_numbers(arrays)

    # ---- what compiled kernels depend on, and its size

    @property
    def number(self) -> str:
        return self.forward.number

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what compiled kernels depend on, as ``Forward.kind``."""
        return (type(self), self.forward.kind, self.dlse, self.wrt)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the five products over the kept pairs: those of S, dK and dQ have head_dim columns,
        those of dP and dV head_dim_v."""
        forward = self.forward
        return 2 * (3 * forward.head_dim + 2 * forward.head_dim_v) * forward.batch * forward.heads * forward.pairs

    # ---- operations of nearly the same size

    @property
    def selection_key(self) -> Any:
        """The forward's, and what it adds."""
        return (type(self), self.forward.selection_key, self.dlse, self.layout, self.wrt)

    def rounded(self) -> Backward:
        """The operation of the forward whose lengths are rounded up."""
        return dataclasses.replace(self, forward=self.forward.rounded())

    @classmethod
    def coarse(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The options that calls of one family share: those of ``Forward.coarse``."""
        return Forward.coarse(options)

    @classmethod
    def family(cls, forms: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A key of do, q, k, v, o and lse that lie plainly."""
        if any(forms[6:]) or not all(forms[:6]):
            return None
        do, q, k, v, o, lse = forms[:6]
        forward = Forward.family((q, k, v), options)
        if forward is None:
            return None
        (_, dtype, q_shape, _, *place), shape = q, (*q[2][:3], v[2][3])
        for alignment, dtype_each, shape_each, strides, *place_each in (do, o):
            if dtype_each != dtype or tuple(shape_each) != shape or place_each != place or alignment or strides[3] != 1:
                return None
            if not readable(shape, strides, dtype.itemsize, 0):
                return None
        rows = q_shape[0], q_shape[2], q_shape[1]
        if tuple(lse[2]) != rows or tuple(lse[3]) != contiguous_strides(rows) or [*lse[4:]] != place:
            return None
        return (forward, lse[1])

    def resized_to(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Backward:
        """The operation on arrays of the same family: itself where their lengths are its own."""
        forward = self.forward.resized_to(arrays, options)
        assert forward is not None, "families of gradients have no functions"
        return self if forward is self.forward else dataclasses.replace(self, forward=forward)

    # ---- as text

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Backward:
        """The inverse of ``to_json``."""
        return super().from_json({**fields, "forward": Forward.from_json(fields["forward"])})

    def __str__(self) -> str:
        return f"Backward of {self.forward}{', dlse' if self.dlse else ''}{''.join(f', d{name}' for name in self.wrt)}"

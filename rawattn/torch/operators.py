"""rawattn's operators in torch, ``torch.ops.rawattn.attention`` and ``attention_backward``, and what computes them.

A call on plain eager tensors does without the operators, since torch's dispatcher takes time; where one requires grad, it goes
to an ``autograd.Function``. What works by seeing operators needs them: torch.compile, export, FakeTensor, make_fx, vmap,
autocast, DTensor, selective checkpointing, FLOP counting. ``dispatch`` tells these calls apart. The package is imported with
rawattn where torch is loaded before, else by the first call with a tensor; import it yourself where a saved program is loaded
before any call.

The operators are functional. ``attention`` always gives (o, lse): the backward needs lse, and one pair of shapes serves every
rule here. ``attention_backward`` gives (dq, dk, dv, dsinks), the last one empty where there are no sinks, and
``attention_backward_captured`` a list of these and of the gradients of the captured tensors whose numbers are in ``wrt``. Their
``spec`` is the JSON text of a ``rawattn.Spec``, which a graph can hold and export can save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..array.array import CPU, DTYPES, META, Array
from ..errors import ProblemError
from ..operation import Backward, Forward, captures, functions
from ..operation.forward import check_arrays, check_has_seed, check_keys, limits
from ..operation.inputs import BackwardInputs, ForwardInputs
from ..operation.operand import check_like
from ..runtime import calls
from ..runtime.request import request_for
from . import sharding
from .modes import functorch_level, is_mapped
from .option_text import options_of, text_of


class Rest(NamedTuple):
    """The arguments of the operators behind their first tensors, by their names."""

    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    spec: str = "{}"
    seed: Any = None
    captured: Sequence[Any] | None = None
    q_lens: Any = None
    kv_lens: Any = None
    keys: Any = None
    keys_counts: Any = None

    @classmethod
    def of(
        cls, inputs: ForwardInputs | BackwardInputs, lengths: tuple[Any, Any], text: str, captured: Sequence[Any] | None
    ) -> Rest:
        """Returns the arguments of a call on these tensors."""
        starts = inputs.cu_seqlens_q, inputs.cu_seqlens_kv
        rest = inputs.q_lens, inputs.kv_lens, inputs.keys, inputs.keys_counts
        return cls(inputs.sinks, *starts, *lengths, text, inputs.seed, captured or None, *rest)

    @property
    def lengths(self) -> tuple[Any, Any]:
        """The bounds on lengths."""
        return self.max_seqlen_q, self.max_seqlen_kv

    def inputs(self, q: Any, k: Any, v: Any) -> ForwardInputs:
        """The tensors of a call on q, k and v, but for those that functions captured."""
        rest = self.sinks, self.q_lens, self.kv_lens, self.seed, self.keys, self.keys_counts
        return ForwardInputs(q, k, v, self.cu_seqlens_q, self.cu_seqlens_kv, *rest)


_REST = (
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, SymInt? max_seqlen_q=None, "
    'SymInt? max_seqlen_kv=None, str spec="{}", Tensor? seed=None, Tensor[]? captured=None, '
    "Tensor? q_lens=None, Tensor? kv_lens=None, Tensor? keys=None, Tensor? keys_counts=None"
)
_BACKWARD = f"Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, {_REST}"
library = torch.library.Library("rawattn", "DEF")  # its operators live as long as this object
for _schema in (
    f"attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor o, Tensor lse)",
    f"attention_backward({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    f"attention_backward_captured({_BACKWARD}, int[] wrt=[]) -> Tensor[]",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
ATTENTION, BACKWARD = torch.ops.rawattn.attention.default, torch.ops.rawattn.attention_backward.default
CAPTURED = torch.ops.rawattn.attention_backward_captured.default


def attention(
    inputs: ForwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any,
    captured: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Computes ``attention`` by the operator. Dynamo traces this function, so nothing in it may break a graph."""
    _check_has_not("attention", out=out, kernel=kernel, config=config)
    if not torch.compiler.is_dynamo_compiling():
        check_tensors(Forward.names, inputs)
        check_tensors(tuple(captures.labels(options).values()), captured)
        if captured and functorch_level() is not None and not any(map(is_mapped, inputs[:3])):
            for words, x in zip(captures.labels(options).values(), captured, strict=True):
                if is_mapped(x):  # torch finds no batch in a list of tensors alone
                    raise ProblemError(
                        f"{words} is mapped by torch.vmap, and neither q, k nor v is; map one of them, expanded, too."
                    )
        sharding.register_where_loaded()
    o, lse = ATTENTION(inputs.q, inputs.k, inputs.v, *_make_rest(inputs, options, lengths, captured))
    return (o, lse) if options["return_lse"] else o


def _make_rest(
    inputs: ForwardInputs | BackwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], captured: tuple[Any, ...]
) -> Rest:
    """Makes the operators' arguments behind their first tensors."""
    longest = _read_bound("max_seqlen_q", lengths[0]), _read_bound("max_seqlen_kv", lengths[1])
    return Rest.of(inputs, longest, text_of(options), list(captured))


def attention_backward(
    inputs: BackwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any,
    captured: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Computes ``attention_backward`` by the operator. Dynamo traces this function, too."""
    _check_has_not("attention_backward", out=out, kernel=kernel, config=config)
    options, wrt = {**options}, options.get("wrt", ())
    options.pop("wrt", None)
    if not torch.compiler.is_dynamo_compiling():
        check_tensors(Backward.names, inputs, "do")
        check_tensors(tuple(captures.labels(options).values()), captured)
        sharding.register_where_loaded()
    args = (*inputs[:7], *_make_rest(inputs, options, lengths, captured))
    if wrt:
        names = captures.names(options)
        gradients = CAPTURED(*args, [names.index(name) for name in wrt])
    else:
        gradients = BACKWARD(*args)
    return (*gradients[:3], *(() if inputs.sinks is None else gradients[3:4]), *gradients[4:])


def _check_has_not(operator: str, **arguments: Any) -> None:
    """Raises ProblemError for an argument that an operator does not have."""
    for name, value in arguments.items():
        if value is not None:
            raise ProblemError(
                f"{name} was given where torch traces, transforms or casts the call; torch.ops.rawattn.{operator} has no {name}: "
                "leave it out."
            )


def check_tensors(names: tuple[str, ...], values: Sequence[Any], first: str = "q") -> None:
    """Raises ProblemError for a value that is no tensor with a shape; ``first`` names one that is known to be a tensor."""
    for name, x in zip(names, values, strict=False):
        if x is None and name not in "qkv":
            continue
        if not isinstance(x, torch.Tensor):
            raise ProblemError(f"{name} is a {type(x).__name__} but {first} a torch tensor; give all arrays from one library.")
        if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
            raise ProblemError(f"{name} is a {type(x).__name__}, which has no shape yet; run the module that makes it first.")


def _read_bound(name: str, value: Any) -> Any:
    """Returns a bound on lengths as the operator takes it: None, an int or, while torch traces, a SymInt."""
    if value is None or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) != 0:
        raise ProblemError(f"{name} is {value!r}; it must be an int >= 0, or None.")
    return int(value)


def _compute(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    """Computes the operator ``attention`` on real tensors."""
    args = Rest(*rest)
    request = request_for(Forward, options_of(args.spec), args.lengths)
    return calls.run(args.inputs(q, k, v), request, None, tuple(args.captured or ()))


def _compute_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *rest: Any, wrt: Sequence[int] = ()
) -> tuple[Any, ...]:
    """Computes the operator ``attention_backward`` on real tensors; lse is copied where vmap expanded it."""
    args = Rest(*rest)
    inputs = BackwardInputs.of(do, args.inputs(q, k, v), o, lse.contiguous(), dlse)
    options = {**options_of(args.spec), "return_lse": False}
    options |= {"wrt": tuple(captures.names(options)[i] for i in wrt)} if wrt else {}
    gradients = calls.run(inputs, request_for(Backward, options, args.lengths), None, tuple(args.captured or ()))
    return (*gradients[:3], lse.new_empty(0), *gradients[3:]) if args.sinks is None else gradients


def _compute_captured(*args: Any) -> list[Any]:
    """Computes the operator ``attention_backward_captured`` on real tensors."""
    return list(_compute_backward(*args[:BEFORE_WRT], wrt=args[BEFORE_WRT]))


BEFORE_WRT = 7 + len(Rest._fields)
for _key in ("CPU", "CUDA"):
    library.impl("attention", _compute, _key)
    library.impl("attention_backward", _compute_backward, _key)
    library.impl("attention_backward_captured", _compute_captured, _key)


@torch.library.register_fake("rawattn::attention", lib=library)
def _fake_attention(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> tuple[Any, Any]:
    """Makes results of the right shapes, strides and dtypes. Raises ProblemError where the arguments contradict each other."""
    _check_arguments(q, k, v, Rest(*rest, **named))
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype)


@torch.library.register_fake("rawattn::attention_backward", lib=library)
def _fake_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *rest: Any, **named: Any
) -> tuple[Any, ...]:
    """Makes gradients of the right shapes, as ``_fake_attention`` makes results."""
    args = Rest(*rest, **named)
    _check_arguments(q, k, v, args)
    for name, x in (("do", do), ("o", o), ("lse", lse), ("dlse", dlse)):
        if x is not None:
            check_like(name, describe(x), "q", describe(q))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), lse.new_empty(0 if args.sinks is None else args.sinks.shape[0]))


@torch.library.register_fake("rawattn::attention_backward_captured", lib=library)
def _fake_captured(*args: Any, **named: Any) -> list[Any]:
    """Makes the gradients that ``_fake_backward`` makes, and those of captured tensors."""
    *first, wrt = (*args, *named.values())
    captured = Rest(*first[7:]).captured or ()
    return [*_fake_backward(*first), *(captured[i].new_empty(captured[i].shape) for i in wrt)]


def _check_arguments(q: Any, k: Any, v: Any, args: Rest) -> None:
    """Raises ProblemError where the arguments of an operator contradict each other."""
    tensors = zip(Forward.names, args.inputs(q, k, v), strict=True)
    described, options = {name: describe(x) for name, x in tensors if x is not None}, options_of(args.spec)
    check_arrays(described, *args.lengths)
    check_has_seed(described, options["dropout"])
    check_keys(described, options["keys"])
    names, captured = captures.names(options), args.captured or ()
    if len(names) != len(captured):
        raise ProblemError(f"captured has {len(captured)} tensors; the functions in spec captured {len(names)}.")
    described |= dict(zip(names, map(describe, captured), strict=True))
    captures.check(captures.labels(options), described)
    if any(function.sizes for _, function in functions.among(options)):
        captures.check_sizes(options, described, limits(described, options))


_NAMES = {getattr(torch, dtype.name): name for name, dtype in DTYPES.items()}


def describe(x: Any) -> Array:
    """Describes a tensor without memory, as far as checks of shapes read one."""
    index = {"cpu": CPU, "meta": META}.get(x.device.type, x.device.index or 0)
    return Array("torch", index, _NAMES.get(x.dtype, str(x.dtype)), tuple(x.shape), x.stride(), 0, None)

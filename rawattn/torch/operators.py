"""rawattn's operators in torch, ``torch.ops.rawattn.attention`` and ``attention_backward``; autograd; and which calls must go
through the operators.

A plain eager tensor goes past torch's dispatcher, which is the faster way, and one that requires grad past it into an
``autograd.Function``. All that works by seeing operators needs the operators: torch.compile, export, FakeTensor, make_fx, vmap,
autocast, DTensor, selective checkpointing, FLOP counting. ``dispatch`` tells them apart. This file is imported with rawattn where
torch is loaded before, else by the first call with a tensor; import it yourself where a saved program is loaded before any call.

The operators are functional. ``attention`` always gives (o, lse): the backward needs lse, and one pair of shapes serves every
rule here. ``attention_backward`` gives (dq, dk, dv, dsinks), the last one empty where there are no sinks, and
``attention_backward_captured`` a list of these and of the gradients of the captured tensors whose numbers are in ``wrt``. Their
``spec`` is the JSON text of a ``rawattn.Spec``, which a graph can hold and export can save.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils.flop_counter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._device import DeviceContext

from ..api import attention as attention_
from ..array import arrays, eager
from ..array.arrays import CPU, META, Array
from ..errors import ProblemError
from ..operation import Backward, Forward, functions
from ..operation.forward import check_arrays, check_has_seed, limits
from ..operation.inputs import BackwardInputs, ForwardInputs
from ..operation.spec import Spec, is_int
from ..runtime import calls
from ..runtime.plan import Plan
from ..runtime.request import Options, Request, named, request_for
from ..variant import Option
from ..variant.element import ELEMENTS
from . import sharding

NO_CONSTANT_TIME = (
    "constant_time=True was given and an input requires grad, but no gradient is shown to take the same time for all numbers; "
    "call under torch.no_grad(), or on detached inputs."
)
NO_TANGENT = "an input has a forward-mode tangent, and there is no formula for it; give its primal."
NO_SECOND = (
    "a second derivative was asked for, that of attention_backward, and there is no formula for it; leave out create_graph=True, "
    "or use torch's scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has one."
)
NO_BATCH = (
    "is_grads_batched=True was given, and a captured tensor requires grad; ask for one gradient after the other, or use "
    "torch.func.vmap."
)
NO_RANDOMNESS = (
    "dropout was given without seed under torch.vmap, whose randomness is 'error', the default; give torch.vmap "
    "randomness='different', for a seed for each element, or randomness='same', for one, or give seed."
)
NO_GRADIENT_OF_PARTS = "q is a DTensor, which has no gradients of captured tensors: they would be parts of sums"
_OPTIONS = (
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, SymInt? max_seqlen_q=None, "
    'SymInt? max_seqlen_kv=None, str spec="{}", Tensor? seed=None, Tensor[]? captured=None, '
    "Tensor? q_lens=None, Tensor? kv_lens=None"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("rawattn", "DEF")  # its operators live as long as this object
_library.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)", tags=_TAGS)
_library.define(
    f"attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, {_OPTIONS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=_TAGS,
)
_library.define(
    f"attention_backward_captured(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse=None, {_OPTIONS}, "
    "int[] wrt=[]) -> Tensor[]",
    tags=_TAGS,
)
_CAPTURED = torch.ops.rawattn.attention_backward_captured.default
_ATTENTION, _BACKWARD = torch.ops.rawattn.attention.default, torch.ops.rawattn.attention_backward.default


arrays.reader(torch.Tensor)  # so that tensors are known, and the first call of all is kept

# ---- which calls go through the operators

eager.skip((Plan.run, calls.forward, attention_.backward))
_tensor, _parameter, _is_compiling = torch.Tensor, torch.nn.Parameter, torch.compiler.is_compiling
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_functorch_level, _jit_trace = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
_is_mapped = torch._C._functorch.is_batchedtensor  # by torch.vmap
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by torch.autograd.grad(is_grads_batched=True)
_grad_enabled = torch.is_grad_enabled


def is_tensor(x: Any) -> bool:
    """Tells whether it is torch's."""
    return isinstance(x, _tensor)


def seed_of(q: Any, seed: Any, missing: str = "") -> Any:
    """Returns the seed of a call as a tensor on q's device: the tensor that is given, one that an int fills, or one that torch's
    generator of the device draws there. Nothing waits for the device, and a graph draws anew at every replay."""
    if seed is None:
        if missing:
            raise ProblemError(f"seed is None, and there is dropout; {missing}.")
        try:
            return torch.randint(0, (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)
        except RuntimeError as error:
            if _functorch_level() is None or "randomness" not in str(error):
                raise
            raise ProblemError(NO_RANDOMNESS) from None
    return torch.full((1,), seed, dtype=torch.int64, device=q.device) if is_int(seed) else seed


def _some_requires_grad(*given: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)


def _either_autocast() -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")


# One call each, where torch has it.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", _either_autocast)
_any_requires_grad = getattr(torch._C, "_any_requires_grad", _some_requires_grad)


def dispatch(tensors: Sequence[Any], casts: bool = True) -> Callable[..., Any] | None:
    """Says which function computes a call on these tensors: None for ``calls.run``, which launches kernels; ``differentiable``
    where autograd follows; ``attention`` where torch must see an operator: while it traces, under a mode or transform of its own,
    where autocast would cast, if ``casts``, and for tensors without memory. It takes half a microsecond for plain tensors."""
    if _is_compiling():
        return attention
    q = tensors[0]
    if type(q) is not _tensor and not isinstance(q, _tensor):
        return None
    if _dispatch_modes() or _functorch_level() is not None or _jit_trace() is not None:
        return attention
    if _function_modes() and _seen_by_function_mode():
        return attention
    return attention if casts and _any_autocast() and not q.is_meta and _is_cast(tensors) else dispatch_plain(tensors)


def dispatch_plain(tensors: Sequence[Any]) -> Callable[..., Any] | None:
    """As ``dispatch`` where ``is_plain``: the first of these is a tensor, or none is."""
    q, requires_grad = tensors[0], False
    if type(q) is not _tensor and not isinstance(q, _tensor):
        return None
    for x in tensors:
        if type(x) is _tensor or type(x) is _parameter:
            if x.requires_grad:
                requires_grad = True
        elif isinstance(x, _tensor):
            return attention
    if q.is_meta:
        return attention
    if requires_grad and _grad_enabled():
        return differentiable if forward_ad._current_level < 0 else attention
    return None


def is_plain() -> bool:
    """Tells whether torch neither traces, transforms nor casts here, whatever the tensors are."""
    return not (
        _is_compiling()
        or _dispatch_modes()
        or _functorch_level() is not None
        or _jit_trace() is not None
        or (_function_modes() and _seen_by_function_mode())
        or _any_autocast()
    )


def _is_seen(do: Any, dlse: Any, given: Sequence[Any]) -> bool:
    """Tells whether torch must see the operator of a backward, of a forward on plain tensors: as in ``dispatch``, but that
    autocast casts nothing there. Gradients may have come from anywhere."""
    if _is_compiling() or _dispatch_modes() or _functorch_level() is not None or _jit_trace() is not None:
        return True
    if _function_modes() and _seen_by_function_mode():
        return True
    for x in (do,) if dlse is None else (do, dlse):
        if type(x) is not _tensor or x.is_neg() or _is_batched(x):
            return True
    return _grad_enabled() and _any_requires_grad(do, dlse, *given)


def _seen_by_function_mode() -> bool:
    """Tells whether a torch-function mode is on that is more than ``torch.set_default_device``, which has nothing to do here."""
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(_function_modes()))


def _is_cast(given: Sequence[Any]) -> bool:
    kind = "cuda" if given[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return False
    dtype = torch.get_autocast_dtype(kind)
    return any(isinstance(x, torch.Tensor) and x.dtype is not dtype and _may_cast(x, kind) for x in given[:3])


def attention(
    inputs: ForwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any,
    captured: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Computes ``attention`` by way of the operator. Dynamo traces this function: it holds nothing that breaks a graph."""
    _check_has_not("attention", out=out, kernel=kernel, config=config)
    if not torch.compiler.is_dynamo_compiling():
        _check_tensors(Forward.names, inputs)
        _check_tensors(tuple(functions.labels(options).values()), captured)
        if captured and _functorch_level() is not None and not any(map(_is_mapped, inputs[:3])):
            for words, x in zip(functions.labels(options).values(), captured, strict=True):
                if _is_mapped(x):  # torch finds no batch in a list of tensors alone
                    raise ProblemError(
                        f"{words} is mapped by torch.vmap, and neither q, k nor v is; map one of them, expanded, too."
                    )
        _register_sharding()
    o, lse = _ATTENTION(inputs.q, inputs.k, inputs.v, *_rest(inputs, options, lengths, captured))
    return (o, lse) if options["return_lse"] else o


def _rest(
    inputs: ForwardInputs | BackwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], captured: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Says what the operators take behind their first tensors (``_OPTIONS``)."""
    longest = [_length(name, x) for name, x in zip(("max_seqlen_q", "max_seqlen_kv"), lengths, strict=True)]
    text = _text_of(options), inputs.seed, list(captured) or None
    return (inputs.sinks, inputs.cu_seqlens_q, inputs.cu_seqlens_kv, *longest, *text, inputs.q_lens, inputs.kv_lens)


def attention_backward(
    inputs: BackwardInputs, options: dict[str, Any], lengths: tuple[Any, Any], kernel: str | None, config: Any, out: Any,
    captured: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Computes ``attention_backward`` by way of the operator. Dynamo traces this function, too."""
    _check_has_not("attention_backward", out=out, kernel=kernel, config=config)
    options, wrt = {**options}, options.get("wrt", ())
    options.pop("wrt", None)
    if not torch.compiler.is_dynamo_compiling():
        _check_tensors(Backward.names, inputs, "do")
        _check_tensors(tuple(functions.labels(options).values()), captured)
        _register_sharding()
    args = (*inputs[:7], *_rest(inputs, options, lengths, captured))
    if wrt:
        names = functions.names(options)
        found = _CAPTURED(*args, [names.index(name) for name in wrt])
    else:
        found = _BACKWARD(*args)
    return (*found[:3], *(() if inputs.sinks is None else found[3:4]), *found[4:])


def _check_has_not(operator: str, **given: Any) -> None:
    """Raises ProblemError for an argument that an operator does not have."""
    for name, value in given.items():
        if value is not None:
            raise ProblemError(
                f"{name} was given where torch traces, transforms or casts the call; torch.ops.rawattn.{operator} has no {name}: "
                "leave it out."
            )


def _check_tensors(names: tuple[str, ...], given: Sequence[Any], first: str = "q") -> None:
    """Raises ProblemError for what is no tensor with a shape; ``first`` names one that is known to be a tensor."""
    for name, x in zip(names, given, strict=False):
        if x is None and name not in "qkv":
            continue
        if not isinstance(x, torch.Tensor):
            raise ProblemError(f"{name} is a {type(x).__name__} but {first} a torch tensor; give all arrays from one library.")
        if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
            raise ProblemError(f"{name} is a {type(x).__name__}, which has no shape yet; run the module that makes it first.")


def _length(name: str, value: Any) -> Any:
    """Returns a bound on lengths as the operator takes it: None, an int or, while torch traces, a SymInt."""
    if value is None or (isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) != 0:
        raise ProblemError(f"{name} is {value!r}; it must be an int >= 0, or None.")
    return int(value)


# ---- options as text


def _text_of(options: dict[str, Any]) -> str:
    """Writes the options of a call as the operators take them, also where dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        return _constant_text(tuple([(name, _constant(value)) for name, value in options.items()]))
    return _text(Spec.of(**functions.without(options)), functions.among(options))


def _text(spec: Spec, own: Sequence[tuple[str, functions.Function]] = ()) -> str:
    """Writes the spec as the operator takes it, with functions of its own in the places of the mask and the score."""
    try:
        text = json.dumps(dataclasses.replace(spec, return_lse=False).to_json() | functions.to_json(own))
    except TypeError as error:
        raise ProblemError(f"{spec} cannot be text ({error}); a mask or score of your own must be an Option.") from None
    _options(text)  # raises where it cannot be read again
    return text


@functools.lru_cache(maxsize=1024)
def _options(text: str) -> dict[str, Any]:
    """Reads what ``_text`` wrote, as the options of a call that gives lse."""
    try:
        fields, own = functions.from_json(json.loads(text))
        spec = Spec.from_json(fields)
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return named(Options(**{**values, **own, "return_lse": True}))
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ProblemError(f"spec is {text[:80]!r}; it must be the JSON text of a rawattn.Spec ({error}).") from None


def _constant(value: Any) -> Any:
    """Takes an option apart into nested tuples of constants. Dynamo follows this: it guards on the value of every number."""
    if isinstance(value, functions.BiasText):
        return (functions.Function, value.text, _constant(value.numbers), _constant(value.sizes))
    if isinstance(value, functions.Function):
        return (functions.Function, value.traced.text, _constant(value.numbers), _constant(value.sizes))
    if isinstance(value, Option):
        return (type(value), tuple([(field.name, _constant(getattr(value, field.name))) for field in dataclasses.fields(value)]))
    if isinstance(value, (tuple, list)):
        return tuple([_constant(x) for x in value])
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, float) and _follows_guards():
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # loaded already where dynamo traces

        return guard_scalar(value)
    return value


def _follows_guards() -> bool:
    """Tells whether dynamo traces ``guard_scalar``. Versions that do not take each float as a constant."""
    from torch._dynamo import trace_rules

    return "torch.fx.experimental.symbolic_shapes.guard_scalar" in trace_rules.manual_torch_name_rule_map


_follows_guards._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _constant_text(constants: tuple[tuple[str, Any], ...]) -> str:
    """Writes the options that ``_constant`` took apart."""
    options = {name: _option(value) for name, value in constants}
    return _text(Spec.of(**functions.without(options)), functions.among(options))


# torch.compiler.assume_constant_result says the same, but imports dynamo, which takes a second.
_constant_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _option(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] is functions.Function:
        return functions.from_text(*value[1:])
    if isinstance(value, tuple) and value and isinstance(value[0], type):
        return value[0](**{name: _option(part) for name, part in value[1]})
    return value


# ---- the operators


def _named(tensors: Sequence[Any]) -> dict[str, Any]:
    """Returns the operator's tensors by name, in the order of ``Forward.names``."""
    q, k, v, sinks, starts_q, starts_kv, seed, q_lens, kv_lens = tensors
    return dict(zip(Forward.names, (q, k, v, starts_q, starts_kv, sinks, q_lens, kv_lens, seed), strict=True))


def _compute(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None, captured: Sequence[Any] | None = None, q_lens: Any = None,
    kv_lens: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Computes the operator on real tensors."""
    inputs = ForwardInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    return calls.run(inputs, request_for(Forward, _options(spec), (max_seqlen_q, max_seqlen_kv)), None, tuple(captured or ()))


def _compute_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, sinks: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None,
    captured: Sequence[Any] | None = None, q_lens: Any = None, kv_lens: Any = None, wrt: Sequence[int] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """Computes the backward's operator on real tensors; lse is copied where vmap expanded it."""
    inputs = BackwardInputs(do, q, k, v, o, lse.contiguous(), dlse, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    options, lengths = {**_options(spec), "return_lse": False}, (max_seqlen_q, max_seqlen_kv)
    options |= {"wrt": tuple(functions.names(options)[i] for i in wrt)} if wrt else {}
    found = calls.run(inputs, request_for(Backward, options, lengths), None, tuple(captured or ()))
    return (*found[:3], lse.new_empty(0), *found[3:]) if sinks is None else found


def _compute_captured(*args: Any, **named: Any) -> list[Any]:
    """The same with gradients of captured tensors."""
    return list(_compute_backward(*args, **named))


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _compute, _key)
    _library.impl("attention_backward", _compute_backward, _key)
    _library.impl("attention_backward_captured", _compute_captured, _key)


@torch.library.register_fake("rawattn::attention", lib=_library)
def _fake(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None, captured: Sequence[Any] | None = None, q_lens: Any = None,
    kv_lens: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Makes results of the right shapes, strides and dtypes. Raises ProblemError where the arguments contradict each other."""
    _check((q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, seed, q_lens, kv_lens), max_seqlen_q, max_seqlen_kv, spec, captured)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_dtype)


@torch.library.register_fake("rawattn::attention_backward", lib=_library)
def _fake_backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, sinks: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None, max_seqlen_q: Any = None, max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None,
    captured: Sequence[Any] | None = None, q_lens: Any = None, kv_lens: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """As ``_fake``, for the gradients."""
    _check((q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, seed, q_lens, kv_lens), max_seqlen_q, max_seqlen_kv, spec, captured)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), lse.new_empty(0 if sinks is None else sinks.shape[0]))


@torch.library.register_fake("rawattn::attention_backward_captured", lib=_library)
def _fake_captured(*args: Any, **named: Any) -> list[Any]:
    """As ``_fake_backward``, with gradients of captured tensors."""
    *given, captured, q_lens, kv_lens, wrt = (*args, *named.values())
    found = _fake_backward(*given, captured, q_lens, kv_lens)
    return [*found, *(captured[i].new_empty(captured[i].shape) for i in wrt)]


def _check(tensors: Sequence[Any], max_seqlen_q: Any, max_seqlen_kv: Any, spec: str, captured: Sequence[Any] | None) -> None:
    """Raises ProblemError where the arguments of an operator contradict each other."""
    given = {name: _described(x) for name, x in _named(tensors).items() if x is not None}
    options = _options(spec)
    check_arrays(given, max_seqlen_q, max_seqlen_kv)
    check_has_seed(given, options["dropout"])
    names, captured = functions.names(options), captured or ()
    if len(names) != len(captured):
        raise ProblemError(f"captured has {len(captured)} tensors; the functions in spec captured {len(names)}.")
    given |= dict(zip(names, map(_described, captured), strict=True))
    functions.check(functions.labels(options), given)
    if any(own.sizes for _, own in functions.among(options)):
        functions.check_sizes(options, given, limits(given, options))


_NAMES = {getattr(torch, dtype.name): name for name, dtype in arrays.DTYPES.items()}


def _described(x: Any) -> Array:
    """Describes a tensor without memory, as far as checks of shapes read one."""
    index = {"cpu": CPU, "meta": META}.get(x.device.type, x.device.index or 0)
    return Array("torch", index, _NAMES.get(x.dtype, str(x.dtype)), tuple(x.shape), x.stride(), 0, None)


# ---- autograd


class AutogradRequest:
    """The request of a call that autograd follows: options, as a dict or as text, bounds on lengths, whether lse is a result, and
    ``wrt``, the names of captured tensors to which autograd follows. With a dict it has the requests of the forward and of the
    backward."""

    def __init__(
        self, options: dict[str, Any] | str, lengths: tuple[Any, ...], both: bool, kernel: str | None = None, config: Any = None,
        wrt: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.options, self.lengths, self.both, self.wrt = options, lengths, both, wrt
        if not isinstance(options, str):
            self.forward = request_for(Forward, options, lengths, kernel, config)
            self.backward = request_for(Backward, {**options, "wrt": wrt} if wrt else options, lengths)


class LowestFunction(_SingleLevelFunction):
    """An autograd.Function below an operator or a call, whose ``apply`` looks for no transform.

    That of ``torch.autograd.Function`` looks for transforms and for what they left behind, which costs a microsecond, and takes a
    Function below a transform only where it has ``setup_context``. ``_followed`` knows of transforms, and ``arrays.read``
    refuses a tensor that one left behind."""

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


class Attention(LowestFunction):
    """Attention that autograd follows, below a call or below the operator. It keeps its tensors, o and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, sinks: Any, inputs: ForwardInputs, captured: tuple[Any, ...], request: AutogradRequest,
        *followed: Any,
    ) -> Any:  # fmt: skip
        """Computes o, and lse where that is asked for. ``inputs`` are all tensors but for those that functions captured;
        ``followed`` are those of these to which autograd follows."""
        options, lengths = request.options, request.lengths
        if isinstance(options, str):
            more = (inputs.cu_seqlens_q, inputs.cu_seqlens_kv, *lengths, options, inputs.seed, captured or None)
            o, lse = _below_autograd(_ATTENTION, q, k, v, sinks, *more, inputs.q_lens, inputs.kv_lens)
        else:
            o, lse = calls.run(inputs, request.forward, None, captured)
        ctx.save_for_backward(*inputs, *captured, o, lse)
        ctx.request = request
        if not request.both:
            return o
        ctx.set_materialize_grads(False)
        if not _any_requires_grad(q, k, sinks, *followed):  # v is not in it
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Computes dq, dk, dv, dsinks and what captured tensors get, and None for what is no tensor."""
        (*saved, o, lse), request = ctx.saved_tensors, ctx.request
        count = len(ForwardInputs._fields)
        forward, captured = ForwardInputs(*saved[:count]), tuple(saved[count:])
        if do is None:
            if dlse is None:
                return (None,) * (7 + len(request.wrt))
            do = torch.zeros_like(o)
        inputs = BackwardInputs.of(do, forward, o, lse, dlse)
        is_seen = isinstance(request.options, str) or _is_seen(do, dlse, (*forward, *captured))
        if is_seen:
            text = request.options if isinstance(request.options, str) else _text_of(request.options)
            starts = inputs.cu_seqlens_q, inputs.cu_seqlens_kv
            more = (inputs.sinks, *starts, *request.lengths, text, inputs.seed, captured or None)
            args = (*inputs[:7], *more, inputs.q_lens, inputs.kv_lens)
            if request.wrt:
                if any(x is not None and _is_batched(x) for x in (do, dlse)):
                    raise ProblemError(NO_BATCH)
                names = functions.names(_options(text))
                found = _CAPTURED(*args, [names.index(name) for name in request.wrt])
            else:
                found = _BACKWARD(*args)
        else:
            found = calls.run(inputs, request.backward, None, captured)
        of_captured = found[3 + (is_seen or inputs.sinks is not None) :] if request.wrt else ()
        return (*found[:3], None if inputs.sinks is None else found[3], None, None, None, *of_captured)


class AttentionBackward(LowestFunction):
    """The gradients, where autograd would follow them further: it cannot, and says so when it comes to that."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Computes the operator."""
        return _below_autograd(_BACKWARD, *args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        """Raises: a second derivative has no formula."""
        raise ProblemError(NO_SECOND)


class CapturedBackward(AttentionBackward):
    """The same with gradients of captured tensors."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Computes the operator."""
        return tuple(_below_autograd(_CAPTURED, *args))


def _below_autograd(operator: Any, *args: Any) -> Any:
    """Computes an operator inside of a Function. Below a transform such as ``torch.func.grad`` others may follow."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(_functorch_level() is not None):
        return operator(*args)


def _followed(apply: Any, *args: Any) -> Any:
    """Calls a Function inside of an operator, where transforms must allow it."""
    if _functorch_level() is None:
        return apply(*args)
    with enable_single_level_autograd_function():
        return apply(*args)


def differentiable(inputs: ForwardInputs, request: Request, out: Any, captured: tuple[Any, ...]) -> Any:
    """Computes ``attention`` so that autograd can follow."""
    if out is not None:
        raise ProblemError(
            "out was given and an input requires grad, but autograd follows new results only; leave out away, or call under "
            "torch.no_grad() or on detached inputs."
        )
    wrt = functions.followed(request.options, captured) if captured else ()
    if wrt not in request.followed:
        request.followed[wrt] = _ask(request.options, request.lengths, request.kernel, request.config, wrt)
    found = request.followed[wrt]
    own = [x for name, x in zip(functions.names(request.options), captured, strict=True) if name in wrt] if wrt else ()
    return Attention.apply(inputs.q, inputs.k, inputs.v, inputs.sinks, inputs, captured, found, *own)


def _ask(
    options: dict[str, Any], lengths: tuple[Any, ...], kernel: str | None, config: Any, wrt: tuple[str, ...] = ()
) -> AutogradRequest:
    """The request of a call that autograd follows. Raises ProblemError where that has no gradient."""
    if type(options["return_lse"]) is not bool or options["constant_time"]:
        Spec.of(**functions.without(options))  # raises where it is none
        if options["constant_time"]:
            raise ProblemError(NO_CONSTANT_TIME)
    both, options = options["return_lse"], {**options, "return_lse": True}
    return AutogradRequest(options, lengths, both, kernel, config, wrt)


def _autograd(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None, captured: Sequence[Any] | None = None, q_lens: Any = None,
    kv_lens: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Lets autograd follow where a tensor requires grad."""
    inputs = ForwardInputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks, q_lens, kv_lens, seed)
    lengths = (max_seqlen_q, max_seqlen_kv)
    _check_followed((*inputs, *(captured or ())))
    wrt = functions.followed(_options(spec), captured) if captured else ()
    if wrt and type(q).__name__ == "DTensor":
        functions.check_no_grad(_options(spec), captured or (), NO_GRADIENT_OF_PARTS)
    if _grad_enabled() and (wrt or _any_requires_grad(*inputs)):
        if _options(spec)["constant_time"]:
            raise ProblemError(NO_CONSTANT_TIME)
        request = AutogradRequest(spec, lengths, True, wrt=wrt)
        names = functions.names(_options(spec)) if wrt else ()
        own = [x for name, x in zip(names, captured or (), strict=False) if name in wrt]
        return _followed(Attention.apply, q, k, v, sinks, inputs, tuple(captured or ()), request, *own)
    with torch._C._AutoDispatchBelowAutograd():
        return _ATTENTION(q, k, v, sinks, cu_seqlens_q, cu_seqlens_kv, *lengths, spec, seed, captured, q_lens, kv_lens)


def _autograd_backward(*args: Any) -> tuple[Any, ...]:
    """Lets autograd follow to where it is told that there is no formula."""
    _check_followed((*args[:10], *(args[14] or () if len(args) > 14 else ())))
    if _grad_enabled() and _any_requires_grad(*args[:10]):
        return _followed(AttentionBackward.apply, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return _BACKWARD(*args)


def _autograd_captured(*args: Any) -> list[Any]:
    """The same with gradients of captured tensors."""
    _check_followed((*args[:10], *args[14]))
    if _grad_enabled() and _any_requires_grad(*args[:10], *args[14]):
        return list(_followed(CapturedBackward.apply, *args))
    with torch._C._AutoDispatchBelowAutograd():
        return list(_CAPTURED(*args))


def _check_followed(tensors: Sequence[Any]) -> None:
    """Raises ProblemError for tensors that autograd passes on but the operators cannot take."""
    _register_sharding()
    found = [x for x in tensors if x is not None]
    for x in found:
        if x.is_nested:
            raise ProblemError("an input is a nested tensor; give its values and offsets to rawattn.attention_varlen.")
        if type(x).__name__ == "MaskedTensor":
            raise ProblemError("an input is a MaskedTensor, whose mask would be ignored; give its data, or a mask of attention.")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in found):
        raise ProblemError(NO_TANGENT)


_library.impl("attention", _autograd, "Autograd")
_library.impl("attention_backward", _autograd_backward, "Autograd")
_library.impl("attention_backward_captured", _autograd_captured, "Autograd")


# ---- autocast, vmap, FLOPs, DTensor


def _may_cast(x: Any, kind: str) -> bool:
    """Tells whether autocast for a kind of device converts the tensor; float64 stays, as in torch's own attention."""
    return x.is_floating_point() and x.dtype is not torch.float64 and x.device.type == kind


def _autocast(kind: str, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    key = getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}")
    dtype = torch.get_autocast_dtype(kind)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return _ATTENTION(*(x.to(dtype) if _may_cast(x, kind) else x for x in (q, k, v)), *rest)


for _key in ("CPU", "CUDA"):
    _library.impl("attention", functools.partial(_autocast, _key.lower()), f"Autocast{_key}")


def _vmap(info: Any, in_dims: tuple[Any, ...], q: Any, k: Any, v: Any, *rest: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Joins the mapped dimension to the batch, and repeats what is not mapped. With functions, which see the batch, and with a
    seed for each element, computes one element after the other."""
    if len(rest) > 5 and (functions.among(_options(rest[5])) or _is_mapped_at(in_dims, 9)):
        return _one_by_one(_ATTENTION, info.batch_size, in_dims, (q, k, v, *rest)), (0, 0)
    if q.dim() - (in_dims[0] is not None) == 3:
        raise ProblemError("attention_varlen was called under vmap; put the sequences into one packed call instead.")
    if _is_mapped_at(in_dims, 3):
        raise ProblemError("sinks is mapped by vmap; it must be the same for every element of the batch.")

    args = _joined_batches((q, k, v, *rest), in_dims, info.batch_size, (0, 1, 2, 11, 12))
    o, lse = (x.unflatten(0, (info.batch_size, -1)) for x in _ATTENTION(*args))
    return (o, lse), (0, 0)


def _is_mapped_at(in_dims: tuple[Any, ...], number: int) -> bool:
    return len(in_dims) > number and in_dims[number] is not None


def _joined_batches(args: tuple[Any, ...], dims: tuple[Any, ...], count: int, numbers: Sequence[int]) -> list[Any]:
    """Joins the mapped dimension to the batch in the arguments of these numbers, where they are given."""
    found = list(args)
    for i in numbers:
        if i < len(found) and found[i] is not None:
            found[i] = _joined(found[i], dims[i], count)
    return found


def _joined(x: Any, dim: int | None, count: int) -> Any:
    """Joins a mapped dimension to the first one; where there is none, repeats."""
    x = x.unsqueeze(0).expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Joins the mapped dimension to the batch. With sinks, whose gradient is a sum over the batch, for varlen, which has no
    batch, for functions, which see it, and with a seed for each element, computes one element after the other."""
    count, names = info.batch_size, ("dlse", "sinks", "cu_seqlens_q")
    others = dict(zip(names, args[6:9], strict=False))
    is_split = _is_mapped_at(in_dims, 13) or (len(args) > 12 and bool(functions.among(_options(args[12]))))  # as the forward was
    if len(args) > 13 and args[13] is not None and args[7] is not None and not is_split:
        raise ProblemError(
            "dropout and sinks were given under vmap, whose gradients are computed one by one; leave out one of them."
        )
    if others.get("sinks") is None and others.get("cu_seqlens_q") is None and not is_split:
        *found, dsinks = _BACKWARD(*_joined_batches(args, in_dims, count, (*range(7), 15, 16)))
        return (*(x.unflatten(0, (count, -1)) for x in found), dsinks.expand(count, 0)), (0,) * 4
    return _one_by_one(_BACKWARD, count, in_dims, args), (0,) * 4


def _vmap_captured(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Any], list[int]]:
    """Computes one element after the other: a captured tensor is the same for all, or has gradients of its own for each."""
    found = _one_by_one(_CAPTURED, info.batch_size, in_dims, args)
    return [*found], [0] * len(found)


def _one_by_one(operator: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Computes one element of the mapped dimension after the other."""
    each = [[_element(x, dim, i) for x, dim in zip(args, in_dims, strict=True)] for i in range(count)]
    return tuple(map(torch.stack, zip(*(operator(*some) for some in each), strict=True)))


def _element(x: Any, dim: Any, i: int) -> Any:
    """Takes an element of an argument, or of the tensors of a list."""
    if isinstance(x, (list, tuple)):
        return [_element(y, each, i) for y, each in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, i)


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    torch.library.register_vmap("rawattn::attention", _vmap, lib=_library)
    torch.library.register_vmap("rawattn::attention_backward", _vmap_backward, lib=_library)
    torch.library.register_vmap("rawattn::attention_backward_captured", _vmap_captured, lib=_library)


@torch.utils.flop_counter.register_flop_formula(torch.ops.rawattn.attention)
def _flops(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
    """Counts ``Forward.flops`` of these shapes: both products over the pairs that the mask keeps. torch counts whole squares for
    its own attention."""
    return 2 * (q[-1] + v[-1]) * _pairs(q, k, v, *rest, **named)


@torch.utils.flop_counter.register_flop_formula(
    [torch.ops.rawattn.attention_backward, torch.ops.rawattn.attention_backward_captured]
)
def _flops_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *rest: Any, **named: Any) -> Any:
    """Counts as ``_flops``: three products of q's head_dim, of which one is the forward's again, and two of v's."""
    return 2 * (3 * q[-1] + 2 * v[-1]) * _pairs(q, k, v, *rest, **named)


def _pairs(
    q: Any, k: Any, v: Any, sinks: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None, spec: str = "{}", seed: Any = None, captured: Any = None, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    """Counts (query, key) pairs that the mask keeps, of all batches and heads of these shapes, as if all rows were in use; all
    pairs of a function."""
    varlen = cu_seqlens_q is not None
    if not all(isinstance(n, int) for shape in (q, k, v) for n in shape):  # symbolic: a sum over queries would fix the length
        return q[-2] * (q[-3] * k[-3] if varlen else q[0] * q[1] * k[1])
    batch, total_q, total_kv = (cu_seqlens_q[0] - 1, q[0], k[0]) if varlen else (q[0], -1, -1)
    sizes = batch, q[-3], k[-3], q[-2], k[-2], q[-1], v[-1]
    op = Forward(ELEMENTS["fp32"], *sizes, Spec.of(**functions.without(_options(spec))), varlen, total_q, total_kv)
    return op.batch * op.heads * op.pairs


def _register_sharding() -> None:
    """Tells DTensor how the operators split, once ``torch.distributed.tensor``, which is slow to import, is there."""
    if "torch.distributed.tensor" in sys.modules:
        sharding.register()

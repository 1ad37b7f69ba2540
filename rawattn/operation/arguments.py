"""This module has what an argument that a public call does not have is called here."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack


class Nothing(TypedDict):
    """The type of ``**unknown``: type checkers refuse any, as if it were not there."""


F = TypeVar("F", bound=Callable[..., Any])
_STEP, _CACHE = "Over a cache it is said by rawattn.Step({}=...).", "It is given to rawattn.KVCache({})."
# What other libraries, or other calls of this one, call an argument -> its name here, and what is to be known besides.
FOREIGN = {
    "alibi_slopes": ("alibi", ""),
    "attention_mask": ("mask", "Padding is kv_lens, or packed sequences; rawattn.integrations.transformers serves whole models."),
    "attn_bias": ("bias", "rawattn.integrations.xformers takes xformers' classes."),
    "attn_mask": (
        "mask", "It is a function, which may read bools: mask=lambda b, h, q, kv: keep[q, kv]. Floats that are added are bias=. "
        "rawattn.integrations.sdpa.scaled_dot_product_attention takes attn_mask as torch does.",
    ),
    "block_mask": ("mask", "It is a function here, mask(b, h, q, kv); rawattn.integrations.flex_attention takes a BlockMask."),
    "block_table": ("page_table", ""),
    "block_tables": ("page_table", ""),
    "cache_leftpad": ("kv_begin", ""),
    "cache_seqlens": ("kv_lens", "rawattn.integrations.flash_attn takes flash-attn's arguments."),
    "causal": ("", _STEP.format("causal")),
    "cu_seqlens_k": ("cu_seqlens_kv", ""),
    "cu_seqlens_kv": ("", "Packed sequences are given to rawattn.attention_varlen."),
    "cu_seqlens_q": ("", "Packed sequences are given to rawattn.attention_varlen, and over a cache to rawattn.Step."),
    "dropout_p": ("dropout", ""),
    "enable_gqa": ("", "Leave it out: heads of q may be any multiple of those of k and v."),
    "is_causal": (
        "causal", "It aligns the last query with the last key; torch aligns the first, mask=rawattn.mask.Causal('top_left').",
    ),
    "k_cache": ("k", _CACHE.format("k, v")),
    "k_descale": ("k_scale", _CACHE.format("k, v, k_scale=..., v_scale=...")),
    "key": ("k", "rawattn.integrations.sdpa takes torch's arguments and layout."),
    "key_padding_mask": ("kv_lens", "It is how many keys each sequence uses."),
    "kv_begin": ("", _STEP.format("kv_begin")),
    "kv_lens": ("", _STEP.format("kv_lens")),
    "logits_soft_cap": ("softcap", ""),
    "mask_mod": ("mask", ""),
    "max_seqlen_k": ("max_seqlen_kv", ""),
    "num_splits": ("split", ""),
    "page_table": ("", _STEP.format("page_table")),
    "q_lens": ("", "Over a cache rawattn.Step(cu_seqlens_q=...) says how many rows sequences have."),
    "query": ("q", "rawattn.integrations.sdpa takes torch's arguments and layout."),
    "return_attn_probs": ("return_lse", "Probabilities are not kept."),
    "return_softmax_lse": ("return_lse", ""),
    "rotary_cos": ("rotary", "It is rawattn.Rotary(cos, sin)."),
    "rotary_sin": ("rotary", "It is rawattn.Rotary(cos, sin)."),
    "s_aux": ("sinks", ""),
    "scaling": ("scale", ""),
    "score_mod": ("score", "It is called as score(s, b, h, q, kv), as there."),
    "seqused_k": ("kv_lens", ""),
    "seqused_q": ("q_lens", ""),
    "sliding_window": ("window", "window=(n - 1, 0) keeps n keys, a query's own among them."),
    "sm_scale": ("scale", ""),
    "softmax_scale": ("scale", ""),
    "v_cache": ("v", _CACHE.format("k, v")),
    "v_descale": ("v_scale", _CACHE.format("k, v, k_scale=..., v_scale=...")),
    "value": ("v", "rawattn.integrations.sdpa takes torch's arguments and layout."),
    "window_size": ("window", "None or -1 is unbounded."),
}  # fmt: skip


def _guess(name: str, known: Sequence[str]) -> str:
    """Says what an unknown name most likely means among the known ones; empty where nobody can say."""
    meant, remark = FOREIGN.get(name, ("", ""))
    if not meant and not remark:
        meant = next(iter(difflib.get_close_matches(name, known, 1, 0.7)), "")
    first = f"Did you mean {meant!r}?" if meant in known else _guess(meant, known) if meant in FOREIGN else ""
    return " ".join(filter(None, (first, remark))) if first or not meant else ""


def refuse(
    function: Callable[..., Any], unknown: Iterable[str], beyond: Sequence[Any] = (), options: Sequence[str] = ()
) -> NoReturn:
    """Raises the TypeError of a call with arguments that a function does not have, ``unknown`` by name and ``beyond`` by
    position. ``options`` are names that it has beside its parameters."""
    parameters = inspect.signature(function).parameters.values()
    first = [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD and x.name not in ("self", "cls")]
    own = [x.name for x in parameters if x.kind == x.KEYWORD_ONLY]
    called, known = function.__qualname__.removesuffix(".__init__"), [*first, *own, *options]
    for name in unknown:
        listed = f"Its options are {', '.join(options)}." if options else f"Its arguments are {', '.join(known)}."
        raise TypeError(f"{called}() got an unexpected keyword argument {name!r}. {_guess(name, known) or listed}")
    names = f" Give what follows {first[-1]} by name, as in {own[0]}=..." if own else ""
    given = f"takes {len(first)} positional arguments but {len(first) + len(beyond)} were given"
    raise TypeError(f"{called}() {given}.{names}")


def with_options(declared: Any, *more: str) -> Callable[[F], F]:
    """A decorator of functions with ``**options``: their signatures name what a NamedTuple declares, and ``more``."""
    defaults = declared._field_defaults | dict.fromkeys(more)
    names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in defaults.items()]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        first = [x for x in own if x.kind != x.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*first, *names, *own[len(first) :]])  # type: ignore[attr-defined]
        return function

    return decorate


def choose(declared: Any, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The NamedTuple of these options, which a function was given. Raises TypeError for what it does not declare."""
    if unknown := options.keys() - {*declared._fields}:
        refuse(function, unknown)
    return declared(**options)


def named(function: F) -> F:
    """A decorator of functions and of dataclasses, whose TypeError then says what an unknown argument is called here. It takes
    0.2 us of a call: what is called for each layer has ``*beyond`` and ``**unknown`` in its place, for a tenth of that."""
    if isinstance(function, type):
        function.__init__ = named(function.__init__)  # type: ignore[misc]
        return function

    @functools.wraps(function)
    def called(*given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it comes from within
                raise
            parameters = inspect.signature(function).parameters
            places = [x for x in parameters.values() if x.kind == x.POSITIONAL_OR_KEYWORD]
            unknown, beyond = [x for x in options if x not in parameters], given[len(places) :]
            if unknown or beyond:
                refuse(function, unknown, beyond)
            raise

    return called  # type: ignore[return-value]

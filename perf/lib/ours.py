"""Our own contenders: their names, their options, what is compiled for them, and their calls."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import rawattn
from rawattn.command.timing import Call
from rawattn.compile.compiler import Source
from rawattn.driver import context
from rawattn.driver.device import Device
from rawattn.errors import RawattnError
from rawattn.kernel.base import Kernel
from rawattn.operation import AttentionKVCache, Backward, Forward, captures
from rawattn.runtime.plan import Plan
from rawattn.runtime.select import KERNELS, KERNELS_OF, Selection, select
from rawattn.testing import Case

from .sets import ConstantTimeCase, FunctionCase, StepCase, is_backward, operation
from .task import Task, Unserved


def short_names(config_type: Any) -> dict[str, str]:
    """Fields of a configuration but for its tile: as many letters as tell them apart -> the name."""
    names = [f.name for f in dataclasses.fields(config_type) if not f.name.startswith("tile_")]
    return {
        next(name[:n] for n in range(1, len(name) + 1) if sum(other.startswith(name[:n]) for other in names) == 1): name
        for name in names
    }


def config_name(config: Any) -> str:
    """A configuration in a few characters: the tile, then the other fields by their first letters, such as ``128x96s2q2``."""
    values = ((short, getattr(config, name)) for short, name in short_names(config).items())
    rest = (f"{short}{value if isinstance(value, str) else int(value)}" for short, value in values)
    return f"{config.tile_q}x{config.tile_kv}{''.join(rest)}"


def parse_config(config_type: Any, text: str) -> Any:
    """The configuration that ``config_name`` shortens to ``text``; fields left away keep their defaults."""
    match, names = re.fullmatch(r"(\d+)x(\d+)((?:[a-z]+\d+)*)", text), short_names(config_type)
    if match is None:
        raise ValueError(f"{text!r} is no configuration; write one as 128x96s2q2")
    rest = {names[letters]: int(number) for letters, number in re.findall(r"([a-z]+)(\d+)", match[3])}
    return config_type(tile_q=int(match[1]), tile_kv=int(match[2]), **rest)


def our_names(case: Case, configs: str, device: Device) -> list[str]:
    """The names of our contenders in a case: the library's choice, then those that were asked for, or all configurations. One of
    a kernel that computes other operations is left away."""
    op, names = operation(case), list(filter(None, configs.split(",")))
    if configs == "all":
        served = [kernel for kernel in KERNELS if not kernel.supports(op, device)]
        names = [f"{kernel.name}/{config_name(config)}" for kernel in served for config in kernel.candidates(op, device)]
    others = {kernel.name for kernels in KERNELS_OF.values() for kernel in kernels} - {*kernels_of(case)}
    return ["ours", *(f"ours:{name}" for name in names if re.split("[/:]", name)[0] not in others)]


def kernels_of(case: Case) -> dict[str, Any]:
    """The kernels of the operation that a case is, by name."""
    kind = Backward if is_backward(case) else AttentionKVCache if isinstance(case, StepCase) else Forward
    return {kernel.name: kernel for kernel in KERNELS_OF[kind]}


def our_options(case: Case, name: str, kernel: str | None = None, device: Device | None = None) -> dict[str, Any]:
    """Keyword arguments of ``rawattn.attention`` for ``ours``, ``ours:128x96s2q2``, ``ours:KERNEL/128x96s2q2``, ``ours:KERNEL``,
    or ``ours:KERNEL:stages=2+order=at_once``: the configuration that is chosen, with other fields, and what is no field of it is
    an option. Where the name has no kernel, ``kernel`` says which is asked for; None leaves it to the library."""
    own, _, changes = name.removeprefix("ours").removeprefix(":").partition(":")
    own, _, config = own.rpartition("/")
    known = kernels_of(case)
    own, config = (config, "") if config in known else (own, config)
    kernel = own or kernel or getattr(case, "kernel", "") or None
    options = case.options | ({"constant_time": True} if isinstance(case, ConstantTimeCase) else {})
    options |= {"kernel": kernel} if kernel else {}
    if config:
        served = known.get(kernel or "", KERNELS[0])
        return options | {"kernel": served.name, "config": parse_config(served.config_type, config)}
    given = {field: _literal(text) for field, _, text in (each.partition("=") for each in changes.split("+") if each)}
    if given:
        chosen = select(operation(case), device or context.device(0), kernel).config
        fields = {field: given.pop(field) for field in [*given] if hasattr(chosen, field)}
        options |= given | ({"config": dataclasses.replace(chosen, **fields)} if fields else {})
    return options


def _literal(text: str) -> Any:
    """A number, True or False; else the text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _asked(case: Case, options: dict[str, Any]) -> Any:
    """The operation of a case with the options that a name adds."""
    op, own = operation(case), {name: options[name] for name in ("deterministic", "invariant") if name in options}
    forward = op.forward if isinstance(op, Backward) else op
    forward = dataclasses.replace(forward, spec=dataclasses.replace(forward.spec, **own))
    if "split" in options:
        forward = dataclasses.replace(forward, split_keys=options["split"])
    return dataclasses.replace(op, forward=forward) if isinstance(op, Backward) else forward


def chosen(case: Case, name: str, kernel: str | None = None) -> str:
    """The kernel and the configuration of a contender on this GPU, as the rest of a name that asks for them."""
    options = our_options(case, name, kernel)
    selection = select(_asked(case, options), context.device(0), options.get("kernel"), options.get("config"))
    fields = vars(selection.config) if hasattr(selection.config, "__dict__") else {}
    return f"{selection.kernel.name}:" + "+".join(f"{name}={value}" for name, value in fields.items())


def sources(names: dict[Case, list[str]], device: Device, kernel: str | None = None) -> Iterator[Source]:
    """Yields the sources that our contenders will run; a configuration that cannot run will say so when its turn comes. Gradients
    need what the forward keeps."""
    for case in names:
        for name in names[case]:
            with contextlib.suppress(RawattnError):
                op = _asked(case, options := our_options(case, name, kernel, device))
                selection = select(op, device, options.get("kernel"), options.get("config"))
                yield from launched(selection.kernel, op, selection.config, device)
                if isinstance(op, Backward):
                    selection = select(case.op, device)
                    yield from launched(selection.kernel, case.op, selection.config, device)


def launched(kernel: Any, op: Forward, config: Any, device: Device) -> list[Source]:
    """The sources of a kernel's launches."""
    return [launch.source for launch in kernel.lower(op, config, device).launches]


def ours(task: Task, name: str, kernel: str | None = None) -> Call:
    options, inputs = our_options(task.case, name, kernel) | task.sinks | task.functions, (task.q, task.k, task.v, *task.packed)
    attention = rawattn.attention_varlen if task.packed else rawattn.attention
    return Call(lambda: attention(*inputs, **options), detail=config_name(rawattn.plan(*inputs, **options).config))


def built_in(task: Task) -> Call:
    """Returns what computes the same as a function without it, or nearly (``FunctionCase.built_in``), on the same q, k and v."""
    case, inputs, packed = plain_of(task)
    call = ours(dataclasses.replace(task, case=case, q=inputs[0], k=inputs[1], v=inputs[2], packed=packed), "ours")
    return dataclasses.replace(call, view=lambda o: o.view(task.o_shape), checked="mask" in task.functions)


def plain_of(task: Task) -> tuple[Case, tuple[Any, ...], tuple[Any, ...]]:
    """The case without a function, q, k and v as it has them, and cu_seqlens and longest lengths where they are packed."""
    import torch

    case = task.case.built_in if isinstance(task.case, FunctionCase) else None
    if case is None:
        raise Unserved("nothing built-in computes it")
    inputs: tuple[Any, ...] = (task.q, task.k, task.v)
    if case.lengths is None:
        return case, inputs, ()
    starts = torch.tensor([0, *(n for n, _ in case.lengths)], device=task.q.device).cumsum(0).int()
    longest = max(n for n, _ in case.lengths)
    return case, tuple(x.flatten(0, 1) for x in inputs), (starts, starts, longest, longest)


def our_plan(task: Task, name: str, kernel: str | None = None) -> Callable[[], Any]:
    """``Plan.run`` with ``out=``: the least that a call of ours costs the host."""
    inputs, out = (task.q, task.k, task.v, *task.packed[:2]), task.q.new_empty(task.o_shape)
    plan = rawattn.plan(*inputs, *task.packed[2:], **our_options(task.case, name, kernel) | task.sinks | task.functions)
    captured = captures.take(task.functions)[1]
    return lambda: plan.run(*inputs, *captured, **task.sinks, out=out)


def plan_of(task: Task, kernel: Kernel[Any], config: Any, constant_time: bool = False) -> Plan:
    """A plan of a kernel, such as an altered one, in a configuration whose legality is not asked for."""
    device = context.device(task.q.get_device())
    return Plan(operation(task.case, constant_time), device, Selection(kernel, config, ""), "torch")

"""The forms of arrays, which are all that a plan depends on, and arrays that an object holds from one call to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import ProblemError, UnsupportedError
from . import torch_state
from .array import Array
from .reading import has_room, read


def forms_of(arrays: Sequence[Any]) -> tuple[tuple[tuple[Any, ...], ...], tuple[int, ...]] | None:
    """The form of each torch tensor, () for None, and the addresses of those that are not None. A form is all that a plan depends
    on: the address modulo 16, dtype, shape, strides and device. Tensors whose storages hold their elements pass every check that
    others of these forms passed. Returns None where one is of another library, has no plain memory, or autograd would follow.
    """
    plain_tensors, forward_ad = torch_state.plain_tensors, torch_state.forward_ad
    if forward_ad is not None and forward_ad._current_level >= 0:  # each is read whole, which finds tangents
        return None
    forms: list[tuple[Any, ...]] = []
    addresses = []
    try:
        for x in arrays:
            if type(x) in plain_tensors and not (x.requires_grad and torch_state.grad_enabled()) and not x.is_neg():
                address = x.data_ptr()
                if not address:
                    return None
                forms.append((address % 16, x.dtype, x.size(), x.stride(), x.get_device(), x.is_cuda))
                addresses.append(address)
            elif x is None:
                forms.append(())
            else:
                return None
    except (RuntimeError, NotImplementedError):
        return None
    return tuple(forms), tuple(addresses)


def forms_of_any(arrays: Sequence[Any]) -> tuple[tuple[tuple[Any, ...], ...], tuple[int, ...], Any] | None:
    """``forms_of`` of arrays of any library, and what keeps the addresses alive. Returns None where an array cannot be read, and
    where autograd would follow."""
    if (forms := forms_of(arrays)) is not None:
        return (*forms, arrays)
    if torch_state.requires_grad(*arrays):
        return None
    try:
        found = [None if x is None else read(x, "array") for x in arrays]
    except (ProblemError, UnsupportedError):  # the caller says so, with the array's name
        return None
    return tuple([form_of(x) if x else () for x in found]), tuple([x.pointer for x in found if x]), found


def form_of(array: Array) -> tuple[Any, ...]:
    """The form of an array that was read: all that a plan depends on."""
    return (*array[:5], array.pointer % 16)


def of_forms(forms: Iterable[tuple[Any, ...]]) -> list[Array]:
    """Arrays of these forms, at no address, without those of None."""
    return [
        Array("torch", device, torch_state.names[dtype], shape, strides, alignment, None)
        for alignment, dtype, shape, strides, device, _ in filter(None, forms)
    ]


def are_held(tensors: Sequence[Any]) -> bool:
    """Says whether the storages of torch tensors hold their elements. In a storage that was freed, as FSDP does, the address of a
    tensor is its offset, which its form does not say."""
    return all(x is None or has_room(x, x.size(), x.stride()) for x in tensors)


@functools.lru_cache(maxsize=4096)
def unique(*values: Any) -> object:
    """Returns one object for equal values, which is hashed and compared quickly."""
    return object()


class Held:
    """Arrays by name that an object holds, and their addresses when it was made. Torch can give a tensor other memory later.

    Attributes: ``addresses``; ``forms``, one object for all whose arrays have these names and forms.
    """

    def __init__(self, arrays: Mapping[str, Array], *values: Any) -> None:
        """``values`` are what a call depends on besides the arrays."""
        self.addresses = tuple([array.pointer for array in arrays.values()])
        self.forms = unique(tuple(arrays), *[form_of(array) for array in arrays.values()], *values)
        tensors = {name: array for name, array in arrays.items() if array.library == "torch"}
        self._names, self._tensors = tuple(tensors), [array.object for array in tensors.values()]
        self._tensor_addresses = [array.pointer for array in tensors.values()]

    @property
    def requires_grad(self) -> bool:
        """Says whether autograd would have to follow an operation on these; arrays may come to require grad at any time."""
        return bool([x for x in self._tensors if x.requires_grad]) and bool(torch_state.grad_enabled())

    def check(self, owner: str) -> None:
        """Raises ProblemError where a tensor has other memory than it had, which dynamo cannot ask."""
        if torch_state.is_dynamo is not None and torch_state.is_dynamo():
            torch_state.check_untraced(tuple(self._tensors))
        if [x.data_ptr() for x in self._tensors] != self._tensor_addresses:
            moved = [x.data_ptr() != before for x, before in zip(self._tensors, self._tensor_addresses, strict=True)]
            name = self._names[moved.index(True)]
            raise ProblemError(
                f"{name} has other memory than it had when the {owner} was made (resized, freed, or its data replaced?); make "
                f"another {owner}."
            )


class Remade:
    """A dataclass over arrays. Copies and pickles are made from its fields, for what else it knows is of its arrays alone. What a
    subclass keeps besides goes with them."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {field.name: field.init for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        arguments = {name: getattr(self, name) for name, is_argument in fields.items() if is_argument}
        return _remake, (type(self), arguments), {name: x for name, x in vars(self).items() if name not in fields} or None


def _remake(cls: type, arguments: dict[str, Any]) -> Any:
    return cls(**arguments)

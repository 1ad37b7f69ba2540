"""The options of a call as a frozen value: what each means, what is refused and how, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import types
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given

import rawattn
from rawattn.errors import ProblemError
from rawattn.operation.spec import Spec, is_int, make_offsets, option_from_json, option_to_json
from rawattn.testing import Case, cases
from rawattn.variant import Option
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap

torch = pytest.importorskip("torch")


def refused(options: dict[str, Any], *parts: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Spec.of(**options)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


# ---- numbers -------------------------------------------------------------------------------------------------------------

NO_NUMBER = {
    "True": (True, "is True"),
    "text": ("0.5", "is '0.5'"),
    "1e39": (1e39, "is 1e+39"),
    "minus 1e39": (-1e39, "is -1e+39"),
    "10**400": (10**400, "is 100000... (an int of 401 digits);"),
    "-10**5000": (-(10**5000), "is -100000... (an int of 5001 digits);"),
    "nan": (float("nan"), "is nan"),
    "inf": (np.float32("inf"), "is np.float32(inf)"),
    "a fraction": (Fraction(1, 2), "is Fraction(1, 2)"),
    "a list": ([0.5], "is [0.5]"),
}
HELD = {
    "0-d array": (np.array(0.5), "is a ndarray"),
    "array": (np.ones(2), "is a ndarray"),
    "NumPy's bool": (np.True_, "is a bool"),
    "tensor": (torch.tensor(0.5), "is a Tensor"),
    "tensor with grad": (torch.tensor(0.5, requires_grad=True), "is a Tensor"),
}


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value, found", NO_NUMBER.values(), ids=NO_NUMBER)
def test_what_is_no_number(name: str, value: Any, found: str) -> None:
    refused({name: value}, f"{name} {found}", "it must be a finite number")


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value, found", HELD.values(), ids=HELD)
def test_a_number_in_an_array_would_be_read_once(name: str, value: Any, found: str) -> None:
    refused({name: value}, f"{name} {found}", "not followed", "no gradient", f"give float({name})")
    assert ("multiply q" in _message({name: value})) == (name == "scale")


def _message(options: dict[str, Any]) -> str:
    with pytest.raises(ProblemError) as caught:
        Spec.of(**options)
    return str(caught.value)


@pytest.mark.parametrize("value", [0.25, -3, 0, np.float32(0.25), np.int64(2), np.float16(0.5), 3.4e38, -3.4e38], ids=repr)
def test_scale(value: Any) -> None:
    found = Spec.of(scale=value).scale
    assert type(found) is float and found == value


def test_softcap() -> None:
    for value in (30, np.float32(0.5), 1.18e-38, 3.4e38):
        found = Spec.of(softcap=value).score
        assert found == Softcap(float(value)) == Softcap(value) and type(found.cap) is float
    for wrong in (-30.0, 1.1e-38, -0.5):
        refused({"softcap": wrong}, f"softcap is {wrong}", "> 0")
    for cap in (0.0, np.array(0.5), torch.tensor(2.0), True, "30", 1e39):
        with pytest.raises(ProblemError, match="softcap is"):
            Softcap(cap)


# ---- the conventions of flash-attn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, mask",
    [
        ({"window": (-1, -1)}, Full()),
        ({"window": (-1, -1), "causal": True}, Causal()),
        ({"window": (None, -1)}, Full()),
        ({"window": (-1, 0)}, Window(None, 0)),
        ({"window": (4, -1)}, Window(4, None)),
        ({"window": [4, 0], "causal": np.True_}, And(Causal(), Window(4, 0))),
        ({"window": (np.int64(-1), np.int32(2))}, Window(None, 2)),
        ({"causal": np.bool_(True)}, Causal()),
        ({"causal": np.False_, "mask": Causal("top_left")}, Causal("top_left")),
        ({"mask": Causal("top_left"), "causal": False}, Causal("top_left")),
    ],
    ids=str,
)
def test_masks(options: dict[str, Any], mask: rawattn.mask.Mask) -> None:
    assert Spec.of(**options).mask == mask


def test_no_softcap() -> None:
    for none in (None, 0.0, 0, np.float32(0)):
        assert Spec.of(softcap=none).score == Scale()
        assert Spec.of(softcap=none, score=Softcap(3.0)).score == Softcap(3.0)
    refused({"softcap": 2.0, "score": Softcap(3.0)}, "score was given beside softcap")


@pytest.mark.parametrize("name", ["return_lse", "constant_time", "deterministic", "causal"])
def test_flags(name: str) -> None:
    for value in (True, np.True_):
        found = Spec.of(**{name: value})
        assert found.mask == Causal() if name == "causal" else getattr(found, name) is True
    for value in (False, np.False_):
        found = Spec.of(**{name: value})
        assert found.mask == Full() if name == "causal" else getattr(found, name) is False
    for wrong in (0, 1, "yes", None, np.array(True), torch.tensor(True)):
        refused({name: wrong}, f"{name} is {wrong!r}", "True or False")


@pytest.mark.parametrize("causal", [1, "no", np.array(False)], ids=repr)
def test_a_wrong_causal_beside_a_mask(causal: Any) -> None:
    refused({"mask": Full(), "causal": causal}, "mask was given beside causal or window")


@pytest.mark.parametrize("window", [(True, 0), (1.0, 0), (0, np.array(1)), (0, torch.tensor(-1)), (-2, 0), ("1", 0)], ids=repr)
def test_wrong_sides(window: Any) -> None:
    refused(
        {"window": window}, "window left is" if window[0] != 0 else "window right is", "int >= 0" if window[0] != -2 else ">= 0"
    )


@pytest.mark.parametrize("window", [128, (1,), (1, 2, 3), "ab", {0, 1}, np.array([1, 0])], ids=repr)
def test_windows_that_are_no_pairs(window: Any) -> None:
    refused({"window": window}, "window is", "it must be a pair (left, right)")
    refused({"window": window, "mask": Full()}, "mask was given beside")


def test_a_side_is_a_plain_int() -> None:
    found = Window(np.int64(3), np.uint8(4))
    assert (type(found.left), type(found.right)) == (int, int) and found == Window(3, 4)


# ---- as text, and as a kind ----------------------------------------------------------------------------------------------


def test_a_spec_is_a_value() -> None:
    assert {Spec(): 1}[Spec.of()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Spec().scale = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("option", [rawattn.mask.Full, rawattn.score.Scale])
def test_options_without_fields_are_values_too(option: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{option.__name__}\.__init__\(\) takes 1 positional argument"):
        option(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        option().align = "top_left"


def test_in_words() -> None:
    assert str(Spec()) == "Full(), Scale()"
    spec = Spec.of(causal=True, softcap=2, scale=0.12345678, return_lse=True, constant_time=True, deterministic=False)
    assert str(spec) == (
        "Causal(align='bottom_right'), Softcap(cap=2.0), scale 0.123457, return_lse, constant_time, not deterministic"
    )


def test_kind() -> None:
    """Run-time values are not of the kind, but for the scale's sign."""
    same: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"scale": 2.0}), ({}, {"scale": 0.0}), ({"softcap": 2.0}, {"softcap": 3.0}), ({"scale": -1}, {"scale": -2}),
        ({"window": (1, 2)}, {"window": (3, -1)}), ({}, {"deterministic": False}),
    ]  # fmt: skip
    for a, b in same:
        assert Spec.of(**a).kind == Spec.of(**b).kind
    assert Spec.of(mask=Strided()).kind != Spec.of(mask=Elsewhere()).kind, "one C++ name, two files"
    kinds = [
        {},
        {"scale": -1e-9},
        {"causal": True},
        {"softcap": 1.0},
        {"return_lse": True},
        {"constant_time": True},
        {"q_offset": 0},
    ]
    assert len({Spec.of(**options).kind for options in kinds}) == len(kinds)


class BareMask:
    def interval(self, q: Any, q_len: int, kv_len: int) -> Any:
        return q * 0, q + 1


class BareScore:
    cuda_type = "Bare"

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s


class UntypedMask(BareMask, Option):
    pass


@pytest.mark.parametrize("option", [BareMask(), BareScore(), UntypedMask()], ids=lambda option: type(option).__name__)
def test_an_option_of_which_no_kernel_can_be_made(option: Any) -> None:
    """A class that is no Option, and one without a CUDA type, are told what they lack."""
    name, x = "score" if isinstance(option, BareScore) else "mask", np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(ProblemError, match=rf"{name} is .*derive its class from rawattn\.variant\.Option, .* type and source"):
        rawattn.attention(x, x, x, **{name: option})


# ---- JSON ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Strided(Option):
    """A mask of a user's own module."""

    step: int = 2
    type: ClassVar[str] = "Strided"
    source: ClassVar[str] = "variant/mask/strided.cuh"

    def interval(self, q: Any, q_len: int, kv_len: int) -> Any:
        return q * 0, q * 0 + self.step


class Elsewhere(Strided):
    source: ClassVar[str] = "variant/mask/elsewhere.cuh"


def through_json(value: Any) -> Any:
    return type(value).from_json(json.loads(json.dumps(value.to_json())))


@given(cases())
def test_json(case: Case) -> None:
    assert through_json(case.op) == case.op
    assert through_json(case.op.spec) == case.op.spec


@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec.of(mask=Strided(3), scale=-0.5, constant_time=True, deterministic=False),
        Spec.of(mask=And(Strided(3), Window(np.int32(1))), softcap=np.float32(2), return_lse=True),
    ],
    ids=str,
)
def test_json_of_options(spec: Spec) -> None:
    assert through_json(spec) == spec
    assert set(spec.to_json()) == {f.name for f in dataclasses.fields(Spec) if getattr(spec, f.name) != getattr(Spec(), f.name)}


@pytest.mark.parametrize(
    "name",
    ["json:Strided", "nowhere:Strided", "rawattn.operation.spec:Spec", "Strided", "", "os:system", f"{__name__}:test_json"],
)
def test_unknown_class(name: str) -> None:
    with pytest.raises(ProblemError, match=rf"class is '{name}'; it must be a mask or a score of a module that is imported"):
        option_from_json({"class": name})


def test_json_is_checked() -> None:
    assert option_from_json(option_to_json(Strided(7))) == Strided(7)
    for wrong in ({"scale": "big"}, {"return_lse": 1}, {"mask": option_to_json(Scale())}, {"score": option_to_json(Full())}):
        with pytest.raises(ProblemError):
            Spec.from_json(wrong)


@pytest.mark.parametrize("name, sign", [("q_offset", 1), ("kv_offset", -1), ("seed", 1)])
def test_long_ints_are_shown_by_their_first_digits(name: str, sign: int) -> None:
    """Python makes no text of one with more than 4300 digits."""
    q, options = np.zeros((1, 4, 2, 8), np.float32), {"dropout": 0.5} if name == "seed" else {}
    with pytest.raises(ProblemError, match=rf"^{name} is -?100000\.\.\. \(an int of 5001 digits\)"):
        rawattn.attention(q, q, q, **options, **{name: sign * 10**5000})


@pytest.mark.parametrize("seed", [0, -(1 << 63), (1 << 63) - 1, np.int64(-5), np.uint64((1 << 63) - 1)])
def test_seeds_of_64_bits(seed: Any) -> None:
    assert is_int(seed)


@pytest.mark.parametrize("seed", [1 << 63, -(1 << 63) - 1, np.uint64(1 << 63)])
def test_longer_seeds(seed: Any) -> None:
    with pytest.raises(ProblemError, match=rf"seed is {int(seed)}; an int must be from -2\^63 to 2\^63 - 1"):
        is_int(seed)


def test_what_is_no_seed() -> None:
    assert not is_int(np.zeros(1, np.int64)), "an array says itself what it holds"
    for seed in (True, None, 1.5, "3"):
        with pytest.raises(ProblemError, match=f"seed is {seed!r}; it must be an int, or one int64 in an array"):
            is_int(seed)


def test_one_rule_for_every_tile() -> None:
    """A row's maximum is sought so where time must be constant, and where rows must be the same in any batch."""
    found = {(time, same): Spec(constant_time=time, invariant=same).data_independent for time in (0, 1) for same in (0, 1)}
    assert {key for key, value in found.items() if not value} == {(0, 0)}


def test_offsets_are_two() -> None:
    """One that is not given is 0 beside one that is."""
    assert make_offsets(None, None) is None and Spec().offsets is None
    assert make_offsets(3, None) == Spec(q_offset=3).offsets == (3, 0) and make_offsets(None, 4) == (0, 4)
    assert make_offsets(0, None) == Spec(kv_offset=0).offsets == (0, 0)
    assert Spec(q_offset=1).at(None).offsets is None and Spec().at((5, 6)).offsets == (5, 6)
    with pytest.raises(ProblemError, match="kv_offset is -1; it must be an int >= 0, or None"):
        make_offsets(0, -1)


def test_built_in() -> None:
    """A function gives way to the default, a mask or a score of this library stays."""
    function: Any = types.SimpleNamespace(is_function=True)
    assert Spec(mask=function, score=Softcap(3.0), q_offset=2).built_in == Spec(score=Softcap(3.0), q_offset=2)
    assert Spec(mask=Causal(), score=function).built_in == Spec(mask=Causal())

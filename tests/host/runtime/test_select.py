"""This module tests which kernel serves a call on which GPU, and what is said if it is a slower one. No GPU is needed."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from rawattn.driver.device import TYPICAL, Device
from rawattn.driver.device import cpu as this_cpu
from rawattn.errors import ProblemError, SlowKernelWarning, UnsupportedError
from rawattn.kernel import attn_fwd
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.kernel.tiling import MOST_TILES
from rawattn.operation import Forward
from rawattn.operation.base import FEW_ROWS, three_bits
from rawattn.operation.forward import LONGEST
from rawattn.operation.operand import PLAIN, Layout
from rawattn.runtime import select
from rawattn.variant.element import BF16, ELEMENTS, FP32, FP64
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests.operations import forward, replace

OP = forward(BF16, 2, 512, 512, 8, 8, 64, 64)
ARRAYS: dict[str, Layout] = {
    "any": PLAIN,
    "expanded rows": Layout("k has a row stride of 0"),
    "unaligned": Layout("k is unaligned", "k is unaligned"),
}
AMPERE_ON = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
# (arch, element, head_dim, arrays) -> the kernel's name; None where it is left to the caller to copy or to ask for a kernel.
TABLE = {
    **{("sm_90a", name, 64, "any"): "attn_fwd" for name in ("bf16", "fp16")},
    **{("sm_90a", "bf16", 64, arrays): None for arrays in ("expanded rows", "unaligned")},
    **{(arch, name, 64, arrays): "attn_fwd_mma"
       for arch in AMPERE_ON for name in ("bf16", "fp16") for arrays in ("any", "expanded rows")},
    **{(arch, "bf16", 64, "unaligned"): None for arch in AMPERE_ON},
    **{("sm_75", name, 64, arrays): "attn_fwd_simt" for name in ELEMENTS for arrays in ARRAYS},
    **{(arch, name, 64, arrays): "attn_fwd_simt" for arch in TYPICAL for name in ("fp32", "fp64") for arrays in ARRAYS},
    **{(arch, "fp32", 64, arrays): "attn_fwd_mma"
       for arch in ("sm_80", "sm_90a", "sm_100", "sm_103", "sm_110") for arrays in ("any", "expanded rows")},
    **{(arch, name, size, arrays): "attn_fwd_simt"
       for arch in TYPICAL for name in ("bf16", "fp32") for size in (1, 20, 300, 512) for arrays in ARRAYS},
    **{(arch, "bf16", 512, arrays): "attn_fwd_mma" if arrays != "unaligned" else None
       for arch in AMPERE_ON for arrays in ARRAYS},
    **{("sm_90a", "bf16", 512, arrays): "attn_fwd_wide" if arrays == "any" else None for arrays in ARRAYS},
}  # fmt: skip


def chosen(op: Forward, device: Device, kernel: str | None = None) -> select.Selection:
    return select.select(op, device, kernel)


@pytest.mark.parametrize("arch", TYPICAL)
def test_table(arch: str) -> None:
    rows = {key: name for key, name in TABLE.items() if key[0] == arch}
    assert len(rows) >= 30
    for (_, element, size, arrays), name in rows.items():
        op = replace(OP, element=ELEMENTS[element], head_dim=size, head_dim_v=size, layout=ARRAYS[arrays])
        if name is not None:
            assert chosen(op, TYPICAL[arch]).kernel.name == name, (element, size, arrays)
            continue
        with pytest.raises(UnsupportedError, match=f"attn_fwd.*: {op.layout.tma_unsupported}.*'attn_fwd_simt'"):
            chosen(op, TYPICAL[arch])
        assert chosen(op, TYPICAL[arch], "attn_fwd_simt").slow is None


def test_a_fall_that_costs_speed_is_said() -> None:
    dropped = {"element": FP32, "dropout": 0.1}
    for arch, changes in (("sm_90a", dropped), ("sm_80", dropped), ("sm_89", {"head_dim": 300}), ("sm_80", {"head_dim_v": 20})):
        slow = chosen(replace(OP, **changes), TYPICAL[arch]).slow
        assert slow is not None and "attn_fwd_simt computes this, slowly" in slow and TYPICAL[arch].name in slow
    for arch in ("sm_75", "sm_89", "sm_120"):
        assert chosen(replace(OP, **dropped), TYPICAL[arch]).slow is None, "there is no better one"
    for arch in TYPICAL:
        assert chosen(OP, TYPICAL[arch]).slow is None


def test_it_is_said_once() -> None:
    with pytest.warns(SlowKernelWarning, match="slowly"):
        select.warn_once("a test computes this, slowly")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.warn_once("a test computes this, slowly")


def test_it_is_said_at_the_line_that_called_the_library() -> None:
    with pytest.warns(SlowKernelWarning) as caught:
        select.warn_once("another test computes this, slowly")
    assert [warning.filename for warning in caught] == [__file__]


def test_gpu_that_is_too_old() -> None:
    with pytest.raises(UnsupportedError) as caught:
        chosen(OP, Device("GTX 1080", "sm_61", 20, 49_152, 2 << 20))
    for part in ("GTX 1080", "attn_fwd: it needs a Hopper GPU", "8.0 or newer", "7.5 or newer", "cpu: it runs on the CPU"):
        assert part in str(caught.value)


@pytest.mark.parametrize("which", ["head_dim", "head_dim_v"])
def test_sizes_that_no_kernel_takes(which: str) -> None:
    with pytest.raises(UnsupportedError, match=f"attn_fwd_simt: {which} is 513; it takes up to 512"):
        chosen(replace(OP, **{which: 513}), TYPICAL["sm_90a"])


def test_a_kernel_that_is_asked_for() -> None:
    for kernel in (ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT):
        found = chosen(OP, TYPICAL["sm_90a"], kernel.name)
        assert found.kernel is kernel and found.slow is None
    with pytest.raises(UnsupportedError, match="attn_fwd_mma: it takes bf16, fp16 and fp32, not fp64"):
        chosen(replace(OP, element=FP64), TYPICAL["sm_90a"], "attn_fwd_mma")
    with pytest.raises(ProblemError, match=r"takes a rawattn\.kernel\.attn_fwd_mma\.AttnFwdMmaConfig"):
        select.select(OP, TYPICAL["sm_90a"], "attn_fwd_mma", attn_fwd.AttnFwdConfig())


SIZES = (1, 8, 16, 20, 64, 72, 80, 128, 192, 256, 300, 512)


@pytest.mark.parametrize("arch", TYPICAL)
def test_every_size_has_a_configuration(arch: str) -> None:
    for element in ELEMENTS.values():
        for size in SIZES:
            for size_v in {size, 8, 64, max(SIZES)}:
                op = replace(OP, element=element, head_dim=size, head_dim_v=size_v)
                found = chosen(op, TYPICAL[arch])
                assert found.kernel.legal(found.config, op, TYPICAL[arch]) is None


@pytest.mark.parametrize("arch", [*AMPERE_ON, "sm_90a"])
def test_all_that_a_kind_is_compiled_with_is_legal(arch: str) -> None:
    """With every kind of mask and score, though some take more registers, on GPUs with little shared memory."""
    for size in range(8, 257, 8):
        for size_v in {8, size, 256}:
            for kinds in ({}, {"mask": And(Causal(), Window(9)), "score": Softcap(3.0)}):
                op = replace(OP, head_dim=size, head_dim_v=size_v, **kinds)
                selection = chosen(op, TYPICAL[arch], "attn_fwd_mma")
                for config in (selection.config, *selection.compiled_with):
                    assert ATTN_FWD_MMA.legal(config, op, TYPICAL[arch]) is None


def test_constant_time() -> None:
    """No branch on a value: another softmax and another cap; no kernel whose arithmetic takes its time by the numbers."""
    op = replace(OP, score=Softcap(30.0), constant_time=True)
    for kernel in (ATTN_FWD, ATTN_FWD_MMA):
        config = kernel.config_type()
        found, plain = kernel.options(op, config), kernel.options(replace(op, constant_time=False), config)
        assert (found["Softmax"].cuda_type, found["Score"].cuda_type) == ("ConstantTime", "ConstantTimeSoftcap")
        wanted = ("Unshifted", "QuinticSoftcap") if kernel is ATTN_FWD else ("SpeculativeMax", "Softcap")
        assert (plain["Softmax"].cuda_type, plain["Score"].cuda_type) == wanted
    with pytest.raises(UnsupportedError, match="constant_time is for GPUs"):
        select.select(op, this_cpu())


# ---- what is kept of a selection -----------------------------------------------------------------------------------------


def test_three_bits() -> None:
    assert [three_bits(n) for n in (0, 1, 7, 8, 9, 10, 11, 15, 16, 17, 20, 21, 100, 1000)] == [
        0, 1, 7, 8, 10, 10, 12, 16, 16, 20, 20, 24, 112, 1024
    ]  # fmt: skip
    for n in (1 << 29, (1 << 29) + 1, (1 << 30) - 1):
        assert three_bits(n) == n
    assert three_bits((1 << 29) - 1) == 1 << 29


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89", "sm_75"])
def test_lengths_of_nearly_the_same_size_share_a_selection(arch: str) -> None:
    select.forget()
    first = chosen(replace(OP, q_len=1, kv_len=1025), TYPICAL[arch])
    for kv_len in range(1025, 1281):
        assert chosen(replace(OP, q_len=1, kv_len=kv_len), TYPICAL[arch]) is first
    assert len(select._selections) == 1
    packed = replace(OP, varlen=True, batch=9, q_len=500, total_q=1100, total_kv=1100)
    shared = chosen(packed, TYPICAL[arch])
    assert chosen(replace(packed, batch=10, q_len=450, total_q=1280, total_kv=1025), TYPICAL[arch]) is shared is not first
    others: list[dict[str, Any]] = [
        {"heads": 16},
        {"kv_heads": 4},
        {"mask": Causal()},
        {"kv_len": 1281},
        {"q_len": 2},
        {"batch": 3},
    ]
    for changes in others:
        assert chosen(replace(OP, **{"q_len": 1, "kv_len": 1025} | changes), TYPICAL[arch]) is not first
    windows = [chosen(replace(OP, mask=Window(size)), TYPICAL[arch]) for size in (1, 1000)]
    assert windows[0] is not windows[1], "the cost depends on it"
    select.forget()
    assert not select._selections


def test_few_selections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "KEPT_SELECTIONS", 3)
    select.forget()
    for heads in range(1, 9):
        chosen(replace(OP, heads=heads, kv_heads=1), TYPICAL["sm_75"])
        assert 1 <= len(select._selections) <= 3
    select.forget()


def test_from_where_on_every_row_counts() -> None:
    """2^27 rows of all heads: a rounding by a quarter stays far from the bound of the tiles, and from that of lengths."""
    assert FEW_ROWS * 1.25 * 2 < MOST_TILES and FEW_ROWS >= MOST_TILES // 16
    select.forget()
    for q_len, selections in (((1 << 24) - 3, 1), ((1 << 24) - 2, 1), ((1 << 24) + 1, 2), ((1 << 24) + 2, 3)):
        chosen(replace(OP, batch=1, heads=8, q_len=q_len), TYPICAL["sm_90a"])
        assert len(select._selections) == selections
    select.forget()


@pytest.mark.parametrize("varlen", [False, True])
def test_offsets_of_nearly_the_same_size_share_a_selection(varlen: bool) -> None:
    """Up to the last position, past which nothing is rounded."""
    select.forget()
    totals = {"varlen": True, "total_q": 900, "total_kv": 1000} if varlen else {}
    op = replace(OP, batch=1, q_len=900, kv_len=1000, mask=Causal(), **totals)
    for offsets, selections in (((1025, 7), 1), ((1026, 7), 1), ((1280, 7), 1), ((1281, 7), 2), ((1280, 8), 3), ((None, 7), 4)):
        chosen(replace(op, q_offset=offsets[0], kv_offset=offsets[1]), TYPICAL["sm_90a"])
        assert len(select._selections) == selections
    chosen(replace(op, q_offset=LONGEST - 1 - 900, kv_offset=LONGEST - 1 - 1000), TYPICAL["sm_90a"])
    assert [*select._selections][-1][0][1].offsets == (LONGEST - 1 - 1024, LONGEST - 1 - 1024)
    select.forget()


def test_near_the_limits_every_row_counts() -> None:
    """A rounded size would be refused here, or another's refusal be told."""
    device = TYPICAL["sm_90a"]
    fits = forward(BF16, MOST_TILES // 16, 65, 1, 8, 8, 64, 64)
    assert chosen(fits, device).kernel is ATTN_FWD
    with pytest.raises(UnsupportedError, match=f"here are {16 * (MOST_TILES // 16 + 1)}"):
        chosen(replace(fits, batch=MOST_TILES // 16 + 1), device)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89", "sm_75", "cpu"])
def test_a_shared_selection_serves_each(arch: str) -> None:
    device = this_cpu() if arch == "cpu" else TYPICAL[arch]
    for q_len, kv_len, heads, head_dim in itertools.product((0, 1, 57, 63, 65, 900), (0, 33, 1111), (8, 16), (64, 72, 256)):
        op = replace(OP, q_len=q_len, kv_len=kv_len, heads=heads, head_dim=head_dim)
        found = chosen(op, device)
        assert found.kernel.supports(op, device) == [] and found.kernel.legal(found.config, op, device) is None


def test_overrides_are_selections_of_their_own() -> None:
    device = TYPICAL["sm_90a"]
    config = attn_fwd.AttnFwdConfig(64, 64)
    given = select.select(OP, device, "attn_fwd", config)
    assert (given.config, given.why, given.compiled_with) == (config, "given by the caller", ())
    assert chosen(OP, device).config != config and chosen(OP, device, "attn_fwd").config == chosen(OP, device).config
    with pytest.raises(ProblemError, match="which attn_fwd cannot run here: tile_kv is 24"):
        select.select(OP, device, config=attn_fwd.AttnFwdConfig(64, 24))
    with pytest.raises(ProblemError, match=r"config is 5; it must be None or rawattn\.kernel\.attn_fwd\.AttnFwdConfig or "):
        select.select(OP, device, config=5)
    with pytest.raises(
        ProblemError, match="kernel is 'mine'; it must be None or one of 'attn_fwd', 'attn_fwd_wide', 'attn_fwd_mma'"
    ):
        select.select(OP, device, "mine")


def test_a_device_without_room() -> None:
    tiny = Device("tiny", "sm_90a", 132, 1024, 1 << 20)
    with pytest.raises(UnsupportedError, match="attn_fwd has no configuration that fits Forward bf16"):
        chosen(OP, tiny)


def test_all_of_a_kind_are_compiled_with_each_other() -> None:
    """Whatever length asks first, the same configurations are compiled; few queries are a kind of their own."""
    shapes = {
        "few": ((1, 1, 100), (1, 1, 9000), (16, 4, 4096)),
        "many": ((1, 100, 9), (1, 512, 512), (1, 4096, 4096), (16, 4096, 1)),
    }
    for arch, mask, each in itertools.product(("sm_90a", "sm_89"), (Full(), Causal()), shapes.values()):
        sets = set()
        for batch, q_len, kv_len in each:
            found = chosen(replace(OP, batch=batch, q_len=q_len, kv_len=kv_len, mask=mask), TYPICAL[arch])
            assert found.config not in found.compiled_with
            sets.add((found.kernel, frozenset((found.config, *found.compiled_with))))
        assert len(sets) == 1


def test_few_queries_go_to_the_kernel_that_splits() -> None:
    device = TYPICAL["sm_90a"]
    for q_len, kv_heads, kernel in ((64, 8, "attn_fwd_mma"), (65, 8, "attn_fwd"), (32, 4, "attn_fwd_mma"), (33, 4, "attn_fwd")):
        assert chosen(replace(OP, q_len=q_len, kv_heads=kv_heads), device).kernel.name == kernel
    assert chosen(replace(OP, q_len=1, varlen=True), device).kernel.name == "attn_fwd"
    assert chosen(replace(OP, q_len=1), device, "attn_fwd").kernel.name == "attn_fwd"
    refusals = chosen(replace(OP, q_len=1, element=FP64), device).refusals
    names = ["attn_fwd_mma", "attn_fwd", "attn_fwd_wide"]
    assert [name for name, _ in refusals] == names, "one behind the other, and before the slow one"
    wide = replace(OP, head_dim=512, head_dim_v=512)
    for q_len, kernel in ((8, "attn_fwd_mma"), (65, "attn_fwd_wide")):
        assert chosen(replace(wide, q_len=q_len), device).kernel.name == kernel
    assert chosen(replace(wide, kv_lens=True), device).slow is None, "attn_fwd_mma computes what attn_fwd_wide refuses"


@pytest.mark.parametrize("heads, head_dim, tile_q", [(16, 128, 192), (32, 64, 256)])
def test_packed_sequences_have_the_tiles_of_the_longest(heads: int, head_dim: int, tile_q: int) -> None:
    """However many short ones there are: a tile with few rows costs as much as they do."""
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "head_dim_v": head_dim, "varlen": True}
    for batch in (8, 64, 300):
        op = replace(OP, batch=batch, q_len=1968, kv_len=1968, total_q=16384, total_kv=16384, **sizes)
        assert chosen(op, TYPICAL["sm_90a"], "attn_fwd").config.tile_q == tile_q


def test_why() -> None:
    device = TYPICAL["sm_90a"]
    found = chosen(OP, device)
    microseconds = ATTN_FWD.cost(found.config, OP, device) * 1e6
    assert found.why.endswith(f"by the cost model, which expects {microseconds:,.0f} us") and found.refusals == ()
    members = select.config_set(ATTN_FWD, ATTN_FWD.tuning_shapes(OP), device)
    assert found.why.startswith(f"cheapest of {len(members)} ")
    assert min(members, key=lambda member: ATTN_FWD.cost(member.config, OP, device)).config == found.config

"""perf.decode without a GPU: its caches on the CPU, what it refuses, and its table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import rawattn
from perf import decode
from perf.lib import steps
from perf.lib.steps import Caches, Decode
from perf.lib.task import Unserved
from rawattn.kernel import attn_fwd
from rawattn.kernel.attn_decode import AttnDecodeConfig

torch = pytest.importorskip("torch")
FIELDS = AttnDecodeConfig.__dataclass_fields__ | attn_fwd.AttnFwdConfig.__dataclass_fields__
SMALL = [
    Decode("dense", (70, 33), heads=4, kv_heads=2, head_dim=32),
    Decode("pages", (70, 33), page=16, q_len=3, heads=4, kv_heads=2, head_dim=32),
    Decode("chunk", (170, 170), page=16, q_len=90, heads=2, kv_heads=1, head_dim=16),
    Decode("one head", (5,), page=64, heads=2, kv_heads=1, head_dim=16),
    Decode("e4m3", (70, 33), page=16, q_len=3, heads=4, kv_heads=2, head_dim=32, cache=steps.E4M3),
    Decode("mixed", (70, 33, 120), page=16, heads=4, kv_heads=2, head_dim=32, chunks=(90,)),
    Decode("e5m2", (70, 33), heads=4, kv_heads=2, head_dim=32, cache=steps.E5M2),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_ours_is_right_on_all_caches(case: Decode) -> None:
    caches = Caches(case, "cpu", 1)
    first, second = (call() for call in steps.ours(caches))
    assert steps.error(caches, first) < steps.TOLERANCE < steps.error(caches, second)
    if len(set(case.kv_lens)) == 1 and case.cache == "bfloat16":
        assert steps.error(caches, steps.tensors(caches)[0]()) < steps.TOLERANCE
    if case.chunks:
        for other in (steps.apart, steps.invariant):
            found = [call().clone() for call in other(caches)[:2]]
            assert steps.error(caches, found[0]) < steps.TOLERANCE < steps.error(caches, found[1])
    first.view(-1)[-1] = float("nan")
    assert steps.error(caches, first) == float("inf")


def test_changed_forms_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of another length give the same; other fields are those of the configuration that a GPU's plan has."""
    caches = Caches(SMALL[1], "cpu", 1)
    first, second = (call() for call in steps.changed("split=512", caches))
    assert steps.error(caches, first) < steps.TOLERANCE < steps.error(caches, second)
    plans = []
    monkeypatch.setattr(
        rawattn, "plan_kvcache", lambda *_, **options: plans.append(options) or SimpleNamespace(config=AttnDecodeConfig(stages=3))
    )
    found: Any = steps.changed("cp_async=1+producers=4", caches)
    assert [call.keywords for call in found] == [{"config": AttnDecodeConfig(cp_async=True, producers=4, stages=3)}] * len(
        caches.pools
    )
    assert isinstance(found[0].keywords["config"].cp_async, bool)
    found = steps.changed("split=1024+stages=2", caches)
    assert found[0].keywords == {"split": 1024, "config": AttnDecodeConfig(stages=2)} and plans == [{}, {"split": 1024}]
    with pytest.raises(AttributeError, match="no_field"):
        steps.changed("no_field=1", caches)


def test_two_launches_of_one_call() -> None:
    caches = Caches(SMALL[5], "cpu", 1)
    found: Any = steps.CONTENDERS["beside"](caches)
    assert [call.keywords for call in found] == [{"kernel": "attn_decode+attn_fwd"}] * len(caches.pools)


def test_the_bytes_are_those_that_are_read() -> None:
    for cache in ("bfloat16", steps.E4M3):
        caches = Caches(Decode("dense", (64, 64), heads=4, kv_heads=2, head_dim=32, cache=cache), "cpu", 1)
        assert caches.case.bytes == sum(x.numel() * x.element_size() for x in caches.pools[0])
    big = Caches(SMALL[0], "cpu", 1 << 20)
    assert sum(x.numel() * 2 for pools in big.pools for x in pools) >= 1 << 20


def test_ratios_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each round to ours, with the interval that its noise leaves."""
    timed = {"ours": (2.0, 2.2, 2.1), "read": (1.0, 1.1, 1.05), "tensors": ()}

    class Replay:
        def __init__(self, calls: list[Any]) -> None:
            self.each = iter(calls[0]())

        def us(self) -> float:
            return next(self.each)

    monkeypatch.setattr(steps, "Caches", lambda case: None)
    monkeypatch.setattr(steps, "error", lambda caches, o: 1.0 if o == () else 0.0)
    monkeypatch.setattr(steps, "Replay", Replay)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, found in timed.items():
        make = lambda caches, found=found: [lambda: found]  # noqa: E731
        monkeypatch.setattr(steps, name, make)
        monkeypatch.setitem(steps.CONTENDERS, name, make)
    row = steps.measure(SMALL[0], ("ours", "tensors"), 3)
    assert row["us"] == {"ours": 2.1, "read": 1.05} and "errs by 1" in row["failures"]["tensors"]
    assert list(row["ratios"]) == ["read"] and row["ratios"]["read"] == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize("case", [SMALL[0], SMALL[1], Decode("queries", (9, 9), q_len=2)], ids=lambda case: case.name)
def test_what_cudnn_does_not_take(case: Decode) -> None:
    with pytest.raises(Unserved):
        steps.cudnn(Caches(case, "cpu", 1))


def test_cases() -> None:
    for cases, peers in decode.SETS.values():
        named, changes = ([x for x in peers.split(",") if x and ("=" in x) == changed] for changed in (False, True))
        assert len({case.label for case in cases}) == len(cases) and not {*named} - {*steps.CONTENDERS}
        assert not {part.partition("=")[0] for x in changes for part in x.split("+")} - {"split", *FIELDS}
    assert decode.TITLES.keys() == decode.SETS.keys() and decode.FP8[1].label == "B1 4k e4m3 page 64"
    assert Decode("", (3, 2), q_len=1, heads=3, kv_heads=3, head_dim=5, chunks=(2,)).flops == 4 * 3 * 5 * (3 + 2 + 1)
    assert Decode("", (3, 2), q_len=2, heads=3, kv_heads=3, head_dim=5).flops == 4 * 3 * 5 * (3 + 2 + 2 + 1)
    lens = steps.zipf(64, 64 * 4096)
    assert len(lens) == 64 and 0.99 < sum(lens) / (64 * 4096) <= 1.0 and lens[0] > 50_000


def test_table() -> None:
    rows: list[dict[str, Any]] = [
        {"label": "a", "bytes": 4_000_000, "us": {"ours": 2.0, "cudnn": 3.0, "read": 1.0}},
        {"label": "b", "bytes": 4_000_000, "us": {"ours": 4.0, "read": 1.0}},
        {"label": "c", "bytes": 4_000_000, "us": {"cudnn": 1.0}},
    ]
    found = decode.table(rows, ["ours", "cudnn"])
    assert found[1] == ["a", "2.00", "3.00", "1.00", "2000", "1.500"]
    assert decode.table([{**rows[0], "flops": 6e9}], ["ours"], "flops")[1][3:] == ["3000"]
    assert found[2][-1] == "-" and found[3][1] == "-" and found[-1][-1] == "1.500"


def test_unknown_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.machine, "gpu", lambda tool: None)
    monkeypatch.setattr(decode.machine, "facts", dict)
    with pytest.raises(SystemExit, match="no nobody; there are ours, tensors, apart, beside, invariant, cudnn, fa3"):
        decode.main(["--peers", "nobody"])

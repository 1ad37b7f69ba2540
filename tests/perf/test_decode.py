"""perf.decode without a GPU: its caches on the CPU, what it refuses, and its table."""

from __future__ import annotations

import types
from typing import Any

import pytest

import rawattn
from perf import decode
from perf.lib import steps
from perf.lib.steps import Caches, Decode
from perf.lib.task import Unserved
from rawattn.kernel.attn_decode import Config

torch = pytest.importorskip("torch")
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


def test_other_forms_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of other lengths give the same; a GPU's plan says from which configuration pages are copied by warps."""
    caches = Caches(SMALL[1], "cpu", 1)
    for keys in (512, 1024, 2048):
        first, second = (call() for call in steps.CONTENDERS[f"split{keys}"](caches))
        assert steps.error(caches, first) < steps.TOLERANCE < steps.error(caches, second)
    for chosen in (Config(cp_async=False, stages=3), Config(cp_async=True), None):
        monkeypatch.setattr(rawattn, "plan_kvcache", lambda *given, config=chosen: types.SimpleNamespace(config=config))
        if chosen is None or chosen.cp_async:
            with pytest.raises(Unserved, match="copies its pages so already"):
                steps.copied(caches)
        else:
            options = [call.keywords for call in steps.copied(caches)]  # type: ignore[attr-defined]
            assert options == [{"config": Config(cp_async=True, producers=4, stages=3)}] * len(caches.pools)


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
        assert len({case.label for case in cases}) == len(cases) and not {*filter(None, peers.split(","))} - {*steps.CONTENDERS}
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
    with pytest.raises(SystemExit, match="no nobody; there are ours, tensors, apart, invariant, copied, split512, split1024, split2048, cudnn, fa3"):
        decode.main(["--peers", "nobody"])

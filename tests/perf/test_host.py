"""perf.host on the stand-in for a GPU, in processes of their own, since the stand-in stays for the rest of a process."""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from perf.host import ROWS, Host, second_launch, table

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.driver")

COUNT = """
import json
from perf.lib import stand_in
stand_in.install()
from perf.host import Host
from rawattn.driver import context
from rawattn.driver.launch import BoundLaunch
from rawattn.runtime.plan import Plan
counts, host = {"maps": 0, "launches": 0, "issued": 0, "plans": 0}, Host(30, dry=True)

def counting(owner, name, what):
    original = getattr(owner, name)
    def counted(*given):
        counts[what] += 1
        return original(*given)
    setattr(owner, name, counted)

counting(context.library(), "cuTensorMapEncodeTiled", "maps")
counting(BoundLaunch, "__init__", "launches")
counting(BoundLaunch, "__call__", "issued")
counting(Plan, "__init__", "plans")
found = {}
for name in (
    "eager", "plan", "step", "new_pointers", "new_kv_len", "kvcache_64", "new_step", "plan_new_step", "append_new_step",
    "fresh_array", "fresh_prepass", "new_number", "function_kv_len", "new_q_len",
):  # fmt: skip
    row = host.row(name)
    row(0)(), row(0)()  # a library's first call of all is not kept
    if name.endswith("new_step"):  # each layer's first call is made of another layer's
        [row(i)() for i in range(32)]
    before = dict(counts)
    for i in range(1, 31):
        call = row(i)
        call()
    found[name] = {what: counts[what] - before[what] for what in counts}
print(json.dumps(found))
"""


def ran(*words: str) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


def test_a_row_has_new_what_it_says() -> None:
    """Each call is a launch, and two where keys are split. Tensor maps are made for new addresses."""
    found = json.loads(ran("-c", COUNT))
    step = found.pop("step")
    over_caches = [found.pop(name) for name in ("kvcache_64", "new_step", "plan_new_step", "append_new_step")]
    assert over_caches == [{"maps": 0, "launches": 0, "issued": 30, "plans": 0}] * 4, "addresses alone are filled in"
    array, prepass, number = (found.pop(name) for name in ("fresh_array", "fresh_prepass", "new_number"))
    assert array == {"maps": 0, "launches": 0, "issued": 30, "plans": 0}
    assert prepass == {"maps": 0, "launches": 0, "issued": 60, "plans": 0}, "what makes its pyramid"
    assert number == {"maps": 0, "launches": 0, "issued": 60, "plans": 0}, "it is written into launches of another number"
    length, prompt = found.pop("function_kv_len"), found.pop("new_q_len")
    assert length["plans"] <= 1 and length["issued"] == 90, "the pyramid, and keys that are split"
    assert prompt["plans"] <= 1 and prompt["issued"] == 30 and prompt["maps"] == 90
    assert [row["issued"] for row in found.values()] == [30, 30, 30, 60]
    assert found["plan"] == {"maps": 0, "launches": 0, "issued": 30, "plans": 0}
    assert found["eager"] == found["plan"]
    assert step == {"maps": 0, "launches": 0, "issued": 90, "plans": 0}, "a forward, delta, and the gradients"
    assert found["new_pointers"] == {"maps": 90, "launches": 0, "issued": 30, "plans": 0}
    plans = found["new_kv_len"].pop("plans")
    assert plans <= 1, "a plan serves lengths of one size class"
    assert found["new_kv_len"] == {"maps": 0, "launches": 60, "issued": 60}


def test_dry(tmp_path: pathlib.Path) -> None:
    printed = ran("-m", "perf.host", "--dry", "--calls", "20", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert tuple(rows) == ROWS and all(name in printed for name in ROWS)
    assert [name for name, row in rows.items() if "skipped" in row] == ["sdpa", "sdpa_step"]
    assert all(
        0 < row["p10"] <= row["us"] <= row["p90"] for row in rows.values() if "us" in row and row is not rows["two_launches"]
    )
    assert rows["new_kv_len"]["us"] > rows["plan"]["us"], "it has more to do"
    assert rows["step"]["p10"] > rows["empty_step"]["p10"] > 0


def test_a_second_launch_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row takes the calls with one launch from those with two, whose numbers are odd."""
    assert second_launch(np.array([15.0, 10.0, 16.0, 10.0, 99.0])).tolist() == [5.0, 6.0]
    host, clock = Host.__new__(Host), itertools.count(0, 1000)
    host.calls, host.dry = 4, True
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    two = lambda: [time.perf_counter_ns() for _ in range(7)]  # noqa: E731
    samples = np.array(host.samples(lambda i: two if i % 2 else list))
    assert second_launch(samples).tolist() == [7.0, 7.0]


def test_profile() -> None:
    assert "_prepare" in ran("-m", "perf.host", "--dry", "--calls", "20", "--profile", "new_kv_len")


def test_table() -> None:
    times = {"us": 8.0, "p10": 7.0, "p90": 9.0}
    rows = table({"eager": times, "sdpa": {**times, "us": 12.0}, "plan": {"skipped": "why"}})
    assert rows[1:] == [
        ["eager", "8.0", "7.0", "9.0", "1.00", ""],
        ["sdpa", "12.0", "7.0", "9.0", "1.50", ""],
        ["plan", *"----", "why"],
    ]

"""``pytest --record``: what a run found, in perf/record/DEVICE/tests.json. A skip is not a pass, so it says what was skipped."""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import pytest

BEGIN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the outcome to perf/record/DEVICE/tests.json")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("record"):
        return
    from perf.lib import machine
    from rawattn import device, driver

    stats = terminalreporter.stats
    passed = [report.keywords for report in stats.get("passed", [])]
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    said = {name: value for report in stats.get("passed", []) for name, value in report.user_properties}
    found = {
        **machine.facts(),
        "passed": len(passed),
        "passed_on_gpu": sum("gpu" in keywords for keywords in passed),
        "failed": [report.nodeid for name in ("failed", "error") for report in stats.get(name, [])],
        "skipped": dict(reasons.most_common()),
        "said": said,  # by tests that passed, with record_property
        "seconds": round(time.monotonic() - BEGIN),
    }
    file = machine.record(driver.device(0) if driver.device_count() else device.cpu()) / "tests.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n")
    terminalreporter.write_line(f"recorded in {file}")

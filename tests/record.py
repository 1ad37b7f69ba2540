"""``pytest --record``: what a run found, in perf/record/DEVICE/tests.json. A skip is not a pass, so it says what was skipped.

``pytest --resume FILE``: only the tests that FILE does not name. Those that pass are added to it, one a line, so that a run which
was cut short goes on where it ended.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import time
from typing import Any

import pytest

BEGIN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the outcome to perf/record/DEVICE/tests.json")
    help_text = "leave out the tests that FILE names, and add those that pass"
    parser.addoption("--resume", metavar="FILE", type=pathlib.Path, help=help_text)


@pytest.hookimpl(trylast=True)  # after what else deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (file := config.getoption("resume")) is None or not file.exists():
        return
    passed = set(file.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class Resume:
    """Adds to the file what passes. Under xdist it hears of all workers."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self.file.open("a") as f:
                f.write(report.nodeid + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("resume")) is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Resume(file))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("record"):
        return
    from perf.lib import machine
    from rawattn.driver import context, device

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
    file = machine.record(context.device(0) if context.device_count() else device.cpu()) / "tests.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n")
    terminalreporter.write_line(f"recorded in {file}")

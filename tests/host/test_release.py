"""This module says what makes a version: .ci/release in a small repository, and the workflow that would publish it."""

from __future__ import annotations

import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOG = "# Changelog\n\n## {} \n\n### Added\n\n- much\n\n## 0.0.9 - 2026-01-01\n\n- little\n"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def repository(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    (tmp_path / "rawattn").mkdir()
    (tmp_path / "rawattn" / "package.py").write_text('"""It."""\n\n__version__ = "0.1.0"\n__all__ = []\n')
    (tmp_path / "CHANGELOG.md").write_text(LOG.format("0.1.0 - unreleased").replace(" \n", "\n"))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def git(folder: pathlib.Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def release(folder: pathlib.Path, version: str) -> str:
    """Returns what it says where it refuses; empty where it went well."""
    ran = subprocess.run([sys.executable, str(ROOT / ".ci" / "release"), version], cwd=folder, capture_output=True, text=True)
    assert (ran.returncode == 0) is not bool(ran.stderr), ran.stderr
    return ran.stderr


def test_release(repository: pathlib.Path) -> None:
    assert release(repository, "0.1.0") == ""
    log, today = (repository / "CHANGELOG.md").read_text(), datetime.date.today().isoformat()
    assert log == LOG.format(f"Unreleased\n\n## 0.1.0 - {today}").replace(" \n", "\n")
    assert git(repository, "status", "--porcelain") == "" and git(repository, "describe").strip() == "v0.1.0"
    assert "nothing that is unreleased" in release(repository, "0.2.0")
    (repository / "CHANGELOG.md").write_text(log.replace("## Unreleased\n", "## Unreleased\n\n### Fixed\n\n- it\n"))
    assert "has changes; commit them first" in release(repository, "0.2.0")
    git(repository, "commit", "--quiet", "--all", "--message", "second")
    assert "version is 0.0.8; here is 0.1.0" in release(repository, "0.0.8")
    assert "tag v0.1.0" in release(repository, "0.1.0")
    assert release(repository, "0.2.0") == ""
    assert '__version__ = "0.2.0"\n__all__' in (repository / "rawattn" / "package.py").read_text()
    assert f"## Unreleased\n\n## 0.2.0 - {today}\n\n### Fixed\n\n- it\n\n## 0.1.0" in (repository / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("version", ["1", "v0.1.0", "0.1.0rc1"])
def test_versions_that_are_none(repository: pathlib.Path, version: str) -> None:
    assert f"version is {version!r}; it must be three numbers" in release(repository, version)


def test_another_version_than_the_changelog_announces(repository: pathlib.Path) -> None:
    assert "unreleased 0.1.0" in release(repository, "0.2.0")
    assert git(repository, "log", "--oneline").count("\n") == 1


def test_this_repository_can_be_released() -> None:
    log = (ROOT / "CHANGELOG.md").read_text()
    (heading,) = re.findall(r"^## (.*nreleased)$", log, re.MULTILINE)
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "rawattn" / "package.py").read_text(), re.MULTILINE)
    assert version is not None and heading in (f"{version[1]} - unreleased", "Unreleased")


def test_workflow_adds_the_addresses(tmp_path: pathlib.Path) -> None:
    """The step of the release makes [project.urls] of the repository that it runs in, and README.md's links whole."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (step,) = re.findall(r"ADDRESS: .*\n        run: \|\n((?: {10}.*\n)+)", text)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {**os.environ, "ADDRESS": "https://example.org/somebody/rawattn"}
    subprocess.run(["bash", "-ec", textwrap.dedent(step)], cwd=tmp_path, check=True, env=environment)
    before, after = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (ROOT, tmp_path))
    urls = after["project"].pop("urls")
    assert before == after and {"Source", "Documentation", "Changelog", "Issues"} == {*urls}
    address, links = environment["ADDRESS"], re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert all(url.startswith(address) for url in (*urls.values(), *links))
    assert {f"{address}/raw/main/docs/speed.svg", f"{address}/blob/main/docs/faq.md"} <= {*links}


def test_workflow_checks_every_python() -> None:
    """Those that pyproject.toml allows, from its oldest on."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (pythons,) = re.findall(r"python: \[(.*)\]", text)
    assert pythons == ", ".join(f'"3.{minor}"' for minor in range(10, 15))
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()
    assert os.access(ROOT / ".ci" / "wheel", os.X_OK) and ".ci/wheel dist/*.whl" in text

"""This module says what the pages are filled with: tables by the kernels' answers, parts of sources, records, and the drawing of
the barriers."""

from __future__ import annotations

import itertools
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.few_rows import MOST_SCRATCH, SHARED_ROWS, SPARSE_TILES, SPLIT_KEYS, UNEVEN_KEYS, UNEVEN_QUERIES, UNEVEN_TILES
from rawattn.operation.base import FEW_QUERIES
from rawattn.serving.violations import VIOLATIONS

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
FILLED = [
    pytest.param(name, words, id=f"{page.stem} {name} {words}")
    for page in sorted(DOCS.glob("*.md"))
    for name, words in re.findall(r"^\{\{ (\w+) ?(.*?) \}\}$", page.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def hooks() -> Iterator[Any]:
    before = sys.path[:]
    sys.path.insert(0, str(DOCS))
    import hooks  # type: ignore[import-not-found]

    yield hooks
    sys.path[:] = before


@pytest.mark.parametrize(("name", "words"), FILLED)
def test_what_pages_ask_for_is_there(hooks: Any, name: str, words: str) -> None:
    if name == "figure":
        path, kind, _ = words.split(" ", 2)
        assert (hooks.RECORDS / path).is_file() and kind in ("bars", "roofline")
    else:
        assert hooks.MAKERS[name](words)


COLUMNS = 88  # of code on pages: what a screen of 1280 px shows beside the navigation


def test_code_is_not_cut() -> None:
    """Code of every page and of the README fits, but for its two commands, which .ci/run takes as they stand."""
    for page in (*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"):
        for _, block in re.findall(r"^( *)```.*\n((?:.*\n)*?)\1```$", page.read_text(), re.MULTILINE):
            long = [line for line in textwrap.dedent(block).splitlines() if len(line) > COLUMNS and "&& python -m" not in line]
            assert not long, f"{page.name}: {long}"


def test_readme() -> None:
    """It is short, and what it links to is there."""
    text = (DOCS.parent / "README.md").read_text()
    assert len(text.split()) <= 1400
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCS.parent / link).exists(), link


def test_no_page_names_what_is_not_published() -> None:
    """rawattn is installed from a checkout or a file: no page and no message says ``pip install rawattn``."""
    sources = (x for folder in ("rawattn", "tests", "examples", "perf") for x in (DOCS.parent / folder).rglob("*.py"))
    for page in (*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md", *sources):
        assert not re.search(r"install [`\"']*rawattn(\[|[`\"'\s]*$)", page.read_text(), re.MULTILINE), page.name


def test_the_page_of_violations_has_all_words() -> None:
    assert re.findall(r"^\| `(\w+)` \| ", (DOCS / "serving.md").read_text(), re.MULTILINE) == [*VIOLATIONS]


def test_the_chart_is_of_the_records(hooks: Any) -> None:
    assert (DOCS / "speed.svg").read_text() == hooks.charts.speed(), "python docs/charts.py draws it"


def test_tiles_of_the_gallery(hooks: Any) -> None:
    """The boxes of a picture cover its tiles, each in its class; shares are those of the tiles."""
    classes = np.array([[1, 0, 2, 2], [2, 2, 0, 1]])
    drawn = hooks.charts.tiles(classes, "a < b")
    assert 'aria-label="a &lt; b"' in drawn or "aria-label='a &lt; b'" in drawn
    found = np.zeros_like(classes)
    for kind, x, y, width in re.findall(r"class='(\w+)' d='M(\d+) (\d+)h(\d+)v1h-\4z'", drawn):
        found[int(y), int(x) : int(x) + int(width)] = {"cut": 1, "full": 2}[kind]
    assert (found == classes).all()
    causal = hooks.tiles("Causal")  # 32 x 32 tiles: 496 are above the diagonal, 32 on it
    assert "48% of the tiles are skipped, 3% ask their pairs, 48% are full" in causal
    with pytest.raises(ValueError, match="no section 'None such'"):
        hooks.tiles("None such")


def test_speed_beside_flex(hooks: Any) -> None:
    assert re.search(r"forward 1\.97 times .* backward 1\.58 times .*a window of 1024 keys", hooks.beside_flex("sliding"))
    with pytest.raises(ValueError, match="no record of 'none'"):
        hooks.beside_flex("none")


def test_support(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is the kernel's answer."""

    def column(name: str) -> dict[str, str]:
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in hooks.support("Forward").splitlines() if "|" in line
        ]
        return {row[0]: row[rows[0].index(f"`{name}`")] for row in rows[2:]}

    assert column("attn_fwd") | column("attn_fwd") == {
        "devices": "sm_90a", "formats": "bf16, fp16", "`head_dim`": "multiples of 8, 8 to 256",
        "`head_dim_v`": "multiples of 8, 8 to 256", **dict.fromkeys([*hooks.OF_OPERATION["Forward"]], "yes"),
    }  # fmt: skip
    assert column("cpu")["`constant_time`"] == "no"
    supports = ATTN_FWD.supports
    monkeypatch.setattr(type(ATTN_FWD), "supports", lambda self, op, device: supports(op, device) or ["no sinks"] * op.sinks)
    assert column("attn_fwd")["sinks"] == "no" and column("attn_fwd")["causal"] == "yes"


def test_support_of_gradients(hooks: Any) -> None:
    """Only a kernel whose choice changes with ``deterministic`` is said to be faster without."""
    names, *_, last = [line for line in hooks.support("Backward").splitlines() if line.startswith("|")]
    found = dict(zip(names.split("|")[2:-1], last.split("|")[2:-1], strict=True))
    assert "deterministic" in last
    assert [name.strip(" `") for name, cell in found.items() if cell.strip() == "faster, other bits"] == ["attn_bwd_mma"]


def test_kinds_of_sizes() -> None:
    """The page on deployment says from which sizes on there are other kernels, that on memory what they leave."""
    text = " ".join((DOCS / "deploy.md").read_text().split())
    for sentence in (
        f"few queries (up to {FEW_QUERIES} rows of the heads that share a key head)",
        f"few tiles of queries: up to {SPARSE_TILES} of 64 rows, over {SPLIT_KEYS} keys or more",
        f"{SPARSE_TILES + 1} to {UNEVEN_TILES} such tiles of {UNEVEN_QUERIES} queries or more, over {UNEVEN_KEYS} keys or more",
        f"few queries with up to {SHARED_ROWS} rows, and any over fewer than {SPLIT_KEYS} keys",
        "sequences of up to 64, of up to 128, and under a causal mask or a window with head_dim 72 to 128 of 193 to 256 tokens",
    ):
        assert sentence in text, sentence
    assert f"up to {MOST_SCRATCH >> 20} MB" in (DOCS / "memory.md").read_text()


def test_numbers(hooks: Any) -> None:
    assert hooks.spanned([1, 2, 3]) == "1 to 3" and hooks.spanned([16, 32, 48]) == "multiples of 16, 16 to 48"
    with pytest.raises(ValueError, match="without a simple rule"):
        hooks.spanned([8, 16, 32])


def test_parts_of_sources(hooks: Any) -> None:
    part = hooks.cuda("attn_fwd.cu __device__ void pack_p")
    assert (
        part.splitlines()[1] == "__device__ void pack_p(const Drawn& drawn) {"
        and part.splitlines()[-2] == "}"
        and part.count("\n") == 5
    )
    for words in ("attn_fwd.cu no such thing", "none.cu void"):
        with pytest.raises((StopIteration, FileNotFoundError)):
            hooks.cuda(words)


def test_records_name_their_run(hooks: Any) -> None:
    filled = hooks.record("h200/decode.md 1")
    assert "| rawattn, us |" in filled and "ours" not in filled
    assert re.search(r"<small>NVIDIA H200, \d{4}-\d\d-\d\d, commit [0-9a-f]{8}, NVRTC [\d.]+: perf/record/h200/decode.md", filled)
    with pytest.raises(IndexError):
        hooks.record("h200/decode.md 9")


def test_barriers_of_the_drawing(hooks: Any) -> None:
    """Every stage is filled once and given back by both consumers, and no tile is loaded before that."""
    timeline = hooks.timeline
    found = timeline.simulated()
    for name in ("k", "v"):
        full = [found.arrivals[f"{name}_full", use][0][0] for use in range(timeline.TILES)]
        empty = [[at for at, _ in found.arrivals[f"{name}_empty", use]] for use in range(timeline.TILES)]
        assert all(len(given) == timeline.CONSUMERS and min(given) > at for given, at in zip(empty, full, strict=True))
        assert all(
            full[use] >= max(empty[use - timeline.STAGES]) + timeline.COPY for use in range(timeline.STAGES, timeline.TILES)
        )
    busy = sorted((box.begin, box.end) for box in found.boxes if box.lane == "tensor cores")
    assert len(busy) == 4 * timeline.TILES and all(a[1] <= b[0] for a, b in itertools.pairwise(busy))
    assert timeline.svg(found).count("<rect") == len(found.boxes)


def test_a_barrier_that_nobody_arrives_at(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = hooks.timeline.consumer
    monkeypatch.setattr(hooks.timeline, "consumer", lambda i: (s for s in steps(i) if s[:2] != ("arrive", ("v_empty", 0))))
    with pytest.raises(AssertionError, match="waits for ever"):
        hooks.timeline.simulated()

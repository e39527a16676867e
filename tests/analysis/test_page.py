from __future__ import annotations

import copy
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lifecycle.analysis import Warehouse, build_report, find_sources, find_violations, write_page
from lifecycle.analysis.plots import nice_ticks
from lifecycle.errors import ConfigurationError
from tests.analysis.conftest import Lines
from tests.analysis.faults import broken_chain

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Outline(HTMLParser):
    """Collects what a page holds, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.plots: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what begins."""
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section" and values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "svg" and values.get("class") == "plot":
            self.plots.append(str(values["aria-label"]))
        self.rows += tag == "tr"
        self.links += [str(values[key]) for key in ("href", "src") if values.get(key)]

    def handle_endtag(self, tag: str) -> None:
        """Check that it is the last one opened."""
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(run_log: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the good run."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    with Warehouse(find_sources([run_log]), strict=True) as warehouse:
        violations = find_violations(warehouse)
        write_page(
            build_report(warehouse, violations),
            path,
            drawings={"rollout": '<?xml version="1.0"?><svg id="m"></svg>'},
        )
    return path.read_text()


def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    """Tags close, every link stays inside the page, and its policy forbids the network."""
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert all(link.startswith("#") for link in outline.links)
    assert {link[1:] for link in outline.links} == set(outline.ids)
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\(", page)


def test_the_page_has_the_plots_the_machine_and_the_tables(page: str) -> None:
    """Distributions and time series are drawn, the machine is inside without its XML head, the verdict is said."""
    outline = Outline()
    outline.feed(page)
    for plot in (
        "Requests in flight",
        "Tokens per second",
        "Time to first token",
        "Abort latency",
        "Staleness",
    ):
        assert plot in outline.plots
    assert {
        "rollouts",
        "tokens",
        "transitions",
        "aborts",
        "strategies",
        "workers",
        "gate",
        "variants",
    } <= set(outline.ids)
    assert '<svg id="m">' in page
    assert "<?xml" not in page
    assert "strict: no violations" in page
    assert outline.rows > 60


def test_what_logs_say_cannot_become_markup(
    good_lines: Lines, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Names from a log are text: an id with a script in it stays an id."""
    evil = "<script>alert(1)</script>"
    lines = copy.deepcopy(good_lines)
    at = broken_chain(lines)
    victim = lines[at]["rollout_id"]
    for line in lines:
        if line.get("rollout_id") == victim:
            line["rollout_id"] = evil
        if line.get("worker") == "http://10.0.0.1:30000":
            line["worker"] = evil
    with Warehouse(find_sources([write(lines)]), strict=True) as warehouse:
        violations = find_violations(warehouse)
        assert [violation.rollout_id for violation in violations] == [evil]
        write_page(build_report(warehouse, violations), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert evil not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 3
    assert "1 violations: 1 x broken_chain" in text


def test_a_report_on_nothing_is_a_page_too(tmp_path: Path) -> None:
    """An empty log gives a page without plots."""
    (tmp_path / "empty.jsonl").write_text("")
    with Warehouse(find_sources([tmp_path / "empty.jsonl"])) as warehouse:
        write_page(build_report(warehouse), tmp_path / "page.html")
    outline = Outline()
    outline.feed((tmp_path / "page.html").read_text())
    assert outline.plots == []


def test_a_place_that_cannot_be_written_is_named(run_log: Path, tmp_path: Path) -> None:
    """The error names the file."""
    with Warehouse(find_sources([run_log])) as warehouse:
        report = build_report(warehouse)
    with pytest.raises(ConfigurationError, match="cannot write the page"):
        write_page(report, tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize("top", [0, 0.003, 0.9, 1, 7, 10, 11, 99, 1234, 5e6])
def test_axes_have_few_round_steps_that_reach_the_top(top: float) -> None:
    """Ticks are multiples of 1, 2, 2.5 or 5, start at zero and cover the largest value."""
    ticks = nice_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top * (1 - 1e-9)
    assert 2 <= len(ticks) <= 6

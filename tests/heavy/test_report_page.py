from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.generate_log import write_log
from lifecycle.analysis import find_sources
from lifecycle.cli.report import make_report, write_html
from tests.heavy.chromium import Tab, chromium

WIDTHS = (1280, 480)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with crashes and restarts, as `lifecycle report --strict --html` writes it."""
    directory = tmp_path_factory.mktemp("page")
    write_log(directory / "log.jsonl", 20_000, seed=7, groups_per_step=24, crash_every=5, restart_every=4)
    write_html(make_report(find_sources([directory / "log.jsonl"]), strict=True), directory / "report.html")
    return directory / "report.html"


def browse(
    tmp_path: Path, page: Path, width: int, visit: Callable[[Tab], Awaitable[None]], *, dark: bool = False
) -> Tab:
    """Open the page in a fresh browser and let `visit` look at it."""
    address = page.resolve().as_uri()

    async def session() -> Tab:
        async with asyncio.timeout(50), chromium(tmp_path / "profile") as tab:
            await tab.open(address, width, dark=dark)
            await visit(tab)
            return tab

    return asyncio.run(session())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_loads_whole_and_silent_at_any_width(width: int, page: Path, tmp_path: Path) -> None:
    """No complaint on the console, nothing asked of the network, nothing wider than the window."""
    pictures: list[bytes] = []

    async def visit(tab: Tab) -> None:
        assert await tab.run("document.documentElement.scrollWidth") <= width
        plots = await tab.run(
            "[...document.querySelectorAll('svg.plot')].map(p => [p.getAttribute('aria-label'),"
            " p.getBoundingClientRect().width, p.querySelectorAll('rect,polyline,circle').length])"
        )
        names = {name for name, _, _ in plots}
        assert {"Requests in flight", "Tokens per second", "Time to first token", "Abort latency"} <= names
        assert all(200 < drawn <= width and marks > 0 for _, drawn, marks in plots)
        machines = await tab.run(
            "[...document.querySelectorAll('.machine svg')].map(s => [s.getBoundingClientRect().width,"
            " s.textContent.includes('dispatch') || s.textContent.includes('pause')])"
        )
        assert len(machines) == 2
        assert all(drawn > 400 and told for drawn, told in machines)
        assert await tab.run("document.querySelector('.verdict.good').textContent") == (
            "strict: no violations (11 kinds checked)"
        )
        overflowing = await tab.run(
            "[...document.querySelectorAll('.tile b, h1, figcaption')]"
            ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
        )
        assert overflowing == []
        pictures.append(await tab.photograph())

    tab = browse(tmp_path, page, width, visit)
    assert tab.complaints == []
    assert pictures[0].startswith(b"\x89PNG")
    (tmp_path / f"{width}.png").write_bytes(pictures[0])


def test_tables_sort_by_click_and_by_key(page: Path, tmp_path: Path) -> None:
    """Numbers sort as numbers, both ways; text sorts as text; the column says so to a screen reader."""
    column = "[...document.querySelectorAll('#transitions tbody tr')].map(r => Number(r.cells[3].dataset.v))"
    words = "[...document.querySelectorAll('#transitions tbody tr')].map(r => r.cells[1].textContent)"
    head = "document.querySelectorAll('#transitions th')"

    async def visit(tab: Tab) -> None:
        before = await tab.run(column)
        assert len(before) > 8
        await tab.run(f"{head}[3].querySelector('button').click()")
        assert await tab.run(column) == sorted(before, reverse=True)
        assert await tab.run(f"{head}[3].getAttribute('aria-sort')") == "descending"
        await tab.run(f"{head}[3].querySelector('button').click()")
        assert await tab.run(column) == sorted(before)
        assert await tab.run(f"{head}[3].getAttribute('aria-sort')") == "ascending"
        await tab.run(f"{head}[1].querySelector('button').focus()")
        for kind in ("keyDown", "keyUp"):
            await tab.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                text="\r",
                windowsVirtualKeyCode=13,
            )
        assert await tab.run(words) == sorted(await tab.run(words))
        assert await tab.run(f"{head}[3].getAttribute('aria-sort')") is None

    assert browse(tmp_path, page, 1280, visit).complaints == []


def test_the_page_follows_a_dark_theme(page: Path, tmp_path: Path) -> None:
    """Text stays readable on the dark paper: contrast at least 4.5 to 1 for text and its softer form."""
    contrast = """
        (() => {
          const light = (c) => {
            const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
              .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const paper = light(getComputedStyle(document.querySelector('.tile')).backgroundColor);
          return ['h1', '.note', '.tile span', 'td'].map((s) => {
            const ink = light(getComputedStyle(document.querySelector(s)).color);
            return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
          });
        })()
    """
    for dark in (False, True):
        (tmp_path / str(dark)).mkdir()

        async def visit(tab: Tab, *, dark: bool = dark) -> None:
            background = await tab.run("getComputedStyle(document.body).backgroundColor")
            brightness = sum(int(part) for part in background[4:-1].split(",")) / 3
            assert (brightness < 80) == dark
            assert min(await tab.run(contrast)) >= 4.5

        browse(tmp_path / str(dark), page, 1280, visit, dark=dark)

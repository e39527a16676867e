from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from lifecycle.analysis import VIOLATION_KINDS, find_sources, to_parquet
from lifecycle.log import RECORD_TYPES
from lifecycle.log.records import event_name

PAGE = Path(__file__).parents[2].joinpath("docs", "logs.md").read_text()
QUERIES = re.findall(r"\*\*(.+?)\*\*[^`]*```sql\n(.+?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def log(run_log: Path, tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    """The good run as the page tells a reader to open it."""
    path = tmp_path_factory.mktemp("page") / "run.parquet"
    to_parquet(find_sources([run_log]), path)
    connection = duckdb.connect()
    connection.execute(f"CREATE VIEW log AS FROM '{path}'")
    return connection


def test_the_page_has_five_questions() -> None:
    """Each with a query."""
    assert len(QUERIES) == 5


@pytest.mark.parametrize(("question", "query"), QUERIES, ids=[question for question, _ in QUERIES])
def test_each_query_of_the_page_answers(question: str, query: str, log: duckdb.DuckDBPyConnection) -> None:
    """The queries run as they are printed and find something in a run with everything in it."""
    assert question.endswith("?")
    assert log.execute(query).fetchall()


def test_the_page_names_every_kind_and_every_event() -> None:
    """What `--strict` forbids and what the log holds is all on the page."""
    for kind, meaning in VIOLATION_KINDS.items():
        assert f"| `{kind}` | {meaning}" in PAGE, kind
    for record_type in RECORD_TYPES:
        name = event_name(record_type)
        assert f"`{name}`" in PAGE or name.startswith("group."), name

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lifecycle.analysis import find_sources, tell_story
from lifecycle.errors import ConfigurationError
from tests.analysis.conftest import Lines


def test_a_story_has_a_sentence_for_every_line_of_the_rollout(run_log: Path, good_lines: Lines) -> None:
    """A rollout that crashed, was brought back, aborted and finished is told in order, with places."""
    crossing = [
        line for line in good_lines if line["event"] == "rollout.restored" and line["reason"] == "crash"
    ]
    rollout = next(
        line["rollout_id"]
        for line in crossing
        if any(
            other.get("rollout_id") == line["rollout_id"] and other.get("disposition") == "delivered"
            for other in good_lines
        )
    )
    own = [index + 1 for index, line in enumerate(good_lines) if line.get("rollout_id") == rollout]
    story = tell_story(rollout, find_sources([run_log]))
    told = [sentence for sentence in story if not sentence.text.startswith("in process ")]
    assert sorted(sentence.line for sentence in told) == own
    assert [sentence.at for sentence in story] == sorted(sentence.at for sentence in story)
    text = "\n".join(map(str, story))
    processes = {line["process_id"] for line in good_lines if line.get("rollout_id") == rollout}
    for process in processes:
        assert f"in process {process}" in text
    assert "attempt 1 was sent (rid " in text
    assert re.search(r"was brought back from process \S+ as \w+ with [\d,]+ tokens.* \(crash\)", text)
    assert re.search(r"came to rest completed with [\d,]+ tokens of versions? \d", text)
    assert re.search(r"was delivered \(completed, [\d,]+ tokens, \d+ versions behind\)", text)


def test_aborts_losses_and_late_triggers_have_words(run_log: Path, good_lines: Lines) -> None:
    """Every kind of move of the run reads as a sentence, and says why."""
    sources = find_sources([run_log])
    wanted = {
        "expire": "not answered in time",
        "lose": "the stream was lost",
        "confirm": "the server confirmed the abort",
        "preempt": "the server ended it unasked",
        "reject": "it was rejected",
    }
    for trigger, words in wanted.items():
        line = next(line for line in good_lines if line.get("trigger") == trigger)
        text = "\n".join(map(str, tell_story(line["rollout_id"], sources)))
        assert words in text, trigger
        assert f"({line['reason']}" in text, trigger
    late = next(
        line for line in good_lines if line.get("trigger") == "abort" and line["source"] == line["dest"]
    )
    assert "abort came too late: it stayed aborting" in "\n".join(
        map(str, tell_story(late["rollout_id"], sources))
    )


def test_an_unknown_rollout_is_said_to_be_unknown(run_log: Path) -> None:
    """An id that no line names is an error, also when it is the beginning of one that exists."""
    with pytest.raises(ConfigurationError, match="no line of a rollout 'p00000'"):
        tell_story("p00000", find_sources([run_log]))

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lifecycle.cli.prompts import Sampling, fingerprint, read_prompts
from lifecycle.errors import ConfigurationError
from tests.cli.conftest import lifecycle

Write = Callable[..., Path]
ONE = Sampling(samples_per_prompt=1, max_new_tokens=8)


def test_a_prompt_becomes_a_group_of_n_requests(prompts: Write) -> None:
    """Ids, indices and sizes follow from the line and from --samples-per-prompt."""
    file = prompts({"id": "a", "prompt": "x"}, "", {"input_ids": [1, 2], "max_new_tokens": 3})
    first, second = read_prompts(file, Sampling(samples_per_prompt=2, max_new_tokens=8, seed=5))
    assert [request.id for request in first.requests] == ["a/0", "a/1"]
    assert [(r.group, r.group_size, r.index, r.text) for r in first.requests] == [
        ("a", 2, 0, "x"),
        ("a", 2, 1, "x"),
    ]
    assert second.group_id == "p3"
    assert second.requests[0].prompt_ids == (1, 2)
    assert (first.requests[0].max_new_tokens, second.requests[0].max_new_tokens) == (8, 3)
    seeds = [request.sampling_params["sampling_seed"] for request in (*first.requests, *second.requests)]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": "x", "input_ids": [1]}', "exactly one of them, not both"),
        ("{}", "not neither"),
        ('{"prompt": "x", "max_tokens": 5}', "max_tokens"),
        ('{"input_ids": [1, "b"]}', "input_ids"),
        ('{"input_ids": []}', "prompt_ids must not be empty"),
        ('{"prompt": ""}', "text must not be empty"),
        ('{"prompt": "x", "max_new_tokens": -1}', "max_new_tokens"),
        ('{"prompt": "x", "sampling_params": {"n": 2}}', "sampling_params['n']"),
        ('{"prompt": "x", "sampling_params": []}', "sampling_params"),
        ('{"id": "a", "prompt": "x"}', "field `id`: 'a' was used in line 1"),
        ("\xff", "line 2"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field(prompts: Write, line: str, words: str) -> None:
    """The message says where it is and what would be right."""
    file = prompts({"id": "a", "prompt": "x"}, line)
    with pytest.raises(ConfigurationError) as caught:
        read_prompts(file, ONE)
    assert f"{file}, line 2" in str(caught.value)
    assert words in str(caught.value)


def test_a_file_without_prompts_is_refused(prompts: Write, tmp_path: Path) -> None:
    """Neither an empty file nor a missing one starts anything."""
    with pytest.raises(ConfigurationError, match="holds no prompts"):
        read_prompts(prompts(""), ONE)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_prompts(tmp_path / "absent.jsonl", ONE)


def test_the_fingerprint_sees_what_decides_the_output(prompts: Write) -> None:
    """Other words, other limits and other sampling make other runs; metadata does not."""

    def of(sampling: Sampling = ONE, **line: Any) -> str:
        return fingerprint(read_prompts(prompts({"id": "a", "prompt": "x", **line}), sampling))

    same = of()
    assert of(metadata={"k": 1}) == same
    assert of(prompt="y") != same
    assert of(max_new_tokens=9) != same
    assert of(sampling_params={"temperature": 0.5}) != same
    assert of(Sampling(samples_per_prompt=1, max_new_tokens=8, seed=1)) != same


def test_bad_input_is_exit_2_and_starts_nothing(prompts: Write, tmp_path: Path) -> None:
    """A malformed line ends the command before a directory is made."""
    file = prompts({"prompt": "fine"}, '{"prompt": 1}')
    done = lifecycle("run", file, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert f"{file}, line 2" in done.stderr
    assert "prompt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()

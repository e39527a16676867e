from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from lifecycle import Backend, LifecycleEngine, RolloutRequest, RolloutState
from lifecycle.call import Call

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "embedding.md").read_text(), re.DOTALL)


def run_block(word: str) -> dict[str, Any]:
    """The names that the block with this word defines."""
    (block,) = [block for block in BLOCKS if word in block]
    module = ModuleType("block")
    exec(compile(block, "embedding.md", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports exist and definitions are valid."""
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], "embedding.md", "exec", dont_inherit=True), {"__name__": "block"})


def test_every_link_of_the_page_leads_somewhere() -> None:
    """Relative links name files of the project."""
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / "embedding.md").read_text()):
        assert target.startswith("http") or (DOCS / target).exists(), target


def test_the_one_shot_backend_of_the_page_works() -> None:
    """It resumes after an abort nobody asked for, ends when told to, and refuses what it does not know."""
    names = run_block("class OneShotBackend")
    answer = names["Answer"]

    async def scenario() -> None:
        sent, told = anyio.Event(), anyio.Event()

        async def generate(call: Call) -> Any:
            if call.rollout_id == "hangs":
                sent.set()
                await told.wait()
                return answer([(-0.5, 9)], "abort", "1")
            if call.rollout_id == "odd":
                return answer([], "new", "1")
            if call.attempt == 1:
                return answer([(-0.5, 1)], "abort", "1")
            assert call.input_ids == [7, 1]
            return answer([(-0.5, 2)], "stop", "2")

        async def cancel(_rid: str) -> None:
            told.set()

        backend = names["OneShotBackend"](generate, cancel)
        assert isinstance(backend, Backend)
        async with LifecycleEngine(backend) as engine:
            whole = await engine.generate(RolloutRequest(id="resumes", prompt_ids=[7]))
            assert (list(whole.tokens), whole.state) == ([1, 2], RolloutState.COMPLETED)
            odd = await engine.generate(RolloutRequest(id="odd", prompt_ids=[7]))
            assert odd.state is RolloutState.FAILED
            handle = engine.submit(RolloutRequest(id="hangs", prompt_ids=[7]))
            await sent.wait()
            report = await engine.abort([handle])
            assert report.counts == {"confirmed": 1}
            assert list(handle.snapshot().tokens) == [9]

    anyio.run(scenario)

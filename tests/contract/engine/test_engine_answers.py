"""What an engine makes of the ways in which a server answers and ends by itself."""

from __future__ import annotations

from random import Random

import pytest

from lifecycle.engine.decide import BREAKS_ALLOWED
from lifecycle.events import VersionSpan
from lifecycle.states import FinishReason, Reason, RolloutState
from tests.contract.engine.site import PROMPT, TEXT, Site
from tests.contract.versions import CHECKS_PARAMETERS, REPORTS_SPANS, since

pytestmark = [pytest.mark.contract, pytest.mark.anyio]

SHORT = 40


def first_shown_late(site: Site) -> int:
    """The position, in the answer to ``PROMPT``, of the last letter that was not shown before it."""
    tokens = site.answer(PROMPT, SHORT).tokens
    letters = [at for at, token in enumerate(tokens) if chr(33 + token).isalnum() and token < 94]
    return next(at for at in reversed(letters) if tokens[at] not in tokens[:at])


@pytest.mark.parametrize("transport", ["auto", "httpx"])
async def test_a_completion(site: Site, transport: str) -> None:
    """All tokens and logprobs, one attempt, and every token of the version that the server names."""
    async with site.engine(transport=transport) as engine:
        snapshot = await engine.generate(site.request(count=SHORT))
    assert snapshot.state is RolloutState.COMPLETED
    assert snapshot.finish_reason is FinishReason.LENGTH
    site.check(snapshot)
    (version,) = site.versions()
    source = "span" if since(site.version, REPORTS_SPANS) else "label"
    assert snapshot.spans == (VersionSpan(version, 0, SHORT, source),)
    (attempt,) = snapshot.attempts
    assert attempt.worker == (None if site.routed else site.url)


async def test_a_text_prompt(site: Site) -> None:
    """A text is turned into ids by a worker, and answered like these ids."""
    async with site.engine() as engine:
        snapshot = await engine.generate(site.request(count=SHORT, text=TEXT))
    assert snapshot.prompt_ids == PROMPT
    site.check(snapshot)


async def test_a_budget_of_one_token(site: Site) -> None:
    """One token and the end, though the server says both in one chunk."""
    async with site.engine() as engine:
        snapshot = await engine.generate(site.request(count=1))
    assert snapshot.finish_reason is FinishReason.LENGTH
    site.check(snapshot)


async def test_a_budget_of_nothing(site: Site) -> None:
    """It is complete without a request."""
    async with site.engine() as engine:
        snapshot = await engine.generate(site.request(count=0))
    assert snapshot.state is RolloutState.COMPLETED
    assert snapshot.finish_reason is FinishReason.LENGTH
    assert snapshot.attempts == ()


async def test_a_stop_token(site: Site) -> None:
    """It ends the rollout and is its last token."""
    end = first_shown_late(site)
    expected = site.answer(PROMPT, SHORT)
    stop = expected.tokens[end]
    async with site.engine() as engine:
        snapshot = await engine.generate(
            site.request(count=SHORT, sampling={"ignore_eos": False, "stop_token_ids": [stop]})
        )
    assert snapshot.finish_reason is FinishReason.STOP
    assert snapshot.matched == stop
    assert snapshot.tokens.tolist() == expected.tokens[: end + 1]


async def test_a_stop_token_that_is_to_be_ignored(site: Site) -> None:
    """``ignore_eos`` holds for ``stop_token_ids`` as well, on the server and in what the engine thinks complete."""
    stop = site.answer(PROMPT, SHORT).tokens[first_shown_late(site)]
    async with site.engine() as engine:
        request = site.request(count=SHORT, sampling={"ignore_eos": True, "stop_token_ids": [stop]})
        snapshot = await engine.generate(request)
    assert snapshot.finish_reason is FinishReason.LENGTH
    site.check(snapshot)


async def test_a_stop_string(site: Site) -> None:
    """It ends the rollout and its tokens are kept, though the server cuts it off the text."""
    end = first_shown_late(site)
    expected = site.answer(PROMPT, SHORT)
    stop = chr(33 + expected.tokens[end])
    async with site.engine() as engine:
        snapshot = await engine.generate(site.request(count=SHORT, sampling={"stop": [stop]}))
    assert snapshot.finish_reason is FinishReason.STOP
    assert snapshot.matched == stop
    assert snapshot.tokens.tolist() == expected.tokens[: end + 1]
    assert snapshot.logprobs.tolist() == pytest.approx(expected.logprobs[: end + 1], abs=1e-5)


async def test_a_prompt_that_is_too_long(site: Site) -> None:
    """An error within the stream fails the rollout at once, in the server's words."""
    async with site.engine() as engine:
        snapshot = await engine.generate(site.request(prompt_ids=PROMPT * 8000))
    assert snapshot.state is RolloutState.FAILED
    assert snapshot.reason is Reason.REFUSED
    assert "context length" in (snapshot.detail or "")
    assert len(snapshot.attempts) == 1


async def test_a_parameter_of_the_wrong_type(site: Site) -> None:
    """A refusal before any stream fails the rollout at once, whoever refuses: server or router.

    A server that does not check it breaks the stream, which might be anybody's fault: that is tried again, and ends.
    """
    checked = site.routed or since(site.version, CHECKS_PARAMETERS)
    async with site.engine() as engine:
        snapshot = await engine.generate(site.request(sampling={"top_p": "high"}))
    assert snapshot.state is RolloutState.FAILED
    assert snapshot.reason is (Reason.REFUSED if checked else Reason.ATTEMPTS)
    assert snapshot.detail
    assert len(snapshot.attempts) == (1 if checked else BREAKS_ALLOWED * engine.policy.max_attempts)


async def test_a_rid_that_is_taken(site: Site) -> None:
    """A request id that somebody else uses just now is refused, and not tried again."""
    rid = f"{Random(5).getrandbits(128):032x}"
    async with site.full(rid=rid), site.engine(random=Random(5)) as engine:
        snapshot = await engine.generate(site.request())
    (attempt,) = snapshot.attempts
    assert attempt.rid == rid
    assert snapshot.state is RolloutState.FAILED
    assert "Duplicate request ID" in (snapshot.detail or "")

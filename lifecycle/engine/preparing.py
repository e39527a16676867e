"""Text prompts: turned into ids once, before the first dispatch, because a resume needs ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle.engine.core import Core
from lifecycle.errors import BackendUnreachable, LifecycleError
from lifecycle.rollout import Rollout
from lifecycle.states import Reason, RolloutState, Trigger

if TYPE_CHECKING:
    from lifecycle.backend import Backend


async def prepare(core: Core, backend: Backend, rollout: Rollout) -> None:
    """Ask for the ids of a rollout's prompt, and queue it again with them."""
    try:
        ids = tuple(await backend.tokenize(rollout.request.text or ""))
    except BackendUnreachable as error:
        _later(core, rollout, str(error))
    except LifecycleError as error:
        _never(core, rollout, str(error))
    except Exception as error:  # noqa: BLE001  an adapter that raises must not take the other rollouts with it
        _never(core, rollout, f"tokenising raised {type(error).__name__}")
    else:
        if ids:
            _now(core, rollout, ids)
        else:
            _never(core, rollout, "the prompt has no tokens")


def _now(core: Core, rollout: Rollout, ids: tuple[int, ...]) -> None:
    core.preparing.discard(rollout.id)
    core.outage.probe_ended()
    rollout.prompt_ids = ids
    core.recorder.save(rollout)  # another process must go on from these ids, not from its own
    if rollout.state is RolloutState.PENDING:
        core.enqueue(rollout)


def _later(core: Core, rollout: Rollout, detail: str) -> None:
    """No worker could be asked: the same again after a while, like a request that nobody took."""
    core.preparing.discard(rollout.id)
    if rollout.state is RolloutState.PENDING:
        core.enqueue(rollout)
    core.note_outage(Reason.UNREACHABLE, detail)


def _never(core: Core, rollout: Rollout, detail: str) -> None:
    """The prompt has no ids and never will."""
    core.preparing.discard(rollout.id)
    core.outage.probe_ended()
    if rollout.state is RolloutState.PENDING:
        now = core.clock.monotonic()
        core.settle(rollout, rollout.move(Trigger.REJECT, now, reason=Reason.MALFORMED, detail=detail))

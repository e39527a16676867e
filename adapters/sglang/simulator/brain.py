"""A simulated SGLang server without sockets: requests go in, ``step()`` moves it, ``poll()`` gives response bytes.

Everything is deterministic and synchronous: no clock, no thread, no randomness beyond the seeds. The ASGI app is a
shell around this; property tests drive it directly and so decide themselves when the scheduler runs, when a reader
reads, and what arrives in between.

    brain = Brain(ServerSettings(mode="incremental", seed=7))
    request = brain.submit({"rid": "a", "input_ids": [1, 2], "stream": True, "sampling_params": {"max_new_tokens": 3}})
    while brain.busy:
        brain.step()
        for item in brain.poll(request):        # events as bytes, the last is [DONE], then Mark.END
            ...

Two processes make up the real server, and two rules of theirs are kept because clients trip over them. An abort is
looked up by its exact rid first (unknown: dropped, with a 200) and only then matched by *prefix*. And a request that
arrives during a pause is known but not yet dispatched: an abort of it is remembered as sent, and lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.sglang.simulator.faults import Fault, FaultKind, FaultPlan
from adapters.sglang.simulator.model import TokenModel
from adapters.sglang.simulator.request import Ending, Mark, Phase, Request
from adapters.sglang.simulator.responses import Head, head_of, response_parts
from adapters.sglang.simulator.scheduler import Scheduler
from adapters.sglang.simulator.schema import BadRequest, parse_body, refusal, resolve
from adapters.sglang.simulator.settings import PAUSE_MODES, PauseMode, ServerSettings

_ENDING_FAULTS = (FaultKind.CUT, FaultKind.ERROR_CHUNK, FaultKind.LOST_TERMINAL, FaultKind.DEATH)
_CHUNK_FAULTS = (FaultKind.WRONG_LENGTH, FaultKind.MALFORMED, FaultKind.MERGE)

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a control call: an HTTP status and a JSON-able body (None: empty)."""

    status: int = 200
    body: Any = None


class ServerDead(ConnectionError):
    """The simulated process is not there: a real client would see a refused connection."""


class Brain:
    """One simulated server. Not thread-safe: whoever steps it also submits and polls."""

    def __init__(
        self,
        settings: ServerSettings | None = None,
        faults: Iterable[Fault] = (),
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.model = TokenModel(
            self.settings.seed,
            eos_probability=self.settings.eos_probability,
            version_dependent=self.settings.version_dependent,
        )
        self.faults = FaultPlan(faults, self.settings.seed)
        self.alive = True
        self.on_death: Callable[[Fault | None], None] | None = None
        """Called when the DEATH fault (or ``kill``) strikes; for servers."""
        self.history: list[Request] = []
        """Every ended request, oldest first, if the settings say so."""
        self.submitted = 0
        self._clock = clock or (lambda: self.scheduler.now / 100)
        self._boot(now=0)

    def _boot(self, now: int) -> None:
        """The state of a process that has just started, at step ``now``."""
        self.scheduler = Scheduler(self.settings, self.model, self._forget)
        self.scheduler.now = now
        self.live: dict[str, Request] = {}
        """Requests by rid, from arrival until their terminal chunk is made."""
        self.pause_mode: PauseMode | None = None
        self._arriving: list[tuple[int, Request]] = []
        self._alarms: list[tuple[int, Request]] = []

    # -- what a test looks at -------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """The label that new tokens get."""
        return self.scheduler.version

    @property
    def busy(self) -> bool:
        """Whether a step could change anything."""
        if not self.alive:
            return False
        working = bool(self.scheduler.running or self.scheduler.waiting) and not self.scheduler.paused
        return working or bool(self._arriving or self._alarms)

    @property
    def idle(self) -> bool:
        """Nothing is left: no request waiting, running, blocked or arriving."""
        return not (self.live or self._arriving or self.scheduler.running or self.scheduler.waiting)

    @property
    def pause_settled(self) -> bool:
        """A pause in mode ``abort`` is answered only once no dispatched request is left."""
        return self.pause_mode != "abort" or not (self.scheduler.running or self.scheduler.waiting)

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, body: bytes | Mapping[str, Any]) -> Request:
        """Take a ``/generate`` body; the result is polled with ``poll``.

        Raises ``BadBody`` (HTTP 400) when it breaks the schema and ``ServerDead`` when the server is not there.
        """
        if not self.alive:
            raise ServerDead("the simulated server is dead")
        parsed = parse_body(body if isinstance(body, bytes) else dict(body))
        number, self.submitted = self.submitted, self.submitted + 1
        rid = parsed.rid or f"{number:032x}"
        request = Request(rid, number, parsed, self.faults.for_request(number, rid), self._clock())
        for fault in request.take_faults(FaultKind.REFUSE):
            self._refuse(request, fault)
            return request
        for fault in request.take_faults(FaultKind.SLOW_HEADERS):
            request.headers_at = self._alarm(request, fault.steps or 0)
        for fault in request.take_faults(FaultKind.OVERTAKEN):
            self._arriving.append((self.scheduler.now + (fault.steps or 0), request))
            return request
        self._arrive(request)
        return request

    def _refuse(self, request: Request, fault: Fault) -> None:
        status = fault.status or 503
        request.failure = {"status": status, "message": fault.message or f"Simulated refusal with {status}."}
        request.phase, request.ending = Phase.ENDED, Ending.REFUSED
        request.touch()

    def _arrive(self, request: Request) -> None:
        """The server has read the body: a duplicate rid is refused, all others are remembered under their rid."""
        if request.rid in self.live:
            self._fail(request, f"Duplicate request ID detected: {request.rid}")
            return
        self.live[request.rid] = request
        if self.pause_mode is not None:
            request.phase = Phase.BLOCKED
            return
        self._dispatch(request)

    def _dispatch(self, request: Request) -> None:
        try:
            request.prompt, request.params, request.budget = resolve(request.body, self.settings)
        except BadRequest as error:
            self._fail(request, str(error))
            return
        request.prompt_tokens = len(request.prompt)
        if request.body.return_logprob:
            request.prompt_pairs = self._prompt_pairs(request)
        self.scheduler.add(request)
        if request.live and any(fault.after == 0 for fault in request.faults):
            self._strike(request)

    def _prompt_pairs(self, request: Request) -> list[tuple[float | None, int, str | None]]:
        """Logprobs of the prompt; the first of the list has none, wherever it starts (seen on 0.5.23)."""
        start = request.body.logprob_start_len
        if start is None or not 0 <= start < len(request.prompt):
            return []
        logprobs = self.model.prompt_logprobs(request.prompt)[start:]
        first, *rest = request.prompt[start:]
        return [
            (None, first, None),
            *((value, token, None) for value, token in zip(logprobs, rest, strict=True)),
        ]

    def _fail(self, request: Request, message: str, code: int = 400) -> None:
        request.failure = {"message": message, "code": code}
        request.phase, request.ending = Phase.ENDED, Ending.ERROR
        self._forget(request)
        request.touch()

    def _forget(self, request: Request) -> None:
        """A request has ended: its rid may be used again."""
        if self.live.get(request.rid) is request:
            del self.live[request.rid]
        if self.settings.keep_history:
            self.history.append(request)

    def head(self, request: Request) -> Head | None:
        """Status and media type of the response, or None while the client still waits for its headers."""
        return head_of(request, self.scheduler.now)

    def poll(self, request: Request) -> list[bytes | Mark]:
        """What a reader finds on the connection now: everything since the last poll, merged as SGLang merges it.

        At most one chunk, then, if it was the last, ``[DONE]`` and a ``Mark``. Empty: nothing new.
        """
        if request.closed or not request.fresh or self.head(request) is None:
            return []
        if request.held_until > self.scheduler.now and request.ending is None:
            return []
        request.fresh = False
        now = self._clock()
        return response_parts(request, self.settings.incremental, now, self.scheduler.version)

    def disconnect(self, request: Request) -> None:
        """The client has closed the connection: a live request is aborted, as SGLang ≥ 0.5.20 does at once."""
        if request.closed:
            return
        request.closed = True
        self._arriving = [entry for entry in self._arriving if entry[1] is not request]
        self._alarms = [entry for entry in self._alarms if entry[1] is not request]
        if request.phase in (Phase.ARRIVING, Phase.BLOCKED):
            request.phase = Phase.ENDED
            self._forget(request)
        elif request.live and request.deaf:
            self.scheduler.drop(request, Ending.CUT)
        elif request.live:
            self.abort_known(request.rid)

    # -- time -----------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """One step of the scheduler. Returns the number of tokens it made."""
        if not self.alive:
            return 0
        now = self.scheduler.now + 1
        for due, request in [entry for entry in self._arriving if entry[0] <= now]:
            self._arriving.remove((due, request))
            self._arrive(request)
        made = self.scheduler.step()
        for request in tuple(self.scheduler.running):
            if request.faults and self.alive:
                self._strike(request)
        for due, request in [entry for entry in self._alarms if entry[0] <= now]:
            self._alarms.remove((due, request))
            request.touch()
        return made

    def _alarm(self, request: Request, steps: int) -> int:
        """Wake the reader of ``request`` again after ``steps`` steps, which is when something held is released."""
        due = self.scheduler.now + steps
        self._alarms.append((due, request))
        return due

    def _strike(self, request: Request) -> None:
        """Let the faults of the response strike whose time has come."""
        for fault in request.take_faults(*_CHUNK_FAULTS):
            if fault.kind is FaultKind.WRONG_LENGTH:
                request.off_by = fault.delta
            elif fault.kind is FaultKind.MALFORMED:
                request.broken_json = True
            else:
                request.held_until = self._alarm(request, fault.steps or 0)
        # LOST_TERMINAL without a number of tokens strikes where the request would have finished.
        due = [
            fault
            for fault in request.take_faults(*_ENDING_FAULTS)
            if not (fault.kind is FaultKind.LOST_TERMINAL and fault.after == 0 and _keep(request, fault))
        ]
        for fault in due[:1]:
            self._end_by(request, fault)

    def _end_by(self, request: Request, fault: Fault) -> None:
        self.scheduler.show(request)
        if fault.kind is FaultKind.DEATH:
            self.kill(fault)
        elif fault.kind is FaultKind.CUT:
            self.scheduler.drop(request, Ending.CUT)
        elif fault.kind is FaultKind.LOST_TERMINAL:
            request.done_marker = fault.done
            self.scheduler.drop(request, Ending.LOST)
        else:
            request.failure = {
                "message": fault.message or "Simulated error inside the stream.",
                "code": fault.status or 400,
            }
            self.scheduler.drop(request, Ending.ERROR)

    # -- control calls --------------------------------------------------------------------------------------------

    def refused(self, path: str) -> Reply | None:
        """The answer of a CONTROL_REFUSED fault to a call of ``path`` (without slash), or None: go on."""
        fault = self.faults.for_control(path)
        if fault is None:
            return None
        return Reply(fault.status or 500, {"error": {"message": fault.message or "Simulated refusal."}})

    def abort(self, rid: str = "", *, abort_all: bool = False) -> Reply:
        """``/abort_request``: 200 and an empty body whatever it matched, as on 0.5.23."""
        refused = self.refused("abort_request")
        if refused is not None:
            return refused
        for entry in [entry for entry in self._arriving if abort_all or entry[1].rid == rid]:
            # Dropped, because the server does not know the rid yet; the request is the next to arrive.
            self._arriving[self._arriving.index(entry)] = (self.scheduler.now, entry[1])
        if abort_all:
            self.scheduler.abort("", everything=True)
        elif rid in self.live:
            self.abort_known(rid)
        return Reply()

    def abort_known(self, rid: str) -> None:
        """A live rid: tell the scheduler, once. It matches by prefix, and knows only dispatched requests."""
        request = self.live[rid]
        if not request.abort_sent:
            request.abort_sent = True
            self.scheduler.abort(request.rid)

    def pause(self, mode: str = "abort") -> Reply:
        """``/pause_generation``. In mode ``abort`` the answer is due only once ``pause_settled`` is true."""
        if mode not in PAUSE_MODES:
            return Reply(400, refusal(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}"))
        refused = self.refused("pause_generation")
        if refused is not None:
            return refused
        self.pause_mode = mode  # type: ignore[assignment]
        if mode == "abort":
            self.scheduler.abort("", everything=True)
        else:
            self.scheduler.pause(retract=mode == "retract")
        return Reply(200, {"message": "Generation paused successfully.", "status": "ok"})

    def resume(self) -> Reply:
        """``/continue_generation``: the scheduler runs, and requests that were held are dispatched, oldest first."""
        refused = self.refused("continue_generation")
        if refused is not None:
            return refused
        self.pause_mode = None
        self.scheduler.paused = False
        for request in [request for request in self.live.values() if request.phase is Phase.BLOCKED]:
            self._dispatch(request)
        return Reply(200, {"message": "Generation continued successfully.", "status": "ok"})

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool = True) -> Reply:
        """``/update_weight_version``. Aborts everything unless told not to: that is SGLang's default."""
        refused = self.refused("update_weight_version")
        if refused is not None:
            return refused
        if abort_all_requests:
            self.scheduler.abort("", everything=True)
        self.scheduler.version = new_version
        message = f"Weight version updated to {new_version}"
        return Reply(200, {"success": True, "message": message, "new_version": new_version})

    def flush_cache(self) -> Reply:
        """``/flush_cache``: refused while requests run, or wait outside a pause."""
        waiting = self.scheduler.waiting and not self.scheduler.paused
        if self.scheduler.running or waiting:
            return Reply(400, "Flush cache failed.\n")
        self.scheduler.flush_cache()
        return Reply(200, _FLUSHED)

    # -- death ----------------------------------------------------------------------------------------------------

    def kill(self, fault: Fault | None = None) -> None:
        """The process dies: every open response is cut, everything it knew is gone."""
        if not self.alive:
            return
        self.alive = False
        for request in [*self.live.values(), *(entry[1] for entry in self._arriving)]:
            if request.live:
                request.headers_at = 0
                self.scheduler.drop(request, Ending.CUT)
        self._boot(self.scheduler.now)
        if self.on_death is not None:
            self.on_death(fault)

    def revive(self) -> None:
        """A new process at the same address: same weights as at the first start, no memory of any request."""
        self.alive = True


def _keep(request: Request, fault: Fault) -> bool:
    """Put a fault back that is not for now. Always true."""
    request.faults.append(fault)
    return True

"""The scheduler of the simulated server: a waiting queue, a running batch, one token per running request and step.

Sans-IO and deterministic: ``step()`` is the only thing that moves it. It knows nothing of responses; it marks on each
request what was emitted and how it ended, and ``brain.py`` turns that into bytes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from adapters.sglang.simulator.faults import Fault, FaultKind
from adapters.sglang.simulator.model import TokenModel
from adapters.sglang.simulator.request import Ending, Phase, Request
from adapters.sglang.simulator.settings import ServerSettings
from adapters.sglang.simulator.text import EOS_ID, decode

ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
_CACHE_ENTRIES = 65_536
_NON_STREAM_INTERVAL = 50
_JUNK_TOKEN = 17


class Scheduler:
    """Requests that are waiting or running, and the rules by which they move."""

    def __init__(
        self, settings: ServerSettings, model: TokenModel, on_end: Callable[[Request], None]
    ) -> None:
        self.settings = settings
        self.model = model
        self.version = settings.weight_version
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.paused = False
        self.load_in_pause: tuple[int, int] = (0, 0)
        """What ``/v1/loads`` tells during a pause: the numbers from before it (seen on 0.5.23)."""
        self.now = 0
        """Steps so far."""
        self.tokens_made = 0
        self._on_end = on_end
        self._cache: OrderedDict[int, None] = OrderedDict()

    # -- in -------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a validated request into the queue; a full queue refuses it with a 503 abort."""
        limit = self.settings.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            reason = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
            self._end_in_queue(request, reason)
            return
        request.phase = Phase.WAITING
        self.waiting.append(request)

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Admit what fits, then make one token for every running request. Returns the number of tokens made."""
        self.now += 1
        if self.paused:
            return 0
        self._admit()
        made = 0
        for request in tuple(self.running):
            if request.phase is Phase.RUNNING and not self._stalled(request):
                made += self._advance(request)
        self._relieve()
        self.tokens_made += made
        return made

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.settings.max_running_requests:
            request = self.waiting[0]
            if self.running and not self._fits(len(request.prompt) + len(request.tokens) + 1):
                return
            self.waiting.popleft()
            request.phase = Phase.RUNNING
            request.state = self._prefill(request)
            self.running.append(request)

    def _prefill(self, request: Request) -> int:
        """Fold the prefix into its hash, and look up how much of it an earlier request has left in the cache."""
        state, known, page = self.model.start(()), 0, self.settings.cache_page
        for position, token in enumerate([*request.prompt, *request.tokens], 1):
            state = self.model.extend(state, token)
            if position % page == 0:
                if state in self._cache:
                    known = position
                self._remember(state)
        if request.retractions == 0:
            request.cached_tokens = min(known, max(0, len(request.prompt) - 1))
        return state

    def _remember(self, state: int) -> None:
        self._cache[state] = None
        self._cache.move_to_end(state)
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.popitem(last=False)

    def flush_cache(self) -> None:
        """Forget all prefixes."""
        self._cache.clear()

    def _stalled(self, request: Request) -> bool:
        until = request.stalled_until
        if until is None:
            return False
        # A stalled request still obeys an abort, unless the fault made it deaf.
        obeys = request.abort_reason is not None and not request.deaf
        if (until < 0 or self.now < until) and not obeys:
            return True
        request.stalled_until = None
        return False

    def _advance(self, request: Request) -> int:
        """One forward pass for one request."""
        if self._strike(request):
            return 0
        made = 0
        if request.budget > 0:
            self._sample(request)
            made = 1
        reason = self._finish_reason(request)
        if reason is not None:
            self._finish(request, reason)
        elif not self._strike(request) and self._due(request):
            self.emit(request)
        return made

    def _sample(self, request: Request) -> None:
        model, count = self.model, len(request.tokens)
        params = request.params
        forbidden: frozenset[int] = frozenset()
        if params.min_new_tokens and count < params.min_new_tokens:
            forbidden = frozenset(params.stop_token_ids or ()) | {EOS_ID}
        salt = model.salt(self.version, params.sampling_seed)
        token, logprob = model.next(request.state, salt, forbidden)
        starts = request.version_starts
        if not starts or starts[-1][0] != self.version:
            starts.append((self.version, count))
        request.state = model.extend(request.state, token)
        request.tokens.append(token)
        shown: float | None = logprob
        if request.faults and any(
            fault.kind is FaultKind.NULL_LOGPROB and fault.after == count for fault in request.faults
        ):
            shown = None
        with_text = request.body.return_text_in_logprobs
        request.pairs.append((shown, token, decode((token,)) if with_text else None))
        if (len(request.prompt) + len(request.tokens)) % self.settings.cache_page == 0:
            self._remember(request.state)

    def _finish_reason(self, request: Request) -> dict[str, Any] | None:
        """Why a request ends after the token it just got, in SGLang's order of precedence; None: it goes on.

        An abort that came while the step was in flight beats everything, also an end-of-sequence token.
        """
        if request.abort_reason is not None:
            return request.abort_reason
        stop = request.matched_stop()
        if stop is not None:
            return {"type": "stop", "matched": stop}
        params, last = request.params, request.tokens[-1] if request.tokens else None
        stops = (EOS_ID, *(params.stop_token_ids or ())) if not params.ignore_eos else ()
        if last in stops:
            return {"type": "stop", "matched": last}
        if len(request.tokens) >= request.budget:
            return {"type": "length", "length": request.budget}
        return None

    def _due(self, request: Request) -> bool:
        """Whether the tokens so far leave the scheduler at this step."""
        if not request.stream:
            return len(request.tokens) % _NON_STREAM_INTERVAL == 0
        interval = request.params.stream_interval or self.settings.stream_interval
        unsent = len(request.tokens) - request.emitted
        if interval > 1 and unsent < interval and not (request.emitted == 0 and unsent):
            return False
        return not request.may_be_stopping()

    def emit(self, request: Request) -> None:
        """Hand the tokens so far to the client-facing side: they are now text, a label, and pollable."""
        fresh = request.tokens[request.emitted :]
        request.emitted = len(request.tokens)
        request.text.push(fresh)
        self._relabel(request)
        request.touch()

    def _relabel(self, request: Request) -> None:
        """The label of a chunk is the one its stream saw ``label_lag`` chunks earlier."""
        lag = self.settings.label_lag
        if lag == 0:
            request.label = self.version
            return
        if not request.labels:
            request.labels = [self.version] * lag
        request.labels.append(self.version)
        request.label = request.labels.pop(0)

    # -- out ------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        fresh = request.tokens[request.emitted :]
        request.emitted = len(request.tokens)
        matched = reason.get("matched")
        trim = not request.params.no_stop_trim
        if isinstance(matched, int) and trim:
            fresh = fresh[:-1]
        request.text.push(fresh, final=True)
        if isinstance(matched, str):
            text = request.text.text
            cut = text.find(matched)
            if cut >= 0:
                request.text.trim(text[: cut if trim else cut + len(matched)])
        self._relabel(request)
        self._end(request, Ending.FINISH, reason)

    def _end_in_queue(self, request: Request, reason: dict[str, Any]) -> None:
        self._end(request, Ending.QUEUE_ABORT, reason)

    def _end(self, request: Request, ending: Ending, reason: dict[str, Any] | None) -> None:
        """The one place where a request leaves the scheduler."""
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
        request.phase = Phase.ENDED
        request.finish_reason = reason
        request.ending = ending
        if ending is Ending.FINISH and reason is not None and reason["type"] != "abort":
            for fault in request.take_faults(FaultKind.LOST_TERMINAL):
                request.ending, request.done_marker = Ending.LOST, fault.done
        self._on_end(request)
        request.touch()

    def drop(self, request: Request, ending: Ending) -> None:
        """Take a request out at once, whatever it is doing: its connection is gone, or a fault ends it."""
        self._end(request, ending, None)

    # -- aborts, pauses, memory -----------------------------------------------------------------------------------

    def abort(self, prefix: str, *, everything: bool = False) -> None:
        """End every request whose rid *starts with* ``prefix`` (seen on 0.5.23: aborting ab-1 ends ab-10 too)."""
        for request in tuple(self.waiting):
            if everything or request.rid.startswith(prefix):
                self._end_in_queue(request, dict(ABORTED_IN_QUEUE))
        for request in self.running:
            if everything or request.rid.startswith(prefix):
                request.abort_reason = dict(ABORTED)

    def retract(self, request: Request) -> None:
        """Take a running request's memory and put it back into the queue; nothing is said on its stream."""
        self.running.remove(request)
        request.phase = Phase.WAITING
        request.retractions += 1
        self.waiting.append(request)

    def pause(self, *, retract: bool) -> None:
        """Make no more steps; with ``retract`` the running batch goes back into the queue."""
        if not self.paused:
            self.load_in_pause = (len(self.running), len(self.waiting))
        self.paused = True
        if retract:
            for request in tuple(self.running):
                self.retract(request)

    @property
    def load(self) -> tuple[int, int]:
        """Running and waiting requests, as ``/v1/loads`` counts them."""
        return self.load_in_pause if self.paused else (len(self.running), len(self.waiting))

    def used_tokens(self) -> int:
        """Tokens that the running requests hold in the KV cache."""
        return sum(len(request.prompt) + len(request.tokens) for request in self.running)

    def _fits(self, more: int) -> bool:
        limit = self.settings.max_total_tokens
        return limit is None or self.used_tokens() + more <= limit

    def _relieve(self) -> None:
        """Under memory pressure the newest running requests go back to the queue; the last one cannot, and dies."""
        while self.running and not self._fits(0):
            if len(self.running) > 1:
                self.retract(self.running[-1])
                continue
            message = (
                "Out of memory even after retracting all other requests in the decode batch. "
                "Aborting the last request."
            )
            reason = {"type": "abort", "message": message, "status_code": 500, "err_type": None}
            self._finish(self.running[0], reason)

    # -- faults ---------------------------------------------------------------------------------------------------

    def _strike(self, request: Request) -> bool:
        """Let the faults whose time has come strike. True if the request makes no further token in this step."""
        if not request.faults:
            return False
        for fault in request.take_faults(FaultKind.STALL, FaultKind.RETRACT, FaultKind.ABORT):
            if request.phase is not Phase.RUNNING:
                request.faults.append(fault)  # one fault at a time: this one strikes when it runs again
            elif fault.kind is FaultKind.STALL:
                self.show(request)
                request.stalled_until = -1 if fault.steps is None else self.now + fault.steps
                request.deaf = fault.deaf
            elif fault.kind is FaultKind.RETRACT:
                self.show(request)
                self.retract(request)
            else:
                self._abort_unasked(request, fault)
        return request.phase is not Phase.RUNNING or request.stalled_until is not None

    def show(self, request: Request) -> None:
        """Emit what ``stream_interval`` or a possible stop string still held back."""
        if request.emitted < len(request.tokens):
            self.emit(request)

    def _abort_unasked(self, request: Request, fault: Fault) -> None:
        message = fault.message or "Aborted"
        reason = {"type": "abort", "message": message, "status_code": fault.status, "err_type": None}
        if fault.status is not None:
            reason["err_type"] = HTTPStatus(fault.status).phrase.replace(" ", "") + "Error"
            if not request.tokens:
                # A request refused before its prefill runs it with a prompt of one token: junk comes out.
                request.prompt_tokens = 1
                request.tokens.append(_JUNK_TOKEN)
        self._finish(request, reason)

"""What is asked of the workers beside streams: pausing, labels, loads, health, tokens. A receipt from each worker.

Endpoints as seen on SGLang 0.5.23. The router serves none of them (404), so each goes to every worker behind it, and
one worker's failure never hides another's success.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from adapters.sglang.asking import Asker, NoAnswer, Reply, spread
from adapters.sglang.topology import Topologies
from lifecycle.backend import ReceiptStatus, UpdateMode, WorkerReceipt
from lifecycle.errors import BackendUnreachable, ConfigurationError

AT_ONCE = 64
PAUSES = frozenset({UpdateMode.IN_PLACE, UpdateMode.RETRACT})
Tokenizer = Callable[[str], Any]
T = TypeVar("T")


class Control:
    """Control calls to every worker behind the URLs of `topologies`."""

    def __init__(self, asker: Asker, topologies: Topologies, tokenizer: Tokenizer | None = None) -> None:
        self._asker = asker
        self._topologies = topologies
        self._tokenizer = tokenizer

    async def pause(self, mode: UpdateMode, *, deadline: float) -> list[WorkerReceipt]:
        """Pause generation on every worker: requests stay, and stay silent."""
        if mode not in PAUSES:
            raise ConfigurationError(f"pause takes in_place or retract, not {mode!r}")

        async def one(worker: str, left: float) -> WorkerReceipt:
            return await self._post(worker, "/pause_generation", {"mode": str(mode)}, left)

        return await self._everywhere(one, deadline)

    async def resume(self, version: str | None, *, deadline: float) -> list[WorkerReceipt]:
        """Publish `version`, then continue; a worker that refuses the label is continued all the same.

        The label goes first, while the batch is frozen: only then are the server's per-token spans exact.
        `abort_all_requests` must be said: its default is true (0.5.23), which would end every request.
        """

        async def one(worker: str, left: float) -> WorkerReceipt:
            stop = anyio.current_time() + left
            label = None
            if version is not None:
                body = {"new_version": version, "abort_all_requests": False}
                label = await self._post(worker, "/update_weight_version", body, left / 2)
            going = await self._post(worker, "/continue_generation", {}, stop - anyio.current_time())
            if label is None:
                return going
            if label.status is not ReceiptStatus.ACCEPTED:
                return replace(
                    label, detail=f"label not published: {label.detail}; continued: {going.status}"
                )
            return replace(going, version=version if going.status is ReceiptStatus.ACCEPTED else None)

        return await self._everywhere(one, deadline)

    async def workers(self, *, deadline: float) -> list[WorkerReceipt]:
        """Every worker's label (`/model_info`) and load (`/v1/loads`, since 0.5.9)."""
        return await self._everywhere(self._state, deadline)

    async def health(self, *, deadline: float) -> list[WorkerReceipt]:
        """Whether every worker answers `/health` with 200 (0.5.23 generates a token for that: a second or more)."""

        async def one(worker: str, left: float) -> WorkerReceipt:
            return _receipt(worker, await self._try("GET", f"{worker}/health", None, left))

        return await self._everywhere(one, deadline)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`: by the caller's tokenizer, else by the first worker that can say.

        Raises BackendUnreachable, naming each worker's answer, when none can; ConfigurationError when the caller's
        tokenizer returns no token ids.
        """
        if self._tokenizer is not None:
            return token_ids(self._tokenizer(text))
        return await self._first_worker(
            "tokenise", ("/v1/tokenize", "/tokenize"), {"prompt": text}, _server_tokens
        )

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, by the first worker that can say. Raises BackendUnreachable when none can."""
        paths, body = ("/v1/detokenize", "/detokenize"), {"tokens": list(tokens)}
        return await self._first_worker("detokenise", paths, body, _server_text)

    async def _first_worker(
        self, what: str, paths: Sequence[str], body: dict[str, Any], read: Callable[[Any], T | None]
    ) -> T:
        refusals: list[str] = []
        for worker in await self._workers(self._asker.timeout, refusals):
            for path in paths:
                reply = await self._try("POST", worker + path, body, self._asker.timeout)
                if isinstance(reply, Reply) and reply.ok:
                    found = read(reply.json())
                    if found is not None:
                        return found
                refusals.append(f"{worker}{path}: {reply.words() if isinstance(reply, Reply) else reply}")
                if not isinstance(reply, Reply) or reply.status != 404:  # noqa: PLR2004
                    break
        raise BackendUnreachable(
            f"no worker can {what} ({'; '.join(refusals) or 'none known'})"
            + (": give tokenizer= or prompt_ids=" if what == "tokenise" else "")
        )

    async def _workers(self, timeout: float, problems: list[str] | None = None) -> list[str]:
        found: dict[str, None] = {}
        for url in self._topologies.urls:
            topology = await self._topologies.get(url, timeout)
            found.update(dict.fromkeys(topology.workers))
            if problems is not None and not topology.workers:
                problems.append(topology.report())
        return list(found)

    async def _everywhere(
        self, one: Callable[[str, float], Awaitable[WorkerReceipt]], deadline: float
    ) -> list[WorkerReceipt]:
        """`one` for each worker, which gets the seconds that are left; and a receipt for each that cannot be asked."""
        stop = anyio.current_time() + deadline
        receipts: list[WorkerReceipt] = []
        workers: dict[str, None] = {}
        for url in self._topologies.urls:
            topology = await self._topologies.get(url, stop - anyio.current_time())
            workers.update(dict.fromkeys(topology.workers))
            receipts.extend(
                WorkerReceipt(worker, ReceiptStatus.UNREACHABLE, "not an HTTP worker")
                for worker in topology.unusable
            )
            if not topology.workers:
                receipts.append(WorkerReceipt(url, ReceiptStatus.UNREACHABLE, topology.report()))

        async def ask(worker: str) -> WorkerReceipt:
            return await one(worker, stop - anyio.current_time())

        receipts.extend(await spread(ask, list(workers), AT_ONCE))
        if any(receipt.status is not ReceiptStatus.ACCEPTED for receipt in receipts):
            for url in self._topologies.urls:
                self._topologies.doubt(url)
        return receipts

    async def _try(self, method: str, url: str, body: Any, left: float) -> Reply | NoAnswer:
        try:
            return await self._asker.ask(method, url, body, timeout=left)
        except NoAnswer as problem:
            return problem

    async def _post(self, worker: str, path: str, body: dict[str, Any], left: float) -> WorkerReceipt:
        return _receipt(worker, await self._try("POST", worker + path, body, left))

    async def _state(self, worker: str, left: float) -> WorkerReceipt:
        stop = anyio.current_time() + left
        info = await self._try("GET", f"{worker}/model_info", None, left)
        if isinstance(info, Reply) and info.status == 404:  # noqa: PLR2004  (before 0.5.6)
            info = await self._try("GET", f"{worker}/get_model_info", None, stop - anyio.current_time())
        receipt = _receipt(worker, info)
        if receipt.status is not ReceiptStatus.ACCEPTED or not isinstance(info, Reply):
            return receipt
        data = info.json()
        version = data.get("weight_version") if isinstance(data, dict) else None
        loads = await self._try("GET", f"{worker}/v1/loads?include=core", None, stop - anyio.current_time())
        running, waiting = _loads(loads.json()) if isinstance(loads, Reply) and loads.ok else (None, None)
        detail = None if running is not None else "loads unknown"
        return replace(
            receipt,
            detail=detail,
            version=None if version is None else str(version),
            running=running,
            waiting=waiting,
        )


def _receipt(worker: str, reply: Reply | NoAnswer) -> WorkerReceipt:
    if isinstance(reply, NoAnswer):
        return WorkerReceipt(worker, ReceiptStatus.UNREACHABLE, str(reply))
    data = reply.json()
    failed = (
        isinstance(data, dict) and data.get("success") is False
    )  # HTTP 200 does not mean that it was done
    if reply.ok and not failed:
        return WorkerReceipt(worker, ReceiptStatus.ACCEPTED)
    return WorkerReceipt(worker, ReceiptStatus.REFUSED, reply.words())


def _loads(data: Any) -> tuple[int | None, int | None]:
    """Running and waiting requests, summed over the data-parallel ranks."""
    loads = data.get("loads") if isinstance(data, dict) else None
    if not isinstance(loads, list):
        return None, None
    totals = [0, 0]
    for load in loads:
        for place, key in enumerate(("num_running_reqs", "num_waiting_reqs")):
            value = load.get(key) if isinstance(load, dict) else None
            if type(value) is not int:
                return None, None
            totals[place] += value
    return totals[0], totals[1]


def _server_text(data: Any) -> str | None:
    text = data.get("text") if isinstance(data, dict) else None
    return text if isinstance(text, str) else None


def _server_tokens(data: Any) -> list[int] | None:
    tokens = data.get("tokens") if isinstance(data, dict) else None
    if isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens):
        return tokens
    return None


def token_ids(encoded: Any) -> list[int]:
    """Token ids out of what a tokenizer returned: a list, a Hugging Face encoding, or an object with `ids`.

    Raises ConfigurationError for anything else.
    """
    if isinstance(encoded, Mapping) or hasattr(encoded, "input_ids"):
        encoded = encoded["input_ids"]
    elif hasattr(encoded, "ids"):
        encoded = encoded.ids
    if hasattr(encoded, "tolist"):
        encoded = encoded.tolist()
    if isinstance(encoded, Sequence) and all(type(token) is int and token >= 0 for token in encoded):
        return list(encoded)
    raise ConfigurationError(
        f"tokenizer= returned {type(encoded).__name__}; expected the token ids of the text, a list of whole numbers"
    )

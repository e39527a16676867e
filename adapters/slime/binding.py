"""Between slime's `Sample` and our requests and snapshots: read one, write the other. Neither is kept here."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from lifecycle.engine import LifecycleEngine
from lifecycle.errors import ConfigurationError
from lifecycle.events import VersionSpan
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot
from lifecycle.states import FinishReason, Reason, RolloutState, VersionSource

KEY = "lifecycle"
"""Where our notes are in `sample.metadata`: plain data, so that they survive slime's copies and its buffer."""

Item = RolloutRequest | Snapshot


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample stands among those of its prompt; None where nobody knows."""

    group_id: str | None = None
    size: int = 1
    index: int = 0


def notes(sample: Any) -> dict[str, Any]:
    """What was written down about a sample the last time; empty for a fresh one."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    found = metadata.get(KEY)
    return dict(found) if isinstance(found, dict) else {}


def take_note(sample: Any, **facts: Any) -> None:
    """Add to the notes. The dict is replaced, not written to: slime may share one among siblings."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    sample.metadata = {**metadata, KEY: {**notes(sample), **facts}}


def is_finished(sample: Any) -> bool:
    """Slime has it as COMPLETED or TRUNCATED."""
    status = type(sample).Status
    return sample.status in (status.COMPLETED, status.TRUNCATED)


def name_of(sample: Any) -> str:
    """How errors name it."""
    return f"slime sample {sample.index} of group {sample.group_index}"


# -- reading -------------------------------------------------------------------------------------------------------


def item_of(args: Any, sample: Any, sampling_params: Mapping[str, Any], tokenizer: Any, place: Place) -> Item:
    """A request for a fresh sample, a snapshot for one that brings tokens. Nothing that is given is changed.

    The id is the one noted on the sample; `reconciled` mints fresh ones, because slime's indices repeat. Raises ConfigurationError,
    naming the sample, for what cannot be sent.
    """
    request = _request(args, sample, sampling_params, tokenizer, place)
    if not sample.response_length and not is_finished(sample):
        return request
    response = response_of(sample)
    try:
        snapshot = Snapshot.from_prefix(request, response, _logprobs(sample), _spans(sample, len(response)))
    except ConfigurationError as error:
        raise ConfigurationError(f"{name_of(sample)}: {error}") from None
    if not is_finished(sample):
        return snapshot
    whole = sample.status is type(sample).Status.COMPLETED
    reason = FinishReason.STOP if whole else FinishReason.LENGTH
    return replace(snapshot, state=RolloutState.COMPLETED, finish_reason=reason, reason=None)


def reconciled(engine: LifecycleEngine, item: Item) -> Item:
    """The item as the engine can take it; called in the engine's loop.

    A rollout that the engine still holds goes on under its id if it is the same as slime's. Otherwise slime's view
    counts, and gets a fresh id: an id is never used for a second life in one process, the log could not tell them apart.
    """
    request = item.request if isinstance(item, Snapshot) else item
    try:
        held = engine.handle(request.id).rollout
    except KeyError:
        return _renamed(item)
    if isinstance(item, Snapshot) and held.request == request and _same_end(held, item):
        return item
    if held.at_rest:
        engine.discard(request.id, reason=Reason.REQUESTED)
    return _renamed(item)


def _same_end(held: Rollout, item: Snapshot) -> bool:
    return held.state is item.state and held.tokens == item.tokens


def _renamed(item: Item) -> Item:
    if isinstance(item, Snapshot):
        return replace(item, request=replace(item.request, id=mint(item.request.id)))
    return replace(item, id=mint(item.id))


def mint(name: str) -> str:
    """A fresh id that begins like `name`."""
    return f"{name.partition('.')[0]}.{uuid4().hex[:12]}"


def response_of(sample: Any) -> list[int]:
    """The generated ids that a sample holds."""
    if not sample.response_length:
        return []
    return list(sample.tokens[-sample.response_length :])


def _request(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], tokenizer: Any, place: Place
) -> RolloutRequest:
    if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
        raise ConfigurationError(
            f"{name_of(sample)} has image, audio or video input, which is not supported yet: "
            "use slime's own generate function for it"
        )
    params = dict(sampling_params)
    limit = params.pop("max_new_tokens", None)
    if type(limit) is not int:
        raise ConfigurationError(f"sampling_params['max_new_tokens'] must be a whole number, not {limit!r}")
    keyed = getattr(args, "router_policy", None) == "consistent_hashing"
    extra = {"return_routed_experts": True} if getattr(args, "use_rollout_routing_replay", False) else {}
    return RolloutRequest(
        id=notes(sample).get("id") or f"s{sample.index}",
        prompt_ids=_prompt_ids(sample, tokenizer),
        max_new_tokens=limit,
        sampling_params=params,
        group_id=place.group_id,
        group_size=place.size,
        index=place.index,
        metadata={"index": sample.index, "group_index": sample.group_index},
        routing_key=sample.session_id if keyed else None,
        extra=extra,
    )


def _prompt_ids(sample: Any, tokenizer: Any) -> Sequence[int]:
    if sample.tokens:
        return [int(token) for token in sample.tokens[: len(sample.tokens) - sample.response_length]]
    if not isinstance(sample.prompt, str):
        raise ConfigurationError(
            f"{name_of(sample)}: the prompt must be text, not {type(sample.prompt).__name__}; "
            "--apply-chat-template makes text of a list of messages"
        )
    ids: Sequence[int] = tokenizer.encode(sample.prompt, add_special_tokens=False)
    return ids


def _logprobs(sample: Any) -> Sequence[float] | None:
    logprobs = sample.rollout_log_probs
    return None if logprobs is None else [float(value) for value in logprobs]


def _spans(sample: Any, tokens: int) -> list[VersionSpan] | None:
    spans = notes(sample).get("spans")
    if not spans or spans[-1][2] > tokens:
        return None
    return [VersionSpan(str(version), start, end, VersionSource.GIVEN) for version, start, end in spans]


# -- writing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes snapshots back to samples. `policy` masks off-policy tokens or not; `skip_special`: of decoded text."""

    args: Any
    tokenizer: Any
    policy: Policy
    skip_special: bool = False

    def write(self, sample: Any, snapshot: Snapshot) -> None:
        """Make `sample` say what `snapshot` says: all of it or, with a ConfigurationError, nothing.

        Tokens that the sample holds already are not written again, and what slime has zeroed in its loss mask stays.
        """
        before = {name: _copied(value) for name, value in vars(sample).items()}
        try:
            self._write(sample, snapshot)
        except (ValueError, TypeError) as error:
            vars(sample).update(before)
            raise ConfigurationError(f"{name_of(sample)} cannot take its tokens: {error}") from error

    def _write(self, sample: Any, snapshot: Snapshot) -> None:
        prompt = list(snapshot.prompt_ids or ())
        held = response_of(sample)
        if not sample.tokens:
            sample.tokens = prompt
        if held and list(snapshot.tokens[: len(held)]) != held:
            _begin_again(sample, prompt)
        base = sample.response_length
        untrainable = _append(self.args, sample, snapshot, base)
        for span in snapshot.spans:
            if span.end > base and sample.weight_versions[-1:] != [span.version]:
                sample.weight_versions = [*sample.weight_versions, span.version]
        self._mask(sample, snapshot, untrainable)
        if len(snapshot.tokens) > base and self.tokenizer is not None:
            sample.response = self.tokenizer.decode(
                list(snapshot.tokens), skip_special_tokens=self.skip_special
            )
        _set_status(sample, snapshot)

    def _mask(self, sample: Any, snapshot: Snapshot, untrainable: set[int]) -> None:
        if not sample.response_length:
            return
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
        kept = self.policy.loss_mask(snapshot)
        sample.loss_mask = [
            0 if position in untrainable else old & new
            for position, (old, new) in enumerate(zip(mask, kept, strict=True))
        ]


def _append(args: Any, sample: Any, snapshot: Snapshot, base: int) -> set[int]:
    """Append what is new through slime's own method; returns positions that must not be trained on."""
    new = list(snapshot.tokens[base:])
    if not new:
        return set()
    logprobs = list(snapshot.logprobs[base:])
    unknown = {base + at for at, value in enumerate(logprobs) if value != value}  # noqa: PLR0124  NaN
    meta: dict[str, Any] = {}
    unknown |= _top_p(sample, snapshot, base, meta)
    incomplete = _routed_experts(args, snapshot, meta)
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        setattr(sample, name, _copied(getattr(sample, name)))
    sample.append_response_tokens(
        args,
        tokens=new,
        log_probs=[0.0 if value != value else value for value in logprobs],  # noqa: PLR0124  NaN
        trainable=True,
        meta_info=meta,
        text=None,
        update_terminal_info=False,
    )
    take_note(sample, untrainable=len(unknown), incomplete=incomplete)
    return unknown


def _top_p(sample: Any, snapshot: Snapshot, base: int, meta: dict[str, Any]) -> set[int]:
    """Kept token ids of top-p sampling, one row per token; a row that never came is empty and not trained on."""
    rows = rows_of(snapshot, "top_p_token_ids")
    if not rows and sample.rollout_top_p_token_offsets is None:
        return set()
    missing = {at for at in range(base, len(snapshot.tokens)) if at not in rows}
    if base and sample.rollout_top_p_token_offsets is None:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [], [0] * (base + 1)
        missing |= set(range(base))
    ids: list[int] = []
    offsets = [0]
    for at in range(base, len(snapshot.tokens)):
        ids.extend(rows.get(at, ()))
        offsets.append(len(ids))
    meta["top_p_token_ids"], meta["top_p_token_offsets"] = ids, offsets
    return missing


def rows_of(snapshot: Snapshot, name: str) -> dict[int, list[int]]:
    """A channel of JSON rows, one per token, by position; a later piece wins over an earlier one."""
    import msgspec  # noqa: PLC0415  only where a channel is used

    channel = snapshot.channels.get(name)
    rows: dict[int, list[int]] = {}
    for start, data in channel.pieces if channel is not None else ():
        for offset, row in enumerate(msgspec.json.decode(data, type=list[list[int]])):
            rows[start + offset] = row
    return rows


def _routed_experts(args: Any, snapshot: Snapshot, meta: dict[str, Any]) -> list[str]:
    """The last blob, if it covers the whole sequence (all but its last token): a resume's prefill sends all again."""
    channel = snapshot.channels.get("routed_experts")
    if channel is None:
        return ["routed_experts"] if getattr(args, "use_rollout_routing_replay", False) else []
    start, data = channel.pieces[-1]
    prompt = len(snapshot.prompt_ids or ())
    start_len = start + prompt
    rows = prompt + len(snapshot.tokens) - 1 - start_len
    if len(data) != 4 * rows * args.num_layers * args.moe_router_topk:
        return ["routed_experts"]
    meta["routed_experts"], meta["routed_experts_start_len"] = data, start_len
    return []


def _set_status(sample: Any, snapshot: Snapshot) -> None:
    status = type(sample).Status
    if notes(sample).get("state") == "failed" and snapshot.state is not RolloutState.FAILED:
        sample.remove_sample = False
    if snapshot.state is RolloutState.COMPLETED:
        stopped = snapshot.finish_reason is FinishReason.STOP
        sample.status = status.COMPLETED if stopped else status.TRUNCATED
    elif snapshot.state is RolloutState.FAILED:
        sample.status = status.FAILED
        sample.remove_sample = True  # slime zeroes its whole loss mask
    elif snapshot.state is not RolloutState.PENDING:
        sample.status = status.ABORTED
    take_note(
        sample,
        id=snapshot.id,
        group=snapshot.request.group_id,
        state=str(snapshot.state),
        reason=None if snapshot.reason is None else str(snapshot.reason),
        detail=snapshot.detail,
        spans=[[span.version, span.start, span.end] for span in snapshot.spans],
    )


def _begin_again(sample: Any, prompt: list[int]) -> None:
    """The tokens the sample holds were dropped: a restart from the prompt."""
    sample.tokens = prompt
    sample.response, sample.response_length = "", 0
    sample.loss_mask = sample.rollout_log_probs = None
    sample.weight_versions = []
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    sample.rollout_routed_experts = None


def _copied(value: Any) -> Any:
    return value[:] if isinstance(value, list | array) else value

"""What of slime the hooks touch, written anew from its behaviour in August 2026 (624b824a, pull request 2272).

Small and faithful, weaknesses included: a test that passes here must pass inside slime. `install` puts the modules
where slime's own would be imported from. Two generations are played: `cancels=True` cancels the tasks of
request-abortable generators, `cancels=False` raises a flag and aborts whole servers.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
import threading
import uuid
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

TOP_P_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
TOP_P_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")


def decoded(meta: dict[str, Any], *names: str) -> list[int] | None:
    """An int32 array of `meta_info`: bytes or a list, whichever came."""
    value = next((meta[name] for name in names if name in meta), None)
    if isinstance(value, bytes | bytearray | memoryview):
        return list(array("i", bytes(value)))
    return None if value is None else [int(item) for item in value]


@dataclass
class Sample:
    """One sample, as slime passes it around; validates its lengths last."""

    class Status(Enum):
        """There is no state for being generated, and none for being aborted."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain fields, the status by its value."""
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The reverse."""
        return Sample(**{**data, "status": Sample.Status(data["status"])})

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append, keep the arrays aligned, and look whether they are at the very end."""
        tokens = [int(token) for token in tokens or ()]
        log_probs = None if log_probs is None else [float(value) for value in log_probs]
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"log_probs length {len(log_probs)} != tokens length {len(tokens)}")
        if tokens and trainable and log_probs is None:
            raise ValueError("trainable response tokens require rollout log probabilities.")
        self.response += text or ""
        before = self.response_length
        if tokens:
            self.tokens += tokens
            self.response_length += len(tokens)
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            self.loss_mask += [1 if trainable else 0] * len(tokens)
        if log_probs is not None:
            if self.rollout_log_probs is None:
                if trainable and before:
                    raise ValueError("Cannot append trainable rollout log probabilities to a sample without.")
                self.rollout_log_probs = [0.0] * before
            self.rollout_log_probs += log_probs
        if meta_info is not None:
            self._take_meta(args, meta_info, len(tokens), update_terminal_info)
        self._check_lengths()

    def _take_meta(self, args: Any, meta: dict[str, Any], count: int, terminal: bool) -> None:
        ids, offsets = decoded(meta, *TOP_P_IDS), decoded(meta, *TOP_P_OFFSETS)
        if count and (ids is not None or offsets is not None):
            if ids is None or offsets is None or len(offsets) != count + 1 or offsets[-1] != len(ids):
                raise ValueError("top-p token offsets do not fit")
            held = list(self.rollout_top_p_token_offsets or [0])
            self.rollout_top_p_token_ids = [*(self.rollout_top_p_token_ids or []), *ids]
            self.rollout_top_p_token_offsets = [*held, *(offset + held[-1] for offset in offsets[1:])]
        experts = decoded(meta, "routed_experts")
        if experts is not None:
            rows = max(0, len(self.tokens) - 1 - int(meta.get("routed_experts_start_len", 0) or 0))
            if len(experts) != rows * args.num_layers * args.moe_router_topk:
                raise ValueError("routed_experts element count does not match sample tokens")
            width = args.num_layers * args.moe_router_topk
            self.rollout_routed_experts = [experts[row * width : (row + 1) * width] for row in range(rows)]
        if not terminal or "finish_reason" not in meta:
            return
        if "weight_version" in meta:
            self.weight_versions.append(meta["weight_version"])
        ends = {"length": "TRUNCATED", "abort": "ABORTED", "stop": "COMPLETED"}
        name = ends.get(meta["finish_reason"]["type"])
        self.status = self.status if name is None else self.Status[name]

    def _check_lengths(self) -> None:
        for name in ("loss_mask", "rollout_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(f"{name} length {len(value)} != response_length {self.response_length}")
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError("rollout_top_p_token_offsets length must equal response_length + 1")


# -- sglang_rollout ------------------------------------------------------------------------------------------------


class Singleton(type):
    """One instance per class and process, whatever it is called with."""

    instances: dict[type, Any] = {}  # noqa: RUF012

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make it the first time."""
        if cls not in Singleton.instances:
            Singleton.instances[cls] = super().__call__(*args, **kwargs)
        return Singleton.instances[cls]


def here() -> Any:
    """The module under which slime's functions look each other up; tests replace names in it."""
    return sys.modules["slime.rollout.sglang_rollout"]


class GenerateState(metaclass=Singleton):
    """The process's one state of generation."""

    cancels = True

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = here().load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * args.rollout_num_engines)
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if args.rollout_top_p != 1.0:
            self.sampling_params["custom_params"] = {"return_top_p_token_ids": True}
        if args.sglang_enable_deterministic_inference:
            seeds = range(args.rollout_seed, args.rollout_seed + args.n_samples_per_prompt)
            self.group_sampling_seeds = list(seeds)
        self.reset()

    def reset(self) -> None:
        """Between two rollouts."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False
        if self.cancels:
            self.cancellable_tasks: set[asyncio.Task[Any]] = set()
            self.active_server_generations = 0


async def run_request_abortable(state: Any, sample: Sample, call: Awaitable[Any]) -> Any:
    """A cancel that `abort` made means ABORTED, whatever the sample says by then; any other one goes on."""
    task = asyncio.current_task()
    state.cancellable_tasks.add(task)
    try:
        return await call
    except asyncio.CancelledError:
        if task in state.cancellable_tasks:
            raise
        sample.status = Sample.Status.ABORTED
        return sample
    finally:
        state.cancellable_tasks.discard(task)


async def generate_and_rm(args: Any, sample: Any, params: dict[str, Any], evaluation: bool = False) -> Any:
    """Mask, skip what is finished, generate, hook, reward: in this order."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        assert args.group_rm or sample.reward is not None
        return sample
    state = here().GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        function = load_function(sample.generate_function_path or args.custom_generate_function_path)
        extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        call = function(args, sample, params, **extra)
        if not state.cancels:
            sample = await call
        elif getattr(function, "abort_mode", None) == "request":
            sample = await run_request_abortable(state, sample, call)
        else:
            state.active_server_generations += 1
            try:
                sample = await call
            finally:
                state.active_server_generations -= 1
    if args.group_rm or sample.status == Sample.Status.ABORTED:
        return sample
    if sample.reward is None:
        sample.reward = await async_rm(args, sample)
    return sample


async def generate_and_rm_group(
    args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """All samples of one prompt, each with a copy of the parameters."""
    state = here().GenerateState(args)
    if state.aborted:
        return group
    tasks = []
    for index, sample in enumerate(group):
        sample.session_id = sample.session_id or str(uuid.uuid4())
        params = sampling_params.copy()
        if args.sglang_enable_deterministic_inference:
            params["sampling_seed"] = state.group_sampling_seeds[index]
        tasks.append(asyncio.create_task(generate_and_rm(args, sample, params, evaluation)))
    group = list(await asyncio.gather(*tasks))
    if not state.aborted and args.group_rm:
        for sample, reward in zip(group, await batched_async_rm(args, group), strict=False):
            sample.reward = reward
    return group


async def get(url: str) -> Any:
    """A JSON answer."""
    async with httpx.AsyncClient() as client:
        return (await client.get(url)).json()


async def abort_servers_until_idle(urls: list[str]) -> None:
    """Abort everything on every server until nothing runs there; no deadline."""
    async with httpx.AsyncClient() as client:
        for url in urls:
            while True:
                await client.post(f"{url}/abort_request", json={"abort_all": True})
                loads = (await client.get(f"{url}/v1/loads")).json()["loads"]
                if sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads) <= 0:
                    break
                await asyncio.sleep(0.05)


async def abort(args: Any, rollout_id: int) -> list[list[Any]]:
    """Raise the flag, cancel or abort, drain, and hand back the groups with a partial sample."""
    state = here().GenerateState(args)
    assert not state.aborted
    state.aborted = True
    cancelled: list[asyncio.Task[Any]] = []
    if state.cancels:
        cancelled = list(state.cancellable_tasks)
        state.cancellable_tasks.difference_update(cancelled)
        for task in cancelled:
            task.cancel()
    if not state.cancels or state.active_server_generations:
        answer = await here().get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
        await abort_servers_until_idle([worker["url"] for worker in answer["workers"]])
    await asyncio.gather(*cancelled, return_exceptions=True)
    back: list[list[Any]] = []
    while state.pendings:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done if args.partial_rollout else ():
            group = task.result()
            partial = any(s.status == Sample.Status.ABORTED and s.response_length > 0 for s in group)
            if state.cancels and not partial:
                continue
            for sample in group:
                if sample.response and "start_rollout_id" not in sample.metadata:
                    sample.metadata["start_rollout_id"] = rollout_id
            back.append(group)
    return back


async def generate_rollout_async(args: Any, rollout_id: int, get_samples: Any) -> tuple[Any, list[Any]]:
    """Keep enough groups under way, take the first ones that are done, abort the others."""
    state = here().GenerateState(args)
    data: list[Any] = []
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            for group in get_samples(args.over_sampling_batch_size):
                call = generate_and_rm_group(args, group, state.sampling_params.copy())
                state.pendings.add(asyncio.create_task(call))
                state.remaining_batch_size += 1
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            path = args.dynamic_sampling_filter_path
            verdict = call_dynamic_filter(load_function(path) if path else None, args, group)
            if not verdict.keep:
                state.remaining_batch_size -= 1
            elif len(data) < args.rollout_batch_size:
                data.append(group)
    back = await abort(args, rollout_id)
    state.reset()
    return RolloutFnTrainOutput(sorted(data, key=lambda group: group[0].index), {}), back


async def eval_rollout(args: Any) -> Any:
    """Every sample by itself, with indices that begin at 0 again and one dict of parameters for all."""
    params = here().GenerateState(args).sampling_params
    samples = copy.deepcopy(args.eval_samples)
    for index, sample in enumerate(samples):
        sample.index = index
    done = await asyncio.gather(*(generate_and_rm(args, sample, params, True) for sample in samples))
    return RolloutFnEvalOutput({"eval": {"samples": list(done)}})


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Slime's own rollout function."""
    if evaluation:
        return run(eval_rollout(args))
    output, back = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if back:
        data_source.add_samples(back)
    return output


# -- the rest ------------------------------------------------------------------------------------------------------


@dataclass
class RolloutFnTrainOutput:
    """What a training step returns."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What an evaluation returns."""

    data: dict[str, Any]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """A filter's answer."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(function: Any, *args: Any) -> DynamicFilterOutput:
    """Filters may answer with a bare bool."""
    output = DynamicFilterOutput(keep=True) if function is None else function(*args)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """A bad group may be kept when there are too few."""
    scarce = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not scarce


def load_function(path: str) -> Any:
    """A function by its dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


async def async_rm(args: Any, sample: Sample) -> Any:
    """The reward of one sample."""
    return await load_function(sample.custom_rm_path or args.custom_rm_path)(args, sample)


async def batched_async_rm(args: Any, samples: list[Sample]) -> list[Any]:
    """The rewards of a group."""
    if args.custom_rm_path is not None and args.group_rm:
        rewards: list[Any] = await load_function(args.custom_rm_path)(args, samples)
        return rewards
    return list(await asyncio.gather(*(async_rm(args, sample) for sample in samples)))


async def apply_rollout_sample_hooks(args: Any, sample: Any, **_: Any) -> Any:
    """Every configured hook in turn."""
    for path in args.rollout_sample_hook_path:
        result = load_function(path)(args, sample)
        sample = (await result if inspect.isawaitable(result) else result) or sample
    return sample


_LOOP: list[asyncio.AbstractEventLoop] = []


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In the one background loop, which lives as long as the process."""
    if not _LOOP:
        _LOOP.append(asyncio.new_event_loop())
        threading.Thread(target=_LOOP[0].run_forever, name="slime-loop", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _LOOP[0]).result()


class RolloutDataSourceWithBuffer:
    """Prompts in order, partial groups first; only the cursor is saved."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sample_offset = self.sample_group_index = self.sample_index = 0
        self.dataset: Any = None
        self.buffer: list[list[Any]] = []

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """From the buffer, then from the data set."""
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        for _ in range(num_samples - len(groups)):
            prompt = self.dataset.samples[self.sample_offset % len(self.dataset.samples)]
            self.sample_offset += 1
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(prompt)
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
                group.append(sample)
            self.sample_group_index += 1
            groups.append(group)
        return groups

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Partial groups come back."""
        for group in samples:
            assert len(group) == self.args.n_samples_per_prompt
            self.buffer.append(group)

    def _path(self, root: str, rollout_id: int | None) -> Any:
        return import_module("pathlib").Path(root) / "rollout" / f"cursor_{rollout_id}.json"

    def save(self, rollout_id: int) -> None:
        """The cursor."""
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        cursor = [self.sample_offset, self.sample_group_index, self.sample_index]
        path.write_text(repr(cursor))

    def load(self, rollout_id: int | None = None) -> None:
        """The cursor."""
        path = self._path(self.args.load, rollout_id)
        cursor = import_module("ast").literal_eval(path.read_text())
        self.sample_offset, self.sample_group_index, self.sample_index = cursor


def install(patch: pytest.MonkeyPatch, *, cancels: bool) -> None:
    """Put the modules where slime's would be found."""
    Singleton.instances.clear()
    patch.setattr(GenerateState, "cancels", cancels)
    modules: dict[str, dict[str, Any]] = defaultdict(dict)
    modules["rollout.sglang_rollout"] = {
        "GenerateState": GenerateState,
        "generate_and_rm": generate_and_rm,
        "generate_and_rm_group": generate_and_rm_group,
        "abort": abort,
        "generate_rollout": generate_rollout,
        "load_tokenizer": None,
        "load_processor": None,
        "get": get,
    }
    modules["rollout.base_types"] = {
        "RolloutFnTrainOutput": RolloutFnTrainOutput,
        "RolloutFnEvalOutput": RolloutFnEvalOutput,
    }
    modules["rollout.data_source"] = {"RolloutDataSourceWithBuffer": RolloutDataSourceWithBuffer}
    modules["rollout.filter_hub.base_types"] = {
        "call_dynamic_filter": call_dynamic_filter,
        "should_drop_dynamic_filter_output": should_drop_dynamic_filter_output,
        "DynamicFilterOutput": DynamicFilterOutput,
    }
    modules["rollout.rm_hub"] = {"async_rm": async_rm, "batched_async_rm": batched_async_rm}
    modules["rollout.sample_hooks"] = {"apply_rollout_sample_hooks": apply_rollout_sample_hooks}
    modules["utils.async_utils"] = {"run": run}
    modules["utils.misc"] = {"load_function": load_function}
    modules["utils.types"] = {"Sample": Sample}
    for package in ("slime", "slime.rollout", "slime.utils", "slime.rollout.filter_hub"):
        put(patch, package, {"__path__": []})
    for name, contents in modules.items():
        put(patch, f"slime.{name}", contents)


def put(patch: pytest.MonkeyPatch, name: str, contents: dict[str, Any]) -> None:
    """One module of these contents."""
    module = ModuleType(name)
    module.__dict__.update(contents)
    patch.setitem(sys.modules, name, module)


Maker = Callable[..., SimpleNamespace]

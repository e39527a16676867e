"""Slime around the hooks: its own modules where a checkout can be imported, our doubles elsewhere."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import adapters.slime.datasource
import adapters.slime.runtime
from adapters.slime import close_all, runtime_for
from lifecycle.testing.backend import ScriptedBackend
from tests.adapters.slime import doubles, real

REAL = find_spec("slime") is not None
SUBJECT = "slime" if REAL else "double"


class ByteTokenizer:
    """Ids are bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A byte an id."""
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Whatever the ids are."""
        return "".join(f"<{token}>" for token in ids)


async def reward(args: Any, sample: Any) -> Any:
    """One per token; for a group (`group_rm`) one each."""
    if isinstance(sample, list):
        return [float(one.response_length) for one in sample]
    return float(sample.response_length)


@dataclass
class Slime:
    """slime with our hooks in it. `backend` is what the hooks' engine talks to; None: real HTTP."""

    patch: pytest.MonkeyPatch
    folder: Path
    backend: ScriptedBackend | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def args(self, **changes: Any) -> SimpleNamespace:
        """The flags; the router does not exist unless a test names one."""
        values: dict[str, Any] = {
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": 9,
            "sglang_server_concurrency": 64,
            "rollout_num_engines": 1,
            "hf_checkpoint": "bytes",
            "ci_test": False,
            "partial_rollout": True,
            "mask_offpolicy_in_partial_rollout": False,
            "group_rm": False,
            "custom_rm_path": "slime_test_rewards.reward",
            "custom_generate_function_path": "adapters.slime.generate",
            "rollout_sample_hook_path": [],
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "rollout_all_samples_process_path": None,
            "buffer_filter_path": None,
            "rollout_global_dataset": True,
            "rollout_shuffle": False,
            "prompt_data": None,
            "save": str(self.folder),
            "load": str(self.folder),
            "rollout_batch_size": 2,
            "over_sampling_batch_size": 3,
            "n_samples_per_prompt": 2,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 8,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "rollout_skip_special_tokens": False,
            "rollout_seed": 42,
            "sglang_enable_deterministic_inference": False,
            "sglang_dp_size": 1,
            "sglang_speculative_algorithm": None,
            "use_rollout_routing_replay": False,
            "num_layers": 2,
            "moe_router_topk": 1,
            "router_policy": None,
            "reward_key": None,
            "eval_reward_key": None,
        }
        return SimpleNamespace(**{**values, **self.changes, **changes})

    @property
    def module(self) -> Any:
        """`slime.rollout.sglang_rollout`."""
        return sys.modules["slime.rollout.sglang_rollout"]

    @property
    def sample_class(self) -> Any:
        """`Sample`."""
        return sys.modules["slime.utils.types"].Sample

    def sample(self, **fields: Any) -> Any:
        """A fresh sample."""
        return self.sample_class(**{"group_index": 0, "index": 0, "prompt": "ab", **fields})

    def state(self, args: Any) -> Any:
        """The process's `GenerateState`."""
        return self.module.GenerateState(args)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """In slime's loop."""
        return sys.modules["slime.utils.async_utils"].run(coroutine)

    def data_source(self, args: Any, prompts: int = 50, kind: Any = None) -> Any:
        """A data source of that many prompts."""
        source = (kind or sys.modules["slime.rollout.data_source"].RolloutDataSourceWithBuffer)(args)
        source.dataset = Prompts([self.sample_class(prompt=f"p{number:02}") for number in range(prompts)])
        return source

    def engine(self, args: Any) -> Any:
        """The `EngineThread` behind the hooks."""
        return runtime_for(args).thread


class Prompts:
    """A data set that is already in memory."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        """How many."""
        return len(self.samples)


def pytest_report_header() -> str:
    """Say which subject runs."""
    return f"slime adapter: tested against {'a checkout of slime' if REAL else 'the doubles of slime'}"


@pytest.fixture(params=[SUBJECT])
def slime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Slime]:
    """The slime that cancels the tasks of request-abortable generators."""
    yield from _installed(monkeypatch, tmp_path, cancels=True)


@pytest.fixture(params=[SUBJECT])
def flag_slime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Slime]:
    """The slime before that: it raises a flag and aborts whole servers."""
    yield from _installed(monkeypatch, tmp_path, cancels=False)


def _installed(patch: pytest.MonkeyPatch, folder: Path, *, cancels: bool) -> Iterator[Slime]:
    (real if REAL else doubles).install(patch, cancels=cancels)
    patch.setattr(
        sys.modules["slime.rollout.sglang_rollout"], "load_tokenizer", lambda *_, **__: ByteTokenizer()
    )
    patch.setattr(sys.modules["slime.rollout.sglang_rollout"], "load_processor", lambda *_, **__: None)
    rewards = ModuleType("slime_test_rewards")
    rewards.reward = reward  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "slime_test_rewards", rewards)
    adapters.slime.datasource.data_source_class.cache_clear()
    one = Slime(patch, folder)
    original = adapters.slime.runtime.backend_for
    patch.setattr(
        adapters.slime.runtime,
        "backend_for",
        lambda settings: original(settings) if one.backend is None else nullcontext(one.backend),
    )
    yield one
    close_all()
    adapters.slime.datasource.data_source_class.cache_clear()


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Poll in an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)

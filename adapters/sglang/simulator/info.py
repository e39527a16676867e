"""The answers of the read-only endpoints: what a server says of itself, its load and its tokenizer."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from adapters.sglang.simulator.brain import Brain
from adapters.sglang.simulator.settings import SGLANG_VERSION

_DISAGGREGATION: dict[str, Any] = {
    "mode": "null",
    "prefill_bootstrap_queue_reqs": 0,
    "prefill_inflight_queue_reqs": 0,
    "decode_prealloc_queue_reqs": 0,
    "decode_transfer_queue_reqs": 0,
    "decode_retracted_queue_reqs": 0,
    "kv_transfer_speed_gb_s": 0.0,
    "kv_transfer_latency_ms": 0.0,
}
_SECTION_OF = {"memory": "memory", "disaggregation": "disagg", "queues": "queues"}
LOAD_SECTIONS = ("all", "core", "disagg", "lora", "memory", "queues", "spec")


def model_info(brain: Brain) -> dict[str, Any]:
    """``GET /model_info``: among others the current weight-version label."""
    path = brain.settings.model_path
    return {
        "model_path": path,
        "served_model_name": path,
        "tokenizer_path": path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": brain.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def server_info(brain: Brain, *, host: str = "127.0.0.1", port: int = 0) -> dict[str, Any]:
    """``GET /server_info``: the start-up settings that a client may ask for, and ``simulated: true``.

    The real answer has several hundred keys; these are the ones that routers and clients read.
    """
    settings = brain.settings
    return {
        "model_path": settings.model_path,
        "served_model_name": settings.model_path,
        "tokenizer_path": settings.model_path,
        "weight_version": settings.weight_version,
        "host": host,
        "port": port,
        "device": "cpu",
        "dtype": "float32",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "load_balance_method": "round_robin",
        "tokenizer_worker_num": 1,
        "skip_tokenizer_init": False,
        "enable_priority_scheduling": False,
        "enable_metrics": False,
        "api_key": None,
        "context_length": settings.context_length,
        "max_running_requests": settings.max_running_requests,
        "max_queued_requests": settings.max_queued_requests,
        "max_total_tokens": settings.max_total_tokens,
        "stream_interval": settings.stream_interval,
        "incremental_streaming_output": settings.incremental,
        "random_seed": settings.seed,
        "disaggregation_mode": "null",
        "status": "ready",
        "max_total_num_tokens": settings.max_total_tokens or 1 << 20,
        "max_req_input_len": settings.context_length - 6,
        "startup_time": 0.0,
        "internal_states": [{"weight_version": brain.weight_version}],
        "version": SGLANG_VERSION,
        "frontend": "python",
        "simulated": True,
    }


def loads(brain: Brain, now: float, sections: Collection[str] = ("all",)) -> dict[str, Any]:
    """``GET /v1/loads``: running and waiting requests of the one data-parallel rank; ``sections`` as asked for."""
    scheduler, settings = brain.scheduler, brain.settings
    used, room = scheduler.used_tokens(), settings.max_total_tokens or 1 << 20
    running, waiting = scheduler.load
    load: dict[str, Any] = {
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": sum(len(request.prompt) for request in scheduler.waiting),
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": room,
        "max_running_requests": settings.max_running_requests,
        "token_usage": round(used / room, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": 0,
        "total_prefill_busy_us": 0,
        "decode_moments": [0.0] * 6,
    }
    more: dict[str, dict[str, Any]] = {
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": room},
        "disaggregation": _DISAGGREGATION,
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    load |= {name: value for name, value in more.items() if {"all", _SECTION_OF[name]} & set(sections)}
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": SGLANG_VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [load],
    }

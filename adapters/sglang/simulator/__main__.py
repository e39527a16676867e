"""``python -m adapters.sglang.simulator``: the same as ``lifecycle sim``."""

from __future__ import annotations

from adapters.sglang.simulator.command import sim

if __name__ == "__main__":
    sim(prog_name="lifecycle sim")

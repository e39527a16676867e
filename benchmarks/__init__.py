"""What the library costs: one script per claim, each with its own baseline. `python -m benchmarks` runs them all."""

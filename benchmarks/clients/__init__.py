"""One client per module, each run in a process of its own: `python -m benchmarks.clients NAME …`.

Each has `async def run(load: Load) -> list[Result]`: open `load.streams` streams and read them to their ends.
"""

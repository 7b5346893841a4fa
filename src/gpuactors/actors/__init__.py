"""The actors: each an `async def run(...)` that posts events to the registry or carries out requests of the state. None
decides anything: `core.step` does.
"""

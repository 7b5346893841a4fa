"""The actors: each an `async def run(...)` that carries facts to the registry or does what the state demands.

None decides anything: decisions are made in `core.step`.
"""

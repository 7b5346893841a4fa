"""Histories: any order of events on a whole node, played on a mock clock and repeatable to the last byte.

`world.py` is the node, `events.py` the table of what can happen to it, `check.py` what must hold, `play.py` plays one
history, `replay.py` shows it. `tests/histories` draws histories, plays many, and lists those that must never fail
again.
"""

"""The status of a device, decided here and nowhere else: its holder (`holding.py`), blockers in its files
(`blockers.py`), whether it is still the same device (`kinds/presence.py`), and the one status that follows
(`assess.py`).

Device lists, calls, `inspect`, `explain`, replay and the log read the cause (`values/cause.py`); the message is for
people.
"""

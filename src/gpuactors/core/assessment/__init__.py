"""How a device is, decided here and nowhere else: whose it is (`ownership.py`), what of its files forbids it
(`blockers.py`), whether it is still what it was (`presence.py`), and the one status that follows (`assess.py`).

Device lists, calls, `inspect`, `explain`, replay and the log read the cause (`cause.py`); the message is for people.
"""

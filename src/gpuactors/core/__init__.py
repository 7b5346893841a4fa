"""The pure core: the daemon's state and its decisions.

Imports the standard library and, for values, msgspec (ADR 0016). No async, no paths that are opened, no clock, no
logging: time comes in as `at` (seconds of the caller's monotonic clock), everything that happened comes in as an event,
everything to do goes out as a value.
"""

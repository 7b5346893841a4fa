"""The pure core: the daemon's state and its decisions.

Imports the standard library and, for values, msgspec (ADR 0016). No async, no paths that are opened, no clock, no
logging: time comes in as `at` (seconds of the caller's monotonic clock), facts come in as events, actions go out as
values.
"""

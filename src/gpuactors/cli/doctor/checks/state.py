"""The daemon's state directory: control socket, journal, served.json."""

from __future__ import annotations

from collections.abc import Iterator

from gpuactors.cli.doctor.facts import Facts, State, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, warned
from gpuactors.limits import JOURNAL_MAX_BYTES


def check(facts: Facts) -> Iterator[Finding]:
    """Check the state directory; nothing before installation."""
    state = facts.state
    if state is None:
        return
    if isinstance(state, Unknown):
        yield failed(Check.STATE_DIRECTORY, state.reason, "Check that disk.")
        return
    yield _directory(state)
    if facts.config.journal == "on" and not state.path_problem:
        yield _space(state)


def _directory(state: State) -> Finding:
    if state.path_problem:
        return failed(
            Check.STATE_DIRECTORY,
            state.path_problem,
            "Make it writable for the daemon; in a pod mount it from the node (deploy/base).",
        )
    if not state.place.is_directory:
        return passed(Check.STATE_DIRECTORY, f"{state.place.path} will be made")
    return passed(Check.STATE_DIRECTORY, f"{state.place.path} is writable")


def _space(state: State) -> Finding:
    wanted = max(0, JOURNAL_MAX_BYTES - state.journal_bytes)
    if state.free_bytes >= wanted:
        return passed(Check.JOURNAL_SPACE, f"the journal has room ({state.free_bytes >> 20} MiB free)")
    return warned(
        Check.JOURNAL_SPACE,
        f"the disk of {state.place.path} has {state.free_bytes >> 20} MiB free, and the journal may want "
        f"{wanted >> 20} MiB more",
        "Free the disk, or switch the journal off with --journal off.",
    )

"""Bugs to plant in since when a claim is pending: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_CORE: Final = "tests/core/claims/test_pending.py"

PENDING: Final = (
    Mutation(
        "a claim is pending since its last state",
        "core/claims/progress.py",
        "            since = min(earlier.pending_since, at) if earlier is not None else at\n",
        "            since = date\n",
        f"{_CORE}::test_a_claim_whose_prepare_fails_again_and_again_is_pending_since_the_first",
    ),
    Mutation(
        "a claim that NVIDIA's driver has prepared is pending",
        "core/values/claim_states.py",
        "RESTING: Final = frozenset({_S.PREPARED, _S.TAKEN_OVER, _S.TOMBSTONE})\n",
        "RESTING: Final = frozenset({_S.PREPARED, _S.TOMBSTONE})\n",
        f"{_CORE}::test_a_claim_of_nvidias_driver_is_not_pending",
    ),
    Mutation(
        "the youngest pending claim is dated",
        "observe/metrics_of_state.py",
        "        oldest = min((entry.pending_since for entry in claims.entries.values()), default=math.inf)\n",
        "        oldest = max((entry.pending_since for entry in claims.entries.values()), default=math.inf)\n",
        "tests/observe/test_metrics.py::test_the_oldest_pending_claim_is_dated_until_it_is_prepared",
    ),
)

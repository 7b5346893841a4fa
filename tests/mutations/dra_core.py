"""Bugs to plant in the machine of claims, as `mutations.py`: those that orders of events and histories do not show."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

ADMINISTRATOR: Final = "tests/core/gpus/test_administrator.py"
COLLECT: Final = "tests/core/claims/test_collect.py"
EXCLUSION: Final = "tests/core/gpus/test_exclusion.py"
PREPARE_TO_UNPREPARE: Final = "tests/core/claims/test_claims.py"
RESTART: Final = "tests/core/claims/test_restart.py"

DRA_CORE: Final = (
    Mutation(
        "a release goes on before kubelet was asked who has the GPU",
        "core/claims/progress.py",
        "        and state.host.scanned\n        and state.kubelet.ledger.tried\n",
        "        and state.host.scanned\n",
        tests=(
            f"{RESTART}::test_a_release_after_a_restart_waits_until_kubelet_has_been_asked_who_has_the_gpu",
        ),
    ),
    Mutation(
        "two claims share an IOMMU group if none has the other's functions",
        "core/gpus/exclusion.py",
        "            if not owned.isdisjoint(wanted) or not groups.isdisjoint(numbers):\n",
        "            if not owned.isdisjoint(wanted):\n",
        tests=(f"{EXCLUSION}::test_a_claim_owns_its_iommu_group_also_where_it_has_one_function_of_it_only",),
    ),
    Mutation(
        "a claim of another driver keeps one of ours that has its name",
        "core/claims/machine.py",
        "    return {claim for name, claim in state.kubelet.ledger.claimed if name == settings.driver}\n",
        "    return {claim for name, claim in state.kubelet.ledger.claimed}\n",
        tests=(
            f"{COLLECT}::test_a_claim_of_that_name_that_kubelet_lists_for_another_driver_is_not_this_one",
        ),
    ),
    Mutation(
        "kubelet is not asked when a claim has ended",
        "core/claims/progress.py",
        '            return schedule.ask_ledger(after, at), _logged("claim.unprepared", entry)\n',
        '            return after, _logged("claim.unprepared", entry)\n',
        tests=(f"{PREPARE_TO_UNPREPARE}::test_kubelets_ledger_is_read_as_soon_as_a_claim_has_ended",),
    ),
    # --- what others bind is their decision ---------------------------------------------------------------------------
    Mutation(
        "the first driver of the boot counts, whoever has bound it since",
        "core/values/prebound.py",
        "(by_others and seen != before)",
        "(by_others and seen != before and before.driver is None)",
        tests=(
            f"{ADMINISTRATOR}::"
            "test_a_gpu_that_is_bound_to_vfio_by_hand_after_a_claim_stays_there_after_the_next_one",
        ),
    ),
    Mutation(
        "a GPU that somebody has bound to vfio under its claim is taken from it",
        "core/gpus/returns.py",
        "    return any(not f.vfio and f.address in claims.acted for f in gpu.functions)\n",
        "    return any(not f.vfio for f in gpu.functions)\n",
        tests=(ADMINISTRATOR,),
    ),
    Mutation(
        "what a failed act has moved is not ours",
        "core/gpus/driver.py",
        "        if isinstance(event, ActFailed) and event.moved:\n",
        "        if isinstance(event, ActFailed) and not event.moved:\n",
        tests=(ADMINISTRATOR,),
    ),
    Mutation(
        "a GPU that was plugged in during its act is somebody else's at its return",
        "core/gpus/returns.py",
        "presence=(a in met and met[a].presence) or f.presence",
        "presence=f.presence",
        tests=(ADMINISTRATOR,),
    ),
)

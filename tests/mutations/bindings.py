"""Bugs to plant in who has bound a GPU, what is returned and when, and what is looked at before. Each breaks the tests
that it names.
"""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

ADMINISTRATOR: Final = "tests/core/gpus/test_administrator.py"
DRIVER: Final = "tests/acts/test_driver.py"
FITNESS: Final = "tests/core/gpus/test_fitness.py"
PREBOUND: Final = "tests/core/gpus/test_prebound.py"

BINDINGS: Final = (
    Mutation(
        "a GPU that a claim has returned counts as ours for ever",
        "core/gpus/returns.py",
        "acted=claims.acted - frozenset(met))\n",
        "acted=claims.acted | frozenset(met))\n",
        tests=(f"{ADMINISTRATOR}::test_it_stays_as_well_where_the_daemon_ended_right_after_the_return",),
    ),
    Mutation(
        "what an inspection of before the bind has seen is somebody's decision",
        "core/gpus/returns.py",
        "_decided_by_others(state, claims.acted - settled.keys())\n",
        "_decided_by_others(state, claims.acted)\n",
        tests=(f"{ADMINISTRATOR}::test_an_inspection_of_before_the_bind_is_nobodys_decision",),
    ),
    Mutation(
        "somebody else's bind under a claim is undone at its end",
        "core/gpus/returns.py",
        "    acted = claims.acted - gone - _decided_by_others(state, claims.acted - settled.keys())\n",
        "    acted = claims.acted - gone\n",
        tests=(f"{ADMINISTRATOR}::test_a_gpu_that_is_bound_to_vfio_by_hand_under_its_claim_stays_there",),
    ),
    Mutation(
        "somebody else's bind under a claim is forgotten by a restart",
        "core/gpus/returns.py",
        "    return after if acted == claims.acted else _to_disk(after)\n",
        "    return after\n",
        tests=(f"{ADMINISTRATOR}::test_so_it_does_after_a_restart",),
    ),
    Mutation(
        "a GPU that was plugged in anew is the one before",
        "core/values/prebound.py",
        "    return bool(noted.presence and now.presence) and noted.presence != now.presence\n",
        "    return False\n",
        tests=(PREBOUND, ADMINISTRATOR),
    ),
    Mutation(
        "a driver that is not loaded holds the claim",
        "core/gpus/driver.py",
        "        if event.fault is not ActFault.NO_DRIVER:\n            return None\n",
        "        if event.fault is not ActFault.REFUSED:\n            return None\n",
        tests=(f"{ADMINISTRATOR}::test_the_return_is_owed_until_the_driver_is_there",),
    ),
    Mutation(
        "a return that is owed is not on disk",
        "core/claims/outputs.py",
        "        tuple(o for _, o in sorted(claims.owed.items())),\n",
        "",
        tests=(f"{ADMINISTRATOR}::test_it_is_owed_by_the_next_daemon_as_well",),
    ),
    Mutation(
        "a return that is owed is made under a pod that has the GPU",
        "core/gpus/driver.py",
        "                or has_another_owner(state, stub, address) is not None\n",
        "",
        tests=(f"{ADMINISTRATOR}::test_it_is_not_begun_while_a_pod_has_the_gpu",),
    ),
    Mutation(
        "a claim gets a GPU that is being returned",
        "core/gpus/exclusion.py",
        "        if owed.act and any(f.address in wanted for f in owed.gpu.functions):\n",
        "        if False:\n",
        tests=(f"{ADMINISTRATOR}::test_a_claim_that_comes_during_the_return_waits_for_it",),
    ),
    Mutation(
        "a GPU without a driver is given back to none",
        "acts/driver.py",
        "        if move.probe or (theirs and not move.by_override):\n",
        "        if theirs and not move.by_override:\n",
        tests=(f"{DRIVER}::test_a_gpu_that_had_no_driver_is_given_to_the_one_that_takes_it",),
    ),
    Mutation(
        "an override of somebody else's is emptied",
        "acts/driver.py",
        '            await writes.at_the_end(override, f"{theirs}\\n")\n',
        '            await writes.at_the_end(override, "\\n")\n',
        tests=(
            f"{DRIVER}::test_an_override_of_somebody_elses_is_there_again_after_the_bind_and_counts_at_the_return",
        ),
    ),
    Mutation(
        "nvidia-persistenced gets every GPU that is returned",
        "acts/driver.py",
        "            if address not in self._let_go_of and not (first is not None and first.persistence):\n",
        "            if first is None:\n",
        tests=(f"{DRIVER}::test_what_it_had_it_gets_again_and_nothing_else",),
    ),
    Mutation(
        "a GPU that its driver keeps started is unbound",
        "acts/driver.py",
        "            if function.bound.driver != _NVIDIA or not function.interrupts:\n",
        "            if True:\n",
        tests=(f"{DRIVER}::test_a_gpu_in_legacy_persistence_mode_is_refused_with_the_command_that_ends_it",),
    ),
    Mutation(
        "holders are not looked for again before an unbind",
        "acts/driver.py",
        "            if not move.function.bound.vfio:  # somebody may have opened it since\n",
        "            if False:\n",
        tests=(
            f"{DRIVER}::test_a_process_that_opens_a_function_after_the_first_check_is_seen_before_its_unbind",
        ),
    ),
    Mutation(
        "what a claim's act has met is forgotten with the claim",
        "core/gpus/driver.py",
        "        if entry.state is not ClaimState.BINDING:\n            return state, []\n",
        "        return state, []\n",
        tests=(f"{FITNESS}::test_what_a_claims_own_act_has_met_counts_when_the_claim_is_gone",),
    ),
    Mutation(
        "the answer of a look counts for a GPU that has changed since",
        "core/gpus/fitness.py",
        " if finding.device in awaited]",
        "]",
        tests=(f"{FITNESS}::test_a_gpu_that_changes_during_a_look_is_looked_at_again_and_hides_no_other",),
    ),
    Mutation(
        "a look is only at what is due at this moment",
        "core/gpus/fitness.py",
        "    by = at + limits.UNFIT_LOOK_S\n",
        "    by = at\n",
        tests=(f"{FITNESS}::test_what_is_due_soon_is_looked_at_with_what_is_due",),
    ),
    Mutation(
        "a GPU that no claim could bind is offered",
        "core/gpus/offer.py",
        "    if look is None or look.found is None:\n",
        "    if True:\n",
        tests=(FITNESS,),
    ),
)

"""Bugs to plant in what is known of a dead GPU: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_RULE: Final = "tests/core/kinds/test_dead.py"
_HISTORIES: Final = "tests/histories/test_dead.py"
_READ: Final = "tests/host/test_signs.py"

DEAD: Final = (
    Mutation(
        "a dead GPU blocks nothing",
        "core/assessment/blockers.py",
        "    if (sign := dead(device)) is not None:\n        return sign\n",
        "",
        f"{_RULE}::test_a_free_dead_gpu_is_unhealthy_and_allocated_to_nobody",
    ),
    Mutation(
        "an allocated dead GPU is Unhealthy, and subtracted twice",
        "core/assessment/assess.py",
        "        if device.has_backing:\n            return Health.HEALTHY, holding.reason\n",
        "        if device.has_backing and blocker is None:\n            return Health.HEALTHY, holding.reason\n",
        f"{_RULE}::test_an_allocated_dead_gpu_is_subtracted_once",
    ),
    Mutation(
        "a claim is given a dead GPU",
        "core/gpus/exclusion.py",
        "        if sign := dead(device):\n            return Conflict(_about(key, sign), is_final=True)\n",
        "",
        f"{_RULE}::test_no_claim_gets_a_dead_gpu_and_its_taint_says_so",
    ),
    Mutation(
        "a claim is given a GPU whose inspection has just failed",
        "core/gpus/exclusion.py",
        "        if device.fault is not None:\n",
        "        if device.fault is None and device.fault is not None:\n",
        f"{_RULE}::test_a_claim_waits_for_a_gpu_whose_inspection_has_failed_and_may_have_missed_its_death",
    ),
    Mutation(
        "a GPU that answers again is back",
        "core/host/dead_signs.py",
        "    if known is not None and _is_same(function, known.presence):\n",
        "    if known is not None and _is_same(function, 0):\n",
        f"{_RULE}::test_one_that_answers_again_is_back_only_when_it_was_enumerated_again",
    ),
    Mutation(
        "a fatal error that only the port counts is no sign",
        "core/host/dead_signs.py",
        "    return Sign.PORT if before is not None and now is not None and now > before else None\n",
        "    return None\n",
        f"{_RULE}::test_a_fatal_error_that_only_the_port_above_counts_is_a_sign",
    ),
    Mutation(
        "a new GPU is dead of its predecessor's fatal error",
        "core/host/dead_signs.py",
        "    return function.presence == presence != 0\n",
        "    return True\n",
        f"{_RULE}::test_a_fatal_error_that_only_the_port_above_counts_is_a_sign",
    ),
    Mutation(
        "inspections that come together forget a sign",
        "core/host/inspections.py",
        "                signs = with_function(signs, now)\n",
        "                signs = with_function(host.dead_signs, now)\n",
        f"{_RULE}::test_inspections_that_come_together_forget_no_sign",
    ),
    Mutation(
        "a restarted daemon brings a dead GPU back",
        "core/step.py",
        "            dead_signs=dict(dead_signs),\n",
        "",
        f"{_RULE}::test_a_dead_gpu_stays_dead_over_a_restart_until_it_was_enumerated_again",
    ),
    Mutation(
        "a daemon that takes over brings a dead GPU back",
        "core/host/inspections.py",
        "    signs = remembered(host.dead_signs, before, host.functions)\n",
        "    signs = host.dead_signs\n",
        f"{_RULE}::test_a_daemon_that_takes_over_knows_what_the_one_before_has_kept",
    ),
    Mutation(
        "the file keeps the sign of a GPU that was enumerated again",
        "core/host/dead_signs.py",
        "    return {address: sign for address, sign in signs.items() if address != function.address}\n",
        "    return signs\n",
        f"{_RULE}::test_a_gpu_that_was_enumerated_again_while_no_daemon_ran_is_well",
    ),
    Mutation(
        "a sign of another boot counts",
        "control/boot_json.py",
        "        return value if content.boot == self._boot else self._form.nothing\n",
        "        return value\n",
        "tests/control/test_dead_signs.py::test_what_was_written_is_read_in_this_boot_alone",
    ),
    Mutation(
        "the signs of dead GPUs are not written",
        "actors/registry.py",
        "        cells.dead_signs.set(state.host.dead_signs if serves else None)\n",
        "",
        "tests/simulation/test_dead_gpus.py::test_a_restarted_daemon_does_not_offer_a_dead_gpu",
    ),
    Mutation(
        "a fatal error that was counted before the daemon started is none",
        "core/host/dead_signs.py",
        "    if function.has_fatal_errors:\n",
        "    if function.has_fatal_errors and before is not None:\n",
        f"{_HISTORIES}::test_nobody_gets_a_card_that_has_died",
    ),
    Mutation(
        "a container starts on a GPU that has died since its Allocate",
        "core/deviceplugin/calls.py",
        "        blockers = [b for b in blockers if b.cause not in OF_A_PART]\n",
        "        blockers = [b for b in blockers if b.cause not in (*OF_A_PART, Cause.DEAD)]\n",
        f"{_HISTORIES}::test_nobody_gets_a_card_that_has_died",
    ),
    Mutation(
        "a GPU in D3cold is woken, or taken for dead",
        "host/signs.py",
        '_POWERED: Final = frozenset({b"D0", b"D3hot"})\n',
        '_POWERED: Final = frozenset({b"D0", b"D3hot", b"D3cold"})\n',
        f"{_READ}::test_the_configuration_space_of_a_function_in_another_state_is_not_read",
    ),
    Mutation(
        "a suspended bridge is woken",
        "host/signs.py",
        '    if any(_is_suspended(read, above) for above in ("../power_state", "physfn/power_state")):\n',
        '    if any(_is_suspended(read, above) for above in ("physfn/power_state",)):\n',
        f"{_READ}::test_a_suspended_bridge_is_not_woken",
    ),
    Mutation(
        "a read waits for the reset of an open GPU",
        "host/signs.py",
        '    return not vfio_bound or int(read("enable", _ATTRIBUTE_BYTES)) == 0\n',
        "    return True\n",
        f"{_READ}::test_the_configuration_space_of_an_open_function_is_not_read_as_the_kernel_may_reset_it",
    ),
    Mutation(
        "an inspection waits for the reset after a fatal error",
        "host/sysfs.py",
        "        is_function_silent = not is_known_dead and is_silent(",
        "        is_function_silent = is_silent(",
        f"{_READ}::test_an_inspection_does_not_wait_for_the_reset_after_a_fatal_error",
    ),
    Mutation(
        "an inspection waits for the reset after an error that is not known yet",
        "host/sysfs.py",
        "errors_of_port is not None and errors_of_port > last:\n",
        "errors_of_port is None:\n",
        f"{_READ}::test_an_inspection_does_not_wait_for_the_reset_after_a_fatal_error",
    ),
    Mutation(
        "an inspection waits for the reset of a GPU that is known to be dead",
        "host/sysfs.py",
        "        return dead is not None and dead.presence == presence_of(path)\n",
        "        return False\n",
        f"{_READ}::test_a_scan_does_not_wait_for_the_reset_either",
    ),
    Mutation(
        "an inspection is not told of the errors that are known",
        "core/reports/snapshot.py",
        "            known_errors(state.host.functions, state.host.dead_signs),\n",
        "",
        f"{_RULE}::test_a_read_is_requested_with_the_errors_that_are_known",
    ),
    Mutation(
        "a scan is not told of the errors that are known",
        "actors/sysfs_inspector.py",
        "host.scan(wanted.given, wanted.selectors, wanted.errors)",
        "host.scan(wanted.given, wanted.selectors)",
        "tests/actors/test_sysfs_inspector.py::test_every_read_is_told_of_the_errors_that_are_known",
    ),
    Mutation(
        "a virtual function is dead by its ids alone",
        "host/signs.py",
        "CONFIG_BYTES: Final = 16\n",
        "CONFIG_BYTES: Final = 4\n",
        f"{_READ}::test_a_virtual_function_is_silent_only_where_more_than_its_ids_read_all_ones",
    ),
    Mutation(
        "another name of the same pod is a release",
        "core/ledger/releases.py",
        "    for key in sorted(was.keys() - now.keys()):\n",
        "    for key in sorted(key for key, owner in was.items() if now.get(key) != owner):\n",
        "tests/core/test_releases.py::test_an_owner_that_is_named_in_another_way_is_no_release",
    ),
)

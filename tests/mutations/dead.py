"""Bugs to plant in what is known of a dead GPU: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_RULE: Final = "tests/core/kinds/test_dead.py"
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
        "a GPU that answers again is back",
        "core/host/inspections.py",
        "    is_silent = function.is_silent or last.is_silent\n",
        "    is_silent = function.is_silent\n",
        f"{_RULE}::test_one_that_answers_again_is_back_only_when_it_was_enumerated_again",
    ),
    Mutation(
        "a fatal error that only the port counts is no sign",
        "core/host/inspections.py",
        "    has_port_errors = last.has_port_errors or (before is not None and now is not None and now > before)\n",
        "    has_port_errors = last.has_port_errors\n",
        f"{_RULE}::test_a_fatal_error_that_only_the_port_above_counts_is_a_sign",
    ),
    Mutation(
        "a new GPU is dead of its predecessor's fatal error",
        "core/host/inspections.py",
        "    if last is not None and function.presence == last.presence != 0:\n        function = _with_signs",
        "    if last is not None:\n        function = _with_signs",
        f"{_RULE}::test_a_fatal_error_that_only_the_port_above_counts_is_a_sign",
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

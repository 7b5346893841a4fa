"""Bugs to plant in what becomes of a changed configuration file: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_CORE: Final = "tests/core/test_config_reload.py"
_FILE: Final = "tests/daemon/test_config_file.py"
_OWN: Final = "tests/core/kinds/test_own_resources.py"
_SETS: Final = "tests/core/test_sets_wired.py"
_SYSFS: Final = "tests/host/test_sysfs.py"

RELOAD: Final = (
    Mutation(
        "a GPU whose name was not looked up is listed by its hex digits",
        "core/values/inventory.py",
        "    if not (function.vendor and function.device) or function.model is None:\n",
        "    if not (function.vendor and function.device):\n",
        f"{_CORE}::test_a_gpu_that_was_inspected_as_excluded_has_no_name_and_is_in_no_list_before_the_scan",
    ),
    Mutation(
        "the lists do not follow names that alone have changed",
        "core/deviceplugin/device_lists.py",
        "        state.daemon.settings,  # the names alone may be others\n",
        "",
        f"{_CORE}::test_a_free_device_has_its_new_name_at_once_and_the_old_resource_keeps_the_others",
    ),
    Mutation(
        "no scan by the new selectors is requested",
        "core/step.py",
        "            after = with_inspections(after, inspections.ask_scan(state.host.inspections))\n",
        "",
        f"{_CORE}::test_what_only_the_new_selectors_choose_comes_with_the_scan",
    ),
    Mutation(
        "a file that needs a restart is not remembered",
        "core/step.py",
        "    return replace(state, daemon=replace(state.daemon, config_unused=reason)), [log]\n",
        "    return state, [log]\n",
        f"{_CORE}::test_a_file_that_is_not_used_changes_nothing_and_is_said",
    ),
    Mutation(
        "a rule for a model selects what it names",
        "core/values/inventory.py",
        "        if not selector.names_only\n        and matches(",
        "        if matches(",
        f"{_OWN}::test_a_name_for_a_model_selects_nothing",
    ),
    Mutation(
        "the reader reads what a rule for a model names",
        "host/sysfs.py",
        "if not s.exclude and not s.names_only and s.mdev is None)",
        "if not s.exclude and s.mdev is None)",
        f"{_SYSFS}::test_an_own_name_is_that_of_its_ids_alone_and_selects_nothing",
    ),
    Mutation(
        "the reader keeps its first selectors",
        "host/sysfs.py",
        "        wanted = (self._selectors if selectors is None else selectors), errors\n",
        "        wanted = self._selectors, errors\n",
        f"{_SYSFS}::test_a_reader_of_other_selectors",
    ),
    Mutation(
        "half of a file is used",
        "daemon/config_file.py",
        "        if keys.restart:\n",
        "        if keys.restart and not keys.followed:\n",
        f"{_FILE}::test_of_a_change_that_needs_a_restart_nothing_is_used_until_it_is_taken_back",
    ),
    Mutation(
        "a file that is written while it is read counts",
        "daemon/config_file.py",
        "            return None\n        self._seen, self._refusals, self._again_at = status",
        "            pass\n        self._seen, self._refusals, self._again_at = status",
        f"{_FILE}::test_a_file_that_is_written_while_it_is_read_does_not_count",
    ),
    Mutation(
        "a refused file is not read again until it changes",
        "daemon/config_file.py",
        "        elif trio.current_time() < self._again_at:\n",
        "        else:\n",
        f"{_FILE}::test_a_file_whose_entries_cannot_be_matched_now_is_read_again",
    ),
    Mutation(
        "a refused file is read again at each look",
        "daemon/config_file.py",
        "        elif trio.current_time() < self._again_at:\n",
        "        elif not self._refusals:\n",
        f"{_FILE}::test_a_refused_file_that_stays_as_it_is_is_read_again_later_each_time",
    ),
    Mutation(
        "a refused file that changes is read after the pause",
        "daemon/config_file.py",
        "        if status != self._seen:\n            self._refusals = 0\n",
        "        if status != self._seen and not self._refusals:\n            pass\n",
        f"{_FILE}::test_a_refused_file_that_changes_is_read_at_once_and_the_pauses_begin_anew",
    ),
    Mutation(
        "each scan after a reload makes a reader",
        "host/sysfs.py",
        "        if wanted != (self._other._selectors, self._other._errors):\n",
        "        if wanted:\n",
        f"{_SYSFS}::test_a_reader_of_other_selectors",
    ),
    Mutation(
        "what claims have is not read once it is not selected",
        "core/reports/snapshot.py",
        "return of_pods | frozenset(map(function_address, of_claims | owed))",
        "return of_pods | frozenset(map(function_address, owed))",
        f"{_CORE}::test_a_claim_keeps_its_device_and_gives_it_back",
    ),
    Mutation(
        "a device whose return is owed is not read once it is not selected",
        "core/reports/snapshot.py",
        "return of_pods | frozenset(map(function_address, of_claims | owed))",
        "return of_pods | frozenset(map(function_address, of_claims))",
        f"{_CORE}::test_a_return_that_is_owed_is_made_although_the_device_is_not_selected_any_more",
    ),
    Mutation(
        "a claim's device that is not selected is Gone in the slice",
        "core/gpus/offer.py",
        "blocked=_GONE if inputs.present is None else _NOT_SELECTED",
        "blocked=_GONE",
        f"{_CORE}::test_a_device_that_its_claim_alone_keeps_is_offered_as_not_selected_and_judged",
    ),
    Mutation(
        "the devices of the checkpoint's claims are not looked for",
        "core/gpus/reads.py",
        "    left_out = frozenset(a for a in claimed if a not in state.host.seen)\n",
        "    left_out = frozenset[PciAddress]()\n",
        f"{_CORE}::test_a_daemon_that_starts_with_narrower_selectors_reads_the_device_of_a_claim",
    ),
    Mutation(
        "a claim that was prepared is refused once its device is not selected",
        "core/gpus/exclusion.py",
        "        if key not in index.devices and key not in own:\n",
        "        if key not in index.devices:\n",
        f"{_CORE}::test_a_device_that_is_not_selected_and_is_plugged_in_again_is_its_claims",
    ),
    Mutation(
        "a device under an earlier name is in no set",
        "core/deviceplugin/calls.py",
        "name != resource and key not in listed}",
        "name != resource and listed}",
        f"{_SETS}::test_devices_that_pods_have_under_an_earlier_name_are_in_their_sets_still",
    ),
)

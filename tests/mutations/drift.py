"""Bugs to plant in what becomes of a claim whose device moves, of the disk's queue and of shared reads: each names the
test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_CORE: Final = "tests/core/gpus/test_renumbering.py"
_NODE: Final = "tests/test_claims_renumbering.py"
_WORLDS: Final = (
    "tests/core/gpus/test_claim_small_worlds.py::"
    "test_the_gpu_has_one_owner_and_its_rightful_driver_after_every_order"
)
_INSPECTIONS: Final = "tests/host/test_reader.py"
_MOVES: Final = "tests/histories/test_moves.py::test_a_claim_is_given_no_other_cards_node"
_QUEUE: Final = "tests/acts/test_blocking_runner.py"
_READS: Final = "tests/actors/test_api_retry.py"

DRIFT: Final = (
    Mutation(
        "an inspection that failed shows where an act has left a function",
        "core/gpus/returns.py",
        "        if (last := seen.get(a)) is not None and (last.inspection <= n or last.has_failed)\n",
        "        if (last := seen.get(a)) is not None and last.inspection <= n\n",
        "tests/core/claims/test_prepare.py::"
        "test_an_inspection_that_fails_after_the_act_does_not_say_that_the_gpu_is_on_its_host_driver",
    ),
    Mutation(
        "files are written while another claim's may name the number",
        "core/gpus/placement.py",
        " and not any(of_claims.named[node] > 1 for node in nodes)\n",
        "\n",
        f"{_CORE}::test_a_new_claim_on_a_card_with_the_freed_number_waits_for_the_old_files_removal",
    ),
    Mutation(
        "files are healed at a start before their devices were seen",
        "core/gpus/placement.py",
        "            return state.host.scanned and keys.isdisjoint(gpus.settled) and keys.isdisjoint(gpus.left_out)\n",
        "            return True\n",
        f"{_CORE}::test_missing_files_are_written_after_a_start_only_when_the_device_was_seen",
    ),
    Mutation(
        "what kubelet waits for is written after the files of a thousand prepared claims",
        "core/claims/outputs.py",
        "(entry.state is ClaimState.PREPARED, entry.acts[FILES]))\n",
        "entry.acts[FILES])\n",
        f"{_CORE}::test_what_kubelet_waits_for_is_written_before_what_is_written_again_after_a_start",
    ),
    Mutation(
        "a group that has another number is no drift",
        "core/kinds/presence.py",
        "    if now.iommu_group != bound.iommu_group:\n",
        "    if now.iommu_group is None:\n",
        f"{_NODE}::test_no_files_name_a_group_that_another_card_has_after_a_rescan",
    ),
    Mutation(
        "a cdev that has another number is no drift",
        "core/kinds/presence.py",
        "    if bound.cdev is not None and now.fault is None and node not in now.nodes:\n",
        "    if bound.cdev is not None and now.fault is None and not now.nodes:\n",
        f"{_CORE}::test_another_cdev_number_is_a_drift_as_well",
    ),
    Mutation(
        "what cannot be read is taken for a drift",
        "core/kinds/presence.py",
        "    if bound.cdev is not None and now.fault is None and node not in now.nodes:\n",
        "    if bound.cdev is not None and node not in now.nodes:\n",
        f"{_CORE}::test_another_cdev_number_is_a_drift_as_well",
    ),
    Mutation(
        "a device that an act has just moved has drifted",
        "core/gpus/placement.py",
        "    return function.address not in state.gpus.settled\n",
        "    return True\n",
        f"{_CORE}::test_a_device_that_its_own_act_has_just_bound_has_not_drifted",
    ),
    Mutation(
        "a daemon that takes over says a drift before it serves",
        "core/claims/progress.py",
        "    if view.state.daemon.role is not Role.SERVING or not view.claims.loaded:\n",
        "    if not view.claims.loaded:\n",
        f"{_CORE}::test_what_has_moved_is_said_once_at_a_start_which_reads_the_checkpoint_twice",
    ),
    Mutation(
        "files that are still to be removed name no number any more",
        "core/gpus/placement.py",
        "    if not entry.has_files or entry.state not in OWNING:\n",
        "    if not entry.has_files or entry.state not in OWNING or entry.state is ClaimState.DRIFTED:\n",
        _MOVES,
    ),
    Mutation(
        "a card that is gone is no drift",
        "core/gpus/placement.py",
        '        return Reason(Cause.GONE, f"{gpu.key} is gone from this node")\n',
        "        return None\n",
        _MOVES,
    ),
    Mutation(
        "a card that was plugged in under an act is pre-bound",
        "core/gpus/returns.py",
        "    if not by_address.keys() <= drivers.keys():\n",
        "    if False:\n",
        f"{_WORLDS}[on its host driver, and swapped while it is bound for a claim]",
    ),
    Mutation(
        "the model of a claim's device counts for one boot",
        "core/gpus/exclusion.py",
        '    ids = reserved or next((original.ids for original in originals), "") or earlier.get(device.key, "")\n',
        '    ids = reserved or next((original.ids for original in originals), "")\n',
        _MOVES,
    ),
    Mutation(
        "claims are compared with their files only while a daemon runs",
        "core/gpus/placement.py",
        "        if (FILES in entry.acts or (changed and is_of(entry)))\n",
        "        if changed and is_of(entry)\n",
        _MOVES,
    ),
    Mutation(
        "the models of an earlier boot's claims are forgotten at the start",
        "acts/checkpoint.py",
        "                Checkpoint(earlier_models=models_of(checkpoint)),\n",
        "                Checkpoint(),\n",
        f"{_NODE}::test_another_model_in_the_slot_after_a_reboot_is_refused",
    ),
    Mutation(
        "the models of an earlier boot's claims are forgotten at the second start",
        "core/claims/stored.py",
        "    models_by_claim = dict(checkpoint.earlier_models)\n",
        "    models_by_claim = dict[ClaimUid, Mapping[DeviceKey, str]]()\n",
        f"{_NODE}::test_another_model_in_the_slot_after_a_second_reboot_is_refused",
    ),
    Mutation(
        "a model of an earlier boot is never forgotten",
        "core/state/claims.py",
        "    if uid in claims.earlier_models and (entry.state in OWNING or entry.state in ENDED):\n",
        "    if uid in claims.earlier_models and entry.state in OWNING:\n",
        f"{_CORE}::test_the_models_of_an_earlier_boot_are_kept_on_disk_until_the_claim_is_prepared_or_unprepared",
    ),
    Mutation(
        "who waits for the disk behind others is late when its own time is over",
        "host/threads.py",
        "                if not await Patience(seconds).ends(turn) and self.ended == ended:\n",
        "                if not await Patience(seconds).ends(turn) and self.ended >= ended:\n",
        f"{_QUEUE}::test_a_call_is_not_late_because_of_the_calls_before_it",
    ),
    Mutation(
        "a read is late when the loop is",
        "concurrency/patience.py",
        "                self._steps -= 1\n",
        "                self._steps = 0\n",
        "tests/concurrency/test_patience.py::test_a_loop_that_is_late_costs_one_step",
    ),
    Mutation(
        "inspections that hang keep their slots",
        "host/reader.py",
        "                with trio.move_on_after(self._inspection_stall_s):\n"
        "                    await reading.over.wait()\n",
        "                await patience.ends(reading.over)\n",
        f"{_INSPECTIONS}::test_inspections_that_hang_hold_up_no_other_until_their_deadline",
    ),
    Mutation(
        "who gives up its place in the queue holds up the next",
        "host/threads.py",
        "            self._waiting.remove(turn)\n",
        "            pass\n",
        f"{_QUEUE}::test_who_gives_up_its_place_holds_up_nobody",
    ),
    Mutation(
        "every read asks an overloaded server",
        "actors/api_retry.py",
        "                if self._failures and left_s > 0:\n",
        "                if self._failures and left_s > API_BACKOFF_S[-1]:\n",
        f"{_READS}::test_an_overloaded_server_is_asked_by_one_read_after_each_wait",
    ),
    Mutation(
        "one claim that must not be read holds up the others",
        "actors/api_retry.py",
        "            if _is_of_server(exc) and began >= self._closed_at:\n",
        "            if began >= self._closed_at:\n",
        f"{_READS}::test_what_is_about_one_object_holds_up_no_other",
    ),
)

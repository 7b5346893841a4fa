"""Bugs to plant in the CDI files of the device plugin: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_CORE: Final = "tests/core/test_specs.py"
_DISK: Final = "tests/acts/test_spec_files.py"
_KEEPER: Final = "tests/actors/test_spec_keeper.py"

SPECS: Final = (
    Mutation(
        "a device is Healthy before its CDI file is written",
        "core/deviceplugin/specs.py",
        "    if on_disk == one_backend(device.nodes):\n",
        "    if on_disk in (None, one_backend(device.nodes)):\n",
        f"{_CORE}::test_a_free_device_is_healthy_when_its_file_is_written_and_not_before",
    ),
    Mutation(
        "a device is Healthy by a CDI file with the nodes that it had before",
        "core/deviceplugin/specs.py",
        "    if on_disk == one_backend(device.nodes):\n",
        "    if on_disk is not None:\n",
        f"{_CORE}::test_a_device_in_another_group_is_withheld_and_its_call_waits_until_the_file_has_that_group",
    ),
    Mutation(
        "a device that comes back is offered by a file that is being written without it",
        "core/deviceplugin/specs.py",
        "    if specs is None or specs is state.published.specs:\n        return before\n",
        "    return before\n",
        f"{_CORE}::test_a_device_that_comes_back_is_withheld_until_its_file_is_written_again",
    ),
    Mutation(
        "a device is offered by a write that the next one undoes",
        "actors/spec_keeper.py",
        "            if wanted.version != version:\n",
        "            if False:\n",
        f"{_KEEPER}::test_a_write_that_a_newer_wish_overtakes_is_not_posted",
    ),
    Mutation(
        "a device that a pod has is Unhealthy for want of a CDI file",
        "core/deviceplugin/entries.py",
        "            if not is_allocated and (why",
        "            if (why",
        f"{_CORE}::test_a_device_that_a_pod_has_stays_healthy_without_a_file",
    ),
    Mutation(
        "a device whose pod has just left is Healthy under a name that is no CDI kind",
        "core/deviceplugin/entries.py",
        "            if not is_allocated and (why",
        "            if held is None and (why",
        f"{_CORE}::test_a_model_without_a_name_is_withheld_also_when_the_pod_of_its_old_name_has_just_left",
    ),
    Mutation(
        "a device that is gone leaves the CDI file under its pod",
        "core/deviceplugin/specs.py",
        "            kept = before.get(entry.id, ())\n",
        "            kept = before.get(entry.id, ())[:0]\n",
        f"{_CORE}::test_a_device_that_is_gone_stays_in_the_file_until_its_pod_has_ended",
    ),
    Mutation(
        "the name of a device that is gone leads to the device that has its node now",
        "core/deviceplugin/specs.py",
        "            nodes = () if any(behind.get(node, set()) - {entry.key} for node in kept) else kept\n",
        "            nodes = kept\n",
        f"{_CORE}::test_a_device_that_is_gone_leaves_the_file_when_another_one_has_its_node",
    ),
    Mutation(
        "a resource without devices has a CDI file, which is none and fails every sandbox",
        "core/deviceplugin/specs.py",
        "before.get(resource, _NONE)))\n",
        "before.get(resource, _NONE))) is not None\n",
        f"{_CORE}::test_a_resource_without_devices_has_no_file",
    ),
    Mutation(
        "a container gets the device nodes of both backends",
        "core/kinds/container.py",
        "    return tuple(legacy if any(node != CONTAINER_NODE for node in legacy) else cdevs)\n",
        "    return tuple(in_order if any(node != CONTAINER_NODE for node in legacy) else cdevs)\n",
        f"{_CORE}::test_kata_resolves_every_answer_by_the_files_and_it_has_nothing_else",
    ),
    Mutation(
        "a name that another program's file has as well is offered",
        "core/deviceplugin/specs.py",
        '    others = [spec for spec in specs.specs if resource_of(spec.path.rpartition("/")[2]) is None]\n',
        '    others = [spec for spec in specs.specs if resource_of(spec.path.rpartition("/")[2]) is not None]\n',
        f"{_CORE}::test_a_name_that_another_programs_file_has_as_well_is_withheld_until_the_file_is_gone",
    ),
    Mutation(
        "a daemon that has handed over writes the CDI files of its successor",
        "core/deviceplugin/specs.py",
        "    return None if specs is None or role is Role.HANDED_OVER else SpecsWanted(specs, role is Role.SERVING)\n",
        "    return None if specs is None else SpecsWanted(specs, role is not Role.TAKING_OVER)\n",
        f"{_CORE}::test_only_the_serving_daemon_writes_and_one_that_serves_again_writes_anew",
    ),
    Mutation(
        "a daemon takes over before it has looked which CDI files are there",
        "core/deviceplugin/specs.py",
        "    return state.published.specs is None or state.published.specs_are_known\n",
        "    return True\n",
        f"{_CORE}::test_a_daemon_takes_over_when_it_has_looked_which_files_are_there_and_offers_what_they_have_at_once",
    ),
    Mutation(
        "a file with other nodes is found",
        "acts/spec_files.py",
        "            return content_of(self._disk, path, limits.CLAIMS_FILE_MAX_BYTES) == _text(resource, spec)\n",
        "            return content_of(self._disk, path, limits.CLAIMS_FILE_MAX_BYTES) is not None\n",
        f"{_DISK}::test_a_file_is_found_only_as_it_is_to_be_and_looking_changes_nothing",
    ),
    Mutation(
        "Allocate gives a GPU that the old virtual machine still has open",
        "core/deviceplugin/calls.py",
        "                return _Held()\n",
        "                pass\n",
        f"{_CORE}::test_allocate_waits_until_the_old_machine_has_released_the_device",
    ),
    Mutation(
        "an Allocate that waits outlasts the hand-over",
        "core/deviceplugin/calls.py",
        "    if deadline == call.deadline or state.daemon.role is not Role.SERVING or state.daemon.stopping:\n",
        "    if deadline == call.deadline or state.daemon.stopping:\n",
        f"{_CORE}::test_an_allocate_that_waits_ends_soon_after_a_hand_over",
    ),
    Mutation(
        "a file is torn for a moment: it is written in its place",
        "acts/spec_files.py",
        "                    put_unsynced(self._disk, path, _text(resource, spec), limits.CLAIMS_FILE_MAX_BYTES)\n",
        "                    self._disk.write(path, _text(resource, spec))\n",
        f"{_DISK}::test_killed_at_any_operation_each_file_is_the_old_or_the_new_one_and_the_next_write_heals",
    ),
    Mutation(
        "another program's file is removed",
        "core/values/device_spec.py",
        "    return resource if is_kind(resource) and file_name(resource) == name else None\n",
        "    return resource\n",
        f"{_DISK}::test_a_torn_or_foreign_file_of_the_name_is_replaced_and_others_are_left",
    ),
    Mutation(
        "a daemon that serves again never hears that its files are there",
        "actors/spec_keeper.py",
        "            if (version, written) != posted:\n",
        "            if posted is None or written != posted[1]:\n",
        f"{_KEEPER}::test_a_daemon_that_does_not_serve_writes_nothing_and_one_that_serves_again_posts_again",
    ),
)
"""All of them."""

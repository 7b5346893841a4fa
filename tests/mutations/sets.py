"""Bugs to plant in the sets of devices: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_PREFERRED: Final = "tests/core/test_sets_preferred.py"
_READ: Final = "tests/core/kinds/test_set_sources.py"
_SETS: Final = "tests/core/kinds/test_sets.py"
_EGM: Final = "tests/core/test_egm.py"
_SWITCHES: Final = "tests/host/test_nvswitches.py"
_WIRED: Final = "tests/core/test_sets_wired.py"
_ANY_WORLD: Final = (
    f"{_PREFERRED}::test_any_answer_has_the_size_no_device_twice_and_breaks_up_no_more_than_the_best"
)

SETS: Final = (
    Mutation(
        "a partition that breaks up more is as good",
        "core/deviceplugin/set_choice.py",
        "        sum(not (ids.isdisjoint(other) or ids.issuperset(other)) for other in whole),\n",
        "",
        _ANY_WORLD,
    ),
    Mutation(
        "a partition that splits an IOMMU group is as good",
        "core/deviceplugin/set_choice.py",
        "        sum(not ids.issuperset(group.ids) for group in touched),\n",
        "",
        _ANY_WORLD,
    ),
    Mutation(
        "an EGM of the right size is a partition",
        "core/deviceplugin/set_choice.py",
        "if found.is_partition and len(ids) == size",
        "if len(ids) == size",
        f"{_PREFERRED}::test_a_partition_comes_before_an_egm_of_that_size",
    ),
    Mutation(
        "a partition need not have what must be included",
        "core/deviceplugin/set_choice.py",
        " and ids.issuperset(must)",
        "",
        f"{_PREFERRED}::test_what_must_be_included_is_in_the_set",
    ),
    Mutation(
        "the GPUs of an EGM are chosen one by one",
        "core/deviceplugin/allocation.py",
        "        if len(parts) > 1:\n",
        "        if len(parts) > len(keys):\n",
        f"{_PREFERRED}::test_no_egm_is_broken_up_if_whole_ones_can_do",
    ),
    Mutation(
        "the search for a set takes no steps",
        "core/deviceplugin/set_choice.py",
        "not search.has(len(whole) + len(groups))",
        "not search.has(0)",
        f"{_PREFERRED}::test_a_search_without_steps_still_takes_a_set_the_active_one_first",
    ),
    Mutation(
        "two partitions together are a set",
        "core/kinds/sets.py",
        "any(in_partitions == set(s.devices) for s in partitions)",
        "any(in_partitions >= set(s.devices) for s in partitions)",
        f"{_SETS}::test_what_is_no_partition_is_refused_with_the_partitions_of_its_size",
    ),
    Mutation(
        "free devices that are no set come before a set although sets are required",
        "core/deviceplugin/allocation.py",
        "for pool in pools if sets_required else pools[:1]:",
        "for pool in pools[:1]:",
        f"{_WIRED}::test_a_set_with_a_gpu_whose_pod_has_just_ended_is_preferred_where_sets_are_required",
    ),
    Mutation(
        "a number of the operator's is one of the fabric manager's",
        "core/kinds/sets.py",
        "for s in of_fabric or of_size if",
        "for s in of_size if",
        f"{_SETS}::test_a_number_of_the_operators_is_never_taken_for_one_of_the_fabric_manager",
    ),
    Mutation(
        "a module id of 0 is known",
        "core/kinds/sets.py",
        "modules.get(key) or None",
        "modules.get(key)",
        f"{_SETS}::test_a_slice_says_the_partitions_the_module_and_the_egm",
    ),
    Mutation(
        "an address that contradicts the UUID is not compared",
        "core/kinds/set_sources.py",
        "if len(by_uuid) > 1 or address not in (None, by_uuid[0]):",
        "if len(by_uuid) > 1:",
        f"{_READ}::test_a_contradiction_refuses_its_partition_alone",
    ),
    Mutation(
        "a UUID that contradicts the address is not compared",
        "core/kinds/set_sources.py",
        "            if uuid and gpu.uuid:\n",
        "            if uuid == gpu.uuid != '':\n",
        f"{_READ}::test_a_contradiction_refuses_its_partition_alone",
    ),
    Mutation(
        "a physical id is a module id whatever else the list has",
        "core/kinds/set_sources.py",
        "    if by_uuid:\n        if",
        "    if by_uuid and not info.physical_id:\n        if",
        f"{_READ}::test_physical_ids_of_an_a100_are_no_module_ids",
    ),
    Mutation(
        "Allocate grants what is no set",
        "core/deviceplugin/calls.py",
        "    if refused is None and kind is CallKind.ALLOCATE:\n",
        "    if refused is None and kind is CallKind.PRE_START:\n",
        f"{_WIRED}::test_allocate_refuses_what_is_no_set_at_once",
    ),
    Mutation(
        "a set is required where it is only preferred",
        "core/deviceplugin/calls.py",
        "    if not state.daemon.settings.sets_required:\n        return None\n",
        "",
        f"{_WIRED}::test_where_sets_are_preferred_any_devices_are_granted",
    ),
    Mutation(
        "the devices of another resource are missing in a call",
        "core/deviceplugin/calls.py",
        "if name != resource and",
        "if not name and",
        f"{_WIRED}::test_a_set_of_gpus_and_switches_is_a_set_for_each_resource",
    ),
    Mutation(
        "sets that were never read are none",
        "core/host/sets.py",
        "for read in of_partitions if read.known is None]",
        "for read in of_partitions if read.known and read.unread]",
        f"{_WIRED}::test_nothing_is_granted_before_the_sets_are_known",
    ),
    Mutation(
        "a file that cannot be read empties the sets",
        "core/host/sets.py",
        "now = replace(before, unread=event.known)",
        "now = SetsOfSource(unread=event.known)",
        f"{_WIRED}::test_the_last_sets_count_while_the_file_cannot_be_read",
    ),
    Mutation(
        "a claim prepares what is no set",
        "core/gpus/exclusion.py",
        "(no_set := not_a_set(keys, state.sets)) is not None",
        "(no_set := not_a_set((), state.sets)) is not None",
        f"{_WIRED}::test_the_prepare_of_a_claim_refuses_what_is_no_set",
    ),
    Mutation(
        "a claim does not wait for the sets",
        "core/gpus/exclusion.py",
        "            return Conflict(unknown)\n",
        "            return None\n",
        f"{_WIRED}::test_a_claim_waits_until_the_sets_are_known",
    ),
    Mutation(
        "a list is believed although its command has failed",
        "host/partition_command.py",
        "        if answer.status != 0:\n",
        "        if answer.status < 0:\n",
        "tests/host/test_partition_command.py::test_a_command_that_fails_is_named_with_the_remedy",
    ),
    Mutation(
        "the module ids of the file are not those of the list",
        "core/kinds/set_sources.py",
        "identities(functions.values(), modules)",
        "identities(functions.values(), {})",
        f"{_WIRED}::test_a_gpu_is_found_by_its_module_id_where_the_list_has_no_more",
    ),
    Mutation(
        "the sets are read once",
        "actors/sets_reader.py",
        "            last = now\n            await inbox.send(now)\n",
        "            last = now\n",
        "tests/actors/test_sets_reader.py::test_what_has_changed_is_posted_at_the_next_read",
    ),
    Mutation(
        "calls are answered before the sets are read",
        "daemon/app.py",
        "            await post.send(first)  # before every other event: no call is answered without the sets\n",
        "",
        "tests/actors/test_sets_reader.py::test_the_daemon_knows_the_sets_before_anything_else",
    ),
    Mutation(
        "an EGM goes with a part of its GPUs",
        "core/kinds/sets.py",
        "s.node and requested.issuperset(s.devices)",
        "s.node and not requested.isdisjoint(s.devices)",
        f"{_EGM}::test_a_container_gets_the_node_with_all_gpus_of_the_egm",
    ),
    Mutation(
        "by CDI names a container gets no EGM",
        "core/deviceplugin/calls.py",
        "Grant((), egms, tuple(",
        "Grant((), (), tuple(",
        f"{_EGM}::test_by_cdi_names_it_is_the_only_node_beside_them",
    ),
    Mutation(
        "EGMs that were never read refuse every device",
        "core/host/sets.py",
        "if source in _OF_PARTITIONS)",
        ")",
        f"{_EGM}::test_egms_that_were_never_read_refuse_nothing",
    ),
    Mutation(
        "a claim's files are written by the EGMs of before its binding",
        "actors/claim_worker.py",
        "            await read_egms()\n",
        "",
        "tests/actors/test_claim_worker.py::test_the_egms_are_read_between_an_act_and_its_event",
    ),
    Mutation(
        "Allocate is answered by the EGMs of before the call",
        "actors/sysfs_inspector.py",
        "                await read_egms()\n",
        "",
        "tests/actors/test_sysfs_inspector.py::test_the_egms_are_read_before_each_inspection",
    ),
    Mutation(
        "the device node of an EGM is opened",
        "host/egm.py",
        'return os.path.exists(self._root.real(f"{DEV}/{name}"))',
        'return bool(os.open(self._root.real(f"{DEV}/{name}"), os.O_RDONLY))',
        "tests/host/test_egm.py::test_the_device_node_is_never_opened",
    ),
    Mutation(
        "a read of the EGMs that hangs is begun again",
        "host/egm.py",
        "if self._hanging is None or self._hanging.over.is_set():",
        "if True:",
        "tests/host/test_egm.py::test_a_read_that_hangs_is_given_up_and_later_ones_end_at_once",
    ),
    Mutation(
        "every InfiniBand card is the bridge to NVSwitches",
        "host/nvlink_bridges.py",
        'return _MARK in read_plain(f"{directory}/vpd", VPD_MAX_BYTES)',
        "return True",
        f"{_SWITCHES}::test_what_looks_like_a_bridge_is_no_sign",
    ),
    Mutation(
        "a claim takes a GPU from the host's fabric where NVSwitches are no functions",
        "core/gpus/exclusion.py",
        "    bridges = state.known_sets.bridges\n",
        "    bridges = ()\n",
        f"{_SWITCHES}::test_the_bridges_to_switches_that_are_no_functions_are_the_sign_of_the_hosts_fabric",
    ),
)

"""Bugs to plant in what is the host's and not ours: its devices, its numbers, its files. Each names the test that finds
it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

HOST: Final = (
    Mutation(
        "a group is opened by a number that is another card's by now",
        "host/use.py",
        "        return frozenset(target.functions) <= frozenset(members)\n",
        "        return bool(members)\n",
        "tests/host/test_use.py::test_a_group_that_is_another_cards_by_now_is_not_opened_and_nothing_is_known_of_it",
    ),
    # --- the group of a GPU, and what is the host's in it ------------------------------------------------------------
    Mutation(
        "a bridge in the slot is a companion",
        "core/kinds/viability.py",
        "        and not is_bridge(other.class_code)\n",
        "",
        "tests/core/kinds/test_viability.py::test_no_companion_is_a_bridge_of_the_slot_nor_what_is_on_a_stub",
    ),
    Mutation(
        "a function of an unknown vendor is a companion of one",
        "core/kinds/viability.py",
        'other.vendor == gpu.vendor != ""',
        "other.vendor == gpu.vendor",
        "tests/core/kinds/test_viability.py::test_of_a_gpu_whose_vendor_cannot_be_read_nothing_is_a_companion",
    ),
    Mutation(
        "a port of PCI Express keeps a group from everybody",
        "core/kinds/viability.py",
        'frozenset({"pci-stub", "pcieport"})',
        'frozenset({"pci-stub"})',
        "tests/core/kinds/test_viability.py::test_what_leaves_a_group_viable_is_neither_in_the_way_nor_written_to",
    ),
    Mutation(
        "a companion on pci-stub is bound",
        "core/kinds/viability.py",
        " and member.driver not in _WITHOUT_DMA)\n",
        ")\n",
        "tests/core/kinds/test_viability.py::test_no_companion_is_a_bridge_of_the_slot_nor_what_is_on_a_stub",
    ),
    Mutation(
        "a member that is no PCI function is in nobody's way",
        "core/kinds/viability.py",
        '        if not driver.startswith("vfio"):',
        "        if False:",
        "tests/core/kinds/test_viability.py::test_a_member_that_is_no_pci_function_is_in_the_way_as_long_as_the_host_uses_it",
    ),
    Mutation(
        "a member that is no PCI function and is on vfio is in the way",
        "core/kinds/viability.py",
        '        if not driver.startswith("vfio"):',
        "        if driver:",
        "tests/core/kinds/test_viability.py::test_a_member_that_is_no_pci_function_is_in_the_way_as_long_as_the_host_uses_it",
    ),
    Mutation(
        "a group with a reserved region is offered to claims",
        "core/gpus/offer.py",
        "    return kind.not_viable(device, kind.to_bind(device)) or kind.of_the_hosts_fabric",
        "    return kind.of_the_hosts_fabric",
        "tests/core/kinds/test_viability.py::test_a_claim_leaves_the_hosts_functions_alone_and_names_the_one_in_its_way",
    ),
    Mutation(
        "a claim with two GPUs of one group is refused for each other",
        "core/gpus/exclusion.py",
        "kind.not_viable(device, (*kind.to_bind(device), *of_the_claim))",
        "kind.not_viable(device, kind.to_bind(device))",
        "tests/core/kinds/test_viability.py::test_two_gpus_of_one_group_are_given_to_one_claim_and_to_no_other",
    ),
    # --- claims' files, and the numbers that they name ---------------------------------------------------------------
    Mutation(
        "files are written while another claim's name the same node",
        "core/gpus/placement.py",
        " and not any(of_claims.named[node] > 1 for node in nodes)\n",
        "\n",
        "tests/core/gpus/test_renumbering.py::test_of_two_files_that_swap_numbers_the_old_ones_are_removed_first",
    ),
    Mutation(
        "a companion in another group is no drift",
        "core/gpus/placement.py",
        "    for original in gpu.functions if entry.has_files else ():\n"
        "        bound = gpus_of(entry).bound.get(original.address)\n",
        "    for original in gpu.functions[:1] if entry.has_files else ():\n"
        "        bound = gpus_of(entry).bound.get(original.address)\n",
        "tests/core/gpus/test_renumbering.py::test_a_companion_in_another_group_is_a_drift_as_well",
    ),
    Mutation(
        "missing files are written before the devices were seen",
        "core/gpus/placement.py",
        "            return state.host.scanned and keys",
        "            return keys",
        "tests/core/gpus/test_renumbering.py::test_files_that_are_touched_before_the_first_scan_are_not_written_by_old_numbers",
    ),
    Mutation(
        "another model in the slot is no drift",
        "core/gpus/placement.py",
        "    if (replaced := another_model(state, entry, device)) is not None:\n        return replaced\n",
        "",
        "tests/core/gpus/test_renumbering.py::test_another_model_is_a_drift_also_where_nobody_saw_the_first_one_go",
    ),
    Mutation(
        "only the claim of a function that changed is looked at",
        "core/gpus/placement.py",
        "        return is_in or any(key in changed for key in _inspected_keys(before.index, entry))\n",
        "        return any(key in changed for key in _inspected_keys(before.index, entry))\n",
        "tests/core/gpus/test_renumbering.py::test_a_companion_that_comes_and_is_on_its_host_driver_is_a_drift_as_well",
    ),
    # --- compute domains ---------------------------------------------------------------------------------------------
    Mutation(
        "while a clique is there no status counts",
        "core/domains/exclusion.py",
        "view.is_ready_by_status(settings.node) and _is_of_now",
        "view.clique is None and view.is_ready_by_status(settings.node) and _is_of_now",
        "tests/core/domains/test_readiness.py::test_a_clique_without_the_node_does_not_outrank_a_status_that_goes_on_to_say_ready",
    ),
    # --- calls that wait while the host changes ----------------------------------------------------------------------
    Mutation(
        "a call is answered from an inspection after which uevents were missed",
        "core/step.py",
        "    wanted = inspections.ask_inspections(wanted, sorted(waited_for))\n",
        "",
        "tests/core/test_calls.py::test_a_call_is_not_answered_from_an_inspection_after_which_uevents_were_missed",
    ),
    Mutation(
        "a call is answered from an inspection that a uevent has outdated",
        "core/host/inspections.py",
        "    is_outdated = wanted.again or wanted.outstanding > seen.inspection\n",
        "    is_outdated = False\n",
        "tests/core/test_calls.py::test_a_call_is_not_answered_from_an_inspection_that_a_uevent_has_outdated",
    ),
    Mutation(
        "a daemon that could not read kubelet's file offers what a pod has",
        "core/deviceplugin/device_lists.py",
        " or _awaits_owners(state):\n",
        ":\n",
        "tests/core/test_asking.py::"
        "test_a_daemon_that_could_not_read_kubelets_file_registers_when_kubelet_has_listed_its_pods",
    ),
    # --- what a container left ---------------------------------------------------------------------------------------
    Mutation(
        "what is mounted in a tree is emptied",
        "acts/tree.py",
        "            if _mount_of(top) != _mount_of(parent):\n",
        "            if False:\n",
        "tests/acts/test_tree.py::test_what_is_mounted_is_not_touched",
    ),
    Mutation(
        "a link in the place of a directory is followed and emptied",
        "acts/tree.py",
        "os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_DIRECTORY | os.O_NONBLOCK",
        "tests/acts/test_tree.py::test_a_link_that_takes_the_place_of_a_directory_is_not_followed",
    ),
    Mutation(
        "one bound for each directory of a tree",
        "acts/tree.py",
        "            with _opened(name, self._top) as inner:\n",
        "            self._removed = 0\n            with _opened(name, self._top) as inner:\n",
        "tests/acts/test_tree.py::test_one_act_removes_no_more_than_its_bound_and_the_next_goes_on",
    ),
    Mutation(
        "null is no list of objects",
        "kube/objects.py",
        "    items: list[T] | None\n",
        "    items: list[T]\n",
        "tests/kube/test_domains.py::test_a_domain_that_is_absent_or_made_anew_by_its_name_is_none",
    ),
)

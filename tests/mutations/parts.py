"""Bugs to plant in what is known of the parts of cards, virtual functions above all: each names the test that finds it
in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_CROSSINGS: Final = "tests/core/gpus/test_crossings.py"
_KIND: Final = "tests/core/kinds/test_virtual_function.py"
_RULES: Final = "tests/core/test_virtual_functions.py"
_READ: Final = "tests/host/test_sysfs.py"
_VGPU: Final = "tests/core/kinds/test_vgpu.py"
_NAMES: Final = "tests/core/test_vgpu_names.py"
_OWN: Final = "tests/core/kinds/test_own_resources.py"
_MDEV: Final = "tests/core/kinds/test_mediated_device.py"

_ABOVE: Final = "        excluded = [(other, True) for other in above]"
_BELOW: Final = "[(other, False) for other in parts.get(key, ())]\n"
_EXCLUDED: Final = f"{_ABOVE} + {_BELOW}"
_COMPANION: Final = f"{_KIND}::test_neither_a_virtual_function_nor_one_that_has_some_is_a_companion"

PARTS: Final = (
    # --- who excludes whom ----------------------------------------------------------------------------------
    Mutation(
        "the virtual functions of a card exclude each other",
        "core/devices/holdings.py",
        _EXCLUDED,
        f"{_EXCLUDED}"
        "        excluded += [(s, True) for other in above for s in parts.get(other, ()) if s != key]\n",
        f"{_CROSSINGS}::test_while_a_part_has_an_owner_the_card_is_held_and_the_other_part_is_free",
    ),
    Mutation(
        "the owner of a card does not exclude its parts",
        "core/devices/holdings.py",
        _EXCLUDED,
        f"{_ABOVE}\n",
        f"{_CROSSINGS}::test_while_a_card_has_an_owner_a_part_that_is_made_is_not_given",
    ),
    Mutation(
        "the owner of a part does not exclude its card",
        "core/devices/holdings.py",
        _EXCLUDED,
        f"        excluded = {_BELOW}",
        f"{_CROSSINGS}::test_while_a_part_has_an_owner_the_card_is_held_and_the_other_part_is_free",
    ),
    # --- which virtual function a virtual machine could open --------------------------------------------------
    Mutation(
        "a virtual function of a card on vfio-pci is given away",
        "core/kinds/virtual_function.py",
        "    if physical.vfio_bound:\n",
        "    if physical.vfio_bound and not function.vfio_bound:\n",
        f"{_RULES}::test_neither_is_given_away_while_the_physical_one_is_on_vfio",
    ),
    Mutation(
        "a virtual function of a card on no driver is given away",
        "core/kinds/virtual_function.py",
        "    if physical.driver is None:\n",
        "    if physical.driver is None and physical.has_virtual_functions is False:\n",
        f"{_RULES}::test_one_whose_physical_function_is_not_ready_is_not_given_away",
    ),
    Mutation(
        "a virtual function in a GPU's slot is bound as its companion",
        "core/kinds/viability.py",
        "        and not other.is_virtual\n",
        "",
        _COMPANION,
    ),
    Mutation(
        "a card with virtual functions is bound as a companion",
        "core/kinds/viability.py",
        "        and not other.has_virtual_functions\n",
        "",
        _COMPANION,
    ),
    Mutation(
        "virtual functions with the ids of their card are counted in its resource",
        "core/values/inventory.py",
        "    is_shared = ids_of(function) == ids_of(physical) or name == named(physical, selectors)\n",
        "    is_shared = ids_of(function) != ids_of(physical) and name == named(physical, selectors)\n",
        f"{_KIND}::test_its_resource_is_never_that_of_its_physical_function",
    ),
    # --- names that the operator gives ------------------------------------------------------------------------
    Mutation(
        "of several rules the last one names a device",
        "core/values/own_resources.py",
        "    for selector in selectors:\n        if selector.resource is not None and matches(\n",
        "    for selector in reversed([*selectors]):\n        if selector.resource is not None and matches(\n",
        f"{_OWN}::test_the_first_rule_that_matches_names_a_device_before_the_name_of_its_model",
    ),
    Mutation(
        "a rule for functions names the mediated devices of these as well",
        "core/kinds/mediated_device.py",
        "        if s.resource is None or s.mdev is None:\n",
        "        if s.resource is None:\n",
        f"{_OWN}::test_a_vgpu_by_vendor_vfio_and_a_mediated_device_keep_the_name_of_their_profile_beside_a_rule_for_functions",
    ),
    Mutation(
        "a card with virtual functions keeps these from its name",
        "core/devices/mixed.py",
        "    if device.parts:\n        return None\n",
        "",
        f"{_OWN}::test_a_card_with_virtual_functions_keeps_none_of_them_from_its_name",
    ),
    Mutation(
        "a pod cannot start its device again when another one has got the same name",
        "core/assessment/blockers.py",
        " if device.mixed and holding is None else None\n",
        " if device.mixed else None\n",
        f"{_OWN}::test_a_device_that_a_pod_has_keeps_the_name_until_the_pod_ends",
    ),
    # --- how it is known ----------------------------------------------------------------------------------
    Mutation(
        "a hint about a card is none about its virtual functions",
        "core/host/inspections.py",
        "        virtual = [a for a, f in host.functions.items() if f.physical == event.address]\n",
        "        virtual = list[PciAddress]()\n",
        f"{_RULES}::test_a_hint_about_the_physical_function_is_one_about_its_virtual_ones",
    ),
    Mutation(
        "what an outstanding inspection finds is believed after a virtual function has gone",
        "core/host/inspections.py",
        "if f.has_virtual_functions or a in outstanding]\n",
        "if f.has_virtual_functions]\n",
        f"{_RULES}::test_a_hint_about_an_unknown_function_is_one_about_what_is_being_inspected",
    ),
    Mutation(
        "a virtual function whose removal waits is a whole GPU",
        "core/host/inspections.py",
        "    if last is not None and function.physical is None and function.presence == last.presence != 0:\n",
        "    if last is not None and function.physical is None and function.fault is not None:\n",
        f"{_RULES}::test_one_that_is_removed_while_a_process_has_it_stays_a_virtual_function",
    ),
    Mutation(
        "the link to a virtual function that was removed by hand counts",
        "host/sysfs.py",
        '        name.startswith("virtfn") and os.path.exists(f"{directory}/{name}") for name in names_in(directory)\n',
        '        name.startswith("virtfn") for name in names_in(directory)\n',
        f"{_READ}::test_the_link_to_a_virtual_function_that_was_removed_by_hand_is_none",
    ),
    Mutation(
        "the card of a virtual function is read only if it is selected",
        "host/sysfs.py",
        "            self._add_physical(look, group)\n",
        "",
        f"{_READ}::test_the_physical_function_is_read_with_a_virtual_one_whatever_is_selected",
    ),
    # --- mediated devices and vGPUs -------------------------------------------------------------------------
    Mutation(
        "a mediated device is made by its parent alone, whose card nobody reads",
        "host/mdev.py",
        "        return (function,) if physical is None else (function, physical)\n",
        "        return (function,)\n",
        "tests/host/test_mdev.py::test_the_functions_that_it_is_a_part_of_come_with_it_chosen_or_not",
    ),
    Mutation(
        "the names of another card's vGPU types are used",
        "core/host/vgpu_names.py",
        "            of_card[function.physical].append(function.vgpu)\n",
        "            for of_one in of_card.values():\n                of_one.append(function.vgpu)\n",
        f"{_NAMES}::test_two_cards_of_one_model_may_number_differently",
    ),
    Mutation(
        "the names of vGPU types outlive a new bind of the card's driver",
        "core/host/vgpu_names.py",
        "    kept = known.names if known is not None and known.driver_bind == bind else {}\n",
        "    kept = known.names if known is not None else {}\n",
        f"{_NAMES}::test_a_new_bind_of_the_driver_ends_the_names",
    ),
    Mutation(
        "a vGPU that is retyped under a pod stays Healthy",
        "core/kinds/vgpu.py",
        "    return replace(device, model=name, unnamed=",
        "    return replace(device, unnamed=",
        f"{_VGPU}::test_one_that_is_retyped_under_a_pod_stays_listed_until_the_pod_ends",
    ),
    Mutation(
        "of lists that contradict each other the first name is used",
        "core/kinds/vgpu.py",
        '    name = names[0] if len(names) == 1 else ""\n',
        '    name = names[0] if names else ""\n',
        f"{_VGPU}::test_lists_that_contradict_each_other_name_nothing",
    ),
    Mutation(
        "a mediated device is named by the variable of PCI functions",
        "core/kinds/mediated_device.py",
        "    env_prefix: Final = MEDIATED_ENV_PREFIX\n",
        '    env_prefix: Final = "PCI_RESOURCE_"\n',
        f"{_MDEV}::test_allocate_gives_its_own_nodes_and_one_variable",
    ),
    Mutation(
        "the wait for the link to a mediated device's type is dropped",
        "core/host/inspections.py",
        "        return part.fault is None and part.type_id is not None and (",
        "        return part.fault is None and (",
        f"{_MDEV}::test_one_that_is_made_later_is_listed_when_the_kernel_has_linked_its_type",
    ),
    Mutation(
        "the cdev of a mediated device is given with it",
        "core/kinds/mediated_device.py",
        "        nodes=mediated.nodes,\n",
        '        nodes=(*mediated.nodes, *(f"/dev/vfio/devices/{cdev}" for cdev in mediated.cdevs)),\n',
        f"{_MDEV}::test_allocate_gives_its_own_nodes_and_one_variable",
    ),
    Mutation(
        "iommufd is given with a mediated device",
        "host/mdev.py",
        "        own = (CONTAINER_NODE, *(",
        '        own = (CONTAINER_NODE, "/dev/iommu", *(',
        "tests/host/test_mdev.py::test_its_nodes_are_those_of_the_legacy_container_on_a_kernel_with_iommufd",
    ),
    Mutation(
        "a mediated device that is made anew with another type is the same",
        "core/kinds/mediated_device.py",
        '        model=_PRINTABLE.sub("?", mediated.type_name)[:_MODEL_CHARS],\n',
        '        model="",\n',
        f"{_MDEV}::test_a_uuid_that_comes_back_with_another_type_is_another_device",
    ),
    Mutation(
        "the parent of a mediated device is given away with it",
        "core/kinds/mediated_device.py",
        "        parent=None if mediated.parent is None else device_key(mediated.parent),\n",
        "        parent=None,\n",
        f"{_MDEV}::test_its_parent_is_not_given_to_a_claim",
    ),
    Mutation(
        "all devices of a resource are named by the variable of one kind",
        "core/deviceplugin/calls.py",
        "        variables.setdefault(name, []).append(device.key)\n",
        "        variables.setdefault(min(variables, default=name), []).append(device.key)\n",
        "tests/core/kinds/test_kubevirt.py"
        "::test_a_profile_that_both_kinds_of_vgpu_have_is_one_resource_whose_units_may_be_mixed",
    ),
)

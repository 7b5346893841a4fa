"""Bugs to plant in what is known of a GPU's IOMMU group: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_RULE: Final = "tests/core/kinds/test_viability.py"
_ACT: Final = "tests/acts/test_driver.py"
_READ: Final = "tests/host/test_sysfs.py"

_HISTORIES: Final = (
    "tests/histories/test_groups.py::test_a_claim_gets_no_card_that_the_host_or_another_driver_has"
)

GROUPS: Final = (
    Mutation(
        "a platform device of the host is in nobody's way",
        "core/kinds/viability.py",
        '        if not driver.startswith("vfio"):  # vfio-platform, vfio-amba, vfio-fsl-mc\n',
        '        if driver.startswith("vfio"):\n',
        _HISTORIES,
    ),
    Mutation(
        "memory that firmware reserves is in nobody's way",
        "core/kinds/viability.py",
        "    if facts.direct_region:\n",
        "    if facts.direct_region and to_bind == ():\n",
        _HISTORIES,
    ),
    Mutation(
        "a claim is not asked who holds its card",
        "core/gpus/exclusion.py",
        '    return replace(held.reason, message=f"{held.reason.message}; {_WAITS}")\n',
        "    return None\n",
        _HISTORIES,
    ),
    Mutation(
        "a function of the GPU's vendor in another slot is a companion",
        "core/kinds/viability.py",
        "        and slot_of(other.address) == slot_of(gpu.address)\n",
        "",
        f"{_RULE}::test_the_companions_are_the_functions_of_the_slot_and_of_the_vendor",
    ),
    Mutation(
        "the security processor in the slot of a processor's graphics is a companion",
        "core/kinds/viability.py",
        '        and other.vendor == gpu.vendor != ""\n',
        "",
        f"{_RULE}::test_the_device_plugin_says_the_same",
    ),
    Mutation(
        "a bridge with any driver leaves a group viable",
        "core/kinds/viability.py",
        "    return member.driver is not None and",
        "    return not is_bridge(member.class_code) and member.driver is not None and",
        f"{_RULE}::test_a_claim_leaves_the_hosts_functions_alone_and_names_the_one_in_its_way",
    ),
    Mutation(
        "a claim of a GPU on vfio is not asked what else the host uses of the group",
        "core/gpus/exclusion.py",
        "        if hosts := of_the_host(state, device, keys):\n",
        "        if not device.has_backing and (hosts := of_the_host(state, device, keys)):\n",
        f"{_RULE}::test_a_claim_leaves_the_hosts_functions_alone_and_names_the_one_in_its_way",
    ),
    Mutation(
        "an act does not look what the host has taken since its claim was allowed",
        "acts/driver.py",
        "    if reason is not None:\n        raise ActError(ActFault.NOT_VIABLE",
        "    if reason is not None and not task.noted:\n        raise ActError(ActFault.NOT_VIABLE",
        f"{_ACT}::test_beside_a_function_of_the_host_nothing_is_written",
    ),
    Mutation(
        "the last guard lets an act write to the whole group",
        "acts/driver.py",
        "        if others := plan.written_to - task.may_write_to(group):\n",
        "        if others := plan.written_to - task.may_write_to(group) - task.noted.keys():\n",
        f"{_ACT}::test_whatever_is_planned_nothing_is_written_to_another_slot",
    ),
    Mutation(
        "the last guard lets the act of a virtual function write to another one",
        "acts/driver.py",
        "or (slot_of(f.address) in slots and not f.is_virtual)\n",
        "or slot_of(f.address) in map(slot_of, self.devices)\n",
        f"{_ACT}::test_whatever_is_planned_the_act_of_a_virtual_function_writes_to_no_other",
    ),
    Mutation(
        "only the first region of a group is looked at",
        "host/iommu.py",
        "    for line in text.splitlines():\n",
        "    for line in text.splitlines()[:1]:\n",
        f"{_READ}::test_a_region_that_firmware_reserves_one_to_one_is_of_the_whole_group",
    ),
    Mutation(
        "a region that a tenant may have keeps a group from every virtual machine",
        "host/iommu.py",
        "_REGION.fullmatch(line.strip())",
        "_REGION.match(line.strip())",
        f"{_READ}::test_a_region_that_firmware_reserves_one_to_one_is_of_the_whole_group",
    ),
)

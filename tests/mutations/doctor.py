"""Bugs to plant in the doctor, as `mutations.py`. Each breaks the tests that it names: no order of events shows it."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

HOST: Final = "tests/cli/doctor/test_host.py"
NODE: Final = "tests/cli/doctor/test_node.py"
REPORT: Final = "tests/cli/doctor/test_report.py"

DOCTOR: Final = (
    Mutation(
        "a DeviceClass with a resource of the device plugin is as any other one",
        "core/gpus/device_classes.py",
        "if one.extended_resource in ours)",
        "if one.name in ours)",
        tests=(f"{NODE}::test_a_class_with_a_resource_of_the_device_plugin",),
    ),
    Mutation(
        "DeviceClasses are looked at where the device plugin is off",
        "cli/doctor/facts.py",
        'config.device_plugin == config.dra == "on"',
        'config.dra == "on"',
        tests=(f"{NODE}::test_classes_are_not_looked_at_where_one_api_alone_offers_gpus",),
    ),
    Mutation(
        "a read that hangs hangs the doctor",
        "cli/doctor/gather.py",
        "    with trio.move_on_after(deadline_s):\n",
        "    with trio.CancelScope():\n",
        tests=(f"{HOST}::test_a_sysfs_that_hangs_does_not_hang_the_doctor",),
    ),
    Mutation(
        "a node without any GPU on vfio is only warned about",
        "cli/doctor/checks/gpus.py",
        "Level.WARN if bound else Level.FAIL",
        "Level.WARN",
        tests=(f"{HOST}::test_what_is_wrong_is_found_and_says_what_to_do",),
    ),
    Mutation(
        "a GPU that is still to be bound hides the host driver beside it",
        "cli/doctor/checks/gpus.py",
        "            found += _beside(view, function, devices, facts.config)\n",
        "",
        tests=(f"{HOST}::test_what_is_wrong_is_found_and_says_what_to_do",),
    ),
    Mutation(
        "a function that cannot be read is no GPU",
        "cli/doctor/checks/gpus.py",
        "        if function.fault is not None and function.address not in known:\n",
        "        if False:\n",
        tests=(f"{HOST}::test_what_is_wrong_is_found_and_says_what_to_do",),
    ),
    Mutation(
        "another plugin's devices are nobody's before installation",
        "cli/doctor/checks/kubelet.py",
        "    if not isinstance(facts.daemon, NoDaemon) and facts.daemon is not None:\n",
        "    if not isinstance(facts.daemon, NoDaemon):\n",
        tests=(f"{NODE}::test_another_plugin_serves_our_resource",),
    ),
    Mutation(
        "a daemon that has just started is not asked again",
        "cli/doctor/checks/daemon.py",
        "    if view.role != Role.SERVING or view.kubelet_problem or view.ledger_problem:\n",
        "    if view.role != Role.SERVING:\n",
        tests=(f"{NODE}::test_what_may_be_well_a_moment_later_is_read_again",),
    ),
    Mutation(
        "the daemon's settings are not asked for",
        "cli/doctor/gather.py",
        "settings.of_daemon(resolved, daemon) if isinstance(daemon, Running) else settings.own(resolved)",
        "settings.own(resolved)",
        tests=(f"{NODE}::test_a_healthy_node_has_nothing_to_be_done_and_the_settings_are_the_daemons",),
    ),
    Mutation(
        "the YAML for KubeVirt has the id as the kernel writes it",
        "cli/doctor/checks/kubevirt.py",
        '"{f.vendor}:{f.device}".upper())',
        '"{f.vendor}:{f.device}")',
        tests=(f"{REPORT}::test_the_yaml_is_what_kubevirt_takes_and_the_same_as_in_the_json",),
    ),
)

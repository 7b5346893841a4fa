"""What `inspect` and `explain` print: of a running daemon's view, and of one inspection of their own."""

from __future__ import annotations

import errno
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import trio
import yaml
from msgspec.structs import replace

from gpuactors.cli.formats import yaml_of
from gpuactors.cli.inspect.report import (
    WIDE,
    age,
    as_json,
    as_table,
    as_wide,
    explanation,
    explanation_json,
)
from gpuactors.cli.inspect.view import (
    Explained,
    Inspected,
    UnknownAddressError,
    explain,
    find,
    inspect,
)
from gpuactors.concurrency.latest import Latest
from gpuactors.config import Config
from gpuactors.control import client
from gpuactors.control.about import About
from gpuactors.control.node_view import view_of
from gpuactors.control.unix import UnixControl
from gpuactors.control.view import Change, NodeView
from gpuactors.core.events.daemon import ConfigUnused
from gpuactors.core.events.host import UeventsOpened, UeventsUnavailable
from gpuactors.core.reports.readiness import OFFERS_NOTHING
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Holder
from gpuactors.grpc_trio import Owner
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.core.builders import SETTINGS, A, Core, audio, gpu, node

GPU = "0000:23:00.0"
KEYS = [
    "address", "vendor", "device", "class", "driver", "iommu_group", "group_members", "numa_node", "model",
    "resource", "listed", "health", "cause", "needs_hand", "reason", "owner", "holders", "for_claims", "nodes",
    "since_s",
    "kind", "parent", "profile", "vm", "egm", "partitions",
]  # fmt: skip
QEMU = Holder(4711, "qemu-system-x86", "0b0f-uid")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A node with one GPU and its audio function, without kubelet and without a daemon."""
    tree = HostTree(tmp_path / "h")
    tree.plug(PciSpec(GPU, "10de", "2330", "030200", 0x23, driver="vfio-pci"))
    tree.plug(PciSpec("0000:23:00.1", "10de", "1aef", "040300", 0x23))
    (tmp_path / "s").mkdir()
    kubelet = tmp_path / "k"
    return Config(
        host_root=tmp_path / "h",
        kubelet_dir=kubelet,
        device_plugin_dir=kubelet / "device-plugins",
        state_dir=tmp_path / "s",
    )


def enable(config: Config, count: int) -> None:
    """The kernel's count of who has enabled the function."""
    function = config.host_root / f"sys/bus/pci/devices/{GPU}"
    (function / "enable").write_text(f"{count}\n")
    (function / "power/runtime_status").write_text("active\n")


def held_externally() -> Core:
    core = Core(gpu("23:00.0", numa_node=1), audio("23:00.1", 0x23, driver=None), gpu("24:00.0"))
    core.enabled[GPU] = 1
    core.holders[0x23] = (QEMU,)
    core.feed(UeventsOpened())
    core.pass_time(10)
    return core


WALL = datetime(2026, 11, 21, 22, 0, tzinfo=UTC).timestamp()


def by_daemon(core: Core) -> Inspected:
    source = "the running daemon (process 7, version 1.2.3)"
    return Inspected(view_of(core.state, core.at), True, source, node="gpu-17", wall=WALL)


def told(found: Inspected, *, reasons_only: bool = False) -> str:
    """The table of 100 columns without its line breaks; or the last column alone."""
    lines = as_table(found, 100).splitlines()
    if reasons_only:
        at = next(line.index("REASON") for line in lines if "REASON" in line)
        lines = [line[at:] for line in lines]
    return " ".join(" ".join(lines).split())


# --- whose view -------------------------------------------------------------------------------------------


def test_without_a_daemon_it_inspects_the_host_itself(config: Config) -> None:
    found = inspect(config)
    assert not found.by_daemon
    assert "gpuactors.sock" in found.source
    (device,) = json.loads(as_json(found))["devices"]
    assert list(device) == KEYS
    assert device == {
        "address": GPU,
        "vendor": "10de",
        "device": "2330",
        "class": "030200",
        "driver": "vfio-pci",
        "iommu_group": 0x23,
        "group_members": [GPU, "0000:23:00.1"],
        "numa_node": None,
        "model": "GH100 [H100 SXM5 80GB]",
        "resource": "nvidia.com/GH100_H100_SXM5_80GB",
        "listed": True,
        "health": "Healthy",
        "cause": "Free",
        "needs_hand": False,
        "reason": "free",
        "owner": None,
        "holders": [],
        "for_claims": None,
        "nodes": ["/dev/vfio/35"],
        "since_s": None,
        "kind": "pci-function",
        "parent": None,
        "profile": None,
        "vm": None,
        "egm": None,
        "partitions": [],
    }
    assert json.loads(as_json(found))["claims"] is None, "it knows nothing of claims"


def test_its_own_inspection_takes_the_cdi_files_that_a_daemon_would_write_for_written(config: Config) -> None:
    (device,) = inspect(replace(config, allocate_as="cdi")).view.devices
    assert (device.health, device.cause) == ("Healthy", "Free")
    named = replace(config, allocate_as="cdi", resource_name=("10de:2330=nvidia.com/2330",))
    (device,) = inspect(named).view.devices
    assert (device.health, device.cause) == ("Unhealthy", "CdiNameInvalid")


@pytest.mark.parametrize("place", ["misc/pci.ids", "hwdata/pci.ids", "pci.ids"])
def test_the_nodes_own_pci_ids_names_nothing_unless_it_is_given(config: Config, place: str) -> None:
    """Debian 12's file calls an H100 otherwise than other nodes' do, and its resource with it (issue 10, 21)."""
    theirs = config.host_root / "usr/share" / place
    theirs.parent.mkdir(parents=True)
    theirs.write_text("10de  NVIDIA Corporation\n\t2330  GH100 [H100 SXM5]\n")
    (device,) = inspect(config).view.devices
    assert device.resource == "nvidia.com/GH100_H100_SXM5_80GB"
    (device,) = inspect(msgspec.structs.replace(config, pci_ids=theirs)).view.devices
    assert device.resource == "nvidia.com/GH100_H100_SXM5"


def test_its_own_inspection_sees_what_is_in_use_and_what_kubelet_allocated(config: Config) -> None:
    enable(config, 1)
    assert "ledger cannot be read" in inspect(config).view.devices[0].reason
    (config.kubelet_dir / "device-plugins").mkdir(parents=True)
    device = inspect(config).view.devices[0]
    assert device.health == "Unhealthy"
    assert "kubelet has given it to no pod" in device.reason
    entry = {"PodUID": "uid-1", "ResourceName": device.resource, "DeviceIDs": {"-1": [GPU]}}
    checkpoint = config.kubelet_dir / "device-plugins/kubelet_internal_checkpoint"
    checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    device = inspect(config).view.devices[0]
    assert (device.health, device.owner) == ("Healthy", "the pod with UID uid-1")


@pytest.mark.trio
async def test_a_running_daemon_is_believed(config: Config) -> None:
    core = held_externally()
    control = UnixControl(
        str(config.state_dir), Latest[frozenset[Owner]](frozenset()), about=lambda: About("gpu-17")
    )
    state: Latest[NodeState] = Latest(core.state)
    with trio.fail_after(10):
        async with control.hold(state.subscribe()):
            found = await trio.to_thread.run_sync(inspect, config)
    assert found.by_daemon
    assert str(os.getpid()) in found.source
    assert [d["address"] for d in json.loads(as_json(found))["devices"]] == [GPU, "0000:24:00.0"]
    known = json.loads(as_json(found))
    assert (known["source"], known["source_problem"], known["node"]) == ("daemon", None, "gpu-17")
    assert known["devices"][0]["holders"] == [
        {"pid": 4711, "command": "qemu-system-x86", "pod_uid": "0b0f-uid"}
    ]
    assert as_table(found).startswith("Node gpu-17, seen by the running daemon (process ")


@pytest.mark.trio
async def test_a_daemon_that_hangs_is_not_waited_for_long(config: Config) -> None:
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(config.state_dir / "gpuactors.sock"))
        hanging.listen()
        with trio.fail_after(10):
            found = await trio.to_thread.run_sync(inspect, config)
    assert not found.by_daemon
    assert "does it hang" in found.source
    assert "not by the daemon: the daemon behind " in told(found)
    known = json.loads(as_json(found))
    assert known["source"] == "inspection"
    assert "does it hang" in known["source_problem"]


def test_who_may_not_ask_the_daemon_is_told_that_the_view_is_his_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_not(path: str, until: float) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(client, "_connected", may_not)
    found = inspect(config)
    assert "seen by this command itself, not by the daemon: user " in told(found)
    assert "may not connect to" in json.loads(as_json(found))["source_problem"]
    assert "not by the daemon: user " in explanation(Explained(find(found.view, GPU), found))


def test_a_host_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HostError):
        explain(Config(host_root=tmp_path / "nowhere", state_dir=tmp_path), GPU)


# --- inspect ----------------------------------------------------------------------------------------------


def test_the_table() -> None:
    heading, _, *lines = as_table(by_daemon(held_externally())).splitlines()
    assert heading == "Node gpu-17, seen by the running daemon (process 7, version 1.2.3)"
    assert lines[0] == "nvidia.com/GH100_H100_SXM5_80GB"
    assert (
        lines[1].strip().startswith("2 listed, 1 Healthy, 0 allocated, 1 free; not registered with kubelet: ")
    )
    head = next(line for line in lines if "ADDRESS" in line)
    assert head.split() == ["ADDRESS", "ID", "DRIVER", "GROUP", "NUMA", "HEALTH", "REASON"]
    rows = [line.split() for line in lines if line.startswith("  0000:")]
    assert [row[:6] for row in rows] == [
        [GPU, "10de:2330", "vfio-pci", "35", "1", "Unhealthy"],
        ["0000:24:00.0", "10de:2330", "vfio-pci", "36", "-", "Healthy"],
    ]


def test_the_table_is_readable_at_100_columns_and_loses_no_word() -> None:
    core = held_externally()
    core.holders[0x23] = tuple(Holder(pid, "a-process-with-a-name", None) for pid in range(100, 120))
    core.pass_time(10)
    found = by_daemon(core)
    assert max(map(len, as_table(found, 100).splitlines())) <= 100
    for device in found.view.devices:
        assert device.reason in told(found, reasons_only=True)
        (row,) = (line for line in as_table(found).splitlines() if device.address in line.split())
        assert row.endswith(device.reason), "in a pipe a GPU is one line"


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace_gpu_vfio_pci"])
def test_a_narrow_table_leaves_columns_out_and_no_reason(driver: str, columns: int) -> None:
    core = Core(gpu("23:00.0", 0x23, driver=driver), gpu("24:00.0", 0x24, driver=driver, numa_node=1))
    core.enabled["0000:23:00.0"] = 1
    core.pass_time(30)
    found = by_daemon(core)
    table = as_table(found, columns)
    assert max(map(len, table.splitlines())) <= columns
    (head,) = (line.split() for line in table.splitlines() if "ADDRESS" in line)
    needed = [name for name in ("ADDRESS", "DRIVER", "HEALTH", "REASON") if name in head]
    assert needed == ["ADDRESS", "DRIVER", "HEALTH", "REASON"]
    assert ("ID" in head) is (columns == 100 and driver == "vfio-pci")
    for device in found.view.devices:
        assert device.reason in " ".join(table.split())


def test_the_table_and_the_json_tell_what_is_listed_and_what_is_not() -> None:
    core = Core(
        gpu("23:00.0"),
        gpu("24:00.0", driver="nvidia"),
        gpu("31:00.0", device="20b0", model="A100", driver=None),
    )
    core.ledger["0000:23:00.0"] = "vm-1"
    core.pass_time(60)
    found = by_daemon(core)
    rows = {line.split()[0]: line for line in as_table(found).splitlines() if line.startswith("  0000:")}
    assert {address: " not listed " in row for address, row in rows.items()} == {
        "0000:23:00.0": False,
        "0000:24:00.0": True,
        "0000:31:00.0": True,
    }
    known = json.loads(as_json(found))
    assert [device["listed"] for device in known["devices"]] == [True, False, False]
    assert known["devices"][0]["owner"] == "default/vm-1"
    (resource,) = known["resources"]
    counts = {key: resource[key] for key in ("listed", "healthy", "allocated", "free")}
    assert counts == {"listed": 1, "healthy": 1, "allocated": 1, "free": 0}
    assert "1 listed, 1 Healthy, 1 allocated, 0 free" in as_table(found)
    assert "1 on this node, none listed" in as_table(found)


def test_that_the_configuration_file_is_not_in_use_stands_above_all() -> None:
    core = held_externally()
    core.feed(ConfigUnused("", ("dra",)))
    problem = "not in use: dra changed, which needs a restart: nothing of the change is used"
    found = by_daemon(core)
    assert f"configuration file: {problem}" in as_table(found).splitlines()
    assert json.loads(as_json(found))["config_problem"] == problem
    explained = Explained(find(found.view, GPU), found)
    assert f"\nConfig file   {problem}\n" in explanation(explained)
    assert json.loads(explanation_json(explained))["config_problem"] == problem


def test_that_uevents_are_not_heard_stands_above_all() -> None:
    core = held_externally()
    core.feed(UeventsUnavailable("netlink is forbidden"))
    problem = "not received: netlink is forbidden; only scans find changes"
    found = by_daemon(core)
    whose, head, *table = as_table(found).splitlines()
    assert head == f"uevents: {problem}"
    assert [whose, *table] == as_table(by_daemon(held_externally())).splitlines()
    assert json.loads(as_json(found))["uevents_problem"] == problem
    explained = Explained(find(found.view, GPU), found)
    assert f"\nUevents       {problem}\n" in explanation(explained)
    assert json.loads(explanation_json(explained))["uevents_problem"] == problem
    core.feed(UeventsOpened())
    assert as_table(by_daemon(core)).splitlines() == [whose, *table]
    empty = Inspected(replace(found.view, devices=()), True, "x")
    assert as_table(empty).splitlines()[1] == f"uevents: {problem}"


def test_no_device() -> None:
    empty = Inspected(NodeView("serving", (), (), "", "", ""), True, "x")
    assert "This node has no GPU to offer, as no PCI function matches the selectors (gpuactors" in as_table(
        empty
    )
    known = json.loads(as_json(empty))
    assert (known["devices"], known["resources"], known["uevents_problem"]) == ([], [], None)
    with pytest.raises(UnknownAddressError, match="selectors"):
        find(empty.view, GPU)


def test_a_daemon_whose_settings_offer_nothing_says_so_first() -> None:
    core = Core(gpu("23:00.0"), settings=replace(SETTINGS, device_plugin=False))
    core.pass_time(10)
    found = by_daemon(core)
    lines = as_table(found).splitlines()
    assert lines[1].startswith(
        "settings: this daemon offers nothing: the device plugin is off, and so are claims"
    )
    counts = lines[lines.index("nvidia.com/GH100_H100_SXM5_80GB") + 1]
    assert counts.endswith("; not registered with kubelet: --device-plugin is off")
    assert json.loads(as_json(found))["offers_problem"] == OFFERS_NOTHING
    assert json.loads(as_json(by_daemon(held_externally())))["offers_problem"] is None


# --- explain ----------------------------------------------------------------------------------------------


def test_the_explanation_says_it_all() -> None:
    core = held_externally()
    core.pass_time(180)
    found = by_daemon(core)
    text = explanation(Explained(find(found.view, "23:00.0"), found))
    head, status, _, *facts = text.splitlines()
    assert head == f"{GPU}  GH100 [H100 SXM5 80GB] (10de:2330)"
    assert status.startswith("Unhealthy: IOMMU group 35 is held by process 4711 (qemu-system-x86)")
    said = [(line[:14].strip(), line[14:]) for line in facts]
    assert said[0] == ("Since", "2026-11-21T21:56:52Z, for 3 min")
    assert said[1][0] == "To do"
    assert {"Inspected", "Use polled", "Ledger read"} <= {name for name, _ in said}
    assert ("Owner", "none: kubelet has given it to no pod") in said
    assert ("Held by", "process 4711 (qemu-system-x86) of the pod with UID 0b0f-uid") in said
    assert ("IOMMU group", f"35: {GPU} (vfio-pci), 0000:23:00.1 (no driver)") in said
    assert ("Kubelet's ID", GPU) in said
    assert ("NUMA node", "1") in said
    before = said[[name for name, _ in said].index("Before") :]
    # The view is of 2026-11-21 22:00:00 UTC.
    assert before[0][1].startswith("2026-11-21T21:5")
    assert "Z  3 min ago  Unhealthy  IOMMU group 35 is held by" in before[0][1]
    assert before[1][0] == ""
    assert before[-1] == ("Seen by", "the running daemon (process 7, version 1.2.3)")
    assert text.count("Before") == 1


def test_while_the_ledger_is_unreadable_nobody_is_said_to_have_been_given_nothing() -> None:
    core = held_externally()
    core.ledger["0000:24:00.0"] = "vm-2"
    core.pass_time(60)
    assert "kubelet has given it to no pod" in explained(core, GPU)
    core.ledger_problem = "kubelet does not answer"
    core.pass_time(60)
    text = explained(core, GPU)
    assert "no pod" not in text.partition("Before")[0].replace("no pod had it when", "")
    assert "\nOwner         not known, as kubelet's ledger cannot be read\n" in text
    assert "\nOwner         default/vm-2, when kubelet's ledger was last readable" in explained(
        core, "0000:24:00.0"
    )


def explained(core: Core, address: str) -> str:
    found = by_daemon(core)
    return explanation(Explained(find(found.view, address), found))


def test_the_explanation_as_json() -> None:
    found = by_daemon(held_externally())
    known = json.loads(explanation_json(Explained(find(found.view, GPU), found)))
    assert known["holders"] == [{"pid": 4711, "command": "qemu-system-x86", "pod_uid": "0b0f-uid"}]
    assert known["group"] == [
        {"address": GPU, "driver": "vfio-pci"},
        {"address": "0000:23:00.1", "driver": None},
    ]
    assert (known["health"], known["registered"], known["source"]) == ("Unhealthy", False, "daemon")
    assert known["history"][-1]["reason"] == known["reason"]
    assert known["history"][-1]["cause"] == known["cause"] == "HeldByOther"
    assert known["history"][-1]["time"].startswith("2026-11-21T21:59:")
    assert (known["node"], known["listed"]) == ("gpu-17", True)
    assert known["remedy"]


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (("flr", "bus"), "the kernel can reset it by flr, bus; whether it did is not known"),
        ((), "the kernel has no method to reset it alone; whether its bus was reset is not known"),
        (None, "the methods to reset it are unknown, and whether it was reset"),
    ],
)
def test_what_is_known_of_a_reset_after_a_release_and_no_more(
    methods: tuple[str, ...] | None, says: str
) -> None:
    function = replace(gpu(A), presence=11, reset_methods=methods)
    core = node(function, ledger={A: "vm-1"})
    core.ledger.clear()
    core.pass_time(60)
    core.pass_time(120)
    assert f"\nReleased      by default/vm-1 at 2026-11-21T21:57:05Z (2 min ago): {says}\n" in explained(
        core, A
    )
    found = by_daemon(core)
    (release,) = json.loads(explanation_json(Explained(find(found.view, A), found)))["releases"]
    assert release == {
        "tenant": "default/vm-1",
        "time": "2026-11-21T21:57:05Z",
        "age_s": 175.0,
        "reset_methods": None if methods is None else list(methods),
        "enumerated_again": False,
    }
    core.inspect(A, replace(function, presence=12))
    assert "(2 min ago): enumerated again since\n" in explained(core, A)


def test_a_dead_gpu_says_so_also_while_a_pod_has_it() -> None:
    function = replace(gpu(A), has_fatal_errors=True)
    sign = "it has had a fatal PCIe error (aer_dev_fatal); see the kernel's log"
    of_a_pod = explained(node(function, ledger={A: "vm-1"}), A)
    assert "\nHealthy: allocated to pod default/vm-1\n" in of_a_pod
    assert f"\nDead          {sign}" in of_a_pod
    free = explained(node(function), A)
    assert f"\nUnhealthy: {sign}" in free
    assert "\nDead  " not in free, "it is the reason already"


def test_a_device_that_is_not_there_any_more() -> None:
    found = by_daemon(held_externally())
    device = replace(
        find(found.view, GPU),
        present=False,
        listed=False,
        resource="",
        history=(Change(5.0, None, "no longer listed", "Gone"),),
    )
    text = explanation(Explained(device, found))
    assert text.startswith(f"{GPU}  (not on this node any more)")
    assert "2026-11-21T21:59:55Z  5 s ago  not listed  no longer listed" in text
    assert "IOMMU group  " not in text
    gone = Inspected(replace(found.view, devices=(device,)), True, "x")
    assert json.loads(as_json(gone))["devices"] == []


@pytest.mark.parametrize("words", [GPU, "23:00.0", "0000:23:00.0 ", "23:00.0".upper()])
def test_an_address_may_be_short(words: str) -> None:
    assert find(by_daemon(held_externally()).view, words).address == GPU


def test_a_short_address_in_another_domain() -> None:
    core = Core(gpu("0001:23:00.0", 1))
    assert find(by_daemon(core).view, "23:00.0").address == "0001:23:00.0"
    both = Core(gpu("0001:23:00.0", 1), gpu("0002:23:00.0", 2))
    with pytest.raises(UnknownAddressError, match=r"say which of 0001:23:00\.0, 0002:23:00\.0"):
        find(by_daemon(both).view, "23:00.0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("25:00.0", rf"no GPU at 25:00\.0; there are {GPU}, 0000:24:00\.0"),
        ("23:00.1", rf"in the IOMMU group of {GPU}"),
    ],
)
def test_an_address_that_is_no_gpu(words: str, told: str) -> None:
    with pytest.raises(UnknownAddressError, match=told):
        find(by_daemon(held_externally()).view, words)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "just now"),
        (1, "1 s ago"),
        (59.9, "59 s ago"),
        (200, "3 min ago"),
        (7300, "2 h ago"),
        (2e5, "2 d ago"),
    ],
)
def test_ages(seconds: float, words: str) -> None:
    assert age(seconds) == words


# --- formats ----------------------------------------------------------------------------------------------


def test_the_wide_table_has_each_gpu_in_one_line_with_holder_and_owner() -> None:
    core = held_externally()
    core.ledger["0000:24:00.0"] = "virt-launcher-db-x7k2p"
    core.pass_time(60)
    lines = as_wide(by_daemon(core)).splitlines()
    head = next(line for line in lines if "ADDRESS" in line)
    assert head.split() == list(WIDE)
    held, given = (line for line in lines if line.startswith("  0000:"))
    assert held[head.index("HOLDER") :].startswith(
        "4711 (qemu-system-x86)  IOMMU group 35 is held by process 4711"
    )
    assert held[head.index("CAUSE") :].startswith("HeldByOther")
    assert held[head.index("SINCE") :].startswith("1 min")
    assert given[head.index("OWNER") :].startswith("default/virt-launcher-db-x7k2p  ")
    assert given[head.index("VM ") :].startswith("default/db  ")
    assert held[head.index("VM ") :].startswith("-  ")


def test_yaml_has_the_structure_of_json() -> None:
    text = as_json(by_daemon(held_externally()))
    assert yaml.safe_load(yaml_of(text)) == json.loads(text)
    assert yaml_of(text).startswith("node: gpu-17\nsource: daemon\n")

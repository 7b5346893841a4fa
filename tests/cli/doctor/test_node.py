"""Kubelet, the daemon, claims and the state directory: seeded one by one, most on real sockets and processes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.cli import progress
from gpuactors.cli.doctor.checks import examine
from gpuactors.cli.doctor.checks.daemon import is_unsettled
from gpuactors.cli.doctor.facts import Claims, Devices, Facts, NewerCheckpoint, Place, State, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.cli.doctor.settings import OWN, of_daemon
from gpuactors.config import resolve
from gpuactors.control.about import Setting
from gpuactors.control.client import Running
from gpuactors.control.view import (
    BlockedView,
    ClaimsView,
    DeviceView,
    DomainsView,
    LabelView,
    NodeView,
    PodView,
    SlicesView,
)
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.domain import DRIVER, ImexFacts
from gpuactors.core.values.model import DeviceId, Holder, ResourceName, Role
from gpuactors.core.values.reported import ImexReport, LabelStatus
from gpuactors.kubelet import ledger as kubelet_ledger
from gpuactors.kubelet.look import PluginDirectory
from gpuactors.ports.node import LedgerContents
from gpuactors_simulation.kube.status import CLASSES
from tests.cli.doctor.rig import GPU, SECOND, Patient, Seed, findings, open_patient, wrong
from tests.process.daemon import DaemonProcess, eventually
from tests.process.node import H100, HEALTHY, other_plugin
from tests.support.claims import NODE, Api, plugin_of, write_kubeconfig
from tests.support.domains import CLIQUE, with_imex

PASS, WARN, FAIL = Level.PASS, Level.WARN, Level.FAIL
NO_DAEMON = Seed("no daemon", lambda _: None, Check.DAEMON_RUNS, FAIL, "no daemon runs", "spec.nodeName=")


def only(found: list[Any], *seeds: Seed) -> None:
    """These findings and no other."""
    for seed in seeds:
        seed.assert_found(found)
    assert len(found) == len(seeds), found


def seed(check: Check, level: Level, message: str, remedy: str) -> Seed:
    return Seed(message, lambda _: None, check, level, message, remedy)


# --- kubelet ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pre", "level"), [(True, WARN), (False, FAIL)])
def test_a_node_without_kubelet(pre: bool, level: Level) -> None:
    with open_patient(started=False) as patient:
        patient.gpu()
        expected = seed(
            Check.KUBELET_DIRECTORY, level, "device-plugins does not exist", "--device-plugin-dir"
        )
        only(wrong(patient.examined(pre=pre)), expected, *([] if pre else [NO_DAEMON]))


def test_a_kubelet_that_has_stopped() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.node.kubelet.stop(leave_sockets=True)
        try:
            only(
                wrong(patient.examined(pre=False)),
                seed(Check.KUBELET_RUNS, FAIL, "no kubelet listens at", "systemctl status kubelet"),
                NO_DAEMON,
            )
        finally:
            patient.node.kubelet.start()


def test_a_kubelet_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_ledger, "LEDGER_LIST_DEADLINE_S", 0.4)
    monkeypatch.setattr(limits, "KUBELET_CONNECT_DEADLINE_S", 0.3)
    monkeypatch.setattr(progress, "PROGRESS_SILENT_S", 0.1)
    with open_patient(started=False) as patient, ExitStack() as stack:
        patient.gpu()
        for directory in ("device-plugins", "pod-resources"):
            hanging = stack.enter_context(socket.socket(socket.AF_UNIX))
            (patient.node.kubelet_dir / directory).mkdir()
            hanging.bind(str(patient.node.kubelet_dir / directory / "kubelet.sock"))
            hanging.listen()
        found = wrong(patient.examined(pre=True))
        only(found, seed(Check.POD_RESOURCES, FAIL, "cannot ask kubelet for its ledger", "kubelet's log"))
        assert "reading kubelet's ledger …" in patient.terminal.getvalue()


def test_a_pod_without_kubelets_ledger() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.node.kubelet.pod_resources_socket.unlink()
        expected = seed(
            Check.POD_RESOURCES, FAIL, "no kubelet answers at", "--kubelet-dir is kubelet's --root-dir"
        )
        only(wrong(patient.examined(pre=True)), expected)


def test_a_kubelet_that_does_not_tell_its_list() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.node.kubelet.disable_allocatable()
        message = "GetAllocatableResources"
        only(wrong(patient.examined(pre=True)), seed(Check.POD_RESOURCES, WARN, message, "1.28 or newer"))


def test_kubelets_ledger_is_damaged() -> None:
    with open_patient() as patient:
        patient.gpu()
        ledger = patient.node.kubelet.checkpoint
        ledger.write_text(
            '{"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "r", '
            '"DeviceIDs": {"-1": ["d"]}, "AllocResp": "!"}], "RegisteredDevices": {}}, "Checksum": 0}'
        )
        only(
            wrong(patient.examined(pre=True)), seed(Check.POD_RESOURCES, WARN, "is damaged", "Check the disk")
        )


@pytest.mark.parametrize("pre", [True, False])
def test_another_plugin_serves_our_resource(pre: bool) -> None:
    with open_patient() as patient:
        patient.gpu()
        with other_plugin(patient.node):
            found = wrong(patient.examined(pre=pre))
        expected = seed(
            Check.OTHER_PLUGINS,
            FAIL,
            f"kubelet has 2 healthy devices of {H100} (51, 52), and no gpuactors listens: another plugin serves the "
            "same resource; other sockets there: kubevirt-gpu.sock",
            "Find the other plugin of this resource (NVIDIA's sandbox device plugin, for instance) and switch it off",
        )
        only(found, expected, *([] if pre else [NO_DAEMON]))


def test_a_gpuactors_with_another_state_directory() -> None:
    with open_patient() as patient:
        patient.gpu()
        with patient.node.daemon():
            patient.node.wait_device_lists({H100: {GPU: HEALTHY}})
            patient.flags["state_dir"] = str(patient.node.directory / "other")
            only(
                wrong(patient.examined(pre=False)),
                seed(Check.OTHER_PLUGINS, WARN, "with another state directory serves", "--state-dir"),
                NO_DAEMON,
            )


# --- the daemon -------------------------------------------------------------------------------------------


@contextmanager
def served(*words: str) -> Iterator[tuple[Patient, DaemonProcess]]:
    """A healthy node with two GPUs and a daemon that kubelet has the list of."""
    with open_patient() as patient:
        patient.gpu()
        patient.gpu(0x24)
        with patient.node.daemon("--node-name=gpu-17", *words) as daemon:
            patient.node.wait_device_lists({H100: {GPU: HEALTHY, SECOND: HEALTHY}})
            eventually(lambda: is_settled(patient), "a registration that is confirmed")
            yield patient, daemon


def is_settled(patient: Patient) -> bool:
    """Kubelet has answered Register, and has the healthy devices that the daemon lists."""
    facts = patient.examined(pre=False).facts
    return isinstance(facts.daemon, Running) and not is_unsettled(facts.daemon, facts.ledger)


def test_a_healthy_node_has_nothing_to_be_done_and_the_settings_are_the_daemons() -> None:
    with served() as (patient, _):
        state_dir = str(patient.node.directory / "s")
        patient.words = lambda: {"state_dir": state_dir}  # type: ignore[method-assign]
        found = patient.examined(pre=False)
        assert wrong(found) == []
        assert not found.is_failed
        assert (found.facts.node, str(found.facts.config.host_root)) == (
            "gpu-17",
            str(patient.node.tree.root),
        )
        assert found.facts.settings == "of the running daemon"
        said = {f.check: f.message for f in findings(found)}
        assert said[Check.KUBELET_LIST] == (
            f"{H100}: 2 listed, 2 Healthy, 0 allocated, 2 free; kubelet has the same list"
        )
        assert {group.name for group in found.groups} == {
            "IOMMU", "GPUs", "names", "vfio", "kubelet", "daemon", "KubeVirt", "state",
        }  # fmt: skip


def test_what_is_given_to_the_command_wins_over_the_daemons_settings() -> None:
    with served("--holders=passive") as (patient, _):
        patient.words = lambda: {  # type: ignore[method-assign]
            "state_dir": str(patient.node.directory / "s"), "node_name": "gpu-17", "select": f"address={GPU}",
        }  # fmt: skip
        facts = patient.examined(pre=False).facts
        assert facts.settings == "of the running daemon, but for select of this command"
        assert facts.config.select == (f"address={GPU}",)
        assert facts.config.kubelet_dir == patient.node.kubelet_dir


def test_a_daemon_that_reports_no_settings_or_unknown_ones(healthy: Facts) -> None:
    assert isinstance(healthy.daemon, Running)
    resolved = resolve({"holders": "proc"}, {})
    for reported in ((), (Setting("holders", "sideways", ""),), (Setting("holders", '"sideways"', ""),)):
        about = replace(healthy.daemon.about, settings=reported)
        judged = of_daemon(resolved, replace(healthy.daemon, about=about))
        assert (judged.config, judged.source) == (resolved.config, OWN)
    newer = (*healthy.daemon.about.settings, Setting("of_next_year", "1", "default"))
    judged = of_daemon(resolved, replace(healthy.daemon, about=replace(healthy.daemon.about, settings=newer)))
    assert judged.source == "of the running daemon, but for holders of this command"


def test_a_daemon_that_hangs() -> None:
    with served() as (patient, daemon):
        daemon.signal(signal.SIGSTOP)
        try:
            found = wrong(patient.examined(pre=False))
        finally:
            daemon.signal(signal.SIGCONT)
        only(found, seed(Check.DAEMON_RUNS, FAIL, "does it hang?", "if it hangs, end it"))


def test_a_daemon_without_uevents_and_one_that_is_of_another_mind() -> None:
    with served("--uevents=off") as (patient, _):
        found = wrong(patient.examined(pre=False))
        only(found, seed(Check.DAEMON_SEES, WARN, "uevents: not received: switched off", "hostUsers: false"))


def test_a_daemon_that_has_missed_a_change() -> None:
    with served() as (patient, _):
        patient.node.tree.unbind(SECOND)  # and nobody tells it
        found = wrong(patient.examined(pre=False))
        expected = f"the daemon knows another driver, or none, of {SECOND}"
        seed(Check.DAEMON_SEES, WARN, expected, "gpuactors inspect").assert_found(found)


@pytest.fixture(scope="module")
def healthy() -> Facts:
    """The facts of a healthy node, to be changed where a real one cannot easily be."""
    with served() as (patient, _):
        return patient.examined(pre=False).facts


def with_view(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.daemon, Running)
    view: NodeView = replace(facts.daemon.view, **changes)
    return replace(facts, daemon=replace(facts.daemon, view=view))


def with_resource(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.daemon, Running)
    (resource,) = facts.daemon.view.resources
    return with_view(facts, resources=(replace(resource, **changes),))


def with_kubelets_list(facts: Facts, *ids: str) -> Facts:
    assert isinstance(facts.ledger, LedgerContents)
    return replace(
        facts, ledger=replace(facts.ledger, healthy={ResourceName(H100): tuple(map(DeviceId, ids))})
    )


def test_what_the_daemon_itself_says(healthy: Facts) -> None:
    for facts, expected in (
        (with_view(healthy, role=str(Role.HANDED_OVER)),
         seed(Check.DAEMON_RUNS, WARN, "does not serve kubelet", "an update is under way")),
        (with_resource(healthy, registered=False, problem="kubelet refused"),
         seed(Check.REGISTERED, FAIL, f"{H100} is not registered with kubelet: kubelet refused", "no other plugin")),
        (with_resource(healthy, problem="another plugin serves it"),
         seed(Check.REGISTERED, FAIL, "another plugin serves it", "switch it off")),
        (with_resource(healthy, allocated=3),
         seed(Check.FREE_COUNT, WARN, "3 allocated, -1 free", "Delete the pods")),
        (with_kubelets_list(healthy, GPU, "51"),
         seed(Check.KUBELET_LIST, FAIL, "kubelet has 1 healthy devices that are not ours ('51')", "switch it off")),
        (with_kubelets_list(healthy, GPU),
         seed(Check.KUBELET_LIST, FAIL, "kubelet has 1 of our 2 healthy devices", "registers again")),
        (with_view(healthy, kubelet_problem="no socket"), seed(Check.DAEMON_SEES, WARN, "no socket", "Start kubelet")),
        (with_view(healthy, ledger_problem="rate limit"),
         seed(Check.DAEMON_SEES, WARN, "kubelet's ledger: rate limit", "pod-resources")),
    ):  # fmt: skip
        only(wrong(facts), expected)


def test_a_gpu_that_outlived_its_pod_is_called_as_the_daemon_calls_it(healthy: Facts) -> None:
    """The doctor has no history: it said HeldByOther of a GPU that the daemon called Orphaned."""
    held, ended = (
        "process 4711 (qemu) has it open",
        "pod default/vm ended, and process 4711 (qemu) has it still",
    )
    assert isinstance(healthy.devices, Devices)
    assert isinstance(healthy.daemon, Running)
    own = replace(healthy.devices.view, devices=_with(healthy.devices.view, Cause.HELD_BY_OTHER, held))
    facts = replace(healthy, devices=replace(healthy.devices, view=own))
    for cause, reason in ((Cause.ORPHANED, ended), (Cause.HELD_BY_OTHER, held)):
        found = wrong(with_view(facts, devices=_with(healthy.daemon.view, cause, reason)))
        said = [(f.cause, f.message, f.remedy) for f in found if f.check is Check.GPUS_USABLE]
        assert said == [(cause, reason, f"Remedy of {cause}.")], "with the daemon's remedy, too"


def test_a_use_that_the_daemon_knows_better_has_its_words_and_one_that_only_the_doctor_sees_stays(
    healthy: Facts,
) -> None:
    assert isinstance(healthy.devices, Devices)
    assert isinstance(healthy.daemon, Running)
    own, daemons = healthy.devices.view, healthy.daemon.view

    examined = healthy.devices

    def said(ours: tuple[DeviceView, ...], theirs: tuple[DeviceView, ...]) -> list[str]:
        devices = replace(examined, view=replace(own, devices=ours))
        found = wrong(with_view(replace(healthy, devices=devices), devices=theirs))
        return [f.message for f in found if f.check is Check.GPUS_USABLE]

    held = _with(own, Cause.HELD_BY_OTHER, "process 4711 (qemu) has it open")
    orphaned = _with(daemons, Cause.ORPHANED, "its pod ended")
    assert said(own.devices, orphaned) == ["its pod ended"], (
        "it looks free here, and the daemon has seen its pod"
    )
    assert said(held, daemons.devices) == ["process 4711 (qemu) has it open"], "as with --holders proc"
    claimed = tuple(
        replace(d, owner="shop/gpu")
        for d in _with(daemons, Cause.CLAIMED_ELSEWHERE, "in use by the claim shop/gpu")
    )
    assert said(held, claimed) == ["in use by the claim shop/gpu"], "its process is not to be ended"
    owned = tuple(replace(d, owner="shop/vm-1") for d in daemons.devices)
    assert said(held, owned) == []
    named = tuple(replace(d, holders=(Holder(4711, "qemu", None),)) for d in held)
    unnamed = _with(daemons, Cause.HELD_BY_OTHER, "IOMMU group 35 is in use")
    assert said(named, unnamed) == ["process 4711 (qemu) has it open"]
    assert said(held, unnamed) == ["IOMMU group 35 is in use"]


def test_the_pods_that_lost_a_gpu_are_deleted_by_the_very_command(healthy: Facts) -> None:
    assert isinstance(healthy.daemon, Running)
    view = healthy.daemon.view
    (resource,) = view.resources
    assert isinstance(healthy.ledger, LedgerContents)
    lost = with_view(
        replace(healthy, ledger=replace(healthy.ledger, healthy=None)),
        resources=(replace(resource, healthy=0, allocated=1),),
        devices=_with(view, Cause.GONE, "it is gone"),
        pods=(PodView("shop/vm-1", "", (GPU,), (), ()), PodView("shop/vm-2", "", (SECOND,), (), ())),
    )
    found = [f.remedy for f in wrong(lost) if f.check is Check.FREE_COUNT]
    assert found == ["Delete the pods whose GPU is not Healthy any more: kubectl -n shop delete pod vm-1."]


def _with(view: NodeView, cause: Cause, reason: str) -> tuple[DeviceView, ...]:
    return tuple(
        replace(d, cause=cause, reason=reason, health="Unhealthy", remedy=f"remedy of {cause}")
        if d.address == GPU
        else d
        for d in view.devices
    )


def test_a_daemon_that_offers_nothing_fails(healthy: Facts) -> None:
    facts = replace(healthy, config=msgspec.structs.replace(healthy.config, device_plugin="off"))
    found = wrong(facts)
    assert [(f.check, f.level) for f in found] == [(Check.DAEMON_RUNS, FAIL)]
    assert "offers nothing" in found[0].message


def test_what_may_be_well_a_moment_later_is_read_again(healthy: Facts) -> None:
    def unsettled(facts: Facts) -> bool:
        assert isinstance(facts.daemon, Running)
        assert isinstance(facts.ledger, LedgerContents | Unknown)
        return is_unsettled(facts.daemon, facts.ledger)

    assert not unsettled(healthy)
    assert unsettled(with_kubelets_list(healthy, GPU))
    assert unsettled(with_resource(healthy, registered=False)), "it is being registered"
    assert unsettled(with_view(healthy, ledger_problem="it has not been read yet"))
    assert unsettled(with_view(healthy, kubelet_problem="waiting for kubelet"))
    assert unsettled(with_view(healthy, role=str(Role.TAKING_OVER)))
    assert not unsettled(with_resource(healthy, registered=False, problem="kubelet refused"))
    assert not unsettled(replace(healthy, ledger=Unknown("rate limit"))), "nothing to compare it with"


def test_what_a_process_that_is_not_root_may_not_do(healthy: Facts) -> None:
    assert isinstance(healthy.directory, PluginDirectory)
    for facts, expected in (
        (replace(healthy, directory=replace(healthy.directory, writable=False)),
         seed(Check.KUBELET_DIRECTORY, FAIL, "may not write to", "Run as root")),
        (replace(healthy, directory=Unknown("may not read /k")),
         seed(Check.KUBELET_DIRECTORY, FAIL, "may not read /k", "Run this as root")),
        (replace(healthy, state=Unknown("hangs")), seed(Check.STATE_DIRECTORY, FAIL, "hangs", "Check that disk")),
    ):  # fmt: skip
        only(wrong(facts), expected)


# --- the state directory ----------------------------------------------------------------------------------


def test_a_state_directory_that_is_a_file_or_whose_socket_has_too_long_a_path() -> None:
    with open_patient() as patient:
        patient.gpu()
        for directory, message in (
            (Path("/dev/null"), "is not a directory"),
            (patient.node.directory / ("s" * 120), "has 1"),
        ):
            patient.flags["state_dir"] = str(directory)
            expected = seed(Check.STATE_DIRECTORY, FAIL, message, "Make it writable")
            expected.assert_found(wrong(patient.examined(pre=False)))


def test_a_disk_that_is_nearly_full(healthy: Facts) -> None:
    assert isinstance(healthy.state, State)
    full = replace(healthy.state, free_bytes=10 << 20, journal_bytes=0)
    only(wrong(replace(healthy, state=full)), seed(Check.JOURNAL_SPACE, WARN, "10 MiB free", "--journal off"))
    recorded = replace(full, journal_bytes=60 << 20)
    assert wrong(replace(healthy, state=recorded)) == [], "the journal has its part already"
    config = type(healthy.config)(journal="off")
    assert Check.JOURNAL_SPACE not in {
        f.check for g in examine(replace(healthy, config=config, state=full)) for f in g.findings
    }


# --- claims -----------------------------------------------------------------------------------------------


@contextmanager
def for_claims(**flags: object) -> Iterator[tuple[Patient, Api]]:
    """A healthy node for claims, without a daemon."""
    with ExitStack() as stack:
        patient, api = stack.enter_context(open_patient()), stack.enter_context(Api())
        patient.gpu()
        with_imex(patient.node.tree.root)
        kubeconfig = patient.node.directory / "kubeconfig"
        write_kubeconfig(kubeconfig, api.port)
        patient.flags |= {
            "dra": "on", "node_name": NODE, "kubeconfig": str(kubeconfig),
            "cdi_dir": str(patient.node.directory / "cdi"), **flags,
        }  # fmt: skip
        yield patient, api


def test_a_node_that_is_ready_for_claims() -> None:
    with for_claims(compute_domains="on", imex_management="none") as (patient, api):
        found = patient.examined(pre=False)
        only(wrong(found), NO_DAEMON)
        said = {f.check: f.message for f in findings(found)}
        assert said[Check.API_SERVER] == f"http://127.0.0.1:{api.port} answers, and knows the node {NODE}"
        assert said[Check.CDI_DIRECTORY].endswith("/cdi will be made")
        assert "gpu.nvidia.com, " in said[Check.PLUGIN_DIRECTORIES]
        assert said[Check.IMEX].startswith("IMEX channels have the major number")


def test_a_healthy_node_with_claims_has_nothing_to_be_done() -> None:
    with for_claims() as (patient, api), patient.node.daemon(
        "--dra=on", f"--node-name={NODE}", f"--kubeconfig={patient.flags['kubeconfig']}",
        f"--cdi-dir={patient.flags['cdi_dir']}",
    ) as daemon:  # fmt: skip
        daemon.wait_event("claims.serving")
        patient.node.wait_device_lists({H100: {GPU: HEALTHY}})
        with plugin_of(patient.node.kubelet_dir):
            daemon.wait_event("claims.registered")
        eventually(
            lambda: api.slices() == 1 and not wrong(patient.examined(pre=False)), "a node without trouble"
        )
        found = patient.examined(pre=False)
        assert wrong(found) == []
        said = {f.check: f.message for f in findings(found)}
        assert said[Check.CLAIMS_SERVED] == "gpu.nvidia.com: 1 ResourceSlices, 0 claims"


@pytest.mark.parametrize("driver", ["vfio-pci", "nvidia"])
def test_a_class_with_a_resource_of_the_device_plugin(driver: str) -> None:
    """Also of a GPU that a claim would bind first: the device plugin lists it then."""
    with for_claims() as (patient, api):
        patient.node.plug(0x25, "20b5", driver=driver)
        other = "nvidia.com/20b5"
        api.do(api.server.add_class, "counted", "example.com/gpu")
        found = patient.examined(pre=False)
        assert Check.DEVICE_CLASSES not in {f.check for f in wrong(found)}
        said = {f.check: f.message for f in findings(found)}
        assert said[Check.DEVICE_CLASSES].startswith("none of 1 DeviceClasses")
        api.do(api.server.add_class, "mine", H100)
        api.do(api.server.add_class, "theirs", other)
        told = [f for f in wrong(patient.examined(pre=False)) if f.check is Check.DEVICE_CLASSES]
        only(
            told,
            seed(Check.DEVICE_CLASSES, WARN, f"mine has the extendedResourceName {H100}", "--resource-name"),
            seed(
                Check.DEVICE_CLASSES,
                WARN,
                f"theirs has the extendedResourceName {other}",
                "--device-plugin off",
            ),
        )


def test_classes_that_may_not_be_listed_are_not_known_and_the_right_is_named() -> None:
    with for_claims() as (patient, api):
        api.forbid(CLASSES)
        found = wrong(patient.examined(pre=False))
        only(
            found,
            seed(Check.DEVICE_CLASSES, WARN, "is not known: could not list", "`list` of deviceclasses"),
            NO_DAEMON,
        )


@pytest.mark.parametrize("flags", [{"device_plugin": "off"}, {"dra": "off", "compute_domains": "on"}])
def test_classes_are_not_looked_at_where_one_api_alone_offers_gpus(flags: dict[str, object]) -> None:
    with for_claims(**flags) as (patient, api):
        api.do(api.server.add_class, "mine", H100)
        found = patient.examined(pre=False)
        assert Check.DEVICE_CLASSES not in {f.check for f in findings(found)}
        assert not [target for _, target in api.server.requests if "deviceclasses" in target]


def test_an_api_server_that_is_away_or_does_not_know_the_node() -> None:
    with for_claims() as (patient, api):
        remedy = "Check --kubeconfig or the pod's service account"
        patient.flags["node_name"] = "stranger"
        found = wrong(patient.examined(pre=False))
        only(found, seed(Check.API_SERVER, FAIL, "read the node stranger", remedy), NO_DAEMON)
        with socket.socket() as nobody:  # bound, and not listening
            nobody.bind(("127.0.0.1", 0))
            write_kubeconfig(patient.node.directory / "kubeconfig", nobody.getsockname()[1])
            found = wrong(patient.examined(pre=False))
        only(found, seed(Check.API_SERVER, FAIL, "Connection refused", remedy), NO_DAEMON)
        patient.flags["kubeconfig"] = "/no/kubeconfig"
        found = wrong(patient.examined(pre=False))
        only(found, seed(Check.API_SERVER, FAIL, "/no/kubeconfig", remedy), NO_DAEMON)
        assert api.port


def test_directories_of_claims_that_cannot_be_made() -> None:
    with for_claims(cdi_dir="/dev/null/cdi") as (patient, _):
        (patient.node.kubelet_dir / "plugins").write_text("a file\n")
        only(
            wrong(patient.examined(pre=False)),
            seed(Check.CDI_DIRECTORY, FAIL, "/dev/null/cdi is not writable: it does not exist", "--cdi-dir"),
            seed(Check.PLUGIN_DIRECTORIES, FAIL, "plugins/gpu.nvidia.com is not writable", "--kubelet-dir"),
            NO_DAEMON,
        )


def test_a_checkpoint_of_a_newer_gpuactors_and_the_way_back() -> None:
    with for_claims(compute_domains="on", imex_management="none") as (patient, _):
        path = patient.node.kubelet_dir / "plugins" / DRIVER / "gpuactors-checkpoint.json"
        path.parent.mkdir(parents=True)
        for version, expected in ((1, ()), (2, ("is of version 2, this gpuactors knows 1",))):
            body = f'{{"version":{version},"bootId":"b"}}'
            checksum = sha256(body.encode()).hexdigest()
            path.write_text(f'{{"checksum":"sha256:{checksum}","checkpoint":{body}}}\n')
            found = wrong(patient.examined(pre=False))
            remedy = f"run rm {path} on the node, kubectl -n gpuactors delete pod -l app.kubernetes.io/name=gpuactors"
            only(found, *(seed(Check.CLAIMS_SERVED, FAIL, said, remedy) for said in expected), NO_DAEMON)


def test_a_node_for_compute_domains_alone_keeps_its_gpus() -> None:
    alone = {"dra": "off", "device_plugin": "off", "compute_domains": "on", "imex_management": "none"}
    with for_claims(**alone) as (patient, _):
        patient.gpu(0x25, driver="nvidia")
        found = patient.examined(pre=False)
        only(wrong(found), NO_DAEMON)
        assert [group.name for group in found.groups] == ["kubelet", "daemon", "claims", "state"]


def test_a_node_without_imex_and_one_whose_imex_is_not_ready() -> None:
    with for_claims(compute_domains="host-managed", imex_ctl="/no/ctl") as (patient, _):
        found = wrong(patient.examined(pre=True))
        only(found, seed(Check.IMEX, WARN, "/no/ctl", "operator's own IMEX daemon"))
        patient.put("/proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n")
        found = wrong(patient.examined(pre=True))
        only(found, seed(Check.IMEX, FAIL, "has no nvidia-caps-imex-channels", "--compute-domains off"))
        (patient.node.tree.root / "proc/devices").unlink()
        found = wrong(patient.examined(pre=True))
        only(found, seed(Check.IMEX, FAIL, "is not there", "mount of the host's /proc"))


def test_a_clique_that_nobody_says_is_no_node_without_a_fabric() -> None:
    """NVIDIA's plugin takes the Node's label with it when it ends."""
    with for_claims(compute_domains="on", imex_management="none") as (patient, _):
        features = patient.node.tree.root / "etc/kubernetes/node-feature-discovery/features.d/gfd"
        features.write_text("")
        found = patient.examined(pre=True)
        only(
            wrong(found), seed(Check.IMEX, FAIL, "claims of channels are refused: the clique", "Set --clique")
        )
        assert not [f for f in findings(found) if f.check is Check.IMEX and f.level is Level.PASS]
        cdi = patient.node.directory / "cdi"
        cdi.mkdir()
        theirs = cdi / "k8s.compute-domain.nvidia.com-claim_1f2e.yaml"
        theirs.write_text(f"containerEdits:\n  env:\n  - CLIQUE_ID={CLIQUE}\n")
        only(
            wrong(patient.examined(pre=True)),
            seed(Check.IMEX, WARN, f"the clique {CLIQUE} is known by", "--clique"),
        )
        patient.flags["clique"] = "none"
        said = {f.check: f.message for f in findings(patient.examined(pre=True))}
        assert said[Check.IMEX].endswith("no NVLink fabric beyond this node, by --clique")


def imex_of(facts: Facts) -> list[Finding]:
    return [f for group in examine(facts) for f in group.findings if f.check is Check.IMEX]


def test_a_running_daemon_that_knows_the_clique_still_serves_and_is_not_to_be_restarted_without(
    healthy: Facts,
) -> None:
    imex = ImexFacts(channel_major=501, mgmt_minor=3, unknown="the clique is not known: nobody says it")
    config = type(healthy.config)(compute_domains="on")
    facts = replace(healthy, config=config, imex=imex)
    (found,) = imex_of(facts)
    assert (found.level, "are refused" in found.message) == (FAIL, True)
    claims = ClaimsView(DRIVER, "", (), None)
    label = LabelView(str(LabelStatus.ABSENT), None, "absent", "")
    domains = DomainsView("on", claims, ImexReport(True, True, CLIQUE, "", "", ""), label, ())
    (found,) = imex_of(with_view(facts, domains=domains))
    assert (found.level, CLIQUE in found.message) == (WARN, True)


def test_what_a_daemon_of_a_domain_lacks_is_said() -> None:
    with for_claims(compute_domains="on") as (patient, _):
        capability = patient.node.tree.root / "proc/driver/nvidia/capabilities/fabric-imex-mgmt"
        capability.unlink()
        only(
            wrong(patient.examined(pre=True)),
            seed(Check.IMEX, FAIL, "claims of the domains' daemons are refused", "container toolkit"),
            seed(Check.IMEX, WARN, "no capability fabric-imex-mgmt", "/proc/driver/nvidia"),
        )


def test_what_the_daemon_says_of_claims(healthy: Facts) -> None:
    dra = replace(healthy, config=type(healthy.config)(dra="on"), api=None)
    slices = SlicesView(1, 1, True, (), (), (), "", "yes")
    left_out = BlockedView("gpu-0000-23-00-0", "on nvidia")
    for claims, expected in (
        (None, seed(Check.CLAIMS_SERVED, WARN, "serves no claims (--dra off)", "--dra on")),
        (ClaimsView("gpu.nvidia.com", "no registry", (), None),
         seed(Check.CLAIMS_SERVED, FAIL, "no registry", "tries again")),
        (ClaimsView("gpu.nvidia.com", "", (), replace(slices, left_out=(left_out,))),
         seed(Check.CLAIMS_SERVED, WARN, "0-23-00-0 is not to be given to a claim now: on nvidia",
              f"Run gpuactors explain {GPU}")),
    ):  # fmt: skip
        expected.assert_found(wrong(with_view(dra, claims=claims)))


def test_a_newer_checkpoint_is_said_once_with_the_node_in_the_commands(healthy: Facts) -> None:
    place = Place("/p", True, "/p", True)
    claims = Claims(place, place, (place,), (NewerCheckpoint("/p/gpuactors-checkpoint.json", 2),))
    dra = replace(healthy, node="node-1", config=type(healthy.config)(dra="on"), claims=claims, api=None)
    said = ClaimsView("gpu.nvidia.com", "/p/gpuactors-checkpoint.json is of version 2, this …", (), None)
    only(
        wrong(with_view(dra, claims=said)),
        seed(Check.CLAIMS_SERVED, FAIL, "serves no claim", "kubectl drain node-1 --ignore-daemonsets"),
    )


def test_what_the_daemon_says_of_compute_domains(healthy: Facts) -> None:
    on = replace(healthy, config=type(healthy.config)(compute_domains="on"), api=None)
    claims = ClaimsView(DRIVER, "", (), SlicesView(1, 1, True, (), (), (), "", "yes"))
    label = LabelView(str(LabelStatus.ABSENT), None, "absent", "")
    domains = DomainsView("on", claims, ImexReport(True, True, "", "", "", ""), label, ())
    every = (finding for group in examine(with_view(on, domains=domains)) for finding in group.findings)
    (well,) = (finding for finding in every if finding.check is Check.CLAIMS_SERVED)
    assert (well.level, well.message) == (PASS, f"{DRIVER}: 1 ResourceSlices, 0 claims")
    for view, expected in (
        (None, seed(Check.CLAIMS_SERVED, WARN, "serves no claims (--compute-domains off)", "--compute-domains")),
        (replace(domains, claims=replace(claims, problem="no registry")),
         seed(Check.CLAIMS_SERVED, FAIL, "no registry", "tries again")),
        (replace(domains, label=replace(label, problem="the label is another domain's")),
         seed(Check.CLAIMS_SERVED, WARN, "the label is another domain's", "kubectl get node node-1")),
    ):  # fmt: skip
        expected.assert_found(wrong(replace(with_view(on, domains=view), node="node-1")))


def test_directories_of_claims_that_hang(healthy: Facts) -> None:
    hanging = replace(healthy, claims=Unknown("the disk hangs"))
    only(wrong(hanging), seed(Check.CDI_DIRECTORY, FAIL, "the disk hangs", "Check these disks"))


def test_a_configuration_file_that_is_not_in_use(healthy: Facts) -> None:
    assert isinstance(healthy.daemon, Running)
    view = replace(healthy.daemon.view, config_problem="not in use: dra changed, which needs a restart")
    found = wrong(replace(healthy, daemon=replace(healthy.daemon, view=view)))
    only(
        found,
        seed(
            Check.DAEMON_SEES, WARN, "the configuration file: not in use: dra changed", "restart the daemon"
        ),
    )

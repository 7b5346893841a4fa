"""Compute domains, with a daemon process, an API server on loopback, and grpcio as kubelet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuactors.core.values.domain import DRIVER
from tests.process.daemon import WAIT_S, DaemonProcess, eventually, gpuactors
from tests.process.node import Node, address, open_node
from tests.support.claims import DRIVER as GPUS
from tests.support.claims import NODE, Api, device_of, plugin_of, prepare, unprepare, write_kubeconfig
from tests.support.domains import CHANNEL, CLIQUE, DAEMON, NAMESPACE, DomainObjects, with_imex


@dataclass
class Scene:
    """A node with IMEX, its API server and kubelet."""

    node: Node
    api: Api
    objects: DomainObjects
    cdi: Path
    daemon: DaemonProcess
    plugin: Mapping[str, Any]

    def edits(self, uid: str) -> dict[str, Any]:
        """What the CDI file gives to the claim's container."""
        content = json.loads((self.cdi / f"k8s.{DRIVER}-claim_{uid}.json").read_text())
        (device,) = content["devices"]
        return dict(device["containerEdits"])


@contextmanager
def domains_node(*words: str, imex: bool = True) -> Iterator[tuple[Node, Api, tuple[str, ...]]]:
    with open_node() as node, Api() as api:
        if imex:
            with_imex(node.tree.root)
        else:
            (node.tree.root / "proc").mkdir(exist_ok=True)
            (node.tree.root / "proc/devices").write_text("Character devices:\n  1 mem\n\nBlock devices:\n")
        write_kubeconfig(node.directory / "kubeconfig", api.port)
        mode = (
            () if any(word.startswith("--compute-domains=") for word in words) else ("--compute-domains=on",)
        )
        yield node, api, (
            *mode,
            f"--node-name={NODE}",
            f"--kubeconfig={node.directory / 'kubeconfig'}",
            f"--cdi-dir={node.directory / 'cdi'}",
            f"--imex-management={MANAGEMENT}",
            *words,
        )  # fmt: skip


@contextmanager
def scene(*words: str) -> Iterator[Scene]:
    with (
        domains_node(*words) as (node, api, arguments),
        node.daemon(*arguments) as daemon,
        plugin_of(node.kubelet_dir, driver=DRIVER) as plugin,
    ):
        yield Scene(node, api, DomainObjects(api), node.directory / "cdi", daemon, plugin)


MANAGEMENT = "management.nvidia.com/gpu=all"


class Call(threading.Thread):
    """A call of kubelet's that is under way."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._made = partial(call, *arguments)
        self.answers: list[Any] = []
        self.start()

    def run(self) -> None:
        with suppress(grpc.RpcError):  # the daemon ended with its test
            self.answers.append(self._made())

    @property
    def answer(self) -> Any:
        """Waits for it."""
        self.join(WAIT_S)
        (answer,) = self.answers
        return answer


def domain_with_channel(at: Scene, name: str = "training") -> tuple[str, str, str]:
    """A domain with a prepared channel and its daemon's claim; the three UIDs."""
    domain = at.objects.domain(name)
    channel, daemon = at.objects.channel("old", domain), at.objects.daemon(f"{name}-daemon", domain)
    waiting = Call(prepare, at.plugin, "old", channel)
    eventually(lambda: at.objects.label == domain, "the label")
    answer = prepare(at.plugin, f"{name}-daemon", daemon, NAMESPACE)
    assert answer.error == ""
    assert MANAGEMENT in answer.devices[0].cdi_device_ids
    assert waiting.answers == []
    at.objects.set_nodes(name, {NODE: "Ready"})
    assert waiting.answer.error == ""
    return domain, channel, daemon


def test_a_channel_from_slice_to_unprepare() -> None:
    with scene() as at:
        eventually(lambda: at.api.devices(DRIVER) == [CHANNEL, DAEMON], "the slice")
        domain, channel, daemon = domain_with_channel(at)
        (node,) = at.edits(channel)["deviceNodes"]
        assert node["path"] == "/dev/nvidia-caps-imex-channels/channel0"
        assert (node["major"], node["minor"]) == (235, 0)
        of_daemon = at.edits(daemon)
        assert {f"CLIQUE_ID={CLIQUE}", f"COMPUTE_DOMAIN_UUID={domain}"} < set(of_daemon["env"])
        (mount,) = of_daemon["mounts"]
        directory = at.node.kubelet_dir / "plugins" / DRIVER / "domains" / domain
        assert (mount["hostPath"], mount["containerPath"]) == (str(directory), "/imexd")
        assert "{{.IMEXCmdBindInterfaceIP}}" in (directory / "imexd.cfg.tmpl").read_text()
        (directory / "nodes_config.cfg").write_text("written by the daemon's container")
        assert unprepare(at.plugin, "old", channel).error == ""
        # By that NVIDIA's controller ends the daemon's pod, whose claim is unprepared then.
        _end(at.objects)
        assert directory.is_dir()
        assert unprepare(at.plugin, "training-daemon", daemon, NAMESPACE).error == ""
        eventually(lambda: not directory.exists(), "the directory's end")
        assert list(at.cdi.iterdir()) == []


def test_a_claim_of_all_channels_gets_every_one_of_the_driver_and_nobody_else_one() -> None:
    with scene("--imex-channels=3") as at:
        (at.node.tree.root / "proc/driver/nvidia/params").write_text("ImexChannelCount: 5\n")
        channels = [CHANNEL, "channel-1", "channel-2"]
        eventually(lambda: at.api.devices(DRIVER) == [*channels, DAEMON], "the slice")
        domain = at.objects.domain("training")
        claim, daemon = (
            at.objects.channel("all", domain, allocationMode="All"),
            at.objects.daemon("daemon", domain),
        )
        waiting = Call(prepare, at.plugin, "all", claim)
        eventually(lambda: at.objects.label == domain, "the label")
        assert prepare(at.plugin, "daemon", daemon, NAMESPACE).error == ""
        at.objects.set_nodes("training", {NODE: "Ready"})
        assert [device.device_name for device in waiting.answer.devices] == [CHANNEL]
        nodes = at.edits(claim)["deviceNodes"]
        assert [(n["path"], n["minor"]) for n in nodes] == [
            (f"/dev/nvidia-caps-imex-channels/channel{number}", number) for number in range(5)
        ]
        other = at.objects.channel("other", domain, device="channel-2")
        beside = Call(prepare, at.plugin, "other", other)
        at.daemon.wait_event("claim.waiting", claim="default/other", has=["channel-2", "default/all"])
        assert beside.answers == []
        assert unprepare(at.plugin, "all", claim).error == ""
        assert beside.answer.error == ""
        (node,) = at.edits(other)["deviceNodes"]
        assert node["minor"] == 2


def test_nothing_is_published_before_kubelet_has_registered_the_driver() -> None:
    """A pod that the scheduler sends sooner is prepared 60 to 90 s later."""
    with domains_node() as (node, api, arguments), node.daemon(*arguments) as daemon:
        daemon.wait_event("claims.serving")
        daemon.wait_event("imex.read")
        with plugin_of(node.kubelet_dir, driver=DRIVER):
            eventually(lambda: api.devices(DRIVER) == [CHANNEL, DAEMON], "the slice")
            daemon.wait_event("slices.published")
        events = [line["event"] for line in daemon.log if "event" in line]
        assert events.index("claims.registered") < events.index("slices.published")


def test_nvidia_641_the_old_unprepare_comes_after_the_new_prepare() -> None:
    """Its times: the new claim is prepared at 40.462, the old one unprepared at 41.014. The label stays throughout."""
    with scene() as at:
        domain, old, _ = domain_with_channel(at)
        before = at.objects.version
        new = at.objects.channel("new", domain)
        began = time.monotonic()
        waiting = Call(prepare, at.plugin, "new", new)
        at.daemon.wait_event("claim.waiting", claim="default/new", has=["the claim default/old"])
        time.sleep(max(0.0, began + 0.552 - time.monotonic()))
        assert waiting.answers == []
        assert unprepare(at.plugin, "old", old).error == ""
        assert waiting.answer.error == ""
        assert at.edits(new)["deviceNodes"][0]["minor"] == 0
        assert not (at.cdi / f"k8s.{DRIVER}-claim_{old}.json").exists()
        assert at.objects.label == domain
        assert set(at.objects.labels_since(before)) <= {domain}, "never absent in between"


def test_a_label_that_somebody_removes_is_back_within_5_s() -> None:
    with scene() as at:
        domain, _, _ = domain_with_channel(at)
        at.objects.set_label(None)
        removed_at = time.monotonic()
        eventually(lambda: at.objects.label == domain, "the label")
        assert time.monotonic() - removed_at < 5.0


def test_a_label_of_another_domain_is_never_overwritten_and_the_error_names_it() -> None:
    with scene() as at:
        _, old, daemon = domain_with_channel(at)
        assert unprepare(at.plugin, "old", old).error == ""
        assert unprepare(at.plugin, "training-daemon", daemon, NAMESPACE).error == ""
        _end(at.objects)
        other, domain = at.objects.domain("other"), at.objects.domain("mine")
        at.objects.set_label(other)
        at.daemon.wait_event("label.foreign", value=other)
        waiting = Call(prepare, at.plugin, "one", at.objects.channel("one", domain))
        at.daemon.wait_event("claim.waiting", claim="default/one", has=[other])
        assert at.objects.label == other
        at.objects.set_label(None)
        eventually(lambda: at.objects.label == domain, "our label, when the other one has gone")
        assert waiting.answers == []


def _end(objects: DomainObjects) -> None:
    """The domain is deleted, so its label does not wait for another claim."""
    objects.delete("training")
    eventually(partial(_is_without_label, objects), "the label's end")


def _is_without_label(objects: DomainObjects) -> bool:
    return objects.label is None


def test_a_daemon_that_comes_again_removes_a_stale_label_also_host_managed() -> None:
    for mode in ("on", "host-managed"):
        with domains_node(f"--compute-domains={mode}") as (node, api, arguments):
            objects = DomainObjects(api)
            objects.set_label(objects.domain("gone"))
            objects.delete("gone")
            with node.daemon(*arguments):
                eventually(partial(_is_without_label, objects), "the stale label's end")


def test_a_claim_outlives_the_daemon_and_the_label_stays() -> None:
    with domains_node() as (node, api, arguments):
        objects, cdi = DomainObjects(api), node.directory / "cdi"
        with node.daemon(*arguments) as daemon, plugin_of(node.kubelet_dir, driver=DRIVER) as plugin:
            domain, channel, _ = domain_with_channel(Scene(node, api, objects, cdi, daemon, plugin))
        before = objects.version
        for path in cdi.iterdir():
            path.unlink()
        with node.daemon(*arguments) as daemon, plugin_of(node.kubelet_dir, driver=DRIVER) as plugin:
            daemon.wait_event("checkpoint.read", claims=2)
            eventually(lambda: len(list(cdi.iterdir())) >= 2, "the CDI files that were lost")
            assert prepare(plugin, "old", channel).error == ""
            assert set(objects.labels_since(before)) <= {domain}
            assert unprepare(plugin, "old", channel).error == ""
            _end(objects)


def test_a_lost_checkpoint_costs_no_claim_and_no_label() -> None:
    """What the claims are for is read from the API server again; until then the label stays as it is."""
    with domains_node() as (node, api, arguments):
        objects, cdi = DomainObjects(api), node.directory / "cdi"
        with node.daemon(*arguments) as daemon, plugin_of(node.kubelet_dir, driver=DRIVER) as plugin:
            domain, channel, of_daemon = domain_with_channel(Scene(node, api, objects, cdi, daemon, plugin))
        (node.kubelet_dir / "plugins" / DRIVER / "gpuactors-checkpoint.json").write_text("{ not JSON")
        before = objects.version
        with node.daemon(*arguments) as daemon, plugin_of(node.kubelet_dir, driver=DRIVER) as plugin:
            daemon.wait_event("checkpoint.read", claims=2, level="warning")
            assert prepare(plugin, "old", channel).error == ""
            assert prepare(plugin, "training-daemon", of_daemon, NAMESPACE).error == ""
            assert set(objects.labels_since(before)) <= {domain}
            assert unprepare(plugin, "old", channel).error == ""
            _end(objects)
            assert unprepare(plugin, "training-daemon", of_daemon, NAMESPACE).error == ""
            assert list(cdi.iterdir()) == []


def test_an_update_hands_the_domains_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instances side by side: the new one has the old one's claims when it serves, and the label stays."""
    with domains_node() as (node, api, arguments):
        objects, cdi = DomainObjects(api), node.directory / "cdi"
        monkeypatch.setenv("POD_UID", "old")
        with node.daemon(*arguments) as old:
            with plugin_of(node.kubelet_dir, "old", driver=DRIVER) as plugin:
                domain, channel, of_daemon = domain_with_channel(Scene(node, api, objects, cdi, old, plugin))
            before = objects.version
            monkeypatch.setenv("POD_UID", "new")
            with node.daemon(*arguments) as new:
                old.wait_event("daemon.handed_over")
                new.wait_event("checkpoint.read", claims=2)
                with plugin_of(node.kubelet_dir, "new", driver=DRIVER) as plugin:
                    assert prepare(plugin, "old", channel).error == ""
                    assert set(objects.labels_since(before)) <= {domain}
                    assert unprepare(plugin, "old", channel).error == ""
                    assert unprepare(plugin, "training-daemon", of_daemon, NAMESPACE).error == ""
                _end(objects)
                assert list(cdi.iterdir()) == []


def test_gpus_and_domains_are_two_drivers_of_one_daemon() -> None:
    with domains_node("--dra=on") as (node, api, arguments):
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon(*arguments) as daemon:
            gpu = device_of(address(0x23))
            with plugin_of(node.kubelet_dir) as gpus, plugin_of(node.kubelet_dir, driver=DRIVER) as domains:
                eventually(
                    lambda: (api.devices(GPUS), api.devices(DRIVER)) == ([gpu], [CHANNEL, DAEMON]),
                    "both slices",
                )
                at = Scene(node, api, DomainObjects(api), node.directory / "cdi", daemon, domains)
                uid = api.claim("gpu", address(0x23))
                assert prepare(gpus, "gpu", uid).error == ""
                _, channel, _ = domain_with_channel(at)
                assert unprepare(gpus, "gpu", uid).error == ""
                assert unprepare(domains, "old", channel).error == ""


def test_inspect_and_explain_show_domains_with_what_a_claim_waits_for() -> None:
    with scene() as at:
        domain = at.objects.domain("training")
        channel, daemon = at.objects.channel("one", domain), at.objects.daemon("training-daemon", domain)
        waiting = Call(prepare, at.plugin, "one", channel)
        eventually(lambda: at.objects.label == domain, "the label")
        where = (f"--host-root={at.node.tree.root}", f"--state-dir={at.node.directory / 's'}")
        known = json.loads(gpuactors("inspect", "-o", "json", *where).stdout)["compute_domains"]
        assert (known["imex"]["clique"], known["label"]["value"]) == (CLIQUE, domain)
        assert [(d["name"], d["status"]) for d in known["domains"]] == [("training", "NotReady")]
        assert "the daemon of the ComputeDomain default/training has no" in known["domains"][0]["missing"]
        assert [(c["name"], c["problem"]) for c in known["claims"]] == [
            ("one", known["domains"][0]["missing"])
        ]
        assert known["slices"]["slices"] == 1
        assert prepare(at.plugin, "training-daemon", daemon, NAMESPACE).error == ""
        at.objects.set_nodes("training", {NODE: "Ready"})
        assert waiting.answer.error == ""
        assert f"default/training, UID {domain}  Ready" in gpuactors("inspect", *where).stdout
        assert "Ready: its channels can be used here" in gpuactors("explain", domain, *where).stdout
        told = gpuactors("explain", "default/one", *where).stdout
        assert "Prepared: its containers may run" in told
        assert f"ComputeDomain  default/training, UID {domain}: Ready" in told
        unknown = gpuactors("explain", "default/none", *where)
        assert (unknown.returncode, "the ComputeDomain default/training" in unknown.stderr) == (1, True)


def test_two_drivers_of_one_name_are_refused(tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", 1)
    ended = gpuactors(
        "run", "--dra=on", f"--driver-name={DRIVER}", "--compute-domains=on",
        f"--kubeconfig={tmp_path / 'kubeconfig'}", f"--state-dir={tmp_path}",
    )  # fmt: skip
    assert ended.returncode != 0
    assert ended.stderr.count("\n") == 1
    assert "give each its own" in ended.stderr


def test_host_managed_waits_for_the_hosts_own_imex(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text("NOT_READY")
    ctl = tmp_path / "nvidia-imex-ctl"
    ctl.write_text(f'#!/bin/sh\n[ "$1" = -q ] && exec cat {said}\n')
    ctl.chmod(0o755)
    with scene("--compute-domains=host-managed", f"--imex-ctl={ctl}") as at:
        eventually(lambda: at.api.devices(DRIVER) == [CHANNEL], "the slice, without a daemon")
        uid = at.objects.channel("one", at.objects.domain("training"))
        waiting = Call(prepare, at.plugin, "one", uid)
        at.daemon.wait_event("claim.waiting", claim="default/one", has=["NOT_READY"])
        said.write_text("READY")
        assert waiting.answer.error == ""
        assert at.objects.label is None
        assert unprepare(at.plugin, "one", uid).error == ""


def test_a_domain_id_that_is_a_path_makes_no_file_anywhere() -> None:
    with scene() as at:
        before = sorted(path for path in at.node.directory.rglob("*") if "domains" in path.parts)
        for number, bad in enumerate(("../../etc", "")):
            for uid, name, namespace in (
                (at.objects.channel(f"bad-{number}", bad), f"bad-{number}", "default"),
                (at.objects.daemon(f"bad-{number}", bad), f"bad-{number}", NAMESPACE),
            ):
                assert "domainID" in prepare(at.plugin, name, uid, namespace).error
        after = sorted(path for path in at.node.directory.rglob("*") if "domains" in path.parts)
        assert after == before
        assert at.objects.label is None


def test_a_node_without_imex_says_so_once_and_offers_nothing() -> None:
    with (
        domains_node(imex=False) as (node, api, arguments),
        node.daemon(*arguments) as daemon,
        plugin_of(node.kubelet_dir, driver=DRIVER),
    ):
        daemon.wait_event("imex.read", has=["nvidia-caps-imex-channels"])
        eventually(lambda: api.slices(DRIVER) == 1, "the empty slice")
        assert api.devices(DRIVER) == []
        assert len([line for line in daemon.log if line["event"] == "imex.read"]) == 1

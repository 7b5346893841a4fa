"""Claims, with a daemon process, an API server on loopback, and grpcio as kubelet."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.process.daemon import WAIT_S, DaemonProcess, eventually, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.process.test_domains import Call
from tests.process.test_endpoints import metrics, page
from tests.process.test_reload import AT_ONCE, Mounted
from tests.support import directories
from tests.support.claims import DRIVER, NODE, Api, device_of, plugin_of, prepare, unprepare, write_kubeconfig
from tests.support.mounts import mount, tmpfs
from tests.support.nvidia_checkpoint import prepared, their_checkpoint, vfio
from tests.support.pod_resources_grpcio import PROTO as POD_RESOURCES


@contextmanager
def claims_node(**plugged: str) -> Iterator[tuple[Node, Api, Path]]:
    """A node with GPUs in these slots (`g23="vfio-pci"`), its API server, and its CDI directory."""
    with open_node() as node, Api() as api:
        for slot, driver in plugged.items():
            node.plug(int(slot[1:], 16), "2330", driver=driver)
        write_kubeconfig(node.directory / "kubeconfig", api.port)
        yield node, api, node.directory / "cdi"


def daemon_of(node: Node, cdi: Path, *words: str, bounds: Mapping[str, float] | None = None) -> DaemonProcess:
    return node.daemon(
        "--dra=on",
        f"--node-name={NODE}",
        f"--kubeconfig={node.directory / 'kubeconfig'}",
        f"--cdi-dir={cdi}",
        *words,
        bounds=bounds,
    )


def test_a_pre_bound_gpu_from_slice_to_unprepare() -> None:
    gpu = address(0x23)
    with claims_node(g23="vfio-pci", g24="vfio-pci") as (node, api, cdi), daemon_of(node, cdi) as daemon:
        with plugin_of(node.kubelet_dir) as plugin:
            eventually(lambda: api.devices() == [device_of(gpu), device_of(address(0x24))], "the slice")
            uid = api.claim("one", gpu)
            prepared = prepare(plugin, "one", uid)
            assert prepared.error == ""
            (device,) = prepared.devices
            assert (device.pool_name, device.device_name) == (NODE, device_of(gpu))
            assert list(device.request_names) == ["gpu"]
            assert list(device.cdi_device_ids) == [
                f"k8s.{DRIVER}/claim={uid}-{device_of(gpu)}",
                f"{DRIVER}/metadata={uid}_gpu",
            ]
            (devices,) = cdi.glob(f"k8s.{DRIVER}-claim_{uid}.json")
            (made,) = json.loads(devices.read_text())["devices"]
            paths = [n["path"] for n in made["containerEdits"]["deviceNodes"]]
            assert paths == ["/dev/vfio/35", "/dev/vfio/vfio"]
            # One owner per GPU: the device plugin does not offer it meanwhile.
            node.wait_device_lists({H100: {gpu: "Unhealthy", address(0x24): HEALTHY}})
            assert unprepare(plugin, "one", uid).error == ""
            assert list(cdi.iterdir()) == []
            assert node.tree.driver_of(gpu) == "vfio-pci"
            node.wait_device_lists({H100: {gpu: HEALTHY, address(0x24): HEALTHY}})
        daemon.wait_event("claim.unprepared", claim="default/one")


def test_a_claim_keeps_a_gpu_that_a_changed_file_excludes_also_under_the_next_daemon() -> None:
    gpu, other = address(0x23), address(0x24)
    with claims_node(g23="vfio-pci", g24="vfio-pci") as (node, api, cdi):
        mounted = Mounted(node.directory / "config")
        mounted.put({})
        words = (f"--config={mounted.path}", "--reload=on")
        left_out = f"{gpu} is no device that is offered here: no selector matches it (--select)"
        one, two = api.claim("one", gpu), api.claim("two", gpu)
        with daemon_of(node, cdi, *words, bounds=AT_ONCE) as daemon, plugin_of(node.kubelet_dir) as plugin:
            first = prepare(plugin, "one", one)
            assert first.error == ""
            eventually(lambda: api.devices() == [device_of(gpu), device_of(other)], "the slice")
            files = {path: path.read_bytes() for path in cdi.iterdir()}
            mounted.put({"select": ["vendor=10de", f"!address={gpu}"]})
            node.wait_device_lists({H100: {other: HEALTHY}})
            eventually(lambda: api.taints(gpu) == {"NotSelected"}, "the taint")
            assert prepare(plugin, "one", one) == first
            assert prepare(plugin, "two", two).error == left_out
            check_kept(node, gpu)
        # Its first scan begins before it has read the checkpoint.
        with daemon_of(node, cdi, *words, bounds=AT_ONCE) as after, plugin_of(node.kubelet_dir) as plugin:
            node.wait_device_lists({H100: {other: HEALTHY}})
            assert prepare(plugin, "one", one) == first
            assert {path: path.read_bytes() for path in cdi.iterdir()} == files
            check_kept(node, gpu)
            assert unprepare(plugin, "one", one).error == ""
            assert list(cdi.iterdir()) == []
            assert prepare(plugin, "two", two).error != ""
            mounted.put({})
            node.wait_device_lists({H100: {gpu: HEALTHY, other: HEALTHY}})
            assert prepare(plugin, "two", two).error == ""
        assert "claim.astray" not in {line["event"] for line in (*daemon.log, *after.log)}


def check_kept(node: Node, gpu: str) -> None:
    """What an operator is told of a GPU that a claim has, and no selector chooses."""
    explained = gpuactors("explain", gpu, *node.directories).stdout
    assert explained.startswith(f"{gpu}  (not selected any more)"), explained
    assert "claimed: claim default/one has it (Prepared)" in explained
    assert "delete the pod" not in explained


def test_a_class_with_a_resource_of_the_device_plugin_is_said_once_at_the_start() -> None:
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        api.do(api.server.add_class, "vfio.gpu.nvidia.com")
        api.do(api.server.add_class, "counted", H100)
        with daemon_of(node, cdi) as daemon:
            line = daemon.wait_event("resource.contested", resource=H100, has=["--device-plugin off"])
            assert (line["level"], line["device_class"]) == ("warning", "counted")
            node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
            node.wait_device_lists({H100: {address(0x23): HEALTHY, address(0x24): HEALTHY}})
            assert [line["event"] for line in daemon.log].count("resource.contested") == 1
        with daemon_of(node, cdi, "--device-plugin=off") as daemon:
            eventually(lambda: "daemon.serving" in [line["event"] for line in daemon.log], "the daemon")
        assert not {"resource.contested", "classes.unread"} & {line["event"] for line in daemon.log}


def test_a_claim_outlives_the_daemon() -> None:
    gpu = address(0x23)
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        uid = api.claim("one", gpu)
        with daemon_of(node, cdi), plugin_of(node.kubelet_dir) as plugin:
            first = prepare(plugin, "one", uid)
            assert first.error == ""
        for path in cdi.iterdir():
            path.unlink()
        with daemon_of(node, cdi) as daemon:
            daemon.wait_event("checkpoint.read", claims=1)
            eventually(lambda: len(list(cdi.iterdir())) == 2, "the CDI files that were lost")
            node.wait_device_lists({H100: {gpu: "Unhealthy"}})
            with plugin_of(node.kubelet_dir) as plugin:
                assert list(prepare(plugin, "one", uid).devices) == list(first.devices)
                assert unprepare(plugin, "one", uid).error == ""
            assert list(cdi.iterdir()) == []


@pytest.mark.parametrize("how", ["files", "directory"])
def test_a_cdi_file_that_somebody_removes_is_written_again(how: str) -> None:
    gpu = address(0x23)
    with claims_node(g23="vfio-pci") as (node, api, cdi), daemon_of(node, cdi):
        with plugin_of(node.kubelet_dir) as plugin:
            assert prepare(plugin, "one", api.claim("one", gpu)).error == ""
        before = {path: path.read_bytes() for path in cdi.iterdir()}
        assert len(before) == 2
        if how == "directory":
            directories.remove(cdi)
        else:
            for path in before:
                path.unlink()
        eventually(
            lambda: {path: path.read_bytes() for path in before if path.is_file()} == before,
            "the files that were removed",
        )


@pytest.mark.parametrize("which", [("plugins",), ("cdi",), ("plugins", "cdi")], ids=" and ".join)
def test_a_claim_is_prepared_again_on_a_read_only_file_system(which: tuple[str, ...]) -> None:
    """After an error of its disk kubelet restarts, and prepares each claim again: nothing is to be written."""
    with claims_node(g23="vfio-pci") as (node, api, cdi), ExitStack() as stack:
        places = {"plugins": node.kubelet_dir / "plugins", "cdi": cdi}
        for directory in places.values():
            directory.mkdir(exist_ok=True)
            stack.enter_context(tmpfs(directory))
        stack.enter_context(daemon_of(node, cdi))
        plugin = stack.enter_context(plugin_of(node.kubelet_dir))
        uid = api.claim("one", address(0x23))
        first = prepare(plugin, "one", uid)
        assert first.error == ""
        for name in which:
            mount("remount,ro", places[name])
            with pytest.raises(OSError, match="Read-only file system"):
                (places[name] / "a file").touch()
        assert prepare(plugin, "one", uid) == first
        for name in which:
            mount("remount,rw", places[name])
        assert unprepare(plugin, "one", uid).error == ""
        assert list(cdi.iterdir()) == []


def test_a_cdi_directory_that_is_removed_under_its_mount_ends_the_containers_life() -> None:
    with claims_node(g23="vfio-pci") as (node, _, cdi):
        cdi.mkdir()
        mounted = os.open(cdi, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with daemon_of(node, Path(f"/proc/{os.getpid()}/fd/{mounted}")) as daemon:
                daemon.wait_event("checkpoint.read")
                assert page(node, "/livez").text == "live\n"
                cdi.rmdir()
                dead = page(node, "/livez")
        finally:
            os.close(mounted)
    assert dead.status == 503
    assert "was removed on the host" in dead.text


def test_a_gpu_that_nvidias_driver_has_prepared_is_its_claims_until_kubelet_unprepares_it() -> None:
    """And back: its checkpoint is left as it was."""
    gpu = address(0x23)
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        old = api.claim("old", gpu)
        directory = node.kubelet_dir / "plugins" / DRIVER
        directory.mkdir(parents=True)
        cdi.mkdir()
        content = their_checkpoint(
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            {old: prepared(vfio(old, NODE, 0, gpu))},
        )
        (directory / "checkpoint.json").write_bytes(content)
        (cdi / f"k8s.{DRIVER}-claim_{old}.yaml").write_text("devices: []")
        with daemon_of(node, cdi) as daemon, plugin_of(node.kubelet_dir) as plugin:
            daemon.wait_event("checkpoint.read", claims=1)
            node.wait_device_lists({H100: {gpu: "Unhealthy"}})
            waiting = Call(prepare, plugin, "new", api.claim("new", gpu))
            daemon.wait_event("claim.waiting", claim="default/new", has=["by NVIDIA's driver", "claim "])
            (again,) = prepare(plugin, "old", old).devices
            assert list(again.cdi_device_ids) == [f"k8s.{DRIVER}/claim={old}-gpu-vfio-0"]
            assert unprepare(plugin, "old", old).error == ""
            assert waiting.answer.error == ""
            assert not list(cdi.glob(f"*{old}*"))
        assert (directory / "checkpoint.json").read_bytes() == content


def test_a_gpu_that_nvidias_device_plugin_gave_to_a_container_is_waited_for() -> None:
    """No process has opened it yet: kubelet's ledger alone has it, by the UUID that NVIDIA's driver says."""
    gpu, uuid = address(0x23), "GPU-6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"
    message = POD_RESOURCES.message
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        node.tree.unbind(gpu)
        node.tree.bind(gpu, "nvidia")
        information = node.tree.root / f"proc/driver/nvidia/gpus/{gpu}/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\n")
        devices = message("ContainerDevices")(resource_name="nvidia.com/gpu", device_ids=[uuid])
        container = message("ContainerResources")(name="c", devices=[devices])
        node.kubelet.list_besides(
            [message("PodResources")(name="train-0", namespace="default", containers=[container])]
        )
        with daemon_of(node, cdi) as daemon, plugin_of(node.kubelet_dir) as plugin:
            uid = api.claim("one", gpu)
            call = Call(prepare, plugin, "one", uid)
            said = ["allocated to pod default/train-0 as nvidia.com/gpu", gpu]
            daemon.wait_event("claim.waiting", claim="default/one", has=said)
            daemon.wait_event("slices.published", tainted=[device_of(gpu)])
            assert node.tree.driver_of(gpu) == "nvidia"
            assert unprepare(plugin, "one", uid).error == ""
            assert call.answer.error != ""


def test_an_update_hands_the_claims_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instances side by side, each by its pod's UID: the new one has the old one's claims when it serves."""
    gpu = address(0x23)
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        uid, other = api.claim("one", gpu), api.claim("two", gpu)
        monkeypatch.setenv("POD_UID", "old")
        with daemon_of(node, cdi) as old:
            with plugin_of(node.kubelet_dir, "old") as plugin:
                first = prepare(plugin, "one", uid)
                assert first.error == ""
            monkeypatch.setenv("POD_UID", "new")
            with daemon_of(node, cdi) as new:
                old.wait_event("daemon.handed_over")
                new.wait_event("checkpoint.read", claims=1)
                with plugin_of(node.kubelet_dir, "new") as plugin:
                    registry = node.kubelet_dir / "plugins_registry"
                    eventually(lambda: len(list(registry.iterdir())) == 1, "the end of the old one's socket")
                    assert list(prepare(plugin, "one", uid).devices) == list(first.devices)
                    assert unprepare(plugin, "one", uid).error == ""
                    assert prepare(plugin, "two", other).error == ""
                    assert unprepare(plugin, "two", other).error == ""
                assert list(cdi.iterdir()) == []


def test_the_new_claim_waits_in_its_call_for_the_old_one() -> None:
    gpu = address(0x23)
    with (
        claims_node(g23="vfio-pci") as (node, api, cdi),
        daemon_of(node, cdi) as daemon,
        plugin_of(node.kubelet_dir) as plugin,
    ):
        old, new = api.claim("old", gpu), api.claim("new", gpu)
        assert prepare(plugin, "old", old).error == ""
        waiting = Call(prepare, plugin, "new", new)
        daemon.wait_event("claim.waiting", claim="default/new", has=["the claim default/old"])
        assert waiting.answers == []
        assert unprepare(plugin, "old", old).error == ""
        assert waiting.answer.error == ""


def test_a_claim_that_is_not_allocated_or_not_there_is_refused_with_the_reason() -> None:
    with (
        claims_node(g23="vfio-pci") as (node, api, cdi),
        daemon_of(node, cdi) as daemon,
        plugin_of(node.kubelet_dir) as plugin,
    ):
        uid = api.claim("one", address(0x23))
        api.do(api.server.set_claim_status, "default", "one", {})
        assert prepare(plugin, "one", uid).error == "the claim is not allocated"
        said = daemon.wait_event("claim.refused", claim="default/one")
        assert (said["reason"], said["causes"]) == ("the claim is not allocated", ["ClaimNotAllocated"])
        counted = metrics(node)
        assert counted['gpuactors_refusals_total{cause="ClaimNotAllocated"}'] == 1
        assert counted['gpuactors_refusals_total{cause="ClaimedElsewhere"}'] == 0
        assert "it was deleted" in prepare(plugin, "gone", "uid-of-gone").error
        assert unprepare(plugin, "gone", "uid-of-gone").error == ""


@pytest.mark.parametrize("needs_one", ["--dra=on", "--events=on"])
def test_without_an_api_server_it_says_what_to_do(needs_one: str) -> None:
    with open_node() as node:
        ended = gpuactors("run", needs_one, *node.directories, env={"KUBERNETES_SERVICE_HOST": ""})
    assert ended.returncode == 78, "a configuration that cannot work (sysexits.h, EX_CONFIG)"
    assert "name a kubeconfig file with --kubeconfig" in ended.stderr


def test_inspect_and_explain_show_claims() -> None:
    gpu = address(0x23)
    with (
        claims_node(g23="vfio-pci") as (node, api, cdi),
        daemon_of(node, cdi) as daemon,
        plugin_of(node.kubelet_dir) as plugin,
    ):
        old, new = api.claim("old", gpu), api.claim("new", gpu)
        assert prepare(plugin, "old", old).error == ""
        waiting = threading.Thread(target=prepare, args=(plugin, "new", new))
        waiting.start()
        daemon.wait_event("claim.waiting", claim="default/new", has=["the claim default/old"])
        where = (f"--host-root={node.tree.root}", f"--state-dir={node.directory / 's'}")
        known = json.loads(gpuactors("inspect", "-o", "json", *where).stdout)
        assert {c["name"]: (c["state"], c["waiting_calls"]) for c in known["claims"]["claims"]} == {
            "old": ("Prepared", 0),
            "new": ("Waiting", 1),
        }
        assert known["claims"]["slices"]["settled"]
        assert known["devices"][0]["for_claims"]["claim"]["uid"] == old
        told = gpuactors("explain", gpu, *where).stdout
        assert f"default/old, UID {old}: Prepared" in told
        assert "it stays on its vfio driver: it was found on vfio-pci" in told
        assert f"{gpu}: it belongs to the claim default/old" in gpuactors("explain", new, *where).stdout
        unknown = gpuactors("explain", "default/none", *where)
        assert (unknown.returncode, "it knows default/old, default/new" in unknown.stderr) == (1, True)
        assert unprepare(plugin, "old", old).error == ""
        waiting.join(WAIT_S)

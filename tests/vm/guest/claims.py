"""The cluster's and kubelet's part in the claims of a guest, and what the kernel and the node's files say of them.

Must not ask the daemon what became of a claim: what is checked is sysfs, the CDI directory and the driver's directory.
"""

from __future__ import annotations

import json
import stat
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc

from gpuactors import limits
from tests.support import claims, dra_grpcio
from tests.support.claims import DRIVER, NODE, Api, device_of, get_info, plugin_of, write_kubeconfig
from tests.support.patience import patient
from tests.vm.guest.daemon import START_TIMEOUT_S, DaemonProcess
from tests.vm.guest.mdev import Mediated
from tests.vm.guest.node import SLACK_S
from tests.vm.guest.pod import KUBELET_DIR as IN_POD
from tests.vm.guest.pod import MakePod, Pod, PodMount, base_pod, dra_pod
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, functions_behind
from tests.vm.machine import VFIO_MODULES, VFIO_USER, Machine, PciFunction, PciIds

GPU_DRIVER: Final = "e1000e"
COMPANION_DRIVER: Final = "snd_hda_intel"
"""Of the host: Debian's own drivers, which take the emulated functions at boot as a GPU's driver takes a GPU."""

PAIRED, BY_IDS, ALONE, TWIN = PORTS = "rp1", "rp2", "rp3", "rp4"
"""A GPU with a companion, both on drivers of the host; one that vfio-pci has by `ids=`; two identical GPUs, of which an
operator's boot script binds the second one to vfio-pci."""

FUNCTIONS: Final = (
    PciFunction("gpu", GPU_DRIVER, PAIRED),
    PciFunction("audio", "ich9-intel-hda", PAIRED, function=1),
    PciFunction("h100", VFIO_USER, BY_IDS, ids=PciIds("10de", "2330", "030200")),
    PciFunction("alone", GPU_DRIVER, ALONE),
    PciFunction("twin", GPU_DRIVER, TWIN),
)
BY_IDS_PARAMETER: Final = "ids=10de:2330"
"""Of vfio-pci: by which an operator's boot has it take that GPU."""

MODULES: Final = (*VFIO_MODULES, GPU_DRIVER, COMPANION_DRIVER)

CLAIMS_MACHINE: Final = Machine(
    ports=PORTS,
    functions=FUNCTIONS,
    modules=MODULES,
    vfio_pci_parameters=(BY_IDS_PARAMETER,),
    # One to two minutes on a quiet machine, of which half a minute is Python's start: the daemon in its pod, the API
    # server, kubelet's gRPC and the tenant.
    scenario_timeout_s=420.0,
)
"""Of every scenario with claims; they add what else they need."""

SELECTORS: Final = ("vendor=8086,device=10d3", "vendor=10de,device=2330")
"""The network functions play GPUs: QEMU has no GPU that a driver of the host takes and gives back."""

CDI_DIR: Final = Path("/run/cdi")
"""Empty after a boot, as /var/run/cdi."""

CREDENTIALS: Final = Path("/run/kube")
KUBECONFIG: Final = CREDENTIALS / "config"

NEEDED_IF_PREBOUND: Final = (
    "/var/lib/kubelet/plugins/gpu.nvidia.com", "/var/lib/kubelet/plugins_registry", "/var/run/cdi",
)  # fmt: skip
"""The mounts of overlays/dra that are needed where no GPU is ever bound."""

ACT_WITHIN_S: Final = patient(15.0)
"""A prepare or unprepare in which nothing hangs: some writes to sysfs and some syncs, and a process for the writes,
whose start is dear under emulation."""

ANSWER_WITHIN_S: Final = limits.CLAIM_ANSWER_S + SLACK_S

KUBEVIRT_READS: Final = "metadata.resource.k8s.io/v1alpha1"
"""The only version of the metadata file that KubeVirt 1.9 reads (pkg/dra/utils.go)."""

GET_INFO_WITHIN_S: Final = patient(dra_grpcio.GET_INFO_S)
"""Kubelet's own deadline of 1 s, longer where the machine is slower."""


@dataclass(slots=True)
class Call:
    """A call of kubelet's that is under way."""

    thread: threading.Thread
    answers: list[Any] = field(default_factory=list)
    failures: list[grpc.RpcError] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def is_over(self) -> bool:
        """It has an answer, or has failed."""
        return bool(self.answers or self.failures)

    def answer(self, within_s: float) -> Any:
        """Raises TimeoutError, or grpc.RpcError if the call itself failed."""
        self.thread.join(within_s)
        if not self.is_over:
            raise TimeoutError(f"no answer within {within_s:g} s")
        if self.failures:
            raise self.failures[0]
        return self.answers[0]


@dataclass(frozen=True, slots=True)
class Gpus:
    """The functions of a machine of `FUNCTIONS`."""

    gpu: Function
    audio: Function
    h100: Function
    alone: Function
    twin: Function

    @classmethod
    def of(cls, machine: Machine) -> Gpus:
        """Waits until the drivers of the boot have taken them, and then binds the twin, as a boot script does: an
        override that stays. Raises TimeoutError."""
        gpu, audio = functions_behind(machine, PAIRED)
        (h100,), (alone,), (twin,) = (functions_behind(machine, port) for port in (BY_IDS, ALONE, TWIN))
        gpus = cls(gpu, audio, h100, alone, twin)
        booted = (GPU_DRIVER, COMPANION_DRIVER, "vfio-pci", GPU_DRIVER, GPU_DRIVER)
        eventually("the host's drivers", lambda: gpus.drivers == booted, timeout_s=SLACK_S)
        assert gpu.group == audio.group
        assert alone.ids == twin.ids
        twin.unbind()
        twin.bind_vfio()
        gpus.check_overrides()
        return gpus

    @property
    def functions(self) -> tuple[Function, ...]:
        """All five, in order."""
        return (self.gpu, self.audio, self.h100, self.alone, self.twin)

    @property
    def drivers(self) -> tuple[str | None, ...]:
        """Of the five, in order."""
        return tuple(function.driver for function in self.functions)

    @property
    def at_rest(self) -> bool:
        """Each is on the driver that it had before the first daemon."""
        return self.drivers == (GPU_DRIVER, COMPANION_DRIVER, "vfio-pci", GPU_DRIVER, "vfio-pci")

    @property
    def offered(self) -> list[str]:
        """The addresses of the four GPUs: claims may have each of them, whatever driver it is on."""
        return [function.address for function in (self.gpu, self.h100, self.alone, self.twin)]

    def check_overrides(self) -> None:
        """Nobody has a `driver_override` but the twin, which has the operator's own."""
        found = [override_of(function) for function in self.functions]
        assert found == ["(null)"] * 4 + ["vfio-pci"], found

    def check_nothing_is_left(self, cluster: Cluster) -> None:
        """No claim: the drivers as before, no override of ours, no group's node but those of the pre-bound GPUs, no
        file, and no claim in the checkpoint that has a GPU."""
        assert self.at_rest, self.drivers
        self.check_overrides()
        nodes = {path.name for path in Path("/dev/vfio").iterdir() if path.name.isdigit()}
        assert nodes == {self.h100.group, self.twin.group}, nodes
        assert cluster.files == [], cluster.files
        eventually("a checkpoint without claims", lambda: cluster.stored == {}, timeout_s=SLACK_S)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The API server, and kubelet as the DRA plugin sees it."""

    guest: Guest
    api: Api
    kubelet_dir: Path
    instance: str
    """The pod's UID, in the names of its sockets."""

    @classmethod
    @contextmanager
    def running(cls, guest: Guest, kubelet_dir: Path, seed: int = 0) -> Iterator[Cluster]:
        """With a kubeconfig for the daemon. The UIDs of new claims follow from `seed`."""
        # The daemon says where its socket is as it sees it, and kubelet's directory is at one path in the pod.
        Path(IN_POD).mkdir(parents=True, exist_ok=True)
        subprocess.run(["/run/busybox", "mount", "-o", "bind", str(kubelet_dir), IN_POD], check=True)
        with Api(seed) as api:
            CREDENTIALS.mkdir()
            write_kubeconfig(KUBECONFIG, api.port)
            instance = claims_pod(kubelet_dir, kubelet_dir).environment["POD_UID"]
            yield cls(guest, api, kubelet_dir, instance)

    @property
    def plugin_dir(self) -> Path:
        """The driver's directory of its own."""
        return self.kubelet_dir / "plugins" / DRIVER

    @property
    def files(self) -> list[str]:
        """What claims have left: CDI files, and metadata directories with what is in them, temporary files as well."""
        metadata = self.plugin_dir / "metadata"
        cdi = [path.name for path in CDI_DIR.iterdir()] if CDI_DIR.is_dir() else []
        return sorted(cdi + [str(path.relative_to(metadata)) for path in metadata.rglob("*")])

    @property
    def stored(self) -> dict[str, str]:
        """The claims in the checkpoint: UID → state."""
        checkpoint = self.plugin_dir / "gpuactors-checkpoint.json"
        content = json.loads(checkpoint.read_text(encoding="utf-8"))["checkpoint"]
        return {uid: entry["state"] for uid, entry in content["claims"].items()}

    def start(
        self,
        name: str,
        *,
        state_dir: Path | None = None,
        pod: MakePod | None = None,
        selectors: Sequence[str] = SELECTORS,
    ) -> DaemonProcess:
        """A daemon with claims in the pod of deploy/overlays/dra, or another one; its log and journal are named so."""
        selected = [word for selector in selectors for word in ("--select", selector)]
        return DaemonProcess.start(
            (
                "--kubelet-dir", str(self.kubelet_dir), "--resync-interval-s", "3600", *selected,
                f"--node-name={NODE}", f"--kubeconfig={KUBECONFIG}",
            ),
            self.guest.artifacts / f"{name}.log", pod=pod or claims_pod, state_dir=state_dir,
        )  # fmt: skip

    @contextmanager
    def plugin(self, daemon: DaemonProcess) -> Iterator[Mapping[str, Any]]:
        """The plugin's methods, when the daemon serves them: a socket may have been left by one that was killed."""
        eventually("claims.serving", lambda: daemon.said("claims.serving") or None, timeout_s=START_TIMEOUT_S)
        # It has just started: how soon it answers is looked at when it works.
        with plugin_of(self.kubelet_dir, self.instance, get_info_s=START_TIMEOUT_S) as methods:
            yield methods

    def wait_offered(self, gpus: Gpus) -> None:
        """Wait until the slices have exactly these GPUs. Raises TimeoutError."""
        self.wait_devices(gpus.offered)

    def wait_devices(self, addresses: Iterable[str]) -> None:
        """Wait until the slices have exactly the devices at these addresses. Raises TimeoutError."""
        wanted = sorted(map(device_of, addresses))
        eventually(f"slices with {wanted}", lambda: self.api.devices() == wanted, timeout_s=patient(30.0))

    @property
    def taints(self) -> dict[str, str]:
        """Device in the slices → the value of its taint, empty without one."""
        slices = self.api.do(self.api.server.slices, DRIVER)
        devices = [device for slice_ in slices for device in slice_["spec"].get("devices") or ()]
        return {d["name"]: next((t["value"] for t in d.get("taints") or ()), "") for d in devices}

    # --- kubelet's calls ------------------------------------------------------------------------------------

    def figure(self, name: str, value: object) -> None:
        """Keep it in `result.json`, and show it."""
        self.guest.figures[name] = value
        print(f"    {name}: {value}", flush=True)

    def figures(self, name: str, values_ms: Sequence[float]) -> None:
        """How many, their median and the largest."""
        self.figure(f"{name}_n", len(values_ms))
        self.figure(f"{name}_p50_ms", round(statistics.median(values_ms), 1))
        self.figure(f"{name}_max_ms", max(values_ms))

    def get_info(self) -> float:
        """GetInfo, within kubelet's deadline; the milliseconds that it took. Raises grpc.RpcError."""
        began = time.monotonic()
        get_info(self.kubelet_dir, self.instance, GET_INFO_WITHIN_S)
        return _since_ms(began)

    def prepared(self, plugin: Mapping[str, Any], name: str, uid: str, figure: str = "") -> float:
        """Prepare, which succeeds in time; the milliseconds that it took. Of the answer's one device the CDI id is this
        claim's."""
        took_ms, answer = self._done(claims.prepare, plugin, name, uid)
        (device,) = answer.devices
        assert device.cdi_device_ids[0].startswith(f"k8s.{DRIVER}/claim={uid}-"), device
        if figure:
            self.figure(figure, took_ms)
        return took_ms

    def unprepared(self, plugin: Mapping[str, Any], name: str, uid: str, figure: str = "") -> float:
        """Unprepare, which succeeds in time; the milliseconds that it took."""
        took_ms, _ = self._done(claims.unprepare, plugin, name, uid)
        if figure:
            self.figure(figure, took_ms)
        return took_ms

    def _done(
        self, call: Callable[..., Any], plugin: Mapping[str, Any], name: str, uid: str
    ) -> tuple[float, Any]:
        began = time.monotonic()
        answer = call(plugin, name, uid)
        took_ms = _since_ms(began)
        assert answer.error == "", answer.error
        assert took_ms <= ACT_WITHIN_S * 1000, f"{took_ms} ms, at most {ACT_WITHIN_S:g} s"
        return took_ms, answer

    # --- the node's files -------------------------------------------------------------------------------------

    @property
    def named(self) -> dict[str, list[str]]:
        """UID → the device nodes that the claim's CDI file names; without the claims that have no file."""
        found = {}
        for path in CDI_DIR.glob(f"k8s.{DRIVER}-claim_*.json"):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                (device,) = json.loads(path.read_text(encoding="utf-8"))["devices"]
                edits = device.get("containerEdits", {})
                uid = path.stem.partition("-claim_")[2]
                found[uid] = [node["path"] for node in edits.get("deviceNodes", ())]
        return found

    def function_of(self, uid: str) -> Function | Mediated:
        """What the claim's metadata file has for a virtual machine, by KubeVirt's rules (pkg/dra/utils.go): one request
        with one device, `mdevUUID` before `pciBusID`."""
        file = CDI_DIR / f"{DRIVER}-metadata_{uid}.json"
        (mounted,) = json.loads(file.read_text(encoding="utf-8"))["devices"]
        (mount,) = mounted["containerEdits"]["mounts"]
        documents = _stream(Path(mount["hostPath"]).read_text(encoding="utf-8"))
        (document,) = (found for found in documents if found["apiVersion"] == KUBEVIRT_READS)
        (request,) = document["requests"]
        (device,) = request["devices"]
        attributes = device["attributes"]
        if (uuid := attributes.get("mdevUUID")) is not None:
            return Mediated(uuid["string"])
        return Function(attributes["resource.kubernetes.io/pciBusID"]["string"])

    def check_cdi(self, uid: str, function: Function) -> None:
        """The claim's CDI file names the nodes by which a virtual machine has the function, and they are there."""
        paths = self.named[uid]
        assert paths == [str(function.group_node), "/dev/vfio/vfio"], paths
        assert all(stat.S_ISCHR(Path(path).stat().st_mode) for path in paths), paths


def claims_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """deploy/overlays/dra, but in the node's network and with a kubeconfig: the API server is on loopback."""
    return _in_the_nodes_network(dra_pod(kubelet_dir, state_dir))


def load_modules_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """The same of deploy/overlays/load-modules."""
    return _in_the_nodes_network(dra_pod(kubelet_dir, state_dir, loads_modules=True))


def _in_the_nodes_network(pod: Pod) -> Pod:
    credentials = PodMount(str(CREDENTIALS), str(CREDENTIALS), read_only=True, recursive_read_only=False)
    return replace(pod, host_network=True, mounts=(*pod.mounts, credentials))


def prebound_pod(kubelet_dir: Path, state_dir: Path) -> Pod:
    """deploy/base with what deploy/README.md says a node needs of overlays/dra where every GPU is pre-bound."""
    base, dra = base_pod(kubelet_dir, state_dir), claims_pod(kubelet_dir, state_dir)
    added = tuple(m for m in dra.mounts if m.target in (*NEEDED_IF_PREBOUND, str(CREDENTIALS)))
    environment = {name: dra.environment[name] for name in ("GPUACTORS_DRA", "POD_UID")}
    return replace(
        base,
        host_network=True,
        environment={**base.environment, **environment},
        mounts=(*base.mounts, *added),
    )


def under_way(call: Callable[..., Any], *args: Any) -> Call:
    """The call in a thread of its own."""

    def made() -> None:
        try:
            answer = call(*args)
        except grpc.RpcError as error:
            found.ended_at = time.monotonic()
            found.failures.append(error)
        else:
            found.ended_at = time.monotonic()
            found.answers.append(answer)

    found = Call(threading.Thread(target=made, daemon=True))
    found.thread.start()
    return found


def failed_as(daemon: DaemonProcess, sentence: str) -> bool:
    """Whether the daemon has given this as the reason why an act failed."""
    return any(sentence in str(line["reason"]) for line in daemon.said("claim.act_failed"))


def _stream(text: str) -> list[dict[str, Any]]:
    """The JSON objects that follow one another."""
    decoder, found, rest = json.JSONDecoder(), [], text.lstrip()
    while rest:
        document, end = decoder.raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found


def _since_ms(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)


def override_of(function: Function) -> str:
    """Blocks on 6.1 while an unbind waits in the kernel."""
    return (function.path / "driver_override").read_text(encoding="ascii").strip()


def state_of(pid: int) -> str:
    """A process's state, one letter; empty if it has ended and was reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]

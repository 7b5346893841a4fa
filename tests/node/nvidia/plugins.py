"""NVIDIA's kubelet plugins as processes of the node: each with the fake host's sysfs as its `/sys`.

A plugin has a mount namespace and a root of its own, as its container has: sysfs, `/lib/modules` and `/templates` are
read by these very names, and what it starts on the host it starts by chroot. Everything else is the node's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, final

from tests.node.cluster import CLASSES, SLICES, Api, Object, eventually, kubelet_dir, node_name
from tests.node.domains import NAMESPACE
from tests.node.fake_host import HOST, FakeHost
from tests.node.nvidia.driver_root import driver_root, refresh
from tests.node.nvidia.programs import DOMAIN_PLUGIN, GPU_PLUGIN, directory
from tests.node.real_tenants import LANE
from tests.support.patience import patient

GPU_DRIVER: Final = "gpu.nvidia.com"
DOMAIN_DRIVER: Final = "compute-domain.nvidia.com"
DRIVER_OF: Final = {GPU_PLUGIN: GPU_DRIVER, DOMAIN_PLUGIN: DOMAIN_DRIVER}

GATES: Final = {GPU_PLUGIN: "PassthroughSupport=true,DeviceMetadata=true", DOMAIN_PLUGIN: ""}

LOGS: Final = Path(__file__).resolve().parents[3] / "var" / "node"
"""There a program's log is `NAME-LANE.log`; a new process of the program adds to it."""

CONTAINERS_CLASS: Final = "gpu.nvidia.com"
"""NVIDIA's class of whole GPUs for containers."""

VFIO_CLASS: Final = "nvidias-vfio"
"""What NVIDIA's class vfio.gpu.nvidia.com selects, by another name: that is one of the examples as well."""

_SELECTED: Final = {CONTAINERS_CLASS: "gpu", VFIO_CLASS: "vfio"}

ARGUMENTS: Final = ("-v", "6")
REGISTERED: Final = "plugin_registered:true"
"""Each says so at this verbosity when kubelet has accepted it."""

_START_S: Final = patient(30.0)
_END_S: Final = patient(15.0)

_ENTER: Final = """\
set -e
root=/mnt
mount -t tmpfs -o mode=755 root $root
for path in /* /.[!.]*; do
  name=${path#/}
  if [ "$name" = mnt ] || [ "$name" = sys ] || [ ! -d "$path" ]; then continue
  elif [ -L "$path" ]; then cp -P "$path" "$root/$name"
  else mkdir "$root/$name"; mount --rbind "$path" "$root/$name"
  fi
done
mkdir $root/sys $root/templates
mount --rbind "$1" $root/sys
mount --bind "$2" $root/templates
shift 2
exec chroot $root "$@"
"""
"""With the fake host's sysfs, the directory of templates, and the command."""


@final
class Plugin:
    """One of NVIDIA's programs, which is started and ended any number of times."""

    def __init__(self, program: str, variables: Mapping[str, str]) -> None:
        self.program = program
        self.log = LOGS / f"{program}-{LANE}.log"
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0
        """How long the log was when the process was started."""

    def start(self, *arguments: str) -> None:
        """Starts it, and does not wait."""
        assert self._process is None, f"{self.program} runs"
        templates = Path(os.environ["K8S_DIR"], "domains", "root", "templates")
        command = ("bash", "-c", _ENTER, "bash", str(HOST / "sys"), str(templates),
                   str(directory() / self.program), *arguments)  # fmt: skip
        templates.mkdir(
            parents=True, exist_ok=True
        )  # without a compute domain there is none, and none is used
        LOGS.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._began = log.tell()
            self._process = subprocess.Popen(
                ("unshare", "--mount", "--propagation", "slave", *command), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, env={"PATH": os.environ["PATH"], **self._variables},
            )  # fmt: skip

    def said(self) -> str:
        """What the last process has said."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            return log.read().decode(errors="replace")

    def wait_said(self, words: str) -> None:
        """Waits until it has said these words. Raises LateError with its last lines."""

        def look() -> bool:
            ended = None if self._process is None else self._process.poll()
            assert words in self.said(), f"{self.program} {ended=}: {self.said()[-2000:]}"
            return True

        eventually(look, f"{self.program} to say {words!r}", _START_S)

    def stop(self, number: int = signal.SIGTERM) -> float:
        """Ends it by a signal, and waits for that: the seconds. Nothing is done if it does not run."""
        if self._process is None:
            return 0.0
        process, self._process = self._process, None
        began = time.monotonic()
        process.send_signal(number)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL: its sockets stay."""
        self.stop(signal.SIGKILL)

    def begin_kill(self) -> None:
        """SIGKILL, which takes effect when the kernel has done what a thread of it waits for; `kill` waits for that."""
        assert self._process is not None, f"{self.program} does not run"
        self._process.kill()


@final
class NvidiasDriver:
    """NVIDIA's DRA driver on the node: its two kubelet plugins, and what they leave."""

    def __init__(self, api: Api, host: FakeHost, variables: Mapping[str, str], gates: str) -> None:
        self._api = api
        self._host = host
        common = {
            **variables, "KUBECONFIG": os.environ["KUBECONFIG"], "NODE_NAME": node_name(), "NAMESPACE": NAMESPACE,
            "CDI_ROOT": "/var/run/cdi", "NVIDIA_CDI_HOOK_PATH": "/bin/true", "IMAGE_NAME": "none",
            "KUBELET_PLUGINS_DIRECTORY_PATH": str(kubelet_dir() / "plugins"),
            "KUBELET_REGISTRAR_DIRECTORY_PATH": str(kubelet_dir() / "plugins_registry"),
            "HOST_ROOT": "/",
        }  # fmt: skip
        self.gpus = Plugin(GPU_PLUGIN, {**common, "FEATURE_GATES": gates})
        self.domains = Plugin(DOMAIN_PLUGIN, common)

    def start(self, *plugins: Plugin) -> None:
        """Starts both plugins, or these; waits until kubelet has them and their slices are there."""
        refresh(self._host)
        for plugin in plugins or (self.gpus, self.domains):
            plugin.start(*ARGUMENTS)
        for plugin in plugins or (self.gpus, self.domains):
            plugin.wait_said(REGISTERED)
            self._wait_offered(DRIVER_OF[plugin.program])

    def _wait_offered(self, driver: str) -> None:
        eventually(lambda: self.offered(driver), f"the slices of {driver}")

    def stop(self) -> float:
        """Ends both as kubelet ends their pod: the seconds of the longer one."""
        return max(plugin.stop() for plugin in (self.gpus, self.domains))

    def kill(self) -> None:
        """SIGKILL to both."""
        for plugin in (self.gpus, self.domains):
            plugin.kill()

    def offered(self, driver: str = GPU_DRIVER) -> Mapping[str, Object]:
        """The devices of this node's slices of a driver, by name, whoever wrote them."""
        mine = (item["spec"] for item in self._api.items(SLICES) if item["spec"]["driver"] == driver)
        return {
            d["name"]: d
            for spec in mine
            if spec.get("nodeName") == node_name()
            for d in spec.get("devices", ())
        }

    def directory(self, driver: str = GPU_DRIVER) -> Path:
        """Where a plugin keeps its state."""
        return kubelet_dir() / "plugins" / driver

    def checkpointed(self, driver: str = GPU_DRIVER) -> Mapping[str, str]:
        """The state of each claim in a plugin's checkpoint, by UID: `PrepareStarted`, `PrepareCompleted`."""
        content = json.loads((self.directory(driver) / "checkpoint.json").read_text())
        return {uid: str(c["checkpointState"]) for uid, c in content["v2"].get("preparedClaims", {}).items()}


@contextmanager
def nvidias_driver(api: Api, host: FakeHost, gates: str = GATES[GPU_PLUGIN]) -> Iterator[NvidiasDriver]:
    """NVIDIA's driver can be started while the context is open; its classes are there. At the end nothing of it is
    left: processes, slices, state, CDI files. `gates`: of the plugin of GPUs."""
    with ExitStack() as stack:
        variables = stack.enter_context(driver_root(host))
        driver = NvidiasDriver(api, host, variables, gates)
        stack.callback(_forget, api)
        stack.callback(driver.kill)
        for name, kind in _SELECTED.items():
            expression = (
                f"device.driver == '{GPU_DRIVER}' && device.attributes['{GPU_DRIVER}'].type == '{kind}'"
            )
            api.create(CLASSES, {
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name},
                "spec": {"selectors": [{"cel": {"expression": expression}}]},
            })  # fmt: skip
            stack.callback(api.delete, f"{CLASSES}/{name}")
        yield driver


def _forget(api: Api) -> None:
    for driver in DRIVER_OF.values():
        shutil.rmtree(kubelet_dir() / "plugins" / driver, ignore_errors=True)
        (kubelet_dir() / "plugins_registry" / f"{driver}-reg.sock").unlink(missing_ok=True)
        for path in Path("/var/run/cdi").glob(f"*{driver}*"):
            path.unlink()
    for one in api.items(SLICES):
        if one["spec"]["driver"] in DRIVER_OF.values():
            api.delete(f"{SLICES}/{one['metadata']['name']}")

"""Containers as containerd has them: what a crash, or a reboot of the node, does to them behind kubelet's back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.node.cluster import Object, eventually
from tests.support.patience import patient

_OUTSIDE: Final = "gpuactors-outside-kubelet"
_PROGRAM: Final = "/opt/gpuactors/bin/gpuactors"
"""The image's entry point; `ctr run` takes none from the image where there are arguments."""


def container_of(pod: Object) -> str:
    """The ID of the pod's only container."""
    (status,) = pod["status"]["containerStatuses"]
    return str(status["containerID"]).removeprefix("containerd://")


def running() -> dict[str, int]:
    """The PID of each container that runs, those of sandboxes included."""
    rows = [line.split() for line in _ctr("task", "ls").splitlines()[1:]]
    return {name: int(pid) for name, pid, status in rows if status == "RUNNING"}


def kill(container: str) -> None:
    """Sends SIGKILL to the container's first process, and waits until it has ended."""
    os.kill(running()[container], signal.SIGKILL)
    eventually(lambda: container not in running(), f"the end of {container}")


def kill_all() -> None:
    """Ends all containers at once, as a reset of the node does."""
    for container in running():
        _ctr("task", "kill", "--all", "--signal", "SIGKILL", container, check=False)
    eventually(lambda: not running(), "the end of all containers")


@contextmanager
def outside_kubelet(pod: Object) -> Iterator[None]:
    """The pod's container runs without kubelet, as a systemd unit does, in the node's own network."""
    (container,) = pod["spec"]["containers"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["spec"]["volumes"]}
    words = ["run", "--detach", "--net-host"]
    for mount in container["volumeMounts"]:
        mode = "ro" if mount.get("readOnly") else "rw"
        words += [
            "--mount",
            f"type=bind,src={paths[mount['name']]},dst={mount['mountPath']},options=rbind:{mode}",
        ]
    image = f"docker.io/library/{container['image']}"
    _ctr(*words, "--env", "NODE_NAME=outside", image, _OUTSIDE, _PROGRAM, *container["args"])
    try:
        yield
    finally:
        _ctr("task", "kill", "--signal", "SIGTERM", _OUTSIDE)
        eventually(lambda: _OUTSIDE not in running(), "the end of the daemon outside kubelet")
        _ctr("task", "delete", "--force", _OUTSIDE, check=False)
        _ctr("container", "delete", _OUTSIDE)


def _ctr(*words: str, check: bool = True) -> str:
    done = subprocess.run(
        ("ctr", *words), capture_output=True, text=True, timeout=patient(60), check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0 or not check, f"ctr {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout

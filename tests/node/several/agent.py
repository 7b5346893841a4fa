"""The process of one node of several: it has opened the fake host in that node's namespaces, and does what it is told.

`member.py` starts it and asks. A question is a line of JSON, the name of a method of `Agent` and its arguments; so is
the answer, `{"value": …}` or `{"error": …}`. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

from tests.node import claims, domains, tasks
from tests.node.cluster import component
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.fake_host import BACKING, H100_RESOURCE, FakeHost, opened_host
from tests.node.images import add_image
from tests.node.reader import NvidiasPlugin
from tests.node.run import IMAGE_VARIABLE, NO_DOMAINS

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CDI: Final = Path("/var/run/cdi")


@final
class Agent:
    """What can be asked of a node."""

    def __init__(self, host: FakeHost, steering: domains.Steering, boot: Path) -> None:
        self._host = host
        self._steering = steering
        self._boot = boot
        self._plugged: set[int] = set()
        self._older: NvidiasPlugin | None = None

    # --- the host -----------------------------------------------------------------------------------------------------

    def plug(self, slot: int) -> str:
        """A GPU appears: its address."""
        self._plugged.add(slot)
        return self._host.plug(slot)

    def unplug(self, name: str) -> None:
        """A GPU disappears."""
        self._host.unplug(name)

    def clear(self) -> None:
        """Every GPU is gone."""
        self._plugged.clear()
        self._host.clear()

    def open_groups(self, pod: str) -> list[int]:
        """The groups that a pod, by its UID, has open."""
        return sorted(group for group, who in self._host.owners().items() if f"pod {pod}" in who)

    def serve_by_nvidias_plugin(self) -> None:
        """NVIDIA's plugin for KubeVirt serves the GPUs of the node."""
        self._older = NvidiasPlugin(H100_RESOURCE, self._host.group_of)
        self._older.serve(*self._host.gpus())

    def end_nvidias_plugin(self) -> bool:
        """It ends: whether kubelet still had its stream open. False where it had ended before."""
        older, self._older = self._older, None
        if older is None:
            return False
        had = not older.cut_off.is_set()
        older.stop()
        return had

    # --- what runs ----------------------------------------------------------------------------------------------------

    def stop(self, *components: str) -> None:
        """Stops components of the node."""
        component("down.sh", *components)

    def start(self, *components: str) -> None:
        """Starts components of the node."""
        component("up.sh", *components)

    def kill_container(self, container: str) -> None:
        """SIGKILL to the first process of a container."""
        tasks.kill(container)

    def kill_daemon(self, uid: str) -> None:
        """SIGKILL to gpuactors in its pod."""
        claims.kill_in(uid)

    def reboot(self) -> None:
        """All containers end at once, the node has another boot ID, and its GPUs are there anew. Returns when kubelet
        runs again."""
        component("down.sh", "kubelet")
        tasks.kill_all()
        for file in CDI.glob("*compute-domain*"):
            file.unlink()  # /run is a file system in memory
        self._host.clear()
        self._boot.write_text(f"{uuid.uuid4()}\n")
        for slot in sorted(self._plugged):
            self._host.plug(slot)
        component("up.sh", "kubelet")

    # --- domains ------------------------------------------------------------------------------------------------------

    def steer_from_now_on(self, words: str) -> None:
        """What the fake IMEX daemon of each new domain is told."""
        self._steering.words = words

    def steer(self, uid: str, words: str) -> None:
        """What the fake IMEX daemon of a domain is told now."""
        self._steering.steer(uid, words)

    def files(self) -> list[str]:
        """What is there of domains: their directories and what is in them, and CDI files."""
        return sorted(
            map(str, (*domains.domain_directories().glob("**/*"), *CDI.glob(f"*{domains.DRIVER}*")))
        )

    def failed(self) -> list[str]:
        """What could not be steered."""
        return self._steering.failed


def _images() -> None:
    """gpuactors under two names, and NVIDIA's daemon of compute domains."""
    add_image(Path(os.environ[IMAGE_VARIABLE]), IMAGE, OTHER_IMAGE)
    if NO_DOMAINS not in os.environ:
        component("domains/up-domains.sh", "image")


@contextmanager
def _own_boot_id() -> Iterator[Path]:
    """A file that is the node's boot ID: the machine's until it is written."""
    file = BACKING / "boot_id"
    file.write_text(BOOT_ID.read_text())
    subprocess.run(("mount", "--bind", file, BOOT_ID), check=True)
    try:
        yield file
    finally:
        subprocess.run(("umount", "--lazy", BOOT_ID), check=True)


def main() -> None:
    """Answers until the input ends."""
    questions, answers = sys.stdin, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nobody else's words are an answer
    steering = domains.Steering()
    with ExitStack() as stack:
        host = stack.enter_context(opened_host())
        boot = stack.enter_context(_own_boot_id())
        stack.enter_context(domains.imex_loaded())
        stack.enter_context(domains.toolkit())
        stack.enter_context(steering.steering())
        _images()
        agent = Agent(host, steering, boot)
        print(json.dumps({"value": "ready"}), file=answers)
        for line in questions:
            print(json.dumps(_answer(agent, *json.loads(line))), file=answers)


def _answer(agent: Agent, name: str, arguments: Sequence[Any]) -> dict[str, Any]:
    try:
        return {"value": getattr(agent, name)(*arguments)}
    except Exception as error:  # the asking test fails with it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()

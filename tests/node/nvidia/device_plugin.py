"""NVIDIA's device plugin for containers as a process of the node: the GPUs of the mock, under `nvidia.com/gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from tests.node.fake_host import FakeHost
from tests.node.nvidia.driver_root import driver_root, refresh
from tests.node.nvidia.plugins import Plugin
from tests.node.nvidia.programs import DEVICE_PLUGIN

RESOURCE: Final = "nvidia.com/gpu"

_ARGUMENTS: Final = ("--device-discovery-strategy", "nvml", "--pass-device-specs")
"""A container gets the device nodes by kubelet: there is no toolkit of NVIDIA's on the node."""

_REGISTERED: Final = "Registered device plugin for 'nvidia.com/gpu' with Kubelet"


@final
class DevicePlugin:
    """It finds its GPUs when it starts, and looks for no other until it is started again."""

    def __init__(self, host: FakeHost, plugin: Plugin) -> None:
        self._host = host
        self._plugin = plugin

    def start(self) -> None:
        """Starts it, and waits until it has told kubelet its GPUs: there must be one, as the mock cannot have none."""
        assert self._host.kernel.minors
        refresh(self._host)
        self._plugin.start(*_ARGUMENTS)
        self._plugin.wait_said(_REGISTERED)

    def stop(self) -> None:
        """Ends it as kubelet ends its pod."""
        self._plugin.stop()

    def restart(self) -> None:
        """As another pod of its DaemonSet."""
        self.stop()
        self.start()


@contextmanager
def device_plugin(host: FakeHost) -> Iterator[DevicePlugin]:
    """NVIDIA's device plugin can be started while the context is open."""
    with driver_root(host) as variables:
        plugin = Plugin(DEVICE_PLUGIN, variables)
        try:
            yield DevicePlugin(host, plugin)
        finally:
            plugin.kill()

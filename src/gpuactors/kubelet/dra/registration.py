"""The plugin registration service: kubelet finds its socket, asks who serves where, and says whether it will call.

Kubelet waits 1 s for GetInfo and asks again only after a growing backoff (17 s, 51 s: seen), so that the answer is a
constant, made before the socket is. An error from NotifyRegistrationStatus deregisters the plugin, so there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from gpuactors.core.values.quote import quoted
from gpuactors.kubelet.pb.pluginregistration import pluginregistration as pb
from gpuactors.ports.claims import PluginStatus

PLUGIN_TYPE: Final = "DRAPlugin"

SUPPORTED_VERSIONS: Final = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
)
"""The services and versions of the plugin. Kubelet takes the first DRAPlugin that it knows, and opens the health stream
only where one is listed (1.37)."""


@final
class RegistrationService(pb.RegistrationBase):
    """`endpoint` is the absolute path of the socket that serves the DRA API. `on_status` must not raise; what it raises
    goes to `on_failure`, a bug to be logged."""

    def __init__(
        self,
        driver: str,
        endpoint: str,
        on_status: Callable[[PluginStatus], None],
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self._info = pb.PluginInfo(
            type=PLUGIN_TYPE, name=driver, endpoint=endpoint, supported_versions=list(SUPPORTED_VERSIONS)
        )
        self._on_status = on_status
        self._on_failure = on_failure

    async def get_info(self, message: pb.InfoRequest) -> pb.PluginInfo:
        return self._info

    async def notify_registration_status(
        self, message: pb.RegistrationStatus
    ) -> pb.RegistrationStatusResponse:
        try:
            self._on_status(PluginStatus(message.plugin_registered, quoted(message.error)))
        except Exception as exc:
            self._on_failure("registration of the DRA plugin", exc)
        return pb.RegistrationStatusResponse()

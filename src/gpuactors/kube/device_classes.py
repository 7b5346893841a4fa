"""The DeviceClasses of the cluster. Implements `ports.kube.DeviceClassApi`.

A file of its own: a daemon without claims imports none of it.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from gpuactors.core.gpus.device_classes import DeviceClass
from gpuactors.kube import objects
from gpuactors.kube.client import ApiClient, Call

_PATH: Final = f"/apis/{objects.API}/deviceclasses"


class _Spec(msgspec.Struct, rename="camel"):
    extended_resource_name: str | None = None


class _DeviceClass(msgspec.Struct):
    metadata: objects.Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)


@final
class KubeDeviceClasses:
    """The classes, whosever devices they select."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def list_classes(self) -> tuple[DeviceClass, ...]:
        call = Call("list the DeviceClasses", "GET", _PATH)
        listed = await self._client.decoded(call, objects.ListOf[_DeviceClass])
        return tuple(
            DeviceClass(item.metadata.name, item.spec.extended_resource_name) for item in listed.items or ()
        )

"""A core that is asked for devices by the device plugin API, for tests of one endpoint. What it allocates they say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.values.effects import Answer
from gpuactors.core.values.model import DeviceId, ResourceName


class StubCore:
    """Refuses whatever else is asked, by an error."""

    async def pre_start(self, resource: ResourceName, devices: tuple[DeviceId, ...]) -> Answer:
        raise NotImplementedError

    async def prefer(self, resource: ResourceName, requests: tuple[PreferenceRequest, ...]) -> Answer:
        raise NotImplementedError

    @asynccontextmanager
    async def stream(self, resource: ResourceName) -> AsyncIterator[None]:
        yield

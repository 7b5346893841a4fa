"""A wrong assessment, planted: the field's own bug that a GPU in use is Unhealthy, whoever uses it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors.core.assessment import assess
from gpuactors.core.values import memo
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Health
from gpuactors.core.values.status import DeviceStatus, Holding


def plant_allocated_is_unhealthy(monkeypatch: pytest.MonkeyPatch, message: str = "busy") -> None:
    """What kubelet has given to a pod is assessed as Unhealthy, with that message."""
    right = assess.status_of

    def wrong(device: Device, holding: Holding | None, *rest: Any) -> DeviceStatus:
        status = right(device, holding, *rest)
        return (
            replace(status, health=Health.UNHEALTHY, message=message)
            if holding and holding.is_allocated
            else status
        )

    monkeypatch.setattr(assess, "status_of", wrong)
    memo.forget()

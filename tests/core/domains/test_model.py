"""The names of devices of compute domains."""

from __future__ import annotations

import pytest

from gpuactors.core.values.domain import DeviceKind, DomainDevice, DomainUid, clique_name, device_of


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("channel-0", DomainDevice(DeviceKind.CHANNEL, 0)),
        ("channel-2047", DomainDevice(DeviceKind.CHANNEL, 2047)),
        ("daemon-0", DomainDevice(DeviceKind.DAEMON, 0)),
    ],
)
def test_a_device_is_known_by_its_name_and_named_by_what_is_known(name: str, device: DomainDevice) -> None:
    assert device_of(name) == device
    assert str(device) == name


@pytest.mark.parametrize(
    "name",
    ["", "channel", "channel-", "channel-00", "channel-0 ", "channel--1", "gpu-0000-23-00-0", "../etc"],
)
def test_other_names_are_no_devices(name: str) -> None:
    assert device_of(name) is None


def test_a_clique_is_named_by_the_domain_and_the_fabric() -> None:
    assert clique_name(DomainUid("11111111-2222-3333-4444-555555555555"), "c1.7") == (
        "11111111-2222-3333-4444-555555555555.c1.7"
    )

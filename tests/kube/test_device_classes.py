"""DeviceClasses over the API."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from gpuactors.core.gpus.device_classes import DeviceClass
from gpuactors.ports.kube import ApiMalformed, ApiRefused, SlicesListed
from gpuactors_simulation.kube.server import ApiAnswer, ApiFault, ApiRequest
from gpuactors_simulation.kube.status import CLASSES, KINDS
from tests.kube.cluster import cluster


async def test_all_classes_are_listed_with_their_extended_resource(autojump_clock: MockClock) -> None:
    async with cluster() as at:
        assert await at.classes.list_classes() == ()
        at.server.add_class("vfio.gpu.nvidia.com")
        at.server.add_class("counted", "example.com/gpu")
        found = await at.classes.list_classes()
        assert found == (DeviceClass("counted", "example.com/gpu"), DeviceClass("vfio.gpu.nvidia.com", None))
        assert at.asked() == ["GET deviceclasses", "GET deviceclasses"]


async def test_null_is_no_class(autojump_clock: MockClock) -> None:
    async with cluster() as at:

        async def answering(request: ApiRequest) -> ApiAnswer:
            return ApiAnswer(200, b'{"metadata": {"resourceVersion": "9"}, "items": null}')

        at.server.answer = answering  # type: ignore[method-assign]
        assert await at.classes.list_classes() == ()
        async with at.slices.follow() as events:
            assert await anext(events) == SlicesListed(())


async def test_a_server_that_refuses_or_has_no_classes_says_so(autojump_clock: MockClock) -> None:
    async with cluster() as at:
        at.server.order(ApiFault.FORBIDDEN)
        with pytest.raises(
            ApiRefused, match=r"cannot list resource .*deviceclasses.*Grant its service account"
        ):
            await at.classes.list_classes()
        at.server.kinds = [kind for kind in KINDS if kind is not CLASSES]
        with pytest.raises(ApiRefused, match="404"):
            await at.classes.list_classes()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b'{"metadata": {}}',
        b'{"items": [{"spec": {}}]}',
        b'{"items": [{"metadata": {"name": "x"}, "spec": {"extendedResourceName": 5}}]}',
        b'{"items": [{"metadata": {"name": "x"}, "spec": {"config": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}}]}",
    ],
    ids=lambda body: body[:60].decode(),
)
async def test_an_answer_that_is_no_list_of_classes_is_an_error_of_the_port(
    body: bytes, autojump_clock: MockClock
) -> None:
    async with cluster() as at:

        async def answering(request: ApiRequest) -> ApiAnswer:
            return ApiAnswer(200, body)

        at.server.answer = answering  # type: ignore[method-assign]
        with pytest.raises(ApiMalformed):
            await at.classes.list_classes()

"""Prepare and unprepare as kubelet calls them: an entry for each claim, one error for all, and no failed call."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import trio
from trio.testing import MockClock

from gpuactors.core.values.claim import ClaimName, ClaimUid, Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.effects import Refused
from gpuactors.kubelet.dra.service import CALL_CLAIMS_MAX, ClaimCalls
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from tests.kubelet.dra.serving import GPU, WITHIN_S, Core, refused, serving, short_directory
from tests.support.dra_grpcio import HEALTH, PLUGIN, plugin, prepare_request, unprepare_request

VERSIONS = ("v1", "v1beta1")
A, B, C = (("default", f"claim-{n}", f"uid-{n}") for n in "abc")


async def prepare(core: Core, *claims: tuple[str, str, str], version: str = "v1") -> Any:
    """The answers by UID."""
    with short_directory() as directory:
        async with serving(directory, core) as served:
            with served.dialled() as channel:
                stub = plugin(channel, version)["NodePrepareResources"]
                return (await served.call(stub, prepare_request(*claims, version=version))).claims


async def unprepare(core: Core, *claims: tuple[str, str, str], version: str = "v1") -> Any:
    with short_directory() as directory:
        async with serving(directory, core) as served:
            with served.dialled() as channel:
                stub = plugin(channel, version)["NodeUnprepareResources"]
                return (await served.call(stub, unprepare_request(*claims, version=version))).claims


@pytest.mark.parametrize("version", VERSIONS)
async def test_each_claim_of_a_prepare_has_an_entry_with_its_devices(version: str) -> None:
    """A missing one is "skipped N ResourceClaims", one too many an error for all."""
    core = Core()
    other = PreparedDevice(("gpu", "any"), "node-1", "gpu-0000-02-00-0", ("k8s.x/claim=1", "k8s.x/claim=2"))
    core.prepared["uid-b"] = Prepared((other, GPU))
    answers = await prepare(core, A, B, version=version)
    assert {uid: (answer.error, len(answer.devices)) for uid, answer in answers.items()} == {
        "uid-a": ("", 1),
        "uid-b": ("", 2),
    }
    first, second = answers["uid-b"].devices
    assert list(first.request_names) == ["gpu", "any"]
    assert (first.pool_name, first.device_name) == ("node-1", "gpu-0000-02-00-0")
    assert list(first.cdi_device_ids) == ["k8s.x/claim=1", "k8s.x/claim=2"]
    assert second.device_name == GPU.device, "in the order of the core's answer"
    assert set(core.asked) == {
        ("prepare", ClaimName("default", f"claim-{n}", ClaimUid(f"uid-{n}"))) for n in "ab"
    }


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_request_without_claims_is_answered_without_entries(version: str) -> None:
    assert not await prepare(Core(), version=version)
    assert not await unprepare(Core(), version=version)


def test_the_messages_of_each_older_version_are_those_of_v1() -> None:
    """Kubelet's files: code is generated of v1 alone, and serves both."""
    assert HEALTH["v1alpha1"].definition() == HEALTH["v1"].definition()
    ours = PLUGIN["v1"].definition()
    device = next(message for message in ours.message_type if message.name == "Device")
    share_id = device.field.pop()
    assert (share_id.name, share_id.number) == ("share_id", 5), "the one difference"
    device.ClearField("oneof_decl")  # that it is optional
    assert PLUGIN["v1beta1"].definition() == ours


async def test_a_share_id_is_echoed_in_v1_and_v1beta1_has_none() -> None:
    core = Core()
    shared = PreparedDevice(("gpu",), "node-1", "gpu-0000-01-00-0", (), share_id="share-7")
    core.prepared["uid-a"] = Prepared((shared, GPU))
    first, second = (await prepare(core, A))["uid-a"].devices
    assert first.share_id == "share-7"
    assert not second.HasField("share_id"), "absent, not empty"
    old, _ = (await prepare(core, A, version="v1beta1"))["uid-a"].devices
    assert b"share-7" not in old.SerializeToString(), "not as an unknown field either"


@pytest.mark.parametrize("version", VERSIONS)
async def test_one_error_of_a_prepare_is_an_error_of_all_its_claims(version: str) -> None:
    """Kubelets before July 2026 append the devices of the second answer (kubernetes issue 140471)."""
    core = Core()
    core.prepared["uid-b"] = refused("claim default/old has the GPU")
    answers = await prepare(core, A, B, C, version=version)
    assert answers["uid-b"].error == "claim default/old has the GPU"
    for uid in ("uid-a", "uid-c"):
        assert "claim default/claim-b of the same pod" in answers[uid].error
        assert "claim default/old has the GPU" in answers[uid].error
    assert not any(answer.devices for answer in answers.values())
    assert len(core.asked) == 3, "the others are asked for all the same: kubelet repeats them all"


@pytest.mark.parametrize("version", VERSIONS)
async def test_errors_of_an_unprepare_stay_with_their_claims(version: str) -> None:
    core = Core()
    core.unprepared["uid-b"] = refused("its write hangs")
    answers = await unprepare(core, A, B, version=version)
    assert {uid: answer.error for uid, answer in answers.items()} == {"uid-a": "", "uid-b": "its write hangs"}


async def test_a_refusal_without_a_reason_is_no_success() -> None:
    core = Core()
    core.prepared["uid-a"] = refused("")
    core.unprepared["uid-a"] = refused("")
    assert (await prepare(core, A))["uid-a"].error
    assert (await unprepare(core, A))["uid-a"].error


async def test_a_bug_is_an_error_of_its_claim_and_is_reported() -> None:
    core = Core()
    core.prepared["uid-a"] = RuntimeError("planted")
    with short_directory() as directory:
        async with serving(directory, core) as served:
            with served.dialled() as channel:
                stub = plugin(channel)["NodePrepareResources"]
                answers = (await served.call(stub, prepare_request(A, B))).claims
            assert [str(error) for error in served.failures] == ["planted"]
    assert "internal error" in answers["uid-a"].error
    assert "claim default/claim-a" in answers["uid-b"].error


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ((("default", "claim-a", ""),), "UID"),
        ((("default", "claim-a", "../../etc"),), "UID"),
        ((("default", "claim-a", "u" * 64),), "UID"),
        ((("", "claim-a", "uid-a"),), "namespace"),
        ((("../x", "claim-a", "uid-a"),), "namespace"),
        ((("default", "", "uid-a"),), "name"),
        ((("default", "Claim\n", "uid-a"),), "name"),
        ((A, A), "2 times"),
        ((A, ("default", "claim-x", "uid-a")), "2 times"),
    ],
)
async def test_what_no_kubelet_sends_is_an_error_and_the_core_is_not_asked(
    claims: tuple[tuple[str, str, str], ...], word: str
) -> None:
    core = Core()
    for call in (prepare, unprepare):
        answers = await call(core, *claims)
        assert set(answers) == {uid for _, _, uid in claims}
        assert all(word in answer.error for answer in answers.values())
    assert not core.asked


async def test_more_claims_than_a_pod_has_are_refused_and_others_are_served() -> None:
    core = Core()
    many = [("default", f"claim-{n}", f"uid-{n}") for n in range(CALL_CLAIMS_MAX + 1)]
    with short_directory() as directory:
        async with serving(directory, core) as served:
            with served.dialled() as channel:
                stub = plugin(channel)["NodePrepareResources"]
                answers = (await served.call(stub, prepare_request(*many))).claims
                assert len(answers) == len(many)
                assert all("no pod has more than" in answer.error for answer in answers.values())
                assert not core.asked
                assert not (await served.call(stub, prepare_request(A))).claims["uid-a"].error


async def test_garbage_is_an_error_to_its_caller_and_to_nobody_else() -> None:
    core = Core(hold=trio.Event())
    with short_directory() as directory:
        async with serving(directory, core) as served:
            with served.dialled() as channel:
                waiting = plugin(channel)["NodePrepareResources"].future(prepare_request(A), timeout=WITHIN_S)
                await core.until(lambda: len(core.asked) == 1)
                raw: Any = channel.unary_unary(
                    "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
                )
                for garbage in (b"\x0a\xff", b"\x0a\x03\x12\x01\xff", b"\xff" * 100):
                    with pytest.raises(grpc.RpcError):
                        await served.call(raw, garbage)
                with pytest.raises(grpc.RpcError):
                    await served.call(channel.unary_unary("/v2.DRAPlugin/NodePrepareResources"), b"")
                core.hold.set()  # type: ignore[union-attr]
                answer = await served.call(lambda _, timeout: waiting.result(timeout), None)
                assert not answer.claims["uid-a"].error


class Slow:
    """Takes 10 s for each claim. Implements `ports.claims.ClaimCaller`."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused:
        await trio.sleep(10)
        return Prepared(())

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused:
        await trio.sleep(10)
        return Unprepared()


async def test_the_claims_of_a_call_are_asked_for_at_once(autojump_clock: MockClock) -> None:
    """One that waits for its GPU holds up none that could be prepared meanwhile."""
    calls = ClaimCalls(Slow(), lambda _, exc: pytest.fail(repr(exc)))
    claims = [v1.Claim(namespace="default", name=f"claim-{n}", uid=f"uid-{n}") for n in range(5)]
    for call in (calls.prepare, calls.unprepare):
        began = trio.current_time()
        assert len(await call(claims)) == 5
        assert trio.current_time() - began == 10


async def test_a_cancelled_prepare_ends_its_wait_and_nothing_is_unprepared() -> None:
    """Kubelet cancels the call of a pod that is deleted meanwhile, and unprepares it itself."""
    core = Core(hold=trio.Event())
    with short_directory() as directory:
        async with serving(directory, core) as served:
            with served.dialled() as channel:
                waiting = plugin(channel)["NodePrepareResources"].future(prepare_request(A), timeout=WITHIN_S)
                await core.until(lambda: len(core.asked) == 1)
                waiting.cancel()
                await core.until(lambda: len(core.cancelled) == 1)
                assert [call for call, _ in core.asked] == ["prepare"]
                stub = plugin(channel)["NodeUnprepareResources"]
                assert not (await served.call(stub, unprepare_request(A))).claims["uid-a"].error
            assert not served.failures


class Silent:
    """Never answers. Implements `ports.claims.ClaimCaller`."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused:
        await trio.sleep_forever()
        raise AssertionError

    unprepare = prepare


async def test_a_core_that_does_not_answer_is_an_error_before_kubelets_45_s(
    autojump_clock: MockClock,
) -> None:
    calls = ClaimCalls(Silent(), lambda _, exc: pytest.fail(repr(exc)))  # type: ignore[arg-type]
    claim = v1.Claim(namespace="default", name="claim-a", uid="uid-a")
    with trio.fail_after(44):
        answers = await calls.prepare([claim])
    assert "claim default/claim-a was not answered within 40 s" in str(answers["uid-a"])

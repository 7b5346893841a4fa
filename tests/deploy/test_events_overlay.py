"""The overlay `events`: a token, one setting, and a role with exactly the verbs that the client uses."""

from __future__ import annotations

import copy
from typing import Final

import pytest
from trio.testing import MockClock

from tests.deploy.chart import template
from tests.deploy.manifests import DEPLOY, Manifest, configuration_of, of_kind, render
from tests.deploy.rights import OF_EVENTS, rights_of, used_by

ADDED: Final = frozenset(
    {"ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
)


@pytest.fixture(scope="module")
def overlaid() -> list[Manifest]:
    return render(DEPLOY / "overlays" / "events")


def test_it_is_the_base_with_a_token_a_role_and_one_setting(overlaid: list[Manifest]) -> None:
    rest = copy.deepcopy([one for one in overlaid if one["kind"] not in ADDED])
    pod = of_kind(rest, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    pod["automountServiceAccountToken"] = False
    (container,) = pod["containers"]
    assert configuration_of(container)["events"]["value"] == "on"
    container["env"] = [entry for entry in container["env"] if entry["name"] != "GPUACTORS_EVENTS"]
    assert rest == render(DEPLOY / "base")


async def test_the_role_has_exactly_the_verbs_that_the_client_uses(
    overlaid: list[Manifest], autojump_clock: MockClock
) -> None:
    granted = rights_of(one for one in overlaid if "rules" in one)
    assert sorted(granted) == sorted(await used_by(OF_EVENTS))


def test_the_policy_is_about_the_pods_account_and_every_write_of_events(overlaid: list[Manifest]) -> None:
    account, policy = of_kind(overlaid, "ServiceAccount"), of_kind(overlaid, "ValidatingAdmissionPolicy")
    user = f"^system:serviceaccount:[^:]+:{account['metadata']['name']}$"
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == f'request.userInfo.username.matches("{user}")'
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    verbs = {verb for _, (_, _, verb) in rights_of([of_kind(overlaid, "ClusterRole")])}
    assert (rule["operations"], verbs) == (["CREATE", "UPDATE"], {"create", "patch"})


def test_the_role_is_given_to_the_pods_account_alone(overlaid: list[Manifest]) -> None:
    account, binding = of_kind(overlaid, "ServiceAccount"), of_kind(overlaid, "ClusterRoleBinding")
    name, namespace = account["metadata"]["name"], account["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    assert binding["roleRef"]["name"] == of_kind(overlaid, "ClusterRole")["metadata"]["name"]


def test_openshifts_constraints_allow_the_token() -> None:
    """A volume of the kind `projected`."""
    for events, allowed in ((False, ["hostPath"]), (True, ["hostPath", "projected"])):
        objects = template({"openshift": {"enabled": True}, "events": {"enabled": events}})
        assert of_kind(objects, "SecurityContextConstraints")["volumes"] == allowed

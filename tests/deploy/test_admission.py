"""The admission policies, evaluated: what a pod's token may write, and what it may not."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, Final

import pytest
import yaml

from gpuactors.core.values.domain import LABEL
from tests.deploy.cel import Request, denied
from tests.deploy.chart import template
from tests.deploy.manifests import DEPLOY, Manifest

ACCOUNT: Final = "system:serviceaccount:gpuactors:gpuactors"
OF_THE_TOKEN: Final = "authentication.kubernetes.io/node-name"
OWN, OTHER = "node-1", "node-2"
DOMAIN: Final = "11111111-1111-1111-1111-111111111111"

OTHERS_SLICE = "gpuactors writes the ResourceSlices of its own node only"
OTHERS_EVENT = "gpuactors posts and changes the events of its own node only"
OTHERS_NODE = "gpuactors changes the Node of its own pod only"
OTHERS_LABEL = f"gpuactors changes no label of its Node but {LABEL}"
NO_LABEL = "gpuactors changes nothing of its Node but a label"

NAMELESS: Final = {
    "gpuactors-own-slices": "the token of gpuactors names no node; it must be the one that kubelet gives to its pod",
    "gpuactors-own-node": OTHERS_NODE,
    "gpuactors-own-events": OTHERS_EVENT,
}
"""Each policy, with what it says of a token that names no node."""


@cache
def policies() -> dict[str, Manifest]:
    """Those of the components, by name."""
    files = (DEPLOY / "components").glob("*/own-*.yaml")
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    return {one["metadata"]["name"]: one for one in found if one["kind"] == "ValidatingAdmissionPolicy"}


def by_pod(
    operation: str, new: Manifest | None = None, old: Manifest | None = None, *, user: str = ACCOUNT
) -> Request:
    """Made with the token of the pod on OWN."""
    return Request(operation, user, {OF_THE_TOKEN: [OWN]}, new, old)


def slice_of(node: str | None) -> Manifest:
    return {"spec": {"driver": "gpu.nvidia.com"} | ({"nodeName": node} if node is not None else {})}


def event_of(host: str | None) -> Manifest:
    return {"reason": "Refused"} | ({"source": {"host": host}} if host is not None else {})


def node(name: str = OWN, **metadata: Any) -> Manifest:
    return {"metadata": {"name": name, **metadata}, "spec": {"podCIDR": "10.0.0.0/24"}}


def test_each_policy_is_tried_here() -> None:
    assert policies().keys() == NAMELESS.keys()


# --- ResourceSlices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (by_pod("CREATE", slice_of(OWN)), None),
        (by_pod("UPDATE", slice_of(OWN), slice_of(OWN)), None),
        (by_pod("DELETE", old=slice_of(OWN)), None),
        (by_pod("CREATE", slice_of(OTHER)), OTHERS_SLICE),
        (by_pod("UPDATE", slice_of(OTHER), slice_of(OTHER)), OTHERS_SLICE),
        (by_pod("DELETE", old=slice_of(OTHER)), OTHERS_SLICE),
        (by_pod("CREATE", slice_of(None)), OTHERS_SLICE),
        (by_pod("CREATE", {"spec": {"allNodes": True}}), OTHERS_SLICE),
        (by_pod("CREATE", slice_of(OTHER), user="system:serviceaccount:nvidia:driver"), None),
    ],
    ids=[
        "own, new", "own, changed", "own, deleted", "another's, new", "another's, changed", "another's, deleted",
        "of no node", "of all nodes", "by another account",
    ],
)  # fmt: skip
def test_a_pod_writes_the_slices_of_its_own_node(request_: Request, said: str | None) -> None:
    assert denied(policies()["gpuactors-own-slices"], request_) == said


@pytest.mark.parametrize("name", NAMELESS)
def test_a_token_that_names_no_node_writes_nothing(name: str) -> None:
    """Of a Kubernetes before 1.32, or made by hand: not even what is of no node either."""
    new = {**slice_of(""), **event_of(""), "metadata": {"name": ""}}
    for extra, said in (
        ({"authentication.kubernetes.io/pod-name": ["gpuactors-x"]}, NAMELESS[name]),
        ({}, NAMELESS[name]),
        (None, 'NOT_FOUND: Key not found in map : "extra"'),
    ):
        assert denied(policies()[name], Request("UPDATE", ACCOUNT, extra, new, new)) == said


# --- our Node ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (node(), node(labels={LABEL: DOMAIN}), None),
        (node(labels={"zone": "a"}), node(labels={"zone": "a", LABEL: DOMAIN}), None),
        (node(labels={"zone": "a", LABEL: DOMAIN}), node(labels={"zone": "a"}), None),
        (node(labels={LABEL: DOMAIN}), node(labels={LABEL: "other"}), None),
        (node(OTHER), node(OTHER, labels={LABEL: DOMAIN}), OTHERS_NODE),
        (node(), node(labels={"zone": "b"}), OTHERS_LABEL),
        (node(labels={"zone": "a"}), node(labels={"zone": "b"}), OTHERS_LABEL),
        (node(labels={"zone": "a"}), node(), OTHERS_LABEL),
        (node(labels={"zone": "a"}), node(labels={LABEL: DOMAIN}), OTHERS_LABEL),
        (node(), node(annotations={"a": "b"}), NO_LABEL),
        (node(finalizers=["a"]), node(), NO_LABEL),
        (node(), node(ownerReferences=[{"uid": "x"}]), NO_LABEL),
        (node(), {**node(), "spec": {"podCIDR": "10.0.0.0/24", "unschedulable": True}}, NO_LABEL),
        (node(), {**node(), "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "x"}]}}, NO_LABEL),
    ],
    ids=[
        "the first label", "added", "removed", "changed", "another node", "another label added", "another changed",
        "another removed", "one for another", "an annotation", "a finalizer", "an owner", "cordoned", "tainted",
    ],
)  # fmt: skip
def test_a_pod_changes_one_label_of_its_own_node(old: Manifest, new: Manifest, said: str | None) -> None:
    assert denied(policies()["gpuactors-own-node"], by_pod("UPDATE", new, old)) == said
    by_another = by_pod("UPDATE", new, old, user="system:node:node-2")
    assert denied(policies()["gpuactors-own-node"], by_another) is None


# --- Events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (by_pod("CREATE", event_of(OWN)), None),
        (by_pod("UPDATE", event_of(OWN), event_of(OWN)), None),
        (by_pod("CREATE", event_of(OTHER)), OTHERS_EVENT),
        (by_pod("CREATE", event_of(None)), OTHERS_EVENT),
        (by_pod("CREATE", {"source": {"component": "gpuactors"}}), OTHERS_EVENT),
        (by_pod("UPDATE", event_of(OTHER), event_of(OWN)), OTHERS_EVENT),
        (by_pod("UPDATE", event_of(OWN), event_of(OTHER)), OTHERS_EVENT),
        (by_pod("UPDATE", event_of(OWN), event_of(None)), OTHERS_EVENT),
        (by_pod("UPDATE", event_of(OTHER), event_of(OTHER), user="system:node:node-2"), None),
    ],
    ids=[
        "own, new", "own, changed", "another's, new", "of no source", "of no host", "given away", "taken over",
        "of no source before", "by another account",
    ],
)  # fmt: skip
def test_a_pod_tells_events_of_its_own_node(request_: Request, said: str | None) -> None:
    assert denied(policies()["gpuactors-own-events"], request_) == said


# --- the chart, and that a policy is needed ---------------------------------------------------------------


def test_the_policies_of_another_release_are_about_its_account_and_no_other_one() -> None:
    values: dict[str, Any] = {
        "dra": {"enabled": True},
        "computeDomains": {"enabled": True},
        "events": {"enabled": True},
        "nameOverride": "gpu-b",
    }
    found = [o for o in template(values, namespace="elsewhere") if o["kind"] == "ValidatingAdmissionPolicy"]
    theirs = {**slice_of(OTHER), **event_of(OTHER), "metadata": {"name": OTHER}}
    assert len(found) == len(policies())
    for policy in found:
        own = by_pod("UPDATE", theirs, theirs, user="system:serviceaccount:elsewhere:gpu-b")
        assert denied(policy, own) is not None
        for other in (ACCOUNT, "system:serviceaccount:another:gpu-b"):
            assert denied(policy, by_pod("UPDATE", theirs, theirs, user=other)) is None


def test_the_policies_hold_in_a_namespace_that_kustomize_has_put_the_account_into() -> None:
    """It changes the namespace of the account, and not the text of an expression."""
    theirs = {**slice_of(OTHER), **event_of(OTHER), "metadata": {"name": OTHER}}
    for policy in policies().values():
        for user, about in (
            ("system:serviceaccount:elsewhere:gpuactors", True),
            ("system:serviceaccount:gpuactors:not-gpuactors", False),
            ("system:serviceaccount:gpuactors:gpuactors-b", False),
            ("gpuactors", False),
        ):
            request_ = by_pod("UPDATE", theirs, theirs, user=user)
            assert (denied(policy, request_) is not None) is about, user


@pytest.mark.parametrize("name", NAMELESS)
def test_without_any_one_of_its_expressions_a_policy_lets_something_pass(name: str) -> None:
    """So each is needed, and each is tried above."""
    forbidden = {
        "gpuactors-own-slices": [
            Request("CREATE", ACCOUNT, {}, slice_of(""), None),
            by_pod("CREATE", slice_of(OTHER)),
        ],
        "gpuactors-own-node": [
            by_pod("UPDATE", node(OTHER, labels={LABEL: DOMAIN}), node(OTHER)),
            by_pod("UPDATE", node(labels={"zone": "b"}), node(labels={"zone": "a"})),
            by_pod("UPDATE", node(annotations={"a": "b"}), node()),
        ],
        "gpuactors-own-events": [by_pod("CREATE", event_of(OTHER))],
    }[name]
    policy = policies()[name]
    assert len(forbidden) == len(policy["spec"]["validations"])
    for number, request_ in enumerate(forbidden):
        assert denied(policy, request_) is not None
        weaker = deepcopy(policy)
        del weaker["spec"]["validations"][number]
        assert denied(weaker, request_) is None

"""What is asked of the API server is known by its methods: those that an actor calls, and no other ones."""

from __future__ import annotations

from tests.deploy.rights import MADE_BY, called_by_actors, right_of
from tests.kube.cluster import NAMESPACE


def test_each_method_that_an_actor_calls_has_its_requests() -> None:
    assert called_by_actors() == MADE_BY.keys()


def test_a_right_is_what_the_api_server_derives_from_a_request() -> None:
    slices, cliques = ("resource.k8s.io", "resourceslices"), ("resource.nvidia.com", "computedomaincliques")
    driver = f"/apis/resource.nvidia.com/v1beta1/namespaces/{NAMESPACE}/computedomaincliques/x"
    for method, target, namespace, right in (
        ("GET", "/api/v1/nodes/node-1", "", ("", "nodes", "get")),
        ("PATCH", "/api/v1/nodes/node-1", "", ("", "nodes", "patch")),
        ("GET", "/api/v1/nodes?watch=true&fieldSelector=metadata.name%3Dx", "", ("", "nodes", "watch")),
        ("GET", driver, "", (*cliques, "get")),
        ("DELETE", "/apis/resource.k8s.io/v1/resourceslices", "", (*slices, "deletecollection")),
    ):
        assert right_of(method, target) == (namespace, right)

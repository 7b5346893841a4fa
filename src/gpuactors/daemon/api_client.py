"""The client of the API server that the settings name. A file of its own: only claims, compute domains,
Kubernetes Events and the doctor import it."""

from __future__ import annotations

import os

from gpuactors.config import Config
from gpuactors.kube.client import ApiClient
from gpuactors.kube.config import AccessError, FileAccess, from_kubeconfig, in_cluster
from gpuactors.ports.errors import HostError


def client_of(config: Config) -> ApiClient:
    """Make the client. Raises `ports.errors.HostError` if the server's address or our credentials cannot be read."""
    return ApiClient(_access_of(config))


def _access_of(config: Config) -> FileAccess:
    try:
        if config.kubeconfig is not None:
            return from_kubeconfig(config.kubeconfig)
        return in_cluster(os.environ)
    except AccessError as exc:
        raise HostError(str(exc)) from None

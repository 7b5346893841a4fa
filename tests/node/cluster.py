"""The real node's API server and components, as an administrator has them: JSON over HTTPS, kubectl, the kit's scripts.

Every wait has a deadline and polls a condition. Must not import gpuactors: this is the independent side of a test.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, final
from urllib.parse import urlencode, urlsplit

import yaml

from tests.support.patience import patient

Object = dict[str, Any]
"""A Kubernetes object, as its JSON."""

T = TypeVar("T")

WAIT_S: Final = patient(40.0)
"""Far above anything that is waited for here; what kubelet tries again after a minute has bounds of its own."""

POLL_S: Final = 0.05
REQUEST_S: Final = patient(10.0)

PODS: Final = "/api/v1/pods"
NODES: Final = "/api/v1/nodes"
EVENTS: Final = "/api/v1/events"
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS: Final = "/apis/resource.k8s.io/v1/resourceclaims"
CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"


class ApiError(Exception):
    """An answer that is no success: its HTTP status, and `reason` and `message` of its Status object."""

    def __init__(self, method: str, path: str, status: int, body: str) -> None:
        super().__init__(f"{method} {path}: {status} {body[:800]}")
        self.status = status
        self.reason, self.message = "", body
        with suppress(ValueError):
            parsed = json.loads(body)
            if isinstance(parsed, dict):
                self.reason = str(parsed.get("reason", ""))
                self.message = str(parsed.get("message", ""))


class LateError(TimeoutError):
    """What was waited for did not come. A wait within another one ends that one too."""


def eventually(look: Callable[[], T], what: str, within_s: float = WAIT_S, poll_s: float = POLL_S) -> T:
    """Waits until `look` returns something true, and returns it. Raises LateError that says what did not come, and
    the last AssertionError or ApiError of `look`, which count as false."""
    deadline = time.monotonic() + within_s
    last: Exception | None = None
    while True:
        try:
            found = look()
            if found:
                return found
            last = None
        except LateError:
            raise
        except (AssertionError, ApiError, OSError, http.client.HTTPException) as error:
            last = error
        if time.monotonic() > deadline:
            raise LateError(f"{what} did not come within {within_s:g} s: {last}") from last
        time.sleep(poll_s)


@final
class Api:
    """One client of the API server, with a connection for each thread that uses it."""

    def __init__(
        self, kubeconfig: Path | None = None, *, server: str | None = None, token: str | None = None
    ) -> None:
        """The administrator of `kubeconfig` (of $KUBECONFIG), or the account of a token."""
        config = yaml.safe_load(Path(kubeconfig or os.environ["KUBECONFIG"]).read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = server or cluster["server"]
        self._token = token
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        if token is None:
            with tempfile.NamedTemporaryFile() as certificate, tempfile.NamedTemporaryFile() as key:
                certificate.write(base64.b64decode(user["client-certificate-data"]))
                key.write(base64.b64decode(user["client-key-data"]))
                certificate.flush()
                key.flush()
                self._tls.load_cert_chain(certificate.name, key.name)
        self._connections = threading.local()

    def call(
        self, method: str, path: str, body: object = None, *, content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:  # fmt: skip
        """One request. Raises ApiError for what is no success, OSError without an answer."""
        status, text = self.raw(method, path, body, content_type=content_type, query=query)
        if status >= 300:
            raise ApiError(method, path, status, text)
        found: Object = json.loads(text)
        return found

    def raw(
        self, method: str, path: str, body: object = None, *, content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:  # fmt: skip
        """One request: its status and its text, whatever it is. Raises OSError without an answer."""
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = content_type
        for attempt in (1, 2):
            try:
                connection = self._connect()
                connection.request(method, target, data, headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except (OSError, http.client.HTTPException):
                # A connection that was kept open may have ended with the server.
                self._connections.connection = None
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def get(self, path: str, **query: str) -> Object:
        """One object or list."""
        return self.call("GET", path, query=query)

    def items(self, path: str, **query: str) -> list[Object]:
        """The objects of a list."""
        found: list[Object] = self.get(path, **query)["items"]
        return found

    def watch(self, path: str, **query: str) -> Iterator[Object]:
        """The events of a list, as they come; ends when the server ends the watch."""
        connection = self._connect()
        connection.request("GET", f"{path}?{urlencode({'watch': 'true', **query})}")
        yield from (json.loads(line) for line in connection.getresponse())

    def find(self, path: str) -> Object | None:
        """One object, or None if there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def create(self, path: str, body: Object) -> Object:
        """Creates an object in the list `path`."""
        return self.call("POST", path, body)

    def merge(self, path: str, body: Object) -> Object:
        """A merge patch."""
        return self.call("PATCH", path, body, content_type="application/merge-patch+json")

    def delete(self, path: str, grace_s: int | None = None) -> None:
        """Deletes an object; that it is gone already is no error."""
        body = (
            None
            if grace_s is None
            else {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace_s}
        )
        try:
            self.call("DELETE", path, body)
        except ApiError as error:
            if error.status != 404:
                raise

    def _connect(self) -> http.client.HTTPSConnection:
        kept: http.client.HTTPSConnection | None = getattr(self._connections, "connection", None)
        if kept is None:
            address = urlsplit(self._server)
            kept = http.client.HTTPSConnection(
                str(address.hostname), address.port, timeout=REQUEST_S, context=self._tls
            )
            self._connections.connection = kept
        return kept


def kubectl(*words: str, text: str | None = None, check: bool = True, timeout_s: float = 60) -> str:
    """Runs kubectl as the administrator: its output. Raises AssertionError with its words unless it succeeds."""
    done = subprocess.run(
        ("kubectl", *words), input=text, capture_output=True, text=True, timeout=patient(timeout_s), check=False,
        stdin=None if text is not None else subprocess.DEVNULL,
    )  # fmt: skip
    if check and done.returncode != 0:
        raise AssertionError(f"kubectl {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def component(script: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
    """One of the kit's scripts: `component("down.sh", "kubelet")`. Raises AssertionError with its words."""
    done = subprocess.run(
        (f"{os.environ['K8S_DIR']}/{script}", *words), capture_output=True, text=True, check=False,
        timeout=patient(120), stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, f"{script} {' '.join(words)}: {done.stdout.strip()} {done.stderr.strip()}"


def node_name() -> str:
    """The node's name."""
    return os.environ["K8S_NODE"]


DEVICE_PLUGINS: Final = Path("/var/lib/kubelet/device-plugins")
"""Kubelet has its device plugins here, whatever its root directory is."""


def kubelet_dir() -> Path:
    """Kubelet's directory."""
    return Path(os.environ["K8S_KUBELET_DIR"])


def api_server_for_pods() -> tuple[str, str]:
    """Host and port by which pods reach the API server: there are no service addresses on this node."""
    return "10.88.0.1", "6443"

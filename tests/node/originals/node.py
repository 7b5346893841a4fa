"""The node in a box: its API server, and its kubelet as a process that is stopped and started.

Only for a process inside the node's namespaces, with the variables of the node's env.sh.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml

from tests.support.patience import patient

WITHIN_S: Final = min(patient(15.0), 45.0)
"""Bound of each wait for the node."""

POLL_S: Final = 0.05
"""PodResources serves 100 calls a second, for all its clients."""

COMMAND_S: Final = patient(60.0)
"""Bound of one command of the node."""

STATUS_EVERY: Final = "300ms"
"""How often kubelet posts the node's status here; its default is 10 s."""


def inside() -> bool:
    """Whether this process can reach the node."""
    return bool(os.environ.get("K8S_INSIDE")) and "K8S_DIR" in os.environ


def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> bool:
    """Polls `condition` until it holds. Returns False when the time is over."""
    ends_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends_at:
            return False
        time.sleep(POLL_S)
    return True


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Api:
    """A client of the API server, with the administrator's certificate."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        server = urlsplit(cluster["server"])
        assert server.hostname is not None
        context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile(
            "wb"
        ) as pair:  # the standard library takes a certificate by its path only
            for part in ("client-certificate-data", "client-key-data"):
                pair.write(base64.b64decode(user[part]))
            pair.flush()
            context.load_cert_chain(pair.name)
        self._connection = HTTPSConnection(server.hostname, server.port, context=context, timeout=COMMAND_S)
        self._lock = threading.Lock()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer as JSON. Raises `ApiError`, `OSError`."""
        try:
            return self._call(method, path, body)
        except OSError:  # the server may have closed a connection that was not in use
            return self._call(method, path, body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        text = None if body is None else json.dumps(body)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with self._lock:
            try:
                self._connection.request(method, path, text, {"Content-Type": kind})
                response = self._connection.getresponse()
                content = response.read().decode()
            except (HTTPException, OSError) as error:
                self._connection.close()  # the next request opens it anew
                raise OSError(str(error)) from error
        if response.status >= 400:
            raise ApiError(response.status, content)
        return json.loads(content)

    def find(self, path: str) -> Any:
        """As `call` with GET; None if there is no such object."""
        try:
            return self.call("GET", path)
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Deletes an object, if it is there."""
        try:
            self.call("DELETE", path, {} if grace_s is None else {"gracePeriodSeconds": grace_s})
        except ApiError as error:
            if error.code not in (404, 409):
                raise


class Machine:
    """The processes of the node's components. Everything but kubelet runs before and after."""

    def __init__(self) -> None:
        self._dir = Path(os.environ["K8S_DIR"])
        self.name = os.environ.get("K8S_NODE") or socket.gethostname()
        self.image = os.environ.get("K8S_IMAGE", "registry.local/busybox:1")
        self.kubelet_dir = Path(os.environ.get("K8S_KUBELET_DIR", "/var/lib/kubelet"))

    def up(self, component: str, **environment: str) -> None:
        """Starts a component and waits until it listens."""
        self._run("up.sh", component, environment)

    def down(self, component: str) -> None:
        """Stops a component and waits until it has ended."""
        self._run("down.sh", component, {})

    def runs(self, component: str) -> bool:
        """The component's process lives."""
        with suppress(OSError, ValueError):
            pid = int((self._dir / "run" / f"{component}.pid").read_text())
            return os.readlink(f"/proc/{pid}/exe") == str(self._dir / "bin" / component)
        return False

    def log(self, component: str) -> str:
        """What a component has logged since its start."""
        return (self._dir / "log" / f"{component}.log").read_text(encoding="utf-8", errors="replace")

    def _run(self, script: str, component: str, environment: Mapping[str, str]) -> None:
        subprocess.run(
            [str(self._dir / script), component],
            check=True,
            timeout=COMMAND_S,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
        )

"""The two API servers that a script is played against: the original, and the fake on a socket."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import trio
import yaml

from gpuactors.kube.config import from_kubeconfig
from gpuactors.kube.tls import tls_context
from gpuactors_simulation.kube.http import serve_loopback
from gpuactors_simulation.kube.server import ApiFault, FakeApiServer
from gpuactors_simulation.kube.status import Object
from tests.node.originals.api_player import Player, Reply
from tests.node.originals.api_steps import Arrange, Ask, Client, Overload

ROOT: Final = Path(__file__).resolve().parents[3]
KIT: Final = Path(os.environ.get("GPUACTORS_NODE_KIT") or ROOT.parent / "shared" / "node")
"""The kit of the node, which has NVIDIA's CustomResourceDefinitions."""

_POLL_S: Final = 0.1
_HELD_ASKS: Final = 5
_ACCOUNTS: Final = "/api/v1/namespaces/default/serviceaccounts"
_ACCOUNT: Final = {
    Client.STRANGER: "script-stranger",
    Client.EXPIRED: "script-stranger",
    Client.ELSEWHERE: "script-stranger",
    Client.DELETED: "script-deleted",
}


@final
class Fake:
    """The fake API server on a socket of loopback."""

    def __init__(self, server: FakeApiServer, port: int) -> None:
        self._server = server
        self._port = port

    async def connect(self, ask: Ask | None = None) -> trio.abc.Stream:
        return await trio.open_tcp_stream("127.0.0.1", self._port)

    def headers(self, ask: Ask) -> list[tuple[str, str]]:
        headers = [("Host", f"127.0.0.1:{self._port}")]
        if ask.client is not Client.ANONYMOUS:
            headers.append(("Authorization", f"Bearer {ask.client.name}"))
        return headers

    async def arrange(self, step: Arrange, player: Player) -> Object:
        return step.fake(self._server)

    async def overload(self, step: Overload, player: Player) -> Reply:
        self._server.order(ApiFault.THROTTLED)
        return await player.ask(step.ask)


@asynccontextmanager
async def fake(*, gates: bool) -> AsyncIterator[Fake]:
    """The fake with or without the gates of DRA, as long as the context is open."""
    server = FakeApiServer(
        device_taints=gates,
        partitionable_devices=gates,
        extended_resources=gates,
        tokens=frozenset({Client.ADMIN.name}),
        strangers={Client.STRANGER.name: f"system:serviceaccount:default:{_ACCOUNT[Client.STRANGER]}"},
    )
    async with serve_loopback(server) as port:
        yield Fake(server, port)


@final
class Original:
    """The API server of the node that this process is in."""

    def __init__(self) -> None:
        self._access = from_kubeconfig(Path(os.environ["KUBECONFIG"]))
        credentials = self._access.read()
        self._admin = tls_context(credentials)
        self._other = tls_context(replace(credentials, certificate=None, key=None))
        self._tokens = {Client.BAD: "none"}

    async def connect(self, ask: Ask | None = None) -> trio.abc.Stream:
        server = self._access.server
        context = self._admin if ask is None or ask.client is Client.ADMIN else self._other
        stream = await trio.open_ssl_over_tcp_stream(
            server.host, server.port, ssl_context=context, https_compatible=True
        )
        await stream.do_handshake()
        return stream

    def headers(self, ask: Ask) -> list[tuple[str, str]]:
        headers = [("Host", f"{self._access.server.host}:{self._access.server.port}")]
        if ask.client in self._tokens:
            headers.append(("Authorization", f"Bearer {self._tokens[ask.client]}"))
        return headers

    async def arrange(self, step: Arrange, player: Player) -> Object:
        found: Object = {}
        for ask in step.original:
            found = await done(player, ask)
        return found

    async def overload(self, step: Overload, player: Player) -> Reply:
        """A priority level without seats admits one request at a time. One whose body never ends holds it."""
        for path, body in _LIMIT:
            await done(player, Ask(name="limit", method="POST", path=path, body=body))
        held = replace(step.ask, method="POST", path=_REVIEWS)
        while (reply := await self._beside(held, step.ask, player)).status != 429:
            pass  # the server has not read the new priority level yet
        for path, body in reversed(_LIMIT):
            gone = f"{path}/{body['metadata']['name']}"
            await done(player, Ask(name="limit", method="DELETE", path=gone))
        return reply

    async def _beside(self, held: Ask, ask: Ask, player: Player) -> Reply:
        """The answer while `held` waits for its body: the first that says 429, or the last of some."""
        async with await self.connect(held) as stream:
            lines = [f"POST {held.path} HTTP/1.1", *map(": ".join, self.headers(held))]
            lines += ["Content-Type: application/json", "Content-Length: 100", "", ""]
            await stream.send_all("\r\n".join(lines).encode())
            for _ in range(_HELD_ASKS):
                reply = await player.ask(ask)
                if reply.status == 429:
                    break
                await trio.sleep(_POLL_S)
        return reply

    async def prepare(self, leftovers: Sequence[str]) -> None:
        """Removes what an earlier run has left, makes service accounts, and installs the kit's definitions."""
        player = Player(self)
        await self.remove(player, leftovers)
        for account in sorted(set(_ACCOUNT.values())):
            body = {"metadata": {"name": account}}
            await done(player, Ask(name="account", method="POST", path=_ACCOUNTS, body=body))
        for client, account in _ACCOUNT.items():
            audiences = ["elsewhere.example.com"] if client is Client.ELSEWHERE else []
            review = {"spec": {"audiences": audiences, "expirationSeconds": 3600}}
            path = f"{_ACCOUNTS}/{account}/token"
            made = await done(player, Ask(name="token", method="POST", path=path, body=review))
            self._tokens[client] = made["status"]["token"]
        self._tokens[Client.EXPIRED] = _expired(self._tokens[Client.STRANGER])
        await done(player, Ask(name="a", method="DELETE", path=f"{_ACCOUNTS}/{_ACCOUNT[Client.DELETED]}"))
        await _until(player, Ask(name="account", path="/api", client=Client.DELETED), 401)
        for file in sorted((KIT / "domains" / "crds").glob("*.yaml")):
            await self._define(player, yaml.safe_load(file.read_text()))

    async def remove(self, player: Player, leftovers: Sequence[str]) -> None:
        """Removes the objects at these paths; of a list, each of its items."""
        for path in leftovers:
            base, _, query = path.partition("?")
            reply = await player.ask(Ask(name="leftovers", path=path))
            if reply.status == 404:
                continue
            found = player.decoded(reply)
            for item in found["items"] if query else [found]:
                name = item["metadata"]["name"]
                one = f"{base}/{name}" if query else base
                if item["metadata"].pop("finalizers", None):
                    # Not by a patch: that sorts the keys of opaque parameters, and the specification is immutable.
                    await player.ask(Ask(name=name, method="PUT", path=one, body=item))
                options = {"gracePeriodSeconds": 0}
                await player.ask(Ask(name=name, method="DELETE", path=one, body=options))
                await _until(player, Ask(name=name, path=one), 404)

    async def _define(self, player: Player, definition: Any) -> None:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await done(player, Ask(name="definition", method="POST", path=definitions, body=definition))
        spec = definition["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        await _until(player, Ask(name="definition", path=path), 200)


_REVIEWS: Final = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
"""What each client may ask; a request without the right to it is refused before its body is read."""

_FLOWS: Final = "/apis/flowcontrol.apiserver.k8s.io/v1"
_NO_SEATS: Final = {
    "nominalConcurrencyShares": 0,
    "lendablePercent": 0,
    "borrowingLimitPercent": 0,
    "limitResponse": {"type": "Reject"},
}
_EVERYTHING: Final = {
    "verbs": ["*"],
    "apiGroups": ["*"],
    "resources": ["*"],
    "clusterScope": True,
    "namespaces": ["*"],
}
_FOR: Final = {"name": _ACCOUNT[Client.STRANGER], "namespace": "default"}
_LIMIT: Final[tuple[tuple[str, Any], ...]] = (
    (
        f"{_FLOWS}/prioritylevelconfigurations",
        {"metadata": {"name": "script-no-seats"}, "spec": {"type": "Limited", "limited": _NO_SEATS}},
    ),
    (
        f"{_FLOWS}/flowschemas",
        {
            "metadata": {"name": "script-no-seats"},
            "spec": {
                "priorityLevelConfiguration": {"name": "script-no-seats"},
                "matchingPrecedence": 2,
                "rules": [
                    {
                        "subjects": [{"kind": "ServiceAccount", "serviceAccount": _FOR}],
                        "resourceRules": [_EVERYTHING],
                    }
                ],
            },
        },
    ),
)


async def done(player: Player, ask: Ask) -> Any:
    """The body of an answer that must be one of success, or say that the object exists already. Raises
    `RuntimeError`."""
    reply = await player.ask(ask)
    if reply.status >= 300 and reply.status != 409:
        raise RuntimeError(f"{ask.method} {ask.path}: {reply.status} {reply.body.decode()}")
    return player.decoded(reply)


async def _until(player: Player, ask: Ask, status: int) -> None:
    """Asks again until the answer has this status."""
    while True:
        if (await player.ask(ask)).status == status:
            return
        await trio.sleep(_POLL_S)


def _expired(token: str) -> str:
    """The token as it would be if it had been issued a day ago, signed with the server's key."""
    head, payload, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    for key in ("exp", "iat", "nbf"):
        claims[key] -= 86_400
    signed = f"{head}.{_encoded(json.dumps(claims).encode())}"
    key_file = Path(os.environ["K8S_DIR"]) / "pki" / "sa.key"
    command = ["openssl", "dgst", "-sha256", "-sign", str(key_file)]
    made = subprocess.run(command, input=signed.encode(), capture_output=True, check=True, timeout=10)
    return f"{signed}.{_encoded(made.stdout)}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

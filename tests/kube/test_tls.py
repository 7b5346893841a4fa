"""TLS to the API server on loopback: whom we trust, who we are, and what changes while we run."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme

from gpuactors.kube.client import ApiClient, Call
from gpuactors.kube.config import AccessError, FileAccess, Server
from gpuactors.ports.kube import ApiAway
from gpuactors_simulation.kube.http import serve_stream
from gpuactors_simulation.kube.server import FakeApiServer
from tests.support.patience import patient

WITHIN_S = patient(20.0)
GROUP = Call("read the group", "GET", "/apis/resource.k8s.io")


def pem(ca: trustme.CA) -> str:
    return ca.cert_pem.bytes().decode()


def server_context(ca: trustme.CA, *names: str, clients: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert(*names).configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A fake API server with TLS on a free port of loopback."""
    server = FakeApiServer()

    async def handle(stream: trio.abc.Stream) -> None:
        try:
            await serve_stream(server, stream)
        except* trio.BrokenResourceError:
            pass

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_ssl_over_tcp, handle, 0, context)
            yield listeners[0].transport_listener.socket.getsockname()[1]
            nursery.cancel_scope.cancel()


def at(port: int, tls_name: str | None = None) -> Server:
    return Server("https", "127.0.0.1", port, tls_name=tls_name)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


async def test_a_server_of_our_ca_is_asked(ca: trustme.CA) -> None:
    async with serving(server_context(ca, "127.0.0.1")) as port:
        client = ApiClient(FileAccess(at(port), ca=pem(ca)))
        assert b"APIGroup" in await client.ask(GROUP)


async def test_a_server_of_another_ca_is_not_and_the_sentence_says_why(ca: trustme.CA) -> None:
    async with serving(server_context(trustme.CA(), "127.0.0.1")) as port:
        client = ApiClient(FileAccess(at(port), token="geheim", ca=pem(ca)))
        with pytest.raises(ApiAway, match=r"certificate that is not valid for us.*check the CA"):
            await client.ask(GROUP)


async def test_a_server_of_another_name_is_not_unless_the_name_is_given(ca: trustme.CA) -> None:
    async with serving(server_context(ca, "kubernetes.test")) as port:
        with pytest.raises(ApiAway, match="certificate that is not valid"):
            await ApiClient(FileAccess(at(port), ca=pem(ca))).ask(GROUP)
        client = ApiClient(FileAccess(at(port, "kubernetes.test"), ca=pem(ca)))
        assert b"APIGroup" in await client.ask(GROUP)


async def test_a_client_certificate_is_shown(ca: trustme.CA) -> None:
    """From memory: no key is ever written to a file."""
    mine = ca.issue_cert("node-1")
    certificate = mine.cert_chain_pems[0].bytes().decode()
    key = mine.private_key_pem.bytes().decode()
    async with serving(server_context(ca, "127.0.0.1", clients=ca)) as port:
        access = FileAccess(at(port), ca=pem(ca), certificate=certificate, key=key)
        assert b"APIGroup" in await ApiClient(access).ask(GROUP)
        with pytest.raises(ApiAway):
            await ApiClient(FileAccess(at(port), ca=pem(ca))).ask(GROUP)


async def test_a_ca_that_is_renewed_counts_for_the_next_request(ca: trustme.CA, tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text(pem(trustme.CA()))
    async with serving(server_context(ca, "127.0.0.1")) as port:
        client = ApiClient(FileAccess(at(port), ca=file))
        with pytest.raises(ApiAway):
            await client.ask(GROUP)
        file.write_text(pem(ca))
        assert b"APIGroup" in await client.ask(GROUP)


@pytest.mark.parametrize("text", ["", "no certificate"])
async def test_a_ca_that_is_none_is_told(text: str) -> None:
    """An empty file must not mean the system's CAs."""
    client = ApiClient(FileAccess(at(1), ca=text))
    with trio.fail_after(WITHIN_S), pytest.raises(AccessError, match="CA of the API server"):
        await client.ask(GROUP)


async def test_a_certificate_and_key_that_do_not_fit_are_told(ca: trustme.CA) -> None:
    one, other = ca.issue_cert("a"), ca.issue_cert("b")
    access = FileAccess(
        at(1),
        ca=pem(ca),
        certificate=one.cert_chain_pems[0].bytes().decode(),
        key=other.private_key_pem.bytes().decode(),
    )
    with trio.fail_after(WITHIN_S), pytest.raises(AccessError, match="do not belong together"):
        await ApiClient(access).ask(GROUP)


async def test_the_system_is_trusted_where_no_ca_is_given(ca: trustme.CA) -> None:
    async with serving(server_context(ca, "127.0.0.1")) as port:
        with pytest.raises(ApiAway, match="certificate that is not valid"):
            await ApiClient(FileAccess(at(port))).ask(GROUP)


async def test_a_server_that_speaks_no_tls_is_told() -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, handle, 0)
            port = listeners[0].socket.getsockname()[1]
            with pytest.raises(ApiAway, match="TLS"):
                await ApiClient(FileAccess(at(port))).ask(GROUP)
            nursery.cancel_scope.cancel()

"""Where the API server is and how we prove who we are: from the pod's service account, or from a kubeconfig file.

Files are read anew for each request, in a thread: kubelet renews a pod's token every hour, and a cluster its CA. Must
not run another program: a kubeconfig with an exec plugin is refused.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, final
from urllib.parse import urlsplit

import msgspec
import trio
from msgspec import Struct

from gpuactors.core.values.quote import quoted
from gpuactors.ports.kube import ApiError
from gpuactors.process.plain_files import read_plain

CREDENTIAL_MAX_BYTES: Final = 1024 * 1024
"""A token, a certificate or a bundle of them; something else by that name must not be read for ever."""

KUBECONFIG_MAX_BYTES: Final = 1024 * 1024
"""A kubeconfig file; a few kilobytes for each cluster."""

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The directory in which kubelet puts a pod's token and the CA (plugin/pkg/admission/serviceaccount)."""

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class AccessError(ApiError):
    """The API server's address or our credentials cannot be had; the text names the file, why, and the remedy."""


class Server(Struct, frozen=True):
    """The address of an API server."""

    scheme: str
    """The scheme, `https` or `http`."""
    host: str
    port: int
    base: str = ""
    """The path before `/api`: some proxies have one."""
    tls_name: str | None = None
    """The name in its certificate, if it is not the host."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """The identity of the daemon, and the authorities it trusts; as text and PEM."""

    token: str | None = None
    ca: str | None = None
    """The certificates of the authorities; None for the system's."""
    certificate: str | None = None
    key: str | None = None


Source = str | Path
"""A text, or the file that has it."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class FileAccess:
    """An API server, and what is needed for a request to it: in files, or given as text."""

    server: Server
    token: Source | None = None
    ca: Source | None = None
    certificate: Source | None = None
    key: Source | None = None

    async def credentials(self) -> Credentials:
        """Return the present credentials. Raises `AccessError`."""
        sources = (self.token, self.ca, self.certificate, self.key)
        if not any(isinstance(source, Path) for source in sources):
            return self.read()
        # A file system may hang; the request has a deadline.
        return await trio.to_thread.run_sync(self.read, abandon_on_cancel=True)

    def read(self) -> Credentials:
        """Return the credentials, read in this thread. Raises `AccessError`."""
        return Credentials(
            token=_token(self.token),
            ca=_content(self.ca, "CA"),
            certificate=_content(self.certificate, "client certificate"),
            key=_content(self.key, "client key"),
        )


def in_cluster(environment: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> FileAccess:
    """Return the access of a pod. Raises `AccessError` if this process is in none, or has no service account."""
    host, port = (
        environment.get("KUBERNETES_SERVICE_HOST", ""),
        environment.get("KUBERNETES_SERVICE_PORT", ""),
    )
    if not host or not port.isdecimal():
        raise AccessError(
            "the API server's address is not known: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, "
            "so this is no pod; name a kubeconfig file with --kubeconfig"
        )
    access = FileAccess(Server("https", host, int(port)), token=directory / "token", ca=directory / "ca.crt")
    access.read()
    return access


def _token(source: Source | None) -> str | None:
    """Return the token if it can be sent. HTTP's own error about one that cannot be would quote it."""
    token = (_content(source, "token") or "").strip()
    if not token.isascii() or not token.isprintable():
        where = f"in {source}" if isinstance(source, Path) else "of the kubeconfig file"
        raise AccessError(f"the token {where} has characters that no token has, such as a line end: renew it")
    return token if source is not None else None


def _content(source: Source | None, what: str) -> str | None:
    if not isinstance(source, Path):
        return source
    try:
        return read_plain(source, CREDENTIAL_MAX_BYTES).decode("ascii")
    except OSError as exc:
        raise AccessError(
            f"the {what} of the API server cannot be read from {source}: {exc.strerror}; mount or correct it (a pod "
            "has it where automountServiceAccountToken is not false)"
        ) from exc
    except UnicodeDecodeError as exc:
        raise AccessError(f"{source} is not the {what} of the API server: it is no PEM and no token") from exc


# --- kubeconfig -------------------------------------------------------------------------------------------


_USER_KEYS: Final = {"token_file": "tokenFile", "as_": "as"}
"""The keys that are not in kebab case."""


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""


class _User(msgspec.Struct, rename=lambda name: _USER_KEYS.get(name, name.replace("_", "-"))):
    token: str = ""
    token_file: str = ""
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: object = None
    auth_provider: object = None
    username: str = ""
    as_: str = ""


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _NamedUser(msgspec.Struct):
    name: str
    user: _User | None = None


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _KubeConfig(msgspec.Struct):
    current_context: str = msgspec.field(name="current-context", default="")
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []


_NO_YAML: Final = (ValueError, TypeError, AttributeError, KeyError, RecursionError)
"""The errors that PyYAML does not wrap: a value that does not fit its tag, a text that nests too deep."""


def from_kubeconfig(path: Path) -> FileAccess:
    """Return the access of the current context of a kubeconfig file; paths in it are relative to its directory. Raises
    `AccessError`, also for what a daemon should not do: run a plugin, skip the server's certificate."""
    import yaml  # 20 ms that only such a file is worth

    try:
        # Not by libyaml, as msgspec does: a text that nests deep overflows its stack, which ends the process.
        content = yaml.safe_load(read_plain(path, KUBECONFIG_MAX_BYTES))
        config = msgspec.convert(content, type=_KubeConfig)
    except OSError as exc:
        raise AccessError(
            f"the kubeconfig file {path} cannot be read: {exc.strerror}; correct --kubeconfig"
        ) from exc
    except (msgspec.MsgspecError, yaml.YAMLError, *_NO_YAML) as exc:
        raise AccessError(f"{path} is no kubeconfig file: {_fault(exc)}; correct --kubeconfig") from None
    context = _named(path, "context", config.current_context, {c.name: c.context for c in config.contexts})
    cluster = _named(path, "cluster", context.cluster, {c.name: c.cluster for c in config.clusters})
    user = _named(path, "user", context.user, {u.name: u.user or _User() for u in config.users})
    server = _server(path, cluster)
    _refuse_what_is_not_done(path, context, cluster, user)
    # Of a token the file overrides, of all else the data (client-go transport/config.go).
    token = _file(path, user.token_file) or user.token or None
    access = FileAccess(
        server,
        token=token,
        ca=_pem(path, cluster.certificate_authority, cluster.certificate_authority_data),
        certificate=_pem(path, user.client_certificate, user.client_certificate_data),
        key=_pem(path, user.client_key, user.client_key_data),
    )
    if access.token is not None and server.scheme == "http" and server.host not in _LOOPBACK:
        raise AccessError(f"{path} would send a token to {server} in the clear: give the server as https://")
    access.read()
    return access


def _fault(error: Exception) -> str:
    """Return what is wrong, and where, without a word of the file: it may be of a token. PyYAML's own text has the
    line."""
    if isinstance(error, msgspec.MsgspecError):
        return quoted(str(error))  # names types and keys
    mark = getattr(error, "problem_mark", None)
    return (
        f"line {mark.line + 1}, column {mark.column + 1} is no YAML" if mark is not None else "it is no YAML"
    )


_Named = TypeVar("_Named")


def _named(path: Path, what: str, name: str, by_name: Mapping[str, _Named]) -> _Named:
    if name not in by_name:
        raise AccessError(f"{path} has no {what} {quoted(name)!r}: set current-context to one that is whole")
    return by_name[name]


def _server(path: Path, cluster: _Cluster) -> Server:
    try:
        url = urlsplit(cluster.server)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
        raise AccessError(
            f"the server of the cluster in {path} is no address of an API server (https://HOST:PORT)"
        )
    default = 443 if url.scheme == "https" else 80
    base, name = url.path.rstrip("/"), cluster.tls_server_name or None
    return Server(url.scheme, url.hostname, port or default, base, name)


def _refuse_what_is_not_done(path: Path, context: _Context, cluster: _Cluster, user: _User) -> None:
    who = f"the user {quoted(context.user)!r} in {path}"
    instead = "give a token, a tokenFile or a client certificate"
    refused = (
        (
            user.exec is not None,
            f"{who} has an exec plugin, and this daemon runs no other program: {instead}",
        ),
        (
            user.auth_provider is not None,
            f"{who} has an auth-provider, which Kubernetes has removed: {instead}",
        ),
        (bool(user.username), f"{who} has a user name and password, which Kubernetes has removed: {instead}"),
        (bool(user.as_), f"{who} acts as somebody else (`as`), which this daemon does not do: {instead}"),
        (
            cluster.insecure_skip_tls_verify,
            f"the cluster in {path} has insecure-skip-tls-verify: give its CA as certificate-authority",
        ),
        (
            bool(cluster.proxy_url),
            f"the cluster in {path} has a proxy-url, which this daemon does not use: give an address it can reach",
        ),
    )
    for applies, sentence in refused:
        if applies:
            raise AccessError(sentence)


def _pem(path: Path, file: str, data: str) -> Source | None:
    """Return the PEM text, or its file. Data overrides a file (client-go tools/clientcmd/api/v1/types.go)."""
    return _decoded(path, data) or _file(path, file)


def _file(path: Path, file: str) -> Path | None:
    return path.parent / os.path.expanduser(file) if file else None


def _decoded(path: Path, data: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode("ascii")
    except ValueError as exc:  # of either step, also for characters that are not of base64
        raise AccessError(
            f"a certificate or key in {path} is not base64 of a PEM file: renew the file"
        ) from exc

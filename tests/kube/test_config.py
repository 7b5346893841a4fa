"""Where the API server is and who we are: a pod's files, a kubeconfig file, and what is refused of it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml

from gpuactors.kube.config import AccessError, Credentials, FileAccess, Server, from_kubeconfig, in_cluster
from tests.support.patience import patient

WITHIN_S = patient(10.0)
POD = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "KUBERNETES_SERVICE_PORT": "443"}
PEM = "-----BEGIN CERTIFICATE-----\n"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def account(directory: Path, token: str = "t-1", ca: str = PEM) -> Path:
    (directory / "token").write_text(f"{token}\n")
    (directory / "ca.crt").write_text(ca)
    return directory


def kubeconfig(directory: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None) -> Path:
    path = directory / "config"
    found = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "preferences": {},
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "x"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.test:6443"} | (cluster or {})}],
        "users": [{"name": "u", "user": user}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(found))
    return path


def credentials(access: FileAccess) -> Credentials:
    async def read() -> Credentials:
        with trio.fail_after(WITHIN_S):
            return await access.credentials()

    return trio.run(read)


# --- in a pod ---------------------------------------------------------------------------------------------


def test_a_pod_has_its_server_in_the_environment_and_its_credentials_in_files(tmp_path: Path) -> None:
    access = in_cluster(POD, account(tmp_path))
    assert str(access.server) == "https://192.0.2.1:443"
    assert credentials(access) == Credentials("t-1", PEM)


def test_the_token_and_the_ca_are_read_anew(tmp_path: Path) -> None:
    """Kubelet renews the token each hour, and a cluster its CA."""
    access = in_cluster(POD, account(tmp_path))
    account(tmp_path, "t-2", f"{PEM}2")
    assert credentials(access) == Credentials("t-2", f"{PEM}2")


def test_a_server_of_ipv6_is_an_address() -> None:
    assert str(Server("https", "fd00::1", 443)) == "https://[fd00::1]:443"


@pytest.mark.parametrize("environment", [{}, POD | {"KUBERNETES_SERVICE_PORT": "https"}])
def test_outside_a_pod_the_remedy_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="--kubeconfig"):
        in_cluster(environment, tmp_path)


def test_a_pod_without_a_service_account_is_told_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="automountServiceAccountToken"):
        in_cluster(POD, tmp_path)


def test_a_token_that_disappears_is_an_error_of_the_request(tmp_path: Path) -> None:
    access = in_cluster(POD, account(tmp_path))
    (tmp_path / "token").unlink()
    with pytest.raises(AccessError, match=str(tmp_path / "token")):
        credentials(access)


def test_credentials_are_in_no_text(tmp_path: Path) -> None:
    access = in_cluster(POD, account(tmp_path, "geheim"))
    assert "geheim" not in repr(access) + repr(credentials(access))


# --- kubeconfig -------------------------------------------------------------------------------------------


def test_a_kubeconfig_gives_server_ca_and_client_certificate(tmp_path: Path) -> None:
    user = {"client-certificate-data": encoded("cert"), "client-key-data": encoded("key")}
    cluster = {
        "server": "https://api.test/base/", "certificate-authority-data": encoded(PEM), "tls-server-name": "k8s",
    }  # fmt: skip
    access = from_kubeconfig(kubeconfig(tmp_path, user, cluster))
    assert access.server == Server("https", "api.test", 443, "/base", "k8s")
    assert credentials(access) == Credentials(None, PEM, "cert", "key")


def test_files_of_a_kubeconfig_are_beside_it_and_read_anew(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key", "token"):
        (tmp_path / name).write_text(f"{name}-1")
    user = {
        "client-certificate": "cert",
        "client-key": str(tmp_path / "key"),
        "tokenFile": "token",
        "token": "old",
    }
    access = from_kubeconfig(kubeconfig(tmp_path, user, {"certificate-authority": "ca"}))
    assert credentials(access) == Credentials("token-1", "ca-1", "cert-1", "key-1")
    (tmp_path / "token").write_text("token-2")
    assert credentials(access).token == "token-2"


def test_a_token_of_a_kubeconfig_is_sent(tmp_path: Path) -> None:
    assert credentials(from_kubeconfig(kubeconfig(tmp_path, {"token": "t"}))).token == "t"


@pytest.mark.parametrize(
    ("user", "cluster", "named"),
    [
        (
            {"exec": {"command": "aws"}},
            {},
            "exec plugin, and this daemon runs no other program: give a token",
        ),
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider"),
        ({"username": "u", "password": "p"}, {}, "user name and password"),
        ({"as": "somebody"}, {}, "somebody else"),
        ({}, {"insecure-skip-tls-verify": True}, "insecure-skip-tls-verify: give its CA"),
        ({}, {"proxy-url": "http://proxy.test"}, "proxy-url"),
        ({}, {"server": "api.test"}, "no address of an API server"),
        ({}, {"server": "https://u:p@api.test"}, "no address of an API server"),
        ({}, {"server": "https://api.test:port"}, "no address of an API server"),
        ({"token": "t"}, {"server": "http://api.test"}, "in the clear"),
        ({}, {"certificate-authority": "nope"}, "the CA of the API server cannot be read"),
        ({}, {"certificate-authority-data": "?"}, "base64"),
        ({"tokenFile": "nope"}, {}, "the token of the API server cannot be read"),
        ({"exec": [1]}, {"server": 7}, "is no kubeconfig file"),
    ],
)
def test_what_is_not_done_is_refused_with_the_remedy(
    user: dict[str, Any], cluster: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = kubeconfig(tmp_path, user, cluster)
    with pytest.raises(AccessError) as refused:
        from_kubeconfig(path)
    assert named in str(refused.value)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "current-context: here",
        "a: b: c",
        "\0",
        "clusters: &a [*a]",
        "a: !!set 1",
        "a: !!timestamp x",
        "a: 2020-13-45",
        "{[1]: 2}",
        pytest.param("a: " + "[" * 500_000, id="a text that nests deep"),
        pytest.param(
            "\n".join(
                [
                    "clusters: &a0 [x]",
                    *(f"c{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)),
                ]
            ),
            id="aliases of aliases",
        ),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match=str(path)):
        from_kubeconfig(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('users:\n- user:\n    token: SECRET: "x', "line 3, column 18 is no YAML"),
        ("users:\n- user: {token: !!int SECRET}", "it is no YAML"),
        ("users:\n- user: {token: [SECRET]}", "Expected `str`, got `array`"),
        ("clusters: [{name: a, cluster: {server: 'https://u:SECRET@h'}}]", "no address of an API server"),
        ('users: [{name: a, user: {token: "SECRET\\nx"}}]', "characters that no token has"),
        ("users: [{name: a, user: {token: SECRETé}}]", "characters that no token has"),
    ],
)
def test_no_error_has_a_word_of_a_token(text: str, named: str, tmp_path: Path) -> None:
    """The text reaches the log, the doctor and `gpuactors bundle`."""
    path, keys = tmp_path / "config", text.partition(":")[0]
    rest = {
        "users": "users: [{name: a, user: {}}]",
        "clusters": "clusters: [{name: a, cluster: {server: 'https://h'}}]",
        "contexts": "contexts: [{name: a, context: {cluster: a, user: a}}]",
        "current-context": "current-context: a",
    }
    path.write_text("\n".join([text, *(line for key, line in rest.items() if key != keys)]), encoding="utf-8")
    with pytest.raises(AccessError, match="config") as refused:
        from_kubeconfig(path)
    error: BaseException | None = refused.value
    assert named in str(error)
    while error is not None:  # a traceback has those before it, too
        assert "SECRET" not in str(error)
        error = error.__cause__


def test_a_file_with_a_token_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("SECRET\nx")
    with pytest.raises(AccessError, match=f"{tmp_path}/token has characters that no token has") as refused:
        from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}))
    assert "SECRET" not in str(refused.value)


@pytest.mark.timeout(20)
def test_a_fifo_in_a_kubeconfigs_place_or_a_credentials_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(AccessError, match="it is a FIFO, and a regular file is needed"):
        from_kubeconfig(tmp_path / "fifo")
    with pytest.raises(AccessError, match="it is a FIFO, and a regular file is needed"):
        from_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "fifo"}))


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"No such file.*--kubeconfig"):
        from_kubeconfig(tmp_path / "nope")

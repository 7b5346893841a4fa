"""`gpuactors bundle` as a process: what is in the archive, and that no secret is."""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import json
import re
import socket
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from gpuactors.kubelet.pb.deviceplugin.v1beta1 import ContainerAllocateResponse
from gpuactors_simulation.kube.status import CLAIMS, NODES, Kind
from gpuactors_simulation.kubelet.checkpoint import encode
from gpuactors_simulation.kubelet.values import Checkpoint, LedgerEntry
from tests.process.daemon import eventually, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.process.test_claims import claims_node, daemon_of
from tests.support.claims import DRIVER, NODE, Api, device_of, plugin_of, prepare
from tests.support.terminal import OnTerminal

CONFIG: Final = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig"}
EX_USAGE, EX_CANTCREAT = 2, 73

TEXTS: Final = (
    "versions.txt",
    "settings.txt",
    "settings.json",
    "inspect.txt",
    "inspect.json",
    "doctor.txt",
    "doctor.json",
    "metrics.txt",
)


def bundle(node: Node, *words: str, env: Mapping[str, str] | None = None) -> tuple[dict[str, bytes], str]:
    """The files of the archive in their order, and standard error. Flags as in a pod: only where the daemon is."""
    archive = node.directory / "archive"
    state_dir = node.directories[-1]
    with archive.open("w") as file:
        done = gpuactors("bundle", state_dir, f"--node-name={NODE}", *words, env=env, stdout=file)
    assert done.returncode == 0, done.stderr
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
        opened = {member.name: tar.extractfile(member) for member in tar}
        return {
            name.removeprefix(f"gpuactors-{NODE}/"): file.read() for name, file in opened.items() if file
        }, done.stderr


def unpacked(files: Mapping[str, bytes], directory: Path) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def paths(node: Node) -> set[Path]:
    return {path for path in node.directory.rglob("*") if path.suffix not in (".jsonl", "")}


# --- what is in it ----------------------------------------------------------------------------------------


def test_what_a_running_daemon_shows_is_in_the_archive(tmp_path: Path) -> None:
    gpu = address(0x23)
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists({H100: {gpu: HEALTHY}})
            eventually(lambda: list(node.directory.glob("s/journal/*.jsonl")) != [], "the journal")
            before = paths(node)
            files, said = bundle(node)
            assert paths(node) == before, "it writes nothing on the node"
            node.assert_sound(daemon)
    journal = [name for name in files if name.startswith("journal/")]
    assert tuple(files) == (*TEXTS, *journal, "replay.html", "README.txt")
    assert len(journal) == 1
    assert json.loads(files["settings.json"])["state_dir"]["value"] == str(node.directory / "s")
    assert f"process {daemon.pid}".encode() in files["settings.txt"].splitlines()[0]
    assert [d["address"] for d in json.loads(files["inspect.json"])["devices"]] == [gpu]
    assert json.loads(files["doctor.json"])["counts"]["FAIL"] == 0, files["doctor.txt"]
    assert b"\ngpuactors_serving 1" in files["metrics.txt"]
    assert re.search(rb"^trio \d", files["versions.txt"], re.MULTILINE)
    assert gpu.encode() in files["replay.html"]
    done = gpuactors("replay", str(unpacked(files, tmp_path)))
    assert done.returncode == 0, done.stdout
    assert gpu in done.stdout
    readme = files["README.txt"].decode()
    for name in files:
        line = rf"^{re.escape(name)} +{len(files[name]):,}  \w"
        assert re.search(line, said, re.MULTILINE), (name, said)
        assert name == "README.txt" or re.search(line, readme, re.MULTILINE), (name, readme)


def test_a_part_that_fails_has_its_error_in_its_place() -> None:
    with open_node() as node:
        files, said = bundle(node, f"--host-root={node.directory / 'none'}")
    journal = ("journal.error", "replay.html.error")
    seen = ("inspect.txt.error", "inspect.json.error")
    assert tuple(files) == (*TEXTS[:3], *seen, *TEXTS[5:7], "metrics.txt.error", *journal, "README.txt")
    assert b"none/sys/bus/pci" in files["inspect.json.error"]
    assert b"no daemon runs" in files["metrics.txt.error"]
    assert json.loads(files["doctor.json"])["counts"]["FAIL"] > 0
    for name in (*seen, *journal, "metrics.txt.error"):
        assert re.search(rf"^{re.escape(name)} .*: not there: \w", said, re.MULTILINE), said


@pytest.mark.parametrize("host", ["", "127.0.0.1", "[::1]"])
def test_metrics_are_read_where_the_daemon_serves_them(host: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    with open_node() as node, node.daemon(f"--http-address={host}:{port}") as daemon:
        daemon.wait_event("http.listening")
        files, _ = bundle(node)
    assert b"\ngpuactors_build_info{" in files["metrics.txt"]


def test_no_metrics_are_read_where_none_are_served() -> None:
    with open_node() as node, node.daemon("--http-address=off") as daemon:
        daemon.wait_event("daemon.serving")
        files, _ = bundle(node)
    assert b"http_address is off" in files["metrics.txt.error"]


def test_no_archive_goes_to_a_terminal_or_a_full_disk() -> None:
    with open_node() as node:
        with OnTerminal("bundle", *node.directories) as terminal:
            assert terminal.wait_exit() == EX_USAGE
            assert "the archive is not for a terminal" in " ".join(terminal.raw.decode().split())
        with Path("/dev/full").open("w") as full:
            done = gpuactors("bundle", *node.directories, stdout=full)
    assert done.returncode == EX_CANTCREAT
    assert "gpuactors: standard output cannot be written: No space left on device; " in done.stderr
    assert "Traceback" not in done.stderr


# --- what is not in it ------------------------------------------------------------------------------------


def secret(place: str) -> str:
    return f"S3cret-of-the-{place}"


PLACES: Final = (
    "token", "kubeconfig-comment", "other-user", "environment", "claim-annotation", "claim-parameters",
    "node-annotation", "registry", "allocate-answer", "cdi-file", "configuration-comment", "kernel-command-line",
    "state-directory", "journal-directory",
)  # fmt: skip


def plant_files(node: Node, cdi: Path) -> None:
    """A secret in each file that the command reads, or that is beside one."""
    config = json.loads((node.directory / "kubeconfig").read_text())
    config["users"][0]["user"] = {"tokenFile": "token"}
    config["users"].append({"name": "other", "user": {"username": "o", "password": secret("other-user")}})
    cdi_device = {"name": "x", "containerEdits": {"env": [f"TOKEN={secret('cdi-file')}"]}}
    root = node.tree.root
    for path, text in {
        node.directory / "token": secret("token"),
        node.directory / "kubeconfig": f"# {secret('kubeconfig-comment')}\n{json.dumps(config)}",
        node.directory / "config.yaml": f"# {secret('configuration-comment')}\nlog_level: info\n",
        node.directory / "s/token": secret("state-directory"),
        node.directory / "s/journal/notes.txt": secret("journal-directory"),
        cdi / "other.json": json.dumps({"cdiVersion": "0.6.0", "kind": "a.b/c", "devices": [cdi_device]}),
        root / "proc/cmdline": f"quiet key={secret('kernel-command-line')}\n",
        root / "etc/containerd/config.toml": "version = 3\n[plugins.'io.containerd.grpc.v1.cri'.registry.auths.a]\n"
        f"password = '{secret('registry')}'\n",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plant_answer(node: Node) -> None:
    """A secret in the answer of another plugin, in kubelet's ledger file."""
    answer = bytes(ContainerAllocateResponse(envs={"TOKEN": secret("allocate-answer")}))
    given = LedgerEntry(("thing-0",), {"thing-0": ()}, {}, (), answer)
    node.kubelet.checkpoint.write_text(encode(Checkpoint({("uid-0", "example.org/thing"): given})))


def annotate(api: Api, kind: Kind, namespace: str, name: str, place: str) -> None:
    """A secret in an annotation."""
    found = api.do(api.server.store.get, kind, namespace, name)
    found["metadata"]["annotations"] = {"key": secret(place)}
    api.do(api.server.store.put, kind, found)


def parametrize(api: Api, claim: str) -> None:
    """A secret in the parameters for our driver, in a field that is none."""
    found = api.do(api.server.store.get, CLAIMS, "default", claim)
    opaque = {"driver": DRIVER, "parameters": {**CONFIG, "key": secret("claim-parameters")}}
    found["status"]["allocation"]["devices"]["config"] = [
        {"source": "FromClaim", "requests": [], "opaque": opaque}
    ]
    api.do(api.server.store.put, CLAIMS, found)


def found_in(files: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Each file with the place whose secret it has, as it is or in base64."""
    found = []
    for name, content in files.items():
        texts = [content]
        for word in re.findall(rb"[A-Za-z0-9+/]{20,}={0,2}", content):
            try:
                texts.append(base64.b64decode(word))
            except binascii.Error:
                continue
        found += [(name, place) for place in PLACES if any(secret(place).encode() in text for text in texts)]
    return found


def test_no_secret_is_in_the_archive() -> None:
    gpu = address(0x23)
    environment = {"AWS_SECRET_ACCESS_KEY": secret("environment"), "KUBECONFIG": secret("environment")}
    with claims_node(g23="vfio-pci") as (node, api, cdi):
        api.server.tokens = frozenset({secret("token")})
        plant_files(node, cdi)
        with daemon_of(node, cdi, f"--config={node.directory / 'config.yaml'}"):
            with plugin_of(node.kubelet_dir) as plugin:
                eventually(lambda: api.devices() == [device_of(gpu)], "the slice, with the token")
                one, two = api.claim("one", gpu), api.claim("two", gpu)
                annotate(api, CLAIMS, "default", "one", "claim-annotation")
                annotate(api, NODES, "", NODE, "node-annotation")
                parametrize(api, "two")
                assert prepare(plugin, "one", one).error == ""
                assert "key" in prepare(plugin, "two", two).error
            directory = node.directory / "s/journal"
            eventually(lambda: two in "".join(map(Path.read_text, directory.glob("*.jsonl"))), "the journal")
            node.wait_device_lists({H100: {gpu: "Unhealthy"}})  # kubelet writes its file no more
            plant_answer(node)
            files, _ = bundle(node, env=environment)
            planted = {str(p): p.read_bytes() for p in node.directory.rglob("*") if p.is_file()}
            # Of what cannot be read, an error could quote a part.
            (node.directory / "token").write_text(f"{secret('token')}\nx")
            odd_token, _ = bundle(node, env=environment)
            (node.directory / "kubeconfig").write_text(f'user:\n  token: {secret("token")}: "x')
            odd_kubeconfig, _ = bundle(node, env=environment)
    levels = {one["check"]: one["level"] for one in json.loads(files["doctor.json"])["findings"]}
    assert levels["ApiServer"] == "PASS", "it was asked, with the token"
    assert one.encode() in files["inspect.json"]
    assert two.encode() in b"".join(files[name] for name in files if name.startswith("journal/"))
    in_files = set(PLACES) - {"environment", "claim-annotation", "claim-parameters", "node-annotation"}
    assert {place for _, place in found_in(planted)} == in_files, "what is there is found"
    for archive in (files, odd_token, odd_kubeconfig):
        assert [name for name in archive if name.endswith(".error")] == []
        assert found_in(archive) == []
    assert b"characters that no token has" in odd_token["doctor.txt"]
    assert b"line 2, column" in odd_kubeconfig["doctor.txt"]

"""Garbage against a daemon process: calls that nobody sane makes, and a ledger that nobody sane keeps.

`just garbage` makes 100,000 calls; the suite a few hundred. Kubelet's own Allocate and PreStartContainer go on beside
them and must be answered as if nothing were. At the end the process is the one that was started, has logged no error,
and holds as many descriptors as before. Everything is drawn from a seed. Must not import gpuactors, except for the fake
host that `node.py` makes.

What is timed is the daemon, not Python's threads here: kubelet's calls come from a process that does nothing else, its
ledger and streams are this one's, and whoever makes garbage is a process with the lowest priority, as on two cores its
own work would be the daemon's delay. It calls as fast as it is answered all the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from tests.process.daemon import DaemonProcess, clean_environment, eventually
from tests.process.node import A100, H100, HEALTHY, Node, address, open_node
from tests.support.device_plugin_grpcio import message
from tests.support.pod_resources_grpcio import PROTO as POD_RESOURCES

PLUGIN: Final = "/v1beta1.DevicePlugin/"
CONTROL: Final = "/v1.Control/"
METHODS: Final = ("GetDevicePluginOptions", "Allocate", "PreStartContainer", "GetPreferredAllocation")

KUBELETS: Final = tuple(address(slot) for slot in range(0x23, 0x29))
"""GPUs that kubelet allocates, and that no garbage claims: that would be a reason to refuse them."""

OTHERS: Final = (address(0x41), address(0x42), address(0x51), address(0x52), "0000:41:00.1", "0000:77:00.0")
"""GPUs of the same and of another resource, a companion, and one that is not there."""

IDS: Final = (
    *OTHERS, "", " ", "0", "1", "65", "065", "-1", "+65", "1e3", "²", "٣", "9" * 5000, "\0", "a\0b",
    "\x1b[2J", "\u202eabc", "\u2028", "\U0001f600", "../../etc/passwd", "0000:41:00.0\n", "0000:41:00.0 ",
    "0000:41:00.8", "0000:4g:00.0", "GPU-0000:41:00.0", "nan", "None", "%s%n", "\ufeff", "é", "e\u0301",
)  # fmt: skip

CALL_TIMEOUT_S: Final = 60.0

STAND_IN_PAUSE_S: Final = 0.25
"""Between the calls of the stand-in for kubelet, which are not timed."""

LOWEST_PRIORITY: Final = 19
"""As nice(2) counts."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"


# --- the calls: a process of their own, so that kubelet's are measured beside them and not behind ----------


def draw_id(draw: random.Random) -> str:
    if draw.random() < 0.002:
        return "x" * 60_000
    if draw.random() < 0.7:
        return draw.choice(IDS)
    if draw.random() < 0.5:
        return str(0x29 + draw.randrange(10 ** draw.randrange(1, 30)))  # no group of one of `KUBELETS`
    return "".join(
        chr(draw.choice((draw.randrange(0x80), draw.randrange(0xD800)))) for _ in range(draw.randrange(40))
    )


def draw_ids(draw: random.Random) -> list[str]:
    count = draw.choice(
        (0, 1, 1, 1, 2, 3, 8, 64, 1024, 1025, 3000) if draw.random() < 0.1 else (0, 1, 1, 1, 2, 3)
    )
    few = [draw_id(draw) for _ in range(min(count, 8))]
    return [draw.choice(few) + (str(n) if draw.random() < 0.5 else "") for n in range(count)]


def draw_request(draw: random.Random, method: str) -> bytes:
    """A message that is one, about devices that are none, or not a caller's to have."""
    containers = draw.choice((0, 1, 1, 1, 1, 1, 2, 8, 24))
    if method == "Allocate":
        parts = [message("ContainerAllocateRequest")(devices_ids=draw_ids(draw)) for _ in range(containers)]
        return bytes(message("AllocateRequest")(container_requests=parts).SerializeToString())
    if method == "PreStartContainer":
        return bytes(message("PreStartContainerRequest")(devices_ids=draw_ids(draw)).SerializeToString())
    if method == "GetPreferredAllocation":
        parts = [
            message("ContainerPreferredAllocationRequest")(
                available_deviceIDs=draw_ids(draw),
                must_include_deviceIDs=draw_ids(draw) if draw.random() < 0.3 else [],
                allocation_size=draw.choice((0, 1, 2, 3, 500, -1, 2**31 - 1, -(2**31))),
            )
            for _ in range(containers)
        ]
        return bytes(message("PreferredAllocationRequest")(container_requests=parts).SerializeToString())
    return b""


def draw_body(draw: random.Random, method: str) -> bytes:
    if draw.random() < 0.5:
        return draw_request(draw, method)
    body = bytearray(draw_request(draw, draw.choice(METHODS)) if draw.random() < 0.6 else b"")
    for _ in range(draw.randrange(1, 6)):  # damaged: bits turned, cut short, or nothing but noise
        if body and draw.random() < 0.6:
            body[draw.randrange(len(body))] = draw.randrange(256)
        elif draw.random() < 0.5:
            body += draw.randbytes(draw.randrange(50))
        else:
            del body[draw.randrange(len(body) + 1) :]
    if draw.random() < 0.002:
        body += draw.choice((b"\x78\x01", b"\x0a\x00", b"\x0a\x02\x0a\x00", b"\0")) * draw.randrange(
            2_200_000
        )
    return bytes(body)


@dataclass
class Garbage:
    """Makes calls at a plugin's socket, and now and then at the control socket. One thread's."""

    draw: random.Random
    plugin: str
    control: str
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(self, calls: int, ends_at: float) -> None:
        made = 0
        while made < calls and time.monotonic() < ends_at:
            with self._channel(self.plugin) as channel:
                for _ in range(min(self.draw.randrange(1, 400), calls - made)):
                    self._one(channel)
                    made += 1
        self.outcomes["made"] += made

    def _one(self, channel: grpc.Channel) -> None:
        kinds: dict[Callable[[grpc.Channel], object], int] = {
            self._call: 80, self._abandoned: 8, self._unknown: 3, self._half_closed: 3, self._twice: 1,
            self._stream: 2, self._raw: 2, self._at_control: 1,
        }  # fmt: skip
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        try:
            kind(channel)
            outcome = "OK"
        except grpc.RpcError as error:
            status: Any = error
            outcome = status.code().name
            text = status.details() or ""
            if len(text) > 4096 or not text.isprintable():
                outcome = f"ODD TEXT {text[:80]!a}"
        except grpc.FutureCancelledError:
            outcome = "abandoned"
        except OSError as error:
            outcome = f"socket: {type(error).__name__}"
        self.outcomes[f"{kind.__name__.strip('_')}: {outcome}"] += 1

    def _method(self) -> str:
        return self.draw.choice(METHODS)

    def _call(self, channel: grpc.Channel) -> None:
        method = self._method()
        call: Any = channel.unary_unary(PLUGIN + method)
        call(draw_body(self.draw, method), timeout=CALL_TIMEOUT_S)

    def _abandoned(self, channel: grpc.Channel) -> None:
        method = self._method()
        call: Any = channel.unary_unary(PLUGIN + method)
        future = call.future(
            draw_body(self.draw, method), timeout=self.draw.choice((0.001, 0.01, CALL_TIMEOUT_S))
        )
        time.sleep(self.draw.choice((0.0, 0.0005, 0.002)))
        future.cancel()
        future.result(timeout=CALL_TIMEOUT_S)

    def _unknown(self, channel: grpc.Channel) -> None:
        name = "".join(self.draw.choice("aZ/.%_-~1") for _ in range(self.draw.randrange(1, 300)))
        call: Any = channel.unary_unary(self.draw.choice((PLUGIN, "/v1.Other/", "/")) + name)
        call(b"", timeout=CALL_TIMEOUT_S)

    def _half_closed(self, channel: grpc.Channel) -> None:
        call: Any = channel.stream_unary(PLUGIN + self._method())
        call(iter(()), timeout=CALL_TIMEOUT_S)

    def _twice(self, channel: grpc.Channel) -> None:
        method = self._method()
        call: Any = channel.stream_unary(PLUGIN + method)
        call(iter([draw_body(self.draw, method) for _ in range(2)]), timeout=CALL_TIMEOUT_S)

    def _stream(self, channel: grpc.Channel) -> None:
        """Listens for a moment, reading or not."""
        call: Any = channel.unary_stream(f"{PLUGIN}ListAndWatch")
        frames = call(b"", timeout=CALL_TIMEOUT_S)
        if self.draw.random() < 0.5:
            next(iter(frames))
        frames.cancel()

    def _raw(self, channel: grpc.Channel) -> None:
        """A connection that is no gRPC client's: noise, a preface and noise, or nothing; then it goes."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(1.0)
            peer.connect(self.plugin)
            parts = (b"", PREFACE, PREFACE + SETTINGS, self.draw.randbytes(self.draw.randrange(200)))
            peer.sendall(self.draw.choice(parts))
            peer.sendall(self.draw.choice(parts))

    def _at_control(self, channel: grpc.Channel) -> None:
        if self.draw.random() < 0.5:
            self._line_at_control()
            return
        # Never a HandOver that is one: that would be obeyed.
        path, body = self.draw.choice(
            (("View", self.draw.randbytes(30)), ("View", b""), ("HandOver", b"\x0a\x7f"), ("No", b""))
        )
        with self._channel(self.control) as control:
            call: Any = control.unary_unary(CONTROL + path)
            call(body, timeout=CALL_TIMEOUT_S)

    def _line_at_control(self) -> None:
        """As above: never a `hand_over`."""
        lines = (
            b'{"ask": "status"}\n',
            b'{"ask": "watch"}\n',
            b'{"ask": 1}\n',
            b"[" * 5000,
            self.draw.randbytes(200),
        )
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(CALL_TIMEOUT_S)
            peer.connect(self.control)
            peer.sendall(self.draw.choice(lines))
            if self.draw.random() < 0.5:
                peer.recv(1000)

    @contextmanager
    def _channel(self, path: str) -> Iterator[grpc.Channel]:
        options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
            yield channel


def call_garbage(plugin: str, control: str, calls: int, seed: int, seconds: float) -> None:
    """The process that calls; says what came of it as one line of JSON."""
    garbage = Garbage(random.Random(seed), plugin, control)
    garbage.run(calls, time.monotonic() + seconds)
    print(json.dumps(garbage.outcomes))


# --- kubelet's own calls: a process of their own as well -------------------------------------------------------


def call_as_kubelet(plugin: str, pause_s: float) -> None:
    """The process that allocates one GPU after the other until its standard input ends; says what it saw as one line of
    JSON: milliseconds by method, and refusals."""
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    gc.disable()
    threading.Thread(target=wait, name="standard input", daemon=True).start()
    times: dict[str, list[float]] = {"Allocate": [], "PreStartContainer": []}
    refused: list[str] = []
    options = [("grpc.default_authority", "localhost")]
    with grpc.insecure_channel(f"unix:{plugin}", options=options) as channel:
        turn = 0
        while not over.wait(pause_s):
            gpu = KUBELETS[turn % len(KUBELETS)]
            turn += 1
            container = message("ContainerAllocateRequest")(devices_ids=[gpu])
            for method, request in (
                ("Allocate", message("AllocateRequest")(container_requests=[container])),
                ("PreStartContainer", message("PreStartContainerRequest")(devices_ids=[gpu])),
            ):
                call: Any = channel.unary_unary(PLUGIN + method)
                body = request.SerializeToString()
                at_ns = time.perf_counter_ns()
                try:
                    call(body, timeout=CALL_TIMEOUT_S)
                except grpc.RpcError as error:
                    status: Any = error
                    refused.append(f"{method}: {status.code().name}: {status.details()}")
                times[method].append((time.perf_counter_ns() - at_ns) / 1e6)
    print(json.dumps({"times": times, "refused": refused}))


# --- the ledger --------------------------------------------------------------------------------------------

RESOURCES: Final = (
    "nvidia.com/gpu", "sandbox/pgpu", A100, H100, "", "cpu", "\x1b[31m", "x" * 300, "nvidia.com/" + "é" * 40,
)  # fmt: skip

CLAIMED: Final = ("gpu-0000-41-00-0", "vfio-0000-42-00-0", "gpu-0", "", "\0", "gpu-0000-99-00-0", "x" * 5000)


def draw_pods(draw: random.Random) -> list[Any]:
    """Pods that other plugins and DRA drivers serve, as List names them; none has one of `KUBELETS`."""
    make = POD_RESOURCES.message
    pods = []
    for _ in range(draw.choice((0, 1, 3, 30))):
        devices = [
            make("ContainerDevices")(
                resource_name=draw.choice(RESOURCES),
                device_ids=[draw_id(draw) for _ in range(draw.choice((0, 1, 2, 20)))],
            )
            for _ in range(draw.choice((0, 1, 2, 5)))
        ]
        claims = [
            make("DynamicResource")(
                claim_name=draw_id(draw), claim_namespace="default",
                claim_resources=[
                    make("ClaimResource")(
                        driver_name=draw.choice(("gpu.nvidia.com", "", "x" * 999)), pool_name="node",
                        device_name=draw.choice(CLAIMED),
                    )
                ],
            )
            for _ in range(draw.choice((0, 0, 1, 3)))
        ]  # fmt: skip
        container = make("ContainerResources")(name=draw_id(draw), devices=devices, dynamic_resources=claims)
        pods.append(make("PodResources")(name=draw_id(draw), namespace=draw_id(draw), containers=[container]))
    draw.shuffle(pods)
    return pods


def draw_checkpoint(draw: random.Random) -> bytes:
    """Kubelet's file: of a strange kubelet, damaged, or something else altogether."""
    entries = [
        {
            "PodUID": draw_id(draw),
            "ContainerName": "c",
            "ResourceName": draw.choice(RESOURCES),
            "DeviceIDs": draw.choice(
                ({"-1": [draw_id(draw)]}, [draw_id(draw)], None, {"0": None}, {"²": ["²"]})
            ),
            "AllocResp": draw.choice(("", "AAAA", "%%%", "x" * 999, None)),
        }
        for _ in range(draw.choice((0, 1, 5, 200)))
    ]
    content = json.dumps(
        {"Data": {"PodDeviceEntries": entries or None, "RegisteredDevices": {}}, "Checksum": 0}
    )
    text = content.encode()
    match draw.randrange(8):
        case 0:
            return text[: draw.randrange(len(text))]
        case 1:
            return draw.randbytes(500)
        case 2:
            return draw.choice((b"", b"null", b"[]", b"{}", b'{"Data":null}', b"\xff", b"[" * 100_000))
        case 3 if draw.random() < 0.1:
            return b" " * (17 * 1024 * 1024)
        case _:
            return text


# --- the whole ---------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What was seen. Times in milliseconds, memory in KiB."""

    outcomes: Counter[str]
    allocate_ms: list[float]
    pre_start_ms: list[float]
    refused: list[str]
    """Kubelet's own calls that were not answered as they should."""
    descriptors: tuple[int, int]
    rss_kib: tuple[int, int, int]
    """Before, at most, and at the end."""
    seconds: float
    load: float


@contextmanager
def no_collections() -> Iterator[None]:
    """The stand-in for kubelet keeps each list that it was sent, so Python's collections would take ever longer here,
    and Allocate waits for what List answers. Kubelet has no such pauses."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no VmRSS")


class Ledgers:
    """Changes what List and the file say, again and again, while it is open: each time one of `count` and one of
    `count`. They are drawn before, as kubelet's calls are timed in this process."""

    def __init__(self, node: Node, seed: int, count: int) -> None:
        self._node = node
        self._draw = random.Random(seed)
        self._lists = [draw_pods(self._draw) for _ in range(count)]
        self._files = [draw_checkpoint(self._draw) for _ in range(count)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledgers", daemon=True)

    def __enter__(self) -> Ledgers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=30.0)
        self._node.kubelet.list_besides(())
        self._node.kubelet.checkpoint.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self._node.kubelet.list_besides(self._draw.choice(self._lists))
            if self._draw.random() < 0.05:
                self._node.kubelet.fail_lists(1)
            # In one step, as kubelet writes it.
            draft = self._node.directory / "draft"
            with suppress(OSError):
                draft.write_bytes(self._draw.choice(self._files))
                draft.rename(self._node.kubelet.checkpoint)


def play(
    *, calls: int, seed: int, seconds: float, words: Sequence[str] = (), pause_s: float = 0.0
) -> Outcome:
    """A node, a daemon, `calls` calls and as many ledgers as there is time for. Raises AssertionError, TimeoutError."""
    with open_node() as node:
        for slot in (*range(0x23, 0x29), 0x41, 0x42):
            node.plug(slot, "2330", driver="vfio-pci", numa_node=slot % 2)
        node.plug(0x41, "1aef", function=1, class_code="040300", driver="vfio-pci")
        node.plug(0x51, "20b0", driver="vfio-pci")
        node.plug(0x52, "20b0", driver="vfio-pci")
        device_lists = {
            H100: dict.fromkeys((*KUBELETS, *OTHERS[:2]), HEALTHY), A100: dict.fromkeys(OTHERS[2:4], HEALTHY)
        }  # fmt: skip
        with node.daemon(*words) as daemon:
            node.wait_device_lists(device_lists)
            outcome = _beside(node, daemon, calls, seed, seconds, pause_s)
            node.wait_device_lists(device_lists, within_s=90.0)
            registered = [len(node.accepted(resource)) for resource in device_lists]
            assert registered == [1, 1], f"registered again: {registered}"
            node.assert_sound(daemon)
        restarts = [line for line in daemon.log if line["event"].startswith("actor.")]
        assert not restarts, restarts[:3]
    return outcome


def _beside(
    node: Node, daemon: DaemonProcess, calls: int, seed: int, seconds: float, pause_s: float
) -> Outcome:
    began = time.monotonic()
    # What the first calls leave for good (imports, tables, the control socket's own) is no leak.
    _in_a_process(node, 50, seed + 1, 60.0).communicate(timeout=120.0)
    descriptors, before = daemon.descriptors, rss_kib(daemon.pid)
    ledgers = Ledgers(node, seed, count=min(200, calls // 10))
    kubelet = _kubelet_in_a_process(node, pause_s)
    process = _in_a_process(node, calls, seed, seconds)
    refused: list[str] = []
    peak = before
    with ledgers, no_collections():
        turn = 0
        while process.poll() is None:
            daemon.assert_alive()
            gpu = KUBELETS[turn % len(KUBELETS)]
            turn += 1
            for call in (
                node.kubelet.allocate,
                node.kubelet.prestart,
            ):  # whose device lists show what it would die of
                try:
                    call(H100, [gpu])
                except grpc.RpcError as error:
                    status: Any = error
                    refused.append(f"{call.__name__}: {status.code().name}: {status.details()}")
            peak = max(peak, rss_kib(daemon.pid))
            time.sleep(STAND_IN_PAUSE_S)
        timed, complaint = kubelet.communicate(timeout=120.0)
        assert kubelet.returncode == 0, complaint[-2000:]
    said, complaint = process.communicate(timeout=30.0)
    assert process.returncode == 0, complaint[-2000:]
    outcomes: Counter[str] = Counter(json.loads(said))
    seen = json.loads(timed)
    eventually(lambda: daemon.descriptors <= descriptors, "the descriptors' return", within_s=60.0)
    return Outcome(
        outcomes=outcomes,
        allocate_ms=sorted(seen["times"]["Allocate"]),
        pre_start_ms=sorted(seen["times"]["PreStartContainer"]),
        refused=refused + seen["refused"],
        descriptors=(descriptors, daemon.descriptors),
        rss_kib=(before, peak, rss_kib(daemon.pid)),
        seconds=time.monotonic() - began,
        load=os.getloadavg()[0],
    )


def _in_a_process(node: Node, calls: int, seed: int, seconds: float) -> subprocess.Popen[str]:
    sockets = (str(node.endpoint(H100)), str(node.directory / "s/gpuactors.sock"))
    return _part("--call", *sockets, f"--calls={calls}", f"--seed={seed}", f"--seconds={seconds}")


def _kubelet_in_a_process(node: Node, pause_s: float) -> subprocess.Popen[str]:
    return _part("--kubelet", str(node.endpoint(H100)), f"--pause-s={pause_s}")


def _part(*words: str) -> subprocess.Popen[str]:
    """A process of this program."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.process.garbage", *words],
        env=clean_environment({"GRPC_VERBOSITY": "NONE"}), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip


def main() -> int:
    """`python -m tests.process.garbage --calls 100000`: 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1800.0, help="no more calls after so long")
    parser.add_argument(
        "--p99-ms", type=float, default=50.0, help="what kubelet's Allocate may take, of 100 the 99th"
    )
    parser.add_argument("--call", nargs=2, metavar=("PLUGIN", "CONTROL"), help=argparse.SUPPRESS)
    parser.add_argument("--kubelet", metavar="PLUGIN", help=argparse.SUPPRESS)
    parser.add_argument("--pause-s", type=float, default=0.01, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.kubelet:
        call_as_kubelet(asked.kubelet, asked.pause_s)
        return 0
    if asked.call:
        plugin, control = asked.call
        os.nice(LOWEST_PRIORITY)
        call_garbage(plugin, control, asked.calls, asked.seed, asked.seconds)
        return 0
    seen = play(
        calls=asked.calls, seed=asked.seed, seconds=asked.seconds, words=["--log-level=error"], pause_s=0.01
    )
    for kind, count in sorted(seen.outcomes.items()):
        print(f"{count:8,}  {kind}")
    wrong = judged(seen, asked.calls)
    for name, times in (("Allocate", seen.allocate_ms), ("PreStartContainer", seen.pre_start_ms)):
        p50, p99 = (times[int(len(times) * q)] for q in (0.5, 0.99))
        print(
            f"kubelet's {name}: {len(times):,} calls, p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {times[-1]:.1f} ms"
        )
        if name == "Allocate" and p99 > asked.p99_ms:
            wrong.append(f"p99 of kubelet's Allocate is {p99:.1f} ms, over {asked.p99_ms:g} ms")
    before, peak, after = seen.rss_kib
    print(f"memory: {before:,} KiB before, {peak:,} KiB at most, {after:,} KiB at the end")
    print(f"descriptors: {seen.descriptors[0]} before, {seen.descriptors[1]} at the end")
    print(f"{seen.seconds:.0f} s, load {seen.load:.1f}, seed {asked.seed}")
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


def judged(seen: Outcome, calls: int) -> list[str]:
    """What is not as it must be, times apart."""
    wrong = [f"{count} x {kind}" for kind, count in seen.outcomes.items() if "ODD TEXT" in kind]
    if seen.outcomes["made"] != calls:
        wrong.append(f"{seen.outcomes['made']:,} calls were made, not {calls:,}: it took too long")
    if timed_out := sum(n for kind, n in seen.outcomes.items() if kind == "call: DEADLINE_EXCEEDED"):
        wrong.append(f"{timed_out} calls were never answered")
    # Kubelet's list has claims of other drivers that no CDI device places: they may have any GPU.
    if refused := [text for text in seen.refused if "nothing says which GPU that is" not in text]:
        wrong.append(f"{len(refused)} of kubelet's own calls were refused: {refused[:3]}")
    if not seen.allocate_ms:
        wrong.append("kubelet called nothing meanwhile")
    return wrong


if __name__ == "__main__":
    sys.exit(main())

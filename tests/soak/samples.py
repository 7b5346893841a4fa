"""What the daemon of a soak takes: memory, descriptors, threads, journal and requests, every ten seconds.

`Samples` is a thread that reads the kernel's accounts and the API server's log, and writes a line of CSV each time: a
soak that is killed has its figures.
"""

from __future__ import annotations

import csv
import http.client
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from tests.bench.procfs import memory
from tests.node import daemonset
from tests.node.claims import daemon_process
from tests.node.cluster import Api, ApiError
from tests.soak.audit import Requests
from tests.soak.sample import Sample
from tests.support.background import in_background

EVERY_S: Final = 10.0
JOURNAL: Final = Path("/var/lib/gpuactors/journal")
COLUMNS: Final = (
    "at_s",
    "process",
    "rss_mib",
    "private_mib",
    "descriptors",
    "threads",
    "journal_mib",
    "requests",
)


@final
class Samples:
    """Takes them while `taking` is open."""

    def __init__(self, directory: Path, began: float) -> None:
        self._file = directory / "samples.csv"
        self._requests = Requests(directory / "audit.log")
        self._began = began
        self.taken: list[Sample] = []
        self._process = 0
        self.missed = 0
        """Times at which there was no daemon, or nobody who knew it."""

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Samples while the context is open."""
        with in_background(self._take, "samples"):
            yield

    def _take(self, over: threading.Event) -> None:
        api = Api()
        with self._file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            while not over.wait(EVERY_S):
                try:
                    sample = self._sample(api)
                except (ApiError, OSError, http.client.HTTPException, AssertionError, KeyError):
                    self.missed += 1  # it is restarted just now, or the API server is away
                    continue
                self.taken.append(sample)
                writer.writerow(
                    [sum(sample.requests.values()) if name == "requests" else getattr(sample, name)
                     for name in COLUMNS]
                )  # fmt: skip
                file.flush()

    def _sample(self, api: Api) -> Sample:
        process = self._process = self._running(api)
        now = memory(process)
        journal = sum(path.stat().st_size for path in JOURNAL.rglob("*") if path.is_file())
        return Sample(
            round(time.monotonic() - self._began, 1), process, round(now.rss_kib / 1024, 2),
            round(now.private_kib / 1024, 2), len(os.listdir(f"/proc/{process}/fd")), now.threads,
            round(journal / 2**20, 3), self._requests.look(),
        )  # fmt: skip

    def _running(self, api: Api) -> int:
        """The daemon's PID: as long as it lives nobody is asked. Raises AssertionError while there is none."""
        if self._process and b"run" in _command(self._process):
            return self._process
        pods = daemonset.pods_of(api)
        assert len(pods) == 1, f"{len(pods)} pods of the DaemonSet"
        return daemon_process(daemonset.daemon_of(pods[0]).uid)


def _command(process: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return []

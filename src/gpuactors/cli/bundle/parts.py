"""The parts of the archive, in its order: versions, settings, the view, the doctor, the metrics, the journal.

Each is what a command shows. Left out are credentials, the environment, and kubelet's own files: those have the answers
of other device plugins, with the variables of containers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from typing import Final, NoReturn

from gpuactors import VERSION
from gpuactors.cli import shown_settings
from gpuactors.cli.bundle.archive import Part
from gpuactors.cli.bundle.metrics import metrics_page
from gpuactors.cli.doctor import settings
from gpuactors.cli.doctor.run import examined
from gpuactors.cli.inspect import report, view
from gpuactors.cli.progress import Progress
from gpuactors.config import Resolved
from gpuactors.control.client import read_status
from gpuactors.control.path import socket_path
from gpuactors.core.values.names import is_subdomain
from gpuactors.daemon.about import node_of
from gpuactors.observe.journal import DIRECTORY, JOURNAL_FILE_MAX_BYTES, files_of
from gpuactors.process.plain_files import read_plain

_FILE_MAX_BYTES: Final = 4 * JOURNAL_FILE_MAX_BYTES
"""The most bytes of a journal's file that are read: the daemon ends one with the line that makes it too long, and a
line has 16 MiB at most. Anything longer by that name is cut: it must not fill the memory of the daemon's container."""

_README: Final = """\
{directory}: written by gpuactors bundle, version {version}, at {time}.

{listed}

A part that failed has its error in NAME.error.

NAMES. It names the node, pods, namespaces, virtual machines, claims, compute domains and their UIDs, PCI addresses,
paths, the API server's address, and the processes that have GPUs open.

NO SECRETS. It has no token, certificate or password, of a kubeconfig file only the path, of the environment only the
settings of gpuactors, and nothing from inside virtual machines.

NOT IN IT. The daemon's log (kubectl -n gpuactors logs POD, and with --previous), and kubelet's files, which have the
variables of other plugins' containers.

REPLAY. gpuactors replay {directory}
Page with the timeline of each GPU, where gpuactors[simulation] is installed:
gpuactors replay --html incident.html {directory}
"""


def directory_of(resolved: Resolved) -> str:
    """Return the directory in the archive; a host's name may be none of a file."""
    node = node_of(resolved.config)
    return f"gpuactors-{node}" if is_subdomain(node) else "gpuactors"


def readme(directory: str) -> Callable[[str], str]:
    """Return the function that makes the README of the list of files."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    return lambda listed: _README.format(directory=directory, time=time, version=VERSION, listed=listed)


def parts(resolved: Resolved, progress: Progress, page: Callable[[str], str] | None) -> Iterator[Part]:
    """Yield the parts. `page` makes the page of a journal's directory; None where nothing here can."""
    inspected = cache(lambda: view.inspect(resolved.config, progress))
    examination = cache(lambda: examined(resolved, pre=False, progress=progress))
    shown = cache(lambda: view.shown(resolved, progress))
    journal = os.path.join(resolved.config.state_dir, DIRECTORY)

    def as_table() -> str:
        return "\n".join([shown().heading, *shown_settings.as_table(shown().settings)]).strip("\n")

    texts: tuple[tuple[str, str, Callable[[], str]], ...] = (
        ("versions.txt", "gpuactors, Python, kernel, libraries", _versions),
        ("settings.txt", "gpuactors config show", as_table),
        ("settings.json", "the same", lambda: shown_settings.as_json(shown().settings)),
        ("inspect.txt", "gpuactors inspect -o wide", lambda: report.as_wide(inspected())),
        ("inspect.json", "gpuactors inspect -o json", lambda: report.as_json(inspected())),
        ("doctor.txt", "gpuactors doctor", lambda: examination().text()),
        ("doctor.json", "gpuactors doctor -o json", lambda: examination().json()),
    )
    for name, what, text in texts:
        yield Part(name, what, _encoded(text))
    yield Part("metrics.txt", "the running daemon's /metrics", lambda: _metrics(resolved))
    yield from _journal(journal)
    if page is not None:
        yield Part("replay.html", "gpuactors replay --html", _encoded(lambda: page(journal)))


def _encoded(text: Callable[[], str]) -> Callable[[], bytes]:
    return lambda: f"{text()}\n".encode(errors="backslashreplace")


def _versions() -> str:
    system = os.uname()
    names = [
        re.split(r"[^\w.-]", requirement)[0]
        for requirement in metadata.requires("gpuactors") or ()
        if "extra ==" not in requirement
    ]
    return "\n".join(
        (
            f"gpuactors {VERSION}",
            f"Python {sys.version}",
            f"{system.sysname} {system.release} {system.version} {system.machine}",
            *(f"{name} {metadata.version(name)}" for name in sorted(names)),
        )
    )


def _metrics(resolved: Resolved) -> bytes:
    running = read_status(socket_path(str(resolved.config.state_dir)))
    return metrics_page(settings.of_daemon(resolved, running).config)


def _journal(directory: str) -> Iterator[Part]:
    """Yield the journal's files, oldest first; if they cannot be listed, a part that fails by the reason."""
    try:
        paths = files_of(directory)
    except OSError as exc:
        yield Part(DIRECTORY, "the journal", partial(_raise, exc))
        return
    for path in paths:
        name = f"{DIRECTORY}/{os.path.basename(path)}"
        yield Part(name, "the journal", partial(read_plain, path, _FILE_MAX_BYTES))


def _raise(error: OSError) -> NoReturn:
    raise error

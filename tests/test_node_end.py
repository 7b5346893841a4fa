"""How `./do node` ends: nothing is left of its nodes, whenever a signal comes, and after a run that was killed.

A kit whose programs only sleep is brought up by `run.py` itself. Its processes are found by a variable of their
environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.node.lane import CGROUPS, Lane, end
from tests.node.run import CHECKOUT, IMAGE_VARIABLE, KIT_VARIABLE
from tests.support.patience import patient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups are made by root")

MARK: Final = "TEST_NODE_END"
WAIT_S: Final = patient(30.0)

INSTALL: Final = """
mkdir -p "$1/run" && cd "$1"
cat >env.sh </dev/null
cat >in.sh <<'END'
#!/bin/bash
# A node's namespaces, and a pytest that does not end by itself.
[ "$1" != sh ] || exit 0  # mounts
[ "$1" = bash ] || exec "$@"
touch "$TEST_NODE_END/playing-$TEST_NODE_LANE"
exec sleep 1000
END
cat >up.sh <<'END'
#!/bin/bash
# kubelet ends by no signal but SIGKILL, and its pid is nowhere.
setsid unshare --mount sh -c "trap '' TERM; sleep 1001 & wait" </dev/null >/dev/null 2>&1 &
touch "$TEST_NODE_END/starting-$TEST_NODE_LANE"
[ ! -e "$TEST_NODE_END/slow" ] || sleep 1002
END
cat >down.sh <<'END'
#!/bin/bash
[ ! -e "$TEST_NODE_END/starting-$TEST_NODE_LANE" ] || touch "$TEST_NODE_END/wiped-$TEST_NODE_LANE"
END
cat >worker.sh <<'END'
#!/bin/bash
"$2/up.sh" && touch "$TEST_NODE_END/joined-$3"
END
chmod +x *.sh
"""


Run = subprocess.Popen[str]


@dataclass(frozen=True)
class Kit:
    """The kit, and what it has done."""

    directory: Path

    def run(self, *words: str, by: Sequence[str] = (sys.executable, "-m", "tests.node.run")) -> Run:
        """Starts `./do node` with set A."""
        variables = {
            MARK: str(self.directory), KIT_VARIABLE: str(self.directory / "kit"), IMAGE_VARIABLE: "none", "CI": "",
            "TEST_NODE_DIRECTORY": str(self.directory / "node"), "TMPDIR": str(self.directory),
        }  # fmt: skip
        return subprocess.Popen(
            (*by, "--set", "A", *words), cwd=CHECKOUT, env={**os.environ, **variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def wait_for(self, name: str) -> None:
        """Waits until the kit has done it."""
        eventually((self.directory / name).exists, name)

    def processes(self) -> list[str]:
        """The command lines of what it has started, this test's own runs included."""
        mark = f"{MARK}={self.directory}".encode()
        found: list[str] = []
        for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    def cgroups(self) -> list[Path]:
        """Those of both lanes, and of their workers."""
        lanes = [Lane(number, self.directory / name) for number, name in enumerate(("node", "node-1"))]
        every = [one for lane in lanes for one in (lane, *lane.workers)]
        return [path for one in every for path in CGROUPS.glob(f"**/{one.cgroup}")]


def eventually(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "install.sh").write_text(INSTALL)
    kit = Kit(tmp_path)
    yield kit
    lanes = [Lane(number, tmp_path / name) for number, name in enumerate(("node", "node-1"))]
    end([one for lane in lanes for one in (lane, *lane.workers)], {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("lanes", ["1", "2"])
def test_a_signal_while_scenarios_are_played_leaves_nothing(
    kit: Kit, lanes: str, number: signal.Signals
) -> None:
    run = kit.run("--lanes", lanes)
    kit.wait_for("playing-0")
    run.send_signal(number)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130, said
    assert kit.processes() == []
    assert kit.cgroups() == []
    assert (kit.directory / f"wiped-{int(lanes) - 1}").exists()


@pytest.mark.parametrize("lanes", ["1", "2"])
def test_a_signal_while_the_nodes_are_started_leaves_nothing(kit: Kit, lanes: str) -> None:
    (kit.directory / "slow").touch()
    run = kit.run("--lanes", lanes)
    kit.wait_for(f"starting-{int(lanes) - 1}")
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130, said
    assert kit.processes() == []
    assert kit.cgroups() == []


def test_a_signal_while_a_cluster_of_two_nodes_is_played_leaves_nothing(kit: Kit) -> None:
    run = kit.run("--nodes", "2")
    kit.wait_for("playing-0")
    assert (kit.directory / "joined-1").exists()
    assert not (kit.directory / "joined-2").exists(), "that one joins in a scenario"
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode == 130, said
    assert kit.processes() == []
    assert kit.cgroups() == []


def test_the_nodes_of_a_killed_cluster_are_ended_by_the_next_run(kit: Kit) -> None:
    killed = kit.run("--nodes", "2")
    kit.wait_for("playing-0")
    killed.kill()
    killed.wait(timeout=WAIT_S)  # what it has started has its output
    (kit.directory / "playing-0").unlink()
    workers = Lane(0, kit.directory / "node").workers
    assert workers[0].is_there(), "nothing was left: this tests nothing"
    run = kit.run()  # of one node
    kit.wait_for("playing-0")
    assert not any(worker.is_there() for worker in workers)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=WAIT_S)
    assert kit.processes() == []
    assert kit.cgroups() == []


def test_a_signal_for_just_alone_ends_the_run(kit: Kit) -> None:
    run = kit.run(by=(str(Path(sys.executable).parent / "just"), "node"))
    kit.wait_for("playing-0")
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=WAIT_S)
    assert run.returncode != 0, said
    assert kit.processes() == []
    assert kit.cgroups() == []


def test_more_signals_do_not_disturb_the_end(kit: Kit) -> None:
    run = kit.run()
    kit.wait_for("playing-0")
    while run.poll() is None:
        run.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    # Python gives signals back to the kernel as the last thing that it does.
    assert run.returncode in (130, -signal.SIGTERM), run.communicate()[0]
    assert kit.processes() == []
    assert kit.cgroups() == []


def test_what_a_killed_run_has_left_is_ended_by_the_next_one(kit: Kit) -> None:
    (kit.directory / "slow").touch()
    killed = kit.run("--lanes", "2")
    kit.wait_for("starting-1")
    killed.kill()
    killed.communicate(timeout=WAIT_S)
    assert len(kit.processes()) >= 2, "nothing was left: this tests nothing"
    assert kit.cgroups()
    (kit.directory / "slow").unlink()
    run = kit.run()  # with one lane: it has to end both
    kit.wait_for("playing-0")
    assert not [words for words in kit.processes() if "1002" in words]
    assert not Lane(1, kit.directory / "node-1").is_there()
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=WAIT_S)
    assert kit.processes() == []
    assert kit.cgroups() == []


DO: Final = """#!/bin/bash
[ "$1" = node ] || exit 0
trap 'touch ended; exit 130' TERM
sleep 1000 &
touch began
wait
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_for_ci_alone_ends_the_nodes_first(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(CHECKOUT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "do").write_text(DO)
    (tmp_path / "do").chmod(0o755)
    ci = subprocess.Popen((str(tmp_path / ".ci" / "run"),), start_new_session=True, stdout=subprocess.DEVNULL)
    eventually((tmp_path / "began").exists, "the node")
    ci.send_signal(number)
    ci.wait(timeout=WAIT_S)
    ended = (tmp_path / "ended").exists()
    os.killpg(ci.pid, signal.SIGKILL)
    assert ended
    assert ci.returncode == 143

"""A stand-in for the operator's command and the fabric manager behind it, by what NVIDIA's tool and contract say.

It is a program of its own: what it activates stays active when a daemon is killed. It can be held in the middle of an
act, before or after it has its effect. An active partition, or one that overlaps an active one, cannot be activated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from gpuactors.decoding import decode_json
from tests.support.patience import patient

Moment = Literal["before", "after"]

_HOLD_S: Final = patient(60.0)

_PROGRAM: Final = """\
#!{python} -S
import json, os, sys, time
home = {home!r}
devices = {devices!r}
word, number = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""

def active():
    return set(json.load(open(home + "/active")))

def hold(moment):
    until = time.monotonic() + {hold_s}
    while os.path.exists(f"{{home}}/hold {{word}} {{moment}}"):
        open(f"{{home}}/held {{word}} {{moment}}", "w").close()
        if time.monotonic() > until:
            sys.exit("nobody let it go on")
        time.sleep(0.005)

if word == "query":
    hold("before")
    now = active()
    if os.path.exists(home + "/away"):
        print("Failed to connect to Fabric Manager instance.")
        sys.exit(1)
    print(json.dumps({{"numPartitions": len(devices), "partitionInfo": [
        {{"partitionId": int(n), "isActive": int(n in now), "numGpus": len(of), "gpuInfo": [
            {{"physicalId": 0, "uuid": "", "pciBusId": a}} for a in of]}}
        for n, of in devices.items()]}}))
    sys.exit()

hold("before")
now = active()
if word == "activate" and any(set(devices[n]) & set(devices[number]) for n in now):
    print("Failed to activate partition. fmReturn: -12")
    sys.exit(244)
if word == "deactivate" and number not in now:
    print("Failed to deactivate partition. fmReturn: -11")
    sys.exit(245)
now = now | {{number}} if word == "activate" else now - {{number}}
with open(home + "/active.new", "w") as file:
    json.dump(sorted(now), file)
os.rename(home + "/active.new", home + "/active")
with open(home + "/acts", "a") as file:
    print(word, number, file=file)
hold("after")
"""


class FabricManagerStandIn:
    """One fabric manager with the command `path`."""

    def __init__(
        self, home: Path, partitions: Mapping[str, Sequence[str]], python: str = sys.executable
    ) -> None:
        """`partitions`: the PCI addresses of the GPUs of each, by its number. `python`: where the command runs."""
        home.mkdir()
        self._home: Final = home
        self.path: Final = home / "command"
        self.restart()
        (home / "acts").touch()
        self.path.write_text(
            _PROGRAM.format(
                python=python,
                home=str(home),
                devices={k: [*v] for k, v in partitions.items()},
                hold_s=_HOLD_S,
            )
        )
        self.path.chmod(0o755)

    @property
    def active(self) -> set[str]:
        """The numbers of the partitions that are active."""
        return set(decode_json((self._home / "active").read_bytes(), list[str]))

    @property
    def acts(self) -> list[str]:
        """What was done, each `activate 1` or `deactivate 1`, in its order."""
        return (self._home / "acts").read_text().splitlines()

    def restart(self, active: Collection[str] = ()) -> None:
        """Restart it: its partitions are gone, or these are active."""
        (self._home / "active").write_text(json.dumps(sorted(active)))

    def go_away(self) -> None:
        """Let no query reach it."""
        (self._home / "away").touch()

    def come_back(self) -> None:
        (self._home / "away").unlink()

    def hold(self, word: str, moment: Moment) -> None:
        """Stop each such act at this moment: before its effect, or after it and before the command ends."""
        (self._home / f"held {word} {moment}").unlink(missing_ok=True)
        (self._home / f"hold {word} {moment}").touch()

    def is_held(self, word: str, moment: Moment) -> bool:
        """Return whether one has come to that moment."""
        return (self._home / f"held {word} {moment}").exists()

    def let_go(self) -> None:
        """Let each act that is held go on."""
        for path in self._home.glob("hold *"):
            path.unlink()

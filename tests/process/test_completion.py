"""Completion as a user has it: bash on a terminal has read the script, and Tab is pressed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpuactors.cli.commands import cli
from gpuactors.cli.completion import script
from tests.process.node import open_node
from tests.support.terminal import OnTerminal

BASH = ("/bin/bash", "--noprofile")
GPU = "0000:23:00.0"


def test_bash_completes_commands_flags_and_the_addresses_of_the_daemon_s_gpus(tmp_path: Path) -> None:
    rc = tmp_path / "rc"
    rc.write_text(f"PS1='$ '\nbind 'set bell-style none'\n{script(cli, 'bash')}\n")
    program = tmp_path / "gpuactors"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuactors "$@"\n')
    program.chmod(0o755)
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x24, "2330", driver="vfio-pci")
        state = f"--state-dir={node.directory / 's'}"
        with node.daemon() as daemon:
            daemon.wait_event("daemon.serving")
            env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
            with OnTerminal("--rcfile", str(rc), "-i", program=BASH, env=env, columns=120) as bash:
                bash.wait_text("$")
                bash.type("gpuactors expl\t")
                bash.wait_text("$ gpuactors explain")
                bash.type(f"{state} 0000:23\t")
                bash.wait_text(f"{state} {GPU}")

#!/usr/bin/python3
"""Partitions of an NVLink fabric by NVIDIA's tool: an example of what `--partition-command` names.

`command.py query` prints the fabric manager's partitions, `command.py activate 3` and `command.py deactivate 3` change
one. It ends with the tool's own status, which is 0 if the fabric manager has done it. Build the tool, fmpm, from
https://github.com/NVIDIA/Fabric-Manager-Client. The fabric manager needs FABRIC_MODE=1 and FM_CMD_UNIX_SOCKET_PATH.
"""

import os
import sys

TOOL = os.environ.get("FMPM", "/usr/bin/fmpm")
SOCKET = os.environ.get("FABRIC_MANAGER_SOCKET", "/run/nvidia-fabricmanager/socket")

OPTIONS = {"query": "-l", "activate": "-a", "deactivate": "-d"}

word, *number = sys.argv[1:]
os.execv(TOOL, [TOOL, "--unix-domain-socket", SOCKET, OPTIONS[word], *number])

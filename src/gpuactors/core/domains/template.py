"""The configuration of nvidia-imex as NVIDIA's compute-domain daemon wants it: a template in the domain's directory.
The daemon makes `imexd.cfg` of it, beside it, at each start. It ends at once without it.

KEY=VALUE, as in NVIDIA's IMEX guide; IMEX has defaults for the other keys. The two placeholders are those of Go's
text/template that the daemon fills in: its pod's address, and its file with the domain's nodes.

A file of its own: a text in NVIDIA's format, apart from the decisions about claims.
"""

from __future__ import annotations

from typing import Final

NAME: Final = "imexd.cfg.tmpl"
"""The file's name in the domain's directory."""

TEXT: Final = """\
# Written by gpuactors at each prepare of the domain's daemon; changes are lost.
# To stderr, so that the log is the pod's.
LOG_LEVEL=4
LOG_FILE_NAME=
LOG_USE_SYSLOG=0
# The compute-domain daemon starts nvidia-imex, and watches it.
DAEMONIZE=0
# Who takes part, and how often a node that cannot be reached yet is tried: the domain's nodes come one by one.
IMEX_NODE_CONFIG_FILE={{.IMEXDaemonNodesConfigPath}}
IMEX_WAIT_FOR_QUORUM=NONE
# nvidia-imex-ctl asks here whether this node is ready.
IMEX_CMD_ENABLED=1
IMEX_CMD_BIND_INTERFACE_IP={{.IMEXCmdBindInterfaceIP}}
IMEX_CMD_PORT=50005
"""

"""Fakes of what is around the daemon: a node's directory tree, a kubelet, an API server; and scenarios on them. Beside
them is the page of a replay. Used by `gpuactors simulate`, `gpuactors replay --html` and the tests. A distribution of
its own, `gpuactors[simulation]`.

May import any package of gpuactors but the command line, which alone imports this one. Must not know how the daemon
decides: a fake that shares the daemon's logic would share its mistakes.
"""

from typing import Final

VERSION: Final = "0.1.0"
"""That of the pyproject.toml beside it, which a test compares; the command compares it with the daemon's."""

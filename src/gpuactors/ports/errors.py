"""The errors that adaptors raise. The commands catch some of them, and import no other part of a port."""

from __future__ import annotations

from gpuactors.core.values.text import encodable


class PortError(Exception):
    """An error outside the daemon, as a sentence that can be encoded whatever bytes its names contain."""

    def __init__(self, text: str) -> None:
        super().__init__(encodable(text))


class HostError(PortError):
    """The host could not be read; the text names what, where and the remedy."""


class HostShortError(HostError):
    """The host could not be read for lack of descriptors, memory or threads. This is no fault of the part that was to
    be read."""


class UeventsOverflowError(PortError):
    """The kernel dropped uevents (ENOBUFS); the source still works."""


class KubeletError(PortError):
    """Kubelet or our endpoint for it failed; the text names what, where and the remedy."""


class ControlError(PortError):
    """There is no control socket; the text names what, where and the remedy."""


class ControlTakenError(ControlError):
    """Another live daemon has the control socket."""


class ControlBlockedError(ControlError):
    """A daemon serves that cannot be asked to hand over: this one must not."""


class StateFileError(PortError):
    """A file of the state directory, or that of NFD, cannot be read or written; the text names which, why and the
    consequence."""


class DirectoryLeftError(StateFileError):
    """The files of a claim are removed, and of a directory that its container had mounted something is left; the text
    names what, and why."""

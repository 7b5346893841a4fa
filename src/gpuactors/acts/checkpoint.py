"""The file `gpuactors-checkpoint.json` of a DRA driver: read once at the start, written whole for each change.

    {"checksum":"sha256:<64 hex digits>","checkpoint":{…}}

The checksum is of the bytes of the inner object as they are stored. (NVIDIA's driver has it of the structures as it
would write them, so that a field more makes the file of another version corrupt: NVIDIA issues 1080, 1326.) The content
is `core/claims/checkpoint.py`'s.

NVIDIA's driver has the same directory, and calls its file `checkpoint.json`, as this program did once. One of gpuactors
by that name is the newest there is (a daemon that knows the new name leaves none): it is renamed. One of theirs is read
and never touched, and neither is one of nobody's.

Must never lead to a start that takes a lost content for an empty one: a corrupt file is set aside and said, until a new
one is written; a newer one, and one that cannot be read, are not touched.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Final, final

from msgspec import structs

from gpuactors import limits
from gpuactors.acts.disk import Disk, KeptDirectory, replace, temporary_of, unlink_if_there
from gpuactors.acts.theirs import FILE_NAME as THEIR_FILE_NAME
from gpuactors.acts.theirs import TheirClaims, frozen_json
from gpuactors.core.claims.checkpoint import (
    VERSION,
    Checkpoint,
    Origin,
    Restored,
    Theirs,
    decoded,
    encoded,
    version_of,
)
from gpuactors.core.claims.stored import models_of
from gpuactors.core.claims.theirs import Whose, whose
from gpuactors.core.values.claim import Json
from gpuactors.core.values.quote import quoted
from gpuactors.decoding import decode_json
from gpuactors.ports.errors import HostShortError, StateFileError

CORRUPT_FILES_KEPT: Final = 8
"""Limit on the corrupt checkpoints that are kept under names of their own, to find the cause: a disk that corrupts each
one must not fill up with them."""

FILE_NAME: Final = "gpuactors-checkpoint.json"

OLD_FILE_NAME: Final = THEIR_FILE_NAME
"""The name up to version 0.1, and that of NVIDIA's driver."""

_CORRUPT: Final = f"{FILE_NAME}.corrupt-"
_OLD_CORRUPT: Final = f"{OLD_FILE_NAME}.corrupt-"

_DEPTH_MAX: Final = 128
"""A claim's parameters have up to 32 levels, and are 6 deep in the file."""

_FORM: Final = re.compile(rb'\{"checksum":"sha256:([0-9a-f]{64})","checkpoint":(\{.*\})\}\n?', re.DOTALL)


class CheckpointNewerError(StateFileError):
    """The checkpoint was written by a newer daemon that an older one cannot follow. Nothing was touched."""


@final
class CheckpointFile:
    """The file in a driver's directory below kubelet's `plugins`, which is made when it is first written."""

    def __init__(self, disk: Disk, directory: str, boot_id: str, theirs: TheirClaims) -> None:
        """`boot_id` is the kernel's, /proc/sys/kernel/random/boot_id."""
        self._disk = disk
        self._directory = directory
        self._kept = KeptDirectory(disk, directory)
        self._path = os.path.join(directory, FILE_NAME)
        self._old_path = os.path.join(directory, OLD_FILE_NAME)
        self._boot_id = boot_id
        self._theirs = theirs

    def read(self, *, touches: bool = True) -> Restored:
        """Read the checkpoint of the previous daemon, and that of NVIDIA's driver. Sets a corrupt file aside, and
        removes a half written one, if it `touches` any: not beside a daemon that serves.

        Raises `CheckpointNewerError`; `StateFileError` if it cannot be read, or not be set aside.
        """
        old = self._content(self._old_path)
        is_ours = old is not None and whose(old) is Whose.OURS
        if is_ours and touches:
            self._rename_old()
        restored = self._read(self._old_path if is_ours and not touches else self._path, touches=touches)
        if old is not None and not is_ours:
            restored = self._with_foreign(restored, old)
        if not touches:
            return restored
        temporary = temporary_of(self._path)
        with suppress(OSError):  # the next write replaces it
            if os.path.basename(temporary) in self._disk.names(self._directory):
                unlink_if_there(self._disk, temporary)
        return restored

    def _content(self, path: str) -> bytes | None:
        """Read a file; None if it is not there. Raises `StateFileError`."""
        try:
            return self._disk.read(path, limits.CLAIMS_FILE_MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateFileError(
                f"cannot read {path} ({error.strerror}): it is unknown which GPU was bound for which claim, "
                "so none is touched; check the disk and the permissions, then start again"
            ) from None

    def _rename_old(self) -> None:
        """Give gpuactors' own file the new name."""
        try:
            self._disk.rename(self._old_path, self._path)
            self._disk.sync_directory(self._directory)
        except OSError as error:
            raise StateFileError(
                f"cannot rename {self._old_path} to {FILE_NAME} ({error.strerror}): check the disk; it is tried again"
            ) from None

    def _with_foreign(self, restored: Restored, content: bytes) -> Restored:
        """Add to `restored` what a file of another program says. Raises `StateFileError`."""
        if whose(content) is Whose.THEIRS:
            return structs.replace(restored, theirs=self._read_theirs(content))
        unknown = f"{self._old_path} is neither gpuactors' nor NVIDIA's checkpoint, and is left as it is"
        if restored.origin is not Origin.NONE:
            return structs.replace(restored, sentence=f"{restored.sentence}; {unknown}")
        return self._corrupt(unknown)

    def _read_theirs(self, content: bytes) -> Theirs:
        try:
            return self._theirs.read(content, self._boot_id)
        except ValueError as error:
            reason = quoted(str(error), limits.QUOTED_NAME_CHARS_MAX)
            raise StateFileError(
                f"{self._old_path} is of NVIDIA's DRA driver and cannot be read ({reason}): the claims that "
                "it has prepared are unknown, so none is served. Nothing was touched. Drain the node and remove "
                "that file, or start NVIDIA's driver again"
            ) from None
        except (OSError, HostShortError) as error:
            reason = (
                str(error) if isinstance(error, HostShortError) else f"{error.filename}: {error.strerror}"
            )
            raise StateFileError(
                f"the GPUs that NVIDIA's DRA driver has given to the claims in {self._old_path} cannot be read "
                f"({reason}): no claim is served meanwhile; it is tried again"
            ) from None

    def _read(self, path: str, *, touches: bool) -> Restored:
        stored = self._content(path)
        if stored is None:
            return self._missing()
        try:
            boot_id, checkpoint = self._decoded(stored)
        except ValueError as error:
            reason = quoted(str(error), limits.QUOTED_NAME_CHARS_MAX)
            return (
                self._set_aside(reason) if touches else self._corrupt(f"{self._path} is corrupt ({reason})")
            )
        if boot_id != self._boot_id:
            return Restored(
                Checkpoint(earlier_models=models_of(checkpoint)),
                Origin.OTHER_BOOT,
                f"{path} is of another boot, so it is treated as empty: its claims are prepared again",
            )
        return Restored(checkpoint, Origin.FOUND, f"{path}: {len(checkpoint.claims)} claims")

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint durably. Raises `StateFileError`; the old one is there then."""
        body = _encoded(encoded(checkpoint, self._boot_id))
        head = f'{{"checksum":"sha256:{sha256(body).hexdigest()}","checkpoint":'.encode()
        try:
            self._kept.ensure()
            replace(self._disk, self._path, head + body + b"}\n")
        except OSError as error:
            raise StateFileError(
                f"cannot write {self._path} ({error.strerror}): no claim is prepared or released until it can be "
                "written; check the disk; it is tried again"
            ) from None

    # --- reading ------------------------------------------------------------------------------------------------------

    def _decoded(self, stored: bytes) -> tuple[str, Checkpoint]:
        """Decode the boot id and the checkpoint. Raises `ValueError` for a corrupt file, `CheckpointNewerError`."""
        content = _content_of(stored)
        version = version_of(content)
        if version > VERSION:
            raise CheckpointNewerError(
                f"{self._path} is of version {version}, this gpuactors knows {VERSION}: a newer one wrote it. Nothing "
                "was touched. Start the newer one again; or release all claims with it, stop it and remove the file"
            )
        return decoded(content)

    def _missing(self) -> Restored:
        # The file may have been set aside by a start that was killed before a new one was written.
        if aside := self._corrupt_ones(_CORRUPT) or self._corrupt_ones(_OLD_CORRUPT):
            return self._corrupt(f"{self._directory}/{aside[-1]} was corrupt and has not been replaced yet")
        return Restored(Checkpoint(), Origin.NONE, f"there is no {self._path} yet")

    def _set_aside(self, reason: str) -> Restored:
        aside = os.path.join(self._directory, self._next_name())
        try:
            self._disk.rename(self._path, aside)
            self._disk.sync_directory(self._directory)
        except OSError as error:
            raise StateFileError(
                f"{self._path} is corrupt ({reason}) and cannot be set aside ({error.strerror}): check the disk, or "
                "move the file away by hand"
            ) from None
        return self._corrupt(f"{self._path} is corrupt ({reason}) and was set aside as {aside}")

    def _corrupt(self, what: str) -> Restored:
        return Restored(
            Checkpoint(),
            Origin.CORRUPT,
            f"{what}: the claims are restored from the kernel, kubelet and the CDI files, and every GPU on a vfio "
            "driver stays on it",
        )

    def _next_name(self) -> str:
        """Return the name for the next corrupt one; from CORRUPT_FILES_KEPT on it replaces the last."""
        corrupt = self._corrupt_ones(_CORRUPT)
        return f"{_CORRUPT}{min(len(corrupt) + 1, CORRUPT_FILES_KEPT)}"

    def _corrupt_ones(self, prefix: str) -> list[str]:
        try:
            names = self._disk.names(self._directory)
        except OSError:  # no directory, so nothing in it
            return []
        return [name for name in names if name.startswith(prefix)]


def newer_checkpoint(directory: str, disk: Disk) -> tuple[str, int] | None:
    """Return the path and version of the checkpoint in a DRA driver's directory, if a newer gpuactors wrote it; None
    also if there is none, if it is corrupt, or if it cannot be read."""
    path = os.path.join(directory, FILE_NAME)
    try:
        version = version_of(_content_of(disk.read(path, limits.CLAIMS_FILE_MAX_BYTES)))
    except (OSError, ValueError):
        return None
    return (path, version) if version > VERSION else None


# --- JSON -------------------------------------------------------------------------------------------------------------


def _content_of(stored: bytes) -> Json:
    """Return the inner object of the file. Raises `ValueError` for a corrupt file."""
    if len(stored) > limits.CLAIMS_FILE_MAX_BYTES:
        raise ValueError(f"it has more than {limits.CLAIMS_FILE_MAX_BYTES:,} bytes")
    match = _FORM.fullmatch(stored)
    if match is None:
        raise ValueError("it is not of the form of a checkpoint")
    checksum, body = match[1].decode(), match[2]
    if sha256(body).hexdigest() != checksum:
        raise ValueError("its checksum is not that of its content")
    return frozen_json(decode_json(body, object, _DEPTH_MAX))


def _encoded(content: Json) -> bytes:
    return json.dumps(content, separators=(",", ":"), default=_plain).encode()


def _plain(value: object) -> object:
    """Thaw a frozen mapping, which the encoder does not know. Raises `TypeError`."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")

"""The files of a claim: two CDI files for the container runtime, and one metadata file per request for the container.

    <cdi-dir>/k8s.gpu.nvidia.com-claim_<uid>.json       the devices
    <cdi-dir>/gpu.nvidia.com-metadata_<uid>.json        the mounts of the metadata files
    <plugin-dir>/metadata/<uid>/<request>.json          KEP-5304

and, of a claim that NVIDIA's driver has prepared, which is only ever removed:

    <cdi-dir>/k8s.gpu.nvidia.com-claim_<uid>.yaml
    <cdi-dir>/gpu.nvidia.com_metadata_<uid>_<request>.json, and the metadata file that it mounts (`theirs.py`)

All by the claim's UID: by its name, the late removal of an old claim's files would remove those of the new one. What
they say is the core's (`core/claims/cdi.py`, `metadata.py`). A metadata file that is there may be mounted in a
container, which would go on seeing the old one after a rename: so it is rewritten in place, and only if it differs.

Writing is healing: what is there and right is left, so it is done again at each start and before each repeated answer.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final, final

from gpuactors import limits
from gpuactors.acts.cdi_watch import touches
from gpuactors.acts.disk import (
    Disk,
    KeptDirectory,
    content_of,
    ensure_directory,
    is_temporary,
    json_text,
    put_unsynced,
    replace,
    temporary_of,
    unlink_if_there,
)
from gpuactors.acts.theirs import remove_files
from gpuactors.core.claims import cdi
from gpuactors.core.claims.files import ClaimContents, FoundFiles
from gpuactors.core.values.claim import ClaimUid, Json
from gpuactors.core.values.domain import DomainUid
from gpuactors.core.values.names import is_domain_id, is_label, is_uid
from gpuactors.decoding import decode_json_stream
from gpuactors.ports.errors import DirectoryLeftError, StateFileError
from gpuactors.process.plain_files import NotPlainError

TREE_ENTRIES_MAX: Final = 20_000
"""Limit on the files and directories of a container's mounted directory that one act removes: about a second. A daemon
of a compute domain leaves four; the next try goes on (CLAIM_RETRY_S)."""

MOUNTED: Final = "domains"
"""The directory, in the driver's own, of the directories that containers mount: one for each compute domain."""

_JSON: Final = ".json"


Contents = list[tuple[str, bytes]]
"""The content of files, by their path."""


@final
class ClaimFiles:
    """The files of one driver's claims."""

    def __init__(self, disk: Disk, *, driver: str, cdi_dir: str, plugin_dir: str) -> None:
        """`plugin_dir` is the driver's directory below kubelet's `plugins`, at the host's own path: the container
        runtime mounts files from it."""
        self._disk = disk
        self._driver = driver
        self._cdi_dir = cdi_dir
        self._plugin_dir = plugin_dir
        self._metadata_dir = os.path.join(plugin_dir, "metadata")
        self._kept_cdi = KeptDirectory(disk, cdi_dir)
        self._kept_metadata = KeptDirectory(disk, self._metadata_dir)
        self._mounted_dir = os.path.join(plugin_dir, MOUNTED)

    # --- paths --------------------------------------------------------------------------------------------------------

    def _devices_path(self, uid: ClaimUid) -> str:
        return os.path.join(self._cdi_dir, f"k8s.{self._driver}-claim_{uid}{_JSON}")

    def _mounts_path(self, uid: ClaimUid) -> str:
        return os.path.join(self._cdi_dir, f"{self._driver}-metadata_{uid}{_JSON}")

    def _claim_dir(self, uid: ClaimUid) -> str:
        return os.path.join(self._metadata_dir, uid)

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, contents: ClaimContents) -> None:
        """Write the files of a claim durably. Raises `StateFileError`, also for a UID or a request that is no part of a
        path.
        """
        uid = contents.claim.uid
        if not is_uid(uid) or not all(is_label(file.request) for file in contents.metadata):
            raise StateFileError(
                f"claim {contents.claim} has the UID {uid!r} or a request that is no part of a path"
            )
        try:
            for mounted in contents.directories:
                ensure_directory(self._disk, mounted)
            for path, content in self._placed(contents):
                self._put(path, content)
                self._disk.sync_directory(os.path.dirname(path))
            if contents.metadata:
                self._kept_metadata.ensure()
                ensure_directory(self._disk, self._claim_dir(uid))
            for path, content in self._metadata(contents):
                self._put_in_place(path, content)
            self._kept_cdi.ensure()
            for path, content in self._cdi(contents):
                self._put(path, content)
            # Also where nothing was written now: a daemon that was killed may have written it and not synced.
            self._disk.sync_directory(self._cdi_dir)
        except OSError as error:
            raise self._error("written", contents.claim.uid, error) from None

    def are_written(self, contents: ClaimContents) -> bool:
        """Return whether the files are there with this content, or that of an earlier version, as far as can be read.
        Writes nothing: for a read-only disk."""
        uid = contents.claim.uid
        earlier = {
            self._metadata_path(uid, file.request): _stream(file.earlier) for file in contents.metadata
        }
        files = (*self._placed(contents), *self._metadata(contents), *self._cdi(contents))
        try:
            for mounted in contents.directories:
                self._disk.names(mounted)
            return all(
                self._content(path) in (content, earlier.get(path, content)) for path, content in files
            )
        except OSError:
            return False

    def _placed(self, contents: ClaimContents) -> Contents:
        return [(placed.path, placed.text.encode()) for placed in contents.placed]

    def _metadata(self, contents: ClaimContents) -> Contents:
        uid = contents.claim.uid
        return [
            (self._metadata_path(uid, file.request), _stream(file.documents)) for file in contents.metadata
        ]

    def _metadata_path(self, uid: ClaimUid, request: str) -> str:
        return os.path.join(self._claim_dir(uid), f"{request}{_JSON}")

    def _cdi(self, contents: ClaimContents) -> Contents:
        """Return the CDI files: the mounts of its metadata, if there is any, and its devices."""
        uid = contents.claim.uid
        mounts = [
            (file.request, self._metadata_path(uid, file.request), file.container_path)
            for file in contents.metadata
        ]
        files = [(self._devices_path(uid), json_text(contents.devices))]
        if mounts:
            of_mounts = cdi.metadata_file(self._driver, contents.claim, mounts)
            files.insert(0, (self._mounts_path(uid), json_text(of_mounts)))
        return files

    def _put(self, path: str, content: bytes) -> None:
        put_unsynced(self._disk, path, content, limits.CLAIMS_FILE_MAX_BYTES)

    def _put_in_place(self, path: str, content: bytes) -> None:
        current = self._content(path)
        if current is None:
            replace(self._disk, path, content)
            return
        if current != content:
            self._disk.write(path, content)
        self._disk.sync(path)
        self._disk.sync_directory(os.path.dirname(path))

    def _content(self, path: str) -> bytes | None:
        return content_of(self._disk, path, limits.CLAIMS_FILE_MAX_BYTES)

    # --- removing -----------------------------------------------------------------------------------------------------

    def remove(self, uid: ClaimUid, directories: Iterable[str] = ()) -> None:
        """Remove the files of the claim durably, and these directories with whatever its container has written there.
        Raises `StateFileError`; `DirectoryLeftError` where the files are gone, and of a directory something is left: a
        next try goes on from there."""
        if not is_uid(uid):  # so none was written
            return
        try:
            # First what a new container would be started with.
            paths = (self._devices_path(uid), self._mounts_path(uid))
            for path in paths:
                unlink_if_there(self._disk, path)
            remove_files(self._disk, self._cdi_dir, self._driver, self._plugin_dir, uid)
            for path in paths:  # what a write that failed has left
                unlink_if_there(self._disk, temporary_of(path))
            self._sync(self._cdi_dir)
            directory = self._claim_dir(uid)
            for name in self._names(directory):
                unlink_if_there(self._disk, os.path.join(directory, name))
            with suppress(FileNotFoundError):
                self._disk.remove_directory(directory)
            self._sync(self._metadata_dir)
        except OSError as error:
            raise self._error("removed", uid, error) from None
        for mounted in directories:
            self._remove_mounted(mounted)

    def clear_mounted(self, kept: Collection[DomainUid] | None) -> tuple[str, ...]:
        """Implement `ports.claims.ClaimFileStore.clear_mounted`. Raises `StateFileError` where it cannot be known which
        these are."""
        problems: list[str] = []
        try:
            for name in self._unmounted(kept):
                try:
                    self._remove_mounted(os.path.join(self._mounted_dir, name))
                except DirectoryLeftError as error:
                    problems.append(str(error))
            if kept is None and not problems:
                with suppress(FileNotFoundError):
                    self._disk.remove_directory(self._mounted_dir)
            self._sync(os.path.dirname(self._mounted_dir))
        except OSError as error:
            raise StateFileError(
                f"{self._mounted_dir} cannot be cleared ({error.filename or self._mounted_dir}: {error.strerror}): "
                "check the disk and the mounts of this pod; it is tried again at the next start"
            ) from None
        return tuple(problems)

    def _unmounted(self, kept: Collection[DomainUid] | None) -> Iterable[str]:
        """Return the directories to clear. Raises `OSError`: a CDI file that cannot be read whole may name any of
        them."""
        names = self._names(self._mounted_dir)
        if kept is None:
            return names
        ended = {name for name in names if is_domain_id(name) and name not in kept}
        for name in self._names(self._cdi_dir) if ended else ():
            with suppress(FileNotFoundError, NotPlainError):
                path = os.path.join(self._cdi_dir, name)
                content = self._disk.read(path, limits.CLAIMS_FILE_MAX_BYTES)
                if len(content) > limits.CLAIMS_FILE_MAX_BYTES:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
                ended -= {domain for domain in ended if domain.encode() in content}
        return sorted(ended)

    def _remove_mounted(self, directory: str) -> None:
        """Remove a mounted directory. Raises `DirectoryLeftError`."""
        try:
            with suppress(FileNotFoundError):
                self._disk.remove_tree(directory, TREE_ENTRIES_MAX)
            self._sync(os.path.dirname(directory))
        except OSError as error:
            raise DirectoryLeftError(
                f"the directory {directory}, which a container had mounted, cannot be removed "
                f"({error.filename or directory}: {error.strerror}): look for mounts in it and for files that are "
                "immutable (lsattr), or remove it by hand; it is tried again"
            ) from None

    def _sync(self, directory: str) -> None:
        """Sync a directory, also if nothing was removed now: a killed daemon may have removed files and not synced."""
        with suppress(FileNotFoundError):
            self._disk.sync_directory(directory)

    def sweep(self) -> None:
        """Remove temporary files that a killed daemon left, and make its removals durable. Raises `StateFileError`."""
        try:
            for directory in (self._cdi_dir, *self._claim_dirs()):
                for name in self._names(directory):
                    if is_temporary(name) and (directory != self._cdi_dir or self._claim_of(name[1:-4])):
                        unlink_if_there(self._disk, os.path.join(directory, name))
            self._sync(self._cdi_dir)
            self._sync(self._metadata_dir)
        except OSError as error:
            raise self._error("removed", ClaimUid("*"), error) from None

    def touches(self) -> AsyncGenerator[frozenset[ClaimUid] | None, None]:
        """Return `cdi_watch.touches` for the CDI files."""
        return touches(self._cdi_dir, self._claim_of)

    # --- what is there ------------------------------------------------------------------------------------------------

    def found(self) -> Mapping[ClaimUid, FoundFiles]:
        """List each claim's files, complete or not; other drivers' files are left out. Raises `StateFileError`."""
        try:
            return self._found()
        except OSError as error:
            raise self._error("read", ClaimUid("*"), error) from None

    def _found(self) -> Mapping[ClaimUid, FoundFiles]:
        names = set(self._names(self._cdi_dir))
        uids = {uid for name in names if (uid := self._claim_of(name)) is not None}
        uids |= {ClaimUid(os.path.basename(directory)) for directory in self._claim_dirs()}
        return {
            uid: self._found_of(uid, has_devices=os.path.basename(self._devices_path(uid)) in names)
            for uid in sorted(uids)
        }

    def _found_of(self, uid: ClaimUid, *, has_devices: bool) -> FoundFiles:
        directory = self._claim_dir(uid)
        names = (name.removesuffix(_JSON) for name in self._names(directory) if name.endswith(_JSON))
        documents: list[object] = []
        for request in sorted(filter(is_label, names)):
            documents += self._documents(os.path.join(directory, f"{request}{_JSON}"))
        devices = self._documents(self._devices_path(uid)) if has_devices else None
        return FoundFiles.of(uid, devices, documents)

    def _documents(self, path: str) -> list[object]:
        return decode_json_stream(self._content(path) or b"")

    def _claim_dirs(self) -> Iterable[str]:
        return [
            os.path.join(self._metadata_dir, name) for name in self._names(self._metadata_dir) if is_uid(name)
        ]

    def _uid(self, name: str, prefix: str) -> ClaimUid | None:
        middle = name.removeprefix(prefix).removesuffix(_JSON)
        return ClaimUid(middle) if name == f"{prefix}{middle}{_JSON}" and is_uid(middle) else None

    def _claim_of(self, name: str) -> ClaimUid | None:
        """Return the claim whose CDI file has this name."""
        return self._uid(name, f"k8s.{self._driver}-claim_") or self._uid(name, f"{self._driver}-metadata_")

    def _names(self, directory: str) -> tuple[str, ...]:
        try:
            return self._disk.names(directory)
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def _error(self, what: str, uid: ClaimUid, error: OSError) -> StateFileError:
        return StateFileError(
            f"the files of claim {uid} in {self._cdi_dir} and {self._metadata_dir} cannot be {what} "
            f"({error.strerror}): check the disk and the mounts of this pod; it is tried again"
        )


# --- JSON -------------------------------------------------------------------------------------------------------------


def _stream(documents: Iterable[Json]) -> bytes:
    """Encode objects one after the other, as Kubernetes' decoder of streams and KubeVirt's read them."""
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)

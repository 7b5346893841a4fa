"""The operator's file of sets (`--sets-file`): which devices of this node one virtual machine gets together.

    {"sets": {"2": [["0000:1b:00.0", "0000:43:00.0"]]}, "gpuModuleIDs": {"0000:1b:00.0": 1}}

Implements `ports.node.SetsReader`. Must not judge the sets: that is `core/kinds/set_sources.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

from gpuactors.core.kinds.set_sources import module_ids, operator_sets
from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.values.quote import quoted, quoted_name
from gpuactors.decoding import UndecodableError, decode_json
from gpuactors.host.threads import OneByOne
from gpuactors.ports.errors import HostError
from gpuactors.process.plain_files import read_plain

SETS_FILE_MAX_BYTES: Final = 1 << 20
"""The maximum length of the file, 1 MiB: a board of eight GPUs has 15 sets in less than 1 KiB."""

SETS_READ_S: Final = 2.0
"""The deadline of a read, in seconds. The daemon does not serve before the first one."""

_FIELDS: Final = ("sets", "gpuModuleIDs")


@final
class SetsFile:
    """The file at one path. It need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._thread = OneByOne("sets file")

    async def read(self) -> KnownSets:
        """Implement `ports.node.SetsReader.read` in a thread, as the file system may hang."""
        if (call := await self._thread.in_time(self._read, SETS_READ_S)) is None:
            raise HostError(
                f"cannot read {self._path} (--sets-file): no answer within {SETS_READ_S:g} s; check its file system"
            )
        return call.result()

    def _read(self) -> KnownSets:
        try:
            content = read_plain(self._path, SETS_FILE_MAX_BYTES + 1)
        except OSError as exc:
            raise HostError(
                f"cannot read {self._path} (--sets-file): {exc.strerror}; correct the file or the option"
            ) from None
        if len(content) > SETS_FILE_MAX_BYTES:
            raise HostError(
                f"{self._path} (--sets-file) has more than {SETS_FILE_MAX_BYTES} bytes; shorten it"
            )
        try:
            fields = decode_json(content, dict[str, object])
        except UndecodableError as exc:
            raise HostError(
                f"{self._path} (--sets-file) is no JSON object: {quoted(str(exc))}; correct it: docs/reference.md"
            ) from None
        if unknown := sorted(fields.keys() - set(_FIELDS)):
            raise HostError(
                f"{self._path} (--sets-file) has an unknown field {quoted_name(unknown[0])}; it may have "
                f"{' and '.join(_FIELDS)}: correct it"
            )
        file = str(self._path)
        listed = operator_sets(file, fields.get("sets", {}))
        modules, wrong = module_ids(file, fields.get("gpuModuleIDs", {}))
        return KnownSets(listed.sets, modules, (*listed.problems, *wrong))

"""Who computes what, in a folder that several processes share: what two could take, one takes.

A claim is a file `DIR/shared/claims/NAME.1`, made by the one process whose exclusive creation succeeds; it names the
member that made it (`eval.run.members`). Where that member is dead, the claim is taken over by making `NAME.2`, and so
on: of several that try, one succeeds, however late another has looked. Nothing is taken over more than a few times
without anything more of it being kept: what kills its processes is not to kill them all. `NAME.safe` holds the number
of the last claim under which something was kept, so that what takes days may lose as many processes as it will.

A process that was away for long may believe that it holds what another has taken over. `Claims.check` tells, and is
asked before everything that is written.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

from eval.run.members import SHARED, Member
from eval.run.run_directory import LostLockError
from fl.runtime.atomic_files import atomic_write, make_folder

MOST_DEATHS = 3
"""Members that may die with one claim, since anything of it was last kept, before nobody takes it any more."""
_WRITTEN_SECONDS = 30.0
"""Seconds that a file may stand empty between being made and being written to."""


class LostClaimError(LostLockError):
    """Another process has taken over what this one was computing."""


class Claims:
    """The claims of one member. Several threads may use it.

    Args:
        folder: of the run.
        member: who claims.
    """

    def __init__(self, folder: Path, member: Member) -> None:
        self.folder = folder / SHARED / "claims"
        self.member = member
        self._mine: dict[str, int] = {}
        self._lock = threading.Lock()
        make_folder(self.folder)

    def take(self, name: str) -> bool:
        """Claim something, if nobody alive has; returns whether it is this member's now.

        What was claimed has to be looked at again then: it may have been finished since one last looked.
        """
        for number in range(1, self._last_number(name) + 1):
            path = self._path(name, number)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            except FileExistsError:
                # what was taken over is of no account, though its member may live
                if self._path(name, number + 1).exists() or self._is_abandoned(path):
                    continue
                return False
            with os.fdopen(descriptor, "w") as file:
                file.write(self.member.name)
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                self._mine[name] = number
            return True
        return False

    def is_free(self, name: str) -> bool:
        """Return whether this member could take a claim."""
        last = next(number - 1 for number in count(1) if not self._path(name, number).exists())
        return last == 0 or (last < self._last_number(name) and self._is_abandoned(self._path(name, last)))

    def is_exhausted(self, name: str) -> bool:
        """Return whether as many members have died with a claim as may, since anything of it was last kept."""
        path = self._path(name, self._last_number(name))
        return path.exists() and self._is_abandoned(path)

    def check(self, name: str) -> None:
        """Check that this member holds a claim.

        Raises:
            LostClaimError: it does not, or not any more.
        """
        number = self._mine.get(name)
        lost = number is None or self.member.members.is_gone(self.member.name)
        if lost or number is None or self._path(name, number + 1).exists() or not self._path(name, number).exists():
            raise LostClaimError(f"{name} is no longer claimed by {self.member.name}: another process computes it")

    def progress(self, name: str) -> None:
        """Say that something is done of what this member has claimed, and kept: deaths before count no more.

        Where that can't be written down (a full disk), they go on counting.
        """
        number = self._mine.get(name)
        if number is not None and self._last_number(name) < number - 1 + MOST_DEATHS:
            with suppress(OSError), atomic_write(self._safe_path(name)) as file:
                file.write(str(number).encode())

    def release(self, name: str) -> None:
        """Give up a claim on what is not finished: those of dead members before it stay, and count."""
        with self._lock:
            number = self._mine.pop(name, None)
        # one that was taken over has to stay, or a third member would take the number again
        if number is not None and not self._path(name, number + 1).exists():
            self._path(name, number).unlink(missing_ok=True)

    def finish(self, name: str) -> None:
        """Give up a claim on what is finished, with those of dead members before it."""
        with self._lock:
            number = self._mine.pop(name, None)
        for before in range(number or 0, 0, -1):
            self._path(name, before).unlink(missing_ok=True)
        if number is not None:
            self._safe_path(name).unlink(missing_ok=True)

    def forget(self, prefix: str) -> None:
        """Remove all claims on parts of something that is finished, whoever made them."""
        for path in sorted(self.folder.glob(f"{prefix}*"), reverse=True):
            path.unlink(missing_ok=True)

    def release_all(self) -> None:
        """Give up everything."""
        for name in list(self._mine):
            with suppress(OSError):
                self.release(name)

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}.{number}"

    def _safe_path(self, name: str) -> Path:
        return self.folder / f"{name}.safe"

    def _last_number(self, name: str) -> int:
        """Return the number of the last claim that may be made."""
        try:
            return int(self._safe_path(name).read_text()) - 1 + MOST_DEATHS
        except (OSError, ValueError):  # nothing is done so far
            return MOST_DEATHS

    def _is_abandoned(self, path: Path) -> bool:
        """Return whether a claim's member is dead."""
        members = self.member.members
        try:
            with path.open() as file:
                holder, made = file.read(), os.fstat(file.fileno()).st_mtime
        except OSError:  # given up meanwhile
            return False
        if not holder:
            return members.now() - made > _WRITTEN_SECONDS
        return holder != self.member.name and not members.is_alive(holder)

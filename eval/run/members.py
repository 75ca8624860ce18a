"""Which processes are at work in a run's folder, when several are: each has a file there that it keeps young.

```
DIR/shared/members/NAME.json    who it is and how far it is; its age tells whether the process lives
DIR/shared/members/NAME.gone    nothing it holds counts any more, whatever it believes itself; so for all `NAME-TOKEN`
```

Ages are told by the clock of the file system alone, so that clocks of machines may differ. A file is read by opening
it, which has NFS ask the server. Where a member runs under the same kernel, its process is looked up instead: it is
known at once when it dies, and a long computation that lets no other thread of Python run is not taken for death.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eval.io import jsonl
from fl.runtime.atomic_files import make_folder, refuse_link

SHARED, MEMBERS = "shared", "members"
"""The folder inside a run's in which those that share it leave word for each other, and in it that of the members."""
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 90.0
"""Seconds without a heartbeat after which a member counts as dead: NFS may keep an age to itself for a minute."""
CALLER, WORKER = "caller", "worker"
_DEAD, _STOPPED = {"Z", "X"}, {"T", "t"}
"""States of a process, in /proc: dead; stopped, by a debugger for a moment or by somebody for long."""
_LIVING, _GONE, _CLOCK = ".json", ".gone", ".clock"


class GoneError(ValueError):
    """This process was taken for dead, so that others may be doing what it was about to do."""


@dataclass(frozen=True)
class MemberState:
    """A member as others see it.

    Attributes:
        name: of the member, never used twice.
        about: what it says of itself.
        is_alive: whether it is at work, as far as can be told.
    """

    name: str
    about: Mapping[str, Any]
    is_alive: bool

    @property
    def kind(self) -> str:
        """`caller` or `worker`."""
        return str(self.about.get("kind", ""))

    @property
    def place(self) -> str:
        """Where it runs, for people."""
        return f"{self.about.get('host', 'an unknown host')}, process {self.about.get('pid', '?')}"


class Members:
    """The members of one folder, seen by a process that may be one itself.

    Args:
        folder: of the run.
        stale_seconds: age of a heartbeat at which its member counts as dead.
    """

    def __init__(self, folder: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self.folder = folder / SHARED / MEMBERS
        self.stale_seconds = stale_seconds
        self._token = secrets.token_hex(4)
        self._clock: tuple[float, float] | None = None

    def states(self) -> list[MemberState]:
        """Return all members there have been, by name."""
        if not self.folder.is_dir():
            return []
        names = sorted(path.stem for path in self.folder.iterdir() if path.suffix == _LIVING and path.name[0] != ".")
        return [state for name in names if (state := self.state(name)) is not None]

    def state(self, name: str) -> MemberState | None:
        """Return one member; None where there is none of that name."""
        try:
            with (self.folder / f"{name}{_LIVING}").open("rb") as file:
                beaten, about = os.fstat(file.fileno()).st_mtime, jsonl.parse(file.read())
        except (OSError, ValueError):
            return None
        if not isinstance(about, dict):
            return None
        if about.get("left") or self.is_gone(name):
            return MemberState(name, about, False)
        runs = _is_running(about)
        return MemberState(name, about, self.now() - beaten <= self.stale_seconds if runs is None else runs)

    def is_alive(self, name: str) -> bool:
        """Return whether a member is at work."""
        state = self.state(name)
        return state is not None and state.is_alive

    def is_gone(self, name: str) -> bool:
        """Return whether a member was told to hold nothing any more, by its own name or without its token."""
        return any((self.folder / f"{one}{_GONE}").exists() for one in (name, name.rpartition("-")[0]))

    def declare_gone(self, name: str) -> None:
        """Have nothing count that a member holds; it leaves when it hears of that."""
        make_folder(self.folder)
        (self.folder / f"{name}{_GONE}").touch()

    def now(self) -> float:
        """Return the time by the clock of the file system, in seconds."""
        here = time.monotonic()
        if self._clock is None or here - self._clock[0] > HEARTBEAT_SECONDS:
            make_folder(self.folder)
            path = self.folder / f".{self._token}{_CLOCK}"
            with path.open("wb") as file:
                file.write(b"-")  # a server stamps what is written
                file.flush()
                self._clock = time.monotonic(), os.fstat(file.fileno()).st_mtime
            with suppress(OSError):
                path.unlink()
        return self._clock[1] + time.monotonic() - self._clock[0]


class Member:
    """This process, or a part of it, as a member.

    Args:
        members: of the folder.
        kind: `caller` or `worker`.
        name: that it is known by; a token is added.
        about: what else others may know of it.
    """

    def __init__(self, members: Members, kind: str, name: str, about: Mapping[str, Any] | None = None) -> None:
        self.members = members
        self.name = f"{name}-{secrets.token_hex(4)}"
        self._about: dict[str, Any] = {"kind": kind, **_own_place(), **(about or {})}
        refuse_link(members.folder.parent)
        make_folder(members.folder)
        self.tell({})

    def tell(self, more: Mapping[str, Any]) -> None:
        """Say how far this member is, which is a sign of life as well."""
        self._about |= more
        path = self.members.folder / f"{self.name}{_LIVING}"
        new = self.members.folder / f".{self.name}{_LIVING}"
        new.write_text(json.dumps(self._about), encoding="utf-8")
        new.replace(path)

    def beat(self) -> None:
        """Give a sign of life.

        Raises:
            GoneError: this member counts as dead.
        """
        self.check()
        try:
            os.utime(self.members.folder / f"{self.name}{_LIVING}")
        except FileNotFoundError as error:
            raise GoneError(f"what {self.name} told of itself was removed") from error

    def check(self) -> None:
        """Check that this member still counts.

        Raises:
            GoneError: it was declared gone.
        """
        if self.members.is_gone(self.name):
            raise GoneError(f"{self.name} was told to leave, or taken for dead")

    def leave(self) -> None:
        """Say that this member is done; what it told stays to be read."""
        with suppress(OSError):  # the folder may be gone by now
            self.tell({"left": True})


def _own_place() -> dict[str, Any]:
    found = _process(os.getpid())
    begun = found[1] if found else None
    return {"host": socket.gethostname(), "kernel": _kernel(), "pid": os.getpid(), "begun": begun}


def _is_running(about: Mapping[str, Any]) -> bool | None:
    """Return whether a member's process runs; None where it is stopped, or of another kernel or space of numbers."""
    pid = about.get("pid")
    if not _kernel() or about.get("kernel") != _kernel() or not isinstance(pid, int):
        return None
    found = _process(pid)
    if found is None or found[1] != about.get("begun") or found[0] in _DEAD:
        return False
    return None if found[0] in _STOPPED else True


def _process(pid: int) -> tuple[str, int] | None:
    """Return a process's state and when it began, in ticks since the kernel did; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


@cache
def _kernel() -> str:
    """Return what tells this running kernel and space of process numbers from others; nothing where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""

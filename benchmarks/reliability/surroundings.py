"""Surroundings in which commands fail, and what each should say: the cases of `benchmarks.reliability.environment`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import pack

ROOT = Path(__file__).parents[2]
CONFIG = """title: Small
task: {dataset: {name: faces, size: 8}, model: {name: mlp, input_shape: [1, 8, 8]}}
federation: {partition: {name: iid, clients: 3, train_size: 12, test_size: 6}, rounds: 2}
method: {name: fedavg, lr: 0.1, batch_size: 6}
attack: analytic
observe: {images: 2, method: {steps: 1}}
score: {lpips: "off"}
"""
RUN = ("run", "small.yaml", "--out", "out", "--workers", "1")
OWN = "task: {dataset: {name: folder, path: pictures, size: 8}, model: {name: mlp, input_shape: [3, 8, 8]}}"
STRANGER = ("unshare", "-U", "--map-user=12345", "--map-group=12345")
"""In front of a command: a user whom the machine does not know, and without a superuser's rights."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command in bad surroundings.

    Attributes:
        name: what is wrong.
        words: of the command line.
        code: it should leave with.
        said: what its line should hold, as a regular expression; nothing where all should go well.
        prepare: makes the surroundings in an empty folder, in which there is `small.yaml`.
        env: variables; None takes one away.
        limits: of the process, by name (`RLIMIT_AS`).
        stdout: "read", "closed", "full" (a device without space) or "cut" (nobody reads on).
        stranger: whether an unknown user runs it.
        inside: folder to run it in.
        sent: a signal, and a file that is waited for before it is sent.
        ignored: a signal that the process ignores from its start, as under `nohup`.
        lines: how many lines on stderr it may leave beside the one.
    """

    name: str
    words: Sequence[str | bytes]
    code: int
    said: str = ""
    prepare: Callable[[Path], object] = lambda _folder: None
    env: Mapping[str, str | None] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    stdout: str = "read"
    stranger: bool = False
    inside: str = "."
    sent: tuple[int, str] | None = None
    ignored: int = 0
    lines: int = 0


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Return a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def forbidden(name: str, mode: int = 0, *, file: str = "") -> Callable[[Path], None]:
    """Return a folder, with a file in it or not, that nobody may enter or write to."""

    def prepare(folder: Path) -> None:
        (folder / name).mkdir(parents=True)
        if file:
            (folder / name / file).write_text(CONFIG)
        (folder / name).chmod(mode)

    return prepare


def pictures(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a folder of images, six of each of two classes, one of them spoilt, and a config that reads it."""

    def prepare(folder: Path) -> None:
        for name in ("a", "b"):
            (folder / "pictures" / name).mkdir(parents=True)
            for number in range(12):
                (folder / "pictures" / name / f"{number}.png").write_bytes(
                    png(8, 8, (b"\0" + bytes([number]) * 24) * 8)
                )
        spoil(folder / "pictures" / "a")
        (folder / "small.yaml").write_text(
            "\n".join(OWN if line.startswith("task") else line for line in CONFIG.splitlines())
        )

    return prepare


def png(width: int, height: int, data: bytes) -> bytes:
    """Return a PNG file in color of a size, with these bytes in it, as many as there are."""
    parts = [(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    parts += [(b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    body = b"".join(pack(">I", len(own)) + kind + own + pack(">I", zlib.crc32(kind + own)) for kind, own in parts)
    return b"\x89PNG\r\n\x1a\n" + body


def after_a_run(spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what a run has left, then spoilt."""

    def prepare(folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", "hyperleak", *RUN]
        subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True)
        spoil(folder / "out")

    return prepare


def unreadable_update(folder: Path) -> None:
    """A model, and an update of it that must not be read."""
    model = "import torch\nf = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))"
    (folder / "m.py").write_text(model)
    (folder / "u.npz").touch(mode=0)


def own_attacks(folder: Path) -> None:
    """A package of the user's own, called like one of ours."""
    (folder / "attacks").mkdir()
    (folder / "attacks" / "__init__.py").touch()


def cases() -> list[Case]:
    """Return all of them."""
    return [*_streams(), *_folders(), *_homes(), *_limits(), *_signals(), *_images(), *_configs(), *_others()]


def _streams() -> list[Case]:
    listed = ("list", "methods")
    return [
        Case(name="stdout is closed", words=listed, code=2, said="stdout is closed", stdout="closed"),
        Case(
            name="stdout is a full device", words=listed, code=1, said="No space left.*free some space", stdout="full"
        ),
        Case(name="a full device, JSON", words=("show", "ig", "--json"), code=1, said="No space left", stdout="full"),
        Case(name="nobody reads a list", words=listed, code=1, said="has ended", stdout="cut"),
        Case(name="nobody reads a run", words=RUN, code=1, said="goes on", stdout="cut"),
        Case(name="a terminal in ASCII", words=listed, code=0, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}),
        Case(name="a run in Latin 1", words=RUN, code=0, env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}),
        Case(name="no locale", words=("show", "ig"), code=0, env={"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}),
        Case(name="a terminal that can do nothing", words=listed, code=0, env={"TERM": "dumb"}),
        Case(name="a terminal of no width", words=("show", "ig"), code=0, env={"COLUMNS": "0", "TERM": None}),
    ]


def _folders() -> list[Case]:
    report = ("report", "out")
    return [
        Case(name="the current folder is gone", words=("list",), code=2, said="folder is gone.*cd", inside="gone"),
        Case(
            name="--out below a folder without rights",
            words=("run", "small.yaml", "--out", "shut/out"),
            code=2,
            said="Permission denied.*another --out",
            prepare=forbidden("shut", 0o555),
            stranger=True,
        ),
        Case(
            name="--out is a folder without rights",
            words=RUN,
            code=2,
            said="Permission denied|can't be written",
            prepare=forbidden("out", 0o555),
            stranger=True,
        ),
        Case(name="--out is a file", words=RUN, code=2, said="got the file out", prepare=written("out", "x")),
        Case(name="--out is too long", words=("run", "small.yaml", "--out", "x" * 300), code=2, said="too long"),
        Case(
            name="--out is a link to nowhere",
            words=RUN,
            code=2,
            said="--out",
            prepare=lambda folder: (folder / "out").symlink_to("nowhere"),
        ),
        Case(
            name="a report where nothing may be written",
            words=report,
            code=2,
            said="Permission denied",
            prepare=after_a_run(lambda out: out.chmod(0o555)),
            stranger=True,
        ),
        Case(name="a report of nothing", words=("report", "nowhere"), code=2, said="no folder nowhere"),
    ]


def _homes() -> list[Case]:
    shut = {"HOME": "shut", "XDG_CACHE_HOME": None, "HYPERLEAK_DATA": None}
    lost = {"HOME": None, "XDG_CACHE_HOME": None, "HYPERLEAK_DATA": None}
    scored = written("small.yaml", CONFIG.replace('"off"', "auto"))

    def unreadable(folder: Path) -> None:
        scored(folder)
        forbidden("shut")(folder)

    mnist = ("audit", "--method", "fedavg", "--dataset", "mnist", "--attack", "analytic")
    return [
        Case(name="doctor without a home", words=("doctor",), code=0, env=lost, stranger=True),
        Case(name="a run without a home", words=RUN, code=0, env=lost, stranger=True, prepare=scored),
        Case(name="doctor, home unreadable", words=("doctor",), code=0, env=shut, stranger=True, prepare=unreadable),
        Case(name="a run, home unreadable", words=RUN, code=0, env=shut, stranger=True, prepare=unreadable),
        Case(name="data without a home", words=mnist, code=2, said="HYPERLEAK_DATA", env=lost, stranger=True),
        Case(
            name="data sets to a home that is not there",
            words=("doctor", "--download", "tiny-imagenet", "--source", "."),
            code=1,
            said="tiny-imagenet",
            env=lost,
            stranger=True,
        ),
    ]


def _limits() -> list[Case]:
    return [
        Case(
            name="the disk is full at once",
            words=RUN,
            code=1,
            said="File too large.*free some space",
            limits={"RLIMIT_FSIZE": 100},
        ),
        Case(
            name="the disk is full while pictures and report are written",
            words=RUN,
            code=1,
            said="File too large",
            lines=1,  # what failed, and that nothing is finished
            limits={"RLIMIT_FSIZE": 12_000},
        ),
        Case(
            name="the disk is full in a report",
            words=("report", "out"),
            code=2,
            said="File too large.*free some space",
            limits={"RLIMIT_FSIZE": 5_000},
            prepare=after_a_run(lambda out: None),
        ),
        Case(name="no memory to start", words=RUN, code=1, said="memory", limits={"RLIMIT_AS": GIB // 2}),
        Case(
            name="images that no memory holds",
            words=RUN,
            code=1,
            said="not enough memory",
            prepare=written("small.yaml", CONFIG.replace("size: 8}", "size: 100000}")),
            limits={"RLIMIT_AS": 4 * GIB},
        ),
        Case(name="few open files", words=RUN, code=0, limits={"RLIMIT_NOFILE": 40}),
    ]


def _signals() -> list[Case]:
    long = written("small.yaml", CONFIG.replace("rounds: 2", "rounds: 20000"))
    begun = "out/run.json"
    return [
        Case(
            name="the terminal goes (SIGHUP)",
            words=RUN,
            code=129,
            said="goes on",
            sent=(signal.SIGHUP, begun),
            prepare=long,
        ),
        Case(
            name="the machine stops (SIGTERM)",
            words=RUN,
            code=143,
            said="goes on",
            sent=(signal.SIGTERM, begun),
            prepare=long,
        ),
        Case(name="Ctrl-C", words=RUN, code=130, said="goes on", sent=(signal.SIGINT, begun), prepare=long),
        Case(name="nohup", words=RUN, code=0, sent=(signal.SIGHUP, begun), ignored=signal.SIGHUP),
    ]


def _images() -> list[Case]:
    def pipe(folder: Path) -> None:
        os.mkfifo(folder / "x.png")

    def foreign(folder: Path) -> None:
        os.rename(os.fsencode(folder), os.fsencode(folder.parent) + b"/caf\xe9")

    huge = pictures(lambda folder: (folder / "x.png").write_bytes(png(13_000, 13_000, b"\0")))
    return [
        Case(name="a pipe called x.png", words=RUN, code=2, said="a pipe: .*x.png", prepare=pictures(pipe)),
        Case(name="an image of 13,000 x 13,000", words=RUN, code=2, said="at most .* pixels in .*x.png", prepare=huge),
        Case(
            name="a class whose name is not UTF-8", words=RUN, code=2, said="UTF-8.*rename", prepare=pictures(foreign)
        ),
        Case(
            name="an image that must not be read",
            words=RUN,
            code=2,
            said="Permission denied.*|expected an image in .*0.png",
            prepare=pictures(lambda folder: (folder / "0.png").chmod(0)),
            stranger=True,
        ),
    ]


def _configs() -> list[Case]:
    long_label = CONFIG.replace("attack: analytic", f"attack: {{name: analytic, as: {'x' * 300}}}")
    return [
        Case(
            name="a config that must not be read",
            words=RUN,
            code=2,
            said="small.yaml: Permission denied",
            prepare=lambda folder: (folder / "small.yaml").chmod(0),
            stranger=True,
        ),
        Case(
            name="a template that was not filled in",
            words=RUN,
            code=2,
            said="line 4: .*template",
            prepare=written("small.yaml", CONFIG.replace("lr: 0.1", "lr: {{ lr }}")),
        ),
        Case(
            name="a label that no file system takes",
            words=RUN,
            code=2,
            said="at most 200 letters",
            prepare=written("small.yaml", long_label),
        ),
        Case(
            name="a config that is no text",
            words=RUN,
            code=2,
            said="UTF-8",
            prepare=written("small.yaml", b"\xff\xfe\0"),
        ),
        Case(name="a config that is a folder", words=("run", "."), code=2, said="no config"),
        Case(name="a name that is not UTF-8", words=(b"show", b"caf\xe9"), code=2, said="udce9"),
        Case(
            name="an update that must not be read",
            words=("audit", "--update", "u.npz", "--model", "m:f", "--input-shape", "1,8,8"),
            lines=2,  # how to call the command
            code=2,
            said="not readable",
            prepare=unreadable_update,
            stranger=True,
        ),
    ]


def _others() -> list[Case]:
    return [
        Case(
            name="an eval.py of one's own",
            words=("list",),
            code=2,
            said="eval.py in its place",
            prepare=written("eval.py", "x = 1"),
        ),
        Case(
            name="a package attacks of one's own",
            words=("list",),
            code=2,
            said="attacks in its place",
            prepare=own_attacks,
        ),
        Case(
            name="no GPU", words=(*RUN, "--device", "cuda"), code=2, said="cuda|CUDA", env={"CUDA_VISIBLE_DEVICES": ""}
        ),
        Case(name="a data folder that is a file", words=("doctor",), code=0, env={"HYPERLEAK_DATA": "small.yaml"}),
    ]

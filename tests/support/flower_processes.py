"""Flower's own processes on this machine, all of which end with the test that started them."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

APP = Path(__file__).parents[1] / "federations" / "flower_app"
ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
START_SECONDS, RUN_SECONDS, END_SECONDS = 90, 240, 15


def environment(folder: Path) -> dict[str, str]:
    """That of the processes: nothing is sent to Flower's makers, and nothing is kept outside of the folder."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(folder: Path, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs meanwhile, its output in a file; then it and all that it started are ended."""
    with (folder / f"{name}.log").open("wb") as output:
        started = subprocess.Popen(
            words, cwd=folder, env=environment(folder), stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def copy_app(folder: Path, changes: dict[str, str]) -> Path:
    """The app with lines of its client replaced by others."""
    app = folder / "app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    file = app / "flower_app" / "client_app.py"
    text = file.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)
    return app


@contextmanager
def simulation(folder: Path) -> Iterator[list[str]]:
    """A SuperLink that simulates its nodes; what `flwr run` takes for two of them."""
    port = free_port()
    link = ("flower-superlink", "--insecure", "--simulation", "--host", HOST, "--port", str(port))
    write_config(folder, f'address = "{HOST}:{port}"\ninsecure = true\n')
    with process(folder, "superlink", *link, "--disable-runtime-dependency-installation") as started:
        wait_for(f"http://{HOST}:{port}/health", started, None)
        yield ["--federation-config", "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=1"]


@contextmanager
def deployment(folder: Path) -> Iterator[list[str]]:
    """A SuperLink and two SuperNodes that trust its certificate alone; what `flwr run` takes."""
    port, (authority, certificate, key) = free_port(), make_certificates(folder)
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(authority))
    link = ("flower-superlink", *tls, "--host", HOST, "--port", str(port), "--disable-runtime-dependency-installation")
    write_config(folder, f'address = "{HOST}:{port}"\nroot-certificates = "{authority}"\n')
    with ExitStack() as stack:
        started = stack.enter_context(process(folder, "superlink", *link))
        wait_for(f"https://{HOST}:{port}/health", started, ssl.create_default_context(cafile=str(authority)))
        for i in range(2):
            place = ("--superlink", f"{HOST}:{port}", "--root-certificates", str(authority))
            own = ("--host", HOST, "--port", str(free_port()), "--node-config", f"partition-id={i} num-partitions=2")
            stack.enter_context(process(folder, f"supernode-{i}", "flower-supernode", *place, *tls, *own))
        yield []


def run(folder: Path, app: Path, options: Sequence[str]) -> str:
    """What `flwr run` prints until the run is over."""
    words = ["flwr", "run", str(app), "--stream", "--run-config", f'out="{folder}"', *options]
    done = subprocess.run(
        words, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_config(folder: Path, connection: str) -> None:
    home = folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}')


def wait_for(address: str, started: subprocess.Popen[bytes], context: ssl.SSLContext | None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert started.poll() is None, "the SuperLink ended: see superlink.log"
        try:
            with urllib.request.urlopen(address, timeout=2, context=context):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(address)


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """The certificate of an authority of the test's own, and one of this machine by it, with its key."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("test authority", "localhost")]
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")])
    extensions = (x509.BasicConstraints(ca=True, path_length=None), place)
    now = datetime.datetime.now(datetime.UTC)
    files = folder / "authority.pem", folder / "server.pem", folder / "server.key"
    for i, file in enumerate(files[:2]):
        made = (
            x509.CertificateBuilder()
            .subject_name(names[i])
            .issuer_name(names[0])
            .public_key(keys[i].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extensions[i], critical=i == 0)
            .sign(keys[0], hashes.SHA256())
        )
        file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[2].write_bytes(keys[1].private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return files

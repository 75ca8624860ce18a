"""Damaged files of tensors are errors that name them, before much memory is taken."""

import hashlib
import random
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fl.runtime import tensor_archives
from fl.runtime.tensor_archives import DamagedError, ObjectsError

TENSORS = {"fc.weight": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), "fc.bias": torch.arange(9)}


def write(path):
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in TENSORS.items()})
    elif path.suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        torch.save(TENSORS, path)
    return path


def read(path):
    if path.suffix == ".npz":
        return {name: torch.from_numpy(value) for name, value in tensor_archives.read_arrays(path).items()}
    return tensor_archives.read_tensors(path) if path.suffix == ".safetensors" else tensor_archives.read_state(path)


def same(found):
    return found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("kind", ["u.npz", "u.pt", "u.pth", "u.safetensors"])
def test_whole_files_are_read(tmp_path, kind):
    assert same(read(write(tmp_path / kind)))


@pytest.mark.parametrize("kind", ["u.npz", "u.pt", "u.pth"])
def test_no_flipped_bit_passes_for_other_numbers(tmp_path, kind):
    content, draw = write(tmp_path / kind).read_bytes(), random.Random(1)
    for _ in range(60):
        data = bytearray(content)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / kind).write_bytes(data)
        with suppress(DamagedError, ObjectsError):
            assert same(read(tmp_path / kind))


@pytest.mark.parametrize("kind", ["u.npz", "u.pt", "u.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated_files_are_named(tmp_path, kind, share):
    content = write(tmp_path / kind).read_bytes()
    (tmp_path / kind).write_bytes(content[: int(share * len(content))])
    with pytest.raises(DamagedError, match=kind):
        read(tmp_path / kind)


@pytest.mark.parametrize("kind", ["u.npz", "u.pt", "u.safetensors"])
def test_a_digest_beside_a_file_is_checked(tmp_path, kind):
    path = write(tmp_path / kind)
    beside = tmp_path / f"{kind}.sha256"
    beside.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {kind}\n")
    assert same(read(path))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="SHA-256"):
        read(path)
    beside.write_text("what?")
    with pytest.raises(DamagedError, match=r"expected the SHA-256"):
        read(path)


def test_headers_that_lie_take_no_memory(tmp_path):
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    head += b" " * (63 - (10 + len(head)) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "u.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"1234")
    with pytest.raises(DamagedError, match="4 bytes of numbers"):
        tensor_archives.read_arrays(tmp_path / "u.npz")
    torch.save({"a": torch.zeros(1).expand(2**40)}, tmp_path / "u.pt")
    with pytest.raises(DamagedError, match="repeats a few numbers"):
        tensor_archives.read_state(tmp_path / "u.pt")
    size = struct.pack("<Q", 2**62)
    (tmp_path / "u.safetensors").write_bytes(size + b"{}")
    with pytest.raises(DamagedError):
        tensor_archives.read_tensors(tmp_path / "u.safetensors")


def test_bombs_are_refused_by_what_they_would_unpack_to(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_archives, "MAX_UNPACKED_BYTES", 2**20)
    np.savez_compressed(tmp_path / "u.npz", a=np.zeros(2**20, np.float32))
    with pytest.raises(DamagedError, match="unpacks to"):
        tensor_archives.read_arrays(tmp_path / "u.npz")
    np.savez(tmp_path / "u.npz", a=np.zeros(2**20, np.float32))
    assert tensor_archives.read_arrays(tmp_path / "u.npz")["a"].shape == (2**20,)


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "u.npz", a=np.array([{}], dtype=object))
    with pytest.raises(DamagedError, match="objects"):
        tensor_archives.read_arrays(tmp_path / "u.npz")
    torch.save({"a": torch.nn.Linear(1, 1)}, tmp_path / "u.pt")
    with pytest.raises(ObjectsError):
        tensor_archives.read_state(tmp_path / "u.pt")


def test_arrays_keep_order_and_may_be_written_to(tmp_path):
    whole = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "s": np.array(["a", "bc"]), "n": np.array(3)}
    np.savez(tmp_path / "u.npz", **whole)
    found = tensor_archives.read_arrays(tmp_path / "u.npz")
    assert all((found[name] == whole[name]).all() for name in whole)
    found["f"][0, 0] = 7


def test_memory_that_is_not_there_is_said(tmp_path, monkeypatch):
    def full(kind, path):
        if kind == "allocate":
            raise MemoryError

    for kind in ("u.npz", "u.pt", "u.safetensors"):
        path = write(tmp_path / kind)
        with monkeypatch.context() as patch:
            patch.setattr(tensor_archives.atomic_files, "before_disk_change", full)
            with pytest.raises(DamagedError, match="memory"):
                read(path)


def test_a_dictionary_that_holds_itself_is_refused(tmp_path: Path) -> None:
    looped: dict[str, object] = {"weight": torch.zeros(2)}
    looped["again"] = looped
    torch.save(looped, tmp_path / "looped.pt")
    with pytest.raises(DamagedError, match="holds itself"):
        tensor_archives.read_state(tmp_path / "looped.pt")

"""Files through KvikIO, NVIDIA's library for GPUDirect Storage: the disk and the GPU's memory exchange bytes directly.

Chunks are hashed on the host, so what is moved here is host staging: each block makes a detour through a buffer on the
GPU. KvikIO moves host memory by plain POSIX calls, so without the detour nothing would be direct. Only transfers that
cuFile itself carries out count as `gds`: the quiet fallbacks of KvikIO and of cuFile are switched off for our files,
and what fails is written or read again as `storage.py` does it, and counted.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainforge_loongforge.vault.storage import BLOCK, BOUNCE_BYTES, Sink, Source, Storage, as_bytes

INSTALL = "pip install 'trainforge-loongforge[gds]' (with CUDA 13: [gds-cuda13])"
_READ_BYTES = 2**20  # below it the detour costs more than the page cache
_Bytes = Any


class Unavailable(Exception):
    """GPUDirect Storage cannot be had; the text says why."""


def open_storage(folder: Path, posix: Storage) -> GdsStorage:
    """The storage of a folder on which a block has come back from the disk as it was written.

    Args:
        folder: an existing folder.
        posix: how what fails is done again.

    Raises:
        Unavailable: something is missing, or cuFile would not go directly.
    """
    kvikio = _import_kvikio()
    if kvikio.defaults.is_compat_mode_preferred():
        raise Unavailable(
            "KvikIO runs in its compatibility mode (libcufile.so cannot be found, /run/udev cannot be read, or "
            "KVIKIO_COMPAT_MODE asks for it)"
        )
    try:
        driver = bool(kvikio.cufile_driver.get("is_gds_available"))
    except Exception as error:  # whatever a driver that does not start makes of it
        raise Unavailable(f"the cuFile driver does not start ({_said(error)})") from error
    if not driver:
        raise Unavailable("the nvidia-fs driver is not loaded, so cuFile would copy through the host")
    storage = GdsStorage(kvikio, posix)
    storage.try_out(folder)
    return storage


def _import_kvikio() -> Any:
    if "kvikio" not in sys.modules and importlib.util.find_spec("kvikio") is None:
        raise Unavailable("KvikIO is not installed")
    if not has_gpu():
        raise Unavailable("there is no GPU that CUDA can use")
    # Read when cuFile starts. Without it cuFile quietly copies through the host where a file system is not supported.
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")
    try:
        for module in ("kvikio.cufile_driver", "kvikio.defaults"):
            importlib.import_module(module)
        return importlib.import_module("kvikio")
    except Exception as error:  # a missing library is an OSError, an ImportError or a RuntimeError
        raise Unavailable(f"KvikIO cannot be imported ({_said(error)})") from error


class GdsStorage(Storage):
    """Opens files through KvikIO. `mode` is "gds"; `retried` counts the transfers that it failed."""

    def __init__(self, kvikio: Any, posix: Storage) -> None:
        super().__init__("gds", None, posix.memory_alignment)
        self.takes_direct = posix.takes_direct
        self._kvikio = kvikio
        self._opening = threading.Lock()
        self._thread = threading.local()

    def create(self, path: Path) -> GdsSink:
        """Begin a new file; one of that name is overwritten. OSError as the system raises it."""
        return GdsSink(path, self)

    def open(self, path: Path) -> GdsSource:
        """Open a file for reading. OSError as the system raises it."""
        return GdsSource(path, self)

    def try_out(self, folder: Path) -> None:
        """Write a block to a file in the folder and read it back; Unavailable when that does not work."""
        block, back = memoryview(bytearray(os.urandom(BLOCK))), memoryview(bytearray(BLOCK))
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-") as file:
                handle = self.handle(Path(file.name), "r+")
                try:
                    self.write(handle, 0, block)
                    count = self.read(handle, 0, back)
                finally:
                    handle.close()
        except Exception as error:  # KvikIO raises RuntimeError, OSError and others
            raise Unavailable(f"cuFile cannot write to {folder} ({_said(error)})") from error
        if count != BLOCK or back != block:
            raise Unavailable(f"cuFile does not read back from {folder} what it wrote")

    def handle(self, path: Path, flags: str) -> Any:
        """A `kvikio.CuFile` that raises where it cannot go directly, instead of falling back."""
        off = self._kvikio.CompatMode.OFF
        with (
            self._opening,
            self._kvikio.defaults.set("compat_mode", off),
        ):  # a global, read when a file is opened
            return self._kvikio.CuFile(str(path), flags)

    def write(self, handle: Any, at: int, data: memoryview) -> None:
        """Move whole blocks through the GPU to offset `at`. Whatever KvikIO raises, and OSError for a short write."""
        device = self._device()
        for begin in range(0, len(data), BOUNCE_BYTES):
            piece = _tensor(data[begin : begin + BOUNCE_BYTES])
            device[: len(piece)].copy_(piece)
            written = handle.raw_write(device, len(piece), at + begin)
            if written != len(piece):
                raise OSError(f"cuFile wrote {written} of {len(piece)} bytes")

    def read(self, handle: Any, at: int, out: memoryview) -> int:
        """Fill `out` from offset `at` through the GPU; gives the bytes that there were. Whatever KvikIO raises."""
        device, done = self._device(), 0
        while done < len(out):
            skip = (at + done) % BLOCK
            size = min(BOUNCE_BYTES, -(-(skip + len(out) - done) // BLOCK) * BLOCK)
            count = min(handle.raw_read(device, size, at + done - skip) - skip, len(out) - done)
            if count <= 0:
                break
            _tensor(out[done : done + count]).copy_(device[skip : skip + count])
            done += count
        return done

    def _device(self) -> Tensor:
        """The calling thread's buffer on the GPU."""
        if not hasattr(self._thread, "device"):
            self._thread.device = device_buffer(BOUNCE_BYTES)
        device: Tensor = self._thread.device
        return device


class GdsSink(Sink):
    """A file whose whole blocks KvikIO writes; the rest of the last block, and what fails, as `Sink` does it."""

    def __init__(self, path: Path, storage: GdsStorage) -> None:
        super().__init__(path, storage)
        self._gds, self._handle = storage, None
        with contextlib.suppress(Exception):  # then every transfer counts as failed
            self._handle = storage.handle(path, "r+")

    def _goes_straight(self, view: memoryview) -> bool:
        return False  # the bounce buffer is what is copied to the GPU

    def _transfer(self, data: memoryview) -> None:
        try:
            if self._handle is None:
                raise OSError("KvikIO could not open the file")
            self._gds.write(self._handle, self._written, data)
        except Exception:  # KvikIO raises RuntimeError, OSError and others; if it was the disk, POSIX says so
            self._gds.count_retry()
            super()._transfer(data)
        else:
            self._written = self._file.seek(self._written + len(data))

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):  # the bytes are there; the fsync that follows tells if not
                handle.close()


class GdsSource(Source):
    """A file that KvikIO reads where much is wanted at once; small reads, and what fails, as `Source` does them."""

    def __init__(self, path: Path, storage: GdsStorage) -> None:
        super().__init__(path, storage)
        self._gds, self._handle = storage, None
        with contextlib.suppress(Exception):  # then every transfer counts as failed
            self._handle = storage.handle(path, "r")

    def read_into(self, at: int, out: _Bytes) -> None:
        """Fill `out` with the bytes at offset `at`. Raises as `Source.read_into` does."""
        view = as_bytes(out)
        if len(view) >= _READ_BYTES:
            with contextlib.suppress(Exception):  # as for writing
                if self._handle is not None and self._gds.read(self._handle, at, view) == len(view):
                    return
            self._gds.count_retry()
        super().read_into(at, view)

    def close(self) -> None:
        """Close the file; again is no error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.close()
        super().close()


def has_gpu() -> bool:
    """Whether CUDA has a device."""
    return torch.cuda.is_available()


def device_buffer(size: int) -> Tensor:
    """Bytes on the GPU."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _tensor(view: memoryview) -> Tensor:
    return torch.from_numpy(np.frombuffer(view, np.uint8))


def _said(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

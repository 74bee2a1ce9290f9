"""How bytes reach a file: the same bytes in every mode, the mode that ran, and what happens when the disk refuses."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import signal
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainforge.errors import CheckpointError, ConfigError
from trainforge_loongforge.vault import gds, storage
from trainforge_loongforge.vault.storage import BLOCK, Storage

SHM = Path("/dev/shm")
MODES = ["direct", "buffered"]


def content(size, seed=0):
    return bytes((seed + 7 * i + i // 251) % 256 for i in range(size))


def write(store, path, pieces):
    sink = store.create(path)
    offsets = [sink.append(piece) for piece in pieces]
    assert sink.finish() == sum(map(len, pieces))
    return offsets


def read(store, path, at, size):
    source, out = store.open(path), bytearray(size)
    try:
        source.read_into(at, out)
    finally:
        source.close()
    return bytes(out)


def takes_o_direct(folder):
    """Asked in another way than the storage does."""
    path = folder / "asked"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


@pytest.fixture
def small(monkeypatch):
    """Buffers so small that little data fills them."""
    monkeypatch.setattr(storage, "BOUNCE_BYTES", 4 * BLOCK)
    monkeypatch.setattr(storage, "_STRAIGHT_BYTES", 2 * BLOCK)
    monkeypatch.setattr(storage, "_DIRECT_READ_BYTES", BLOCK)
    monkeypatch.setattr(storage, "_WRITEBACK_BYTES", 2 * BLOCK)


@pytest.fixture(params=MODES)
def store(request, tmp_path):
    """A storage of each mode; where the disk does not take O_DIRECT, its refusals are tested."""
    return Storage(request.param, memory_alignment=512)


@pytest.fixture
def without_kvikio(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "kvikio" else real(name, *rest)
    )
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)


@pytest.fixture
def shm():
    if not SHM.is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


# C45: 1, 4095, 4096 and 4097 bytes, on tmpfs and on a disk


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097])
@pytest.mark.parametrize("where", ["tmpfs", "disk"])
def test_any_size_comes_back_from_any_folder_and_the_mode_is_said(where, size, tmp_path, shm, without_kvikio):
    folder = shm if where == "tmpfs" else tmp_path
    store, pieces = Storage.choose("auto", folder), [content(size), content(size, 9), content(size, 77)]
    assert write(store, folder / "f", pieces) == [0, size, 2 * size]
    assert (folder / "f").read_bytes() == b"".join(pieces)
    for number, piece in enumerate(pieces):
        assert read(store, folder / "f", number * size, size) == piece
    assert store.reason.startswith("no GPUDirect Storage: KvikIO is not installed")
    if where == "tmpfs":
        assert store.mode == "buffered"
        assert f"{shm} lies in memory (tmpfs)" in store.reason
    else:
        assert store.mode == ("direct" if takes_o_direct(tmp_path) else "buffered")
    assert store.retried == 0
    assert os.listdir(folder) == ["f"]


@pytest.mark.parametrize("where", ["tmpfs", "disk"])
def test_what_is_forced_and_cannot_be_had_is_an_error_that_says_what_to_install(
    where, tmp_path, shm, without_kvikio
):
    with pytest.raises(
        ConfigError, match=r"KvikIO is not installed.* pip install 'trainforge-loongforge\[gds\]'"
    ):
        Storage.choose("gds", shm if where == "tmpfs" else tmp_path)


def test_posix_has_no_reason_where_o_direct_works_and_does_not_look_for_kvikio(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trainforge_loongforge.vault.gds", None)  # importing it would raise
    store = Storage.choose("posix", tmp_path / "not" / "there" / "yet")
    assert (store.mode, store.reason is None) in [("direct", True), ("buffered", False)]


def test_an_unknown_name_and_a_file_system_without_o_direct_are_said(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="'nvme' is not known: say auto, gds or posix"):
        Storage.choose("nvme", tmp_path)

    def refuse(*_args):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(storage, "file_system", lambda folder: "oldfs")
    store = Storage.choose("posix", tmp_path)
    assert store.mode == "buffered"
    assert store.reason == f"the file system of {tmp_path} (oldfs) does not take O_DIRECT"


def test_a_folder_that_cannot_be_written_to_is_read_through_the_page_cache(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    write(Storage("buffered"), tmp_path / "f", [content(10_000)])
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    store = Storage.choose("posix", tmp_path)
    assert (store.mode, "Read-only file system" in store.reason) == ("buffered", True)
    assert read(store, tmp_path / "f", 3, 9000) == content(10_000)[3:9003]


# bytes


@contextmanager
def constants(**values):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(storage, name, value)
        yield


@settings(deadline=None, max_examples=150)
@given(
    mode=st.sampled_from(MODES),
    alignment=st.sampled_from([64, 512, 4096]),
    steps=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 30_000), st.sampled_from([0, 1, 64, 512])),
            st.sampled_from([64, 4096]).map(lambda boundary: (None, boundary)),
            st.sampled_from([4095, 4096, 4097, 8192, 16384]).map(lambda size: (size, 0)),
        ),
        max_size=12,
    ),
)
def test_a_file_holds_what_was_appended_and_no_padding(mode, alignment, steps):
    """Whatever sizes, whatever alignment of memory; one that O_DIRECT does not take falls back by itself."""
    area = storage.bounce_buffer(32_768)
    area[:] = content(32_768)
    expected = b""
    with (
        tempfile.TemporaryDirectory() as folder,
        constants(BOUNCE_BYTES=4 * BLOCK, _STRAIGHT_BYTES=2 * BLOCK, _WRITEBACK_BYTES=BLOCK),
    ):
        path = Path(folder) / "f"
        sink = Storage(mode, memory_alignment=alignment).create(path)
        for size, detail in steps:
            if size is None:
                expected += bytes(-len(expected) % detail)
                assert sink.pad_to(detail) == len(expected)
            else:
                piece = area[detail : detail + size]
                assert sink.append(piece) == len(expected)
                expected += bytes(piece)
        assert sink.finish() == len(expected)
        assert path.read_bytes() == expected


@settings(deadline=None, max_examples=60)
@given(
    mode=st.sampled_from(MODES),
    spans=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 60_000)), max_size=8),
    shift=st.sampled_from([0, 1, 512]),
)
def test_any_span_of_a_file_can_be_read(mode, spans, shift):
    whole = content(100_001)
    with tempfile.TemporaryDirectory() as folder, constants(_DIRECT_READ_BYTES=BLOCK):
        path = Path(folder) / "f"
        path.write_bytes(whole)
        source = Storage(mode, memory_alignment=512).open(path)
        area = storage.bounce_buffer(65_536)
        for at, size in spans:
            out = area[shift : shift + size]
            if at + size <= len(whole):
                source.read_into(at, out)
                assert out == whole[at : at + size]
            else:
                with pytest.raises(CheckpointError, match=rf"{path} ends at byte 100001, .* too early"):
                    source.read_into(at, out)
        source.close()
        source.close()


def test_spans_larger_than_the_bounce_buffer_are_read_by_many_threads(store, tmp_path):
    size = 2 * storage._READ_BYTES + 12_345
    whole = content(BLOCK) * (size // BLOCK) + content(size % BLOCK)
    write(store, tmp_path / "f", [whole])
    source = store.open(tmp_path / "f")

    def one(at):
        out = bytearray(size - at)
        source.read_into(at, out)
        return bytes(out) == whole[at:]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, [0, 1, 4096, 5000] * 3))
    source.close()


def test_memory_may_change_once_append_returns(store, tmp_path, small):
    piece = bytearray(content(3 * BLOCK + 5))
    expected = bytes(piece)
    sink = store.create(tmp_path / "f")
    sink.append(piece)
    piece[:] = bytes(len(piece))
    sink.finish()
    assert (tmp_path / "f").read_bytes() == expected


def test_large_aligned_memory_is_not_copied(tmp_path, monkeypatch):
    copied, real = [], storage.copy_into
    monkeypatch.setattr(
        storage, "copy_into", lambda out, data: (copied.append(len(data)), real(out, data))[1]
    )
    area = storage.bounce_buffer(4 * 2**20)
    area[:] = content(4096) * 1024
    sink = Storage("direct", memory_alignment=512).create(tmp_path / "f")
    sink.append(b"h" * BLOCK)
    sink.append(area)
    sink.append(area[512 : 2 * 2**20 + 700])
    sink.finish()
    assert copied == [BLOCK, 188]
    assert (tmp_path / "f").read_bytes() == b"h" * BLOCK + area + area[512 : 2 * 2**20 + 700]


@pytest.mark.parametrize("mode", MODES)
def test_whole_blocks_go_around_the_page_cache_in_direct_mode_only(tmp_path, monkeypatch, small, mode):
    if not takes_o_direct(tmp_path):
        pytest.skip("needs a file system that takes O_DIRECT")
    seen = []

    class Watched(Faulty):
        def write(self, data):
            flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
            seen.append((len(data), bool(flags & os.O_DIRECT)))
            return super().write(data)

    store, real = Storage(mode, memory_alignment=512), Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Watched(real(self, *a, **k), []))
    write(store, tmp_path / "f", [content(4 * BLOCK + 1), content(BLOCK)])
    if mode == "direct":
        assert seen == [(4 * BLOCK, True), (BLOCK, True), (1, False)]
    else:
        assert seen == [(4 * BLOCK + 1, False), (BLOCK, False)]
    assert store.retried == 0


def test_typed_memory_is_taken_as_bytes(store, tmp_path):
    values = torch.arange(3000, dtype=torch.float32)
    write(store, tmp_path / "f", [memoryview(values.numpy()).cast("B")])
    sink = store.create(tmp_path / "g")
    assert sink.append(memoryview(values[:0].numpy())) == 0
    assert sink.append(memoryview(values.numpy())) == 0
    assert sink.finish() == 12_000
    back = torch.zeros(3000)
    source = store.open(tmp_path / "g")
    source.read_into(0, memoryview(back.numpy()))
    source.read_into(5, memoryview(back[:0].numpy()))
    source.close()
    assert torch.equal(back, values)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes()


# the disk


def test_all_bytes_are_in_the_file_when_it_is_synced_and_it_is_synced_before_finish_returns(
    store, tmp_path, monkeypatch, small
):
    order, real = [], os.fsync

    def watched(descriptor):
        order.append(("fsync", (tmp_path / "f").read_bytes()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    whole = content(50_001)
    sink = store.create(tmp_path / "f")
    sink.append(whole)
    assert order == []
    sink.finish()
    order.append("finished")
    assert order == [("fsync", whole), "finished"]


def test_dirty_pages_are_written_back_before_the_end(tmp_path, monkeypatch, small):
    told, real, synced = [], os.posix_fadvise, os.fsync
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda fd, at, size, what: (told.append((at, size, what)), real(fd, at, size, what))[1],
    )
    monkeypatch.setattr(os, "fsync", lambda fd: (told.append("fsync"), synced(fd))[1])
    write(Storage("buffered"), tmp_path / "f", [content(2 * BLOCK, seed) for seed in range(3)])
    drop = os.POSIX_FADV_DONTNEED
    assert told == [
        (0, 2 * BLOCK, drop),
        (0, 4 * BLOCK, drop),
        (2 * BLOCK, 4 * BLOCK, drop),
        "fsync",
        (4 * BLOCK, 2 * BLOCK, drop),
    ]


class Faulty:
    """A file whose writes do what the plan says: an errno fails, a number writes that many bytes, None all."""

    def __init__(self, file, plan):
        self._file, self._plan = file, plan

    def write(self, data):
        what = self._plan.pop(0) if self._plan else None
        if isinstance(what, OSError):
            raise what
        return self._file.write(data if what is None else bytes(data[:what]))

    def __getattr__(self, name):
        return getattr(self._file, name)


def faulty(monkeypatch, plan):
    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, mode="r", *a, **k: (
            Faulty(real(self, mode, *a, **k), plan) if "w" in mode else real(self, mode, *a, **k)
        ),
    )


def failing(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("plan", [[1], [100, 5000, 1], [BLOCK], [4095, 4097, None, 3], [1] * 40])
def test_short_writes_are_continued(store, tmp_path, monkeypatch, small, plan):
    pieces = [content(20_000), content(30_000, 3), content(7, 5)]
    faulty(monkeypatch, list(plan))
    write(store, tmp_path / "f", pieces)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_what_the_disk_refuses_is_raised_and_the_file_can_be_removed(
    store, tmp_path, monkeypatch, small, number, before
):
    faulty(monkeypatch, [None] * before + [failing(number)])
    sink = store.create(tmp_path / "f")

    def fill():
        for seed in range(4):
            sink.append(content(5 * BLOCK + 1, seed))
        sink.finish()

    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        fill()
    assert raised.value.errno == number
    sink.abandon()
    sink.abandon()
    assert os.listdir(tmp_path) == []


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(store, tmp_path, monkeypatch):
    faulty(monkeypatch, [0])
    sink = store.create(tmp_path / "f")
    sink.append(b"x")
    with pytest.raises(OSError, match="nothing was written"):
        sink.finish()
    sink.abandon()


def test_a_failed_fsync_is_raised(store, tmp_path, monkeypatch):
    def refuse(_descriptor):
        raise failing(errno.EIO)

    monkeypatch.setattr(os, "fsync", refuse)
    sink = store.create(tmp_path / "f")
    sink.append(content(10_000))
    with pytest.raises(OSError, match="Input/output error"):
        sink.finish()
    sink.abandon()
    assert os.listdir(tmp_path) == []


def test_direct_writes_that_are_refused_go_through_the_page_cache_and_are_counted(
    tmp_path, monkeypatch, small
):
    if not takes_o_direct(tmp_path):
        pytest.skip("needs a file system that takes O_DIRECT")
    store, pieces = Storage("direct"), [content(4 * BLOCK, 1), content(4 * BLOCK, 2), content(9, 3)]
    faulty(monkeypatch, [None, failing(errno.EINVAL)])
    write(store, tmp_path / "f", pieces)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)
    assert store.retried == 1


def test_direct_reads_that_are_refused_go_through_the_page_cache_and_are_counted(
    tmp_path, monkeypatch, small
):
    (tmp_path / "f").write_bytes(content(50_000))
    if not takes_o_direct(tmp_path):
        pytest.skip("needs a file system that takes O_DIRECT")
    store, real, left = Storage("direct"), os.preadv, [1]

    def refuse(*arguments):
        if left:
            left.pop()
            raise failing(errno.EINVAL)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", refuse)
    assert read(store, tmp_path / "f", 5, 40_000) == content(50_000)[5:40_005]
    assert store.retried == 1


def test_a_disk_that_cannot_read_is_said_with_the_file(store, tmp_path, monkeypatch, small):
    write(store, tmp_path / "f", [content(50_000)])

    def refuse(*_arguments):
        raise failing(errno.EIO)

    monkeypatch.setattr(os, "preadv", refuse)
    for size in (10, 40_000):
        with pytest.raises(
            CheckpointError, match=rf"{tmp_path}/f cannot be read at byte 7: Input/output error"
        ):
            read(store, tmp_path / "f", 7, size)


def test_short_reads_are_continued(store, tmp_path, monkeypatch, small):
    write(store, tmp_path / "f", [content(50_000)])
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][: max(BLOCK, len(buffers[0]) // 2)]], at)
    )
    assert read(store, tmp_path / "f", 100, 45_000) == content(50_000)[100:45_100]


def test_a_missing_file_is_the_systems_error(store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.open(tmp_path / "gone")


def test_signals_do_not_disturb(store, tmp_path, small):
    """EINTR, for real: a timer interrupts whatever can be interrupted."""
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        pieces = [content(9_999, seed) for seed in range(60)]
        write(store, tmp_path / "f", pieces)
        back = read(store, tmp_path / "f", 1, 60 * 9_999 - 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert back == b"".join(pieces)[1:]
    assert rung


# KvikIO


class FakeKvikio(types.ModuleType):
    """KvikIO as far as it is used, on the CPU. `fails` names calls that raise: ("write", 2) is the third write."""

    def __init__(self):
        super().__init__("kvikio")
        fake = self
        self.fails, self.calls, self.compat, self.driver = set(), [], False, True
        self.CompatMode = types.SimpleNamespace(OFF="off", AUTO="auto")
        self.mode, self.open_files = "auto", 0
        self.defaults, self.cufile_driver = types.ModuleType("d"), types.ModuleType("c")
        self.defaults.is_compat_mode_preferred = lambda: fake.compat

        @contextmanager
        def set_mode(key, value):
            assert key == "compat_mode"
            old, fake.mode = fake.mode, value
            yield
            fake.mode = old

        self.defaults.set = set_mode
        self.cufile_driver.get = lambda key: {"is_gds_available": fake.driver}[key]

        class CuFile:
            def __init__(self, path, flags):
                assert fake.mode == "off", "KvikIO could fall back without a word"
                fake.called("open")
                self.fd = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])
                fake.open_files += 1

            def raw_write(self, buffer, size, file_offset):
                short = fake.called("write")
                assert size % BLOCK == 0
                assert file_offset % BLOCK == 0
                return os.pwrite(
                    self.fd, buffer[: size // 2 if short else size].numpy().tobytes(), file_offset
                )

            def raw_read(self, buffer, size, file_offset):
                short = fake.called("read")
                assert size % BLOCK == 0
                assert file_offset % BLOCK == 0
                data = os.pread(self.fd, size // 2 if short else size, file_offset)
                buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return len(data)

            def close(self):
                fake.open_files -= 1
                os.close(self.fd)

        self.CuFile = CuFile

    def called(self, kind):
        """Note a call; it raises when it is to fail, and gives whether it is to do half."""
        number = self.calls.count(kind)
        self.calls.append(kind)
        if (kind, number) in self.fails:
            raise RuntimeError(f"cuFile internal error\nat {kind} {number}")
        return (kind, number, "half") in self.fails


@pytest.fixture
def kvikio(monkeypatch):
    fake = FakeKvikio()
    for name, module in (
        ("kvikio", fake),
        ("kvikio.defaults", fake.defaults),
        ("kvikio.cufile_driver", fake.cufile_driver),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "")  # put back afterwards
    monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE")
    monkeypatch.setattr(gds, "has_gpu", lambda: True)
    monkeypatch.setattr(gds, "device_buffer", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(gds, "_READ_BYTES", 2 * BLOCK)
    for module in (gds, storage):
        monkeypatch.setattr(module, "BOUNCE_BYTES", 4 * BLOCK)
    return fake


PIECES = [content(4 * BLOCK, 1), content(7 * BLOCK + 5, 2), content(5 * BLOCK, 3), content(9, 4)]
WHOLE = b"".join(PIECES)


@pytest.mark.parametrize("wanted", ["auto", "gds"])
def test_kvikio_moves_whole_blocks(kvikio, tmp_path, wanted):
    store = Storage.choose(wanted, tmp_path)
    assert (store.mode, store.reason) == ("gds", None)
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    kvikio.calls.clear()
    write(store, tmp_path / "f", PIECES)
    assert (tmp_path / "f").read_bytes() == WHOLE
    assert kvikio.calls == ["open"] + ["write"] * 4  # 16 blocks and 14 bytes, 4 blocks at a time
    kvikio.calls.clear()
    assert read(store, tmp_path / "f", 3, 10 * BLOCK) == WHOLE[3 : 3 + 10 * BLOCK]
    assert kvikio.calls == ["open"] + ["read"] * 3
    assert read(store, tmp_path / "f", len(WHOLE) - 8200, 8200) == WHOLE[-8200:]
    assert read(store, tmp_path / "f", 3, 10) == WHOLE[3:13]
    assert store.retried == kvikio.open_files == 0


@pytest.mark.parametrize(
    ("fails", "retried"),
    [
        ({("write", 0)}, 1),
        ({("write", 1), ("write", 3)}, 2),
        ({("write", 2, "half")}, 1),
        ({("open", 0)}, 4),
        ({("write", number) for number in range(9)}, 4),
    ],
    ids=["first", "two", "half of one", "open", "all"],
)
def test_writes_that_kvikio_fails_are_done_by_posix_and_counted(kvikio, tmp_path, fails, retried):
    store = Storage.choose("gds", tmp_path)
    kvikio.calls.clear()
    kvikio.fails = fails
    write(store, tmp_path / "f", PIECES)
    assert (tmp_path / "f").read_bytes() == WHOLE
    assert store.retried == retried
    assert kvikio.open_files == 0


@pytest.mark.parametrize(
    "fails",
    [{("read", 0)}, {("read", 1)}, {("read", 1, "half"), ("read", 2)}, {("open", 0)}],
    ids=["first", "second", "two, one half done", "open"],
)
def test_reads_that_kvikio_fails_are_done_by_posix_and_counted(kvikio, tmp_path, fails):
    store = Storage.choose("gds", tmp_path)
    (tmp_path / "f").write_bytes(WHOLE)
    kvikio.calls.clear()
    kvikio.fails = fails
    assert read(store, tmp_path / "f", 5, 10 * BLOCK) == WHOLE[5 : 5 + 10 * BLOCK]
    assert store.retried == 1


def test_a_full_disk_is_told_by_posix_when_kvikio_fails(kvikio, tmp_path, monkeypatch):
    store = Storage.choose("gds", tmp_path)
    kvikio.calls.clear()
    kvikio.fails = {("write", 0)}
    faulty(monkeypatch, [failing(errno.ENOSPC)])
    sink = store.create(tmp_path / "f")
    with pytest.raises(OSError, match="No space left"):
        sink.append(content(4 * BLOCK))
    sink.abandon()
    assert os.listdir(tmp_path) == []
    assert kvikio.open_files == 0


def no_gpu(kvikio, monkeypatch):
    monkeypatch.setattr(gds, "has_gpu", lambda: False)


def no_library(kvikio, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio.defaults", None)


def compatibility_mode(kvikio, monkeypatch):
    kvikio.compat = True


def no_driver(kvikio, monkeypatch):
    kvikio.driver = False


def broken_driver(kvikio, monkeypatch):
    def refuse(_key):
        raise RuntimeError("driver error 5001\nmore")

    kvikio.cufile_driver.get = refuse


def refusing_folder(kvikio, monkeypatch):
    kvikio.fails = {("open", 0)}


def garbled(kvikio, monkeypatch):
    monkeypatch.setattr(
        kvikio.CuFile, "raw_write", lambda self, buffer, size, at: os.pwrite(self.fd, bytes(size), at)
    )


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (no_gpu, "there is no GPU"),
        (no_library, "KvikIO cannot be imported"),
        (compatibility_mode, "compatibility mode"),
        (no_driver, "nvidia-fs driver is not loaded"),
        (broken_driver, r"the cuFile driver does not start \(driver error 5001\)"),
        (refusing_folder, r"cuFile cannot write to .* \(cuFile internal error\)"),
        (garbled, "does not read back"),
    ],
)
def test_where_cufile_would_not_go_directly_posix_runs_with_the_reason_or_forcing_fails(
    kvikio, tmp_path, monkeypatch, trouble, says
):
    trouble(kvikio, monkeypatch)
    store = Storage.choose("auto", tmp_path)
    assert store.mode in MODES
    kvikio.calls.clear()
    with pytest.raises(ConfigError, match=rf"cannot be had: .*{says}.*pip install"):
        Storage.choose("gds", tmp_path)
    assert re.match(f"no GPUDirect Storage: .*{says}", store.reason)
    write(store, tmp_path / "f", PIECES)
    assert (tmp_path / "f").read_bytes() == WHOLE
    assert os.listdir(tmp_path) == ["f"]

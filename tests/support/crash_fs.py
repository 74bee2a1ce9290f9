"""A file system that forgets: what a folder may look like after a power cut, at every moment of a program's work.

`Recorder` lets a program write to a real folder and keeps a log of what it did there. `crashes` then gives, for every
prefix of the log, trees that a disk may hold when the power fails at that moment: what was brought to the disk by
`fsync` is there; of everything else any part may be missing, in any combination. That is harsher than any one file
system: POSIX promises no order between what was not synced.
"""

from __future__ import annotations

import errno
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Tree = dict[str, Any]
"""A folder by name: bytes for a file, a tree for a folder."""


@dataclass(frozen=True)
class Op:
    """One operation. `node` is the folder that a name is changed in, or the file written to; `other` what is linked."""

    kind: str  # link, move, unlink, write, fsync, mark
    node: int = 0
    name: str = ""
    target: str = ""
    other: int = 0
    folder: bool = False
    at: int = 0
    data: bytes = b""
    mark: Any = None


class Recorder:
    """Records what happens below `root` while it is installed, and can refuse the k-th operation as a full disk would.

    Attributes:
        log: the operations so far.
        refused: the numbers of operations (removals are not counted) that fail.
        code: with which error.
        most: how many bytes a write takes at most, where the program writes without a buffer.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Op] = []
        self.refused: range = range(0)
        self.code = errno.ENOSPC
        self.most = 2**62
        self.asked = 0
        self._names: dict[Path, int] = {root: 0}
        self._next = 1
        self._lock = threading.RLock()
        for path in sorted(root.rglob("*")):
            self._link(path, folder=path.is_dir())
            if path.is_file():
                self.log.append(Op("write", self._names[path], data=path.read_bytes()))
        self.log += [Op("fsync", node) for node in self._names.values()]

    def mark(self, value: Any) -> None:
        """Note something in the log."""
        self.log.append(Op("mark", mark=value))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Watch the calls by which programs change files."""
        real_open, real_fsync = Path.open, os.fsync
        recorder = self

        def watched_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "w" not in mode or not recorder._is_ours(path):
                return real_open(path, mode, *arguments, **options)
            recorder._ask()
            with recorder._lock:
                existed = path in recorder._names
                file = real_open(path, mode, *arguments, **options)
                assert not existed, "files are written under new names"
                recorder._link(path, folder=False)
                return _Watched(recorder, file, recorder._names[path])

        def watched_fsync(descriptor: int) -> None:
            path = _path_of(descriptor)
            if recorder._is_ours(path):
                recorder._ask()
            real_fsync(descriptor)
            if path in recorder._names:
                recorder.log.append(Op("fsync", recorder._names[path]))

        patch.setattr(Path, "open", watched_open)
        patch.setattr(os, "fsync", watched_fsync)
        self._watch(patch, "mkdir", self._made, refuses=True)
        self._watch(patch, "rename", self._moved, refuses=True)
        self._watch(patch, "replace", self._moved, refuses=True)
        self._watch(patch, "unlink", self._gone)
        self._watch(patch, "rmdir", self._gone)

    def _watch(
        self, patch: pytest.MonkeyPatch, name: str, note: Callable[..., None], *, refuses: bool = False
    ) -> None:
        real = getattr(os, name)

        def watched(path: Any, *arguments: Any, **options: Any) -> None:
            where = Path(path)
            if options.get("dir_fd") is not None:
                where = _path_of(options["dir_fd"]) / where
            if not self._is_ours(where):
                return real(path, *arguments, **options)
            if refuses:
                self._ask()
            with self._lock:
                real(path, *arguments, **options)
                note(where, *arguments)
            return None

        patch.setattr(os, name, watched)

    def _is_ours(self, path: Path) -> bool:
        return path.is_relative_to(self.root)

    def _ask(self) -> None:
        self.asked += 1
        if self.asked in self.refused:
            raise OSError(self.code, os.strerror(self.code))

    def _link(self, path: Path, *, folder: bool) -> None:
        self._names[path] = self._next
        self.log.append(Op("link", self._names[path.parent], path.name, other=self._next, folder=folder))
        self._next += 1

    def _made(self, path: Path, *_arguments: Any) -> None:
        self._link(path, folder=True)

    def _moved(self, source: Path, target: Any) -> None:
        target = Path(target)
        assert source.parent == target.parent, "names change within a folder"
        self.log.append(Op("move", self._names[source.parent], source.name, target.name))
        moved = {path: node for path, node in self._names.items() if path.is_relative_to(source)}
        for path in moved:
            del self._names[path]
        self._names |= {target / path.relative_to(source): node for path, node in moved.items()}

    def _gone(self, path: Path, *_arguments: Any) -> None:
        self.log.append(Op("unlink", self._names[path.parent], path.name))
        del self._names[path]


class _Watched:
    """A file that is written to."""

    def __init__(self, recorder: Recorder, file: Any, node: int) -> None:
        self._recorder, self._file, self._node, self._at = recorder, file, node, 0

    def write(self, data: Any) -> int:
        self._recorder._ask()
        content = bytes(data)
        if isinstance(self._file, io.RawIOBase):  # who writes through a buffer never sees a short write
            content = content[: self._recorder.most]
        written: int = self._file.write(content)
        self._recorder.log.append(Op("write", self._node, at=self._at, data=content[:written]))
        self._at += written
        return written

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def crashes(log: list[Op], chance: random.Random) -> Iterator[tuple[int, Tree]]:
    """The length of each prefix of the log with each tree that the disk may hold then."""
    for count in range(len(log) + 1):
        prefix = log[:count]
        loose = _not_synced(prefix)
        for lost in _losses(prefix, loose, chance):
            torn = chance.randrange(64) if lost else None
            yield count, _replay(prefix, lost, torn)


def write_tree(tree: Tree, folder: Path) -> None:
    """Make the tree real."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_tree(content, folder / name)


def _not_synced(log: list[Op]) -> list[int]:
    loose: list[int] = []
    for index, op in enumerate(log):
        if op.kind == "fsync":
            loose = [i for i in loose if log[i].node != op.node]
        elif op.kind != "mark":
            loose.append(index)
    return loose


def _losses(log: list[Op], loose: list[int], chance: random.Random) -> list[frozenset[int]]:
    """Which operations are lost: none, all, all data, all names, all from the k-th on, each one, all but one, some."""
    data = [i for i in loose if log[i].kind == "write"]
    names = [i for i in loose if log[i].kind != "write"]
    sets = [(), loose, data, names]
    sets += [loose[k:] for k in range(len(loose))]
    sets += [[*data, *names[k:]] for k in range(len(names))]
    sets += [[i] for i in loose]
    sets += [[j for j in loose if j != i] for i in loose]
    sets += [[i for i in loose if chance.random() < 0.5] for _ in range(12)]
    return list(dict.fromkeys(frozenset(lost) for lost in sets))


def _replay(log: list[Op], lost: frozenset[int], torn: int | None) -> Tree:
    """The tree without the lost operations. Of the first write that is lost, `torn` bytes came through."""
    folders: dict[int, dict[str, int]] = {0: {}}
    files: dict[int, bytearray] = {}
    for index, op in enumerate(log):
        if op.kind == "link":
            if op.folder:
                folders.setdefault(op.other, {})
            else:
                files.setdefault(op.other, bytearray())
        if index in lost:
            if op.kind == "write" and torn is not None:
                files[op.node] += op.data[:torn]
                torn = None
            continue
        _apply(op, folders, files)
    return _tree(0, folders, files)


def _apply(op: Op, folders: dict[int, dict[str, int]], files: dict[int, bytearray]) -> None:
    if op.kind == "link":
        folders[op.node][op.name] = op.other
    elif op.kind == "unlink":
        folders[op.node].pop(op.name, None)
    elif op.kind == "move" and op.name in folders[op.node]:
        folders[op.node][op.target] = folders[op.node].pop(op.name)
    elif op.kind == "write":
        content = files[op.node]
        content += bytes(max(0, op.at - len(content)))  # a hole where an earlier write was lost
        content[op.at : op.at + len(op.data)] = op.data


def _tree(node: int, folders: dict[int, dict[str, int]], files: dict[int, bytearray]) -> Tree:
    return {
        name: _tree(child, folders, files) if child in folders else bytes(files[child])
        for name, child in sorted(folders[node].items())
    }


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

"""Where every chunk lies: the indexes of all packs of a folder, in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault.packs import SUFFIX, TEMPORARY, Entry, padding_after, read_index


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk in a pack, and how many zeros follow it there."""

    pack: str
    entry: Entry
    padding: int


@dataclass
class Index:
    """All packs of a folder as they were when it was last looked at. Threads may share it.

    Attributes:
        folder: where the packs lie; it may not exist yet.
        packs: the chunks of each pack by its name, in the order they lie in it.
        damaged: why a pack cannot be used, by its name.
    """

    folder: Path
    packs: dict[str, Sequence[Place]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    _places: dict[bytes, tuple[Place, ...]] = field(default_factory=dict)
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    _distrusted: set[tuple[str, bytes]] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def refresh(self, again: Iterable[str] = ()) -> bool:
        """Read the packs that are new or changed, and those named in `again`; forget those that have gone.

        Returns:
            Whether any has come, gone or changed.

        Raises:
            OSError: the folder cannot be listed.
        """
        with self._lock:
            found = {path.name: _identity(path) for path in self._listed()}
            gone = self._seen.keys() - found.keys()
            for name in gone:
                self.forget(name)
            changed = {name for name, identity in found.items() if self._seen.get(name) != identity}
            for name in sorted(changed | found.keys() & set(again)):
                self._load(name, found[name])
            return bool(gone or changed)

    def places(self, address: bytes) -> tuple[Place, ...]:
        """The copies of a chunk; those that were found damaged come last."""
        places = self._places.get(address, ())
        if self._distrusted and len(places) > 1:
            return tuple(sorted(places, key=self.is_distrusted))
        return places

    def has(self, address: bytes) -> bool:
        """Whether there is a copy of a chunk that was not found damaged."""
        places = self._places.get(address, ())
        if not self._distrusted:
            return bool(places)
        return not all(self.is_distrusted(place) for place in places)

    def is_distrusted(self, place: Place) -> bool:
        """Whether a copy was found damaged."""
        return (place.pack, place.entry.address) in self._distrusted

    def distrust(self, place: Place) -> None:
        """Remember that a copy is damaged, so that it is not relied on."""
        with self._lock:
            self._distrusted.add((place.pack, place.entry.address))

    def add(self, name: str, entries: Sequence[Entry]) -> None:
        """Take in a pack that this process has just written."""
        with self._lock:
            self._put(name, entries)
            identity = _identity(self.folder / name)
            if identity is not None:
                self._seen[name] = identity

    def forget(self, name: str) -> None:
        """Take out a pack that has gone."""
        with self._lock:
            for place in self.packs.pop(name, ()):
                address = place.entry.address
                left = tuple(other for other in self._places[address] if other.pack != name)
                if left:
                    self._places[address] = left
                else:
                    del self._places[address]
            self._distrusted = {key for key in self._distrusted if key[0] != name}
            self.damaged.pop(name, None)
            self._seen.pop(name, None)

    def _listed(self) -> list[Path]:
        try:
            paths = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in paths if path.name.endswith(SUFFIX) and not path.name.startswith(TEMPORARY)]

    def _load(self, name: str, identity: tuple[int, int, int] | None) -> None:
        self.forget(name)
        if identity is None:
            return  # it went between listing and looking
        path = self.folder / name
        try:
            self._put(name, read_index(path))
        except CheckpointError as error:
            if not path.exists():
                return  # it went while we looked
            self.damaged[name] = str(error)
        self._seen[name] = identity

    def _put(self, name: str, entries: Sequence[Entry]) -> None:
        places = [Place(name, entry, padding_after(entries, at)) for at, entry in enumerate(entries)]
        for place in places:
            address = place.entry.address
            self._places[address] = (*self._places.get(address, ()), place)
        self.packs[name] = places


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from another of its name; None when there is no file of that name."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns

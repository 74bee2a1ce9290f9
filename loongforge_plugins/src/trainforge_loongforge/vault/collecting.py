"""Making room: packs that hold nothing a manifest names go, and those that hold little of it are written anew.

Nothing is deleted before what is live in it lies, durable and checked, in another pack. So a collection may be killed
at any moment: what it leaves behind is extra files, and the next one takes them.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainforge.errors import CheckpointError
from trainforge_loongforge.vault.packs import SUFFIX, TEMPORARY, PackWriter

if TYPE_CHECKING:
    from trainforge_loongforge.vault.index import Index, Place
    from trainforge_loongforge.vault.packs import Entry
    from trainforge_loongforge.vault.reading import Reader
    from trainforge_loongforge.vault.storage import Storage


@dataclass(frozen=True)
class Collected:
    """What a collection did, in bytes of files unless said otherwise.

    Attributes:
        freed_bytes: of the packs that it deleted.
        rewritten_bytes: of the packs that it wrote.
        live_bytes: stored bytes of the live chunks, each once.
        overhead_bytes: stored bytes that are not live and were not worth rewriting.
        deleted: the packs that have gone.
        damaged: packs that were kept although they cannot be read, or not all of them, with the reason: they may hold
            a live chunk that no other pack holds.
        missing: live chunks that no pack holds undamaged, as far as this collection looked.
    """

    freed_bytes: int = 0
    rewritten_bytes: int = 0
    live_bytes: int = 0
    overhead_bytes: int = 0
    deleted: tuple[str, ...] = ()
    damaged: dict[str, str] = field(default_factory=dict)
    missing: frozenset[bytes] = frozenset()


class Collector:
    """One collection. `run` may be called once."""

    def __init__(self, storage: Storage, index: Index, reader: Reader, live: Collection[bytes]) -> None:
        self._storage, self._index, self._reader = storage, index, reader
        self._live = frozenset(live)
        self._name = f"collect{uuid.uuid4().hex}-r00000"
        self._writer: PackWriter | None = None
        self._written = self._freed = self._rewritten = 0
        self._deleted: list[str] = []
        self._damaged = dict(index.damaged)
        self._lost: set[bytes] = set()
        self._copied: set[bytes] = set()
        self._copied_packs: list[str] = []

    def run(self) -> Collected:
        """Delete what is dead, rewrite what is mostly dead; see `Store.collect`."""
        missing = {address for address in self._live if not self._index.places(address)}
        if not missing:  # then nothing that anybody needs can be in a pack that cannot be read
            self._drop(list(self._damaged))
        homes = self._homes()
        going = [pack for pack in self._index.packs if self._is_mostly_dead(pack, homes)]
        alive = [pack for pack in going if self._live_in(pack)]
        self._drop(set(going) - set(alive))  # first: this makes room for what is written anew
        try:
            self._rewrite(alive)
        except BaseException:
            if self._writer is not None:
                self._writer.abandon()
            raise
        return self._report(missing)

    def _homes(self) -> dict[bytes, str]:
        """The pack that keeps each live chunk: of several copies, the one in the pack that is most alive."""
        alive = {pack: self._share(pack) for pack in self._index.packs}
        homes: dict[bytes, str] = {}
        for pack in sorted(alive, key=lambda name: (alive[name], name), reverse=True):
            for place in self._live_in(pack):
                address = place.entry.address
                best = self._index.places(address)[0].pack  # another when this copy is known to be damaged
                homes.setdefault(address, best if self._index.is_distrusted(place) else pack)
        return homes

    def _is_mostly_dead(self, pack: str, homes: dict[bytes, str]) -> bool:
        stored = sum(place.entry.stored for place in self._index.packs[pack])
        needed = [p.entry.stored for p in self._live_in(pack) if homes[p.entry.address] == pack]
        return not needed or (2 * sum(needed) <= stored and stored > 0)

    def _share(self, pack: str) -> float:
        """How much of a pack is live, by stored bytes, whether or not there are other copies."""
        stored = sum(place.entry.stored for place in self._index.packs[pack])
        return sum(place.entry.stored for place in self._live_in(pack)) / stored if stored else 0.0

    def _live_in(self, pack: str) -> list[Place]:
        return [place for place in self._index.packs[pack] if place.entry.address in self._live]

    def _rewrite(self, going: Sequence[str]) -> None:
        """Copy what is live in these packs, and delete each as soon as its copies are durable."""
        leaving = set(going)
        for pack in going:
            rescued = [self._rescue(place, leaving) for place in self._live_in(pack)]  # all that can be
            if all(rescued):
                self._copied_packs.append(pack)
            else:
                leaving.discard(pack)
        self._finish()

    def _rescue(self, place: Place, leaving: Collection[str]) -> bool:
        """See that a live chunk is in a pack that stays; False when only this copy, damaged as it is, is left."""
        address = place.entry.address
        if address in self._copied:
            return True
        copies = self._index.places(address)
        for copy in copies:
            if copy.pack not in leaving and copy.pack != place.pack and self._stored(copy) is not None:
                return True
        for copy in copies:
            data = self._stored(copy)
            if data is not None:
                self._copy(copy.entry, data)
                return True
        self._lost.add(address)
        self._damaged[place.pack] = f"chunk {address.hex()[:12]}, which is live, is damaged in {place.pack}"
        return False

    def _stored(self, place: Place) -> memoryview | None:
        """What a copy holds, if it is whole."""
        try:
            return self._reader.stored(place)
        except (CheckpointError, OSError):
            return None

    def _copy(self, entry: Entry, data: memoryview) -> None:
        if self._writer is not None and not self._writer.has_room(entry.stored):
            self._finish()
        if self._writer is None:
            path = self._index.folder / f"{self._name}-{self._written:03d}{SUFFIX}"
            self._writer = PackWriter(path, self._storage)
            self._written += 1
        self._writer.add(entry.address, entry.xxh3_128, data, entry.codec, entry.length)
        self._copied.add(entry.address)

    def _finish(self) -> None:
        """Make the copies so far durable; the packs that they were all copied from can go."""
        if self._writer is not None:
            self._rewritten += self._writer.finish()
            self._index.add(self._writer.path.name, self._writer.entries)
            self._writer = None
        self._drop(self._copied_packs)
        self._copied_packs = []

    def _drop(self, packs: Iterable[str]) -> None:
        for name in packs:
            path = self._index.folder / name
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                self._freed += size
            self._index.forget(name)
            self._reader.close(name)
            self._damaged.pop(name, None)
            self._deleted.append(name)

    def _report(self, missing: Collection[bytes]) -> Collected:
        stored = sum(place.entry.stored for places in self._index.packs.values() for place in places)
        copies = (self._index.places(address) for address in self._live)
        alive = sum(places[0].entry.stored for places in copies if places)
        return Collected(
            freed_bytes=self._freed,
            rewritten_bytes=self._rewritten,
            live_bytes=alive,
            overhead_bytes=stored - alive,
            deleted=tuple(self._deleted),
            damaged=self._damaged,
            missing=frozenset(missing) | self._lost,
        )


def remove_leftovers(folder: Path) -> int:
    """Remove what writers that were killed have left; gives how many files there were."""
    dead = list(folder.glob(f"{TEMPORARY}*{SUFFIX}")) if folder.is_dir() else []
    for path in dead:
        path.unlink(missing_ok=True)
    return len(dead)

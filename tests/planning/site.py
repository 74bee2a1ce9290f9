"""Fake distributions: dist-info folders and modules in temporary folders, found as an installation would be."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainforge.discovery import Catalog, scan
from trainforge.provider import STAGES

HEAD = """
from trainforge.hookspecs import hookimpl
from trainforge.provider import Provider, Section, Traits
def build(ctx, config): return config
"""


def stage(name: str, arguments: str = "") -> str:
    """Source of a hook that gives a provider for a stage."""
    return f"@hookimpl\ndef forge_{name}():\n    return Provider(build=build, {arguments})\n"


class Site:
    """Folders on `sys.path` with fake distributions. Modules are forgotten when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: set[str] = set()

    def add(
        self,
        distribution: str,
        plugins: Mapping[str, str],
        *,
        defaults: Sequence[str] = (),
        version: str = "1.0",
        folder: str = "site-packages",
        requires: str = "",
    ) -> Path:
        """Install a distribution: one module per plugin. `defaults` are entries such as `data=NAME`."""
        where = self.folder / folder
        info = where / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{requires}"
        )
        prefix = distribution.replace("-", "_")
        lines = [
            "[trainforge.plugins]",
            *(f"{name} = {prefix}_{name}" for name in plugins),
            "[trainforge.defaults]",
        ]
        for entry in defaults:
            key, _, name = entry.partition("=")
            lines.append(f"{key} = {prefix}_{name}")
        (info / "entry_points.txt").write_text("\n".join(lines))
        for name, source in plugins.items():
            (where / f"{prefix}_{name}.py").write_text(HEAD + textwrap.dedent(source))
            self.modules.add(f"{prefix}_{name}")
        self.on_path(where)
        return where

    def scan(self) -> Catalog:
        """The catalog of this site alone, without what is really installed."""
        return scan([entry for entry in sys.path if entry.startswith(str(self.folder))])

    def on_path(self, folder: Path) -> None:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))

    def standard(self) -> Site:
        """One default plugin per stage, `d_STAGE`, and the default observer `watcher`."""
        plugins = {f"d_{name}": stage(name, "default=True") for name in STAGES}
        plugins["watcher"] = stage("observer", "default=True")
        self.add("standard", plugins, defaults=[*(f"{s}=d_{s}" for s in STAGES), "watcher=watcher"])
        return self

    def imported(self) -> set[str]:
        """Which of the fake modules are imported."""
        return self.modules & set(sys.modules)


def make_site(folder: Path) -> Iterator[Site]:
    """A site whose traces are removed from the interpreter afterwards."""
    before = list(sys.path)
    site = Site(folder)
    yield site
    sys.path[:] = before
    for name in [*site.modules, *(n for n in sys.modules if n.startswith("trainforge_local_"))]:
        sys.modules.pop(name, None)

"""Finding plugins: what is installed, read from metadata without importing anything, and loading the chosen ones.

The scan is our own because the standard look-up skips the second of two distributions that claim one name without a
word, and because importing every installed plugin would let a broken one, not even asked for, stop a run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from trainforge.errors import SelectionError
from trainforge.provider import STAGES, Provider
from trainforge.wording import did_you_mean, listed

PLUGINS_GROUP = "trainforge.plugins"
DEFAULTS_GROUP = "trainforge.defaults"
RESERVED = ("run", "model", "train", "plugins")
"""Sections of a recipe that core owns; no plugin can have such a name."""

LOCAL_FILE = "local file"
"""The distribution of a plugin that was given as a file."""


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from, known without importing it.

    Attributes:
        name: the plugin's name, which is also its section in a recipe.
        value: `package.module` or `package.module:object`; for a local file its absolute path.
        distribution, version: who installed it. A local file's version is a digest of its content.
        path: the folder or file that it was found in.
    """

    name: str
    value: str
    distribution: str
    version: str
    path: Path

    @property
    def reference(self) -> str:
        """What `--plugins` takes to choose exactly this plugin."""
        return self.value if self.distribution == LOCAL_FILE else self.name

    def __str__(self) -> str:
        if self.distribution == LOCAL_FILE:
            return f"{self.name} ({self.path})"
        return f"{self.name} of {self.distribution} {self.version} ({self.path})"


@dataclass(frozen=True)
class Plugin:
    """An imported plugin: the object whose hook implementations count, and where it comes from."""

    source: Source
    implementation: object

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.source.name


class Catalog:
    """What is installed: plugins by name, and who claims to be whose default.

    Attributes:
        plugins: the claims to each name: more than one when several distributions use it.
        defaults: the plugins that distributions name as defaults, by stage; observers under `"observer"`.
    """

    def __init__(self, plugins: Iterable[Source], defaults: Iterable[tuple[str, Source]]) -> None:
        self.plugins: dict[str, list[Source]] = {}
        self.defaults: dict[str, list[Source]] = {}
        for source in plugins:
            self.plugins.setdefault(source.name, []).append(source)
        for stage, source in defaults:
            self.defaults.setdefault(stage, []).append(source)
        self._loaded: dict[str, Plugin] = {}

    def find(self, reference: str) -> Source:
        """The source of a plugin's name, or of a file such as `./mine.py`.

        Raises:
            SelectionError: nobody, or more than one distribution, provides it; or there is no such file.
        """
        if is_file(reference):
            return _local(Path(reference))
        if reference in RESERVED:
            raise SelectionError(f"{reference} is a section of every recipe and no plugin name")
        claims = self.plugins.get(reference, [])
        if not claims:
            meant = did_you_mean(reference, self.plugins) or "."
            raise SelectionError(
                f"no plugin is called {reference}{meant} Installed: {listed(self.plugins)}. "
                f"A plugin in a file is given by its path: ./{reference}.py"
            )
        if len(claims) > 1:
            raise SelectionError(
                f"two distributions claim the plugin name {reference}: "
                + " and ".join(f"{c.distribution} {c.version} ({c.path})" for c in claims)
                + ". Uninstall one of them"
            )
        return claims[0]

    def load(self, source: Source) -> Plugin:
        """Import a plugin, once.

        Raises:
            SelectionError: it cannot be imported; names plugin, distribution, version and the import's error.
        """
        key = f"{source.distribution} {source.value}"
        if key not in self._loaded:
            self._loaded[key] = Plugin(source, _import(source))
        return self._loaded[key]


def scan(path: Sequence[str] | None = None) -> Catalog:
    """Read the metadata of every distribution on `path` (default: `sys.path`).

    The same distribution found again (a symlinked folder, an editable install beside its source tree, a folder
    twice on PYTHONPATH) counts once: the first wins, as it does for imports.
    """
    found = (
        importlib.metadata.distributions()
        if path is None
        else importlib.metadata.distributions(path=list(path))
    )
    plugins: list[Source] = []
    defaults: list[tuple[str, Source]] = []
    seen: set[str] = set()
    for distribution in found:
        if "trainforge." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        about = distribution.metadata
        name = re.sub(r"[-_.]+", "-", about["Name"] or "unnamed").lower()
        if name in seen:
            continue
        seen.add(name)
        where, version = Path(str(distribution.locate_file(""))), about["Version"] or "unknown"
        points = {(p.group, p.name, p.value) for p in distribution.entry_points}
        own = [Source(n, v, name, version, where) for g, n, v in sorted(points) if g == PLUGINS_GROUP]
        plugins += own
        for _, key, value in sorted(p for p in points if p[0] == DEFAULTS_GROUP):
            claimed = next((s for s in own if s.value == value), None)
            if claimed is not None:
                defaults.append((key if key in STAGES else "observer", claimed))
    return Catalog(plugins, defaults)


def is_file(reference: str) -> bool:
    """Whether a reference to a plugin is the path of a file, and not a name."""
    return reference.endswith(".py") or "/" in reference


def load_provider(reference: str, stage: str) -> Provider:
    """The provider that one installed plugin (or a plugin's file) gives for a stage, apart from any run.

    Raises:
        SelectionError: there is no such plugin, it cannot be loaded, or it does not serve that stage.
    """
    from trainforge.hooks import Hooks  # which needs this module

    catalog = scan()
    plugin = catalog.load(catalog.find(reference))
    hooks = Hooks([plugin])
    if not hooks.owners(f"forge_{stage}"):
        raise SelectionError(f"plugin {plugin.source} does not serve the stage {stage}")
    return hooks.provider(f"forge_{stage}", plugin)


def pip_hint(source: Source, error: BaseException) -> str:
    """A sentence with the pip command for the library whose absence caused `error`, or an empty string."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing:
        return ""
    missing = missing.partition(".")[0]
    if source.distribution == LOCAL_FILE:
        return f" Install what is missing: pip install {missing}"
    if missing == source.value.partition(".")[0].partition(":")[0]:
        return f" Install it again: pip install --force-reinstall --no-deps {source.distribution}"
    return f" Install what is missing: pip install {_requirement(source, missing)}"


def _requirement(source: Source, missing: str) -> str:
    """The distribution with the extra named like the plugin, or that asks for the library; else the library."""
    try:
        about = importlib.metadata.metadata(source.distribution)
    except importlib.metadata.PackageNotFoundError:
        return missing
    if source.name in (about.get_all("Provides-Extra") or []):
        return f'"{source.distribution}[{source.name}]"'
    for requirement in about.get_all("Requires-Dist") or []:
        name = re.match(r"[\w.-]+", requirement)
        if name and name[0].lower().replace("-", "_") == missing.lower():
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
            return f'"{source.distribution}[{extra[1]}]"' if extra else source.distribution
    return missing


def _local(path: Path) -> Source:
    try:
        real = path.expanduser().resolve(strict=True)
        content = real.read_bytes()
    except OSError as error:
        raise SelectionError(f"the plugin file {path} cannot be read: {error.strerror}") from error
    name = real.stem
    if real.suffix != ".py" or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        raise SelectionError(
            f"{path} is no plugin: it must be a Python file whose name can be a recipe section"
        )
    if name in RESERVED:
        raise SelectionError(f"{path}: {name} is a section of every recipe; rename the file")
    return Source(name, str(real), LOCAL_FILE, hashlib.sha256(content).hexdigest()[:12], real)


def _import(source: Source) -> object:
    try:
        if source.distribution == LOCAL_FILE:
            return _import_file(source)
        module, _, attributes = source.value.partition(":")
        loaded: object = importlib.import_module(module.strip())
        for attribute in filter(None, attributes.strip().split(".")):
            loaded = getattr(loaded, attribute)
    except Exception as error:
        raise SelectionError(
            f"plugin {source} cannot be loaded: {type(error).__name__}: {error}.{pip_hint(source, error)}"
        ) from error
    if inspect.isclass(loaded):
        raise SelectionError(f"plugin {source} is a class: give a module or an instance")
    return loaded


def _import_file(source: Source) -> ModuleType:
    """Import a file under a name that no other module has. It stays in `sys.modules`, as pickling needs."""
    name = f"trainforge_local_{source.name}_{hashlib.sha256(source.value.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, source.value)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source.value} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

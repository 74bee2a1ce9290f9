"""What every plugin must satisfy, and what the conformance classes share."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainforge.errors import SelectionError
from trainforge.hooks import PROVIDER_HOOKS, check_hooks, implemented
from trainforge.provider import Provider, Section, Traits
from trainforge.testing.bench import (
    PluginReference,
    Stages,
    build_stages,
    load_plugin,
    providers_of,
    tiny_context,
)

HEAVY = ("torch", "numpy", "transformers", "triton", "scipy", "pandas", "deepspeed", "nvidia")
"""Libraries that importing a plugin's entry module must not load: `forge --help` would wait for them."""

_IMPORT = """
import importlib, importlib.util, sys
reference = sys.argv[1]
if reference.endswith('.py'):
    spec = importlib.util.spec_from_file_location('plugin_under_test', reference)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    importlib.import_module(reference)
print(' '.join(name for name in sys.argv[2:] if name in sys.modules))
"""


class PluginConformance:
    """The rules for any plugin. Subclass the class of your stage; it brings these rules too.

    Attributes:
        plugin: the plugin's name, its file, `"package.module"` or `"package.module:object"`.
        config: its recipe section.
        others: further plugins that the tests run it with; stages that nobody owns are the reference ones.
        sections: the recipe sections of those, by name.
        train: keys of the recipe's `train` section that it needs.
        device: what it runs on.
    """

    plugin: ClassVar[PluginReference]
    config: ClassVar[Mapping[str, Any]] = {}
    others: ClassVar[tuple[PluginReference, ...]] = ()
    sections: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    train: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"

    stage: ClassVar[str | None] = None
    """The stage whose contract a subclass checks."""

    def provider(self) -> Provider:
        """The provider of the stage under test."""
        given = providers_of(load_plugin(self.plugin))
        stage = self.stage or next(iter(given), None)
        assert stage in given, (
            f"{self.plugin} serves no {self.stage or 'stage'}: it implements {sorted(given)}"
        )
        return given[stage]

    def build(self, folder: Path, **facts: Any) -> Stages:
        """All six stages with this plugin's in place; `facts` are arguments of `tiny_context`."""
        facts.setdefault("device", self.device)
        facts["train"] = {**self.train, **facts.get("train", {})}
        sections = {load_plugin(self.plugin).name: self.config, **self.sections}
        return build_stages(tiny_context(folder, **facts), (self.plugin, *self.others), sections)

    def test_importing_it_is_light(self, tmp_path: Path) -> None:
        """The entry module loads no heavy library."""
        target = str(self.plugin)
        source = load_plugin(self.plugin).source
        if not target.endswith(".py"):
            target = source.value.partition(":")[0]
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, target, *HEAVY],
            capture_output=True,
            text=True,
            env=_environment(),
            check=False,
        )
        assert done.returncode == 0, f"importing {target} failed:\n{done.stderr}"
        loaded = done.stdout.split()
        assert not loaded, f"importing {target} loads {', '.join(loaded)}: import them inside `build`"

    def test_its_hooks_are_right(self, tmp_path: Path) -> None:
        """Hook names and arguments exist, none has a default value, each is marked."""
        plugin = load_plugin(self.plugin)
        try:
            check_hooks(plugin.implementation, plugin.source)
        except SelectionError as error:
            raise AssertionError(str(error)) from None
        assert implemented(plugin.implementation), (
            f"{self.plugin} implements no hook: mark functions with @hookimpl"
        )

    def test_a_provider_is_a_value(self, tmp_path: Path) -> None:
        """Asking twice gives equal, complete providers."""
        implementation = load_plugin(self.plugin).implementation
        for hook in implemented(implementation):
            if hook not in PROVIDER_HOOKS:
                continue
            first, second = getattr(implementation, hook)(), getattr(implementation, hook)()
            assert isinstance(first, Provider), f"{hook} must return a Provider, not {type(first).__name__}"
            assert first == second, (
                f"{hook} gives another provider each time: use module-level functions for `build`"
            )
            assert isinstance(first.traits, Traits), f"the traits of {hook} must be a Traits"
            _check_calls(hook, first)
            if first.quickstart is not None:
                package, _, path = first.quickstart.partition(":")
                assert (files(package) / path).is_file(), f"{hook}: there is no quickstart {first.quickstart}"

    def test_its_section_is_strict(self, tmp_path: Path) -> None:
        """The section is frozen, and a key that it does not know is an error."""
        for stage, provider in providers_of(load_plugin(self.plugin)).items():
            section = provider.config
            assert issubclass(section, Section), (
                f"the config of the {stage} provider must be a subclass of trainforge.provider.Section"
            )
            assert section.model_config.get("extra") == "forbid", (
                f"{section.__name__} accepts unknown keys: leave extra='forbid', or misspelt options go unnoticed"
            )
            assert section.model_config.get("frozen"), (
                f"{section.__name__} must stay frozen: the plan is hashed"
            )
            for name, field in section.model_fields.items():
                assert field.description, (
                    f"{section.__name__}.{name} needs a description: it becomes documentation"
                )


def _check_calls(hook: str, provider: Provider) -> None:
    for what, function, arguments in (
        ("build", provider.build, ("ctx", "config")),
        ("estimate", provider.estimate, ("ctx", "model", "config")),
        ("tokenizer", provider.tokenizer, ("ctx", "config")),
    ):
        if function is None:
            continue
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise AssertionError(f"{hook}: {what} must take ({', '.join(arguments)}): {error}") from None


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def refusal(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """The exception that a call ended with, or None."""
    try:
        action(*arguments)
    except Exception as error:
        return error
    return None


def assert_close(ours: Tensor, wanted: Tensor, what: str, *, tolerance: float = 1e-6) -> None:
    """Assert that two tensors agree within `tolerance`, relative to the largest magnitude (and absolute below 1)."""
    assert ours.shape == wanted.shape, f"{what}: shape {tuple(ours.shape)} instead of {tuple(wanted.shape)}"
    if not wanted.numel():
        return
    difference = float((ours.double().cpu() - wanted.double().cpu()).abs().max())
    limit = tolerance * max(1.0, float(wanted.double().abs().max()))
    assert difference <= limit, (
        f"{what}: differs from the reference by {difference:.2e} (allowed: {limit:.0e})"
    )


def assert_same(ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Assert that two sets of tensors are bit-identical."""
    assert ours.keys() == wanted.keys(), f"{what}: {sorted(set(ours) ^ set(wanted))} in only one of them"
    for name, tensor in wanted.items():
        assert torch.equal(ours[name], tensor), f"{what}: {name} changed"

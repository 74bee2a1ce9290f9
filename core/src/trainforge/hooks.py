"""pluggy, used once per run: checking a plugin's hook implementations and asking for providers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pluggy

from trainforge import hookspecs
from trainforge.discovery import Plugin, Source, pip_hint
from trainforge.errors import SelectionError, TrainForgeError
from trainforge.provider import STAGES, Provider
from trainforge.wording import did_you_mean, listed

_MARK = f"{hookspecs.PROJECT}_impl"
HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith("forge_")
}
"""The arguments of every hook, by the hook's name."""

PROVIDER_HOOKS = (*(f"forge_{stage}" for stage in STAGES), "forge_observer")
EVENT_HOOKS = tuple(name for name in HOOKS if name not in PROVIDER_HOOKS)


def implemented(plugin: object) -> dict[str, dict[str, Any]]:
    """Pluggy's options of every hook that an object implements, by hook name."""
    return {hook: options for _, _, hook, options in _marked(plugin)}


def check_hooks(plugin: object, source: Source) -> None:
    """Refuse hook implementations that would never be called, or not as their author thinks.

    Raises:
        SelectionError: a misspelt hook, an unknown argument, one with a default value, or a hook without its mark.
            All of them are in the message, each with plugin, file and line.
    """
    problems = [*_unmarked(plugin)]
    for attribute, function, hook, _ in _marked(plugin):
        where = f"{_place(function)}{attribute}"
        if hook not in HOOKS:
            problems.append(
                f"{where}: there is no hook {hook}{did_you_mean(hook, HOOKS)} (hooks: {listed(HOOKS)})"
            )
            continue
        for parameter in inspect.signature(function).parameters.values():
            problems += [f"{where}: {problem}" for problem in _argument(parameter, hook)]
    if problems:
        raise SelectionError(f"plugin {source}: " + "\n".join(problems))


def _argument(parameter: inspect.Parameter, hook: str) -> Iterator[str]:
    allowed = ", ".join(HOOKS[hook]) or "none"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
        yield f"argument {parameter.name} must be a plain named one; allowed arguments: {allowed}"
    elif parameter.name not in HOOKS[hook]:
        meant = did_you_mean(parameter.name, HOOKS[hook])
        yield f"unknown argument {parameter.name}{meant} (allowed arguments: {allowed})"
    elif parameter.default is not parameter.empty:
        yield f"argument {parameter.name} must not have a default value"


def _marked(plugin: object) -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    for attribute in dir(plugin):
        if isinstance(inspect.getattr_static(plugin, attribute, None), property):
            continue
        function = getattr(plugin, attribute, None)
        options = getattr(function, _MARK, None) if inspect.isroutine(function) else None
        if isinstance(options, dict):
            yield attribute, function, options.get("specname") or attribute, options


def _unmarked(plugin: object) -> Iterator[str]:
    marked = {attribute for attribute, *_ in _marked(plugin)}
    for attribute in dir(plugin):
        if not attribute.startswith("forge_") or attribute in marked:
            continue
        function = getattr(plugin, attribute, None)
        if inspect.isroutine(function) and not hasattr(function, f"{hookspecs.PROJECT}_spec"):
            yield f"{_place(function)}{attribute} lacks @hookimpl (from trainforge.hookspecs) and would never be called"


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""


class Hooks:
    """One run's plugins, registered with a pluggy manager of its own that is thrown away with it.

    Raises:
        SelectionError: a plugin implements no hook, or one wrongly.
    """

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._plugins = list(plugins)
        for plugin in reversed(plugins):  # pluggy calls the last registered first
            check_hooks(plugin.implementation, plugin.source)
            if not implemented(plugin.implementation):
                raise SelectionError(
                    f"plugin {plugin.source} implements no hook: mark its functions with @hookimpl"
                )
            try:
                self._manager.register(plugin.implementation, name=plugin.source.reference)
            except Exception as error:
                raise SelectionError(f"plugin {plugin.source} cannot be registered: {error}") from error
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise SelectionError(str(error)) from error

    def owners(self, hook: str) -> list[Plugin]:
        """The plugins that implement a hook, wrappers apart, in the order in which they were chosen."""
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        owning = {id(i.plugin) for i in implementations if not (i.wrapper or i.hookwrapper)}
        return [plugin for plugin in self._plugins if id(plugin.implementation) in owning]

    def wraps(self, plugin: Plugin) -> bool:
        """Whether a plugin wraps somebody's hook."""
        return any(
            o.get("wrapper") or o.get("hookwrapper") for o in implemented(plugin.implementation).values()
        )

    def provider(self, hook: str, plugin: Plugin) -> Provider:
        """Ask one owner for its provider, through the wrappers of others.

        Raises:
            SelectionError: it failed, or gave something else.
        """
        others = [p.implementation for p in self.owners(hook) if p is not plugin]
        call = self._manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            given = call()
        except TrainForgeError:
            raise
        except Exception as error:
            raise SelectionError(
                f"plugin {plugin.source} failed in {hook}: {type(error).__name__}: {error}."
                f"{pip_hint(plugin.source, error)}"
            ) from error
        if isinstance(given, list):  # forge_observer is asked one plugin at a time
            given = given[0] if given else None
        if not isinstance(given, Provider):
            raise SelectionError(
                f"plugin {plugin.source}: {hook} must return a Provider, not {type(given).__name__}"
            )
        return given

"""`model.init_from`: a run that starts from the weights which another run has trained. Cheap to import.

Only weights are taken over: the fp32 masters of the other run's checkpoint, and for what was frozen there the weights
that it started from. Moments, counters and the position in the data start anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainforge.blame import blaming
from trainforge.checkpoints import open_reader
from trainforge.errors import CheckpointError, ConfigError, UserError
from trainforge.recipe_file import read_recipe
from trainforge.stored_run import (
    StoredWeights,
    build_model,
    choose_checkpoint,
    open_run,
    parse_reference,
    recipe_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from trainforge.context import Context
    from trainforge.stages import Checkpoint, Extent, ModelSpec, ParameterSpec
    from trainforge.stored_run import StoredRun
    from trainforge_plugins.hf import ModelSection
    from trainforge_plugins.hf.initial import Weights

SOURCES = ("hf", "config", "factory")
"""Keys of the section that say which model it is."""

_LISTED = 8


def settled(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section with the step of `init_from` written down, and the other run's model if it names none.

    So the effective recipe says for good what the run started from, whatever the other run saves or deletes later. What
    is complete already is left alone: the other run need not exist any more.

    Raises:
        UserError: there is no such run or checkpoint.
    """
    values = dict(values)
    folder, step = parse_reference(values["init_from"])
    named = any(values.get(key) is not None for key in SOURCES)
    if not isinstance(step, int):
        step = choose_checkpoint(folder, step, "model.init_from: RUN@STEP").step
    if not named:
        model = read_recipe(recipe_of(folder)).get("model") or {}
        if model.get("factory") is not None:
            raise UserError(
                f"the model of {folder} is made by code ({model['factory']}), which runs only when this recipe names "
                f"it too: read it, then add model.factory: {model['factory']}"
            )
        values |= {key: model[key] for key in SOURCES if model.get(key) is not None}
    return values | {"init_from": f"{folder}@{step}"}


def start_from(ctx: Context, spec: ModelSpec, section: ModelSection) -> None:
    """Let the initial weights of `spec` be those of the stored run, adapters and frozen parameters included.

    Adapters of the other run are taken over as they are by a run with the same `model.lora` (dropout apart); otherwise
    they are added to the weights that they adapt.

    Raises:
        ConfigError: the run cannot be used, or its parameters are not those of this model.
    """
    from trainforge_plugins.hf.factory import FactoryModel
    from trainforge_plugins.hf.lora import AdapterWeights, is_adapter
    from trainforge_plugins.hf.spec import HuggingFaceModel

    if not isinstance(spec, HuggingFaceModel | FactoryModel):
        raise ConfigError(
            "model.init_from works on torch modules, and model.factory returned a ModelSpec of its own"
        )
    if ctx.restored and all(parameter.trainable for parameter in spec.parameters):
        return
    source = _opened(ctx, section)
    own, other = _without_adapters(spec), _without_adapters(source.model, source.weights)
    names = _compare(source.where, own, other)
    adapters = {s.name: s.shape for s in source.model.parameters if is_adapter(s.name)}
    same = _same_adapters(section, source) and adapters == {
        s.name: s.shape for s in spec.parameters if is_adapter(s.name)
    }
    weights = StoredInitial(source, source.weights if same else other.weights, names)
    if section.lora is not None and not same:
        assert isinstance(spec.weights_source, AdapterWeights), "model.lora was applied"
        spec.weights_source.base = weights
    else:
        spec.weights_source = weights
    spec.source = str(getattr(source.model, "source", "")) if same else ""  # what exported adapters belong to
    how = ", adapters as they are" if same else ", its adapters added to them" if adapters else ""
    spec.origin = f"weights: of {source.where}{how}; optimizer, counters and data start anew"


@dataclass(frozen=True)
class Source:
    """The run that weights come from.

    Attributes:
        where: its checkpoint, in words.
        model: its model, on meta.
        weights: a parameter or persistent buffer by its name in `model`.
    """

    where: str
    stored: StoredRun
    ctx: Context
    model: ModelSpec
    reader: Checkpoint
    weights: StoredWeights


class StoredInitial:
    """Initial weights out of a stored run, one tensor at a time.

    Args:
        weights: a parameter or persistent buffer by the name it has there.
        names: the names of the new model's parameters there.
    """

    def __init__(self, source: Source, weights: Weights, names: Mapping[str, str]) -> None:
        self.source, self.weights, self.names = source, weights, names
        self._last: tuple[str, Tensor] | None = None

    def fill(self, spec: ParameterSpec, out: Tensor, extent: Extent) -> None:
        """Fill `out` with a span of the parameter."""
        if self._last is None or self._last[0] != spec.name:
            self._last = None  # before the next is read: never two at a time
            self._last = (spec.name, self._read(spec.name))
        out.copy_(self._last[1].reshape(-1)[extent.offset : extent.offset + extent.length])
        if extent.offset + extent.length == spec.elements:
            self._last = None

    def fill_buffers(self, module: nn.Module) -> None:
        """Fill the persistent buffers."""
        for name in _persistent_buffers(module):
            buffer = module.get_buffer(name)
            buffer.copy_(self._read(name).view(buffer.shape))

    def close(self) -> None:
        """Give the checkpoint back, and what that run's model holds open."""
        self.source.reader.close()
        self.source.model.close()

    def _read(self, name: str) -> Tensor:
        stored = self.source.stored.checkpoint
        try:
            with blaming(self.source.ctx, stored.writer, "checkpoint", f"reading {stored.path}"):
                return self.weights(self.names.get(name, name))
        except CheckpointError as error:
            raise CheckpointError(
                f"model.init_from: {error}: name another step of that run (RUN@STEP)"
            ) from error


@dataclass(frozen=True)
class _Plain:
    """A model as it is without adapters."""

    module: nn.Module
    parameters: Iterable[ParameterSpec]
    weights: Weights


def _opened(ctx: Context, section: ModelSection) -> Source:
    folder, step = parse_reference(str(section.init_from))
    where = f"step {step} of {folder}"
    try:
        stored = open_run(
            folder,
            step,
            _overrides(folder, section),
            needs=("model",),
            allowed=section.runs_code(),
            asked="step",
        )
        built = build_model(stored, ctx.device, ctx.console)
    except UserError as error:
        needed = "; frozen parameters of this run are in none of its own checkpoints" if ctx.restored else ""
        raise ConfigError(
            f"model.init_from: the weights of {where} cannot be read{needed}: {error}"
        ) from error
    reader = open_reader(stored.checkpoint)
    weights = StoredWeights(reader, stored.checkpoint.path, built.model)
    return Source(where, stored, built, built.model, reader, weights)


def _overrides(folder: Path, section: ModelSection) -> list[str]:
    """The other run's own word does not allow code to run here."""
    model = read_recipe(recipe_of(folder)).get("model") or {}
    trusting = model.get("trust_remote_code", False) and not section.trust_remote_code
    return ["model.trust_remote_code=false"] if trusting else []


def _without_adapters(model: Any, weights: Any = None) -> _Plain:
    merged = getattr(model, "merged", None)
    return _Plain(model.module, model.parameters, weights) if merged is None else _Plain(*merged(weights))


def _same_adapters(section: ModelSection, source: Source) -> bool:
    """Whether adapters of that run mean the same here: the same layers (compared by the caller), size and factor."""
    before = getattr(source.stored.plan.recipe.model, "lora", None)
    now = section.lora
    if before is None or now is None:
        return False
    return bool((before.rank, before.alpha, before.rslora) == (now.rank, now.alpha, now.rslora))


def _compare(where: str, own: _Plain, other: _Plain) -> dict[str, str]:
    """Refuse parameters and persistent buffers that differ in name or shape, all at once.

    Returns:
        The name there of each parameter here. A tied one is found under any of its names.

    Raises:
        ConfigError: lists them.
    """
    there = {name: spec for spec in other.parameters for name in spec.names}
    missing: list[str] = []
    shapes: list[str] = []
    names: dict[str, str] = {}
    for spec in own.parameters:
        found = next((there[name] for name in spec.names if name in there), None)
        if found is None:
            missing.append(spec.name)
            continue
        names[spec.name] = found.name
        if found.shape != spec.shape:
            shapes.append(f"{spec.name} ({list(found.shape)} there, {list(spec.shape)} here)")
    taken = set(names.values())  # what is tied here and has weights of its own there is left over
    surplus = [spec.name for spec in other.parameters if spec.name not in taken]
    buffers, others = _persistent_buffers(own.module), _persistent_buffers(other.module)
    missing += [name for name in buffers if name not in others]
    surplus += [name for name in others if name not in buffers]
    shapes += [
        f"{name} ({list(others[name])} there, {list(shape)} here)"
        for name, shape in buffers.items()
        if name in others and others[name] != shape
    ]
    lines = [
        f"  {title}: {_some(what)}"
        for title, what in (
            ("only in this model", missing),
            ("only there", surplus),
            ("of another shape", shapes),
        )
        if what
    ]
    if lines:
        raise ConfigError(
            "\n".join([f"model.init_from: the weights of {where} are not those of this model:", *lines])
            + f"\nLeave out {', '.join(SOURCES)} to take that run's model, or name the model it was trained on."
        )
    return names


def _persistent_buffers(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the buffers that belong to the module's state, by name."""
    persistent = module.state_dict().keys()
    return {name: tuple(buffer.shape) for name, buffer in module.named_buffers() if name in persistent}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"

"""Writes docs/recipe.md from the pydantic models of core and of the plugins in this repository.

python docs/generate_recipe.py            write docs/recipe.md
python docs/generate_recipe.py --check    exit 1 when it is out of date
"""

from __future__ import annotations

import importlib
import sys
import typing
from importlib.metadata import distribution
from pathlib import Path

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trainforge.provider import STAGES, Provider, Section
from trainforge.sections import RunSection, TrainSection

_PARSED = {"parse_seconds": "duration", "parse_bytes": "size", "_cadence": "integer, duration, `auto`"}
TARGET = Path(__file__).with_name("recipe.md")
DISTRIBUTIONS = ("trainforge-plugins", "trainforge-megatrain", "trainforge-loongforge")
INTRODUCTION = """\
# The recipe

<!-- written by docs/generate_recipe.py from the pydantic models; edit those, not this file -->

A recipe is one YAML file: which plugins, what to run on, which model, how to train, and one flat section per plugin.

```yaml
plugins: [text, resident]      # optional: the defaults serve every stage that is not named
run:   {name: demo, seed: 0}
model: {hf: path/to/model}     # a folder or a hub id; or config: {...} for random weights
train: {steps: 1000, global_batch: 32, lr: 3e-4, schedule: cosine, warmup: 0.05, save_every: 10min}
text:  {path: data/*.jsonl, max_len: 2048}
```

- What every provider of a stage must honour lives in `train`, so that swapping a plugin loses no option. A plugin's own
  section, named like the plugin, holds only what is its own. The `model` section belongs to the model plugin.
- Precedence: defaults, then the file, then `--set text.max_len=1024` on the command line (repeatable; the value is
  YAML).
- An unknown key is an error that names the nearest valid one; all errors are shown at once. A section in the file for
  a plugin that is installed but not selected is fine; the same through `--set` is an error: it would change nothing.
- Sizes accept units (`512MB`, `24GiB`), durations too (`30s`, `10min`, `1.5h`).
- Paths are relative to the folder in which `forge` is started.
- Without a recipe, `forge run` takes ./forge.yaml, else the quickstart recipe of the chosen data plugin.
- The effective recipe, every default filled in, is kept in the run folder as recipe.yaml.

When a run is resumed, these may differ from what it was started with: plugins, ranks, steps (the schedule is laid over
the new length), the cadence of saving, evaluating and logging, and how a step is cut into micro-batches. `global_batch`
is what is kept when the number of ranks changes. The model, the seed, the data, the global batch and the optimizer's
numbers must not differ, unless with `--allow-change KEY` or `--fresh`.
"""


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, table("run", RunSection), table("train", TrainSection)]
    for name, stage, provider in our_plugins():
        section = "model" if stage == "model" else name
        title = f"{section}: the {stage} plugin `{name}`" if provider.config.model_fields else ""
        if title:
            parts.append(table(section, provider.config, title))
    return "\n".join(parts)


def our_plugins() -> list[tuple[str, str, Provider]]:
    """(name, stage, provider) of every plugin of our distributions: by stage, the default first."""
    entries = [
        entry
        for name in DISTRIBUTIONS
        for entry in distribution(name).entry_points.select(group="trainforge.plugins")
    ]
    found: list[tuple[str, str, Provider]] = []
    for entry in entries:
        module = importlib.import_module(entry.value)
        found += [
            (entry.name, stage, getattr(module, f"forge_{stage}")())
            for stage in (*STAGES, "observer")
            if hasattr(module, f"forge_{stage}")
        ]
    order = (*STAGES, "observer")
    return sorted(found, key=lambda item: (order.index(item[1]), not item[2].default, item[0]))


def table(section: str, model: type[Section], title: str = "") -> str:
    """One section as a table of keys."""
    lines = [f"## {title or section}", "", *([model.__doc__.splitlines()[0], ""] if model.__doc__ else [])]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        lines.append(
            f"| `{section}.{name}` | {kind(field)} | {default(field)} | {escaped(field.description or '')} |"
        )
    return "\n".join(lines) + "\n"


def kind(field: FieldInfo) -> str:
    """A field's type in words."""
    parsed = [_PARSED[item.func.__name__] for item in field.metadata if isinstance(item, BeforeValidator)]
    return escaped(", ".join(dict.fromkeys(parsed or _words(field.annotation))))


def default(field: FieldInfo) -> str:
    """A field's default as it would stand in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return escaped(f"[{', '.join(map(str, value))}]")
    return escaped(str(value))


def escaped(text: str) -> str:
    """Text that may stand in a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _words(annotation: object) -> list[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        parsed = [_PARSED[item.func.__name__] for item in arguments[1:] if isinstance(item, BeforeValidator)]
        return parsed or _words(arguments[0])
    if origin is typing.Literal:
        return [f"`{value}`" for value in arguments]
    if origin in (tuple, list):
        return [f"list of {'/'.join(dict.fromkeys(w for a in arguments if a is not ... for w in _words(a)))}"]
    if origin is dict:
        return ["mapping"]
    if origin is not None and arguments:
        return [word for argument in arguments if argument is not type(None) for word in _words(argument)]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [f"{{{', '.join(annotation.model_fields)}}}"]
    return [
        {"str": "text", "int": "integer", "float": "number", "bool": "true/false"}.get(
            _name(annotation), _name(annotation)
        )
    ]


def _name(annotation: object) -> str:
    return getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    sys.exit(main())

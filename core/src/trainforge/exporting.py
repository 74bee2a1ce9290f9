"""`forge export`: a run's weights as a model folder that others read, straight from a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainforge import __version__
from trainforge.blame import blaming
from trainforge.errors import ProviderError, TrainForgeError, UserError
from trainforge.recipe_file import dump_recipe
from trainforge.stored_run import StoredWeights, build_model, build_tokenizer, open_run, reading

if TYPE_CHECKING:
    from torch import Tensor

    from trainforge.context import Console, Task
    from trainforge.stored_run import StoredRun


def export_run(
    run_dir: Path,
    out: Path,
    console: Console,
    *,
    step: int | None = None,
    dtype: Literal["bf16", "fp32"] = "bf16",
    lora: Literal["merged", "adapter"] = "merged",
    force: bool = False,
    trust_code: bool = False,
) -> str:
    """Write the model of a run into the folder `out`: whole or not at all. Runs on the CPU.

    Args:
        step: of the checkpoint; None takes the newest.
        dtype: of the weights in the files. The masters in the checkpoint are fp32.
        lora: trained adapters are added to what they adapt, or written alone.
        force: an `out` that is not empty is renamed to `out.old-N` instead of being refused.
        trust_code: run code that the run's recipe names and that is not installed (see `trust.py`).

    Returns:
        The `weights_digest` of what was exported.

    Raises:
        UserError: the run, the checkpoint or `out` cannot be used.
        CheckpointError: the checkpoint is damaged.
    """
    import torch

    _refuse_what_exists(out, force)
    stored = open_run(run_dir, step, allowed=None if trust_code else ())
    ctx = build_model(stored, torch.device("cpu"), console)
    tokenizer = build_tokenizer(stored, ctx)
    alone = lora == "adapter"
    total = sum(spec.elements for spec in ctx.model.parameters if spec.trainable or not alone)
    with contextlib.closing(ctx.model), _written_aside(out) as aside, reading(stored, ctx) as reader:
        weights = StoredWeights(reader, stored.checkpoint.path, ctx.model)
        with (
            console.task("exporting", total, "parameters") as task,
            blaming(ctx, stored.plan.chosen["model"].plugin, "model", f"exporting to {out}"),
        ):
            export = ctx.model.export_adapters if alone else ctx.model.export
            base = export(aside, _counted(weights, task), dtype)
        digest = weights.digest()
        if tokenizer is None:
            console.note("the run's data has no tokenizer: the folder gets none")
        else:
            with blaming(ctx, stored.plan.chosen["data"].plugin, "data", "exporting the tokenizer"):
                tokenizer.save(aside)
        (aside / "README.md").write_text(_card(stored, dtype, digest, base), encoding="utf-8")
    if base:
        console.note(f"these are the adapters alone: they belong to {base}")
    return digest


def _counted(weights: StoredWeights, task: Task) -> Callable[[str], Tensor]:
    def read(name: str) -> Tensor:
        value = weights(name)
        task.advance(value.numel())
        return value

    return read


def _refuse_what_exists(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder to export to")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(
            f"{out} is not empty: name another folder, or add --force, which renames it to {_aside_name(out).name}"
        )
    if Path.cwd().is_relative_to(out.resolve()):
        raise UserError(f"{out} holds the folder in which you are: name another one")


def _aside_name(out: Path) -> Path:
    number = 1
    while (target := out.with_name(f"{out.name}.old-{number}")).exists():
        number += 1
    return target


@contextlib.contextmanager
def _written_aside(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that gets its name when all went well, and is removed when not.

    Raises:
        TrainForgeError: it cannot be written.
    """
    out = out.absolute()
    aside = out.with_name(f".{out.name}.exporting-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        try:
            yield aside
            if out.is_dir() and any(out.iterdir()):
                out.rename(_aside_name(out))
            aside.rename(out)  # also over an empty folder
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, ProviderError) as error:
        cause = error.__cause__ if isinstance(error, ProviderError) else error
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if isinstance(error, ProviderError) and not full:
            raise
        raise TrainForgeError(
            f"{out} cannot be written ({getattr(cause, 'strerror', None) or cause}): make room or export to another "
            "folder"
        ) from error


def _card(stored: StoredRun, dtype: str, digest: str, base: str | None) -> str:
    """The model card; `base` is the model that adapters alone belong to."""
    plan = stored.plan
    adapters = f"- adapters alone, to be loaded beside {base}\n" if base else ""
    plugins = ", ".join(f"{stage} {chosen.plugin} {chosen.version}" for stage, chosen in plan.chosen.items())
    return f"""# {plan.recipe.run.name}

Say here what this model is for, what it was trained on, and what it must not be used for.

## How it was made

Trained with TrainForge {__version__} ({plugins}), exported from the checkpoint of step {stored.checkpoint.step}.

{adapters}- weights in these files: {dtype}
- `weights_digest` of the fp32 masters: `{digest}`

The recipe:

```yaml
{dump_recipe(plan.recipe.effective()).rstrip()}
```
"""

"""What this machine does, measured in a few seconds and kept in the cache folder: products, copies, updates."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainforge.context import Context
from trainforge.stages import ModelSpec, Optimizer, ParameterSpec, Update
from trainforge.toolbox.dtypes import working_dtype
from trainforge.toolbox.parameters import flat_layout
from trainforge.toolbox.streams import Streams
from trainforge_megatrain.stream import StreamSection
from trainforge_megatrain.stream.forecast import Rates
from trainforge_megatrain.stream.model_speed import ModelSpeed, model_speed
from trainforge_megatrain.stream.sizes import Sizes
from trainforge_megatrain.stream.timing import fastest_s, synchronize
from trainforge_megatrain.stream.units import Place, Unit, allocate
from trainforge_megatrain.stream.updates import Updates

_COPY_BYTES = {
    True: 2**27,
    False: 2**26,
}  # with a device; on a CPU. What lies on the device stays small: a budget holds
_PARAMETERS = {True: 2**26, False: 2**22}
_PARAMETERS_THERE = 2**24
_WIDTH = {True: 8192, False: 512}


def rates_of_this_machine(
    ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection, sizes: Sizes
) -> Rates:
    """Rates for this model, optimizer and device: from the cache where they were measured before."""
    facts = _facts(ctx, model, optimizer, section, sizes)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = ctx.cache_dir / "stream" / f"rates-{name}.json"
    known = _stored(path)
    if known is not None:
        return known
    rates = measure(ctx, model, optimizer, section, sizes)
    _store(path, facts, rates)
    return rates


NO_ROOM = "stream: no room on the device to measure its speed, so it is filled in forward order"


def if_there_is_room(measured: Callable[[], Rates]) -> Rates | None:
    """`measured()`, or None where the device has no room to measure."""
    try:
        return measured()
    except torch.OutOfMemoryError:
        return None


def measure(
    ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection, sizes: Sizes
) -> Rates:
    """Measure. With a device a real block of the model runs at its real shape; a CPU's time is taken for a product."""
    device, dtype = ctx.device, working_dtype(ctx.train, ctx.device)
    accelerated = device.type != "cpu"
    upload, download = _copies(device, accelerated and section.pin)
    halves = section.master == "split"
    host = _updates(device, optimizer, dtype, Place.STREAMED, halves=halves)
    there = _updates(device, optimizer, dtype, Place.DEVICE, halves=halves) if accelerated else host
    speed = model_speed(device, dtype, model, sizes) if accelerated else ModelSpeed()
    compute = speed.block or _product(device, dtype)
    if accelerated:
        torch.get_device_module(device).empty_cache()
    return Rates(
        compute=compute,
        upload=upload,
        download=download,
        host_update=host,
        device_update=there,
        overlaps=accelerated,
        of_a_block=speed.block is not None,
        head=speed.head,
    )


def _facts(
    ctx: Context, model: ModelSpec, optimizer: Optimizer, section: StreamSection, sizes: Sizes
) -> dict[str, Any]:
    """All that the rates depend on."""
    device = ctx.device
    accelerated = device.type != "cpu"
    name = torch.get_device_module(device).get_device_name(device) if accelerated else platform.processor()
    trained = next((spec for spec in model.parameters if spec.trainable), None)
    state = optimizer.state(trained) if trained else {}
    shapes = sorted({(spec.shape, spec.experts) for spec in model.parameters})
    return {
        "device": f"{device.type} {name}",
        "torch": torch.__version__,
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "dtype": str(working_dtype(ctx.train, device)),
        "optimizer": type(optimizer).__name__,
        "halves": optimizer.takes_split_masters,
        "state": {key: value.dtype for key, value in state.items()},
        "stream": [section.master, section.pin],
        "model": [sizes.tokens, sizes.row, sizes.chunk, str(shapes)] if accelerated else None,
    }


def _stored(path: Path) -> Rates | None:
    try:
        return Rates(**json.loads(path.read_text())["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not measured yet, or by another version


def _store(path: Path, facts: dict[str, Any], rates: Rates) -> None:
    with contextlib.suppress(OSError):  # a folder that cannot be written: they are measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({"facts": facts, "rates": asdict(rates)}, indent=2) + "\n")
        aside.replace(path)


def _product(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product."""
    width = _WIDTH[device.type != "cpu"]
    factor = torch.ones(width, width, dtype=dtype, device=device)
    return 2 * width**3 / fastest_s(device, lambda: factor @ factor)


def _copies(device: torch.device, pinned: bool) -> tuple[float, float]:
    """Bytes per second up and down, both at once; on a CPU of a plain copy."""
    streams = Streams(device)
    size = _COPY_BYTES[device.type != "cpu"]
    here = [streams.host(size, torch.uint8, pinned=pinned) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def both() -> None:
        streams.copy(there[0], here[0], streams.stream("up"))
        streams.copy(here[1], there[1], streams.stream("down"))

    at_once = 1 if device.type != "cpu" else 2  # on a CPU one follows the other
    try:
        rate = at_once * size / fastest_s(device, both)
    finally:
        synchronize(device)
        streams.close()
    return rate, rate


def _updates(
    device: torch.device, optimizer: Optimizer, dtype: torch.dtype, where: Place, *, halves: bool
) -> float:
    """Parameters per second of the run's own optimizer, on the thread and in the layout that it will have."""
    count = _PARAMETERS_THERE if where is Place.DEVICE else _PARAMETERS[device.type != "cpu"]
    home = device if where is Place.DEVICE else torch.device("cpu")
    layout = flat_layout([ParameterSpec("measured", (count,))])
    unit = Unit("measured", None, layout, layout.length, where)
    allocate(
        unit,
        optimizer,
        lambda n, kind, _: torch.zeros(n, dtype=kind, device=home),
        dtype,
        dtype,
        halves=halves,
    )
    one, none = torch.ones((), device=device), torch.zeros((), device=device)
    streams, steps = Streams(device), iter(range(1, 100))
    updates = Updates(optimizer, streams, ThreadPoolExecutor(1, "measured"), _wait)

    def once() -> None:
        update = Update(next(steps), 0.0, one, none)
        used = frozenset({"measured"})
        updates.apply([unit], lambda slots: optimizer.update(slots, update), used, lambda _: streams.event())
        unit.settle()

    try:
        return count / fastest_s(device, once)
    finally:
        updates.close()


def _wait(place: str, wait: Callable[[], object]) -> None:
    wait()


def told(rates: Rates) -> Iterable[str]:
    """The rates as `forge plan` tells them."""
    head = f"; {rates.head:,.0f} tokens/s through the output head and the loss" if rates.head else ""
    yield (
        f"{rates.compute / 1e12:.3g} TFLOP/s ({'a block of this model' if rates.of_a_block else 'a matrix product'}), "
        f"{rates.upload / 1e9:.3g} GB/s up and {rates.download / 1e9:.3g} down{head}"
    )
    yield f"updates {rates.host_update / 1e9:.3g} Gparam/s in host RAM, {rates.device_update / 1e9:.3g} on the device"

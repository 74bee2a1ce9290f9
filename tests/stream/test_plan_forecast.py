"""The predicted step against clocks read by hand, and the placement against all others."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.plans import RATES, described, sizes_of

from trainforge.toolbox.parameters import flat_layout
from trainforge_megatrain.stream.forecast import Work, _play, forecast, head_flops, step_flops
from trainforge_megatrain.stream.placement import Room, better, place
from trainforge_megatrain.stream.sizes import on_device, on_host
from trainforge_megatrain.stream.units import Place, Unit, divide

LAYOUT = flat_layout([])
TIMES = st.floats(0.0, 10.0)


def units_at(*places: Place) -> list[Unit]:
    return [Unit(f"block {index}", index, LAYOUT, 0, place) for index, place in enumerate(places)]


def steady(units, works, slots=2, overlaps=True, loss=0.0):
    """A step in its steady state: (forward, whole)."""
    landed = dict.fromkeys(units, 0.0)
    for _ in range(3):
        turn, end, landed = _play(units, works, slots, landed, loss, overlaps=overlaps)
    return turn, end


def all_alike(units, **seconds):
    zero = {"forward": 0.0, "backward": 0.0, "upload": 0.0, "download": 0.0, "update": 0.0}
    return dict.fromkeys(units, Work(**{**zero, **seconds}))


def test_on_the_device_it_is_computing_and_the_update():
    units = units_at(*[Place.DEVICE] * 4)
    assert steady(units, all_alike(units, forward=1, backward=2, update=0.5)) == (4 * 1 + 4 * 0.5, 14)


def test_the_loss_lies_between_forward_and_backward():
    units = units_at(*[Place.STREAMED] * 4)
    works = all_alike(units, forward=1, backward=3, upload=0.25)
    assert steady(units, works, loss=2) == (4.25 + 2, 4.25 + 2 + 12)


def test_when_nothing_is_slow_only_the_first_upload_shows():
    units = units_at(*[Place.STREAMED] * 4)
    works = all_alike(units, forward=1, backward=3, upload=0.25)
    assert steady(units, works) == (4.25, 4.25 + 12)


def test_a_slow_update_is_waited_for_unit_by_unit():
    """Updates end at 2, 4, 6, 8; the last block can start at 8 + its upload."""
    units = units_at(*[Place.STREAMED] * 4)
    turn, end = steady(units, all_alike(units, forward=1, backward=1, upload=0.5, update=2))
    assert (turn, end) == (9.5, 13.5)


def test_slow_uploads_bind_both_phases_and_the_last_slots_are_not_filled_again():
    """6 uploads in forward, then 4: the last two blocks still lie in the two slots."""
    units = units_at(*[Place.STREAMED] * 6)
    turn, end = steady(units, all_alike(units, forward=0.1, backward=0.1, upload=1))
    assert turn == pytest.approx(6.1)
    assert end - turn == pytest.approx(0.1 + 4 + 0.1)


def test_slow_downloads_hold_up_the_third_block_and_delay_the_first_update():
    """Two boxes: backward of a block waits for the box of the one before the last. What is still on its way at the end
    of the step is waited for by the next update."""
    units = units_at(*[Place.KEPT] * 4)
    works = all_alike(units, forward=0.1, backward=0.1, download=1, update=0.5)
    turn, end = steady(units, works)
    # In backward blocks are done at 0.1, 0.2, then when the first and the second are down: 1.2, 2.2.
    assert end - turn == pytest.approx(2.2)
    # The first block's gradients land last, at 4.1, 1.9 after the step's end: updates end at 2.4, 2.9, 3.4, 3.9.
    assert turn == pytest.approx(3.9 + 0.1)


def test_kept_weights_go_up_once():
    streamed, kept = units_at(*[Place.STREAMED] * 6), units_at(*[Place.KEPT] * 6)
    slow = {"forward": 0.1, "backward": 0.1, "upload": 1}
    assert steady(streamed, all_alike(streamed, **slow))[1] == pytest.approx(10.3)
    assert steady(kept, all_alike(kept, **slow))[1] == pytest.approx(6.1 + 0.6)


def test_on_a_cpu_copies_take_the_computing_threads_time():
    units = units_at(*[Place.STREAMED] * 4)
    works = all_alike(units, forward=1, backward=2, upload=0.5, download=0.25)
    assert steady(units, works, overlaps=False)[1] == 4 * 3 + (4 + 2) * 0.5 + 4 * 0.25


@given(
    st.lists(
        st.tuples(st.sampled_from(Place), TIMES, TIMES, TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=7
    ),
    st.integers(2, 4),
)
def test_no_step_is_shorter_than_any_of_its_parts_nor_longer_than_all(rows, slots):
    units = units_at(*[row[0] for row in rows])
    works = {
        unit: Work(f, b, *((0.0, 0.0) if p is Place.DEVICE else (up, down)), update, inputs, inputs)
        for unit, (p, f, b, up, down, update, inputs) in zip(units, rows, strict=True)
    }
    _, end = steady(units, works, slots)
    host = [works[unit] for unit in units if unit.place is not Place.DEVICE]
    computing = sum(w.forward + w.backward for w in works.values())
    computing += sum(works[unit].update for unit in units if unit.place is Place.DEVICE)
    assert end >= computing - 1e-9
    assert end >= sum(w.upload for w in host) - 1e-9
    assert end >= sum(w.update for w in host) - 1e-9
    serial = computing + sum(2 * w.upload + w.download + w.update for w in host)
    serial += sum(w.inputs_down + w.inputs_up for w in works.values())
    assert end <= serial + 1e-6


def test_flops_are_the_models_own_and_shared_out(tmp_path):
    ctx = described(tmp_path, micro_batch=2, accumulate=3)
    ctx.row_tokens = 32
    units = divide(ctx.model)
    flops = step_flops(units, ctx.model, sizes_of(ctx))
    head = head_flops(ctx.model, sizes_of(ctx))
    assert head == pytest.approx(6 * 264 * 64 * 6 * 32)
    assert sum(flops.values()) + head == pytest.approx(ctx.model.flops_per_token(32) * 6 * 32)
    assert flops[units[0]] == 0  # a look-up
    assert flops[units[-1]] == pytest.approx(6 * 64 * 6 * 32)  # the last norm
    assert len({round(flops[unit]) for unit in units[1:-1]}) == 1


def test_the_head_takes_what_was_measured_or_its_flops(tmp_path):
    ctx = described(tmp_path, micro_batch=2, accumulate=3)
    ctx.row_tokens = 32
    units, sizes = divide(ctx.model), sizes_of(ctx)
    counted = forecast(units, ctx.model, sizes, RATES).forward.terms["compute"]
    measured = forecast(units, ctx.model, sizes, replace(RATES, head=64.0)).forward.terms["compute"]
    assert measured - counted == pytest.approx(6 * 32 / 64 - 6 * 264 * 64 * 6 * 32 / RATES.compute)


@pytest.fixture
def planned(tmp_path):
    ctx = described(tmp_path, train={"dtype": "bf16"}, micro_batch=2, accumulate=1)
    ctx.row_tokens = 32
    return ctx, divide(ctx.model), sizes_of(ctx)


def needed(units, sizes, *places) -> int:
    for unit, its in zip(units, places, strict=True):
        unit.place = its
    return sum(on_device(units, sizes).values())


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("slow", ["compute", "upload", "host_update", "device_update"])
def test_the_placement_is_as_fast_as_the_best_of_all(planned, share, slow):
    """All 2 * 3^6 * 2 placements of 6 blocks, stem and head are played through; ours is within 5 % of the best."""
    ctx, units, sizes = planned
    model = ctx.model
    rates = replace(RATES, **{slow: getattr(RATES, slow) / 100})
    most = needed(units, sizes, *[Place.DEVICE] * 8)
    least = needed(units, sizes, Place.KEPT, *[Place.STREAMED] * 6, Place.KEPT)
    budget = round(least + share * (most - least))
    chosen = place(units, sizes, Room(budget, None), lambda: forecast(units, model, sizes, rates).seconds)
    assert sum(on_device(units, sizes).values()) <= budget
    assert chosen.missing == (0, 0)
    assert chosen.places == tuple(unit.place for unit in units)
    ours, best = forecast(units, model, sizes, rates).seconds, float("inf")
    ends = [(Place.KEPT, Place.DEVICE)] * 2
    for stem, head in itertools.product(*ends):
        for blocks in itertools.product(Place, repeat=6):
            if needed(units, sizes, stem, *blocks, head) <= budget:
                best = min(best, forecast(units, model, sizes, rates).seconds)
    assert ours <= 1.05 * best


def test_where_host_ram_is_short_more_lives_on_the_device(planned):
    ctx, units, sizes = planned
    rates = replace(RATES, device_update=RATES.device_update / 1e4)  # so that nobody would want it there

    def seconds() -> float:
        return forecast(units, ctx.model, sizes, rates).seconds

    budget = needed(units, sizes, *[Place.DEVICE] * 8)
    free = place(units, sizes, Room(budget, None), seconds)
    assert Place.DEVICE not in free.places
    short = place(units, sizes, Room(budget, free.host // 2), seconds)
    assert short.host <= free.host // 2
    assert short.missing == (0, 0)
    assert sum(on_host(units, sizes).values()) == short.host


def test_among_placements_as_fast_the_one_with_least_in_host_ram(planned):
    _, units, sizes = planned
    budget = needed(units, sizes, *[Place.DEVICE] * 8)
    assert set(place(units, sizes, Room(budget, None), None).places) == {Place.DEVICE}
    one = place(units, sizes, Room(budget, None), lambda: 1.0)
    other = replace(one, seconds=1.005, host=one.host - 1)
    slower = replace(one, seconds=1.02, host=0)
    lacking = replace(one, seconds=0.1, host=0, missing=(0, 1))
    assert better([one, other, slower, lacking]) is other


def test_no_room_leaves_what_needs_least_of_the_device(planned):
    _, units, sizes = planned
    chosen = place(units, sizes, Room(1, None), None)
    assert set(chosen.places) == {Place.KEPT, Place.STREAMED}
    assert chosen.missing == (sum(on_device(units, sizes).values()) - 1, 0)

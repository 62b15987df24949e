"""The order of samples: a function of the seed, whatever the layout and wherever one starts."""

from collections import Counter
from itertools import islice, pairwise

import pytest
import torch

from ltx_trainer_plus.data.order import SampleOrder, keyed_generator, micro_batches
from ltx_trainer_plus.data.position import DataPosition

LAYOUTS = [(1, 4, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 1, 4), (1, 2, 2)]  # ranks, batch size, accumulation


def steps(order: SampleOrder, layout: tuple[int, int, int], *, start: int, count: int) -> list[list[tuple[int, int]]]:
    """(index, position) of every sample of each optimizer step, all ranks together, sorted by position."""
    data_ranks, batch_size, accumulation = layout
    result: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for rank in range(data_ranks):
        own = micro_batches(
            order,
            start=start * data_ranks * batch_size * accumulation,
            data_rank=rank,
            data_ranks=data_ranks,
            batch_size=batch_size,
        )
        for i, micro_batch in enumerate(islice(own, count * accumulation)):
            assert len(micro_batch) == batch_size
            result[i // accumulation] += micro_batch
    return [sorted(step, key=lambda item: item[1]) for step in result]


@pytest.mark.parametrize("shape_group", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_on_the_same_samples_in_the_same_step(
    layout: tuple[int, int, int], shape_group: int
) -> None:
    shapes = ["wide"] * 7 + ["tall"] * 4
    order = SampleOrder(shapes, seed=3, shape_group=shape_group)
    expected = [[(order.item(p), p) for p in range(4 * k, 4 * k + 4)] for k in range(12)]
    assert steps(order, layout, start=0, count=12) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_goes_on_where_the_first_one_stopped(layout: tuple[int, int, int]) -> None:
    order = SampleOrder(["x"] * 9, seed=3, shape_group=1)
    fresh = SampleOrder(["x"] * 9, seed=3, shape_group=1)
    assert steps(fresh, layout, start=5, count=6) == steps(order, layout, start=0, count=11)[5:]


def test_stopping_within_an_epoch_leaves_the_rest_of_its_order() -> None:
    """8 items, stopped in epoch 1 after item 3."""
    order = SampleOrder(["x"] * 8, seed=0, shape_group=1)
    samples = [order.item(ordinal) for ordinal in range(24)]
    resumed = micro_batches(
        SampleOrder(["x"] * 8, seed=0, shape_group=1),
        start=8 + 3,
        data_rank=0,
        data_ranks=1,
        batch_size=1,
    )
    assert [batch[0][0] for batch in islice(resumed, 13)] == samples[11:]
    assert sorted(samples[8:16]) == list(range(8))


def test_steps_micro_steps_and_epochs_do_not_mix() -> None:
    """100 batches an epoch, accumulation 4, stopped at step 500: 2,000 micro-batches are 20 epochs."""
    order = SampleOrder(["x"] * 200, seed=0, shape_group=2)
    assert order.epoch_length == 200
    data = DataPosition(batch_size=2, accumulation=4, data_ranks=1, shape_group=2, data_set="")
    micro_batch = next(micro_batches(order, start=data.at(500), data_rank=0, data_ranks=1, batch_size=2))
    assert [ordinal for _, ordinal in micro_batch] == [4000, 4001]
    assert divmod(micro_batch[0][1], order.epoch_length) == (20, 0)


def test_any_ordinal_is_found_without_walking_there() -> None:
    order = SampleOrder(["x"] * 1000, seed=0, shape_group=1)
    far = 10**12
    assert order.item(far) == SampleOrder(["x"] * 1000, seed=0, shape_group=1).item(far)


def test_an_epoch_holds_every_sample_and_fills_groups_by_repeating() -> None:
    shapes = ["wide"] * 7 + ["tall"] * 2 + ["square"]
    order = SampleOrder(shapes, seed=1, shape_group=4)
    assert order.epoch_length == 8 + 4 + 4
    for epoch in range(3):
        samples = [order.item(ordinal) for ordinal in range(16 * epoch, 16 * epoch + 16)]
        groups = [samples[i : i + 4] for i in range(0, 16, 4)]
        assert all(len({shapes[index] for index in group}) == 1 for group in groups)
        counts = Counter(samples)
        assert set(counts) == set(range(10))
        assert sorted(counts[index] for index in range(7)) == [1] * 6 + [2]
        assert counts[9] == 4


def test_epochs_and_seeds_differ() -> None:
    def epochs(seed: int) -> list[list[int]]:
        order = SampleOrder(["x"] * 50, seed=seed, shape_group=2)
        return [[order.item(p) for p in range(50 * e, 50 * e + 50)] for e in range(3)]

    assert epochs(0) == epochs(0)
    flat = [tuple(order) for seed in (0, 1, 2) for order in epochs(seed)]
    assert len(set(flat)) == 9


def test_shapes_come_mixed_within_an_epoch() -> None:
    shapes = ["wide"] * 40 + ["tall"] * 40
    order = [shapes[SampleOrder(shapes, seed=0, shape_group=2).item(p)] for p in range(80)]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes > 10


def test_one_clip_comes_round_again_and_again() -> None:
    """1 clip, batch size 2, 2 ranks."""
    order = SampleOrder(["x"], seed=0, shape_group=2)
    trained = steps(order, (2, 2, 1), start=0, count=5)
    assert [index for step in trained for index, _ in step] == [0] * 20
    assert [position for step in trained for _, position in step] == list(range(20))  # its noise differs every time


def test_a_data_set_that_does_not_fill_a_step_is_said_to_come_round_again() -> None:
    data = DataPosition(batch_size=2, accumulation=1, data_ranks=2, shape_group=2, data_set="")
    assert data.repeats(1) == (
        "The data set has 1 samples and a step takes 4: samples come round again within a step, each time with "
        "noise of their own."
    )
    assert data.repeats(4) is None


def test_a_saved_position_keeps_the_names_of_its_format() -> None:
    data = DataPosition(batch_size=2, accumulation=1, data_ranks=3, shape_group=2, data_set="x")
    saved = data.entries(5)
    assert saved["world_size"] == 3
    continued, notes = data.continued(5, saved, may_regroup=True)
    assert (continued.at(5), continued.data_ranks, notes) == (30, 3, [])


def test_groups_that_do_not_align_with_micro_batches_are_refused() -> None:
    order = SampleOrder(["x"] * 8, seed=0, shape_group=3)
    with pytest.raises(ValueError, match=r"data\.shape_group: groups of 3 samples and micro-batches of 4"):
        micro_batches(order, start=0, data_rank=0, data_ranks=1, batch_size=4)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no sample"):
        SampleOrder([], seed=0, shape_group=1)


def test_keyed_generators_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    def first_draw(seed: int, purpose: str, number: int) -> float:
        return torch.rand((), generator=keyed_generator(seed, purpose, number), dtype=torch.float64).item()

    keys = [(seed, purpose, number) for seed in range(10) for purpose in ("a", "b") for number in range(100)]
    draws = [first_draw(*key) for key in keys]
    assert draws == [first_draw(*key) for key in keys]
    assert len(set(draws)) == len(draws)
    # Well mixed: the first draws of neighbouring keys look like independent uniforms.
    deviations = [a - b for a, b in pairwise(draws)]
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    assert abs(sum(d * d for d in deviations) / len(deviations) - 1 / 6) < 0.02

"""The loss log: normalisation, the best widths, bounded memory, an exact restart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcnet.errors import BcnetError
from bcnet.supernet.loss_log import LossLog

STEPS = st.lists(st.lists(st.floats(0.125, 8, width=32), min_size=1, max_size=4), min_size=1, max_size=30)


def filled(steps: list[list[float]], **options: float) -> LossLog:
    log = LossLog(2, **options)  # type: ignore[arg-type]
    for step, losses in enumerate(steps):
        log.append(step, [[step + 1, path + 1] for path in range(len(losses))], losses)
    return log


@given(STEPS, st.floats(0, 0.99))
def test_losses_are_divided_by_the_bias_corrected_running_mean(steps: list[list[float]], decay: float) -> None:
    log = filled(steps, decay=decay)
    weights = [[decay ** (t - s) for s in range(t + 1)] for t in range(len(steps))]
    means = [float(np.mean(losses)) for losses in steps]
    expected = [np.average(means[: t + 1], weights=weights[t]) for t in range(len(steps))]
    wanted = [loss / expected[t] for t, losses in enumerate(steps) for loss in losses]
    np.testing.assert_allclose(log.normalised, wanted, rtol=1e-5)
    assert log.losses.tolist() == [loss for losses in steps for loss in losses]
    assert log.steps.tolist() == [t for t, losses in enumerate(steps) for _ in losses]


def test_equal_paths_of_a_falling_loss_look_alike() -> None:
    log = LossLog(1)
    for step in range(200):
        log.append(step, [[1], [2]], [2.0 * 0.99**step, 4.0 * 0.99**step])
    late = log.normalised.reshape(-1, 2)[100:]
    assert np.ptp(late, axis=0) == pytest.approx([0, 0], abs=1e-4)
    assert (late[:, 0] < late[:, 1]).all()


def test_best_averages_the_same_widths_and_sorts() -> None:
    log = LossLog(2, decay=0.0)
    log.append(0, [[1, 1], [2, 2], [1, 1], [3, 3]], [1.0, 2.0, 3.0, 6.0])
    widths, losses = log.best()
    assert widths.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert widths.dtype == np.int64
    assert losses == pytest.approx([2 / 3, 2 / 3, 2])
    assert log.best(1)[0].tolist() == [[1, 1]]
    assert len(log.best(0)[0]) == 0


def test_best_can_leave_out_the_first_steps() -> None:
    log = filled([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    assert log.best(after=2)[0].tolist() == [[3, 1], [3, 2]]
    empty, losses = log.best(after=3)
    assert empty.shape == (0, 2)
    assert losses.shape == (0,)


def test_an_empty_log() -> None:
    log = LossLog(3)
    assert len(log) == 0
    assert log.best()[0].shape == (0, 3)


def test_losses_that_are_not_numbers_are_kept_but_not_used() -> None:
    log = filled([[1.0, 3.0], [math.nan, math.inf], [2.0, math.nan]])
    assert np.isnan(log.losses[2])
    assert log.losses[3] == math.inf
    assert log.normalised[[0, 1, 4]] == pytest.approx([0.5, 1.5, 1.0])
    assert log.best()[0].tolist() == [[1, 1], [3, 1], [1, 2]]


def test_tensors_are_fetched_in_blocks_with_the_result_of_numbers() -> None:
    rng = np.random.default_rng(0)
    steps = rng.uniform(1, 2, size=(600, 4)).astype(np.float32)
    numbers, tensors = LossLog(2), LossLog(2)
    for step, losses in enumerate(steps):
        widths = rng.integers(1, 5, size=(4, 2))
        numbers.append(step, widths, losses)
        tensors.append(step, widths, torch.from_numpy(losses).requires_grad_())
    assert len(tensors) == 2400
    np.testing.assert_array_equal(numbers.normalised, tensors.normalised)
    np.testing.assert_array_equal(numbers.widths, tensors.widths)


def test_widths_given_in_an_array_that_changes_later() -> None:
    widths = np.array([[1, 2]])
    log = LossLog(2)
    log.append(0, widths, [1.0])
    widths[:] = 9
    assert log.widths.tolist() == [[1, 2]]


@given(STEPS, st.integers(4, 20))
def test_memory_is_bounded_and_the_newest_rows_are_kept(steps: list[list[float]], capacity: int) -> None:
    log, everything = filled(steps, capacity=capacity), filled(steps)
    kept = len(log)
    assert min(len(everything), capacity // 2) <= kept <= capacity
    for name in ("steps", "widths", "losses", "normalised"):
        np.testing.assert_array_equal(getattr(log, name), getattr(everything, name)[-kept:])


@given(STEPS, st.integers(0, 30), st.integers(4, 20))
def test_a_restored_log_goes_on_as_the_first_would_have(steps: list[list[float]], stop: int, capacity: int) -> None:
    whole = filled(steps, capacity=capacity)
    log = LossLog.from_tensors(filled(steps[:stop], capacity=capacity).tensors())
    for step in range(min(stop, len(steps)), len(steps)):
        log.append(step, [[step + 1, path + 1] for path in range(len(steps[step]))], steps[step])
    ours, theirs = log.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("losses"),
        lambda t: t.update(losses=t["losses"][:1]),
        lambda t: t.update(widths=t["widths"].float()),
        lambda t: t.update(widths=t["widths"][:, 0]),
        lambda t: t.update(running=t["running"][:2]),
        lambda t: t.update(running=torch.tensor([1.0, 1.0, 2.0, 100.0])),
        lambda t: t.update(running=torch.tensor([1.0, 1.0, 0.9, float("inf")])),
        lambda t: t.update(running=torch.tensor([1.0, 1.0, 0.9, 3.0])),
    ],
)
def test_damaged_tensors(change: object) -> None:
    tensors = filled([[1.0, 2.0], [1.0, 2.0]]).tensors()
    change(tensors)  # type: ignore[operator]
    with pytest.raises(BcnetError) as error:
        LossLog.from_tensors(tensors)
    assert str(error.value) == "the loss log in this checkpoint is damaged"


def test_losses_must_match_widths() -> None:
    with pytest.raises(BcnetError) as error:
        LossLog(2).append(0, [[1, 2], [3, 4]], [1.0])
    assert str(error.value) == (
        "a step needs one loss for each of its widths of 2 variables, got widths (2, 2) and 1 losses"
    )
    with pytest.raises(BcnetError, match=r"^a loss log needs at least 1 variable, 2 rows of capacity and a decay in"):
        LossLog(0)

"""What a person sees of a training, and how seldom the device is waited for."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import toy
from rich.console import Console

from bcnet.errors import BcnetError
from bcnet.supernet.training import train_supernet
from bcnet.utils import progress
from bcnet.utils.progress import training_bar

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: Any) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


class Losses:
    """Counts how often the loss is read."""

    reads = 0

    def __init__(self, value: float):
        self.value = value

    def mean(self) -> float:
        Losses.reads += 1
        return self.value


def step(number: int, steps: int, loss: float = 1.5, images: int = 64) -> Any:
    from bcnet.training.loop import Progress

    return Progress(number, steps, (number - 1) // 10, 0.25, images, Losses(loss))  # type: ignore[arg-type]


def lines_of(seconds: float, steps: int, clock: Clock, begin: int = 1) -> list[str]:
    """The lines of a training whose steps take so many seconds each, without a terminal."""
    out = io.StringIO()
    with training_bar("supernet", Console(file=out, width=60)) as tell:
        for number in range(begin, steps + 1):
            clock.now += seconds
            tell(step(number, steps))
    return out.getvalue().splitlines()


def test_plain_lines_say_everything_once(clock: Clock) -> None:
    lines = lines_of(10.0, 4, clock)
    assert lines == [
        "supernet: 1 of 4 steps, epoch 1, loss 1.5, 6 images/s, lr 0.25, 0:00:30 left",
        "supernet: 2 of 4 steps, epoch 1, loss 1.5, 6 images/s, lr 0.25, 0:00:20 left",
        "supernet: 3 of 4 steps, epoch 1, loss 1.5, 6 images/s, lr 0.25, 0:00:10 left",
        "supernet: 4 of 4 steps, epoch 1, loss 1.5, 6 images/s, lr 0.25, 0:00:00 left",
    ]


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 50_000), (0.1, 20_000), (30.0, 2_000)])
def test_plain_lines_are_few(clock: Clock, seconds: float, steps: int) -> None:
    lines = lines_of(seconds, steps, clock)
    assert 3 <= len(lines) <= 102
    assert lines[-1].startswith(f"supernet: {steps:,} of {steps:,} steps")


def test_a_line_comes_at_last(clock: Clock) -> None:
    """In a very long training too, one sees that it is alive."""
    lines = lines_of(60.0, 100_000, clock, begin=99_980)
    assert len(lines) == 3


def test_the_loss_is_read_a_few_times_a_second(clock: Clock) -> None:
    Losses.reads = 0
    lines_of(0.01, 1000, clock)
    assert Losses.reads <= 10 / progress.READ_EVERY + 2


def test_speed_and_time_left_do_without_the_slow_first_step(clock: Clock) -> None:
    out = io.StringIO()
    with training_bar("x", Console(file=out, width=200)) as tell:
        clock.now += 100
        tell(step(51, 100, images=100))
        clock.now += 10
        tell(step(52, 100, images=100))
    first, second = out.getvalue().splitlines()
    assert "1 images/s" in first
    assert second.endswith("10 images/s, lr 0.25, 0:08:00 left")


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    console = Console(record=True, force_terminal=True, width=150, file=io.StringIO())
    with training_bar("supernet", console) as tell:
        for number in range(1, 41):
            clock.now += 1
            tell(step(number, 80, loss=2.0))
    text = console.export_text()
    assert re.search(r"supernet ━+.* 50% epoch 4, loss 2, 64 images/s, lr 0\.25, 0:00:40 left", text)
    assert len(text.strip().splitlines()) == 1


def test_the_bar_is_taken_down_when_training_fails() -> None:
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    with pytest.raises(BcnetError), training_bar("supernet", console) as tell:
        train_supernet(toy.supernet(outputs=3), toy.source(), toy.config(), progress=tell)
    assert console._live_stack == []


def test_a_real_training_is_shown(capsys: Any) -> None:
    with training_bar("toy") as tell:
        train_supernet(toy.supernet(), toy.source(), toy.config(), progress=tell)
    shown = capsys.readouterr()
    assert shown.out == ""
    first, *_, last = shown.err.splitlines()
    assert re.fullmatch(
        r"toy: 1 of 12 steps, epoch 1, loss [\d.]+, [\d,]+ images/s, lr 0\.0333, 0:\d\d:\d\d left", first
    )
    assert re.fullmatch(r"toy: 12 of 12 steps, epoch 2, loss [\d.]+, [\d,]+ images/s, lr .*, 0:00:00 left", last)


def test_only_the_first_process_shows_anything(monkeypatch: Any) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "_world", lambda: (1, 2))
    Losses.reads = 0
    with training_bar("x", Console(file=out)) as tell:
        tell(step(1, 1))
    assert out.getvalue() == ""
    assert Losses.reads == 0


def test_images_of_all_processes_count(clock: Clock, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "_world", lambda: (0, 2))
    assert "13 images/s" in lines_of(10.0, 1, clock)[0]


def test_tensorboard_scalars(tmp_path: Path, clock: Clock) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    console = Console(file=io.StringIO())
    for begin, end, loss in ((1, 50, 3.0), (31, 60, 2.0)):  # resumed at step 30
        with training_bar("x", console, tensorboard=tmp_path) as tell:
            for number in range(begin, end + 1):
                clock.now += 1
                tell(step(number, 60, loss))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["images per second", "loss", "lr"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(n, 3.0 if n <= 30 else 2.0) for n in range(1, 61)]


def test_tensorboard_curves_are_bounded(tmp_path: Path, clock: Clock) -> None:
    pytest.importorskip("tensorboard")
    board = progress.Board(tmp_path)
    shown: list[int] = []
    board._open = lambda *_, **__: type("W", (), {"add_scalar": lambda s, n, v, k: shown.append(k)})()
    for number in range(1, 30_001):
        board.show(progress.Reading(number, 30_000, 0, 1.0, 0.1, 10.0, 1.0))
    assert len(set(shown)) <= progress.POINTS + 1
    assert shown[-1] == 30_000


def test_tensorboard_is_asked_for_but_missing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BcnetError) as error, training_bar("x", tensorboard=tmp_path):
        pass
    assert str(error.value) == "TensorBoard's scalars need tensorboard: pip install 'bcnet[tensorboard]'"

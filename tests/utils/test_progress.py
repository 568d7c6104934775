"""What a person sees while something takes long, and how seldom the device is waited for."""

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
from bcnet.training.loop import Progress
from bcnet.utils import progress
from bcnet.utils.progress import (
    Bars,
    Journey,
    Lines,
    Listener,
    TensorBoard,
    duration,
    terminal_listener,
    training_steps,
)

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
    return Progress(number, steps, (number - 1) // 10, 0.25, images, Losses(loss))  # type: ignore[arg-type]


def train(listener: Listener, clock: Clock, seconds: float, steps: int, begin: int = 1, loss: float = 1.5) -> None:
    """Tell of a training whose steps take so many seconds each."""
    tell = training_steps(listener, "train")
    for number in range(begin, steps + 1):
        clock.now += seconds
        tell(step(number, steps, loss))


def test_plain_lines_say_everything_once(clock: Clock, capsys: Any) -> None:
    train(Lines(), clock, 10.0, 4)
    assert capsys.readouterr().err.splitlines() == [
        "  train 2/4, loss 1.5, lr 0.25, images/s 6.4, 0:00:20 left",
        "  train 3/4, loss 1.5, lr 0.25, images/s 6.4, 0:00:10 left",
        "  train 4/4, loss 1.5, lr 0.25, images/s 6.4",
    ]


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 50_000), (0.1, 20_000), (30.0, 2_000)])
def test_plain_lines_are_few(clock: Clock, capsys: Any, seconds: float, steps: int) -> None:
    train(Lines(), clock, seconds, steps)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 102
    assert lines[-1].startswith(f"  train {steps:,}/{steps:,}, loss 1.5")


def test_a_line_comes_at_last(clock: Clock, capsys: Any) -> None:
    """In a very long training too, one sees that it is alive."""
    train(Lines(), clock, 60.0, 100_000, begin=99_980)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_loss_is_read_a_few_times_a_second(clock: Clock) -> None:
    Losses.reads = 0
    train(Listener(), clock, 0.01, 1000)
    assert 10 <= Losses.reads <= 10 / progress.READ_EVERY + 2


def test_stages_and_notes_are_lines(capsys: Any) -> None:
    lines = Lines()
    lines.stage("search", "find the best configuration")
    lines.note("a batch was halved")
    assert capsys.readouterr().err == "search: find the best configuration\nnote: a batch was halved\n"


def test_the_whole_run_is_as_far_as_its_stages_say() -> None:
    journey = Journey({"given": 100.0, "search": 300.0, "race": 200.0}, now=0.0)
    journey.begin("given", 0.0)
    assert journey.left(50.0) == 550.0
    journey.begin("search", 200.0)  # took twice as long as planned
    assert 500.0 < journey.left(200.0) < 1000.0
    assert journey.share(200.0) == pytest.approx(200 / (200 + journey.left(200.0)))
    assert journey.left(2000.0) == pytest.approx(0.4 * journey.left(200.0))
    assert duration(75) == "75 s"
    assert duration(600) == "10 min"


def test_a_short_stage_that_took_longer_says_little_of_the_others() -> None:
    journey = Journey({"given": 0.1, "search": 200.0}, now=0.0)
    journey.begin("given", 0.0)
    journey.begin("search", 15.0)  # not 150 times as long for all that follows
    assert 200.0 < journey.left(15.0) < 400.0


def test_stages_within_a_stage_take_of_its_time() -> None:
    journey = Journey({"given": 10.0, "targets": 600.0, "report": 0.0}, now=0.0)
    journey.begin("given", 0.0)
    journey.begin("targets", 10.0)
    journey.begin("flops=50%: search", 110.0)
    assert journey.left(110.0) == 500.0


def test_the_time_of_others_is_not_its_own(clock: Clock, capsys: Any) -> None:
    """Finalists of a race train in turns."""
    lines = Lines()
    tells = {name: training_steps(lines, name) for name in ("a", "b")}
    for number in range(1, 41):
        for name, tell in tells.items():
            for _ in range(10 if number in (1, 2) else 0):
                clock.now += 1.0
                tell(step(10 * (number - 1) + _ + 1, 400))
            clock.now += 100.0 if name == "a" else 0.0
    told = [line for line in capsys.readouterr().err.splitlines() if "images/s" in line]
    assert len(told) > 4
    assert all("images/s 64" in line for line in told)
    assert all("0:0" in line for line in told), told  # under ten minutes


def test_counts_without_figures(clock: Clock, capsys: Any) -> None:
    lines = Lines()
    for done in range(1, 11):
        clock.now += 3
        lines.step("scoring", done, 10, {})
    assert capsys.readouterr().err.splitlines()[0] == "  scoring 3/10, 0:00:21 left"


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    console = Console(record=True, force_terminal=True, width=150, file=io.StringIO())
    bars = Bars(console)
    train(bars, clock, 1.0, 40, loss=2.0)
    bars.close()
    text = console.export_text()
    assert re.search(r"train +━+ 40/40 \d:\d\d:\d\d loss 2, lr 0\.25, images/s 64", text)
    assert len(text.strip().splitlines()) == 1


def test_the_bar_of_the_whole_run_has_one_clock(clock: Clock) -> None:
    """That of the plan, and none that guesses from the bar's own speed."""
    console = Console(force_terminal=True, width=100, file=io.StringIO(), record=True)
    bars = Bars(console)
    bars.expect({"train": 60.0, "search": 60.0})
    bars.stage("train", "train the supernet")
    train(bars, clock, 1.0, 20)
    bars.close()
    overall = re.findall(r"the whole run .*?/100 *(.*?)(?=\n|  train)", console.export_text())
    assert overall[-1].strip().endswith(" left in all")
    assert not any(re.search(r"\d:\d\d:\d\d|-:--", shown) for shown in overall)


def test_the_bar_is_taken_down_when_training_fails(monkeypatch: Any) -> None:
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    monkeypatch.setattr(progress, "Lines", lambda: Bars(console))
    with pytest.raises(BcnetError), terminal_listener() as listener:
        train_supernet(
            toy.supernet(outputs=3), toy.source(), toy.config(), progress=training_steps(listener, "supernet")
        )
    assert console._live_stack == []


def test_a_real_training_is_shown(capsys: Any) -> None:
    with terminal_listener() as listener:
        train_supernet(toy.supernet(), toy.source(), toy.config(), progress=training_steps(listener, "toy"))
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"  toy 12/12, loss [\d.]+, lr [\d.]+, images/s [\d,.]+", told.err.splitlines()[-1])


def test_only_the_first_process_shows_anything(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(progress, "_world", lambda: (1, 2))
    Losses.reads = 0
    training_steps(Lines(), "x")(step(1, 1))
    assert (capsys.readouterr().err, Losses.reads) == ("", 0)


def test_images_of_all_processes_count(clock: Clock, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(progress, "_world", lambda: (0, 2))
    train(Lines(), clock, 10.0, 1)
    assert "images/s 12.8" in capsys.readouterr().err


def test_tensorboard_scalars(tmp_path: Path, clock: Clock, capsys: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, end, loss in ((1, 50, 3.0), (31, 60, 2.0)):  # resumed at step 30
        board = TensorBoard(Lines(), tmp_path)
        board.stage("train", "train the supernet")
        tell = training_steps(board, "train")
        for number in range(begin, end + 1):
            clock.now += 1
            tell(step(number, 60, loss))
        board.close()
    events = EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["images/s", "loss", "lr"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(n, 3.0 if n <= 30 else 2.0) for n in range(1, 61)]
    told = capsys.readouterr().err.splitlines()  # the screen hears everything too
    assert told[0] == "train: train the supernet"
    assert told[-1].startswith("  train 60/60, loss 2")


def test_tensorboard_curves_are_bounded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoard(Listener(), tmp_path)
    written: list[int] = []
    board._open = lambda *_, **__: type("W", (), {"add_scalar": lambda s, n, v, k: written.append(k)})()
    for number in range(1, 30_001):
        board.step("train", number, 30_000, {"loss": 1.0})
    assert len(written) <= progress.POINTS + 1
    assert written[-1] == 30_000


def test_tensorboard_is_asked_for_but_missing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BcnetError) as error:
        TensorBoard(Listener(), tmp_path)
    assert str(error.value) == "TensorBoard's scalars need tensorboard: pip install 'bcnet[tensorboard]'"

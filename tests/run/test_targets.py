"""Several targets from one start, and ``bcnet pick``, which repeats nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import terminal
import tinyrun

from bcnet.errors import BcnetError
from bcnet.report import charts
from bcnet.run.folder import DOUBT
from bcnet.run.pipeline import pick
from bcnet.run.recipe import Recipe
from bcnet.run.report import report_data
from bcnet.run.session import Run
from bcnet.run.targets import folder_name, known_scores, open_target
from bcnet.search import Trial, TrialStore
from bcnet.search.store import TRIALS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two targets, with everything that belongs to them."""
    folder = tmp_path_factory.mktemp("targets")
    settings = {key: value for key, value in tinyrun.TRAINED.items() if key != "budgets"}
    path = tinyrun.network_file(folder)
    chosen = Recipe.parse({"model": f"{path}:tiny", **settings, "targets": ["flops=70%", "flops=40%"]})
    run = Run.create(folder / "run", chosen, {"command": ["test"], "device": "cpu"} | _facts(chosen))
    return tinyrun.work(run, until="report")


def _facts(recipe: Recipe) -> dict[str, object]:
    from bcnet.run.session import facts

    return facts(["test"], recipe, "cpu")


def test_every_target_is_a_run_of_its_own(finished: Run) -> None:
    full = finished.read("trace")["costs"]["full"]["flops"]
    for text, share in (("flops=70%", 0.7), ("flops=40%", 0.4)):
        folder = finished.path("targets", folder_name(text))
        target = Run.open(folder)
        assert target.recipe.budgets == (text,)
        assert target.recipe.targets == ()
        row = next(row for row in target.read("compare")["networks"] if row["name"] == target.chosen)
        assert row["costs"]["flops"] <= share * full
        assert (folder / "report.html").stat().st_size > 1000
        assert (folder / "export" / "weights.safetensors").is_file()
        assert not target.done("given")  # the parent's


def test_the_page_shows_all_targets(finished: Run) -> None:
    page = finished.path("report.html").read_text("utf-8")
    for text in ("flops=70%", "flops=40%"):
        assert f"<a href='targets/{folder_name(text)}/report.html'>{text}</a>" in page
    assert "<h2>Accuracy against cost</h2>" in page
    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    assert [trace["name"] for trace in charts["tradeoff"]["data"]] == ["slim", "uniform", "your network"]
    assert [len(trace["x"]) for trace in charts["tradeoff"]["data"]] == [2, 2, 1]


def test_pick_repeats_nothing(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from bcnet.run.stages import given, search

    def never(*_: object, **__: object) -> None:
        raise AssertionError("this was done before")

    monkeypatch.setattr(search, "open_scorer", never)
    monkeypatch.setattr(search, "cut_scorer", never)
    monkeypatch.setattr(given, "retrain", never)
    before, ranked_by = known_scores(finished)
    with finished.lock():
        target = pick(finished, "flops=55%")
    found = target.read("search")
    assert found["evaluations"] == 0
    assert found["notes"] == [
        f"chosen from {len(before)} scores of the run's other searches, by the bottleneck model over them"
    ]
    assert found["ranked_by"] == ranked_by == "loss"
    assert target.folder == finished.path("targets", "flops-55pc")
    assert target.read("compare")["chosen"] in ("found", "uniform")
    assert target.path("report.html").is_file()


def test_a_point_of_the_front_is_picked_by_its_widths(finished: Run) -> None:
    """What a click on it in the report gives to copy; a race might have another winner."""
    data = report_data(finished.path("targets", "flops-70pc"))
    _, command = charts.front(data)["data"][1]["customdata"][0]
    asked = command.split()
    widths = [int(width) for width in asked[-1].split(",")]
    told = terminal.run("pick", str(finished.folder), *asked[3:], "--trust", "--json")
    assert told.exit_code == 0, told.output
    target = Run.open(json.loads(told.stdout)["run"])
    assert target.read("retrain/found")["widths"] == widths
    assert target.read("search")["notes"] == ["the widths are those that were asked for: nothing was searched"]
    for given, sentence in (
        (["--budget", asked[4], "--widths", "8,8"], f"these widths exceed {asked[4]}: name a larger budget, or "),
        (["--budget", "flops=70%", "--widths", "2,2"], "holds other widths for flops=70%: remove that folder, or "),
        (["--budget", "flops=70%", "--widths", "8"], "this space has 2 width variables, but 1 widths were given"),
    ):
        refused = terminal.run("pick", str(finished.folder), *given, "--trust")
        assert refused.exit_code == 2
        assert sentence in refused.stderr


def test_pick_on_the_command_line(finished: Run) -> None:
    told = terminal.run("pick", str(finished.folder), "--budget", "flops=55%", "--trust", "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["run"].endswith("targets/flops-55pc")
    lost = terminal.run("pick", str(finished.folder), "--budget", "flops=0.01%", "--trust")
    assert lost.exit_code == 2
    assert "budget flops=0.01% is impossible: the smallest network of this space costs " in lost.stderr
    assert not finished.path("targets", "flops-0.01pc").exists()


def test_nothing_to_pick_from(tmp_path: Path) -> None:
    run = tinyrun.trained(tmp_path)
    with pytest.raises(BcnetError) as caught:
        pick(run, "flops=40%")
    assert str(caught.value) == (
        f"{run.folder} has no scores to pick from yet: `bcnet run --resume {run.folder}` first"
    )


@pytest.mark.parametrize("allotted", ["uniform", "l2-isomorphic"])
def test_nothing_to_pick_from_where_nothing_was_searched(tmp_path: Path, allotted: str) -> None:
    run = tinyrun.work(tinyrun.trained(tmp_path, allot=allotted), until="search")
    told = terminal.run("pick", str(run.folder), "--budget", "flops=40%", "--trust")
    assert told.exit_code == 2
    text = " ".join(told.stderr.split())
    assert text.endswith("searched nothing, so it has no scores to pick from: begin a run with --budget flops=40%")
    assert not run.path("targets").exists()


def test_accuracies_are_not_mixed_with_losses(tmp_path: Path) -> None:
    """One target ranked by accuracy; of the other two, the accuracies differed by no more than chance."""
    run = tinyrun.trained(tmp_path, rank_by="score")
    for text, by in (("flops=70%", "score"), ("flops=50%", "loss"), ("flops=30%", "loss")):
        target = open_target(run, text, ["test"])
        target.write(DOUBT, {"ranked_by": by, "note": ""})
        with TrialStore(target.path(TRIALS)) as store:
            sign = 1 if by == "score" else -1
            width = int(text[6])
            store.add([Trial(1, (width, width), sign * 0.5, {"flops": 1}, True, 1, 0.0)])
    trials, ranked_by = known_scores(run)
    assert ranked_by == "loss"
    assert [(trial.widths, trial.score) for trial in trials] == [((3, 3), -0.5), ((5, 5), -0.5)]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ("flops=1%", r"budget flops=1% is impossible: the smallest network of this space costs "),
        ("flops=70.0%", r"the targets flops=70% and flops=70.0% are the same budget: keep one of them$"),
    ],
)
def test_targets_that_do_not_fit_are_said_at_once(tmp_path: Path, second: str, sentence: str) -> None:
    settings = {**tinyrun.TRAINED, "targets": ["flops=70%", second]}
    del settings["budgets"]
    chosen = Recipe.parse({"model": f"{tinyrun.network_file(tmp_path)}:tiny", **settings})
    run = Run.create(tmp_path / "run", chosen, _facts(chosen))
    with pytest.raises(BcnetError, match="^" + sentence):
        tinyrun.work(run, until="report")
    assert not run.done("given")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"targets": ["flops=70%"], "budgets": ["flops=50%"]},
            "targets and budgets both say how slim the network must be: keep one of them",
        ),
        ({"targets": ["flops=70%", "flops=70%"]}, "targets names a budget twice: keep one of them"),
    ],
)
def test_targets_that_cannot_be_meant(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(BcnetError) as caught:
        Recipe.parse({"model": "zoo:digits_cnn", "data": "digits", **settings})
    assert str(caught.value) == sentence


def test_names_of_folders() -> None:
    assert folder_name("flops=50%") == "flops-50pc"
    assert folder_name(" Latency = 4 ms") == "latency-4-ms"

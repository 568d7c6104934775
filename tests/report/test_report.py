"""The report's words, its data and its page as text; what a browser makes of it is in test_report_browser.py."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import tinyrun
from report_example import example

import bcnet.report.page
from bcnet.errors import BcnetError
from bcnet.report import Figures, ReportData, charts, render, words
from bcnet.report.several import render_several
from bcnet.run.folder import RunFolder
from bcnet.run.report import report_data, write_report
from bcnet.search import Budget


def with_score(data: ReportData, **scores: float) -> ReportData:
    changed = {name: replace(data.networks[name], score=value) for name, value in scores.items()}
    return replace(data, networks={**data.networks, **changed})


def test_verdict_names_gain_and_price():
    data = example()
    assert words.headline(data) == "49% of the FLOPs for 0.23\N{NO-BREAK SPACE}points of accuracy"
    assert words.verdict(data) == [
        "Within flops=50%, the slim network reaches 76.38% accuracy on the test images; the full network "
        "reaches 76.61%.",
        "At the same budget, scaling all layers alike gives 75.24%, 1.14\N{NO-BREAK SPACE}points less.",
    ]


@pytest.mark.parametrize(
    ("found", "full", "headline"),
    [
        (0.75, 0.74, "49% of the FLOPs, and 1.00\N{NO-BREAK SPACE}points more accuracy"),
        (0.75, 0.75, "49% of the FLOPs at the same accuracy"),
        (0.75, float("nan"), "49% of the FLOPs, 75.00% accuracy"),
    ],
)
def test_headline(found, full, headline):
    assert words.headline(with_score(example(), found=found, full=full)) == headline


def test_a_search_in_vain_is_called_that():
    sentences = words.verdict(with_score(example(), found=0.70))
    assert sentences[1:] == [
        "At the same budget, scaling all layers alike gives 75.24%, 5.24\N{NO-BREAK SPACE}points more.",
        "So the search was not worth it here: train for longer, or take the better network.",
    ]


def test_differences_that_may_be_chance_are_called_that():
    worse = with_score(replace(example(), count=400), found=0.74)
    assert words.verdict(worse)[1:] == [
        "At the same budget, scaling all layers alike gives 75.24%, 1.24\N{NO-BREAK SPACE}points more.",
        "On 400 test images, chance alone makes differences of up to 6.08\N{NO-BREAK SPACE}points.",
        "Each was trained once: what another training would change was not measured.",
    ]
    assert words.verdict(replace(worse, count=40_000))[2].startswith("So the search was not worth it here")


def test_differences_on_the_same_images_have_intervals():
    data = replace(example(), count=10_000)
    uniform = replace(data.networks["uniform"], lead=(0.0114, 0.002))
    data = replace(data, networks={**data.networks, "uniform": uniform})
    once = "Each was trained once: what another training would change was not measured."
    gives = "At the same budget, scaling all layers alike gives 75.24%, 1.14\N{NO-BREAK SPACE}points less"
    assert words.verdict(data)[1:] == [
        f"{gives} (95% interval: 0.748 to 1.53).",
        "That is more than chance on 10,000 test images allows.",
        once,
    ]
    thrice = words.verdict(replace(data, repeats=3))
    assert thrice[2:] == ["That is more than chance on 10,000 test images and over 3 trainings of each allows."]


def test_the_badge_says_whether_it_was_worth_it():
    data = replace(example(), count=40_000)
    assert words.badge(data) == ("worth it", "good")
    assert words.badge(with_score(data, found=0.7525)) == ("no clear difference", "open")
    assert words.badge(with_score(data, found=0.70)) == ("the search was not worth it", "bad")
    assert words.badge(replace(data, learnt=False))[1] == "bad"
    late = {"text": "latency=50%", "name": "latency", "allowed": 2e6, "taken": 3e6, "by": "measured", "met": False}
    data = replace(data, kept=(late,))
    assert words.badge(data) == ("failed: a budget is not met", "bad")
    assert words.budgets(data) == ["latency=50%: not met, measured (3 ms of 2 ms)"]
    assert "The budget latency=50% is not met: measured, it takes 3 ms, and 2 ms are allowed." in words.verdict(data)
    assert "failed: a budget is not met</span>" in render(data)


def test_several_runs_are_one_page():
    page = render_several([example(run="runs/a & b"), with_score(example(run="runs/c"), found=0.7)])
    assert "runs/a &amp; b" in page
    assert page.count("<tr>") == 3
    assert "the search was not worth it" in page


def test_a_point_of_the_front_says_how_to_have_it():
    front = charts.front(example(run="my runs/a"))["data"][1]
    about, command = front["customdata"][0]
    assert about.count("layer") == 37
    widths = re.sub(r"layer\d+.conv<1> ", "", about.split("; ")[1]).replace(", ", ",")
    assert command == f"bcnet pick 'my runs/a' --budget flops={front['x'][0]:.0f} --widths {widths}"


def test_a_point_of_a_run_from_python_is_had_from_python():
    """`bcnet pick` has no way to the network and its data there."""
    front = charts.front(replace(example(), in_python=True))["data"][1]
    _, command = front["customdata"][0]
    budget = f"flops={front['x'][0]:.0f}"
    assert command.startswith(f'result.pick("{budget}", widths=[')


def test_uniform_widths_that_win_the_race_are_called_that():
    data = example()
    uniform = replace(data.networks["uniform"], widths=data.found.widths, score=data.found.score)
    data = replace(data, networks={**data.networks, "uniform": uniform})
    assert "At the same budget, scaling all layers alike is what ships, under another name." in words.verdict(data)


def test_a_page_has_about_2_mb():
    assert len(render(example())) < 2**21


def test_latency_that_did_not_fall_is_said():
    data = example()
    slow = {**data.networks, "found": replace(data.found, latency_ms=40.0)}
    assert words.latency(replace(data, networks=slow)).endswith(
        "FLOPs fell but time did not: on this device such small networks are bound by other things."
    )
    assert words.latency(data).endswith("latency to 62%, from 40.2 ms to 24.9 ms for one input.")
    many = "torch, CPU, threads: 1, 16 inputs at once"
    assert words.latency(replace(data, timed_by=many)).endswith(" to 24.9 ms for 16 inputs at once.")
    assert f"latency is measured ({many}), as the median" in render(replace(data, timed_by=many))


def test_a_latency_is_told_where_the_full_network_has_none():
    data = example()
    untimed = {**data.networks, "full": replace(data.full, latency_ms=None)}
    sentence = "The slim network takes 24.9 ms for one input; the full one was not measured."
    assert words.latency(replace(data, networks=untimed)) == sentence


def test_scores_that_are_no_shares_stay_as_they_are():
    data = example(percent=False, metric="score")
    assert words.score(data, -0.012345) == "-0.01235"
    assert words.gap(data, -0.5) == "0.5"


def test_retained_bars_name_the_coupled_layers():
    data = example(variables=5)
    bars = charts.retained(data)["data"][0]
    assert bars["y"] == pytest.approx([100 * c / f for c, f in zip(data.found.widths, data.full_widths, strict=True)])
    assert "layer0.add &amp; co" in bars["hovertext"][0]
    assert "<1>" not in bars["hovertext"][0]


def test_front_and_progress_are_those_of_the_trials():
    data = example()
    front = next(t for t in charts.front(data)["data"] if t["name"] == "Pareto front")
    assert front["x"] == sorted(front["x"])
    assert front["y"] == sorted(front["y"])
    best = next(t for t in charts.progress(data)["data"] if t["name"] == "best so far")
    assert best["y"][-1] == pytest.approx(100 * data.chosen.score)
    assert front["y"][-1] == pytest.approx(max(100 * t.score for t in data.trials))


def test_the_star_is_what_was_found_and_not_what_the_search_alone_would_take():
    data = replace(example(), gains=None, race=({"name": "search", "epochs": 5, "score": 0.7, "loss": 1.0},))
    other = next(t for t in data.trials if t.widths != data.chosen.widths)
    for widths, score in ((other.widths, other.score), (tuple(w + 1 for w in other.widths), None)):
        found = replace(data.networks["found"], widths=widths)
        drawn = replace(data, networks={**data.networks, "found": found})
        stars = [t["y"] for t in charts.front(drawn)["data"] if t.get("marker", {}).get("symbol") == "star"]
        assert stars == ([] if score is None else [[pytest.approx(100 * score)]])
        page = " ".join(render(drawn).split())
        assert ("there is no star" in page) == (score is None)
        assert ("The star is what won the race." in page) == (score is not None)


def test_losses_of_a_supernet_are_drawn_downwards():
    data = example(ranked_by="loss", reference_scores={"full": -0.3, "uniform": -0.9})
    data = replace(data, trials=tuple(replace(t, score=t.score - 1) for t in data.trials))
    data = replace(data, chosen=next(t for t in data.trials if t.number == data.chosen.number))
    front, progress = charts.front(data), charts.progress(data)
    for chart in (front, progress):
        assert chart["layout"]["yaxis"] == {"title": {"text": "loss in the supernet"}, "autorange": "reversed"}
    edge = next(t for t in front["data"] if t["name"] == "Pareto front")
    assert edge["y"] == sorted(edge["y"], reverse=True)
    assert min(edge["y"]) > 0
    best = next(t for t in progress["data"] if t["name"] == "best so far")
    assert best["y"][-1] == pytest.approx(-data.chosen.score)
    assert "%" not in best["hovertemplate"].removeprefix("after %{x}: %{y:.4g}")
    lower = -0.9 - data.chosen.score
    where = "above" if lower > 0 else "below"
    assert f"its loss is {abs(lower):.3g} {where} that of uniform scaling, scored the same way." in render(data)


def test_law_shows_what_every_width_is_worth():
    data = example(variables=3, gains=(0.01, 0.03, 0.0))
    (bars,) = charts.log_width(data, data.gains)["data"]
    assert bars["y"] == [1.0, 3.0, 0.0]
    assert bars["customdata"] == ["layer0.conv&lt;1&gt;", "layer1.conv&lt;1&gt;", "layer2.conv&lt;1&gt;"]
    page = render(data)
    assert "Doubling layer1.conv&lt;1&gt; adds most." in page
    assert "The choice is the best configuration by a log-width model (experimental) of all 300 scores" in page
    assert "The model is experimental: it did not win a trial" in page
    by_loss = charts.log_width(example(variables=3, gains=data.gains, ranked_by="loss"), data.gains)
    assert by_loss["data"][0]["y"] == [0.01, 0.03, 0.0]
    assert by_loss["layout"]["yaxis"]["title"]["text"] == "loss saved by twice the width"


def test_a_search_without_a_law_shows_none():
    data = example(gains=None)
    assert "log-width" not in charts.all_charts(data)
    assert "What a width is worth" not in render(data)


def test_fairness_is_flat_for_bcv2_and_falls_for_ua():
    ours, ua = charts.all_charts(example(variables=1))["fairness"]["data"]
    assert len(set(ours["y"])) == 1
    assert ua["y"] == sorted(ua["y"], reverse=True)
    assert len(set(ua["y"])) > 1


def test_large_searches_are_thinned():
    dots = charts.front(example(variables=3, trials=7000))["data"][0]
    assert 2000 <= len(dots["x"]) <= charts.MOST_POINTS


def test_latency_budget_is_drawn_in_seconds():
    data = example()
    trials = tuple(replace(t, costs={"latency": 20_000_000 + t.number}) for t in data.trials)
    chosen, budgets = replace(data.chosen, costs={"latency": 2e7}), (Budget("latency", 3e7, "latency=30ms"),)
    data = replace(data, trials=trials, chosen=chosen, budgets=budgets)
    figure = charts.front(data)
    assert figure["layout"]["shapes"][0]["x0"] == pytest.approx(0.03)
    assert figure["layout"]["xaxis"]["ticksuffix"] == "s"


def test_page_is_whole_and_escaped():
    page = render(example())
    assert page.count('<div class="chart') == len(charts.all_charts(example())) == 8
    assert not re.search(r'(src|href)="(?!data:|#)', page.split("<script>")[0])
    assert "<b>tags</b>" not in page
    assert "&lt;folder&gt;" in page
    assert "birds &amp; bees" in page
    embedded = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert set(json.loads(embedded[1])) == set(charts.all_charts(example()))


def test_a_loss_that_is_no_number_leaves_valid_json():
    data = example()
    curve = replace(data.supernet_curve, losses=(1.0, float("nan")))
    embedded = re.search(r'id="charts">(.*?)</script>', render(replace(data, supernet_curve=curve)), re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["supernet-curve"]["data"][0]["y"] == [1.0, None]


def test_full_network_that_was_not_trained_has_a_dash():
    data = example()
    untrained = Figures("full", data.full_widths, float("nan"), data.full.costs)
    page = render(replace(data, networks={**data.networks, "full": untrained}))
    assert "<td>–</td>" in page


def test_missing_plotly(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(bcnet.report.page.importlib, "import_module", missing)
    bcnet.report.page.packed_plotly.cache_clear()
    with pytest.raises(BcnetError) as error:
        render(example())
    assert str(error.value) == 'the report draws with plotly, which is not installed: pip install "bcnet[report]"'


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tinyrun.work(tinyrun.create(tmp_path_factory.mktemp("report")))


def test_data_of_a_run(finished):
    data = report_data(finished.folder)
    assert data.model.endswith("tiny.py:tiny")
    assert data.metric == "accuracy"
    assert data.found.widths == tuple(finished.read("search")["best"]["widths"])
    assert data.full_widths == (8, 8)
    assert len(data.trials) == finished.read("search")["evaluations"]
    assert len(data.supernet_curve.losses) == 2
    assert [curve.name for curve in data.retrain_curves] == ["full", "uniform", "found"]
    assert data.repeat == f"bcnet run --recipe {finished.folder}/recipe.yaml --trust"
    path = write_report(finished)
    assert path == finished.path("report.html")
    assert data.recipe.strip().splitlines()[0] in path.read_text("utf-8")


def test_damaged_result(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    path = tmp_path / "run" / "search.json"
    path.write_text(json.dumps({"version": 2}))
    with pytest.raises(BcnetError) as error:
        write_report(tmp_path / "run")
    assert str(error.value) == (
        f"{path} is damaged (it was changed after it was written): resume the run to have it made again"
    )


def test_results_that_do_not_belong_together(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    trace = run.read("trace")
    run.write("trace", {**trace, "variables": trace["variables"][:1]})
    with pytest.raises(BcnetError) as error:
        write_report(run)
    assert str(error.value).startswith(f"the results in {tmp_path}/run do not belong together (")


def test_folder_of_no_run(tmp_path):
    with pytest.raises(BcnetError) as error:
        write_report(tmp_path)
    assert str(error.value) == f"{tmp_path} is not the folder of a run: it has neither run.json nor recipe.yaml"

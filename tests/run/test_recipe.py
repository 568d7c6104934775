"""Recipes: round trips, what mistakes are answered with, and those that come with bcnet."""

from __future__ import annotations

import itertools
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bcnet import models as zoo
from bcnet.data import LoadOptions
from bcnet.errors import BcnetError
from bcnet.run.recipe import FOLDER, GROUPS, Compared, Prior, Recipe, names
from bcnet.run.recipe_comments import KEYS, commented
from bcnet.search import SearchConfig
from bcnet.supernet.paths import METHODS, PathSampling
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, RandomBaseline
from bcnet.utils.settings import meanings

LEAST = {"model": "zoo:digits_cnn", "data": "digits"}
SCRATCH = {**LEAST, "start": "scratch"}
*_FIRST, _LAST = get_args(Compared)
_ONE_OF = f"{', '.join(_FIRST)} or {_LAST}"


def test_the_papers_way_is_one_word() -> None:
    recipe = Recipe.parse(SCRATCH)
    assert recipe.paths == METHODS["bcv2"]
    assert (recipe.scorer, recipe.rank_by, recipe.race, recipe.distillation) == ("supernet", "score", None, None)
    assert recipe.retrain.epochs == 60
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_defaults_are_one_sound_recipe() -> None:
    recipe = Recipe.parse(LEAST)
    assert recipe.budgets == ("flops=50%",)
    assert (recipe.start, recipe.scorer, recipe.rank_by) == ("trained", "steps", "loss")
    assert recipe.race is not None
    assert recipe.distillation is not None
    assert recipe.compare == ("full", "uniform", "uniform-8")
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


@given(
    seed=st.integers(0, 2**31 - 1),
    epochs=st.integers(1, 1000),
    lr=st.floats(1e-12, 10),
    optimizer=st.sampled_from(["sgd", "rmsprop"]),
    schedule=st.sampled_from(["cosine", "step", "exponential"]),
    milestones=st.lists(st.integers(1, 500), max_size=3, unique=True).map(sorted),
    budgets=st.lists(st.sampled_from(["flops=50%", "params=3M", "latency=4ms"]), min_size=1, unique=True),
    method=st.sampled_from(sorted(METHODS)),
    sampling=st.none() | st.builds(PathSampling, draws=st.integers(1, 5), sides=st.sampled_from(["both", "left"])),
    distillation=st.none() | st.builds(Distillation, st.floats(0, 1), st.floats(0.1, 20)),
    prior=st.none() | st.builds(Prior, st.integers(1, 500), st.floats(0, 0.99)),
    crop=st.none() | st.integers(0, 8),
    about=st.text(max_size=40),
)
def test_yaml_gives_the_same_recipe_back(**drawn: Any) -> None:
    training = {key: drawn.pop(key) for key in ("epochs", "lr", "optimizer", "schedule", "milestones")}
    crop = drawn.pop("crop")
    recipe = Recipe(
        **LEAST,
        **drawn,
        supernet=Optimisation(**{**training, "milestones": tuple(training["milestones"])}),
        loading=LoadOptions(crop=crop),
    )
    again = Recipe.from_yaml(recipe.to_yaml())
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()


def test_a_group_that_is_given_in_part_keeps_the_recipes_other_defaults() -> None:
    recipe = Recipe.parse({**SCRATCH, "supernet": {"epochs": 7}, "retrain": {"epochs": 7}})
    assert recipe.supernet == recipe.retrain == Optimisation(epochs=7, weight_decay=5e-4, head=64)
    fine_tuned = Recipe.parse({**LEAST, "retrain": {"epochs": 7}}).retrain
    assert fine_tuned == Optimisation(epochs=7, lr=None, warmup=0.5, weight_decay=5e-4, head=64)


def test_numbers_that_yaml_reads_as_texts_are_numbers() -> None:
    assert Recipe.from_yaml("model: a\ndata: b\nsupernet: {lr: 1e-3}").supernet.lr == 1e-3


def test_a_changed_recipe_is_checked() -> None:
    recipe = Recipe.parse(LEAST)
    assert recipe.changed(seed=3).seed == 3
    with pytest.raises(BcnetError, match=r"^seed is -1, but it must be at least 0$"):
        recipe.changed(seed=-1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: b", "model is missing: name it"),
        ("budget: [flops=50%]", "unknown key budget: did you mean 'budgets'?"),
        ("supernet: {learning: 3}", None),
        ("supernet: {epoch: 3}", "unknown key supernet.epoch: did you mean 'epochs'?"),
        ("search: {populations: 3}", "unknown key search.populations: did you mean 'population'?"),
        ("supernet: {lr: fast}", "supernet.lr is 'fast', but it must be a number"),
        ("supernet: {epochs: 1.5}", "supernet.epochs is 1.5, but it must be a whole number"),
        ("supernet: {bf16: perhaps}", "supernet.bf16 is 'perhaps', but it must be true or false"),
        ("supernet: {schedule: cos}", "supernet.schedule is 'cos', but it must be cosine, step or exponential"),
        ("supernet: 3", "supernet is 3, but it must be a group of settings, `key: value`"),
        ("sampling: {draws: 0}", "sampling.draws is 0, but it must be at least 1"),
        ("distillation: {alpha: 2}", "distillation.alpha is 2, but it must be at most 1"),
        ("distillation: {temperature: 0}", "distillation.temperature is 0, but it must be above 0"),
        ("random: {networks: 0}", "random.networks is 0, but it must be at least 1"),
        ("prior: {best: 0}", "prior.best is 0, but it must be at least 1"),
        ("prior: {after: 1}", "prior.after is 1, but it must be below 1"),
        ("groups: 0", "groups is 0, but it must be at least 1"),
        ("groups: 4\nbase: 5", "base is 5, but it counts groups and must lie in 1..4"),
        ("val_fraction: 1", "val_fraction is 1, but it must be below 1"),
        ("budgets: []", "budgets is empty, but it needs at least 1"),
        ("budgets: flops=50%", "budgets is 'flops=50%', but it must be a list"),
        ("compare: [best]", f"compare.0 is 'best', but it must be {_ONE_OF}"),
        ("input: [3, 32]", "input has too few numbers"),
        ("method: bcv3", f"method is 'bcv3', but it must be one of {', '.join(METHODS)}"),
        ("search: {seed: 3}", "search.seed must be left out: the one seed of a recipe is seed"),
        (
            "start: scratch\nsearch: {strategy: legr}",
            "strategy legr ranks trained channels: it needs start: trained and score: steps or cut",
        ),
        ("version: 2", "version is 2, but this bcnet reads recipes of version 1"),
        (
            "compare: [random]\nretrain: {epochs: 10}",
            "random.epochs is 50, but it must be at most retrain.epochs, 10",
        ),
        ("seed: 1\nseed: 2", "seed is written twice: keep one of them"),
        ("about: [", "this is not YAML: expected the node content, but found '<stream end>' in line 3"),
        ("about: !!python/object/apply:os.getcwd []", None),
    ],
)
def test_a_mistake_is_answered_with_its_key(text: str, sentence: str | None) -> None:
    base = "" if text.startswith("data") else "model: a\ndata: b\n"
    with pytest.raises(BcnetError) as caught:
        Recipe.from_yaml(base + text)
    if sentence is not None:
        assert str(caught.value) == sentence
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "3", "- a", "text"])
def test_something_else_than_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(BcnetError, match=r"^a recipe must be a list of `key: value`, not "):
        Recipe.from_yaml(text)


LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in itertools.pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 5000, "this YAML has over 16 levels, more than are read"),
        (LAUGHS, "this YAML has over 16 aliases, more than are read"),
        ("".join(f"k{n}: 1\n" for n in range(6000)), "this YAML has over 2,000 values, more than are read"),
        ("a: " + "x" * 100_000, "this YAML has 100,003 characters, and at most 65,536 are read"),
        ("about: 2001-99-99", "this YAML cannot be read: month must be in 1..12"),
        (f"seed: {'9' * 5000}", "this YAML cannot be read: Exceeds the limit (4300 digits) for integer string"),
        ("? [a, b]\n: 1", "this is not YAML: "),
    ],
)
def test_bombs_are_refused_in_no_time(text: str, sentence: str) -> None:
    start = time.monotonic()
    with pytest.raises(BcnetError) as caught:
        Recipe.from_yaml(text)
    assert str(caught.value).startswith(sentence)
    assert time.monotonic() - start < 10


def test_a_few_aliases_are_fine() -> None:
    recipe = Recipe.from_yaml("model: zoo:digits_cnn\ndata: digits\nsupernet: &s {epochs: 3}\nretrain: *s\n")
    assert recipe.retrain.epochs == 3


@pytest.mark.parametrize("value", [10**5000, [[[["x" * 10**6] * 10]] * 10] * 10], ids=["number", "list"])
def test_a_huge_value_is_not_written_out(value: object) -> None:
    with pytest.raises(BcnetError) as caught:
        Recipe.parse({"model": "zoo:digits_cnn", "data": "digits", "seed": value})
    assert len(str(caught.value)) < 200


def test_a_file_is_named_in_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: a\ndata: b\nseed: x\n")
    with pytest.raises(BcnetError) as caught:
        Recipe.read(path)
    assert str(caught.value) == f"{path}: seed is 'x', but it must be a whole number"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BcnetError, match=rf"^cannot read {path}: "):
        Recipe.read(path)
    path.write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(BcnetError, match=r": 1,048,577 bytes, where at most 65,536 are read$"):
        Recipe.read(path)


def test_an_unknown_name_gets_near_matches() -> None:
    with pytest.raises(BcnetError) as caught:
        Recipe.read("digitz")
    assert str(caught.value) == "there is no recipe 'digitz': did you mean 'digits'? `bcnet recipe list` shows all"


@pytest.mark.parametrize("name", names())
def test_every_recipe_is_in_order(name: str) -> None:
    recipe = Recipe.read(name)
    assert recipe.about
    kind, _, model = recipe.model.partition(":")
    assert kind == "zoo"
    assert model in zoo.MODELS
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    own = name in ("digits", "cluttered_digits")
    assert own or recipe.supernet.head == recipe.retrain.head == 0  # the paper's have plain rates
    assert recipe.search.choose == "score"  # the log-width model is experimental
    assert set(yaml.safe_load((FOLDER / f"{name}.yaml").read_text())) <= set(Recipe.model_fields)


def test_the_papers_settings() -> None:
    resnet, vgg, mobile = (Recipe.read(n) for n in ("resnet50_imagenet", "vgg19_cifar", "efficientnet_b0_imagenet"))
    assert resnet.supernet == resnet.retrain == Optimisation(epochs=120, lr=0.1, final_lr=1e-5, weight_decay=1e-4)
    assert (resnet.groups, resnet.base, resnet.loading.batch_size) == (20, 5, 256)
    assert resnet.paper_budgets == ("flops=3G", "flops=2G", "flops=1G", "flops=570M")
    steps = [vgg.retrain.rate(epoch, 1) for epoch in (159, 160, 240)]
    assert steps == pytest.approx([0.1, 0.01, 0.001])
    assert vgg.loading.batch_size == 128
    assert mobile.retrain.optimizer == "rmsprop"
    assert mobile.retrain.rate(5, 1) == pytest.approx(0.128)
    assert mobile.retrain.rate(8, 1) == pytest.approx(0.128 * 0.963)
    table = Recipe.read("channel_bench_mobilenet")
    assert (table.supernet.weight_decay, table.retrain.weight_decay, table.retrain.epochs) == (0, 5e-4, 60)


def test_groups_of_settings_are_the_programs_own_classes() -> None:
    recipe = Recipe.parse({**SCRATCH, "search": {"strategy": "greedy"}, "random": {"networks": 3}})
    assert recipe.search == SearchConfig(strategy="greedy")
    assert recipe.random == RandomBaseline(networks=3)


@pytest.mark.parametrize(
    ("bf16", "capability", "expected"),
    [(None, (9, 0), True), (None, (7, 5), False), (False, (9, 0), False), (True, (7, 5), True)],
)
def test_bf16_is_the_default_of_gpus_that_have_it(
    bf16: bool | None, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    recipe = Recipe(model="zoo:digits_cnn", data="digits", bf16=bf16)
    on_gpu = recipe.on(torch.device("cuda"))
    assert {on_gpu.given.bf16, on_gpu.supernet.bf16, on_gpu.retrain.bf16} == {expected}
    assert on_gpu.on(torch.device("cuda")) == on_gpu
    if bf16 is None:
        assert recipe.on(torch.device("cpu")) is recipe


def test_every_key_has_a_comment() -> None:
    assert set(KEYS) == set(Recipe.model_fields)
    assert {"loading", "sampling", "prior", "race", "distillation"} <= set(GROUPS)
    for name, settings in GROUPS.items():
        assert set(meanings(settings)) == {field.name for field in fields(settings)} - {"seed"}, name


@pytest.mark.parametrize("name", ["digits", "cluttered_digits", "mobilenetv2_cifar"])
def test_comments_change_nothing(name: str) -> None:
    recipe = Recipe.read(name)
    text = commented(recipe)
    assert Recipe.from_yaml(text) == recipe
    assert text.startswith("# the version of this format\nversion: 1\n")
    assert "  epochs: " in text
    assert "  # passes over the training images" in text

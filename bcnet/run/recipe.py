"""A recipe: everything a run does, as one validated, versioned object that is a YAML file on disk.

``Recipe.read("digits")`` reads one that comes with bcnet, ``Recipe.read("my.yaml")`` one of your own. Mistakes are
answered in one sentence that names the key. Where a recipe is silent, the defaults below hold.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bcnet.data.options import LoadOptions
from bcnet.errors import BcnetError
from bcnet.search.config import SearchConfig
from bcnet.supernet.paths import METHODS, Method, PathSampling
from bcnet.training.optim import Optimisation
from bcnet.training.retraining import Distillation, RandomBaseline
from bcnet.utils.files import read_regular
from bcnet.utils.yaml_text import LARGEST, brief, parse_yaml

FORMAT_VERSION = 1
Compared = Literal["full", "uniform", "balanced", "random"]
PYTHON = "python"
"""What stands for model and data in the recipe of a run that was given Python objects."""
HEAD = 64.0
"""``Optimisation.head`` where a recipe is silent: at a rate of 0.1 it holds from 640 features on."""
FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Prior:
    """The prior population: from the ``best`` widths trained, after the first ``after`` (a share) of the steps."""

    best: int = 100
    after: float = 0.0

    def __post_init__(self) -> None:
        if self.best < 1:
            raise BcnetError(f"best is {self.best}, but it must be at least 1")
        if not 0 <= self.after < 1:
            raise BcnetError(f"after is {self.after}, but it must lie in [0, 1)")


class Recipe(BaseModel):
    """What a run does. ``seed`` is the one seed of everything in it.

    ``widen`` searches around a network wider than the given one (the paper: 1.5 for a budget of 100 %); percentages
    of budgets stay those of the given network. ``paper_budgets`` are those the paper reports results for. ``rank_by``
    is what the search compares widths by in the supernet: their score (accuracy, unless you give a metric) or their
    loss, which few images tell more surely. ``threads`` of the CPU are torch's own choice where left out; small
    networks are faster with one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    version: Literal[1] = 1
    about: str = ""
    model: str
    input: tuple[int, int, int] | None = None
    data: str
    val_fraction: float = Field(default=0.1, gt=0, lt=1)
    loading: LoadOptions = LoadOptions()
    groups: int = Field(default=20, ge=1)
    base: int = Field(default=1, ge=1)
    round_to: int = Field(default=1, ge=1)
    ignore: tuple[str, ...] = ()
    squeeze: bool = False
    widen: float = Field(default=1.0, ge=1, le=4)
    budgets: tuple[str, ...] = Field(default=("flops=50%",), min_length=1)
    paper_budgets: tuple[str, ...] = ()
    method: str = "bcv2"
    sampling: PathSampling | None = None
    backward: Literal["path", "step"] = "path"
    engine: Literal["auto", "plain", "fused"] = "auto"
    supernet: Optimisation = Optimisation(epochs=60, weight_decay=5e-4, head=HEAD)
    prior: Prior | None = Prior()
    recalibrate: int = Field(default=0, ge=0)
    rank_by: Literal["score", "loss"] = "score"
    search: SearchConfig = SearchConfig(choose="log-width")
    retrain: Optimisation = Optimisation(epochs=60, weight_decay=5e-4, head=HEAD)
    distillation: Distillation | None = None
    compare: tuple[Compared, ...] = ("full", "uniform")
    random: RandomBaseline = RandomBaseline()
    checkpoint_minutes: float = Field(default=5.0, gt=0)
    channels_last: bool = True
    threads: int | None = Field(default=None, ge=1, le=256)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _complete_groups(cls, data: Any) -> Any:
        """What a group of settings leaves out is this recipe's default, not its class's."""
        content = dict(data)
        for key, entry in cls.model_fields.items():
            if key in _GROUPS and entry.default is not None and isinstance(content.get(key), Mapping):
                content[key] = {**asdict(entry.default), **content[key]}
        return content

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"method is {brief(value)}, but it must be one of {', '.join(METHODS)}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.base > self.groups:
            raise ValueError(f"base is {self.base}, but it counts groups and must lie in 1..{self.groups}")
        if "random" in self.compare and self.random.epochs > self.retrain.epochs:
            raise ValueError(
                f"random.epochs is {self.random.epochs}, but it must be at most retrain.epochs, {self.retrain.epochs}"
            )
        if self.search.seed != 0:
            raise ValueError("search.seed must be left out: the one seed of a recipe is seed")
        return self

    @property
    def paths(self) -> Method:
        """Principle and path sampling of the supernet's training."""
        method = METHODS[self.method]
        return method if self.sampling is None else Method(method.principle, self.sampling)

    def changed(self, **changes: Any) -> Recipe:
        """This recipe with other values of some keys, checked again."""
        return Recipe.parse({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        data = self.model_dump(mode="json")
        data["search"].pop("seed")
        return data

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def parse(cls, data: Any) -> Recipe:
        """The recipe that a mapping describes, or a :class:`BcnetError` that names the first key that is wrong."""
        if not isinstance(data, Mapping):
            raise BcnetError(f"a recipe must be a list of `key: value`, not {brief(data, 60)}")
        if data.get("version", FORMAT_VERSION) != FORMAT_VERSION:
            raise BcnetError(
                f"version is {brief(data['version'])}, but this bcnet reads recipes of version {FORMAT_VERSION}"
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise BcnetError(_sentence(error)) from None

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        return cls.parse(parse_yaml(text))

    @classmethod
    def read(cls, place: str | Path) -> Recipe:
        """The recipe called ``place``, or in the file ``place``."""
        path = FOLDER / f"{place}.yaml" if str(place) in names() else Path(place)
        if not path.is_file():
            near = difflib.get_close_matches(str(place)[:80], names(), n=3, cutoff=0.5)
            guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise BcnetError(f"there is no recipe {str(place)!r:.80}: {guess}`bcnet recipe list` shows all")
        text = cls.read_text(path)
        try:
            return cls.from_yaml(text)
        except BcnetError as error:
            raise BcnetError(f"{path}: {error}") from None

    @staticmethod
    def read_text(path: Path) -> str:
        """The text of a recipe's file."""
        try:
            return read_regular(path, LARGEST).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BcnetError(f"cannot read {path}: {error.reason} at byte {error.start}, so it is no UTF-8") from None
        except OSError as error:
            raise BcnetError(f"cannot read {path}: {error.strerror or error}") from None


def names() -> list[str]:
    """The recipes that come with bcnet."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


_MUST_BE = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "dataclass_type": "a group of settings, `key: value`",
    "model_type": "a group of settings, `key: value`",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _sentence(error: ValidationError) -> str:
    """The first mistake of a recipe: its key, and what it must be."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(first["loc"])
    if kind == "missing":
        owner, _, number = key.rpartition(".")
        return f"{owner} has too few numbers" if number.isdigit() else f"{key} is missing: a recipe must name it"
    if kind == "value_error":
        text = str(context["error"])
        return f"{key}.{text}" if key and not text.startswith(key) else text
    if kind == "literal_error":
        return f"{key} is {brief(value)}, but it must be {context['expected']}"
    if kind == "too_short":
        return f"{key} is empty, but it needs at least {context['min_length']}"
    for bound, words in _BOUNDS.items():
        if bound in context:
            return f"{key} is {brief(value)}, but it must be {words} {context[bound]:g}"
    for prefix, meaning in _MUST_BE.items():
        if kind.startswith(prefix):
            return f"{key} is {brief(value)}, but it must be {meaning}"
    return f"{key} is {brief(value)}, but {first['msg'][0].lower()}{first['msg'][1:]}"


def _unknown(place: Iterable[str | int]) -> str:
    *path, last = [str(part) for part in place]
    owner: Any = Recipe
    for part in path:
        owner = _default(owner, part)
    known = [f.name for f in fields(owner)] if is_dataclass(owner) else list(Recipe.model_fields)
    near = difflib.get_close_matches(last[:80], known, n=1, cutoff=0.6)
    guess = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"unknown key {'.'.join([*path, last]):.80}: {guess}"


_GROUPS: dict[str, Any] = {
    "loading": LoadOptions,
    "sampling": PathSampling,
    "supernet": Optimisation,
    "prior": Prior,
    "search": SearchConfig,
    "retrain": Optimisation,
    "distillation": Distillation,
    "random": RandomBaseline,
}


def _default(owner: Any, part: str) -> Any:
    return _GROUPS.get(part, owner) if owner is Recipe else owner

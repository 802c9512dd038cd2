"""Routers read from files and options, and described in words; `modeling/expanded_routers` has the routers."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from scale_surgery.checkpoint.expansions import BASE_NAME, DEFAULT_NAME, PRESERVE_NAME, ROUTER_KEY, specs_of_expansions
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.records import RecordError, reading
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.fields import Range, problems_of
from scale_surgery.modeling.expanded_routers import ROUTERS, CosineRouter, PosteriorRouter, Router, make_router

KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list of numbers"}
# weights that differ by at most this are the same
EVEN = 1e-9


@dataclass(frozen=True)
class RouterOptions:
    """How each token is routed over K + 1 paths: the base, and the base with each of K expansions.

    Attributes:
        router: Rule of the router. posterior mixes all paths by how well each predicted the text so far. cosine picks
            one of two paths by the cosine of their base logits (SCALE, arXiv 2511.03270, eq. 5).
        threshold: Cosine above which a token takes the preserve path (cosine).
        prior: Weight of the base at the start of a text (posterior). Default: equal weights of all paths.
        switch_rate: Share of weight that each path passes to the others at every token (posterior).
        strict: Output only the base model's logits on the preserve path (cosine). posterior always does so.
    """

    router: str = field(default="posterior", metadata={"choices": lambda: ROUTERS})
    threshold: Annotated[float, Range(least=-1, most=1, noun="a cosine")] = CosineRouter.threshold
    prior: Annotated[float, Range(above=0, below=1, noun="a probability")] | None = None
    switch_rate: Annotated[float, Range(least=0, below=1, noun="a share")] = PosteriorRouter.switch_rate
    strict: bool = False

    def make(self) -> Router:
        """The router with its numbers."""
        if problems := problems_of(self):
            raise PlanError(*problems)
        kind = ROUTERS[self.router]
        taken = {option.name for option in fields(kind)}
        foreign = [
            Problem("option-of-other-router", f"--{option.name.replace('_', '-')}", router=self.router)
            for option in fields(self)
            if option.name not in taken and getattr(self, option.name) != option.default
        ]
        if foreign:
            raise PlanError(*foreign)
        options = [option.name for option in fields(self) if option.name in taken and option.name != "router"]
        router: Router = kind(**{name: getattr(self, name) for name in options})
        return router


def check_paths_differ(router: Router, has_w12: bool) -> None:
    """Check that a router has something to compare."""
    if isinstance(router, CosineRouter) and not has_w12:
        raise PlanError(Problem("paths-alike", "router"))


def router_for(router: Router, expansions: int) -> Router:
    """A router with all its numbers, for so many expansions; refused if they make no sense for them."""
    if type(router) not in ROUTERS.values():
        kind = "one such as scale_surgery.PosteriorRouter()"
        raise PlanError(Problem("value-unfit", "router", value=repr(router), kind=kind))
    try:
        settings = router.for_expansions(expansions).settings
    except (TypeError, ArithmeticError):
        settings = router.settings
    if problems := _problems(settings, expansions, ""):
        raise PlanError(*problems)
    return make_router(settings, expansions)


def read_router(settings: Any, expansions: int, place: str) -> Router | None:
    """Make the router of plain JSON values, None of None; RecordError calls them by their `place` in the file."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise RecordError(Problem("value-unfit", place, value=reprlib.repr(settings), kind="an object"))
    if problems := _problems(settings, expansions, place):
        raise RecordError(*problems)
    return make_router(dict(settings), expansions)


def _problems(settings: Mapping[str, Any], expansions: int, place: str) -> list[Problem]:
    """List the problems of a router's settings; no number is guessed."""
    inside = f"{place}." if place else ""
    if not isinstance(name := settings.get("router"), str) or name not in ROUTERS:
        return [Problem("router-unknown", f"{inside}router", name=name, choices=list(ROUTERS))]
    # the default of each number shows its type
    defaults = ROUTERS[name]().for_expansions(expansions).settings
    problems = [Problem("key-missing", f"{inside}{key}") for key in defaults if settings.get(key) is None]
    problems += [Problem("key-unknown", f"{inside}{key}") for key in settings if key not in defaults]
    problems += [
        Problem("value-unfit", f"{inside}{key}", value=reprlib.repr(settings[key]), kind=KINDS[type(value)])
        for key, value in defaults.items()
        if settings.get(key) is not None and not _has_type_of(settings[key], value)
    ]
    if problems:
        return problems
    try:
        make_router(dict(settings), expansions)
    except ValueError as error:
        # lines of exported code, such as "prior: is ..."
        return [Problem("other-program", place, error=line.removesuffix(".")) for line in str(error).split("\n")]
    return []


def _has_type_of(value: Any, default: Any) -> bool:
    if isinstance(default, list):
        return isinstance(value, list | tuple) and all(_has_type_of(weight, 0.0) for weight in value)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def router_of(specs: Mapping[str, Any]) -> Router | None:
    """Read how a model routes from the key `scale_surgery` of its config.json; None if it does not."""
    with reading(Path(CONFIG_FILE)):
        return read_router(specs.get(ROUTER_KEY), len(specs_of_expansions(specs)), f"{CONFIG_KEY}.{ROUTER_KEY}")


def routing_of(model: str | Path, checkpoint: Checkpoint) -> tuple[Router, tuple[str, ...]]:
    """Read the router of a model and the names of its paths from its config.json; errors call the model by its name."""
    specs = checkpoint.config.get(CONFIG_KEY, {})
    router = router_of(specs)
    if router is None:
        raise CheckpointError(Problem("model-unrouted", model))
    if any(expansion.get("fused") for expansion in specs_of_expansions(specs)):
        refuse_form(model, "fused", "expanded")
    return router, sides_of(router, specs)


def sides_of(router: Router, specs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the paths that a router weighs, by the key `scale_surgery` of the model's config.json."""
    names = tuple(str(expansion.get("name", DEFAULT_NAME)) for expansion in specs_of_expansions(specs))
    paths = router.paths(names)
    # `base`, or `preserve side` where an up stream goes with it, and the names of expansions
    return tuple(path.expansion if path.has_w12 else PRESERVE_NAME if path.expansion else BASE_NAME for path in paths)


def weights_of(router: PosteriorRouter) -> tuple[float, ...]:
    """Weights of the paths at the start of a text, of a router that has them all."""
    assert isinstance(router.prior, tuple)
    return router.prior


def is_even(weights: Sequence[float]) -> bool:
    """Return True if all weights are equal."""
    return max(weights) - min(weights) <= EVEN


def is_default(router: Router, expansions: int) -> bool:
    """Return True if the numbers of a router are its defaults; its switches do not count."""
    switches = {name: value for name, value in router.settings.items() if isinstance(value, bool)}
    return router == type(router)(**switches).for_expansions(expansions)


def numbers_of(router: Router, names: Sequence[str] = ()) -> str:
    """The numbers of a router in words; without names of the expansions, weights of paths stand in their order."""
    numbers = {name.replace("_", " "): value for name, value in router.settings.items() if name != "router"}
    shown = [(name, value) for name, value in numbers.items() if value is not False and value is not None]
    return ", ".join(_in_words(name, value, names) for name, value in shown)


def _in_words(name: str, value: Any, names: Sequence[str]) -> str:
    if value is True:
        return name
    if not isinstance(value, list):
        return f"{name} {value:.10g}"
    if is_even(value):
        return "all paths alike"
    if len(value) == 2:
        return f"{name} {value[0]:.10g}"
    titles = [f"{path} " for path in (BASE_NAME, *names)] if len(value) == 1 + len(names) else [""] * len(value)
    return f"{name} " + ", ".join(f"{title}{weight:.3g}" for title, weight in zip(titles, value, strict=True))


def describe_router(router: Router, names: Sequence[str] = ()) -> str:
    """A router and its numbers in one line; see `numbers_of`."""
    return f"{router.router}, {numbers_of(router, names)}"

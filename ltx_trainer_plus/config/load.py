"""From YAML files and command-line overrides to a checked TrainerConfig, and back to YAML."""

import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.config.checks import check_paths, contradictions
from ltx_trainer_plus.config.explain import explain
from ltx_trainer_plus.config.interpolation import resolve
from ltx_trainer_plus.config.keys import without_form_names
from ltx_trainer_plus.config.old_names import take_old_names, warn_of_strategy
from ltx_trainer_plus.config.overrides import apply_override
from ltx_trainer_plus.config.problems import ConfigError, Problem
from ltx_trainer_plus.config.schema import TrainerConfig
from ltx_trainer_plus.config.strategy import DEFAULT_STRATEGY, FlexibleConfig
from ltx_trainer_plus.config.unavailable import unavailable
from ltx_trainer_plus.config.yaml_text import read_yaml, write_yaml

_HEADER = "# The resolved configuration of this run. It starts the same run again.\n"


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read and check a configuration.

    Args:
        paths: one YAML file, or several that are merged from left to right: sections are merged key by key, anything
            else (lists too) is replaced.
        overrides: `key.path=value`, applied last. Values are YAML, but a text needs no quotes. Items of a list are
            addressed by index, and the next free index adds one: `validation.samples.0.prompt="a cat: close-up"`.

    Interpolations (`${seed}`, `${oc.env:NAME}`) are resolved last; they see the defaults too.

    Raises:
        ConfigError: lists everything that is wrong.

    Warns:
        OldNameWarning: once for each older name in it.
    """
    tree = _defaults()
    problems: list[Problem] = []
    written: set[str] = set()  # fields of `validation` that do not come from the defaults
    names_strategy = False  # likewise
    for path in [paths] if isinstance(paths, str | Path) else paths:
        try:
            given = read_yaml(Path(path))
            tree = _merged(tree, given)
            written.update(_keys(given.get("validation")))
            names_strategy |= "name" in _keys(given.get("training_strategy"))
        except ValueError as error:
            problems.append(Problem(str(path), str(error)))
    for override in overrides:
        try:
            apply_override(tree, override)
            section, _, field = re.split(r"[=\[]", override)[0].strip().partition(".")
            written.update([field.split(".")[0]] if section == "validation" else ())
            names_strategy |= section == "training_strategy" and field == "name"
        except ValueError as error:
            problems.append(Problem(override.partition("=")[0], str(error)))
    if problems:
        raise ConfigError(problems)  # what is missing from a part that was not read would only be noise
    # An empty section (`hub:` with nothing below) arrives as null: it is the section's defaults.
    tree |= {name: default for name, default in _defaults().items() if tree[name] is None and isinstance(default, dict)}
    resolved, problems = resolve(tree)
    problems += take_old_names(resolved, written)
    config, found = _validated(resolved, ignore=[problem.path for problem in problems])
    problems += [_with_environment_hint(problem, tree) for problem in found]
    if config is not None:
        faulty = [problem.path for problem in problems]
        later = [*contradictions(config), *unavailable(config), *check_paths(config)]
        problems += [problem for problem in later if not problem.is_about(faulty)]
    if problems:
        raise ConfigError(sorted(problems, key=_place))
    assert config is not None
    strategy = config.training_strategy
    if not isinstance(strategy, FlexibleConfig):  # from here on there is one way to say it
        if names_strategy:
            warn_of_strategy(strategy.name)
        config = config.model_copy(update={"training_strategy": strategy.as_flexible()})
    return config


def config_as_dict(config: TrainerConfig) -> dict[str, Any]:
    """The configuration as plain dicts, lists, texts and numbers."""
    return config.model_dump(mode="json")


def save_config(config: TrainerConfig, path: str | Path) -> None:
    """Write a file that `load_config` reads to an equal configuration. A reader never sees half of it."""
    with replacing(path) as unfinished:
        unfinished.write_text(_HEADER + write_yaml(config_as_dict(config)), encoding="utf-8")


def _defaults() -> dict[str, Any]:
    """Every default, in the shape of a file. The strategy's depend on its name, so only the name stands there."""
    config = TrainerConfig.model_validate({"model": {"model_path": "."}, "data": {"preprocessed_data_root": "."}})
    tree = config_as_dict(config)
    del tree["model"]["model_path"], tree["data"]["preprocessed_data_root"]
    return {**tree, "training_strategy": {"name": DEFAULT_STRATEGY}}


def _keys(section: Any) -> set[str]:
    # What is no section is reported later, when the types are checked.
    return set(section) if isinstance(section, dict) else set()


def _merged(below: Any, above: Any) -> Any:
    # Not OmegaConf.merge: it fails without a path where a list meets a section. Here the schema names the field.
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}
    return above


def _validated(tree: dict[str, Any], ignore: Sequence[str]) -> tuple[TrainerConfig | None, list[Problem]]:
    """The configuration, and what its fields do not allow.

    Faulty fields are left at their defaults (the current folder for a missing path), so that the rest can be
    checked in the same go; the caller raises anyway. None when that does not help.
    """
    problems: list[Problem] = []
    tree = copy.deepcopy(tree)
    for attempt in range(4):
        try:
            return TrainerConfig.model_validate(tree), problems
        except ValidationError as error:
            if attempt == 0:
                found = explain(error, TrainerConfig)
                problems = [problem for problem in found if not problem.is_about(ignore)]
            for item in error.errors(include_url=False, include_input=False):
                _mend(tree, item["loc"], missing=item["type"] == "missing")
    return None, problems


def _mend(tree: dict[str, Any], loc: Sequence[str | int], *, missing: bool) -> None:
    """Take a faulty field out of `tree`: a whole list when one of its items is faulty."""
    place = without_form_names(loc)
    keys = [str(key) for key in itertools.takewhile(lambda key: isinstance(key, str), place)]
    *above, last = keys
    section: Any = reduce(lambda node, key: node.get(key, {}), above, tree)
    if missing and len(keys) == len(place):
        section[last] = "." if above else {}
    else:
        section.pop(last, None)


def _with_environment_hint(problem: Problem, raw: dict[str, Any]) -> Problem:
    """Tell apart a text that was written in quotes from one that came out of the environment."""
    node: Any = raw
    for key in problem.path.split("."):
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdigit():
            node = node[int(key)]
    wants_value = problem.message.startswith(("must be a whole number", "must be a number", "must be true or false"))
    if wants_value and isinstance(problem.given, str) and isinstance(node, str) and "${oc.env:" in node:
        return replace(problem, remedy="The environment holds texts: ${oc.decode:${oc.env:NAME}} reads one as YAML")
    return problem


def _place(problem: Problem) -> int:
    """Problems come in the order of the sections, unknown sections last."""
    sections = list(TrainerConfig.model_fields)
    section = problem.path.split(".")[0]
    return sections.index(section) if section in sections else len(sections)

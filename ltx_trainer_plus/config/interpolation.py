"""Interpolations (`${...}`): OmegaConf resolves them; every one that fails becomes a Problem of its own."""

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ltx_trainer_plus.config.problems import Problem

_ESCAPE = r"For a literal ${ write \${ (inside double quotes: \\${)"
_DEEPEST = 30


def resolve(tree: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A copy of `tree` without interpolations (null where one failed), and what failed."""
    problems: list[Problem] = []
    readable = _without_unreadable(tree, "", problems)
    config = OmegaConf.create(readable)
    resolved: dict[str, Any] = {}
    for key in readable:
        try:
            resolved[key] = _resolved(_item(config, key, "", problems), key, problems)
        except RecursionError:
            problems.append(Problem(key, "its interpolations lead back to it without end", remedy="Break the circle"))
            resolved[key] = None
    return resolved, problems


def _without_unreadable(node: Any, path: str, problems: list[Problem]) -> Any:
    """OmegaConf.create stops at the first value that it cannot take; this reports all of them and takes them out."""
    if isinstance(node, dict):
        return {key: _without_unreadable(value, _join(path, key), problems) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_unreadable(value, _join(path, index), problems) for index, value in enumerate(node)]
    if node is None or isinstance(node, bool | int | float) or (isinstance(node, str) and "${" not in node):
        return node
    try:
        OmegaConf.create({"value": node})
    except OmegaConfBaseException:
        if isinstance(node, str):
            problems.append(Problem(path, "holds a ${ that begins no interpolation", node, _ESCAPE))
        else:
            problems.append(Problem(path, f"a {type(node).__name__} is nothing that a configuration can hold", node))
        return None
    return node


def _resolved(node: Any, path: str, problems: list[Problem]) -> Any:
    if path.count(".") > _DEEPEST:
        raise RecursionError(path)
    if isinstance(node, DictConfig):
        return {str(key): _resolved(_item(node, key, path, problems), _join(path, key), problems) for key in node}
    if isinstance(node, ListConfig):
        return [_resolved(_item(node, key, path, problems), _join(path, key), problems) for key in range(len(node))]
    return node


def _item(node: DictConfig | ListConfig, key: Any, path: str, problems: list[Problem]) -> Any:
    try:
        return node[key]
    except MissingMandatoryValue:
        problems.append(Problem(_join(path, key), "still has to be filled in", "???", "Give it a value"))
    except OmegaConfBaseException as error:
        given = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
        problems.append(Problem(_join(path, key), *_reason(str(error).split("\n")[0], given)))
    return None


def _reason(error: str, given: Any) -> tuple[str, Any, str]:
    """Message, given value and remedy for an interpolation that OmegaConf could not follow."""
    if variable := re.search(r"Environment variable '(.*)' not found", error):
        name = variable[1]
        return f"the environment variable {name} is not set", given, f"Set it, or write ${{oc.env:{name},default}}"
    if key := re.search(r"Interpolation key '(.*)' not found", error):
        return f"there is no {key[1]} to take the value from", given, f"Name a key by its whole path. {_ESCAPE}"
    return f"this interpolation fails: {error}", given, _ESCAPE


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)

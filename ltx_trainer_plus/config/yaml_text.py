"""Reading and writing YAML the way OmegaConf reads it, without looking at interpolations yet.

OmegaConf.load gives up at the first `${` that it cannot parse. Reading first and parsing interpolations afterwards
lets all of them be reported, together with everything else.
"""

import re
from pathlib import Path
from typing import Any

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
# YAML 1.1 wants a dot and a signed exponent; everybody writes 1e-4 and means a number.
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes this line break as it stands, and reads a space.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _text)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping, with keys as texts; an empty file is an empty mapping.

    Raises:
        ValueError: the file cannot be read, is not YAML, or is not a mapping. The text says what, without the path.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ValueError("this file does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"this file cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"this file is not valid YAML: {_where_and_what(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError("this file does not hold a configuration (lines of key: value)")
    try:
        return _texts_as_keys(tree)
    except RecursionError:
        raise ValueError("this file has an anchor (&name) that contains itself (*name)") from None


def read_value(text: str) -> Any:
    """The value of a command-line override.

    Numbers, true, false, null, quoted texts, [lists] and {mappings} are YAML; anything else is the text as it stands,
    so that `prompt=a cat: close-up` needs no second pair of quotes.

    Raises:
        ValueError: a quote or bracket that is not closed.
    """
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        try:
            return _texts_as_keys(yaml.load(text, _Loader))
        except yaml.YAMLError as error:
            raise ValueError(f"the value is not valid YAML ({text}): {_where_and_what(error)}") from error
    try:
        value = None if text == "" else yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text
    is_plain = value is None or isinstance(value, bool | int | float)
    return value if is_plain and "#" not in text else text


def write_yaml(tree: dict[str, Any]) -> str:
    """YAML text that `read_yaml` reads to the same values, interpolations switched off."""
    return yaml.dump(_escaped(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _where_and_what(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


def _texts_as_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _texts_as_keys(value) for key, value in tree.items()}
    return [_texts_as_keys(value) for value in tree] if isinstance(tree, list) else tree


def _escaped(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _escaped(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_escaped(value) for value in tree]
    if isinstance(tree, str):
        # Backslashes count only directly before ${, where OmegaConf halves them.
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", tree)
    return tree

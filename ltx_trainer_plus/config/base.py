"""What every section of the configuration has in common: strictness, and the types of lists and local paths."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://")


class Section(BaseModel):
    """A part of the configuration: frozen, without unknown keys, and without silent conversions ("5" is not 5)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _local_path(value: Any) -> Any:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "a path is a text")
    if not value.strip():
        raise PydanticCustomError("empty_path", "must be a path, and is empty")
    if _URL.match(value):
        raise PydanticCustomError("url", "must be a local path, not a URL")
    return Path(value).expanduser()


def _path_or_latest(value: Any) -> Any:
    return value if value == "latest" else _local_path(value)


# YAML has lists only; frozen sections hold tuples.
FromList = BeforeValidator(_list_to_tuple)
Texts = Annotated[tuple[str, ...], FromList]
LocalPath = Annotated[Path, BeforeValidator(_local_path)]
PathOrLatest = Annotated[Path | str, BeforeValidator(_path_or_latest)]


def off_is_false(word: str) -> BeforeValidator:
    """Read YAML's unquoted `no` and `off`, which arrive as false, as the word that the field's documentation uses."""
    return BeforeValidator(lambda value: word if value is False else value)

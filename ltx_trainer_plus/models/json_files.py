"""The JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from ltx_trainer_plus.errors import ModelError


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        ModelError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}).\n  Download the folder again, completely.") from error

"""What the user can mend leaves every command as its message, with status 2; a fault of the program does not."""

import ast
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ltx_trainer_plus
from ltx_trainer_plus.commands.main import COMMANDS, run_command
from ltx_trainer_plus.config import ConfigError, Problem
from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.media.files import MediaError
from tests.runs import write_run_file

PACKAGE = Path(ltx_trainer_plus.__file__).parent
for module in pkgutil.walk_packages(ltx_trainer_plus.__path__, f"{ltx_trainer_plus.__name__}."):
    importlib.import_module(module.name)

# What each command calls first, with the command line that leads there. RUN: a run file; HERE: a folder.
CALLED = {
    "train": ("ltx_trainer_plus.trainer.Trainer", ["RUN"]),
    "prepare": (
        "ltx_trainer_plus.preparation.prepare.prepare_dataset",
        ["HERE", "--model-path", "HERE", "--resolution-buckets", "64x64x9", "--device", "cpu"],
    ),
    "sample": ("ltx_trainer_plus.sampling.generate_samples", ["RUN"]),
    "plan": ("ltx_trainer_plus.measure.estimate.estimate", ["ltx-2.3", "RUN"]),
    "benchmark": ("ltx_trainer_plus.measure.bench_run.variants", ["--bench", "cpu"]),
    "report": ("ltx_trainer_plus.report.run_files.read_run", ["HERE"]),
    "demo": ("ltx_trainer_plus.demo.data.make_demo_data", ["--data-only", "--output", "HERE"]),
}

# Errors that never leave the part that raises them, and faults of the program.
INTERNAL = {"SkipClip", "NotFiniteError", "PartsError", "_Stopped", "SamplerFault"}


def user_errors(kind: type[UserError] = UserError) -> Iterator[type[UserError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from user_errors(below)


def example(kind: type[UserError]) -> UserError:
    if kind is ConfigError:
        return ConfigError([Problem("lora.rank", "must be at least 1", 0, "Set it to 1 or more")])
    if kind is MediaError:
        return MediaError("a.mp4", "there is no such file")
    return kind("It cannot work.\n  Do this instead.")


@pytest.fixture
def command_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], int]:
    """Run a command in which an error is raised, and return the exit status."""
    settings = {"model": {"model_path": str(tmp_path)}, "data": {"preprocessed_data_root": str(tmp_path)}}
    validation = {"samples": [{"prompt": "a cat"}]}
    run_file = write_run_file(tmp_path / "run.yaml", {**settings, "validation": validation, "device": "cpu"})

    def run(command: str, error: Exception) -> int:
        def raises(*_: Any, **__: Any) -> Any:
            raise error

        target, arguments = CALLED[command]
        monkeypatch.setattr(target, raises)
        places = {"RUN": str(run_file), "HERE": str(tmp_path)}
        return run_command(command, [places.get(word, word) for word in arguments])

    return run


@pytest.mark.parametrize("kind", sorted(user_errors(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_user_can_mend_leaves_every_command_as_its_message(
    command: str, kind: type[UserError], command_raises: Callable[[str, Exception], int], capsys: Any
) -> None:
    error = example(kind)
    assert command_raises(command, error) == 2
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", [ValueError, RuntimeError, KeyError, OSError])
def test_a_fault_of_the_program_keeps_its_traceback(
    command: str, fault: type[Exception], command_raises: Callable[[str, Exception], int]
) -> None:
    with pytest.raises(fault, match="a fault"):
        command_raises(command, fault("a fault"))


@pytest.mark.parametrize("kind", sorted(user_errors(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_what_one_process_finds_can_be_raised_by_all(kind: type[UserError]) -> None:
    error = example(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)


def test_every_error_that_is_defined_here_is_one_that_the_user_can_mend() -> None:
    found = {
        node.name
        for source in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    assert found >= INTERNAL
    assert found - INTERNAL == {kind.__name__ for kind in user_errors()}

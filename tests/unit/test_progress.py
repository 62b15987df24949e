"""Progress: a bar on a terminal, lines in a file, nothing elsewhere."""

import io
import re

from rich.console import Console

from ltx_trainer_plus.tracking import progress as module
from ltx_trainer_plus.tracking.progress import create_progress


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    # Without colours and cursor movements.
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140)


def log_file() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def test_the_bar_shows_step_loss_speed_and_time_left() -> None:
    console = terminal()
    with create_progress(100, start=40, console=console) as progress:
        progress.step(60, loss=0.1234, step_time=2.0)
    assert "60/100" in output_of(console)
    assert "loss 0.1234  2.00 s/step  1:20 left" in output_of(console)


def test_the_bar_shows_the_sample_and_denoising_step_only_while_validation_runs() -> None:
    console = terminal()
    with create_progress(100, console=console) as progress:
        progress.validation(2, 3, 7, 30)
        progress._progress.refresh()  # type: ignore[attr-defined]
        assert "denoising sample 2 of 3" in output_of(console)
        assert "7/30" in output_of(console)
        progress.validation_done()
        console.file = io.StringIO()
        progress._progress.refresh()  # type: ignore[attr-defined]
        assert "denoising" not in output_of(console)


def test_a_message_keeps_its_words_on_a_terminal() -> None:
    console = terminal()
    with create_progress(100, console=console) as progress:
        progress.say("saved [checkpoints/lora_weights_step_00250.safetensors]")
    assert "saved [checkpoints/lora_weights_step_00250.safetensors]" in output_of(console)


def test_without_a_terminal_there_are_plain_whole_lines() -> None:
    console = log_file()
    with create_progress(3, console=console) as progress:
        progress.step(1, step_time=70.0)
        progress.step(2, loss=1.0, step_time=70.0)
        progress.validation(1, 2, 1, 30)
        progress.validation(1, 2, 2, 30)
        progress.validation(2, 2, 1, 30)
        progress.validation_done()
        progress.step(3, loss=0.5, step_time=70.0)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "step 1/3  70.00 s/step  2:20 left",
        "validation: sample 1/2, denoising step 1/30",
        "validation: sample 2/2, denoising step 1/30",
        "step 3/3  loss 0.5000  70.00 s/step  0:00 left",
    ]


def test_plain_lines_come_every_few_seconds(monkeypatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    console = log_file()
    with create_progress(10000, start=5, console=console) as progress:
        progress.step(6, loss=1.0, step_time=1.0)
        progress.step(7, loss=1.0, step_time=1.0)
    assert console.file.getvalue().count("\n") == 2  # type: ignore[attr-defined]
    assert "2:46:33 left" in console.file.getvalue()  # type: ignore[attr-defined]


def test_other_processes_show_nothing() -> None:
    console = log_file()
    with create_progress(10, is_main=False, console=console) as progress:
        progress.step(10, loss=1.0, step_time=1.0)
        progress.validation(1, 1, 1, 1)
        progress.validation_done()
        progress.say("hello")
    assert output_of(console) == ""

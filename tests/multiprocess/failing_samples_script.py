"""What the launched ranks of test_failing_samples.py run: one of them fails, in a forward or while it decodes."""

import sys
from collections.abc import Callable
from typing import Any

from ltx_trainer_plus.config import load_config
from ltx_trainer_plus.parallel.ending import run_and_exit
from ltx_trainer_plus.trainer import Trainer
from ltx_trainer_plus.validation import runner

RUN_FILE, FOLDER = sys.argv[1:]


def failing_once(function: Callable[..., Any], message: str, *, fails: bool) -> Callable[..., Any]:
    calls = [0]

    def called(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if fails and calls[0] == 1:
            raise RuntimeError(message)
        return function(*args, **options)

    return called


def main() -> None:
    denoise, decode = runner.denoise, runner.SampleDecoder.decode
    for where in ("denoise", "decode"):
        trainer = Trainer(load_config(RUN_FILE, [f"output_dir={FOLDER}/{where}"]))
        fails = trainer.topology.rank == 1
        runner.denoise = failing_once(denoise, "no memory to denoise", fails=fails and where == "denoise")
        failing = failing_once(decode, "no memory to decode", fails=fails and where == "decode")
        runner.SampleDecoder.decode = failing  # type: ignore[method-assign]
        trainer.train()


run_and_exit(main)

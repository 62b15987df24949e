"""Start a script on several CPU processes, as a user would, with a port and a time limit of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Finished:
    """A launch that has ended."""

    returncode: int
    output: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The surroundings of a launched test process: one thread per rank, the CPU alone, W&B offline."""
    # What an enclosing launch exported must not leak into the one under test.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # A process that dies of a signal says where it was.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), inherited.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        **(extra or {}),
    }


def torchrun_command(processes: int, script: Path | str, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)),
        *("--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(script), *arguments),
    ]


def accelerate_command(config: str, script: Path | str, *arguments: str) -> list[str]:
    """`accelerate launch` with one of `configs/accelerate/<config>.yaml`."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / f"configs/accelerate/{config}.yaml")),
        *("--main_process_port", str(free_port()), str(script), *arguments),
    ]


def run(
    command: Sequence[str], *, timeout: float = 180, environment: Mapping[str, str] | None = None, check: bool = True
) -> Finished:
    """Run to the end; kill the whole process group at the time limit.

    Raises:
        AssertionError: it took too long, or (with `check`) exited with an error; the message holds its output.
    """
    process = subprocess.Popen(
        command,
        env=launch_environment(environment),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{list(command)} did not end within {timeout} s. Its output:\n{output}") from None
    if check and process.returncode != 0:
        raise AssertionError(f"{list(command)} exited with {process.returncode}. Its output:\n{output}")
    return Finished(process.returncode, output)

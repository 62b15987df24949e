"""Start a script on several CPU processes, as a user would, with a port and a time limit of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
    command: Sequence[str],
    *,
    timeout: float = 180,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path = ROOT,
) -> Finished:
    """Run to the end; kill the whole process group at the time limit.

    Raises:
        AssertionError: it took too long, or (with `check`) exited with an error; the message holds its output.
    """
    process = subprocess.Popen(
        command,
        env=launch_environment(environment),
        cwd=cwd,
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


class Running:
    """A training that goes on until it is stopped. Its text goes to `log`, by default beside its folder."""

    def __init__(self, command: list[str], output: Path, *, log: Path | None = None) -> None:
        self._output = output
        self._text = log or output.with_suffix(".txt")
        self.process = subprocess.Popen(
            command,
            env=launch_environment(),
            cwd=ROOT,
            stdout=self._text.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def text(self) -> str:
        return self._text.read_text()

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended before: {what}\n{self.text}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.text}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            path = self._output / "metrics.jsonl"
            return path.exists() and path.read_text().count("\n") >= step

        self.wait_until(reached, f"step {step}")

    def wait_for_end(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over within {seconds} s\n{self.text}") from None

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def rank(self, number: int) -> int:
        """The process of a rank: the launcher's child whose environment says so."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                environment = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == str(self.process.pid) and f"RANK={number}".encode() in environment:
                return int(path.name)
        raise AssertionError(f"no rank {number}")

"""Faults in real processes: kills, full disks, foreign files, a second run. Nothing that was whole is ever lost."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.checkpoints.store import CheckpointStore
from tests.damage import empty, flip_a_bit, replace_by_a_foreign_file, scale_latents, truncate
from tests.launch import ROOT, Running, run, torchrun_command
from tests.runs import VALIDATION, joint_run, losses, metrics, train, write_prepared_data, write_run_file
from tests.states import read_state

Settings = dict[str, Any]
SCRIPT = ROOT / "scripts/train.py"
FORKS = Path(__file__).with_name("fault_script.py")
DAMAGES = (truncate, flip_a_bit, empty, replace_by_a_foreign_file)
KILLS = ("before", "while", "rename 0", "rename 1", "rename 2", "retiring")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared_data(tmp_path_factory.mktemp("data"), samples=6)


@pytest.fixture(scope="module")
def base(tiny_pipeline: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run of six steps with a checkpoint after each, in one go."""
    settings = joint_run(tiny_pipeline, data, tmp_path_factory.mktemp("whole") / "run")
    settings["optimization"] |= {"steps": 4, "batch_size": 1}
    settings["checkpoints"] = {"interval": 1, "keep_last_n": -1}
    train(settings)
    return settings


class Forked:
    """Exit status and output of each of several trainings, by name, from one launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: list[dict[str, Any]] = []

    def add(self, settings: Settings, *overrides: str, kill_at: str | None = None, decodes: bool = True) -> int:
        number = len(self._plan)
        run_file = write_run_file(self._folder / f"run_{number}.yaml", settings)
        output = str(self._folder / f"output_{number}.txt")
        arguments = [str(run_file), *overrides]
        self._plan.append({"arguments": arguments, "output": output, "kill_at": kill_at, "decodes": decodes})
        return number

    def run(self) -> None:
        plan = self._folder / "plan.json"
        plan.write_text(json.dumps(self._plan))
        finished = run([sys.executable, str(FORKS), str(plan)], timeout=400)
        self.statuses: list[int] = json.loads(finished.output.splitlines()[-1])

    def output(self, number: int) -> str:
        return Path(self._plan[number]["output"]).read_text()


class PickleBomb:
    """Leaves a file behind if anybody unpickles it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def forked(base: Settings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario that is a short single process, in one launch."""
    folder = tmp_path_factory.mktemp("forked")
    forks = Forked(folder)
    numbers: dict[str, Any] = {"forks": forks, "folder": folder}

    def another(name: str, **sections: Any) -> Settings:
        return {**base, "output_dir": str(folder / name), **sections}

    for kill in KILLS:
        keep = 1 if kill == "retiring" else -1
        settings = another(kill.replace(" ", "_"), checkpoints={"interval": 1, "keep_last_n": keep})
        numbers[kill] = forks.add(settings, kill_at=kill)
        numbers[f"{kill} resumed"] = forks.add(settings, "model.load_checkpoint=latest")

    numbers["read-only"] = forks.add({**base, "output_dir": "/proc/ltx-run"})

    occupied = another("occupied")
    lock = RunFolder.open(occupied["output_dir"], resuming=False)
    numbers["second run"] = forks.add(occupied)

    for name in ("bomb", "bomb in place of the state"):
        place = folder / name.replace(" ", "_")
        shutil.copytree(base["output_dir"], place)
        for marker in place.glob("checkpoints/*.json"):
            marker.unlink()  # a checkpoint that somebody handed on: no checksum speaks against it
        state = place / "checkpoints" / "training_state_step_00003.safetensors"
        if name == "bomb":
            state.unlink()
            state = state.with_suffix(".pt")
        state.write_bytes(pickle.dumps({"state": PickleBomb(folder / "canary")}))
        weights = place / "checkpoints" / "lora_weights_step_00003.safetensors"
        numbers[name] = forks.add(another(f"from_{place.name}"), f"model.load_checkpoint={weights}")

    for damage in DAMAGES:
        place = folder / damage.__name__
        shutil.copytree(base["output_dir"], place)
        damage(place / "checkpoints/lora_weights_step_00004.safetensors")
        numbers[damage.__name__] = forks.add(another(place.name), "model.load_checkpoint=latest")
    truncated = folder / "truncate/checkpoints/lora_weights_step_00004.safetensors"
    copy = shutil.copy(truncated, folder)  # by the time of this run the one above is written anew
    shutil.copy(truncated.with_name("checkpoint_step_00004.json"), folder)
    numbers["named"] = forks.add(another("from_truncated"), f"model.load_checkpoint={copy}")

    def damaged_data(name: str, factor: float, clips: int) -> Settings:
        root = folder / name
        shutil.copytree(base["data"]["preprocessed_data_root"], root)
        for number in range(clips):
            scale_latents(root, f"clip_{number:02d}", factor)
        return another(f"{name}_run", data={**base["data"], "preprocessed_data_root": str(root)})

    numbers["infinite"] = forks.add(damaged_data("infinite", 1e30, clips=6), "optimization.max_bad_steps=2")
    corrupt = damaged_data("corrupt", float("nan"), clips=1)
    corrupt["optimization"] = {**base["optimization"], "steps": 6}
    numbers["corrupt raise"] = forks.add(corrupt)
    skipping = {**corrupt, "output_dir": f"{corrupt['output_dir']}_skipping"}
    numbers["corrupt skip"] = forks.add(skipping, "data.on_error=skip")

    for on_error in ("raise", "warn"):
        settings = another(f"samples_{on_error}", validation={**VALIDATION, "on_error": on_error})
        numbers[f"samples {on_error}"] = forks.add(settings, decodes=False)

    try:
        forks.run()
    finally:
        lock.close()
    return numbers


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_during_a_save_loses_nothing_that_was_whole_and_the_run_continues_exactly(
    kill: str, forked: dict[str, Any], base: Settings
) -> None:
    forks = forked["forks"]
    assert forks.statuses[forked[kill]] == -signal.SIGKILL, forks.output(forked[kill])
    resumed = forked[f"{kill} resumed"]
    assert forks.statuses[resumed] == 0, forks.output(resumed)
    # The second save was being retired when it was killed: then it was whole already.
    expected = 2 if kill == "retiring" else 1
    assert f"Continuing after step {expected} of" in forks.output(resumed)
    folder = forked["folder"] / kill.replace(" ", "_")
    assert losses(folder) == losses(Path(base["output_dir"]))
    assert not list(folder.rglob("*.saving"))
    state = "checkpoints/training_state_step_00004.safetensors"
    ours, whole = read_state(folder / state), read_state(Path(base["output_dir"]) / state)
    assert all(torch.equal(ours.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_an_output_folder_that_cannot_be_written_is_refused_at_the_start(forked: dict[str, Any]) -> None:
    forks, number = forked["forks"], forked["read-only"]
    assert forks.statuses[number] == 2
    assert "output_dir: /proc/ltx-run cannot be written" in forks.output(number)
    assert "step 1" not in forks.output(number)


def test_a_second_run_in_the_same_folder_is_refused(forked: dict[str, Any]) -> None:
    forks, number = forked["forks"], forked["second run"]
    assert forks.statuses[number] == 2
    assert f"is in use by a run that is still going (process {os.getpid()} on" in forks.output(number)


def test_a_malicious_training_state_is_never_unpickled(forked: dict[str, Any]) -> None:
    forks = forked["forks"]
    # Beside the weights, as the official trainer leaves its own: the weights alone are taken.
    assert forks.statuses[forked["bomb"]] == 0
    assert "training_state_step_00003.pt is not used: it is a pickle" in forks.output(forked["bomb"])
    assert [line["step"] for line in metrics(forked["folder"] / "from_bomb")] == [1, 2, 3, 4]
    number = forked["bomb in place of the state"]
    assert forks.statuses[number] == 2
    assert "is not a readable safetensors file" in forks.output(number)
    assert "never unpickled" in forks.output(number)
    assert not (forked["folder"] / "canary").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_latest_passes_over_damaged_weights_by_name_and_continues_exactly(
    damage: Callable[[Path], None], forked: dict[str, Any], base: Settings
) -> None:
    forks, number = forked["forks"], forked[damage.__name__]
    assert forks.statuses[number] == 0, forks.output(number)
    assert "Passed over: lora_weights_step_00004.safetensors" in forks.output(number)
    assert "Continuing after step 3 of" in forks.output(number)
    assert losses(forked["folder"] / damage.__name__) == losses(Path(base["output_dir"]))


def test_a_truncated_checkpoint_that_is_asked_for_by_name_is_refused(forked: dict[str, Any]) -> None:
    forks, number = forked["forks"], forked["named"]
    assert forks.statuses[number] == 2
    assert "lora_weights_step_00004.safetensors: it has" in forks.output(number)
    assert "so it was cut off or changed" in forks.output(number)


def test_steps_that_are_not_finite_end_the_run_and_nothing_is_saved(forked: dict[str, Any]) -> None:
    forks, number = forked["forks"], forked["infinite"]
    assert forks.statuses[number] == 2
    assert "2 steps in a row were not finite" in forks.output(number)
    assert re.search(r"clip_0\d \(video sigma 0\.", forks.output(number))
    assert not list((forked["folder"] / "infinite_run").rglob("*.safetensors"))


def test_a_corrupt_sample_ends_the_run_by_name_or_is_replaced_and_counted(forked: dict[str, Any]) -> None:
    forks, number = forked["forks"], forked["corrupt raise"]
    assert forks.statuses[number] == 2
    assert "clip_00.safetensors: 1024 of 1024 numbers are not finite" in forks.output(number)
    number = forked["corrupt skip"]
    assert forks.statuses[number] == 0, forks.output(number)
    assert "clip_01 takes its place" in forks.output(number)
    assert metrics(forked["folder"] / "corrupt_run_skipping")[-1]["replaced_samples"] == 1


def test_samples_that_cannot_be_made_end_the_run_or_are_reported(forked: dict[str, Any], base: Settings) -> None:
    forks, number = forked["forks"], forked["samples raise"]
    assert forks.statuses[number] not in (0, 2)
    assert "no memory to decode" in forks.output(number)
    number = forked["samples warn"]
    assert forks.statuses[number] == 0, forks.output(number)
    assert forks.output(number).count("no memory to decode") == 3
    assert losses(forked["folder"] / "samples_warn") == losses(Path(base["output_dir"]))


def endless(base: Settings, output: Path, **sections: Any) -> Settings:
    settings = {**base, "output_dir": str(output), **sections}
    settings["optimization"] = {**base["optimization"], "steps": 1_000_000, **sections.get("optimization", {})}
    settings["checkpoints"] = {"interval": 2, "keep_last_n": 3, **sections.get("checkpoints", {})}
    return settings


def test_killing_one_rank_ends_the_others_within_a_minute_with_the_cause(base: Settings, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", endless(base, tmp_path / "run"))
    running = Running(torchrun_command(2, SCRIPT, str(run_file)), tmp_path / "run")
    try:
        running.wait_for_step(4)
        os.kill(running.rank(1), signal.SIGKILL)
        assert running.wait_for_end(60) != 0
    finally:
        running.kill()
    assert "Signal 9 (SIGKILL)" in running.text
    assert re.search(r"rank\s*: 1", running.text)
    store = CheckpointStore(tmp_path / "run/checkpoints")
    latest = store.latest()
    assert latest is not None
    assert latest.step >= 2


def test_the_second_interrupt_stops_at_once_and_keeps_the_last_checkpoint(base: Settings, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(base["output_dir"], output)
    # A step that takes for ever.
    settings = endless(base, output, optimization={"gradient_accumulation_steps": 1_000_000})
    run_file = write_run_file(tmp_path / "run.yaml", settings)
    running = Running([sys.executable, str(SCRIPT), str(run_file), "model.load_checkpoint=latest"], output)
    try:
        running.wait_until(lambda: "Continuing after step 4" in running.text, "the resume")
        time.sleep(8)
        os.kill(running.process.pid, signal.SIGINT)
        time.sleep(3)
        assert running.process.poll() is None, running.text
        os.kill(running.process.pid, signal.SIGINT)
        assert running.wait_for_end(20) != 0
    finally:
        running.kill()
    latest = CheckpointStore(output / "checkpoints").latest()
    assert latest is not None
    assert latest.step == 4


@pytest.mark.parametrize("on_error", ["raise", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_earlier_checkpoint_whole(base: Settings, tmp_path: Path, on_error: str) -> None:
    """A limit on the size of files stands for the disk: writing beyond it fails in the same calls."""
    output = tmp_path / "run"
    run_file = write_run_file(tmp_path / "run.yaml", endless(base, output, checkpoints={"on_error": on_error}))
    running = Running([sys.executable, str(SCRIPT), str(run_file)], output)
    store = CheckpointStore(output / "checkpoints")
    try:
        running.wait_until(lambda: store.latest() is not None, "the first checkpoint")
        unlimited = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
        if on_error == "raise":
            assert running.wait_for_end(60) == 2
        else:
            running.wait_until(lambda: "Training goes on without it" in running.text, "the warning")
            resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, unlimited)
            failed = int(re.findall(r"checkpoint of step (\d+) could not", running.text)[-1])
            running.wait_until(lambda: (latest := store.latest()) is not None and latest.step > failed, "a later one")
            os.kill(running.process.pid, signal.SIGTERM)
            assert running.wait_for_end(60) == 0
    finally:
        running.kill()
    assert re.search(r"The checkpoint of step \d+ could not be saved in .*File too large", running.text)
    assert store.latest() is not None
    assert store.broken() == []
    assert not list(output.rglob("*.saving"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB that nothing else uses."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (mount := shutil.which("mount")) is None:
        pytest.skip("there is no mount command")
    mounted = subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    ("on_error", "ranks"),
    [("raise", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("warn", 1), ("raise", 2), ("warn", 2)))],
)
def test_a_disk_without_space_leaves_the_earlier_checkpoint_whole(
    base: Settings, tmp_path: Path, small_disk: Path, on_error: str, ranks: int
) -> None:
    """Every byte of the run folder's file system is taken, the one that the metrics need too. Two ranks are sharded."""
    output, ballast = small_disk / "run", small_disk / "ballast"
    settings = endless(base, output, checkpoints={"on_error": on_error})
    settings["acceleration"] = {**settings["acceleration"], "parallel": "auto" if ranks == 1 else "fsdp2"}
    run_file = str(write_run_file(tmp_path / "run.yaml", settings))
    command = [sys.executable, str(SCRIPT), run_file] if ranks == 1 else torchrun_command(ranks, SCRIPT, run_file)
    running = Running(command, output, log=tmp_path / "log.txt")
    store = CheckpointStore(output / "checkpoints")
    try:
        running.wait_until(lambda: store.latest() is not None, "the first checkpoint")

        def fill() -> bool:
            # Again and again: a checkpoint that is retired makes room.
            with suppress(OSError), ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            return "could not be saved" in running.text

        if on_error == "raise":
            while running.process.poll() is None:
                fill()
            assert running.process.returncode == 2 or ranks > 1
            assert running.process.returncode != 0
        else:
            running.wait_until(lambda: fill() and "Training goes on without it" in running.text, "the warning")
            ballast.unlink()
            failed = int(re.findall(r"checkpoint of step (\d+) could not", running.text)[-1])
            running.wait_until(lambda: (latest := store.latest()) is not None and latest.step > failed, "a later one")
            os.kill(running.process.pid, signal.SIGTERM)
            # torchrun calls it a failure to be told to stop.
            assert running.wait_for_end(60) == 0 or ranks > 1
            assert "Stopped by SIGTERM" in running.text
    finally:
        running.kill()
    assert re.search(
        r"(?s)The checkpoint of step \d+ could not be saved in .*(No space left on device|disk is probably full)",
        running.text,
    )
    assert store.latest() is not None
    assert store.broken() == []
    assert not list(output.rglob("*.saving"))


@pytest.mark.slow
def test_a_wandb_that_dies_in_the_middle_does_not_stop_the_training(base: Settings, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run_file = write_run_file(tmp_path / "run.yaml", endless(base, output, wandb={"enabled": True}))
    running = Running([sys.executable, str(SCRIPT), str(run_file)], output)
    try:
        running.wait_for_step(3)
        running.wait_until(lambda: bool(_wandb_services(running.process.pid)), "a process of W&B")
        for process in _wandb_services(running.process.pid):
            os.kill(process, signal.SIGKILL)
        running.wait_for_step(len(metrics(output)) + 5)
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.wait_for_end(120) == 0
    finally:
        running.kill()
    assert "W&B failed" in running.text
    assert CheckpointStore(output / "checkpoints").latest() is not None


def _wandb_services(training: int) -> list[int]:
    return [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if b"wandb-core" in _command(path) and f"\n{training}\n" in _ancestors(path)
    ]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _ancestors(process: Path) -> str:
    found = "\n"
    while process.name != "0":
        found += f"{process.name}\n"
        try:
            process = Path("/proc") / (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            break
    return found

"""Which backends record a run, which are refused before it, and that none of them can cost the training."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from ltx_trainer_plus.checkpoints.run_folder import RunFolder
from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.step.sums import MetricWindow
from ltx_trainer_plus.strategies.flexible import ModelInputs, StreamInputs
from ltx_trainer_plus.strategies.loss import Losses
from ltx_trainer_plus.tracking.backend import RecordedRun, Recorder, backend_problems
from ltx_trainer_plus.tracking.tracker import GeneratedSample, Tracker
from ltx_trainer_plus.validation.runner import SampleFile
from tests.unit.config_files import load

OWN = '''
"""A backend in one file."""

from pathlib import Path

TITLE = "Text file"


def start(run):
    return TextFile(run.folder / "log.txt", run.resume_id)


class TextFile:
    def __init__(self, path, resume_id):
        self.id = resume_id or "new"
        self.location = str(path)
        self._file = path.open("a")

    def log(self, values, step):
        self._file.write(f"{step}: {' '.join(values)}\\n")

    def log_media(self, media, step):
        self._file.write(f"{step}: {[(item.key, item.kind, item.path.name, item.caption) for item in media]}\\n")

    def finish(self, exit_code):
        self._file.write(f"exit {exit_code}\\n")
        self._file.close()
'''


@pytest.fixture
def own_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "text_file_package").mkdir()
    (tmp_path / "modules" / "text_file_package" / "tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in ("text_file_package", "text_file_package.tracker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "text_file_package.tracker"


@pytest.mark.parametrize(
    ("text", "trackers"),
    [
        ("", ()),
        ("wandb: {enabled: true}", ("wandb",)),
        ("tracking: {backends: [tensorboard]}", ("tensorboard",)),
        ("tracking: {backends: [wandb, tensorboard, wandb]}", ("wandb", "tensorboard")),
        ("wandb: {enabled: true}\ntracking: {backends: [tensorboard]}", ("wandb", "tensorboard")),
        ("wandb: {enabled: true}\ntracking: {backends: [tensorboard, wandb]}", ("wandb", "tensorboard")),
    ],
)
def test_official_files_and_the_list_of_backends_add_up(tmp_path: Path, text: str, trackers: tuple[str, ...]) -> None:
    config = load(tmp_path, text)
    assert config.trackers == trackers
    assert list(backend_problems(config)) == []


def test_what_does_not_exist_is_refused_with_what_does(tmp_path: Path) -> None:
    config = load(tmp_path, "tracking: {backends: [tensorbord, no.such.module, json.decoder]}")
    choose = "Choose among tensorboard, wandb, or give the dotted path of a module that can be imported."
    assert [str(problem) for problem in backend_problems(config)] == [
        f'tracking.backends: there is no such backend (given: "tensorbord"). {choose}',
        f'tracking.backends: there is no such backend (given: "no.such.module"). {choose}',
        "tracking.backends: json.decoder is no backend: the module has no TITLE and no start (given: "
        '"json.decoder"). Give the dotted path of a module that has both.',
    ]


@pytest.mark.parametrize(
    ("text", "library", "problem"),
    [
        (
            "tracking: {backends: [tensorboard]}",
            "tensorboard",
            "tracking.backends: tensorboard needs the package tensorboard, which is not installed (given: "
            '"tensorboard"). Install it (pip install tensorboard), or take tensorboard out of tracking.backends.',
        ),
        (
            "wandb: {enabled: true}",
            "wandb",
            "wandb.enabled: wandb needs the package wandb, which is not installed (given: true). Install it (pip "
            "install wandb), or set wandb.enabled: false.",
        ),
    ],
)
def test_a_backend_whose_library_is_missing_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, library: str, problem: str
) -> None:
    config = load(tmp_path, text)
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"ltx_trainer_plus.tracking.backends.{library}", raising=False)
    # As the import system marks what cannot be found.
    monkeypatch.setattr(sys, "meta_path", [_Missing(library), *sys.meta_path])
    assert [str(found) for found in backend_problems(config)] == [problem]


class _Missing:
    """An installation without one library."""

    def __init__(self, library: str) -> None:
        self._library = library

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self._library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_backend_of_ones_own_is_one_file(tmp_path: Path, own_backend: str) -> None:
    config = load(tmp_path, f"tracking: {{backends: [{own_backend}]}}")
    assert list(backend_problems(config)) == []
    run = tmp_path / "run"
    with Tracker(config, RunFolder(run), torch.device("cpu")) as tracker:
        assert tracker.ids == {own_backend: "new"}
        assert tracker.locations == {"Text file": str(run / "log.txt")}
        report_step(tracker, 1)
        tracker.held_out({"held_out": 0.5}, 1, is_best=False)
        tracker.samples([sample(run / "step_000001_1.mp4", "a ball")], 1)
    lines = (run / "log.txt").read_text().splitlines()
    assert lines[0].startswith("1: loss ")
    assert "step_time" in lines[0]
    assert lines[1:] == ["1: held_out", "1: [('samples/1', 'video', 'step_000001_1.mp4', 'a ball')]", "exit 0"]
    tracker = Tracker(config, RunFolder(run), torch.device("cpu"), start_step=1, resume_ids={own_backend: "earlier"})
    assert tracker.ids == {own_backend: "earlier"}
    with pytest.raises(RuntimeError), tracker:
        raise RuntimeError
    assert (run / "log.txt").read_text().splitlines()[-1] == "exit 1"


def test_only_the_main_process_records(tmp_path: Path, own_backend: str) -> None:
    config = load(tmp_path, f"tracking: {{backends: [{own_backend}]}}")
    with Tracker(config, RunFolder(tmp_path / "run"), torch.device("cpu"), is_main=False) as tracker:
        report_step(tracker, 1)
        tracker.samples([sample(tmp_path / "missing.mp4", "")], 1)
        assert (tracker.ids, tracker.locations) == ({}, {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("broken", ["return TextFile", "def log(self, values, step):", "def finish(self, exit_code):"])
def test_a_backend_that_fails_is_said_once_and_the_run_goes_on(
    tmp_path: Path, own_backend: str, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    fails = f"1 / 0; {broken}" if broken.startswith("return") else f"{broken}\n        1 / 0"
    text = OWN.replace(broken, fails)
    assert text != OWN
    (tmp_path / "modules" / "text_file_package" / "tracker.py").write_text(text)
    config = load(tmp_path, f"tracking: {{backends: [{own_backend}]}}")
    run = tmp_path / "run"
    with caplog.at_level(logging.WARNING), Tracker(config, RunFolder(run), torch.device("cpu")) as tracker:
        report_step(tracker, 1)
        report_step(tracker, 2)
    assert caplog.text.count("Text file failed (ZeroDivisionError: division by zero). Training goes on") == 1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_interrupt_is_no_failure_of_a_backend(tmp_path: Path, own_backend: str) -> None:
    text = OWN.replace("def log(self, values, step):", "def log(self, values, step):\n        raise KeyboardInterrupt")
    (tmp_path / "modules" / "text_file_package" / "tracker.py").write_text(text)
    config = load(tmp_path, f"tracking: {{backends: [{own_backend}]}}")
    (tmp_path / "run").mkdir()
    recorder = Recorder(own_backend, RecordedRun(config, tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt):
        recorder.log({"loss": 1.0}, 1)
    recorder.finish()


def report_step(tracker: Tracker, step: int) -> None:
    window = MetricWindow("cpu")
    empty = torch.zeros(1, 1, 1)
    stream = Modality(latent=empty, sigma=torch.tensor([0.5]), timesteps=empty[0], positions=empty, context=empty)
    inputs = ModelInputs(video=StreamInputs(stream, target=empty))
    window.add(inputs, Losses(torch.tensor([2.0]), torch.tensor([2.0]), None))
    window.set_step(grad_norm=1.0)
    tracker.step(step, window.reduce_async().read(), 1e-3, finished_at=0.0, is_last=False)


def sample(path: Path, prompt: str) -> GeneratedSample:
    return SampleFile(path, prompt, 1, 24.0)

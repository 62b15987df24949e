"""A whole data set from media files and captions to prepared samples, on any number of processes."""

import fcntl
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from ltx_trainer_plus.atomic import remove_unfinished
from ltx_trainer_plus.parallel.collectives import broadcast_object, gather_objects
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.preparation.buckets import Bucket
from ltx_trainer_plus.preparation.clips import DatasetError, Skipped
from ltx_trainer_plus.preparation.encode import encode_captions, encode_media, release_memory
from ltx_trainer_plus.preparation.files import TEXT_FOLDER, prepared_path
from ltx_trainer_plus.preparation.plan import Job, PreparationPlan, PreparationSettings, make_plan
from ltx_trainer_plus.preparation.report import PreparationReport, with_progress


def prepare_dataset(
    settings: PreparationSettings, topology: Topology, console: Console | None = None
) -> PreparationReport:
    """Encode what is missing or out of date; every process calls it and does its share.

    The media go first and the captions after them, so that the text encoder and the VAEs are never loaded together.
    A run that is stopped continues where it was: each finished file carries a fingerprint of what made it.

    Args:
        settings: the same on every process.
        topology: this process among the others.
        console: where the main process shows progress; None = nowhere.

    Returns:
        The outcome for the whole data set, on every process.

    Raises:
        DatasetError: the data set, the buckets or the model cannot be used. Nothing has been encoded then.
    """
    console = console if topology.is_main else None
    with ExitStack() as stack:
        plan = _planned_by_main(settings, topology, stack)
        results = _encode_media(plan, settings, topology, console)
        outcomes = [results[job.clip.name] for job in plan.jobs if job.clip.name in results]  # in the data set's order
        skips = tuple(outcome for outcome in outcomes if isinstance(outcome, Skipped))
        left_out = {skip.name for skip in skips}
        usable = [job for job in plan.jobs if job.clip.name not in left_out]
        captions = _encode_captions(usable, settings, topology, console)
        if topology.is_main:
            _remove_outdated(plan, left_out, settings.output)
        buckets = Counter(outcome for outcome in outcomes if isinstance(outcome, Bucket))
        return PreparationReport(
            output=settings.output,
            prepared=tuple(sorted(job.clip.name for job in usable)),
            new=sum(buckets.values()),
            captions=captions,
            buckets=tuple(sorted(buckets.items(), key=lambda entry: str(entry[0]))),
            skipped=(*plan.skipped, *skips),
            strays=plan.strays,
        )


def _planned_by_main(settings: PreparationSettings, topology: Topology, stack: ExitStack) -> PreparationPlan:
    # The main process alone looks: two that look one after the other could see different files. What it finds wrong
    # goes to the others as a value, so that all end alike instead of waiting for each other.
    outcome: PreparationPlan | DatasetError | None = None
    if topology.is_main:
        try:
            outcome = make_plan(settings)
            # Last, so that a mistyped data set leaves no folder behind.
            stack.enter_context(_only_run_in(settings.output))
        except DatasetError as error:
            outcome = error
        except (ValueError, OSError) as error:
            outcome = DatasetError(str(error))
    shared = broadcast_object(outcome, topology)
    if isinstance(shared, DatasetError):
        raise shared
    assert isinstance(shared, PreparationPlan)
    return shared


@contextmanager
def _only_run_in(output: Path) -> Iterator[None]:
    """Keep a second run out of the folder; a killed run leaves nothing behind that would keep the next one out."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatasetError(
                f"{output}: another run is preparing data here.\n"
                "  Wait for it, or share the work of one run with `accelerate launch --num_processes N`."
            ) from None
        remove_unfinished(output)
        yield


def _encode_media(
    plan: PreparationPlan, settings: PreparationSettings, topology: Topology, console: Console | None
) -> dict[str, Bucket | Skipped]:
    """Outcome of every clip that had something to make, by name."""
    share = _share([job for job in plan.jobs if job.video or job.audio], topology)
    results: dict[str, Bucket | Skipped] = {}
    if share:
        steps = encode_media(
            share,
            model_path=settings.model_path,
            buckets=plan.buckets,
            with_audio=settings.with_audio,
            tiled=settings.vae_tiling,
            device=topology.device,
        )
        steps = with_progress(steps, total=len(share), what=_label("Encoding clips", topology), console=console)
        results = {job.clip.name: result for job, result in zip(share, steps, strict=True)}
    release_memory(topology.device)
    return {name: result for part in gather_objects(results, topology) for name, result in part.items()}


def _encode_captions(
    jobs: Sequence[Job], settings: PreparationSettings, topology: Topology, console: Console | None
) -> int:
    """How many captions all processes encoded."""
    share = _share([job for job in jobs if job.text], topology)
    if share:
        steps = encode_captions(
            share,
            model_path=settings.model_path,
            text_encoder_path=settings.text_encoder_path,
            batch_size=settings.batch_size,
            device=topology.device,
        )
        for _ in with_progress(steps, total=len(share), what=_label("Encoding captions", topology), console=console):
            pass
    release_memory(topology.device)
    return sum(gather_objects(len(share), topology))


def _share(jobs: Sequence[Job], topology: Topology) -> Sequence[Job]:
    return jobs[topology.rank :: topology.world_size]


def _label(what: str, topology: Topology) -> str:
    return what if topology.world_size == 1 else f"{what} (process 1 of {topology.world_size})"


def _remove_outdated(plan: PreparationPlan, left_out: Set[str | None], output: Path) -> None:
    """Delete what an earlier run made of clips that are skipped now: it would be trained on although it is wrong.

    Where the clip itself is gone, its prepared files may be all that is left of it, and stay.
    """
    names = {job.clip.name for job in plan.jobs}
    for job in plan.jobs:
        if job.clip.name in left_out and job.clip.path.is_file():
            for path, _ in filter(None, (job.video, job.audio, job.text)):
                path.unlink(missing_ok=True)
    for skip in plan.skipped:
        if skip.reason == "no caption" and skip.name and skip.name not in names:
            prepared_path(output, TEXT_FOLDER, skip.name).unlink(missing_ok=True)

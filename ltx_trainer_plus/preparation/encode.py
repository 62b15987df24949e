"""Clips and captions through the frozen models: one process's share of the work."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from ltx_trainer_plus.media.geometry import frames_to_unit
from ltx_trainer_plus.media.mel import SAMPLE_RATE, log_mel
from ltx_trainer_plus.modality import TextContext
from ltx_trainer_plus.models.components import encoding_dtype, load_audio_vae, load_video_vae
from ltx_trainer_plus.models.text import load_connectors, load_text_encoder
from ltx_trainer_plus.preparation.buckets import Bucket
from ltx_trainer_plus.preparation.clips import DatasetError, Skipped
from ltx_trainer_plus.preparation.files import write_audio_latents, write_context, write_video_latents
from ltx_trainer_plus.preparation.media import LoadedClip, SkipClip, load_clip
from ltx_trainer_plus.preparation.plan import Job

# Clips decoded ahead of the one that is being encoded; each holds its frames in memory.
_AHEAD = 2

Item = TypeVar("Item")
Result = TypeVar("Result")


def encode_media(
    jobs: Iterable[Job],
    *,
    model_path: Path,
    buckets: Sequence[Bucket],
    with_audio: bool,
    tiled: bool,
    device: torch.device,
) -> Iterator[Bucket | Skipped]:
    """Make the latents of each job; says for each which bucket it went to, or why it was skipped."""
    with _unusable_model():
        video_vae = load_video_vae(model_path, encoding_dtype(device), device)
        audio_vae = load_audio_vae(model_path, torch.float32, device) if with_audio else None
    if audio_vae is not None and audio_vae.sample_rate != SAMPLE_RATE:
        raise DatasetError(
            f"{model_path}: its audio VAE takes sound at {audio_vae.sample_rate} Hz; only {SAMPLE_RATE} Hz is known.\n"
            "  Prepare without sound (--skip-audio), or use an LTX-2 or LTX-2.3 pipeline folder."
        )

    def load(job: Job) -> LoadedClip | SkipClip:
        try:
            return load_clip(job.clip, buckets, with_audio=with_audio)
        except SkipClip as skip:
            return skip

    for job, loaded in _ahead(jobs, load):
        if isinstance(loaded, SkipClip):
            yield Skipped(job.clip.item, loaded.reason, loaded.detail, job.clip.name)
            continue
        video = audio = None
        if job.video is not None:
            video = video_vae.encode(frames_to_unit(loaded.frames)[None].to(device), tiled=tiled)[0]
        if job.audio is not None and audio_vae is not None and loaded.sound is not None:
            audio = audio_vae.encode(log_mel(loaded.sound.to(device)))[0]
        # A sound track of floats can hold NaN. Training would stop at such a sample, perhaps hours later.
        spoilt = [
            f"the latents of its {what} hold numbers that are not finite"
            for what, latents in (("pictures", video), ("sound", audio))
            if latents is not None and not bool(latents.isfinite().all())
        ]
        if spoilt:
            yield Skipped(job.clip.item, "unreadable", " and ".join(spoilt), job.clip.name)
            continue
        notes = {"source": job.clip.item, "bucket": str(loaded.bucket)}
        if job.video is not None and video is not None:
            path, made_by = job.video
            write_video_latents(path, video, fps=loaded.fps, made_by=made_by, notes=notes)
        if job.audio is not None and audio is not None:
            path, made_by = job.audio
            write_audio_latents(path, audio, seconds=loaded.seconds, made_by=made_by, notes=notes)
        yield loaded.bucket


def encode_captions(
    jobs: Sequence[Job],
    *,
    model_path: Path,
    text_encoder_path: Path | None,
    batch_size: int,
    device: torch.device,
) -> Iterator[int]:
    """Make the text contexts of the jobs, batch by batch; says each time how many were made."""
    dtype = encoding_dtype(device)
    with _unusable_model():
        encoder = load_text_encoder(model_path, text_encoder_path, dtype, device)
        connectors = load_connectors(model_path, dtype, device)
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        hidden, mask = encoder.hidden_states([job.clip.caption for job in batch])
        with _unusable_model():
            contexts = connectors.from_hidden_states(hidden, mask)
        for job, video, audio in zip(batch, contexts.video, contexts.audio, strict=True):
            if job.text is not None:
                path, made_by = job.text
                write_context(path, TextContext(video, audio), caption=job.clip.caption, made_by=made_by)
        yield len(batch)


def release_memory(device: torch.device) -> None:
    """Give back what the models of a finished stage held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _unusable_model() -> Iterator[None]:
    """What the model's parts complain about is the user's to change, not a fault of the program."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise DatasetError(str(error)) from error


def _ahead(items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[tuple[Item, Result]]:
    """Each item with the result of `work`, which runs a little ahead in a thread: decoding overlaps encoding."""
    waiting: list[tuple[Item, Future[Result]]] = []
    with ThreadPoolExecutor(max_workers=_AHEAD) as pool:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > _AHEAD:
                first, future = waiting.pop(0)
                yield first, future.result()
        for item, future in waiting:
            yield item, future.result()

"""What is to be done: which files of which clips are missing or out of date."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ltx_trainer_plus.models.components import component_folder, read_vae_factors
from ltx_trainer_plus.preparation.buckets import Bucket, parse_buckets
from ltx_trainer_plus.preparation.clips import Clip, DatasetError, Skipped, dataset_folder, read_clips
from ltx_trainer_plus.preparation.files import (
    AUDIO_FOLDER,
    TEXT_FOLDER,
    VIDEO_FOLDER,
    component_identity,
    fingerprint,
    is_current,
    media_identity,
    prepared_path,
)


@dataclass(frozen=True)
class PreparationSettings:
    """What to prepare, with what.

    Attributes:
        dataset: a `.json`, `.jsonl` or `.csv` file, or a folder of clips.
        model_path: the diffusers pipeline folder that the data is for.
        resolution_buckets: e.g. `"960x544x49;544x960x49"`.
        text_encoder_path: Gemma folder; None = the model's own.
        output_dir: None = `.precomputed` in the data set's folder.
        video_column, caption_column: see `read_clips`.
        lora_trigger: put before every caption.
        with_audio: encode the sound tracks too; a clip without one is then skipped.
        vae_tiling: encode in pieces of 512 pixels: less memory, small differences at their borders.
        overwrite: make everything again.
        batch_size: captions per forward of the text encoder; clips are encoded one at a time.
    """

    dataset: Path
    model_path: Path
    resolution_buckets: str
    text_encoder_path: Path | None = None
    output_dir: Path | None = None
    video_column: str | None = None
    caption_column: str = "caption"
    lora_trigger: str | None = None
    with_audio: bool = True
    vae_tiling: bool = False
    overwrite: bool = False
    batch_size: int = 1

    @property
    def output(self) -> Path:
        return self.output_dir or dataset_folder(self.dataset) / ".precomputed"


@dataclass(frozen=True)
class Job:
    """What is to be made of a clip.

    Attributes:
        clip: its caption is already the one to encode.
        video, audio, text: (path, fingerprint) of the file to make; None where it is current, or not asked for.
    """

    clip: Clip
    video: tuple[Path, str] | None = None
    audio: tuple[Path, str] | None = None
    text: tuple[Path, str] | None = None


@dataclass(frozen=True)
class PreparationPlan:
    """What the main process found out and every process works by.

    Attributes:
        buckets: checked sizes.
        jobs: one for every clip of the data set that is not skipped, also where nothing is left to make.
        skipped: items that are known not to be usable without opening their media.
        strays: prepared samples in the folder that the data set does not name.
    """

    buckets: tuple[Bucket, ...]
    jobs: tuple[Job, ...]
    skipped: tuple[Skipped, ...]
    strays: tuple[str, ...]


def make_plan(settings: PreparationSettings) -> PreparationPlan:
    """Read the data set and compare it with what is prepared.

    Raises:
        DatasetError, ValueError, OSError: the data set, the buckets or the model cannot be used.
    """
    temporal, spatial = read_vae_factors(settings.model_path)
    buckets = parse_buckets(settings.resolution_buckets, temporal_factor=temporal, spatial_factor=spatial)
    clips, skipped = read_clips(
        settings.dataset, video_column=settings.video_column, caption_column=settings.caption_column
    )
    prepared = _prepared_names(settings.output)
    known = {clip.name for clip in clips} | {skip.name for skip in skipped}
    video_made_by, audio_made_by, text_made_by = _fingerprints(settings, buckets)

    def job(clip: Clip) -> Job:
        if settings.lora_trigger:
            clip = replace(clip, caption=f"{settings.lora_trigger.strip()} {clip.caption}")
        source = media_identity(clip.path)

        def to_make(folder: str, made_by: str) -> tuple[Path, str] | None:
            path = prepared_path(settings.output, folder, clip.name)
            return None if is_current(path, made_by) and not settings.overwrite else (path, made_by)

        return Job(
            clip=clip,
            video=to_make(VIDEO_FOLDER, fingerprint(source=source, **video_made_by)),
            audio=to_make(AUDIO_FOLDER, fingerprint(source=source, **audio_made_by)) if settings.with_audio else None,
            text=to_make(TEXT_FOLDER, fingerprint(caption=clip.caption, **text_made_by)),
        )

    # Threads, because on network storage this is nothing but waiting for small reads.
    with ThreadPoolExecutor(max_workers=16) as pool:
        jobs = tuple(pool.map(job, clips))
    return PreparationPlan(buckets, jobs, tuple(skipped), tuple(sorted(prepared - known)))


def _fingerprints(
    settings: PreparationSettings, buckets: Sequence[Bucket]
) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """What makes video latents, audio latents and contexts, beside the clip. Finds missing parts of the model too."""
    model = settings.model_path
    sizes = [str(bucket) for bucket in buckets]
    text = [component_folder(model, "connectors", "text connectors")]
    if settings.text_encoder_path is not None:
        if not settings.text_encoder_path.exists():
            raise DatasetError(f"--text-encoder-path: there is no {settings.text_encoder_path}. Give a Gemma folder.")
        text.append(settings.text_encoder_path)
    else:
        text.append(component_folder(model, "text_encoder", "text encoder"))
        text.append(model / "tokenizer")
    video: dict[str, object] = {"buckets": sizes, "tiled": settings.vae_tiling}
    video["vae"] = component_identity(component_folder(model, "vae", "video VAE"))
    audio: dict[str, object] = {"buckets": sizes}
    if settings.with_audio:
        audio["audio_vae"] = component_identity(component_folder(model, "audio_vae", "audio VAE"))
    return video, audio, {"text": [component_identity(folder) for folder in text]}


def _prepared_names(output: Path) -> set[str]:
    """Samples whose latents are in the folder already.

    Raises:
        DatasetError: it holds the official trainer's files, which would stand beside ours under the same names.
    """
    folder = output / VIDEO_FOLDER
    if next(folder.rglob("*.pt"), None) is not None:
        raise DatasetError(
            f"{output} holds data that the official trainer prepared (.pt files). It can be trained on as it is.\n"
            "  To prepare the clips again, choose another folder with --output-dir."
        )
    files = (path for path in folder.rglob("*.safetensors") if not path.name.startswith("."))
    return {path.relative_to(folder).with_suffix("").as_posix() for path in files}

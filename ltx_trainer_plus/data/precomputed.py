"""Prepared data sets on disk: which samples are complete, and what each holds."""

import copy
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import torch

from ltx_trainer_plus.data.batch import ReferenceClip, Sample, TextKind
from ltx_trainer_plus.data.sample_files import DataError, check_finite, read_audio, read_mask, read_text, read_video

_SUFFIXES = (".pt", ".safetensors")


class SampleShape(NamedTuple):
    """What has to be equal for samples to be stacked.

    Attributes:
        video: (C, F, H, W), or None.
        audio: (C, T, M), or None.
        text_kind: whether the text still has to go through the connectors.
        text_video: (S, D).
        text_audio: (S, D').
        masks, references: (folder, shape) of each.
    """

    video: tuple[int, ...] | None
    audio: tuple[int, ...] | None
    text_kind: TextKind
    text_video: tuple[int, ...]
    text_audio: tuple[int, ...]
    masks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    references: tuple[tuple[str, tuple[int, ...]], ...] = ()


class PrecomputedDataset:
    """Samples whose latents and caption were prepared beforehand.

    Reads official data (`.pt`, older naming and layout included) and this project's `.safetensors`
    (docs/design.md, "Prepared data"). A sample is a file of one relative path in every folder that the run uses.

    Args:
        root: the folder that holds `.precomputed`, or that folder itself.
        video_dir, audio_dir: names of the latent folders; None = the run has no such stream.
        conditions_dir: name of the folder with captions.
        masks: names of the folders with masks.
        references: names of the folders with references, and what these are.
        skip_unreadable: a file that is damaged is no error in `shapes`: its sample keeps its number and counts as of
            the shape of the next readable one.

    Attributes:
        names: names of the complete samples, sorted, so that every machine numbers them alike.
        skipped: (name, reason) of every sample that lacks a part.
        unreadable: (name, reason) of every damaged sample, once `shapes` has been asked for.

    Raises:
        DataError: a folder is missing, no sample is complete, or a sample exists twice.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        video_dir: str | None,
        audio_dir: str | None,
        conditions_dir: str = "conditions",
        masks: Collection[str] = (),
        references: Mapping[str, Literal["video", "audio"]] | None = None,
        skip_unreadable: bool = False,
    ) -> None:
        self.root = _data_folder(Path(root))
        self._skip_unreadable = skip_unreadable
        self.unreadable: list[tuple[str, str]] = []
        self._video = self._files(video_dir) if video_dir is not None else None
        self._audio = self._files(audio_dir) if audio_dir is not None else None
        text = self._files(conditions_dir)
        parts = {
            folder: files
            for folder, files in ((video_dir, self._video), (audio_dir, self._audio))
            if folder is not None and files is not None
        }
        latent_names = {name for files in parts.values() for name in files}
        self._text = {_latent_name(name, latent_names): path for name, path in text.items()}
        parts[conditions_dir] = self._text
        self._kinds = dict(references or {})
        self._masks = {folder: self._files(folder) for folder in masks}
        self._references = {folder: self._files(folder) for folder in self._kinds}
        # What only masks or references hold is no sample: such folders may serve several data sets.
        parts |= {**self._masks, **self._references}

        self.names: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        for name in sorted(latent_names | set(self._text)):
            lacking = [folder for folder, files in parts.items() if name not in files]
            if lacking:
                self.skipped.append((name, f"no file in {' or '.join(lacking)}"))
            else:
                self.names.append(name)
        if not self.names:
            counts = ", ".join(f"{len(files)} in {folder}" for folder, files in parts.items())
            raise DataError(
                f"data.preprocessed_data_root: {self.root} holds no complete sample ({counts}). A sample is a file of "
                "the same relative path in each of these folders. Prepare clips with scripts/process_dataset.py."
            )

    def _files(self, folder: str) -> dict[str, Path]:
        if not (self.root / folder).is_dir():
            present = sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
            raise DataError(
                f"data.preprocessed_data_root: {self.root} has no folder {folder!r}"
                f" (it has: {', '.join(present) or 'none'}). Prepare the data for it with scripts/process_dataset.py, "
                "or leave what needs it (that stream or condition) out of training_strategy."
            )
        return _find(self.root / folder)

    def __len__(self) -> int:
        return len(self.names)

    def only(self, names: Collection[str]) -> "PrecomputedDataset":
        """The same data set with these of its samples alone, in its order.

        Raises:
            ValueError: none is left.
        """
        part = copy.copy(self)
        part.__dict__.pop("shapes", None)
        part.names = [name for name in self.names if name in names]
        part.unreadable = []
        if not part.names:
            raise ValueError("no sample is left")
        return part

    def __getitem__(self, index: int) -> Sample:
        """Reads one sample.

        Raises:
            DataError: a file is damaged, holds pickled objects or numbers that are not finite, or misses an entry.
        """
        sample = self._read(self.names[index])
        if sample.video_latent is not None and self._video is not None:
            check_finite(self._video[sample.name], sample.video_latent)
        if sample.audio_latent is not None and self._audio is not None:
            check_finite(self._audio[sample.name], sample.audio_latent)
        for folder, mask in sample.masks.items():
            check_finite(self._masks[folder][sample.name], mask)
        for folder, clip in sample.references.items():
            check_finite(self._references[folder][sample.name], clip.latent)
        check_finite(self._text[sample.name], sample.text.video)
        check_finite(self._text[sample.name], sample.text.audio)
        return sample

    def _read(self, name: str) -> Sample:
        video, fps = read_video(self._video[name]) if self._video is not None else (None, None)
        audio = read_audio(self._audio[name]) if self._audio is not None else None
        return Sample(
            name,
            read_text(self._text[name]),
            video_latent=video,
            fps=fps,
            audio_latent=audio,
            masks={folder: read_mask(files[name]) for folder, files in self._masks.items()},
            references={folder: self._reference(folder, name) for folder in self._references},
        )

    def _reference(self, folder: str, name: str) -> ReferenceClip:
        path = self._references[folder][name]
        if self._kinds[folder] == "audio":
            return ReferenceClip(read_audio(path))
        latent, fps = read_video(path)
        return ReferenceClip(latent, torch.tensor(fps))

    @cached_property
    def shapes(self) -> list[SampleShape]:
        """Shape of every sample; reads headers only.

        Raises:
            DataError: files are damaged or hold something else; names all of them.
        """
        # Threads, because on network storage this is nothing but waiting for small reads.
        with ThreadPoolExecutor(max_workers=16) as pool:
            results = list(pool.map(self._shape_or_error, range(len(self))))
        errors = [result for result in results if isinstance(result, DataError)]
        if self._skip_unreadable and len(errors) < len(results):
            self.unreadable = [
                (name, str(result))
                for name, result in zip(self.names, results, strict=True)
                if isinstance(result, DataError)
            ]
            shape = next(result for result in results if isinstance(result, SampleShape))
            for index in reversed(range(len(results))):
                if isinstance(found := results[index], SampleShape):
                    shape = found
                results[index] = shape
        elif errors:
            raise DataError("\n".join(str(error) for error in errors))
        return [result for result in results if isinstance(result, SampleShape)]

    def shape_of(self, index: int) -> SampleShape:
        """Shape of one sample, without its numbers."""
        sample = self._read(self.names[index])
        return SampleShape(
            video=None if sample.video_latent is None else tuple(sample.video_latent.shape),
            audio=None if sample.audio_latent is None else tuple(sample.audio_latent.shape),
            text_kind=sample.text.kind,
            text_video=tuple(sample.text.video.shape),
            text_audio=tuple(sample.text.audio.shape),
            masks=tuple((folder, tuple(mask.shape)) for folder, mask in sample.masks.items()),
            references=tuple((folder, tuple(clip.latent.shape)) for folder, clip in sample.references.items()),
        )

    def _shape_or_error(self, index: int) -> SampleShape | DataError:
        try:
            return self.shape_of(index)
        except DataError as error:
            return error


def _data_folder(root: Path) -> Path:
    inner = root / ".precomputed"
    folder = inner if inner.is_dir() else root
    if not folder.is_dir():
        raise DataError(f"data.preprocessed_data_root: {root} is not a folder. Give the folder of prepared data.")
    return folder


def _find(folder: Path) -> dict[str, Path]:
    """Path of every data file below a folder, by its relative path without suffix. Links are followed."""
    found: dict[str, Path] = {}
    for place, _, files in os.walk(folder, followlinks=True):
        for file in files:
            path = Path(place) / file
            # Hidden files are left-overs of a preparation that was cut off, or notes of the operating system.
            if path.suffix not in _SUFFIXES or file.startswith("."):
                continue
            name = path.relative_to(folder).with_suffix("").as_posix()
            if name in found:
                raise DataError(
                    f"{folder}: {name} exists as .pt and as .safetensors. Delete the one that is out of date."
                )
            found[name] = path
    return found


def _latent_name(name: str, latent_names: set[str]) -> str:
    """The sample that a caption file belongs to: in old data `condition_X` goes with `latent_X`."""
    path = PurePosixPath(name)
    old = path.with_name(f"latent_{path.name.removeprefix('condition_')}").as_posix()
    return old if path.name.startswith("condition_") and name not in latent_names and old in latent_names else name

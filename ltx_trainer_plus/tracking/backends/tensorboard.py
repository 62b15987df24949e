"""TensorBoard: event files in `tensorboard/` of the run folder."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from ltx_trainer_plus.config import config_as_dict
from ltx_trainer_plus.config.yaml_text import write_yaml
from ltx_trainer_plus.media.audio import read_audio
from ltx_trainer_plus.media.image import read_image
from ltx_trainer_plus.media.video import read_video
from ltx_trainer_plus.tracking.backend import Media, RecordedRun

TITLE = "TensorBoard"

# TensorBoard plays no video, only GIF pictures, which are large: a preview of the file that lies in `samples/`.
_GIF_FRAMES = 48
_GIF_SIDE = 320
_RGB = 3


def start(run: RecordedRun) -> "TensorBoardBackend":
    """A further event file in the folder. What earlier ones hold of steps that come anew is hidden by the library."""
    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.step else 0)
    text = write_yaml(config_as_dict(run.config))
    # Indented, it is code to TensorBoard's Markdown.
    writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), run.step)
    return TensorBoardBackend(writer)


class TensorBoardBackend:
    """One event file. A resumed run needs no id: TensorBoard reads all event files of a folder as one run."""

    id = None

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    @property
    def location(self) -> str | None:
        return str(self._writer.log_dir)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def log_media(self, media: Sequence[Media], step: int) -> None:
        for item in media:
            self._writer.add_text(f"{item.key}/prompt", item.caption, step)
            if item.kind == "image":
                self._writer.add_image(item.key, read_image(item.path), step, dataformats="HWC")
                continue
            if item.kind == "video":
                events: Any = self._writer.file_writer
                events.add_summary(_gif(item.key, item.path), step)
            sound = read_audio(item.path)
            if sound is not None:
                mono = sound.samples.mean(0, keepdim=True).clamp(-1, 1)
                self._writer.add_audio(f"{item.key}/sound", mono, step, sample_rate=sound.rate)
        # The library writes every two minutes; samples come seldom, and are waited for.
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def _gif(tag: str, path: Path) -> Summary:
    clip = read_video(path)
    every = -(-len(clip.frames) // _GIF_FRAMES)
    frames = [_small(frame) for frame in clip.frames[::every]]
    data = io.BytesIO()
    # GIF counts time in hundredths of a second.
    milliseconds = max(20, round(every * 100 / float(clip.fps)) * 10)
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    width, height = frames[0].size
    image = Summary.Image(height=height, width=width, colorspace=_RGB, encoded_image_string=data.getvalue())
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _small(frame: NDArray[np.uint8]) -> Image.Image:
    picture = Image.fromarray(frame)
    picture.thumbnail((_GIF_SIDE, _GIF_SIDE))
    return picture

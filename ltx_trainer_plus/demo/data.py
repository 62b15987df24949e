"""Everything the demo trains on: a tiny model, clips with sound, and their prepared data."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.media.video import write_video
from ltx_trainer_plus.models.tiny import create_tiny_pipeline
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.preparation.clips import DatasetError, read_clips
from ltx_trainer_plus.preparation.prepare import PreparationSettings, prepare_dataset

Array = NDArray[np.float64]

WIDTH, HEIGHT, FRAMES, FPS = 96, 64, 25, 24
BUCKET = f"{WIDTH}x{HEIGHT}x{FRAMES}"
SAMPLE_RATE = 48000
SEED = 0
BACKGROUND = (28, 30, 44)


@dataclass(frozen=True)
class Scene:
    """One clip: what moves, how, and the sound that follows it.

    Attributes:
        path: time in [0, 1] to the centre's position (x from left 0 to right 1, y from top 0 to bottom 1).
        pitch: Hz at the bottom of the picture; an octave and a half higher at the top.
    """

    name: str
    colour: tuple[int, int, int]
    shape: str
    caption: str
    path: Callable[[Array], tuple[Array, Array]]
    pitch: float


def scenes(seed: int) -> list[Scene]:
    """Ten scenes, no two alike; the seed chooses starting points and pitches."""
    random = np.random.default_rng(seed)
    start, height, pitch = random.uniform(0, 0.15, 10), random.uniform(0.35, 0.65, 10), random.uniform(180, 320, 10)
    red, green, blue, yellow, white = (230, 60, 50), (70, 200, 90), (70, 120, 240), (240, 210, 70), (235, 235, 235)

    def slide(index: int, forward: bool) -> Callable[[Array], tuple[Array, Array]]:
        def path(time: Array) -> tuple[Array, Array]:
            x = start[index] + (1 - 2 * start[index]) * time
            return (x if forward else 1 - x), np.full_like(time, height[index])

        return path

    def bounce(index: int, times: int) -> Callable[[Array], tuple[Array, Array]]:
        return lambda time: (0.2 + 0.6 * time, 0.9 - 0.75 * np.abs(np.sin(math.pi * times * time + start[index])))

    def lift(index: int, up: bool) -> Callable[[Array], tuple[Array, Array]]:
        return lambda time: (np.full_like(time, height[index]), 1 - time if up else time)

    def circle(index: int, turn: int) -> Callable[[Array], tuple[Array, Array]]:
        def path(time: Array) -> tuple[Array, Array]:
            angle = turn * 2 * math.pi * (time + start[index])
            return 0.5 + 0.35 * np.cos(angle), 0.5 + 0.35 * np.sin(angle)

        return path

    left_to_right = "slides from left to right, and the tone moves with it"
    made = [
        ("red_ball_slides", red, "ball", left_to_right, slide(0, True)),
        (
            "blue_square_slides_back",
            blue,
            "square",
            "slides from right to left, and the tone moves with it",
            slide(1, False),
        ),
        ("green_ball_bounces", green, "ball", "bounces twice on the floor; the tone jumps with it", bounce(2, 2)),
        ("yellow_diamond_bounces", yellow, "diamond", "hops three times; the tone hops with it", bounce(3, 3)),
        ("white_ring_rises", white, "ring", "rises from the floor while the tone climbs", lift(4, True)),
        ("red_square_falls", red, "square", "sinks to the floor while the tone falls", lift(5, False)),
        ("blue_ball_circles", blue, "ball", "flies in a circle; the tone swings around the listener", circle(6, 1)),
        (
            "green_diamond_circles_back",
            green,
            "diamond",
            "flies in a circle the other way round, humming",
            circle(7, -1),
        ),
        ("yellow_ring_slides", yellow, "ring", left_to_right, slide(8, True)),
        ("white_square_bounces", white, "square", "bounces once, high; the tone jumps with it", bounce(9, 1)),
    ]
    return [
        Scene(name, colour, shape, f"a {name.split('_')[0]} {shape} {does}", path, pitch[index])
        for index, (name, colour, shape, does, path) in enumerate(made)
    ]


def draw(scene: Scene) -> NDArray[np.uint8]:
    """The pictures: (F, H, W, 3)."""
    radius = HEIGHT / 6
    across, down = scene.path(np.linspace(0, 1, FRAMES))
    x = radius + across[:, None, None] * (WIDTH - 2 * radius) - np.arange(WIDTH)[None, None, :] - 0.5
    y = radius + down[:, None, None] * (HEIGHT - 2 * radius) - np.arange(HEIGHT)[None, :, None] - 0.5
    # Distance to the outline, negative inside; a pixel that the outline crosses is covered in part.
    distance = {
        "ball": np.hypot(x, y) - radius,
        "square": np.maximum(abs(x), abs(y)) - 0.85 * radius,
        "diamond": (abs(x) + abs(y)) / math.sqrt(2) - 0.85 * radius,
        "ring": abs(np.hypot(x, y) - 0.75 * radius) - 0.25 * radius,
    }[scene.shape]
    cover = np.clip(0.5 - distance, 0, 1)[..., None]
    floor = np.linspace(0.7, 1.3, HEIGHT)[None, :, None, None] * np.array(BACKGROUND)
    return np.rint(cover * np.array(scene.colour) + (1 - cover) * floor).astype(np.uint8)


def sing(scene: Scene) -> NDArray[np.float32]:
    """The sound, (2, samples): as high as the shape is, from the side where it is."""
    count = round(FRAMES / FPS * SAMPLE_RATE)
    across, down = scene.path(np.linspace(0, 1, count))
    phase = 2 * math.pi * np.cumsum(scene.pitch * 2 ** (1.5 * (1 - down))) / SAMPLE_RATE
    fade = np.minimum(1, np.minimum(np.arange(count), np.arange(count)[::-1]) / (0.01 * SAMPLE_RATE))
    tone = 0.4 * fade * (np.sin(phase) + 0.3 * np.sin(2 * phase))
    return np.stack([tone * np.cos(across * math.pi / 2), tone * np.sin(across * math.pi / 2)]).astype(np.float32)


def make_clips(folder: Path, seed: int) -> Path:
    """Write the clips and their `dataset.json`, unless the same ones are there already."""
    listing = folder / "dataset.json"
    made = scenes(seed)
    text = json.dumps([{"video": f"{scene.name}.mp4", "caption": scene.caption} for scene in made], indent=2) + "\n"
    whole = listing.is_file() and all((folder / f"{scene.name}.mp4").is_file() for scene in made)
    if not whole or listing.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        for scene in made:
            write_video(folder / f"{scene.name}.mp4", draw(scene), FPS, sing(scene), SAMPLE_RATE)
        listing.write_text(text)
    return listing


def fitting_bucket(dataset: Path) -> str:
    """A size that the demo's tiny model can be trained at and that most of these clips fill.

    About as many pixels as the demo's own clips, in the clips' usual shape; as many frames as most clips have, at
    most 49.
    """
    sizes = [size for clip in read_clips(dataset)[0] if (size := _size(clip.path))]
    if not sizes:
        raise DatasetError(f"{dataset}: no clip with a caption can be opened. Give a folder of videos with captions.")
    ratio = float(np.median([width / height for width, height, _ in sizes]))
    geometry = LatentGeometry()  # the tiny model's VAE compresses as the real one does
    cell = geometry.spatial
    height = max(1, round(math.sqrt(WIDTH * HEIGHT / ratio) / cell)) * cell
    width = max(1, min(round(height * ratio / cell), 8)) * cell
    # At least two thirds of the clips have them: a few short ones are left out rather than cutting all others.
    enough = sorted(frames for _, _, frames in sizes)[len(sizes) // 3]
    frames = min(geometry.pixel_frames(geometry.latent_frames(max(enough, 1))), 49)
    return f"{width}x{height}x{frames}"


def _size(path: Path) -> tuple[int, int, int] | None:
    """Width and height as a player shows them, and number of frames; None for what is no readable video."""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            first = next(container.decode(stream))
            width, height = (first.height, first.width) if first.rotation % 180 else (first.width, first.height)
            seconds = float((container.duration or 0) / av.time_base)
            frames = stream.frames or int(seconds * float(stream.average_rate or 0))
            return width, height, frames
    except (OSError, IndexError, ValueError, StopIteration, av.FFmpegError):
        return None


def make_demo_data(output: Path, clips: Path | None = None) -> Path:
    """Make the tiny model, the clips and their prepared data; returns the folder of prepared data.

    Args:
        clips: one's own instead of the demo's: a folder, or a `dataset.json`/`.jsonl`/`.csv`.

    Raises:
        DatasetError: there is nothing in `clips` that can be trained on.
    """
    model = create_tiny_pipeline(output / "model", SEED)
    if clips is None:
        dataset, bucket, prepared = make_clips(output / "clips", SEED), BUCKET, output / ".precomputed"
    else:
        dataset, bucket, prepared = clips, fitting_bucket(clips), output / "own" / ".precomputed"
    print(f"Tiny model in {model}, clips in {dataset}; preparing them at {bucket}.", flush=True)
    _prepare(dataset, bucket, prepared, model)
    return prepared


def _prepare(dataset: Path, bucket: str, output: Path, model: Path) -> None:
    # Prepared samples of another data set would be trained on as well.
    made_from = output / "made_from.txt"
    if made_from.is_file() and made_from.read_text() != f"{dataset.resolve()}\n":
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    made_from.write_text(f"{dataset.resolve()}\n")

    console = Console()
    settings = PreparationSettings(dataset, model_path=model, resolution_buckets=bucket, output_dir=output)
    report = prepare_dataset(settings, Topology.start("cpu"), console)
    report.print(console)
    if not report.prepared:
        raise DatasetError(f"{dataset}: no clip could be prepared. The summary above says why.")

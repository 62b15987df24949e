"""Resolution buckets: the sizes that clips are brought to."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ltx_trainer_plus.preparation.clips import DatasetError


@dataclass(frozen=True)
class Bucket:
    """One size: width and height in pixels, number of frames."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"


def parse_buckets(text: str, *, temporal_factor: int, spatial_factor: int) -> tuple[Bucket, ...]:
    """Read `"960x544x49;544x960x49"` and check that the video VAE can encode every size.

    Raises:
        DatasetError: names every bucket that is malformed or does not fit, and the nearest one that does.
    """
    buckets, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", part.lower().replace(" ", ""))
        if not match:
            problems.append(f"{part!r} is not WIDTHxHEIGHTxFRAMES")
            continue
        bucket = Bucket(*map(int, match.groups()))
        fitting = Bucket(
            max(round(bucket.width / spatial_factor), 1) * spatial_factor,
            max(round(bucket.height / spatial_factor), 1) * spatial_factor,
            round(max(bucket.frames - 1, 0) / temporal_factor) * temporal_factor + 1,
        )
        if bucket == fitting:
            buckets.append(bucket)
        else:
            problems.append(f"{bucket} does not fit the video VAE; the nearest that does is {fitting}")
    if not buckets and not problems:
        problems.append("no bucket is given")
    if problems:
        raise DatasetError(
            "--resolution-buckets: " + "; ".join(problems) + ".\n"
            f"  Width and height are multiples of {spatial_factor}, frames are 1 plus a multiple of {temporal_factor}: "
            'e.g. --resolution-buckets "960x544x49;544x960x49"'
        )
    return tuple(dict.fromkeys(buckets))


def choose_bucket(buckets: Sequence[Bucket], *, width: int, height: int, frames: int) -> Bucket | None:
    """The bucket for a clip, or None where it is too short for all.

    Of the buckets that the clip has enough frames for, those with the nearest aspect ratio (by the factor between the
    two); of these the one with the most frames, then with the most pixels. One-frame buckets are for still pictures:
    a moving clip gets one only where it fills no other.
    """
    fillable = [bucket for bucket in buckets if bucket.frames <= frames]
    candidates = [bucket for bucket in fillable if bucket.frames > 1] or fillable
    if not candidates:
        return None

    def order(bucket: Bucket) -> tuple[float, int, int]:
        distance = abs(math.log(bucket.width / bucket.height) - math.log(width / height))
        # Rounded, so that equal ratios written in different sizes tie.
        return round(distance, 6), -bucket.frames, -bucket.width * bucket.height

    return min(candidates, key=order)

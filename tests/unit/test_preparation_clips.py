"""Reading data sets: every form of listing, names, collisions, and errors that say what to change."""

import json
from pathlib import Path

import pytest

from ltx_trainer_plus.preparation.buckets import Bucket, choose_bucket, parse_buckets
from ltx_trainer_plus.preparation.clips import DatasetError, read_clips


def listed(path: Path, **options: str) -> list[tuple[str, str]]:
    clips, skipped = read_clips(path, **options)
    assert skipped == []
    return [(clip.name, clip.caption) for clip in clips]


def test_json_jsonl_and_csv_say_the_same(tmp_path: Path) -> None:
    rows = [{"video": "a.mp4", "caption": "a cat, walking"}, {"video": "sub/b.take.1.MOV", "caption": ' the "dog"\n '}]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    # A byte-order mark, as Excel writes it.
    csv = '\ufeffvideo,caption\na.mp4,"a cat, walking"\nsub/b.take.1.MOV," the ""dog""\n "\n'
    (tmp_path / "d.csv").write_text(csv, encoding="utf-8")
    expected = [("a", "a cat, walking"), ("sub/b.take.1", 'the "dog"')]
    for name in ("d.json", "d.jsonl", "d.csv"):
        assert listed(tmp_path / name) == expected
    (tmp_path / "dataset.csv").write_text(csv, encoding="utf-8")
    assert listed(tmp_path) == expected


def test_columns_are_official_ours_or_named(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(
        json.dumps([{"media_path": "a.mp4", "video": "b.mp4", "text": "t", "caption": "c"}])
    )
    assert listed(tmp_path / "d.json") == [("a", "c")]
    assert listed(tmp_path / "d.json", video_column="video", caption_column="text") == [("b", "t")]
    with pytest.raises(DatasetError, match=r"no column clip \(it has: media_path, video, text, caption\)"):
        read_clips(tmp_path / "d.json", video_column="clip")
    with pytest.raises(DatasetError, match="--caption-column"):
        read_clips(tmp_path / "d.json", caption_column="words")


def test_a_folder_gives_its_clips_with_the_texts_beside_them(tmp_path: Path) -> None:
    for name in (
        "b.MP4",
        "a.webm",
        "sub/c.jpg",
        ".hidden.mp4",
        ".precomputed/x.mp4",
        "notes.pdf",
        "no.mp4",
        "blank.mp4",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("a", "b", "sub/c", ".precomputed/x"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}\n")
    (tmp_path / "blank.txt").write_text(" \n")
    clips, skipped = read_clips(tmp_path)
    assert [(clip.name, clip.caption) for clip in clips] == [(n, f"text of {n}") for n in ("a", "b", "sub/c")]
    assert {(skip.item, skip.reason) for skip in skipped} == {("no.mp4", "no caption"), ("blank.mp4", "no caption")}
    assert {skip.detail for skip in skipped} == {"there is no no.txt beside it", "blank.txt is empty"}


def test_clips_that_would_share_a_name_are_named_and_the_first_is_kept(tmp_path: Path) -> None:
    names = ("a.mp4", "a.mov", "./a.mp4", "sub/../a.mkv", "sub/a.mp4")
    (tmp_path / "d.json").write_text(json.dumps([{"video": name, "caption": name} for name in names]))
    clips, skipped = read_clips(tmp_path / "d.json")
    assert [(clip.name, clip.caption) for clip in clips] == [("a", "a.mp4"), ("sub/a", "sub/a.mp4")]
    assert [(skip.item, skip.reason) for skip in skipped] == [
        ("a.mov", "collision"),
        ("./a.mp4", "collision"),
        ("sub/../a.mkv", "collision"),
    ]
    assert "a.mp4" in skipped[0].detail
    assert "twice" in skipped[1].detail


def test_names_stay_inside_the_output_folder(tmp_path: Path) -> None:
    base = tmp_path / "set"
    base.mkdir()
    (base / "d.json").write_text(
        json.dumps([{"video": video, "caption": "c"} for video in ("../a.mp4", "/clips/b.mp4", str(base / "c.mp4"))])
    )
    outside = (tmp_path / "a").as_posix().removeprefix("/")
    assert [name for name, _ in listed(base / "d.json")] == [outside, "clips/b", "c"]


def test_items_without_path_or_caption_are_named_by_their_place(tmp_path: Path) -> None:
    rows = [{"video": "a.mp4"}, {"caption": "c"}, {"video": "b.mp4", "caption": None}, {"video": "c.mp4", "caption": 3}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    clips, skipped = read_clips(tmp_path / "d.jsonl")
    assert clips == []
    assert [(skip.item, skip.reason) for skip in skipped] == [
        ("a.mp4", "no caption"),
        ("line 2", "no path"),
        ("b.mp4", "no caption"),
        ("c.mp4", "no caption"),
    ]
    assert "line 4: caption is no text but 3" in skipped[3].detail


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", "{", "not JSON"),
        ("d.json", '{"video": ["a.mp4"]}', "list of objects"),
        ("d.json", '["a.mp4"]', "item 1: expected an object"),
        ("d.json", "[]", "no clips"),
        ("d.jsonl", '{"video": "a.mp4", "caption": "c"}\n{', "line 2: this is not JSON"),
        ("d.csv", "", "no clips"),
        ("d.csv", "a.mp4,a cat\nb.mp4,a dog\n", r"media_path or video \(it has: a.mp4, a cat\)"),
        ("d.txt", "a.mp4", "ends in .json, .jsonl or .csv"),
    ],
)
def test_a_listing_that_cannot_be_used_says_why(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=message):
        read_clips(tmp_path / name)


def test_a_missing_data_set_and_two_listings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such file or folder"):
        read_clips(tmp_path / "absent.json")
    (tmp_path / "d.csv").write_bytes(b"video,caption\na.mp4,caf\xe9\n")
    with pytest.raises(DatasetError, match="UTF-8"):
        read_clips(tmp_path / "d.csv")
    for name in ("dataset.json", "dataset.csv"):
        (tmp_path / name).touch()
    with pytest.raises(DatasetError, match=r"dataset\.json and dataset\.csv"):
        read_clips(tmp_path)


def test_buckets_are_read_and_checked_all_together() -> None:
    read = parse_buckets("960x544x49; 544X960x49;960x544x49;", temporal_factor=8, spatial_factor=32)
    assert read == (Bucket(960, 544, 49), Bucket(544, 960, 49))
    with pytest.raises(DatasetError) as caught:
        parse_buckets("960x540x50;64x64x9;wide;0x32x0", temporal_factor=8, spatial_factor=32)
    for part in ("nearest that does is 960x544x49", "'wide' is not WIDTHxHEIGHTxFRAMES", "is 32x32x1"):
        assert part in str(caught.value)
    assert "64x64x9 does not" not in str(caught.value)
    with pytest.raises(DatasetError, match="no bucket"):
        parse_buckets(" ; ", temporal_factor=8, spatial_factor=32)


def test_a_clip_goes_to_the_nearest_shape_it_can_fill_then_to_the_longest() -> None:
    buckets = [
        Bucket(960, 544, 25),
        Bucket(960, 544, 49),
        Bucket(544, 960, 49),
        Bucket(512, 512, 9),
        Bucket(960, 544, 1),
    ]

    def chosen(width: int, height: int, frames: int) -> str:
        return str(choose_bucket(buckets, width=width, height=height, frames=frames))

    assert chosen(1920, 1080, 100) == "960x544x49"
    assert chosen(1920, 1080, 48) == "960x544x25"
    assert chosen(1080, 1920, 100) == "544x960x49"
    # Too short for the upright one: the square is nearer than the wide one.
    assert chosen(1080, 1920, 30) == "512x512x9"
    # A moving clip does not become a still because the still's shape is nearer.
    assert chosen(1920, 1080, 24) == "512x512x9"
    assert chosen(1920, 1080, 1) == "960x544x1"
    assert choose_bucket(buckets[:-1], width=64, height=64, frames=8) is None
    assert choose_bucket([Bucket(64, 32, 9), Bucket(128, 64, 9)], width=100, height=50, frames=9) == Bucket(128, 64, 9)

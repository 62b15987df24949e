"""Files that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from ltx_trainer_plus.atomic import remove_unfinished, replacing


def test_the_old_file_stays_until_the_new_one_is_whole_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new folder" / "a.json"
    with replacing(path) as first:
        first.write_text("old")
    happened: list[str] = []
    flush, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (happened.append("on disk"), flush(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (happened.append("renamed"), rename(*paths)))
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.suffix == ".json"  # writers choose the format by it
    assert (path.read_text(), happened) == ("new", ["on disk", "renamed"])
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_fails_half_way_leaves_nothing(tmp_path: Path, is_folder: bool) -> None:
    def fail() -> None:
        with replacing(tmp_path / "a") as temporary:
            if is_folder:
                temporary.mkdir()
                (temporary / "part").touch()
            else:
                temporary.touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_folder_appears_with_its_content(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as temporary:
        temporary.mkdir()
        (temporary / "part").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "part"]


def test_leftovers_of_killed_processes_are_found_and_nothing_else(tmp_path: Path) -> None:
    inside = tmp_path / "latents"
    inside.mkdir()
    kept = [tmp_path / ".lock", tmp_path / "a.tmp.json", inside / ".notes.txt"]
    for path in (*kept, inside / ".b.123.tmp.safetensors", tmp_path / ".c.7.tmp"):
        path.touch()
    assert sorted(remove_unfinished(tmp_path)) == [".b.123.tmp.safetensors", ".c.7.tmp"]
    assert all(path.exists() for path in kept)

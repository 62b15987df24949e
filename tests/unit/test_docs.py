"""What the code and the documents cite is in the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(path for room in ("ltx_trainer_plus", "scripts", "tests") for path in (ROOT / room).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(document: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_sections_that_the_code_cites_are_in_the_documents() -> None:
    cited = [
        (name(path), document, section)
        for path in CODE
        for document, section in re.findall(r'(docs/\w+\.md), "([^"]+)"', path.read_text(encoding="utf-8"))
    ]
    assert len({path for path, _, _ in cited}) > 8
    assert [(path, section) for path, document, section in cited if section not in headings(ROOT / document)] == []


def test_reference_files_that_the_code_cites_are_in_the_repository() -> None:
    cited = [
        (name(path), pattern)
        for path in CODE
        for pattern in re.findall(r'(?<![\w/"])((?:tests/)?reference/[\w*.-]+\.\w+)', path.read_text(encoding="utf-8"))
    ]
    assert len(cited) > 8
    assert [(path, pattern) for path, pattern in cited if not list(ROOT.glob(pattern))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_of_the_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_that_the_documents_name_are_in_the_repository(document: Path) -> None:
    named = re.findall(
        r"(?<![\w/<.-])((?:ltx_trainer_plus|scripts|tests|configs|docs)/[\w/.-]+\.(?:py|yaml|md))",
        document.read_text(encoding="utf-8"),
    )
    assert [path for path in dict.fromkeys(named) if not (ROOT / path).exists()] == []

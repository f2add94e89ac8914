"""Pages of the repository: links lead somewhere, and stored studies are of the program as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from levelhead.studies.catalogue import find_study

ROOT = Path(__file__).parents[2]
STUDIES = sorted(p for p in (ROOT / "docs" / "studies").glob("*.md") if p.stem != "README")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [t for t in targets if not t.startswith(("http://", "https://", "mailto:"))]
    missing = [t for t in local if not (page.parent / t.replace("%20", " ")).exists()]
    assert missing == []


def test_there_are_stored_studies() -> None:
    listed = (ROOT / "docs" / "studies" / "README.md").read_text(encoding="utf-8")
    assert STUDIES
    for page in STUDIES:
        assert f"]({page.name})" in listed


@pytest.mark.parametrize("page", STUDIES, ids=lambda path: path.stem)
def test_a_stored_study_has_the_settings_that_the_study_has(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    study = find_study(page.stem)
    assert text.startswith(f"# {study.title}\n\n`levelhead study {study.name}`")
    rows = text.rpartition("## Settings and versions")[2]
    names = re.findall(r"^\| (\w+) \|", rows, flags=re.MULTILINE)
    stored = names[names.index("study") + 1 : names.index("python")]
    assert set(stored) == set(study.settings.model_fields)

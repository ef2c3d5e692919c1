"""What the documents say is so: messages stand in the code, links lead somewhere, README's figures are measured."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / name / "README.md" for name in ("coordinator", "kernels", "node", "protos", "scheduler", "tests")]
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docker/README.md")]
PAGES = OTHERS + FOLDERS + sorted(ROOT.glob("docs/*.md"))


def sentences() -> list[str]:
    """All texts of the product, with ... in place of what is filled in."""
    found = []
    for folder in ("coordinator", "node", "protos", "scheduler", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            for each in ast.walk(ast.parse(file.read_text())):
                if isinstance(each, ast.JoinedStr):
                    found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in each.values))
                elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                    found.append(re.sub(r"%[.\d]*[sdf]", "...", each.value))
    return found


def test_every_message_that_is_explained_is_one_of_the_code() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    said = "\n".join(sentences())
    for row in rows:
        assert row.removeprefix("... ").removesuffix("...") in said, row


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


@pytest.mark.parametrize("page", FOLDERS, ids=lambda page: page.parent.name)
def test_each_folders_page_names_files_that_are_there_and_is_read_at_once(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n") <= 40
    named = re.findall(r"`(\.?[\w./]+(?:\.py|\.proto|\.cu|/))`", text)
    assert named
    for name in named:
        assert (page.parent / name).exists() or (ROOT / name).exists(), name


def test_readmes_figures_are_measured_ones() -> None:
    measured = " ".join((ROOT / "docs" / "measurements.md").read_text().split())
    readme = (ROOT / "README.md").read_text()
    told = readme[readme.index("For the run file above it answers") :]
    told = re.sub(r"```.*?```|\[.*?\]\(.*?\)|^    .*?$|`[^`]*`", "", told, flags=re.DOTALL | re.MULTILINE)
    for figure in re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<=\n- )\d", told):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", measured), figure

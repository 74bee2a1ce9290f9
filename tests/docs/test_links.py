"""Links between the pages lead somewhere, and every plugin that must be asked for is in the lists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if not target.startswith(("http:", "https:")):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("folder", ["loongforge_plugins", "megatrain_plugins"])
def test_every_plugin_that_must_be_asked_for_has_a_page_and_is_listed(folder: str):
    declared = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    for name in declared["trainforge.plugins"]:
        assert (ROOT / f"docs/plugins/{name}.md").is_file()
        assert f"(plugins/{name}.md)" in (ROOT / "docs/README.md").read_text("utf-8")
        design = (ROOT / "docs/design.md").read_text("utf-8")
        assert re.search(rf"^\| `{name}` \|", design, re.MULTILINE)
        assert f"`{name}`" in (ROOT / folder / "README.md").read_text("utf-8")
        assert f"[`{name}`](docs/plugins/{name}.md)" in (ROOT / "README.md").read_text("utf-8")

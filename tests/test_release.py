"""What a release needs: a version that is said once, absolute links, a changelog's form."""

import re
import runpy
from pathlib import Path

import pytest

import numbsparse as ns

ROOT = Path(__file__).parents[1]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
REPOSITORY = "https://github.com/Someone/numbsparse"
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_said_once():
    said = [path for path in ("pyproject.toml", "CITATION.cff") if ns.__version__ in read(path)]
    assert not said
    assert read("numbsparse/__init__.py").count(ns.__version__) == 1
    assert 'dynamic = ["version"]' in read("pyproject.toml")


def test_only_the_tag_of_the_version_with_entries_is_released():
    package, tag = '__version__ = "1.2.3"\n', "v1.2.3"
    RELEASE["check"](tag, package, "## [1.2.3] - 2026-01-31\n")
    for wrong in ("v1.2.4", "1.2.3", "v1.2.30"):
        with pytest.raises(SystemExit, match="is not the version"):
            RELEASE["check"](wrong, package, "## [1.2.3] - 2026-01-31\n")
    for changelog in ("## [1.2.3]\n", "## [Unreleased]\n", "## [1x2.3] - 2026-01-31\n"):
        with pytest.raises(SystemExit, match="has no line"):
            RELEASE["check"](tag, package, changelog)


def test_the_package_index_can_follow_every_link():
    text = RELEASE["addressed"](read("README.md"), REPOSITORY, "v9")
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"src=\"([^\"]+)", text)
    assert len(targets) > 20
    assert not [target for target in targets if not re.match("https://|#", target)]
    assert f'src="{REPOSITORY}/raw/v9/examples/results/speed_up.png"' in text
    assert f"]({REPOSITORY}/blob/v9/CONTRIBUTING.md#the-site)" in text
    assert "](https://cdn.openai.com/" in text


def test_the_project_gets_its_urls():
    project = RELEASE["with_urls"](read("pyproject.toml"), REPOSITORY, "v9")
    table = project.partition("[project.urls]\n")[2].partition("\n\n")[0]
    assert 'Documentation = "https://someone.github.io/numbsparse/"' in table
    assert f'Changelog = "{REPOSITORY}/blob/v9/CHANGELOG.md"' in table
    assert project.replace(f"[project.urls]\n{table}\n\n", "") == read("pyproject.toml")
    with pytest.raises(SystemExit, match="no URLs yet"):
        RELEASE["with_urls"](project, REPOSITORY, "v9")


def test_the_changelog_has_the_form_of_keep_a_changelog():
    text = read("CHANGELOG.md")
    assert re.findall("^## (.*)$", text, re.MULTILINE)[0] == "[Unreleased]"
    for version in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert re.match(r"\[(Unreleased|\d+\.\d+\.\d+)\]( - \d{4}-\d\d-\d\d)?\n", version)
        kinds = re.findall("^### (.*)$", version, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
        entries = re.sub(r"^(#|- |  |\n|\[).*\n?", "", version, flags=re.MULTILINE)
        assert not entries.strip("\n"), "an entry begins with '- ', and goes on indented"

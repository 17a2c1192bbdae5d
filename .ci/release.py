"""Prepare a checkout to be released: python .ci/release.py https://github.com/OWNER/NAME v1.2.3

The tag has to be the version in numbsparse/__init__.py, and CHANGELOG.md to have its entries. The
repository's address, which no file holds, is written into README.md, whose links and images the
package index cannot follow otherwise, and into pyproject.toml as the project's URLs.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\(|\bsrc=\")(?!\w+:|#)([^)\"\s]+)")


def main() -> None:
    repository, tag = sys.argv[1].rstrip("/"), sys.argv[2]
    check(tag, read("numbsparse/__init__.py"), read("CHANGELOG.md"))
    write("README.md", addressed(read("README.md"), repository, tag))
    write("pyproject.toml", with_urls(read("pyproject.toml"), repository, tag))


def check(tag: str, package: str, changelog: str) -> None:
    """Refuse a tag of another version, or one without entries in the changelog."""
    found = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if found is None or tag != f"v{found[1]}":
        sys.exit(f"{tag} is not the version of numbsparse/__init__.py: {found and found[1]}")
    if not re.search(
        rf"^## \[{re.escape(found[1])}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    ):
        sys.exit(f"CHANGELOG.md has no line '## [{found[1]}] - YYYY-MM-DD'")


def addressed(text: str, repository: str, tag: str) -> str:
    """Markdown whose relative links and images lead to the repository, at that tag."""

    def absolute(link: re.Match[str]) -> str:
        picture = link[1].startswith("src") or link[2].endswith((".png", ".svg"))
        kind = "raw" if picture else "tree" if link[2].endswith("/") else "blob"
        return f"{link[1]}{repository}/{kind}/{tag}/{link[2]}"

    return LINK.sub(absolute, text)


def with_urls(project: str, repository: str, tag: str) -> str:
    """pyproject.toml with the project's URLs, before its next table."""
    owner, name = repository.rsplit("/", 2)[1:]
    urls = {
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
    table = "".join(f'{title} = "{address}"\n' for title, address in urls.items())
    before, following = "[project.urls]\n" + table + "\n", "[project.optional-dependencies]\n"
    if project.count(following) != 1 or "[project.urls]" in project:
        sys.exit("pyproject.toml takes one table of optional dependencies, and no URLs yet")
    return project.replace(following, before + following)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def write(name: str, text: str) -> None:
    (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

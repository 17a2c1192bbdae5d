"""Build the site from the repository's own pages, docstrings and programs.

    pip install -e '.[docs]'
    python .site/make.py

Pages are written to build/site/pages, at the same paths as in the repository, so that links stay as
they are; Sphinx makes build/site/html of them. No network is needed. A warning of Sphinx, a link or
an anchor that leads nowhere, and anything that a page would load from another site ends it with an
error.
"""

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from contents import COURSE, EXPLAINED, GUIDES, LADDER, LESSONS, PAGES, PROGRAMS, REFERENCE

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
SOURCE, HTML = SITE / "pages", SITE / "html"
FENCED = re.compile(r"(^```.*?^```\n)", re.MULTILINE | re.DOTALL)
ORPHAN = "---\norphan: true\n---\n\n"  # a page that no menu has
# Lessons show files of 100 columns, in place of a page's own contents.
WIDE = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n"
LINK = re.compile(r"(\]\(|src=\"|href=\")([^)\s\"#]*)(#[^)\s\"]*)?(?=[)\"])")


def main() -> None:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before the kernels are imported: no GPU is needed
    shutil.rmtree(SITE, ignore_errors=True)
    pages = Pages()
    pages.write_all()
    here = Path(__file__).parent
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", here, SOURCE, HTML]
    subprocess.run(command, check=True)
    wrong = sorted(set(faults(HTML)))
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(list(HTML.rglob('*.html')))} pages in {HTML}")


class Pages:
    """The pages to write; programs and folders that a page links to become pages as well."""

    def __init__(self) -> None:
        self.linked: list[Path] = []  # files and folders of the repository, to be shown
        text = (ROOT / LESSONS).read_text(encoding="utf-8")
        self.lessons = lessons(text)
        self.lesson_of = {slug(title): page_of(name) for name, title, _ in self.lessons}

    def write_all(self) -> None:
        reference = [write_task(*task) for task in REFERENCE]
        write("reference/index.md", f"# API reference\n\n{reference_table()}\n{toctree(reference)}")
        titles = {page_of(path): title for path, title in PAGES.items()}
        menu = list(titles)
        menu.insert(2, "reference/index.md")
        under = {
            "README.md": toctree(menu, titles),
            "examples/README.md": toctree([*map(page_of, GUIDES)], caption="Guides")
            + toctree([*map(page_of, PROGRAMS)], caption="Programs"),
        }
        for path in ("README.md", *PAGES, *GUIDES):
            if path != LESSONS:
                text = (ROOT / path).read_text(encoding="utf-8")
                self.write_page(path, text + under.get(path, ""))
        for name, title, text in self.lessons:
            step = f"{Path(LADDER).name}/{rung_of(title, text)}.py"
            more = listing_of_step(name, step) if title.startswith("Step ") else ""
            more += tried(name, rung_of(title, text))
            self.write_page(name, WIDE + text + more + toctree(self.below(name)))
        for path in (*COURSE, *PROGRAMS):
            self.link(ROOT / path)
        for path in self.linked:  # grows on the way
            self.write_linked(path)

    def below(self, lesson: str) -> list[str]:
        """The course begins with programs; the parts of the lessons have those that follow them."""
        names = [name for name, *_ in self.lessons]
        parts = [names.index(name) for name, title, _ in self.lessons if title.startswith("Part ")]
        if lesson == LESSONS:
            chosen = [*COURSE, *names[1 : parts[0]], *(names[i] for i in parts)]
        elif names.index(lesson) in parts:
            ends = [*parts[1:], len(names)]
            first = names.index(lesson)
            chosen = names[first + 1 : ends[parts.index(first)]]
        else:
            chosen = []
        return [page_of(name) for name in chosen]

    def link(self, path: Path) -> None:
        if path not in self.linked:
            self.linked.append(path)

    def write_page(self, path: str, text: str) -> None:
        """A page of the repository, its links led to pages of the site."""
        parts = FENCED.split(text)
        parts[::2] = [LINK.sub(lambda link: self.led(link, path), part) for part in parts[::2]]
        write(page_of(path), "".join(parts))

    def led(self, link: re.Match[str], path: str) -> str:
        before, target, anchor = link[1], link[2], link[3] or ""
        if re.match(r"\w+:", target):
            return link[0]
        goal = (ROOT / path).parent / target if target else ROOT / path
        goal = Path(os.path.normpath(goal))
        name = goal.relative_to(ROOT).as_posix()
        in_lessons = name == LESSONS or (not target and path.startswith(os.path.dirname(LESSONS)))
        if in_lessons and anchor[1:] in self.lesson_of:
            return before + beside(page_of(path), self.lesson_of[anchor[1:]])
        if not target:
            return link[0]
        if goal.suffix == ".svg":
            return link[0]  # a trace, which is made beside its page
        if goal.suffix == ".png":
            picture = SOURCE / name
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(goal, picture)
            return before + beside(page_of(path), name)
        if name not in ("README.md", *PAGES, *GUIDES):
            self.link(goal)
        return before + beside(page_of(path), page_of(name)) + anchor

    def write_linked(self, path: Path) -> None:
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix == ".py")
            lines = "".join(f"- [{file.name}]({file.name})\n" for file in files)
            self.write_page(f"{name}/README.md", f"{ORPHAN}# {name}/\n\n{lines}")
            return
        if path.suffix == ".md":
            self.write_page(name, ORPHAN + path.read_text(encoding="utf-8"))
            return
        title, said, first = path.name, "", 1
        language = "python" if path.suffix == ".py" else path.suffix[1:] or "text"
        if name.startswith("examples/") and language == "python":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            said, first = ast.get_docstring(tree) or "", (tree.body[0].end_lineno or 0) + 2
        if name in COURSE:
            title, _, said = said.partition(".\n")
        orphan = "" if name in (*COURSE, *PROGRAMS) else ORPHAN
        code = included(name, name, language, f":lines: {first}-", ":lineno-match:")
        write(page_of(name), f"{orphan}# {title}\n\n{said}\n\n{code}")


def write(page: str, text: str) -> None:
    path = SOURCE / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def page_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith(".github/"):
        path = path.removeprefix(".github/")
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    folder, name = os.path.split(path)
    if name == "README.md":
        name = "index.md"
    return os.path.join(folder, name if name.endswith(".md") else f"{name}.md")


def beside(page: str, other: str) -> str:
    """How a page links to another."""
    return os.path.relpath(other, os.path.dirname(page))


def toctree(pages: list[str], titles: dict[str, str] | None = None, caption: str = "") -> str:
    """The pages below one, for the menu."""
    if not pages:
        return ""
    named = titles or {}
    lines = (f"{named[page]} </{page}>" if page in named else f"/{page}" for page in pages)
    named_so = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{named_so}\n" + "\n".join(lines) + "\n```\n"


def included(page: str, file: str, language: str, *options: str) -> str:
    path = os.path.relpath(ROOT / file, (SOURCE / page_of(page)).parent)
    lines = "".join(f"{option}\n" for option in options)
    return f"```{{literalinclude}} {path}\n:language: {language}\n{lines}```\n"


def lessons(text: str) -> list[tuple[str, str, str]]:
    """(file, title, text) of each lesson; the first is the page that the others stand below."""
    prose = FENCED.sub(lambda code: " " * len(code[0]), text)
    headings = list(re.finditer(r"^##? (.*)\n", prose, re.MULTILINE))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    folder, found = os.path.dirname(LESSONS), []
    for heading, end in zip(headings, ends, strict=True):
        name = f"{folder}/{slug(heading[1])}.md" if found else LESSONS
        body = text[heading.end() : end]
        found.append((name, heading[1], f"# {heading[1]}\n{body}"))
    return found


def slug(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def listing_of_step(page: str, file: str) -> str:
    """A step of the taught ladder, and what it changes in the code of the step before."""
    path = ROOT / os.path.dirname(page) / file
    text = f"\n## The file\n\n{included(page, path.relative_to(ROOT).as_posix(), 'python')}"
    steps = sorted(path.parent.glob("s[0-9]*.py"))
    for before in steps[: steps.index(path)][-1:]:
        both = (code_of(before), code_of(path))
        new = "".join(unified_diff(*both, before.name, path.name))
        text += f"\n## What is new since {before.name}\n\n```diff\n{new}```\n"
    return text


def rung_of(title: str, text: str) -> str:
    """The step or rung of a lesson, "" without one."""
    if title.startswith("Step "):
        return re.findall(rf"{Path(LADDER).name}/(s\w+)\.py", text)[0]
    found = re.match(r"(k[1-9]\w+): ", title)
    return found[1] if found else ""


def tried(page: str, rung: str) -> str:
    """A lesson's trace and its notebook, both beside its page."""
    if not rung:
        return ""
    notebook = importlib.import_module("numbsparse.pages.notebook")
    trace = importlib.import_module("numbsparse.pages.trace")
    folder = os.path.dirname(page)
    write(f"{folder}/{rung}.ipynb", notebook.text_of(rung))
    write(f"{folder}/{rung}.svg", trace.trace_of(rung, trace.problem_of(rung)).svg())
    made = f"python -m numbsparse trace {rung}"
    return (
        f"\n## Its trace, and its notebook\n\nOf a small product in the simulator, by `{made}`."
        f"\n\n![Trace of {rung}]({rung}.svg)\n\n{{download}}`{rung}.ipynb` has this lesson as a "
        "notebook, with the code in cells to be changed.\n"
    )


def code_of(path: Path) -> list[str]:
    """A module's lines after its docstring."""
    text = path.read_text(encoding="utf-8")
    return text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno or 0 :]


def write_task(task: str, said: str, names: dict[str, str]) -> str:
    """A page for each name, and one of all with a line for each."""
    everyone = [f"{module}.{name}" for module, some in names.items() for name in some.split()]
    for name in everyone:
        module, _, last = name.rpartition(".")
        value = getattr(importlib.import_module(module), last)
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        members = "   :members:\n" if inspect.isclass(value) else ""
        body = f".. currentmodule:: {module}\n\n.. {kind}:: {name}\n{members}"
        write(f"reference/{name}.rst", f"{name}\n{'=' * len(name)}\n\n{body}")
    summary = "".join(f"   ~{name}\n" for name in everyone)
    page = f"reference/{slug(task)}.md"
    told = "".join(f".. automodule:: {module}\n\n" for module in names if module in EXPLAINED)
    told += ".. currentmodule:: None\n\n" if told else ""
    listed = f"```{{eval-rst}}\n{told}.. autosummary::\n\n{summary}```\n"
    titles = {f"reference/{name}.rst": name.rpartition(".")[2] for name in everyone}
    entries = toctree(list(titles), titles)
    write(page, f"# {task}\n\n{said}\n\n{listed}{entries}")
    return page


def reference_table() -> str:
    lines = [f"| [{task}]({slug(task)}.md) | {said} |\n" for task, said, _ in REFERENCE]
    return f"| task | about |\n| --- | --- |\n{''.join(lines)}"


def faults(folder: Path) -> Iterator[str]:
    """Links and anchors that lead nowhere, and what would be loaded from another site."""
    found = (path for path in folder.rglob("*.html") if "_static" not in path.parts)
    pages = {path: Links(path) for path in found}
    for path, page in pages.items():
        name = path.relative_to(folder)
        for target in page.loaded:
            if urlsplit(target).netloc:
                yield f"{name} loads {target}"
        for target in (*page.links, *page.loaded):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            goal = path.parent / unquote(parts.path) if parts.path else path
            goal = Path(os.path.normpath(goal))
            goal = goal / "index.html" if goal.is_dir() else goal
            anchor = unquote(parts.fragment)
            if not goal.exists():
                yield f"{name} links to {target}, which is not there"
            elif anchor and goal in pages and anchor not in pages[goal].anchors:
                yield f"{name} links to {target}, where there is no such anchor"


class Links(HTMLParser):
    """A page's links, what it loads, and what it can be linked to at."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and "href" in given:
            self.loaded.append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


if __name__ == "__main__":
    main()

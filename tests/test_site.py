"""The site has every public name, page, lesson and program, and finds its dead links."""

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest
from test_docstrings import NAMES

from numbsparse import device
from numbsparse.kernels.ladder import NAMES as STEPS
from numbsparse.pages.notebook import text_of
from numbsparse.pages.trace import RUNGS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    """`.site/make.py`, which imports the standard library alone."""
    sys.path.insert(0, str(ROOT / ".site"))
    yield import_module("make")
    sys.path.remove(str(ROOT / ".site"))


def named(path):
    return path.relative_to(ROOT).as_posix()


def test_the_reference_has_every_public_name_once(site):
    listed = [
        getattr(import_module(module), name)
        for _, _, names in site.REFERENCE
        for module, some in names.items()
        for name in some.split()
        if module not in ("numbsparse.torch", "numbsparse.jax")
    ]
    assert len({id(value) for value in listed}) == len(listed)
    missing = [name for name, value in NAMES.items() if not any(value is one for one in listed)]
    assert not missing
    assert {id(value) for value in listed} == {id(value) for value in NAMES.values()}


@pytest.mark.parametrize("room", ["torch", "jax"])
def test_the_reference_has_every_name_for_other_libraries(site, room):
    """As the file says, because the library may be missing."""
    module = f"numbsparse.{room}"
    (listed,) = [names[module] for *_, names in site.REFERENCE if module in names]
    tree = ast.parse((ROOT / "numbsparse" / room / "__init__.py").read_text(encoding="utf-8"))
    assert sorted(listed.split()) == sorted(ast.literal_eval(tree.body[-1].value))


def test_the_menu_has_every_page(site):
    folders = ".", ".github", "examples", "examples/guides", "numbsparse"
    found = {named(page) for folder in folders for page in (ROOT / folder).glob("*.md")}
    assert {*site.PAGES, *site.GUIDES, "README.md"} == found | {site.LESSONS}
    programs = {named(path) for path in (ROOT / "examples").glob("[0-9]*.py")}
    assert sorted(programs) == site.COURSE
    shown = (ROOT / "examples" / "README.md").read_text(encoding="utf-8").partition("## Programs")
    assert all(f"]({Path(program).name})" in shown[2] for program in site.PROGRAMS)
    run = {
        named(path)
        for path in (ROOT / "examples").glob("*.py")
        if f"python examples/{path.name}" in path.read_text(encoding="utf-8").partition('"""\n')[0]
    }
    assert run <= set(site.PROGRAMS)


def test_every_heading_of_the_lessons_is_a_page_and_every_step_has_its_file(site):
    text = (ROOT / site.LESSONS).read_text(encoding="utf-8")
    pages = site.lessons(text)
    assert "".join(page[2].partition("\n")[2] for page in pages).count("\n") >= 1000
    assert len({name for name, *_ in pages}) == len(pages)
    steps = [text for _, title, text in pages if title.startswith("Step ")]
    assert len(steps) == len(STEPS)
    assert all(f"(ladder/{name}.py)" in text for name, text in zip(STEPS, steps, strict=True))
    everything = [name for lesson in pages for name in site.Pages().below(lesson[0])]
    assert sorted(everything) == sorted(
        site.page_of(name) for name in (*site.COURSE, *(page[0] for page in pages[1:]))
    )


def test_a_step_shows_its_file_and_what_is_new_in_its_code(site):
    folder = "numbsparse/kernels"
    first = site.listing_of_step(f"{folder}/step-1.md", f"ladder/{STEPS[0]}.py")
    assert f"kernels/ladder/{STEPS[0]}.py\n" in first
    assert "What is new" not in first
    shown = site.listing_of_step(f"{folder}/step-3.md", "ladder/s03_shared.py")
    file, new = shown.split("## What is new since s02_constants.py")
    assert "kernels/ladder/s03_shared.py\n" in file
    assert "\n+        xs = cuda.shared.array((BM, BK), float32)" in new
    assert "The limit" not in new
    assert str(ROOT) not in shown


def test_a_lesson_has_its_trace_and_its_notebook(site, monkeypatch, tmp_path):
    pages = site.lessons((ROOT / site.LESSONS).read_text(encoding="utf-8"))
    found = [rung for _, title, text in pages if (rung := site.rung_of(title, text))]
    assert found == [*STEPS, *RUNGS]
    monkeypatch.setattr(site, "SOURCE", tmp_path)
    assert site.tried("kernels/words.md", "") == ""
    if device.SIMULATED:
        shown = site.tried("kernels/step-10-wgmma.md", "s10_wgmma")
        assert (tmp_path / "kernels" / "s10_wgmma.svg").read_text().startswith("<svg")
        assert (tmp_path / "kernels" / "s10_wgmma.ipynb").read_text() == text_of("s10_wgmma")
        assert "](s10_wgmma.svg)" in shown
        assert "{download}`s10_wgmma.ipynb`" in shown


def test_linked_files_that_are_no_programs_are_pages(site, monkeypatch, tmp_path):
    monkeypatch.setattr(site, "SOURCE", tmp_path)
    pages, folder = site.Pages(), tmp_path / "examples" / "results"
    text = "[a](results/README.md) [b](results/mixture_of_experts.json)"
    pages.write_page("examples/README.md", text)
    for path in pages.linked:
        pages.write_linked(path)
    shown = (folder / "mixture_of_experts.json.md").read_text("utf-8")
    assert ":language: json\n:lines: 1-\n" in shown
    assert (folder / "index.md").read_text("utf-8").startswith(site.ORPHAN + "# ")


def test_links_are_led_to_pages(site):
    pages = site.Pages()
    page = "examples/guides/pruning.md"

    def led(text):
        return site.LINK.sub(lambda link: pages.led(link, page), text)

    assert led("[a](../08_dense_to_sparse.py)") == "[a](../08_dense_to_sparse.py.md)"
    assert pages.linked == [ROOT / "examples" / "08_dense_to_sparse.py"]
    assert led("[a](../README.md#programs)") == "[a](../index.md#programs)"
    assert led("[a](https://numpy.org)") == "[a](https://numpy.org)"
    assert led("[a](../../.github/SUPPORT.md)") == "[a](../../SUPPORT.md)"
    lesson = "[a](../../numbsparse/kernels/README.md#step-10-wgmma)"
    assert led(lesson) == "[a](../../numbsparse/kernels/step-10-wgmma.md)"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('<a href="two.html#here">', ""),
        ('<a href="#top">', ""),
        ('<a href="https://numpy.org">', ""),
        ('<a href="three.html">', "links to three.html, which is not there"),
        ('<a href="two.html#there">', "links to two.html#there, where there is no such anchor"),
        ('<img src="one.png">', "links to one.png, which is not there"),
        ('<script src="https://cdn.example/x.js">', "loads https://cdn.example/x.js"),
        ('<link href="//fonts.example/x.css">', "loads //fonts.example/x.css"),
    ],
)
def test_dead_links_and_foreign_scripts_are_found(site, tmp_path, body, says):
    (tmp_path / "one.html").write_text(f'<p id="top">{body}', encoding="utf-8")
    (tmp_path / "two.html").write_text('<p id="here">', encoding="utf-8")
    expected = [f"one.html {says}"] if says else []
    assert list(site.faults(tmp_path)) == expected

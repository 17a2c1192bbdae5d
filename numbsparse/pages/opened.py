"""How many files and lines of the library a reader opens for one product of a rung.

From the rung's `forward` on, the names that it uses are followed to where they are defined, file by
file: through functions, within the package of the rungs and, counted apart, in `kernels/parts`,
which several kernels share. `kernels/ptx` and the small files beside it are not followed.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE, PARTS = "numbsparse.kernels.matmul", "numbsparse.kernels.parts"


class Opened(NamedTuple):
    """What a reader opens: files of the rung, files and lines opened for a forward product."""

    own: int
    files: int
    lines: int
    with_parts: int  # lines, those of the parts too


class Module(NamedTuple):
    """A file by its top-level names: what defines each, and which come from elsewhere."""

    path: Path
    defined: dict[str, ast.AST]
    imported: dict[str, tuple[str, str | None]]  # (module, name there; None: the module itself)


def opened_for(name: str) -> Opened:
    """Of a rung, in all its dtypes and orders."""
    every = files_for(f"{PACKAGE}.{name}")
    opened = {path for path in every if path.parent.name != "parts"}
    folder = ROOT / "kernels" / "matmul" / name
    own = sum(1 for _ in folder.rglob("*.py")) if folder.is_dir() else 1
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in every}
    return Opened(own, len(opened), sum(map(lines.__getitem__, opened)), sum(lines.values()))


def files_for(module: str) -> set[Path]:
    """The files in which its `forward` is, and all that this uses, within these packages."""
    seen: set[tuple[str, str]] = set()
    opened, left = set(), [(module, "forward")]
    while left:
        place = left.pop()
        if place in seen or (found := parsed(place[0])) is None:
            continue
        seen.add(place)
        node = found.defined.get(place[1])
        if node is None:
            if place[1] in found.imported:  # handed on from elsewhere
                there, original = found.imported[place[1]]
                left.append((there, original or place[1]))
            continue
        opened.add(found.path)
        left += uses(node, place[0], found)
    return opened


def uses(node: ast.AST, module: str, found: Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what a definition names: of its own file, of others, parts of those."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in found.defined:
            yield module, part.id
        elif isinstance(part, ast.Name) and part.id in found.imported:
            there, name = found.imported[part.id]
            if name is not None:
                yield there, name
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            there, name = found.imported.get(part.value.id, ("", ""))
            if name is None:
                yield there, part.attr


@cache
def parsed(module: str) -> Module | None:
    """A module of these packages; None for any other."""
    path = _path_of(module) if module.startswith((PACKAGE, PARTS)) else None
    if path is None:
        return None
    defined: dict[str, ast.AST] = {}
    imported: dict[str, tuple[str, str | None]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                place = (inner, None) if _path_of(inner) else (node.module, alias.name)
                imported[alias.asname or alias.name] = place
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            defined |= dict.fromkeys(names, node)
    return Module(path, defined, imported)


def _path_of(module: str) -> Path | None:
    """The file of one of the library's modules."""
    path = ROOT.parent.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file() and module.startswith("numbsparse"):
            return file
    return None

"""Which rung was fastest on this card, as far as it was measured: see `numbsparse.tune`.

One JSON file a card, in the cache folder. It holds for the library that wrote it: another one, or
a file that cannot be read, is as if nothing was measured.
"""

import hashlib
import json
import re
from contextlib import suppress
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

from numbsparse.device import card, source_text
from numbsparse.device.fingerprint import Unknown
from numbsparse.files import cache_folder, write_bytes
from numbsparse.layout import Layout


def case(
    product: str,
    block_size: int,
    dtype: Any,
    batch: int,
    precision: str,
    layout: Layout,
    feature_major: bool = False,
) -> str:
    """A product, with its sizes rounded to powers of two: what is near shares the choice."""
    lines, columns = (_rounded(n * block_size) for n in layout.shape)
    blocks = layout.n_blocks  # of one made on a GPU places, whether the blocks are counted or not
    density = _rounded(layout.shape[0] * layout.shape[1] / blocks) if blocks else 0
    return (
        f"{product} {dtype} {precision} B={block_size} batch={_rounded(batch)} "
        f"features={lines}x{columns} density=1/{density}{' feature-major' * feature_major}"
    )


def fastest(case: str) -> str | None:
    """The rung that was measured to be fastest in a case; None where nothing was measured."""
    return _choices().get(case)


def remember(rungs: dict[str, str]) -> None:
    """Keep the fastest rung of each case, for this process and those to come."""
    _choices.cache_clear()
    choices = {**_choices(), **rungs}
    with suppress(OSError, Unknown):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"library": _version(), "card": card(), "fastest": choices}
        write_bytes(file, json.dumps(content, indent=1, sort_keys=True).encode())
    _choices.cache_clear()
    _choices().update(choices)  # where the folder cannot be written, for this process at least


@cache
def _choices() -> dict[str, str]:
    with suppress(Exception):  # absent, damaged, or written by someone else
        content = json.loads(_file().read_text(encoding="utf-8"))
        if content["library"] == _version():
            return {str(case): str(rung) for case, rung in content["fastest"].items()}
    return {}


def _file() -> Path:
    name = re.sub(r"\W+", "_", card())
    return cache_folder() / f"fastest_{name}.json"


@cache
def _version() -> str:
    return hashlib.sha256(repr(source_text()).encode()).hexdigest()


def _rounded(n: float) -> int:
    return 2 ** round(log2(n)) if n else 0

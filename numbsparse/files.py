"""Files that are written whole or not at all."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE, S_ISREG
from tempfile import TemporaryFile
from textwrap import indent
from types import ModuleType
from typing import Any, BinaryIO

# A name that is taken, by a symbolic link too, is refused.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def module_of(file: Path, name: str) -> ModuleType:
    """A Python file as a module of that name; ValueError where it is none."""
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError("takes a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_bytes(path: Any, data: bytes) -> None:
    """`write_whole` of what is at hand."""
    write_whole(path, lambda file: file.write(data))


def write_whole(path: Any, write: Callable[[BinaryIO], Any]) -> None:
    """Have `write` fill a file; a failure or a kill leaves the file of before.

    An existing file keeps its permissions, a new one has those of the umask; a symbolic link stays
    one, to the new file. What is no file, such as /dev/null, is written to as it is. Raises
    OSError, which names the path, where it cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as device:
            write(device)
        return
    target = Path(os.path.realpath(path))
    # A name of its own, for threads and processes that write one path at the same time.
    temporary, mode = target.with_name(f".{target.name}.{token_hex(8)}"), _mode(target)
    try:
        # Until it is written, no one sees more of it than of what stood there.
        descriptor = os.open(temporary, _NEW, 0o666 if mode is None else mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                with suppress(OSError, AttributeError):  # file systems and Windows without modes
                    os.fchmod(descriptor, mode)
            write(file)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except Exception as error:
        # Of a full disk zipfile says that its file is open still, and nobody names the file.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Any) -> None:
    """Raise what `write_whole` would where it cannot begin; nothing is left there."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():
            TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def known_as(what: str, path: Any) -> Iterator[None]:
    """Whatever is wrong in the block under `with` is the file's fault: ValueError, which says it.

    `what` is what the file is not.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # NumPy and others have a dozen kinds for what is damaged
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"{path} is not a {what}: {error}") from error


def write_json(path: Any, content: Any, depth: int) -> None:
    """A file of JSON, written whole: a line for each item, and for theirs, down to `depth`.

    So a change of one row is a change of one line. Numbers keep the five digits that a measurement
    has at most; sizes stay as they are.
    """
    write_bytes(path, f"{_lines(_rounded(content), depth)}\n".encode())


def _lines(value: Any, depth: int) -> str:
    if depth == 0 or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        items = [_lines(item, depth - 1) for item in value]
    else:
        items = [f"{json.dumps(key)}: {_lines(item, depth - 1)}" for key, item in value.items()]
    (begin, end), body = "[]" if isinstance(value, list) else "{}", ",\n".join(items)
    return f"{begin}\n{indent(body, ' ')}\n{end}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _mode(path: Path) -> int | None:
    """The permissions of a file; None where there is none."""
    with suppress(OSError):
        stat = path.lstat()
        if S_ISREG(stat.st_mode):
            return S_IMODE(stat.st_mode) & 0o777
    return None


def cache_folder() -> Path:
    """Where what can be made again is kept: NUMBSPARSE_CACHE_DIR, else the user's cache folder.

    Raises OSError where the user has none.
    """
    if own := os.environ.get("NUMBSPARSE_CACHE_DIR"):
        return Path(own)
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    return Path(base) / "numbsparse"

"""Whether the tape records, what it notes, and which gradient is being computed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from contextvars import ContextVar, Token
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from numbsparse.autograd.tensor import Tensor

T = TypeVar("T")
Vjp = Callable[["Tensor", "Tensor"], "Tensor"]
LATER = (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)

# Whether operations are recorded; the result and the vjp at work; what `noting` gathers.
RECORDING: ContextVar[bool] = ContextVar("numbsparse_recording", default=True)
AT_WORK: "ContextVar[tuple[Tensor, Vjp] | None]" = ContextVar("numbsparse_at_work", default=None)
NOTED: "ContextVar[dict[int, Tensor] | None]" = ContextVar("numbsparse_noted", default=None)


def is_recording() -> bool:
    """Whether operations are written on the tape now."""
    return RECORDING.get()


def no_grad() -> "_set[bool]":
    """Within this context nothing is remembered: for evaluation, and for updating weights.

    >>> import numbsparse as ns
    >>> x = ns.Tensor([1.0], requires_grad=True)
    >>> with ns.no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """
    return _set(RECORDING, False)


@contextmanager
def noting() -> "Iterator[dict[int, Tensor]]":
    """As `no_grad`, but the tensors with gradients that operations take are noted, by their ids."""
    noted: dict[int, Tensor] = {}
    with no_grad(), _set(NOTED, noted):
        yield noted


def recording() -> AbstractContextManager[None]:
    """Within this context operations are written on the tape: for a vjp that needs a tape."""
    return set_recording(True)


def unwatched() -> AbstractContextManager[None]:
    """Within this context, in a vjp, tensors are read as they are now."""
    return _set(AT_WORK, None)


def set_recording(value: bool) -> AbstractContextManager[None]:
    """Within this context operations are written on the tape, or not."""
    return _set(RECORDING, value)


class _set(ContextDecorator, Generic[T]):
    """Within this context a variable has that value; again and within itself too."""

    def __init__(self, variable: ContextVar[T], value: T):
        self._what, self._tokens = (variable, value), list[Token[T]]()

    def _recreate_cm(self) -> "_set[T]":
        return _set(*self._what)

    def __call__(self, function: Any) -> Any:
        if any(runs_later(function) for runs_later in LATER):  # when the context is left
            takes = "function takes one that runs when it is called, not a generator or a coroutine"
            raise TypeError(f"{takes}, got {function.__name__}: write `with` around its steps")
        return super().__call__(function)

    def __enter__(self) -> None:
        variable, value = self._what
        self._tokens.append(variable.set(value))

    def __exit__(self, *error: Any) -> None:
        self._what[0].reset(self._tokens.pop())

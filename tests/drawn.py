"""Cases by construction: every two choices meet once, and more cases are drawn.

NUMBSPARSE_DRAWS=n in the environment draws n times as many, NUMBSPARSE_SEED=s others; without them
the cases are the same each time.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import combinations, product
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
from conftest import host
from few_rows_helpers import has_kernel
from hypothesis import HealthCheck, assume, seed, settings
from hypothesis import strategies as st
from numba import from_dtype

from numbsparse import device
from numbsparse.device import DeviceArray
from numbsparse.dtypes import as_array
from numbsparse.kernels.simd import lanes

DRAWS, SEED = (int(os.environ.get(f"NUMBSPARSE_{n}", d)) for n, d in (("DRAWS", 1), ("SEED", 0)))
TRIES = 60  # searches for a case
DEAD_ENDS = 8  # of one search
TESTS = 32  # that share the cases of a place: most are quicker than a test is begun

Case = dict[str, Any]
Meeting = frozenset[tuple[str, Any]]


def draws(usual: int, *name: Any) -> Callable[[Any], Any]:
    """A decorator: hypothesis draws so many cases, those of this name and of the seed."""
    chosen = settings(
        max_examples=usual * DRAWS,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    begun = seed(crc32(repr((SEED, name)).encode()))

    def decorate(test: Any) -> Any:
        # A sixth of the time of a short test goes into a key, of its text, for the database.
        test._hypothesis_internal_database_key = b""
        return begun(chosen(test))

    return decorate


@st.composite
def drawn(draw: Any, factors: dict[str, list], allowed: Callable[[Case], bool]) -> Case:
    """Any allowed case; `allowed` is also asked of cases that are only begun."""
    case: Case = {}
    for name, values in factors.items():
        choices = [value for value in values if allowed({**case, name: value})]
        assume(choices)
        case[name] = draw(st.sampled_from(choices))
    return case


class Space:
    """Cases: a value of each factor, where `allowed` says that there is such a case.

    `allowed` takes a case of some factors too: whether one that goes on like this may be allowed.
    Of any two factors every two values are to meet in a case, and of the factors named in a group
    all their combinations.
    """

    def __init__(
        self,
        factors: dict[str, list],
        allowed: Callable[[Case], bool],
        groups: Sequence[tuple[str, ...]] = (),
    ):
        self.factors, self.allowed, self.groups = factors, allowed, groups

    def meetings(self) -> set[Meeting]:
        """All that could meet."""
        return {
            frozenset(zip(names, values, strict=True))
            for names in [*combinations(self.factors, 2), *self.groups]
            for values in product(*map(self.factors.get, names))
        }

    def meetings_of(self, case: Case) -> set[Meeting]:
        pairs = map(frozenset, combinations(case.items(), 2))
        groups = (frozenset((name, case[name]) for name in names) for names in self.groups)
        return {*pairs, *groups}

    def covering(self) -> list[Case]:
        """Cases with all that any allowed case has."""
        rng = np.random.default_rng(SEED)
        left, cases = Left(self.meetings()), []
        for meeting in sorted(left.meetings, key=lambda meeting: sorted(map(repr, meeting))):
            if meeting not in left.meetings:
                continue
            begun = dict(sorted(meeting))
            if not self.allowed(begun):
                continue
            if case := self.grown(begun, left, rng):
                cases.append(case)
                left.remove(self.meetings_of(case))
        return self.without_repeated(cases)

    def without_repeated(self, cases: list[Case]) -> list[Case]:
        """Of the last ones on, without each of which all meets in another case."""
        times = Counter(meeting for case in cases for meeting in self.meetings_of(case))
        kept = []
        for case in reversed(cases):
            met = self.meetings_of(case)
            if all(times[meeting] > 1 for meeting in met):
                times.subtract(met)
            else:
                kept.append(case)
        return kept[::-1]

    def grown(
        self, begun: Case, left: Left | None, rng: np.random.Generator, more: int = TRIES
    ) -> Case | None:
        """The begun case, each other factor with what meets most of what is left, if any.

        A search that comes to many dead ends begins again, with what had no choice there first.
        In so many `more` searches with what is drawn: `check_left_out` tries harder.
        """
        hard: list[str] = []
        for wanted in (left, left, *[None] * more):  # what meets most may end in no case
            easy = rng.permutation([name for name in self.factors if name not in hard]).tolist()
            names = [name for name in hard + easy if name not in begun]
            ends: list[str] = []
            if case := self._grown(begun, names, wanted, rng, ends):
                return {name: case[name] for name in self.factors}
            if len(ends) < DEAD_ENDS:  # all was tried: there is none
                return None
            hard = list(dict.fromkeys(ends[::-1] + hard))  # the last one first
        return None

    def _grown(
        self, begun: Case, names: list[str], left: Left | None, rng: np.random.Generator,
        ends: list[str],
    ) -> Case | None:  # fmt: skip
        """The begun case with a value of each name; `ends` are those that had no choice so far."""
        if not names:
            return begun
        name, values = names[0], self.factors[names[0]]
        worth = rng.random(len(values))
        if left is not None:
            groups = self._met_by(name, begun)
            worth += [left.met(name, value, begun, groups) for value in values]
        choices = (
            {**begun, name: values[i]} for i in np.argsort(-worth).tolist()
        )  # the best first
        chosen = False
        for case in filter(self.allowed, choices):
            chosen = True
            if found := self._grown(case, names[1:], left, rng, ends):
                return found
            if len(ends) >= DEAD_ENDS:
                return None
        if not chosen:
            ends.append(name)
        return None

    def _met_by(self, name: str, case: Case) -> list[list[tuple[str, Any]]]:
        """What a value of the factor completes a group with, in this case."""
        others = [{*names} - {name} for names in self.groups if name in names]
        return [[(n, case[n]) for n in some] for some in others if some <= case.keys()]


class Left:
    """What is still to meet; of each value also the others, so that many are found at once."""

    def __init__(self, meetings: set[Meeting]):
        self.meetings = meetings
        self.others: dict[Any, set[Any]] = defaultdict(set)
        for one, other in filter(lambda meeting: len(meeting) == 2, meetings):
            self.others[one].add(other)
            self.others[other].add(one)

    def met(self, name: str, value: Any, case: Case, groups: Any) -> int:
        """How much a value meets in a case."""
        whole = sum(frozenset([(name, value), *group]) in self.meetings for group in groups)
        return whole + len(self.others[name, value].intersection(case.items()))

    def remove(self, met: set[Meeting]) -> None:
        for meeting in self.meetings & met:
            for each in meeting if len(meeting) == 2 else ():
                self.others[each] -= meeting
        self.meetings -= met


class Suite:
    """The covering cases of each place, for `check(place, case, number)`.

    They are drawn when the first test takes them: where other tests are looked for nobody waits.
    """

    def __init__(
        self,
        factors_of: Callable[[str], dict[str, list]],
        allowed: Callable[[str, Case], bool],
        check: Callable[[str, Case, int], None],
    ):
        self.allowed, self.check = allowed, check
        self.places = ["cpu", *["cuda"] * device.is_available()]
        self.spaces: dict[str, list[Space]] = {place: [] for place in self.places}
        self.drawn: dict[str, list[tuple[Space, list[Case]]]] = {}
        for place in self.places:
            self.add(place, factors_of(place))

    def add(
        self, place: str, factors: dict[str, list], groups: Sequence[tuple[str, ...]] = ()
    ) -> None:
        """More cases: of few choices, say, so that one mistake does not hide behind another."""
        self.spaces[place].append(Space(factors, partial(self.allowed, place), groups))

    def parts(self, place: str) -> list[tuple[Space, list[Case]]]:
        if place not in self.drawn:
            self.drawn[place] = [(space, space.covering()) for space in self.spaces[place]]
        return self.drawn[place]

    def numbers(self) -> list[tuple[str, int]]:
        """(place, number of the first case) of each test."""
        return [(place, first) for place in self.places for first in range(TESTS)]

    def run(self, place: str, first: int) -> None:
        cases = [case for _, some in self.parts(place) for case in some]
        for number in range(first, len(cases), TESTS):
            print(number, cases[number])  # the last one is the one that fails
            self.check(place, cases[number], number)

    def check_left_out(self, place: str) -> None:
        """That what meets in no case is allowed in none; says how much meets."""
        for space, cases in self.parts(place):
            everything = space.meetings()
            left = everything.difference(*map(space.meetings_of, cases))
            met, n = len(everything) - len(left), len(everything)
            what = "pairs and groups" if space.groups else "pairs"
            print(f"{place}: {len(cases)} cases, {met} of {n} {what}")
            rng = np.random.default_rng(1)
            for meeting in left:
                assert not space.grown(dict(meeting), None, rng, 100), meeting
            for case in cases * 8:  # a part of a case that is allowed is too: so they grow
                part = {name: case[name] for name in case if rng.random() < 0.4}
                assert space.allowed(part), (part, case)


def takes_few(batch: int, values: np.ndarray, *of: Any) -> bool:
    """In place of `few_rows.pays`, which takes nearly all products of tests: so more are packed."""
    return batch <= lanes(from_dtype(values.dtype)) // 2 and has_kernel(batch, values)


def is_compiled(numbers: str, size: int | None, product: str) -> bool:
    """Of the CPU's packed products: large blocks of float64 would be four kernels more, which are
    those of smaller ones but for the length of a loop, and float32 has them."""
    small = numbers != "float64" or size is None or size <= 32
    return small or product == "weight_grad"


ORDERS = {
    # (stride of rows, of columns, first item), in items, of a matrix of r rows and c columns.
    "C": lambda r, c: (c, 1, 0),
    "F": lambda r, c: (1, r, 0),
    "C, gaps": lambda r, c: (c + 3, 1, 0),
    "F, gaps": lambda r, c: (1, r + 3, 0),
    "C, aligned gaps": lambda r, c: (-(-c // 8) * 8 + 8, 1, 0),
    "F, aligned gaps": lambda r, c: (1, -(-r // 8) * 8 + 8, 0),
    "C, offset": lambda r, c: (c, 1, 1),
    "F, offset": lambda r, c: (1, r, 1),
    "every second row": lambda r, c: (2 * c, 1, 0),
    "every second value": lambda r, c: (2 * c, 2, 0),
    "rows reversed": lambda r, c: (-c, 1, max(r - 1, 0) * c),
    "columns reversed": lambda r, c: (c, -1, max(c - 1, 0)),
    "F, both reversed": lambda r, c: (-1, -r, max(r * c - 1, 0)),
    "one row repeated": lambda r, c: (0, 1, 0),
    "one column repeated": lambda r, c: (1, 0, 0),
    "read-only": lambda r, c: (c, 1, 0),
    "unaligned": lambda r, c: (c, 1, 0),
    "field": lambda r, c: (c, 1, 0),
}
"""How a matrix may be stored."""

GUARD = 8  # items after the last one, which nobody may write


def laid(values: np.ndarray, order: str) -> np.ndarray:
    """The matrix in that order, NaN around it; where a line is repeated, the first one's values.

    Of more axes all but the last are the rows; "batch first" has the first two the other way round.
    """
    if order == "batch first":
        return laid(values.swapaxes(0, 1), "C").swapaxes(0, 1)
    *outer, columns = values.shape
    row, column, first = ORDERS[order](prod(outer), columns)
    rows = [row * prod(outer[axis + 1 :]) for axis in range(len(outer))]
    return placed(values, order, [*rows, column], first)


def placed(values: np.ndarray, order: str, steps: Sequence[int], first: int) -> np.ndarray:
    """`laid`, of any number of axes: their steps and the first item, in items.

    As a "field" of a structured array each item has a byte of another field before it.
    """
    last = [max((n - 1) * step, 0) for n, step in zip(values.shape, steps, strict=True)]
    items, shift = first + sum(last) + 1 + GUARD, int(order in ("unaligned", "field"))
    size = values.itemsize + (order == "field")
    memory = np.zeros(items * size + shift, np.uint8)
    np.ndarray(items, values.dtype, memory, shift, (size,))[:] = np.nan
    strides = [n * size for n in steps]
    view = np.ndarray(values.shape, values.dtype, memory, shift + first * size, strides)
    one = tuple(slice(None) if step else slice(1) for step in steps)  # of what is repeated
    view[...] = np.broadcast_to(values[one], values.shape)
    view.flags.writeable = order != "read-only"
    return view


def memory_of(view: np.ndarray) -> np.ndarray:
    """What `laid` made it in: all items, those around it too."""
    return view if view.base is None else memory_of(view.base)


REVERSED = [order for order in ORDERS if "reversed" in order]
IMPOSSIBLE = {  # orders that a library's arrays do not have, or that are refused
    "numpy": [],
    "jax": list(ORDERS)[1:],
    **{
        name: [*REVERSED, "read-only", "unaligned", "field"]
        for name in ("numbsparse", "torch", "cupy", "numba")
    },
}


def libraries(place: str) -> list[str]:
    """Those whose arrays operands can be here."""
    if place == "cpu":
        return ["numpy", *filter(find_spec, ["torch", "jax"])]
    on_gpu = device.is_available() and not device.SIMULATED
    return ["numpy", "numbsparse", *filter(find_spec, ["torch", "jax", "cupy", "numba"] * on_gpu)]


def has_arrays(library: str | None, numbers: str | None) -> bool:
    """Whether a library has arrays of such numbers."""
    return (library, numbers) not in (("jax", "float64"), ("numba", "bfloat16"))


def type_of_result(operand: Any, place: str) -> type:
    """numbsparse's own on a GPU for Numba, which takes no results."""
    theirs = type(operand).__module__.partition(".")[0] != "numba"
    return type(operand) if theirs or place == "cpu" else DeviceArray


class Operand:
    """A matrix in some order, as an array of some library, and the memory around it.

    Of other arrays in a subclass, which has another `lay`.
    """

    lay = staticmethod(laid)

    def __init__(self, values: np.ndarray, order: str, library: str, place: str):
        self.values = self.lay(values, order)
        self.memory = memory_of(self.values)
        self.first = self.values.ctypes.data - self.memory.ctypes.data
        self.now: Callable[[], np.ndarray] = lambda: self.memory
        self.array = getattr(self, f"_{library}")(place)
        self.before = self.now().copy()

    def unchanged(self) -> bool:
        return np.array_equal(self.now(), self.before)

    def only_it_changed(self) -> bool:
        """Whether nothing was written around it."""
        now, before = self.now().copy(), self.before.copy()
        self._in(now)[...] = self._in(before)[...] = 0
        return np.array_equal(now, before)

    def _in(self, memory: np.ndarray) -> np.ndarray:
        view = self.values
        return np.ndarray(view.shape, view.dtype, memory, self.first, view.strides)

    def _numpy(self, place: str) -> Any:
        return self.values

    def _numbsparse(self, place: str) -> Any:
        there, view = device.to_device(self.memory), self.values
        self.now, address = there.numpy, there.address + self.first
        return DeviceArray(address, view.shape, view.dtype, view.strides, there)

    def _numba(self, place: str) -> Any:
        from numba import cuda

        return cuda.as_cuda_array(self._numbsparse(place))

    def _cupy(self, place: str) -> Any:
        import cupy

        array = self._numbsparse(place)
        if array.dtype.name != "bfloat16":
            return cupy.asarray(array)
        return cupy.asarray(array.view(np.uint16)).view(array.dtype)  # its protocol has no name

    def _torch(self, place: str) -> Any:
        import torch

        there, view = torch.from_numpy(self.memory).to(place), self.values
        self.now = lambda: there.cpu().numpy()
        steps = [step // view.itemsize for step in view.strides]
        items = there.view(getattr(torch, str(view.dtype)))
        return torch.as_strided(items, view.shape, steps, self.first // view.itemsize)

    def _jax(self, place: str) -> Any:
        import jax

        kind = "gpu" if place == "cuda" else "cpu"
        return jax.device_put(self.values, jax.devices(kind)[0])


def of_any_bits(rng: np.random.Generator, a: np.ndarray) -> np.ndarray:
    """The array with NaNs of other bits too, as a GPU computes them: rounding may lose such."""
    bits, most = a.view(f"u{a.itemsize}"), (1 << 8 * a.itemsize) - 1
    isnan = np.isnan(a)
    bits[isnan] = rng.choice(np.array([most, most >> 1, *bits[isnan][:1]], bits.dtype), isnan.sum())
    return a


def as_numpy(result: Any) -> np.ndarray:
    """A result of any library."""
    if hasattr(result, "detach"):
        return as_array(result.detach().cpu())
    return host(result.get() if hasattr(result, "get") else result)


def assert_within(got: np.ndarray, right: np.ndarray, bound: np.ndarray) -> None:
    """|got - right| <= bound; infinite and NaN where `right` is."""
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = abs(got - right) <= bound
    fine = np.where(np.isfinite(right), near, (got == right) | (np.isnan(got) & np.isnan(right)))
    if not fine.all():
        first = tuple(int(i) for i in np.argwhere(~fine)[0])
        raise AssertionError(
            f"{(~fine).sum()} of {fine.size} are wrong; at {first} "
            f"{got[first]} where {right[first]} +- {bound[first]} is right"
        )

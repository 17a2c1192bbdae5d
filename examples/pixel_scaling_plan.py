"""Which runs pixel_scaling.py does, in which order, and which learning rates it tries."""

from dataclasses import dataclass
from typing import ClassVar

import runs_plan
from runs_plan import Group


@dataclass(frozen=True, order=True)
class Model:
    """How much deeper and wider than the dense network one with as many parameters is."""

    deeper: float = 1.0
    wider: float = 1.0

    @property
    def name(self) -> str:
        said = [f"deeper {self.deeper:g}"] * (self.deeper != 1)
        said += [f"wider {self.wider:g}"] * (self.wider != 1)
        return " ".join(said) or "dense"


@dataclass(frozen=True, order=True)
class Size:
    """The dense network: features of a stream, residual blocks a stage, size of the layouts."""

    filters: int
    blocks: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.filters}x{self.blocks}"


DENSE, DEEPER, WIDER = Model(), Model(deeper=2.0), Model(wider=2.0)
SMALL, PAPER = Size(64, 2, 16), Size(160, 5, 32)
GROUPS = (
    Group(SMALL, (DENSE, DEEPER), 100_000, halved=True, doubled=True),
    Group(SMALL, (DENSE,), 156_000, halved=True, doubled=True, like=100_000),  # seconds of deeper
    *(Group(PAPER, (model,), 25_600, seeds=1) for model in (DENSE, DEEPER)),
    Group(SMALL, (WIDER,), 100_000, halved=True, doubled=True),
    Group(SMALL, (WIDER,), 137_000, halved=True, doubled=True, like=100_000),  # and of wider
    Group(PAPER, (DEEPER, DENSE), 25_600),
)
SEARCH = {SMALL: 24_000, PAPER: 16_000}  # images that a short run sees


@dataclass(frozen=True)
class Plan(runs_plan.Plan):
    UNIT: ClassVar[str] = "images"
    SHARED: ClassVar[tuple[str, ...]] = ("batch", "mixtures", "average", "dtype", "clip", "data")
    LEAST_RATE: ClassVar[float] = 1.25e-4
    MOST_RATE: ClassVar[float] = 1.6e-2
    PER_SECOND: ClassVar[float] = 250.0

    groups: tuple[Group, ...] = GROUPS
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    seeds: int = 3
    dtype: str = "float16"
    search_images: int = 0  # of every size; 0 for those of SEARCH
    batch: int = 32
    mixtures: int = 10
    average: float = 0.9995
    clip: float = 1.0
    data: str = ""  # hash of the images
    samples: int = 0  # that the first seed's models draw: no result depends on it

    def search_amount(self, group: Group) -> int:
        return self.search_images or SEARCH[group.size]

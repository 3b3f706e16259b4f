"""Bounds of top-k and top-p on the device are those of a sort, bit for bit, however they are found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hybridkv.engine.sampling import device_draw
from hybridkv.engine.sampling.device_draw import PlainParams, find_bounds, pack
from hybridkv.engine.sampling.params import SamplingParams
from tests.devices import DEVICE, ON_GPU, uses_device
from tests.engine.sampling import make_logits

pytest.importorskip("triton")
bound_kernels = pytest.importorskip("hybridkv.engine.sampling.bound_kernels")

pytestmark = uses_device
VOCAB = 151_937 if ON_GPU else 1301
"""Neither a multiple of a part nor of a block."""
KEEPS_ALL = 0x7FFFFFFF

ALL = [
    SamplingParams(top_k=top_k, top_p=top_p, temperature=temperature)
    for top_k, top_p, temperature in [
        (1, 1, 1),
        (40, 1, 1e-3),
        (VOCAB - 1, 1, 1),
        (0, 1e-9, 2),
        (0, 0.5, 0.7),
        (0, 0.999, 1),
        (1, 0.5, 1),
        (20, 0.9, 1.5),
        (VOCAB // 2, 0.9, 3),
    ]
]
FEW = [ALL[2], ALL[4], ALL[7]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(device_draw, "_CHUNK_TOKENS", 512)
        monkeypatch.setattr(device_draw, "_PART_CHUNKS", 2)


def found(logits: Tensor, params: list[SamplingParams]) -> list[int]:
    packed = PlainParams.over(torch.from_numpy(pack(params, [0] * len(params))).to(DEVICE))
    bits: list[int] = find_bounds(logits.to(DEVICE), logits.amax(dim=-1).float().to(DEVICE), packed).tolist()
    return bits


def first_at_least(sums: npt.NDArray[np.int64], target: int) -> int:
    return int((sums < target).sum())


def by_sort(logits: Tensor, params: SamplingParams) -> int:
    """The bound of one row. Of tokens that tie with the last one of top-k, top-p counts as many as make up top-k."""
    values = logits.float().numpy()
    gaps = np.sort((values.max() - values) / np.float32(params.temperature))
    masses = np.cumsum((np.exp(-gaps) * np.float32(2**40)).astype(np.int64))
    last = params.top_k - 1 if 0 < params.top_k < len(gaps) else len(gaps) - 1
    if params.top_p < 1:
        target = math.ceil(float(masses[last]) * float(np.float32(params.top_p)))
        last = min(last, first_at_least(masses, target))
    elif last == len(gaps) - 1:
        return KEEPS_ALL
    return int(gaps.view(np.int32)[last])


def equal(num_rows: int) -> Tensor:
    return torch.full((num_rows, VOCAB), 3.5)


def banned(num_rows: int) -> Tensor:
    logits = torch.full((num_rows, VOCAB), -math.inf)
    logits[:, -30:] = make_logits(num_rows, 30)
    return logits


KINDS = {
    "random": lambda rows: make_logits(rows, VOCAB),
    "peaked": lambda rows: make_logits(rows, VOCAB).pow(3),
    "narrow": lambda rows: make_logits(rows, VOCAB, spread=1e-4),
    "wide": lambda rows: make_logits(rows, VOCAB, spread=1e4),
    "tied": lambda rows: make_logits(rows, VOCAB).round(),
    "bfloat16": lambda rows: make_logits(rows, VOCAB).bfloat16(),
    "equal": equal,
    "banned": banned,
}


@pytest.mark.skipif(ON_GPU, reason="its exponential function is another")
@pytest.mark.parametrize("num_candidates", [16, 256, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_are_those_of_a_sort(monkeypatch: pytest.MonkeyPatch, kind: str, num_candidates: int) -> None:
    monkeypatch.setattr(device_draw, "_CANDIDATES", num_candidates)
    params = ALL if (kind, num_candidates) in (("random", 256), ("tied", 16)) else FEW
    logits = KINDS[kind](len(params))
    assert found(logits, params) == [by_sort(logits[n], params[n]) for n in range(len(params))]


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["random", "tied"])
@pytest.mark.parametrize(("passes", "thresholds"), [(1, 8), (2, 4), (3, 16)])
def test_how_a_row_is_narrowed_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, kind: str, passes: int, thresholds: int
) -> None:
    params = ALL if ON_GPU else FEW
    logits = KINDS[kind](len(params))
    expected = found(logits, params)
    monkeypatch.setattr(device_draw, "_NARROW_PASSES", passes)
    monkeypatch.setattr(device_draw, "_THRESHOLDS", thresholds)
    monkeypatch.setattr(device_draw, "_CANDIDATES", 64)
    assert found(logits, params) == expected


@pytest.mark.parametrize("vocab", [2, 511, 512, 513, 1024, 1025])
def test_vocabularies_beside_the_size_of_a_part(vocab: int) -> None:
    logits = make_logits(2, vocab)
    kept = [
        -(logits[n] - logits[n].max()) <= bound for n, bound in enumerate(gaps(found(logits, [top(1), top(0.999)])))
    ]
    assert int(kept[0].sum()) == 1
    assert bool(kept[1][logits[1].argmax()])


def top(value: float) -> SamplingParams:
    """Top-k for a whole number, otherwise top-p."""
    return SamplingParams(top_k=value) if isinstance(value, int) else SamplingParams(top_p=value)


def gaps(bits: list[int]) -> list[float]:
    floats: list[float] = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist()
    return floats


def test_rows_without_filters_keep_all() -> None:
    logits = make_logits(3, VOCAB)
    params = [SamplingParams(), SamplingParams(temperature=0, top_k=3), SamplingParams(top_k=VOCAB)]
    assert found(logits, params) == [KEEPS_ALL] * 3


class Spoiling:
    """Stands for `bound_kernel`: it gets rows of NaN, so that only the candidates tell it something."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda logits, *args, **kwargs: self.kernel[grid](logits * math.nan, *args, **kwargs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_only_rows_with_many_candidates_are_bisected_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [top(9), top(0.9), SamplingParams(top_k=30, top_p=0.8), top(VOCAB // 2)]
    monkeypatch.setattr(device_draw, "_CANDIDATES", 64 if not ON_GPU else 4096)
    logits = make_logits(4, VOCAB)
    logits[3] = logits[3].round()
    expected = found(logits, params)
    monkeypatch.setattr(bound_kernels, "bound_kernel", Spoiling(bound_kernels.bound_kernel))
    same = [one == other for one, other in zip(found(logits, params), expected, strict=True)]
    assert same == [True, True, True, False]

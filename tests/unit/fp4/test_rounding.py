"""E2M1, E4M3 and UE8M0 rounding, checked against brute force and against torch's own types."""

import itertools
import math

import pytest
import torch

from glm5_plugins.fp4 import reference

GRID = reference.E2M1_VALUES
MIDPOINTS = [(low + high) / 2 for low, high in itertools.pairwise(GRID)]


def nearest_even(value: float) -> int:
    """The code of the nearest magnitude by exhaustive search; a tie goes to the even code."""
    distances = [(abs(abs(value) - magnitude), code % 2, code) for code, magnitude in enumerate(GRID)]
    return min(distances)[2] + (8 if math.copysign(1.0, value) < 0 else 0)


def neighbours(value: float) -> list[float]:
    point = torch.tensor(value)
    return [
        torch.nextafter(point, torch.tensor(-math.inf)).item(),
        value,
        torch.nextafter(point, torch.tensor(math.inf)).item(),
    ]


def test_every_midpoint_and_its_neighbours_round_to_nearest_even():
    points = [point for value in (*GRID, *MIDPOINTS) for point in neighbours(value)]
    points += [-point for point in points]
    codes = reference.round_to_e2m1(torch.tensor(points))
    assert codes.tolist() == [nearest_even(point) for point in points]


def test_random_values_round_to_nearest_even():
    points = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3
    assert reference.round_to_e2m1(points).tolist() == [nearest_even(point) for point in points.tolist()]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (7.0, 7),
        (1e30, 7),
        (-1e30, 15),
        (math.inf, 7),
        (-math.inf, 15),
        (math.nan, 7),
        (0.0, 0),
        (-0.0, 8),
        (-0.2, 8),
    ],
)
def test_edges_of_e2m1(value, code):
    assert reference.round_to_e2m1(torch.tensor([value])).tolist() == [code]


def test_e4m3_agrees_with_torch_for_every_value_between_neighbours():
    exact = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    between = torch.cat([exact, (exact[1:] + exact[:-1]) / 2])
    below = torch.nextafter(between, torch.zeros(()))
    above = torch.nextafter(between, torch.full((), 448.0))
    values = torch.cat([between, below, above])
    rounded = reference.round_to_e4m3(values)
    assert torch.equal(reference.e4m3_bytes(rounded), values.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(rounded, values.to(torch.float8_e4m3fn).to(torch.float32))


@pytest.mark.parametrize(
    ("value", "byte"),
    [(449.0, 0x7E), (1e6, 0x7E), (math.inf, 0x7E), (math.nan, 0x7F), (0.0, 0), (2.0**-11, 0)],
)
def test_e4m3_saturates_and_keeps_nan(value, byte):
    assert reference.e4m3_bytes(reference.round_to_e4m3(torch.tensor([value]))).tolist() == [byte]


def test_ue8m0_is_the_smallest_power_of_two_that_is_not_less():
    exponents = torch.arange(-126, 127)
    powers = torch.ldexp(torch.ones(253), exponents)
    assert torch.equal(reference.ue8m0_bytes(powers), (exponents + 127).to(torch.uint8))
    assert torch.equal(powers.to(torch.float8_e8m0fnu).view(torch.uint8), reference.ue8m0_bytes(powers))
    above = torch.nextafter(powers, torch.full((), math.inf))
    assert torch.equal(reference.ue8m0_bytes(above), (exponents + 128).to(torch.uint8))


@pytest.mark.parametrize(
    ("value", "byte"), [(0.0, 0), (2.0**-149, 0), (2.0**-127, 0), (math.inf, 254), (math.nan, 255)]
)
def test_edges_of_ue8m0(value, byte):
    assert reference.ue8m0_bytes(torch.tensor([value])).tolist() == [byte]

"""What verifying costs, on devices with clocks of their own. The rest: tests/engine/test_twins_speculation.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shaders.speculation import Costs, measure_costs


class Device:
    """Steps that take ``step_ms``, verifications ``verify_ms(k)``; the first one 5 ms more."""

    def __init__(self, step_ms: float, verify_ms: Callable[[int], float]):
        self.step_ms, self.verify_ms = step_ms, verify_ms
        self.now = 0.0
        self.verified: list[tuple[int, float]] = []
        self.plain: list[tuple[int, int]] = []

    def verify(self, size: int) -> int:
        self.verified.append((size, self.now))
        self.now += self.verify_ms(size) + (5 if len(self.verified) == 1 else 0)
        return min(size, 2)

    def decode(self, steps: int, position: int) -> float:
        self.plain.append((steps, position))
        self.now += steps * self.step_ms
        return self.step_ms

    def costs(self, most: int = 8, capacity: int = 512) -> Costs:
        return measure_costs(
            self.verify, self.decode, most, capacity, now=lambda: self.now, budget_ms=100, plain_steps=8
        )


def test_the_first_steps_do_not_count() -> None:
    device = Device(0.5, lambda k: 1.5 + k / 8)
    costs = device.costs()
    assert costs.plain == 0.5
    assert costs.verify[1:] == pytest.approx([1.5 + k / 8 for k in range(1, 9)])
    assert [size for size, _ in device.verified] == [1, 8, 4, 2] * 3
    # After the first, which took 6.6 ms, seven steps are taken for all that the budget has.
    assert device.plain == [(7, 1), (8, 1), (8, 1)] and device.now < 100


@pytest.mark.parametrize(("step_ms", "sizes"), [(30, [1, 8, 4]), (70, [1, 8]), (400, [1])])
def test_on_a_slow_device_it_stops_in_time(step_ms: float, sizes: list[int]) -> None:
    device = Device(step_ms, lambda k: step_ms + k)
    costs = device.costs()
    assert [size for size, _ in device.verified] == sizes
    assert len(sizes) == 1 or device.verified[-1][1] < 100
    assert costs.plain <= costs.verify[1] and len(costs.verify) == 9


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_a_small_cache_is_not_overrun(capacity: int) -> None:
    device = Device(0.5, lambda k: 0.5 + k / 8)
    costs = device.costs(min(8, capacity), capacity)
    assert len(costs.verify) == 1 + capacity
    assert all(size <= capacity for size, _ in device.verified)
    assert all(steps + position <= capacity for steps, position in device.plain)

from __future__ import annotations

from lamella.kvtier.data.breaker import Breaker, BreakerState
from lamella.kvtier.testing.fake_clock import FakeClock


def test_it_opens_after_failures_in_a_row_and_backs_off_longer_each_time() -> None:
    clock = FakeClock()
    breaker = Breaker(clock.now, max_failures=3, backoff_s=1.0, max_backoff_s=3.0)
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    for backoff_s in (1.0, 2.0, 3.0, 3.0):
        clock.advance(backoff_s - 0.01)
        assert not breaker.allows()
        clock.advance(0.02)
        assert breaker.allows()
        assert breaker.state is BreakerState.HALF_OPEN
        assert not breaker.allows()  # one probe at a time
        breaker.failed()
    assert breaker.num_opened == 5
    clock.advance(3.0)
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    for _ in range(3):
        breaker.failed()
    clock.advance(1.0)  # the back-off begins anew
    assert breaker.allows()

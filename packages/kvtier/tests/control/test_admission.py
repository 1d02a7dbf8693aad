from __future__ import annotations

import pytest

from lamella.kvtier import AdmissionPlan, LayoutError, TierPlan
from lamella.kvtier.control.admission import RecentKeys, make_admission


def key(n: int) -> bytes:
    return n.to_bytes(8, "little") * 4


def test_all() -> None:
    admission = make_admission(AdmissionPlan())
    assert admission.wants(key(1), 100, False, 0.0)


def test_the_second_use_a_hit_the_first_blocks_and_an_empty_tier() -> None:
    admission = make_admission(AdmissionPlan("reused", always_blocks=2, headroom=0.5))
    assert not admission.wants(key(1), 2, False, 0.5)
    assert admission.wants(key(1), 2, False, 0.5)
    assert admission.wants(key(2), 2, True, 0.0)
    assert admission.wants(key(3), 1, False, 0.0)
    assert admission.wants(key(4), 2, False, 0.6)
    admission.note(key(5))
    assert admission.wants(key(5), 2, False, 0.0)


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    seen = RecentKeys(4)
    for n in range(100):
        assert not seen.note(key(n))
        assert len(seen) <= 8
        assert seen.note(key(n))
    assert not seen.note(key(0))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"mode": "some"}, "'some'"),
        ({"always_blocks": -1}, "-1"),
        ({"headroom": 1.5}, "headroom 1.5"),
        ({"max_tenant_share": 0.0}, "max_tenant_share 0.0"),
        ({"recent_keys": 0}, "recent_keys 0"),
    ],
)
def test_plans_out_of_range_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        AdmissionPlan(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"host_slots": ()}, "host slot"),
        ({"host_slots": (0,)}, "host slot"),
        ({"eviction": "arc"}, "'arc' is none of lru, s3fifo"),
        ({"externals": ("disk",)}, "names of their own"),
        ({"externals": ("a", "a")}, "names of their own"),
        ({"max_storing": 0}, "at least 1"),
        ({"max_loading_share": 0.0}, "max_loading_share"),
        ({"max_storing_share": 1.5}, "max_storing_share"),
    ],
)
def test_tier_plans_out_of_range_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        TierPlan(**{"host_slots": (4,), **values})  # type: ignore[arg-type]

from __future__ import annotations

import pytest

from lamella.kvtier import ClearJob, CopyJob, Location, LookupResult, Presence, Ticket, TicketResult, TicketState

JOB = CopyJob(7, b"k" * 32, Location("device", 0, 3), Location("host", 0, 1), 4096, after_step=12)


def test_a_target_is_readable_only_after_success() -> None:
    ticket = Ticket(JOB)
    assert not ticket.readable
    ticket.complete(TicketResult(7, True))
    assert ticket.readable
    failed = Ticket(JOB)
    failed.complete(TicketResult(7, False, "checksum"))
    assert (failed.state, failed.readable, failed.error) == (TicketState.FAILED, False, "checksum")


def test_a_ticket_ends_exactly_once() -> None:
    ticket = Ticket(JOB)
    ticket.cancel()
    assert ticket.state is TicketState.CANCELLED
    with pytest.raises(AssertionError, match="ends twice"):
        ticket.complete(TicketResult(7, True))
    with pytest.raises(AssertionError, match="result of ticket 8"):
        Ticket(JOB).complete(TicketResult(8, True))


def test_what_older_callers_leave_out() -> None:
    assert (JOB.parent, JOB.source.name) == (None, "")
    assert Presence("disk", "") == Presence("disk", "", (), ())
    assert ClearJob("disk").name == ""
    assert LookupResult(1, 5).seconds == 0.0

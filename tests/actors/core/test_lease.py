"""Leases: disjoint times, rising numbers."""

from hypothesis import given
from hypothesis import strategies as st

from actors.core.lease import HeldLease, LeaseIssuer, LeaseRoster


def test_the_holder_stops_before_the_issuer_may_issue_again():
    issuer, held = LeaseIssuer(lasts_s=10), HeldLease(margin_s=1)
    lease = issuer.issue("a", now_s=100.5)
    held.accept(lease, asked_at_s=100.0)
    assert held.is_held(108.9) and not held.is_held(109.0)
    assert issuer.issue("b", now_s=110.4) is None
    assert issuer.issue("b", now_s=110.5).number == lease.number + 1


def test_a_lapsed_lease_cannot_be_renewed():
    issuer = LeaseIssuer(lasts_s=10)
    lease = issuer.issue("a", 0.0)
    assert issuer.renew("a", lease.number, 9.9) == lease
    assert issuer.renew("a", lease.number, 19.9) is None


def test_a_late_lease_of_an_older_number_is_ignored():
    issuer, held = LeaseIssuer(lasts_s=10), HeldLease(margin_s=1)
    old, new = issuer.issue("a", 0.0), issuer.issue("a", 1.0)
    held.accept(new, asked_at_s=1.0)
    held.accept(old, asked_at_s=5.0)
    assert held.left_s(1.0) == 9.0


def test_each_holder_of_a_leader_has_a_lease_of_its_own_and_later_leaders_give_higher_ones():
    first, later = LeaseRoster(lasts_s=10, leader_term=1), LeaseRoster(lasts_s=10, leader_term=2)
    one, other = first.grant("a", 0.0), first.grant("b", 5.0)
    assert one.holder(9.0).number < other.holder(9.0).number == first.newest
    assert one.holder(10.0) is None and other.holder(10.0).holder == "b"
    assert later.grant("a", 10.0).holder(10.0).number > first.newest


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 7), st.floats(0, 3)), max_size=40))
def test_no_two_holders_ever_believe_that_they_hold_it_and_numbers_rise(requests):
    """Any order of asks, any network delay on the way there and back."""
    issuer = LeaseIssuer(lasts_s=10)
    held = {name: HeldLease(margin_s=0.5) for name in "abc"}
    now_s, numbers = 0.0, []
    for name, gap_s, delay_s in requests:
        asked_s = now_s + gap_s
        now_s = asked_s + delay_s
        lease = issuer.issue(name, now_s)
        if lease is not None:
            numbers.append(lease.number)
            held[name].accept(lease, asked_at_s=asked_s)
        assert sum(lease.is_held(now_s) for lease in held.values()) <= 1
    assert numbers == sorted(set(numbers))

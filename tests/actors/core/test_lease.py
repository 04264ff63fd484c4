"""Leases: disjoint terms, rising epochs."""

from hypothesis import given
from hypothesis import strategies as st

from actors.core.lease import HeldLease, LeaseGranter


def test_the_holder_stops_before_the_granter_may_grant_again():
    granter, held = LeaseGranter(term_s=10), HeldLease(margin_s=1)
    grant = granter.grant("a", now_s=100.5)
    held.accept(grant, asked_at_s=100.0)
    assert held.is_held(108.9) and not held.is_held(109.0)
    assert granter.grant("b", now_s=110.4) is None
    assert granter.grant("b", now_s=110.5).epoch == grant.epoch + 1


def test_a_lapsed_lease_cannot_be_renewed():
    granter = LeaseGranter(term_s=10)
    grant = granter.grant("a", 0.0)
    assert granter.renew("a", grant.epoch, 9.9) == grant
    assert granter.renew("a", grant.epoch, 19.9) is None


def test_a_late_grant_of_an_older_epoch_is_ignored():
    granter, held = LeaseGranter(term_s=10), HeldLease(margin_s=1)
    old, new = granter.grant("a", 0.0), granter.grant("a", 1.0)
    held.accept(new, asked_at_s=1.0)
    held.accept(old, asked_at_s=5.0)
    assert held.left_s(1.0) == 9.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 7), st.floats(0, 3)), max_size=40))
def test_no_two_holders_ever_believe_that_they_hold_it_and_epochs_rise(requests):
    """Any order of asks, any network delay on the way there and back."""
    granter = LeaseGranter(term_s=10)
    held = {name: HeldLease(margin_s=0.5) for name in "abc"}
    now_s, epochs = 0.0, []
    for name, gap_s, delay_s in requests:
        asked_s = now_s + gap_s
        now_s = asked_s + delay_s
        grant = granter.grant(name, now_s)
        if grant is not None:
            epochs.append(grant.epoch)
            held[name].accept(grant, asked_at_s=asked_s)
        assert sum(lease.is_held(now_s) for lease in held.values()) <= 1
    assert epochs == sorted(set(epochs))

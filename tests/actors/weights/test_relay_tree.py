"""Who feeds whom: few children each, no circles, neighbours together, whatever fails in whatever order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actors.weights.relay_tree import RelayPlace, RelayTree, nodes_of
from transport.address import ActorAddress, PeerId


def puller(number: int, life: int = 1) -> ActorAddress:
    return ActorAddress(f"rollout-{number}-relay", PeerId(f"node-{number}", life))


def test_the_server_feeds_two_machines_however_many_there_are() -> None:
    tree = RelayTree(2)
    feeds = Counter(tree.place(puller(n), f"host-{n}").feed for n in range(20))
    assert feeds[None] == 2
    assert max(feeds.values()) == 2


def test_the_second_puller_of_a_machine_waits_for_the_first() -> None:
    tree = RelayTree(2)
    assert tree.place(puller(0), "there") == RelayPlace("there", "", None, maps=False)
    assert tree.place(puller(1), "there") == RelayPlace("there", "", puller(0), maps=True)
    assert tree.place(puller(2), "there") == RelayPlace("there", "", puller(0), maps=True)


def test_a_puller_that_asks_again_keeps_its_place_until_it_complains() -> None:
    tree = RelayTree(1)
    tree.place(puller(0), "a")
    before = tree.place(puller(1), "b")
    assert before.feed == puller(0)
    assert tree.place(puller(1), "b") == before
    assert tree.place(puller(1), "b", avoid=puller(0)).feed is None


def test_machines_that_cannot_reach_each_other_find_that_out_once_and_not_with_each_version() -> None:
    apart = set[frozenset[str]]()
    first = RelayTree(1, apart=apart)
    first.place(puller(0), "a")
    assert first.place(puller(1), "b").feed == puller(0)
    apart.add(nodes_of(puller(1), puller(0)))
    for came, comes in ((0, 1), (1, 0)):
        second = RelayTree(1, apart=apart)
        second.place(puller(came), "a")
        assert second.place(puller(comes), "b").feed is None
        assert second.place(puller(2), "c").feed in (puller(0), puller(1)), "others are fed as before"


def test_a_new_life_takes_the_place_of_the_one_before() -> None:
    """It is not told to wait for itself."""
    tree = RelayTree(2)
    tree.place(puller(0, life=1), "a")
    assert tree.place(puller(0, life=2), "a") == RelayPlace("a", "", None, maps=False)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(1, 3))
def test_nobody_feeds_itself_by_any_detour(events: list[tuple[int, bool]], children_max: int) -> None:
    """Pullers come, complain and come again; from each the server is reached."""
    tree, places = RelayTree(children_max), dict[ActorAddress, RelayPlace]()
    for number, complains in events:
        own = puller(number)
        avoid = places[own].feed if complains and own in places else None
        places[own] = tree.place(own, f"host-{number // 2}", f"site-{number // 4}", avoid)
        seen, at = {own}, places[own].feed
        while at is not None and at in tree._places:
            assert at not in seen
            seen.add(at)
            at = tree._places[at].feed
    fed = Counter(
        (at.feed, tree._places[at.feed].site == at.site)
        for at in tree._places.values()
        if not at.maps and at.feed in tree._places
    )
    assert all(count <= children_max for count in fed.values())


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 3))
def test_a_version_enters_each_other_site_once(sites: list[int], children_max: int) -> None:
    """Site 0 is the server's; pullers come in any order, nobody complains."""
    tree, at_site = RelayTree(children_max, "site-0"), dict[ActorAddress | None, int]({None: 0})
    entered = Counter[int]()
    for number, site in enumerate(sites):
        place = tree.place(puller(number), f"host-{number}", f"site-{site}")
        at_site[puller(number)] = site
        entered[site] += at_site[place.feed] != site
    assert all(entered[site] == 1 for site in set(sites) - {0})
    assert entered[0] == 0
    children = Counter((at.feed, at_site[at.feed] == at_site[own]) for own, at in tree._places.items())
    assert max(children.values()) <= children_max, "of one site and of the others, the server's too"


def test_when_the_one_that_feeds_a_site_fails_another_one_of_the_site_takes_its_place() -> None:
    tree = RelayTree(1, "here")
    first, second, third = puller(0), puller(1), puller(2)
    assert tree.place(first, "a", "there").feed is None
    assert tree.place(second, "b", "there").feed == first
    assert tree.place(third, "c", "there").feed == second
    assert tree.place(second, "b", "there", avoid=first).feed is None, "it must not be fed by those it feeds"
    assert tree.place(third, "c", "there").feed == second

"""Who gets which device: the least used one, never two of a group the same, and none kept once it is given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisors.machine.membership.device_places import DevicePlaces

GROUPS = {"t": ("t", "t.1", "t.2"), "a": ("a", "a.1"), "b": ("b", "b.1"), "w": ("w",)}
PROCESSES = [process for group in GROUPS.values() for process in group]

acts = st.lists(st.tuples(st.sampled_from(["take", "release"]), st.sampled_from(PROCESSES)), max_size=40)


def _group(process: str) -> tuple[str, ...]:
    return GROUPS[process[0]]


@given(count=st.integers(3, 6), acts=acts)
def test_each_take_is_the_least_used_of_those_that_no_rank_of_the_group_has(
    count: int, acts: list[tuple[str, str]]
) -> None:
    places = DevicePlaces([str(number) for number in range(count)])
    held: dict[str, str] = {}
    for act, process in acts:
        held.pop(process, None)
        if act == "release":
            places.release(process)
        else:
            uses = {device: sum(has == device for has in held.values()) for device in places.ids}
            barred = {held[other] for other in _group(process) if other in held}
            (got,) = places.take(process, 1, _group(process))
            allowed = [device for device in places.ids if device not in barred]
            assert got == min(allowed, key=lambda device: (uses[device], int(device)))
            held[process] = got
        assert {device: set(users) for device, users in places.users.items()} == {
            device: {process for process, has in held.items() if has == device} for device in places.ids
        }
        assert places.free == tuple(device for device in places.ids if device not in held.values())


@given(count=st.integers(0, 6), acts=acts)
def test_after_every_release_all_are_free(count: int, acts: list[tuple[str, str]]) -> None:
    places = DevicePlaces([str(number) for number in range(count)])
    for _, process in acts:
        places.take(process, 1)
    for process in PROCESSES:
        places.release(process)
        places.release(process)
    assert places.free == places.ids


def test_on_one_device_trainer_and_workers_share_it() -> None:
    places = DevicePlaces(["0"])
    assert [places.take(process, 1) for process in ("trainer", "rollout-0", "rollout-1")] == [("0",)] * 3
    assert places.free == ()


def test_who_is_placed_again_leaves_the_device_that_it_had() -> None:
    places = DevicePlaces(["0", "1"])
    places.take("a", 1)
    places.take("b", 1)
    places.release("a")
    assert places.take("b", 1) == ("0",)
    assert places.free == ("1",)


def test_a_node_without_devices_gives_none_and_fits_any_group() -> None:
    places = DevicePlaces()
    assert places.fits(8)
    assert places.take("a", 1) == ()


def test_more_ranks_than_devices_do_not_fit() -> None:
    assert DevicePlaces(["0", "1"]).fits(2)
    assert not DevicePlaces(["0", "1"]).fits(3)


def test_what_a_former_head_gave_is_entered_as_it_was() -> None:
    places = DevicePlaces(["0", "1"])
    places.enter("a", ["1", "9"])
    assert places.of("a") == ("1",)
    assert places.take("b", 1) == ("0",)

"""Room that tenants share."""

from __future__ import annotations

from skerry.manager.capacity import SharedCapacity


def test_whoever_takes_all_leaves_something() -> None:
    room = SharedCapacity(1000)
    assert room.take("a", 400)
    assert not room.take("a", 150)
    assert room.take("a", 100)
    assert room.take("b", 250)
    assert not room.take("b", 1)
    assert room.take("b", 0)
    assert room.take("c", 125)
    room.give_back("a", 500)
    assert room.take("b", 100)
    assert room.taken == 475


def test_what_is_held_is_given_back() -> None:
    room = SharedCapacity(1000)
    with room.held("a", usual=100) as more:
        assert more(60)
        assert more(40)
        assert room.taken == 0
        assert more(60)
        assert room.taken == 60
        assert not more(500)
        assert more(0)
        assert room.taken == 60
    assert room.taken == 0

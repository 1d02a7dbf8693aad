from lamella.specdec import FixedLength


def test_every_row_gets_the_number_that_it_has_room_for():
    assert FixedLength(4).choose([100, 5, 4, 2, 1, 0]) == [4, 4, 3, 1, 0, 0]

"""The balanced cut: as few pieces as the limit allows, of nearly the same size."""

import pytest

from anybatch.batch import balanced


@pytest.mark.parametrize(
    ("rows", "ub_size", "sizes"),
    [
        (10, 4, (4, 3, 3)),
        (29, 8, (8, 7, 7, 7)),
        (9, 4, (3, 3, 3)),
        (12, 3, (3, 3, 3, 3)),
        (8, 8, (8,)),
        (3, 8, (3,)),
        (3, 2, (2, 1)),
        (4, 1, (1, 1, 1, 1)),
        (1, 5, (1,)),
    ],
)
def test_balanced_known_cuts(rows: int, ub_size: int, sizes: tuple[int, ...]) -> None:
    """Known numbers of rows are cut as worked out by hand."""
    assert balanced(rows, ub_size) == sizes


@pytest.mark.parametrize("ub_size", range(1, 40))
def test_balanced_keeps_its_promises_for_every_number_of_rows(ub_size: int) -> None:
    """No row is lost, no piece is over the limit, and there are no more pieces and sizes than needed."""
    for rows in range(1, 130):
        sizes = balanced(rows, ub_size)
        assert sum(sizes) == rows
        assert 1 <= min(sizes) <= max(sizes) <= ub_size
        assert len(sizes) == -(-rows // ub_size)
        assert len(set(sizes)) <= 2
        assert list(sizes) == sorted(sizes, reverse=True)


def test_balanced_has_no_piece_of_one_row_where_the_limit_allows() -> None:
    """A piece of one row occurs only for one row, a limit of one, or an odd number of rows by two."""
    for rows in range(2, 130):
        for ub_size in range(3, 40):
            assert min(balanced(rows, ub_size)) > 1
    assert all(min(balanced(rows, 2)) == 2 for rows in range(2, 130, 2))


@pytest.mark.parametrize(("rows", "ub_size"), [(0, 4), (4, 0), (-1, 2), (2, -1)])
def test_balanced_refuses_what_has_no_cut(rows: int, ub_size: int) -> None:
    """No rows or no limit is an error, not an empty cut."""
    with pytest.raises(ValueError, match="at least 1"):
        balanced(rows, ub_size)

"""MiniMalloc's CSV: round trips, and one line for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lowtide.errors import PlanError
from lowtide.place import read_buffers, write_buffers

_GOOD = "id,lower,upper,size\na,0,3,10\nb,2,5,20\n"


def test_it_reads_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(_GOOD)
    ids, buffers, offsets = read_buffers(path)
    assert ids == ("a", "b")
    assert offsets is None
    write_buffers(path, ids, buffers, np.array([20, 0]))
    assert path.read_text() == "id,lower,upper,size,offset\na,0,3,10,20\nb,2,5,20,0\n"
    again = read_buffers(path)
    assert again.offsets is not None
    assert again.offsets.tolist() == [20, 0]
    assert again.buffers.size.tolist() == [10, 20]


def test_columns_in_any_order_blanks_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    path.write_bytes("\ufeffupper, size ,id,lower\r\n3, 10 ,a,-2\r\n\r\n".encode())
    ids, buffers, _ = read_buffers(path)
    columns = (buffers.lower, buffers.upper, buffers.size)
    assert (ids, *(column.tolist() for column in columns)) == (("a",), [-2], [3], [10])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lacks the column id"),
        ("id,lower,upper\na,0,1\n", "lacks the column size; expected id,lower,upper,size and"),
        ("id,lower,upper,size,gaps\na,0,1,2,3\n", "has a column 'gaps' that is not known"),
        ("id,lower,upper,size,size\na,0,1,2,3\n", "has a column 'size' that is not known or there twice"),
        (_GOOD + "c,1,2\n", "line 4 has 3 fields, but there are 4 columns"),
        (_GOOD + "c,1,2,x\n", "line 4 (buffer c): size is 'x', not an integer"),
        (_GOOD + "c,1,2.5,1\n", "line 4 (buffer c): upper is '2.5', not an integer"),
        (_GOOD + "c,1,2,99999999999999999999\n", "not an integer of at most 18 digits"),
        (_GOOD + "c,2,2,1\n", "line 4: buffer c lives from 2 to before 2; upper must be above lower."),
        (_GOOD + "c,1,2,-4\n", "line 4: buffer c has a size of -4 bytes"),
        (_GOOD + "a,1,2,4\n", "has two buffers with the id a"),
        ("id,lower,upper,size,offset\na,0,3,10,0\nb,2,5,20,9\n", "buffers a and b are both live at 2 and overlap"),
        ("id,lower,upper,size,offset\na,0,3,10,-1\n", "buffer a is at offset -1"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_buffers(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_text_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "missing", "."):
        with pytest.raises(PlanError, match="cannot read"):
            read_buffers(tmp_path / name)

"""Errors and tensors that ranks send each other arrive unchanged."""

import pytest
import torch

from scalepoint.cli.exit_codes import Code, classify_error
from scalepoint.distributed.channel import decode_error, decode_tensors, encode_error, encode_tensors
from scalepoint.errors import BatchNote, CalibrationError, RankError


def test_an_error_of_the_users_data_is_one_on_every_rank() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    error.add_note(BatchNote("calibrating: batch 3"))
    error.add_note("seen by somebody else")
    found = decode_error(encode_error(error), 1)
    assert found.__notes__ == ["calibrating: batch 3", "seen by somebody else", "raised on rank 1"]
    assert [isinstance(note, BatchNote) for note in found.__notes__] == [True, False, False]
    assert classify_error(found)[:2] == classify_error(error)[:2] == (Code.USAGE, CalibrationError.code)


@pytest.mark.parametrize("error", [CalibrationError("empty"), KeyError("x"), KeyboardInterrupt()], ids=repr)
def test_classes_of_ours_and_of_python_stay(error: BaseException) -> None:
    found = decode_error(encode_error(error), 0)
    assert type(found) is (RankError if isinstance(error, KeyboardInterrupt) else type(error))


def test_tensors_come_back_bit_by_bit() -> None:
    given = {"a": torch.randn(2, 3), "none": torch.empty(0, 4, dtype=torch.int16), "one": torch.tensor(True)}
    header, data = encode_tensors(given)
    found = decode_tensors(data, header)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in given.items())

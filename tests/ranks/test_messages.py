"""Errors and tensors are unchanged after they were sent to another rank."""

import pytest
import torch

from scalepoint.cli.exit_codes import Code, classify_error
from scalepoint.distributed.encoding import decode_error, decode_tensors, encode_error, encode_tensors
from scalepoint.errors import BatchNote, CalibrationError, RankError


def test_an_error_of_user_data_is_classified_the_same_on_every_rank() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    error.add_note(BatchNote("calibrating: batch 3"))
    error.add_note("seen by somebody else")
    decoded = decode_error(encode_error(error), 1)
    assert decoded.__notes__ == ["calibrating: batch 3", "seen by somebody else", "raised on rank 1"]
    assert [isinstance(note, BatchNote) for note in decoded.__notes__] == [True, False, False]
    assert classify_error(decoded)[:2] == classify_error(error)[:2] == (Code.USAGE, CalibrationError.code)


@pytest.mark.parametrize("error", [CalibrationError("empty"), KeyError("x"), KeyboardInterrupt()], ids=repr)
def test_error_classes_of_scalepoint_and_python_are_restored(error: BaseException) -> None:
    decoded = decode_error(encode_error(error), 0)
    assert type(decoded) is (RankError if isinstance(error, KeyboardInterrupt) else type(error))


def test_tensors_are_restored_bit_by_bit() -> None:
    tensors = {"a": torch.randn(2, 3), "none": torch.empty(0, 4, dtype=torch.int16), "one": torch.tensor(True)}
    header, data = encode_tensors(tensors)
    decoded = decode_tensors(data, header)
    assert all(
        torch.equal(decoded[name], value) and decoded[name].dtype == value.dtype for name, value in tensors.items()
    )

"""Failures, states and outcomes."""

import pytest

from tinsmith.protocol.errors import Cancelled, Category, InternalError, ReasonCode, ValidationFailed
from tinsmith.protocol.futures import MAX_DIAGNOSTIC, MAX_MESSAGE, Failure, Outcome, State


@pytest.mark.proves("R16")
def test_a_typed_error_keeps_its_reason():
    failure = Failure.of(ValidationFailed("data: bad\n  twice"))
    assert failure == Failure(reason=ReasonCode.VALIDATION_FAILED, message="data: bad twice", category=Category.USER)
    assert isinstance(failure.error(), ValidationFailed)


@pytest.mark.proves("R13", "R15")
def test_a_user_error_carries_no_traceback_and_one_bounded_line():
    failure = Failure.of(ValidationFailed("x" * 2 * MAX_MESSAGE))
    assert len(failure.message) == MAX_MESSAGE
    assert failure.diagnostic is None


@pytest.mark.proves("R13", "R16")
def test_anything_else_is_internal_and_its_text_stays_in_the_diagnostic():
    try:
        raise RuntimeError("secret" + "x" * MAX_DIAGNOSTIC + "tail")
    except RuntimeError as error:
        failure = Failure.of(error)
    assert failure.reason is InternalError.reason
    assert "secret" not in failure.message
    assert failure.diagnostic is not None
    assert len(failure.diagnostic) == MAX_DIAGNOSTIC
    assert failure.diagnostic.rstrip().endswith("tail")


@pytest.mark.proves("R13")
def test_fields_of_a_newer_writer_are_ignored():
    text = '{"reason":"cancelled","message":"m","category":"user","colour":"red"}'
    assert Failure.model_validate_json(text).reason is ReasonCode.CANCELLED


def test_terminal_states():
    assert {state for state in State if not state.is_terminal} == {State.PENDING, State.RUNNING}


@pytest.mark.proves("R26")
def test_an_outcome_has_a_result_or_a_failure():
    assert Outcome(result=b"").state is State.COMPLETED
    assert Outcome.failed(ValidationFailed("m"), is_tainted=True).state is State.FAILED
    assert Outcome.failed(ValidationFailed("m"), is_tainted=True).is_tainted
    assert Outcome.failed(Cancelled("m"), is_tainted=False).state is State.CANCELLED
    with pytest.raises(ValueError, match="not both"):
        Outcome()
    with pytest.raises(ValueError, match="not both"):
        Outcome(result=b"", failure=Failure.of(Cancelled("m")))

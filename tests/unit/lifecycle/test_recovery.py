"""Which commands a restore runs again, and which saves it captures again."""

from dataclasses import replace

import pytest

from tinsmith.lifecycle.recovery import Action, Step, plan
from tinsmith.protocol.futures import State
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import Entry, LaneInfo

INFO = LaneInfo(
    lane="m",
    tenant="t",
    session="s",
    base="b",
    is_open=True,
    owner="r",
    token=1,
    durable=-1,
    snapshot=None,
    num_pending=0,
    held_bytes=0,
    last_seq=9,
)


def entry(seq: int, kind: Kind, state: State = State.COMPLETED) -> Entry:
    artifact = "an artifact" if kind.is_save and state is State.COMPLETED else None
    return Entry(rid=f"r{seq}", seq=seq, kind=kind, digest="d", size=1, tokens=1, state=state, attempts=0, artifact=artifact)


@pytest.mark.parametrize("kind", [Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP])
def test_what_left_an_effect_is_run_again(kind: Kind) -> None:
    done = entry(3, kind)
    assert plan(INFO, [done]).steps == (Step(done, Action.RUN),)


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER])
def test_what_left_none_or_is_durable_is_skipped(kind: Kind) -> None:
    assert plan(INFO, [entry(3, kind)]).steps == ()


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.PENDING, State.RUNNING])
def test_what_was_not_completed_never_runs_again(state: State) -> None:
    assert plan(INFO, [entry(3, Kind.OPTIM_STEP, state)]).steps == ()


@pytest.mark.parametrize("kind", [Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER])
def test_a_save_that_was_being_published_is_captured_in_its_place(kind: Kind) -> None:
    before, save, after = entry(1, Kind.OPTIM_STEP), entry(2, kind, State.RUNNING), entry(3, Kind.OPTIM_STEP)
    steps = plan(INFO, [after, save, before]).steps
    assert steps == (Step(before, Action.RUN), Step(save, Action.CAPTURE), Step(after, Action.RUN))


def test_a_plan_begins_with_the_snapshot_and_skips_what_it_holds() -> None:
    info = replace(INFO, durable=2, snapshot="an artifact")
    held, after = entry(2, Kind.OPTIM_STEP), entry(3, Kind.OPTIM_STEP)
    assert plan(info, [held, after]).snapshot == "an artifact"
    assert plan(info, [held, after]).steps == (Step(after, Action.RUN),)


def test_a_new_lane_has_nothing_to_do() -> None:
    assert plan(INFO, []) == plan(INFO, ())
    assert plan(INFO, []).snapshot is None

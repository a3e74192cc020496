"""The tree of errors: as it is drawn, and fit to cross a process boundary."""

import copy
import re

import pytest

import tinsmith.client.errors as module
from tinsmith.client import ClientError, ClientValidationError, ConnectionFailed, HttpError, RecordLost, TaskFailed, WaitTimedOut
from tinsmith.client.errors import Report, checked_arguments
from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.native import CreateSampler, SamplingOptions

REPORT = Report("the reason", ReasonCode.INTERNAL_ERROR, Category.SERVER, 500, "r-1", ("a", "b"))


@pytest.mark.proves("R33")
def test_every_exception_lies_under_one_root_as_the_tree_is_drawn():
    drawn = re.findall(r"^( *[│├└─ ]*)([A-Z]\w+)", module.__doc__, re.MULTILINE)
    parents: list[tuple[int, str]] = []
    tree = {}
    for lead, name in drawn:
        if not lead.startswith("    "):
            continue
        depth = len(lead)
        while parents and parents[-1][0] >= depth:
            parents.pop()
        tree[name] = parents[-1][1] if parents else "Exception"
        parents.append((depth, name))
    classes = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, ClientError)}
    assert tree == {name: kind.__base__.__name__ for name, kind in classes.items()}


@pytest.mark.parametrize(
    "error",
    [
        ClientValidationError("field", "is wrong"),
        ConnectionFailed("no answer", may_have_arrived=True),
        WaitTimedOut("r-1", 2.5),
        RecordLost("r-1"),
        TaskFailed(REPORT),
        HttpError(503, REPORT, may_have_arrived=True, retry_after_s=3.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_can_be_copied_and_sent_to_another_process(error):
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


@pytest.mark.proves("R33")
def test_a_wrong_argument_is_named():
    with (
        pytest.raises(ClientValidationError, match=r"^sampling\.top_p: Input should be greater than 0$") as raised,
        checked_arguments("sampling"),
    ):
        SamplingOptions(top_p=0.0)
    assert (raised.value.field, raised.value.__cause__) == ("sampling.top_p", None)


@pytest.mark.proves("R33")
def test_a_rule_over_several_arguments_names_them():
    with pytest.raises(ClientValidationError) as raised, checked_arguments():
        CreateSampler(session_id="s", sampler_seq=0)
    assert (raised.value.field, raised.value.problem) == ("base_model, checkpoint", "send one of them")

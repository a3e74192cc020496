"""create_custom_loss and passes that name a custom loss, at the face."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.face import BASE, Face, open_face
from tests.unit.engines.traced import call, graph_of, ref
from tests.unit.gateway.test_training import failure_of, request, send
from tinsmith.protocol.custom_losses import MAX_LOSSES
from tinsmith.protocol.training import Compute
from tinsmith.state.custom_losses import CustomLosses

SUM = call("call_method", "total", "sum", ref("logprobs"))
HALF = call("call_function", "half", "operator.mul", ref("logprobs"), 0.5)


@pytest.fixture
async def open_to_losses() -> AsyncIterator[Face]:
    async with open_face(gateway={"custom_losses": True}) as face:
        yield face


def body(session_id: str, *calls: dict[str, object], seq: int = 0, **changes: object) -> dict[str, object]:
    inputs = [{"name": "logprobs", "rank": 1}]
    graph = graph_of(*(calls or (SUM,)))
    return {
        "session_id": session_id,
        "custom_loss_seq_id": seq,
        "name": "mine",
        "inputs": inputs,
        "graph": graph,
        "type": "create_custom_loss",
    } | changes


async def created(face: Face, session_id: str, **changes: object) -> str:
    promise = await face.ok("/create_custom_loss", body(session_id, **changes))
    answer = await face.retrieve(promise["request_id"])
    assert answer.status_code == 200
    assert answer.json()["type"] == "create_custom_loss"
    return str(answer.json()["loss_id"])


async def passed(face: Face, model_id: str, seq: int, **config: object) -> httpx.Response:
    message = request(model_id, seq, loss_fn="custom")
    for key, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
    return await send(face, message.SerializeToString())


async def test_a_pass_carries_the_loss_that_it_names(open_to_losses: Face):
    face = open_to_losses
    session_id = await face.session()
    model_id = await face.model(session_id)
    await face.run(model_id, 0)
    loss_id = await created(face, session_id)
    assert (await passed(face, model_id, 1, loss_id=loss_id)).status_code == 200
    ((_, command),) = await face.take(model_id, 1)
    assert isinstance(command, Compute)
    assert command.custom_loss is not None
    assert (command.loss_fn, command.loss_fn_config, command.custom_loss.name) == ("custom", {}, "mine")
    assert [node.name for node in command.custom_loss.graph.nodes] == ["logprobs", "total", "output"]


async def test_a_number_names_one_loss(open_to_losses: Face):
    face = open_to_losses
    session_id = await face.session()
    first = await created(face, session_id)
    kept = face.num_kept()
    assert await created(face, session_id) == first
    other = await face.post("/create_custom_loss", body(session_id, HALF, SUM))
    assert (other.status_code, other.json()["reason"]) == (400, "request_rejected")
    assert face.num_kept() == kept
    assert await created(face, session_id, seq=1) != first
    assert await created(face, await face.session()) != first


@pytest.mark.parametrize(
    ("changes", "status", "names"),
    [
        ({"graph": graph_of(call("call_function", "x", "torch.load", ref("logprobs")), SUM)}, 422, "graph.nodes[1].target"),
        ({"graph": {"format": 1, "nodes": []}}, 422, "graph.nodes"),
        ({"graph": graph_of(call("get_attr", "x", "weight"), SUM)}, 422, "graph.nodes.1.op"),
        ({"graph": graph_of({**SUM, "args": [[[[[[[1]]]]]]]})}, 422, "nested"),
        ({"graph": graph_of({**SUM, "args": [ref("logprobs"), 10**30]})}, 422, "64 bits"),
        ({"inputs": []}, 422, "inputs"),
        ({"inputs": [{"name": "logprobs", "rank": "1"}]}, 422, "rank"),
        ({"custom_loss_seq_id": -1}, 422, "custom_loss_seq_id"),
        ({"custom_loss_seq_id": MAX_LOSSES}, 422, "custom_loss_seq_id"),
        ({"name": "x" * 200}, 422, "name"),
        ({"session_id": "nope"}, 404, "session"),
    ],
)
async def test_a_refused_loss_is_not_kept(open_to_losses: Face, changes, status, names):
    face = open_to_losses
    session_id = await face.session()
    kept = face.num_kept()
    answer = await face.post("/create_custom_loss", body(session_id) | changes)
    assert answer.status_code == status
    assert names in answer.json()["detail"]
    assert face.num_kept() == kept


async def test_an_ended_session_creates_none(open_to_losses: Face):
    session_id = await open_to_losses.session()
    await open_to_losses.ok(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}})
    assert (await open_to_losses.post("/create_custom_loss", body(session_id))).status_code == 410


async def test_a_loss_is_known_in_its_session_alone(open_to_losses: Face):
    face = open_to_losses
    theirs = await created(face, await face.session())
    model_id = await face.model()
    failure = await failure_of(face, await passed(face, model_id, 1, loss_id=theirs))
    assert (failure["category"], "unknown in this session" in failure["error"]) == ("user", True)


@pytest.mark.parametrize("config", [{}, {"loss_id": 1.0}, {"loss_id": "nope"}, {"loss_id": "LOSS", "beta": 0.1}])
async def test_a_pass_that_names_no_loss_fails_its_future(open_to_losses: Face, config):
    face = open_to_losses
    session_id = await face.session()
    loss_id = await created(face, session_id)
    model_id = await face.model(session_id)
    sent = {key: loss_id if value == "LOSS" else value for key, value in config.items()}
    failure = await failure_of(face, await passed(face, model_id, 1, **sent))
    assert (failure["category"], "loss_id" in failure["error"]) == ("user", True)


async def test_datums_without_what_the_loss_reads_fail_their_future(open_to_losses: Face):
    face = open_to_losses
    session_id = await face.session()
    inputs = [{"name": "logprobs", "rank": 1}, {"name": "mask", "rank": 1}]
    loss_id = await created(face, session_id, inputs=inputs, graph=graph_of(SUM, inputs=("logprobs", "mask")))
    failure = await failure_of(face, await passed(face, await face.model(session_id), 1, loss_id=loss_id))
    assert "data[0].loss_fn_inputs.mask: missing" in failure["error"]


async def test_an_engine_without_custom_losses_fails_the_future():
    engines = {"trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}
    async with open_face(gateway={"custom_losses": True}, models=[{"name": BASE} | engines]) as face:
        session_id = await face.session()
        loss_id = await created(face, session_id)
        failure = await failure_of(face, await passed(face, await face.model(session_id), 1, loss_id=loss_id))
        assert "'fake' runs no custom losses" in failure["error"]


async def test_the_clients_are_told_whether_to_upload(face: Face, open_to_losses: Face):
    assert (await face.ok("/client/config", {}))["custom_loss_server_side"] is False
    assert (await open_to_losses.ok("/client/config", {}))["custom_loss_server_side"] is True


async def test_without_the_flag_nothing_is_uploaded_or_run(face: Face):
    session_id = await face.session()
    kept = face.num_kept()
    answer = await face.post("/create_custom_loss", body(session_id))
    assert (answer.status_code, answer.json()["reason"]) == (400, "endpoint_unavailable")
    assert face.num_kept() == kept
    failure = await failure_of(face, await passed(face, await face.model(session_id), 1, loss_id="x"))
    assert "'custom' is not implemented" in failure["error"]


async def test_the_losses_of_a_session_go_with_it(open_to_losses: Face):
    face = open_to_losses
    mine, other = await face.session(), await face.session()
    lost, kept = await created(face, mine), await created(face, other)
    losses = CustomLosses(face.store)
    await losses.forget("local", {mine})
    assert await losses.find("local", lost) is None
    assert await losses.find("local", kept) is not None
    assert (await face.retrieve(lost)).status_code == 404

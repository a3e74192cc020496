"""An id of another tenant is an unknown id: the same answer after the same number of store operations."""

from collections.abc import Callable

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_sampling import body_of
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.sessions import ModelRecord, SamplerRecord, SessionRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.state.catalog import model_write, sampler_write

FOREIGN, UNKNOWN = "theirs", "nobody"  # of one length, as the answers quote them
LORA = LoraConfig(rank=8, seed=0)


async def furnish(face: Face) -> None:
    """Another tenant's session, model, sampler and checkpoint, all under the name `FOREIGN`."""
    session = SessionRecord(tenant="other", session_id=FOREIGN, created_ms=0)
    await face.services.catalog.add_session(session)
    owner = {"tenant": "other", "session_id": FOREIGN, "base_model": BASE, "created_ms": 0}
    face.store.apply(
        [model_write(ModelRecord(model_id=FOREIGN, lora=LORA, **owner)), sampler_write(SamplerRecord(sampler_id=FOREIGN, **owner))]
    )
    await keep(face, tenant="other", session_id=FOREIGN, run_id=FOREIGN)


async def counted(face: Face, path: str, body: dict[str, object] | None) -> tuple[object, ...]:
    """Status, headers and body of the answer, and the store operations that it took."""
    operations: list[str] = []

    def count(where: object, name: str) -> None:
        run: Callable[..., object] = getattr(where, name)
        patch.setattr(where, name, lambda *args, **options: (operations.append(name), run(*args, **options))[1])

    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "put", "list", "delete", "now_ms"):
            count(face.store, name)
        for name in ("look", "result", "cancel", "submit", "void", "pool_submit", "close", "lane"):
            count(face.lanes, name)
        answer = await (face.http.get(f"/api/v1{path}") if body is None else face.post(path, body))
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, headers, answer.text, operations


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/session_heartbeat", {"session_id": "ID"}),
        ("/sessions/ID/finish", {}),
        ("/create_model", {"session_id": "ID", "model_seq_id": 0, "base_model": BASE}),
        ("/create_sampling_session", {"session_id": "ID", "sampling_session_seq_id": 0, "base_model": BASE}),
        ("/get_info", {"model_id": "ID"}),
        ("/unload_model", {"model_id": "ID"}),
        ("/optim_step", {"model_id": "ID", "seq_id": 1}),
        ("/forward_backward", {"model_id": "ID", "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "x"}}),
        ("/save_weights", {"model_id": "ID", "seq_id": 1, "path": "n"}),
        ("/save_weights_for_sampler", {"model_id": "ID", "seq_id": 1, "path": "n"}),
        ("/load_weights", {"model_id": "ID", "seq_id": 1, "path": "tinker://x/weights/n"}),
        ("/load_weights", {"session_id": "SESSION", "model_seq_id": 0, "path": "tinker://ID/weights/n"}),
        ("/create_sampling_session", {"session_id": "SESSION", "sampling_session_seq_id": 0, "model_path": "tinker://ID/weights/n"}),
        ("/weights_info", {"tinker_path": "tinker://ID/weights/n"}),
        ("/samplers/ID", None),
        ("/asample", body_of("ID")),
        ("/retrieve_future", {"request_id": "FUTURE"}),
        ("/cancel_future", {"request_id": "FUTURE"}),
    ],
)
async def test_a_foreign_id_is_an_unknown_id(face: Face, route, body):
    await furnish(face)
    session_id = await face.session()
    theirs = await face.services.request_id(WorkKind.TRAINING, "other", FOREIGN, 1)
    answers = []
    for name, future in ((FOREIGN, theirs), (UNKNOWN, theirs[:9] + "0" * 32)):

        def filled(text: str, name: str = name, future: str = future) -> str:
            return text.replace("ID", name).replace("SESSION", session_id).replace("FUTURE", future)

        asked = None if body is None else {key: filled(value) if isinstance(value, str) else value for key, value in body.items()}
        status, headers, text, operations = await counted(face, filled(route), asked)
        assert isinstance(text, str)
        answers.append((status, headers, text.replace(name, "ID").replace(future, "FUTURE"), operations))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404

"""What a session leaves beside its models and samplers goes with it: uploaded losses, and the answers to refused creations."""

from pathlib import Path

from tests.fakes.face import BASE, open_face
from tests.unit.engines.traced import call, graph_of, ref
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.lifecycle.retention import KEPT_MS, CatalogSweep
from tinsmith.lifecycle.sessions import end_session


async def test_losses_and_refusals_go_a_day_after_the_end_of_their_session(tmp_path: Path):
    async with open_face(gateway={"custom_losses": True}) as face:
        session_id, other = await face.session(), await face.session()
        rids = []
        for each in (session_id, other):
            loss = {"inputs": [{"name": "logprobs", "rank": 1}], "graph": graph_of(call("call_method", "total", "sum", ref("logprobs")))}
            uploaded = {"session_id": each, "custom_loss_seq_id": 0, "name": "mine"} | loss
            unsound = {"session_id": each, "model_seq_id": 0, "base_model": BASE, "optimizer_config": {"type": "dimuon"}}
            rids += [
                (await face.ok("/create_custom_loss", uploaded))["request_id"],
                (await face.ok("/create_model", unsound))["request_id"],
            ]
        sweep = CatalogSweep(face.store, Checkpoints(DirectoryStorage(tmp_path)), holder="a", lease_ms=20_000)
        await end_session(face.services.catalog, face.lanes, "local", session_id, reason="success", now_ms=face.clock[0])
        face.advance(KEPT_MS - 1)
        await sweep.run()
        assert [(await face.retrieve(rid)).status_code for rid in rids] == [200] * 4
        face.advance(1)
        await sweep.run()
        assert [(await face.retrieve(rid)).status_code for rid in rids] == [404, 404, 200, 200]

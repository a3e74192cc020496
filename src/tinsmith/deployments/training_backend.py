"""A training engine with its gate, its checkpoints and the catalog: what the executor of a trainer replica runs commands on.

It turns commands into engine calls and their answers into outcomes: encoded results, artifacts, and the catalog records that become
visible when the outcome is settled. It decides what a failure means for the adapter: a refusal is answered as a failed outcome and has no
effect; anything else is raised, and the executor rebuilds the adapter. Knows nothing of lanes' order, leases or HTTP, and not of Ray.
"""

import asyncio
import errno
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence

from tinsmith import telemetry
from tinsmith.deployments.logprob_gap import report_gaps
from tinsmith.engines.base import Answer, Contents, Job, TrainingEngine
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.recovery import Action, plan
from tinsmith.protocol.errors import InternalError, NotFound, RequestRejected, TinsmithError, UserError, ValidationFailed
from tinsmith.protocol.futures import Outcome, Write
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, InflightTarget, ModelRecord, SamplerRecord, checkpoint_path
from tinsmith.protocol.training import (
    ComputeOutput,
    CreateModel,
    EngineCommand,
    LoadWeights,
    LoraConfig,
    OptimOutput,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from tinsmith.protocol.wire import encode_compute_output
from tinsmith.queue.executor import Fetch, Ready
from tinsmith.queue.gate import Gate
from tinsmith.state.catalog import Catalog, checkpoint_write, sampler_write
from tinsmith.state.inflight import InflightTargets, target_writes
from tinsmith.state.lanes import Entry, LaneInfo, Settlement

Clock = Callable[[], Awaitable[int]]  # the store's, ms
Save = SaveWeights | SaveWeightsForSampler | SaveWeightsExternal
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_log = logging.getLogger(__name__)


class _NotSaved(InternalError):
    """A capture could not be made durable; the adapter is as it was."""


class _NotRead(InternalError):
    """A checkpoint's files could not be fetched; the adapter is as it was."""


class TrainingBackend:
    """`queue.executor.Backend` over one engine. `now_ms` is `Store.now_ms`."""

    def __init__(self, engine: TrainingEngine, gate: Gate, checkpoints: Checkpoints, catalog: Catalog, now_ms: Clock) -> None:
        self._engine = engine
        self._gate = gate
        self._checkpoints = checkpoints
        self._catalog = catalog
        self._inflight = InflightTargets(catalog.store)
        self._now_ms = now_ms
        self._loras: dict[str, LoraConfig] = {}  # of the resident adapters

    async def opened(self) -> None:
        await self._gate.opened()

    async def drop(self, lane: str) -> None:
        self._loras.pop(lane, None)
        await self._gate.when_open(self._engine.drop_adapter, lane)

    async def run(self, info: LaneInfo, items: Sequence[Ready]) -> list[Outcome]:
        """One outcome an item. Items are commands of the engine, which share one call of it, or one other command alone."""
        jobs = [Job(info.lane, item.entry.seq, item.command) for item in items if isinstance(item.command, EngineCommand)]
        if jobs and info.lane not in self._loras:
            return [Outcome.failed(_not_created(info.lane), is_tainted=False) for _ in items]
        if len(jobs) == len(items):
            answers = await self._gate.when_open(self._engine.run, jobs)
            report_gaps(info.base, jobs, answers)
            return [_outcome_of(answer) for answer in answers]
        (item,) = items
        return [await self._run_alone(info, item)]

    async def restore(self, info: LaneInfo, replay: Sequence[Entry], fetch: Fetch) -> list[Settlement]:
        """The adapter from `info.snapshot` and the completed entries after it; answers the saves that were captured again on the way.
        Raises whatever stood in its way; the adapter is not usable then."""
        todo = plan(info, replay)
        await self.drop(info.lane)
        if todo.snapshot is not None:
            await self._load_snapshot(info, todo.snapshot)
        saves: list[Settlement] = []
        for step in todo.steps:
            item = Ready(step.entry, await fetch(step.entry))
            (outcome,) = await self.run(info, [item])
            if step.action is Action.CAPTURE:
                saves.append(Settlement(step.entry.seq, outcome))
            elif outcome.failure is not None:
                raise InternalError(f"seq {step.entry.seq} succeeded before and failed when it was run again: {outcome.failure.message}")
        return saves

    async def snapshot(self, info: LaneInfo, seq: int) -> str:
        artifact, size = await self._publish(info, seq, ArtifactKind.SNAPSHOT, Contents.SNAPSHOT)
        telemetry.count(telemetry.SNAPSHOT_BYTES, size, base_model=info.base)
        return artifact

    async def discard(self, artifact: str) -> None:
        await asyncio.to_thread(self._checkpoints.delete, artifact)

    async def _load_snapshot(self, info: LaneInfo, artifact: str) -> None:
        lora = (await self._catalog.model(info.tenant, info.lane)).lora
        files = await asyncio.to_thread(self._checkpoints.read, artifact)
        await self._gate.when_open(self._engine.restore, info.lane, lora, files)
        self._loras[info.lane] = lora

    async def _run_alone(self, info: LaneInfo, item: Ready) -> Outcome:
        """A refusal by engine, files or catalog comes before any effect, and a save has none on the adapter."""
        try:
            match item.command:
                case CreateModel() as command:
                    return await self._create(info, command)
                case LoadWeights() as command:
                    return await self._load(info, command)
                case SaveWeights() as command:
                    return await self._save_training(info, item.entry.seq, command)
                case SaveWeightsForSampler() as command:
                    return await self._save_sampler(info, item.entry.seq, command)
                case SaveWeightsExternal() as command:
                    return await self._save_external(info, item.entry.seq, command)
                case _:
                    raise InternalError(f"{item.command.kind} is not a command to run alone")
        except (UserError, _NotSaved, _NotRead) as refusal:
            return Outcome.failed(refusal, is_tainted=False)

    async def _create(self, info: LaneInfo, command: CreateModel) -> Outcome:
        await self._gate.when_open(self._engine.create_adapter, info.lane, command.lora)
        self._loras[info.lane] = command.lora
        return _json_outcome({"model_id": info.lane, "type": "create_model"})

    async def _load(self, info: LaneInfo, command: LoadWeights) -> Outcome:
        if command.lora is None:
            self._lora(info.lane)
        files = await self._read(command.artifact)
        if command.lora is not None:
            await self._create(info, CreateModel(lora=command.lora))
        try:
            await self._gate.when_open(self._engine.load, info.lane, files, optimizer=command.optimizer)
        except UserError:
            if command.lora is not None:
                await self.drop(info.lane)
            raise
        return _json_outcome({"path": command.path, "model_id": info.lane, "type": "load_weights"})

    async def _read(self, artifact: str) -> dict[str, bytes]:
        """Raises _NotRead where the storage fails, and as `Checkpoints.read`."""
        try:
            return await asyncio.to_thread(self._checkpoints.read, artifact)
        except OSError as error:
            _log.error("artifact %s could not be read", artifact, exc_info=error)
            raise _NotRead("the storage for checkpoints failed: nothing was loaded, the model is as it was; load again") from error

    async def _save_training(self, info: LaneInfo, seq: int, command: SaveWeights) -> Outcome:
        """Capture, make durable, and name: the name appears when the outcome is settled."""
        model = await self._model(info)
        if not command.overwrite:
            await self._check_name_is_free(info, CheckpointKind.TRAINING, command.name)
        artifact, size = await self._publish(info, seq, ArtifactKind.TRAINING, Contents.CHECKPOINT)
        return await self._named(info, model, command, CheckpointKind.TRAINING, command.name, artifact, size)

    async def _save_sampler(self, info: LaneInfo, seq: int, command: SaveWeightsForSampler) -> Outcome:
        """As `_save_training`; a sampler checkpoint is immutable, so its name cannot be used twice."""
        self._lora(info.lane)
        name, sampler_id = command.name, command.sampling_session_id
        if name is not None:
            model = await self._model(info)
            await self._check_name_is_free(info, CheckpointKind.SAMPLER, name)
            artifact, size = await self._publish(info, seq, ArtifactKind.SAMPLER, Contents.SAMPLER)
            return await self._named(info, model, command, CheckpointKind.SAMPLER, name, artifact, size)
        if sampler_id is None:
            raise ValidationFailed("path: name the checkpoint, or send a sampling_session_seq_id for an ephemeral one")
        return await self._save_ephemeral(info, seq, sampler_id, is_inflight=command.mode == "inflight")

    async def _save_external(self, info: LaneInfo, seq: int, command: SaveWeightsExternal) -> Outcome:
        """As a named `_save_sampler`: a PEFT folder under a name that cannot be used twice."""
        model = await self._model(info)
        await self._check_name_is_free(info, CheckpointKind.EXTERNAL, command.name)
        artifact, size = await self._publish(info, seq, ArtifactKind.EXTERNAL, Contents.SAMPLER)
        return await self._named(info, model, command, CheckpointKind.EXTERNAL, command.name, artifact, size)

    async def _save_ephemeral(self, info: LaneInfo, seq: int, sampler_id: str, *, is_inflight: bool) -> Outcome:
        """A sampler without a name. Another one of that number stays as it is.

        The record is written here, and only where there is none: whoever comes second finds it, be it another model's save or a gateway
        that opens a sampler. The settle then writes over no record but this save's own, which an earlier owner of the lane may have left
        with the artifact of its own capture.
        """
        await self._check_number_is_free(info, seq, sampler_id)  # before a capture for nothing
        artifact, _ = await self._publish(info, seq, ArtifactKind.SAMPLER, Contents.SAMPLER)
        now_ms = await self._now_ms()
        target = InflightTarget(tenant=info.tenant, model_id=info.lane, seq=seq, artifact=artifact, created_ms=now_ms)
        record = SamplerRecord(
            tenant=info.tenant,
            session_id=info.session,
            sampler_id=sampler_id,
            base_model=info.base,
            artifact=artifact,
            inflight=target if is_inflight else None,
            created_ms=now_ms,
        )
        if not _is_of_save(await self._catalog.add_sampler(record), info, seq):
            await self.discard(artifact)
            raise _number_used(sampler_id)
        shared = target_writes(target, await self._inflight.of_model(info.tenant, info.lane)) if is_inflight else ()
        return _json_outcome({"sampling_session_id": sampler_id}, artifact=artifact, writes=(sampler_write(record), *shared))

    async def _check_number_is_free(self, info: LaneInfo, seq: int, sampler_id: str) -> None:
        try:
            held = await self._catalog.sampler(info.tenant, sampler_id)
        except NotFound:
            return
        if not _is_of_save(held, info, seq):
            raise _number_used(sampler_id)

    async def _check_name_is_free(self, info: LaneInfo, kind: CheckpointKind, name: str) -> None:
        path = checkpoint_path(info.lane, kind, name)
        try:
            held = await self._catalog.checkpoint(info.tenant, path)
        except NotFound:
            return
        if held.expires_ms is None or held.expires_ms > await self._now_ms():
            raise RequestRejected(f"name {name!r}: {path} exists already; choose another name, or overwrite it where that is offered")

    async def _publish(self, info: LaneInfo, seq: int, kind: ArtifactKind, contents: Contents) -> tuple[str, int]:
        """(artifact id, bytes) of a durable capture that nobody knows of yet. Raises _NotSaved where the storage fails."""
        artifact = artifact_id(info.tenant, info.lane, kind, seq=seq, token=info.token)
        files = await self._gate.when_open(self._engine.capture, info.lane, contents)
        try:
            manifest = await asyncio.to_thread(self._checkpoints.write, artifact, files)
        except OSError as error:
            _log.error("artifact %s could not be written", artifact, exc_info=error)
            raise _not_saved(error) from error
        return artifact, manifest.size_bytes

    async def _named(
        self, info: LaneInfo, model: ModelRecord, command: Save, kind: CheckpointKind, name: str, artifact: str, size: int
    ) -> Outcome:
        """The checkpoint carries what its model was created with, so that a model made from it trains on as this one does."""
        now_ms = await self._now_ms()
        record = CheckpointRecord(
            tenant=info.tenant,
            session_id=info.session,
            run_id=info.lane,
            kind=kind,
            name=name,
            artifact=artifact,
            base_model=info.base,
            lora=model.lora,
            optimizer=model.optimizer,
            schedule=model.schedule,
            created_ms=now_ms,
            size_bytes=size,
            expires_ms=None if command.ttl_seconds is None else now_ms + 1000 * command.ttl_seconds,
            user_metadata=command.user_metadata,
        )
        told: dict[str, object] = {"path": record.path}
        if kind is CheckpointKind.EXTERNAL:
            told["size_bytes"] = size
        return _json_outcome(told, artifact=artifact, writes=(checkpoint_write(record),))

    async def _model(self, info: LaneInfo) -> ModelRecord:
        """Raises NotFound for a model whose creation failed."""
        self._lora(info.lane)
        return await self._catalog.model(info.tenant, info.lane)

    def _lora(self, lane: str) -> LoraConfig:
        lora = self._loras.get(lane)
        if lora is None:
            raise _not_created(lane)
        return lora


def _not_created(lane: str) -> NotFound:
    return NotFound(f"model {lane!r} is not there: its creation failed; create a new one")


def _is_of_save(record: SamplerRecord, info: LaneInfo, seq: int) -> bool:
    """Whether entry `seq` of the lane made the sampler, whichever owner ran it."""
    own = artifact_id(info.tenant, info.lane, ArtifactKind.SAMPLER, seq=seq, token=info.token)
    return record.artifact is not None and record.artifact.rpartition("-")[0] == own.rpartition("-")[0]


def _number_used(sampler_id: str) -> RequestRejected:
    number = sampler_id.rpartition(":")[2]
    return RequestRejected(f"sampler number {number} was used for another sampler, which stays as it is; count on")


def _not_saved(error: OSError) -> _NotSaved:
    """Without the path, which is the server's own."""
    if error.errno in _FULL:
        return _NotSaved(
            "the storage for checkpoints is full: nothing was saved, the model is as it was; ask the operator for space, then save again"
        )
    condition = "unknown" if error.errno is None else os.strerror(error.errno)
    return _NotSaved(
        f"the storage for checkpoints failed ({condition}): nothing was saved, the model is as it was; save again, or ask the operator"
    )


def _outcome_of(answer: Answer) -> Outcome:
    match answer:
        case ComputeOutput():
            return Outcome(result=encode_compute_output(answer))
        case OptimOutput():
            return _json_outcome({"metrics": answer.metrics})
        case TinsmithError():
            return Outcome.failed(answer, is_tainted=False)


def _json_outcome(result: dict[str, object], *, artifact: str | None = None, writes: tuple[Write, ...] = ()) -> Outcome:
    return Outcome(result=json.dumps(result, allow_nan=False).encode(), artifact=artifact, writes=writes)

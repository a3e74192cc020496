"""Items 1 to 5 and 8: sessions, models, passes, chunks, pipelines, steps, checkpoints."""

import uuid
from collections.abc import Sequence

import tinker
from tinker import types

from tinsmith.conformance import data
from tinsmith.conformance.items import (
    Item,
    NotRun,
    Target,
    answer,
    category,
    client,
    expect,
    expect_equal,
    failure,
    item,
    needs_option,
)
from tinsmith.conformance.raw import Wire

NUM_CHUNKED = 2_500  # datums: more than two chunks of 1,024
DAY_S = 24 * 3600


@item("1", "capabilities; a session is opened and closed")
def sessions(target: Target) -> None:
    service = target.service(user_metadata={"made_by": "conformance"})
    names = [model.model_name for model in service.get_server_capabilities().supported_models]
    expect(target.model in names, f"supported_models: expected {target.model} among {names}")
    session_id = _session_of(target.trainer(service))
    if hasattr(service, "close"):
        answer(service.close("success"))
        with Wire(target) as wire:
            expect_equal(wire.post("session_heartbeat", {"session_id": session_id}).status_code, 410, "status of a heartbeat after the end")


@item("2", "create_lora_training_client of rank 8, get_info")
def models(target: Target) -> None:
    info = target.trainer(target.service()).get_info()
    expect_equal(info.model_data.model_name, target.model, "model_data.model_name")
    expect(info.model_id.rpartition(":train:")[2].isdigit(), f"model_id: {info.model_id!r} is not <session>:train:<n>")
    expect_equal(info.lora_rank, 8, "lora_rank")


@item("2b", "get_tokenizer")
def tokenizers(target: Target) -> None:
    trainer = target.trainer(target.service())
    try:
        tokenizer = trainer.get_tokenizer()
    except (OSError, ImportError) as error:
        raise NotRun("the base model's name is no tokenizer that this machine has or may fetch") from error
    expect(tokenizer.encode("a word"), "the tokenizer encodes nothing")


@item("3", "forward equals forward_backward; 1-D and 2-D targets; loss:sum is a plain sum")
def passes(target: Target) -> None:
    trainer = target.trainer(target.service())
    datums = [data.weighted(data.tokens(9, target.vocab_size, seed)) for seed in range(3)]
    forward, both = answer(trainer.forward(datums, "cross_entropy")), answer(trainer.forward_backward(datums, "cross_entropy"))
    expect_equal(len(forward.loss_fn_outputs), 3, "number of loss_fn_outputs")
    for index in range(3):
        expect(
            data.logprobs(forward, index) == data.logprobs(both, index), f"logprobs of datum {index} differ between forward and backward"
        )
        expect_equal(len(data.logprobs(forward, index)), 8, "logprobs a datum")
    total = -sum(sum(data.logprobs(forward, index)) for index in range(3))
    expect(data.is_close(data.loss(forward), total), f"loss:sum: expected {total}, got {data.loss(forward)}")
    wide = answer(trainer.forward([_soft_targets(target)], "cross_entropy"))
    expect_equal(list(wide.loss_fn_outputs[0]["logprobs"].shape or ()), [8, 2], "shape of logprobs of [8, 2] targets")


@item("3b", "targets and weights as CSR are those that are dense")
def sparse_targets(target: Target) -> None:
    needs_option(types.TensorData, "sparse_crow_indices")
    trainer = target.trainer(target.service())
    ids = data.tokens(9, target.vocab_size)
    outputs = [answer(trainer.forward_backward([_cells(ids, is_sparse)], "cross_entropy")) for is_sparse in (False, True)]
    expect(
        data.is_close(data.loss(outputs[0]), data.loss(outputs[1])), f"loss:sum: {data.loss(outputs[0])} dense, {data.loss(outputs[1])} CSR"
    )
    shapes = [list(output.loss_fn_outputs[0]["logprobs"].shape or ()) for output in outputs]
    expect_equal(shapes, [[8, 3], [8, 3]], "shapes of logprobs, dense and CSR")
    named = [data.logprobs(output)[::3] for output in outputs]
    expect(data.are_close(named[0], named[1]), "logprobs of the cells that CSR names are not those of the dense tensor")


@item("4", f"{NUM_CHUNKED:,} datums come in chunks: outputs keep their order, gradients add")
def chunks(target: Target) -> None:
    check_chunks(target, NUM_CHUNKED)


@item("5", "forward_backward and optim_step back to back, 20 times, without waiting")
def pipelines(target: Target) -> None:
    trainer = target.trainer(target.service())
    datums = [data.weighted(data.tokens(9, target.vocab_size))]
    adam = types.AdamParams(learning_rate=1e-2)
    steps = [(trainer.forward_backward(datums, "cross_entropy"), trainer.optim_step(adam)) for _ in range(20)]
    losses = [data.loss(answer(passed)) for passed, _ in steps]
    for _, step in steps:
        answer(step)
    expect(losses[-1] < losses[0], f"the loss of the same datum did not fall: {losses[0]} to {losses[-1]}")
    before = answer(trainer.forward(datums, "cross_entropy"))
    answer(trainer.forward_backward(datums, "cross_entropy"))
    answer(trainer.optim_step(types.AdamParams(learning_rate=0.0)))
    after = answer(trainer.forward(datums, "cross_entropy"))
    expect(data.logprobs(before) == data.logprobs(after), "a step of learning rate 0 changed the weights")


@item("5b", "gradients are clipped by their norm over all weights")
def clipping(target: Target) -> None:
    needs_option(types.AdamParams, "grad_clip_norm")
    service = target.service()
    ids = data.tokens(9, target.vocab_size)

    def stepped(weight: float, bound: float) -> list[float]:
        trainer = target.trainer(service)
        answer(trainer.forward_backward([data.datum(ids, weights=[weight] * 8)], "cross_entropy"))
        # With an eps far over the gradient a step grows with the gradient.
        answer(trainer.optim_step(types.AdamParams(learning_rate=0.5, eps=1.0, grad_clip_norm=bound)))
        return data.logprobs(answer(trainer.forward([data.weighted(ids)], "cross_entropy")))

    once, free, far = stepped(1.0, 1e-2), stepped(1.0, 0.0), stepped(100.0, 1e-2)
    expect(data.are_close(once, far, 1e-5), "a gradient 100 times as long makes another step although both are clipped")
    expect(not data.are_close(once, free, 1e-5), "clipping to 0.01 changes nothing")


@item("5c", "weight decay is decoupled: learning rate times decay is the share that a step takes away")
def decay(target: Target) -> None:
    needs_option(types.AdamParams, "weight_decay")
    trainer = target.trainer(target.service())
    ids = data.tokens(9, target.vocab_size)
    still = [data.datum(ids, weights=[0.0] * 8)]

    def now() -> list[float]:
        return data.logprobs(answer(trainer.forward([data.weighted(ids)], "cross_entropy")))

    def step(datums: list[types.Datum], share: float) -> None:
        answer(trainer.forward_backward(datums, "cross_entropy"))
        # beta1 0: without a gradient only the decay moves the weights.
        answer(trainer.optim_step(types.AdamParams(learning_rate=0.05, beta1=0.0, weight_decay=share / 0.05)))

    step([data.weighted(ids)], 0.0)
    trained = now()
    step(still, 0.0)
    expect(data.are_close(now(), trained, 1e-5), "a step without gradient and decay changed the weights")
    step(still, 0.5)
    expect(not data.are_close(now(), trained, 1e-5), "a decay by half changed nothing")


@item("8", "save_state, from_state with and without the optimizer, load_state")
def checkpoints(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    datums = [data.weighted(data.tokens(9, target.vocab_size))]
    adam = types.AdamParams(learning_rate=1e-2)

    def step(of: tinker.TrainingClient) -> None:
        answer(of.forward_backward(datums, "cross_entropy"))
        answer(of.optim_step(adam))

    def now(of: tinker.TrainingClient) -> list[float]:
        return data.logprobs(answer(of.forward(datums, "cross_entropy")))

    step(trainer)
    path = answer(trainer.save_state(f"state-{uuid.uuid4().hex[:12]}")).path
    expect(path.startswith("tinker://") and "/weights/" in path, f"path: {path!r}")
    saved = now(trainer)
    step(trainer)
    resumed = client(service.create_training_client_from_state_with_optimizer(path))
    expect(now(resumed) == saved, "the weights of from_state_with_optimizer are not those that were saved")
    step(resumed)
    expect(now(resumed) == now(trainer), "the step after from_state_with_optimizer is not bit-equal")
    fresh = client(service.create_training_client_from_state(path))
    step(fresh)
    expect(now(fresh) != now(trainer), "from_state kept the optimizer")
    answer(trainer.load_state(path))
    expect(now(trainer) == saved, "load_state did not bring the saved weights back")


@item("8b", "a state that is saved for a time; a name that is taken, and one that may be written over")
def kept_states(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    needs_option(trainer.save_state, "overwrite")
    datums = [data.weighted(data.tokens(9, target.vocab_size))]
    path = answer(trainer.save_state("again", ttl_seconds=DAY_S)).path
    [kept] = answer(service.create_rest_client().list_checkpoints(path.split("/")[2])).checkpoints
    expect(kept.expires_at is not None, "expires_at is unset after a save with a time to live")
    answer(trainer.forward_backward(datums, "cross_entropy"))
    answer(trainer.optim_step(types.AdamParams(learning_rate=1e-2)))
    expect_equal(category(failure(trainer.save_state("again"))), "user", "category of a save under a name that is taken")
    expect_equal(answer(trainer.save_state("again", overwrite=True)).path, path, "path of a save over a name that is taken")
    now = data.logprobs(answer(trainer.forward(datums, "cross_entropy")))
    resumed = client(service.create_training_client_from_state(path))
    expect(data.logprobs(answer(resumed.forward(datums, "cross_entropy"))) == now, "the state is not the one that was saved last")


def check_chunks(target: Target, num: int) -> None:
    """A pass over `num` datums, a multiple of 25, is that of 25 of them. Raises Mismatch."""
    service = target.service()
    trainer = target.trainer(service)
    few = [data.weighted(data.tokens(3 + seed % 3, target.vocab_size, seed)) for seed in range(25)]
    times = num // len(few)
    alone = answer(trainer.forward(few, "cross_entropy"))
    many = answer(trainer.forward_backward(few * times, "cross_entropy"))
    expect_equal(len(many.loss_fn_outputs), num, "number of loss_fn_outputs")
    for index in range(num):
        same = data.are_close(data.logprobs(many, index), data.logprobs(alone, index % len(few)))
        expect(same, f"logprobs of datum {index} are not those of the same datum alone")
    expect(data.is_close(data.loss(many), data.loss(alone) * times, 1e-3), "loss:sum is not the sum over chunks")
    norm = _gradient_norm(trainer)
    if norm is not None:
        once = target.trainer(service)
        answer(once.forward_backward(few, "cross_entropy"))
        wanted = (_gradient_norm(once) or 0.0) * times
        expect(data.is_close(norm, wanted, 1e-3), f"gradient norm over chunks: expected {wanted}, got {norm}")


def _gradient_norm(trainer: tinker.TrainingClient) -> float | None:
    """Of what was gathered; a step of learning rate 0 spends it. None where the server tells no norm."""
    metrics = answer(trainer.optim_step(types.AdamParams(learning_rate=0.0))).metrics or {}
    return next((float(value) for name, value in metrics.items() if name.startswith("unclipped_grad_l2")), None)


def _soft_targets(target: Target) -> types.Datum:
    ids = data.tokens(9, target.vocab_size)
    pairs = [token for row in zip(ids[1:], reversed(ids[1:]), strict=True) for token in row]
    inputs = {
        "target_tokens": types.TensorData(data=pairs, dtype="int64", shape=[8, 2]),
        "weights": types.TensorData(data=[0.75, 0.25] * 8, dtype="float32", shape=[8, 2]),
    }
    return types.Datum(model_input=data.prompt(ids[:-1]), loss_fn_inputs=inputs)


def _cells(ids: Sequence[int], is_sparse: bool) -> types.Datum:
    """Targets of shape [8, 3] of which the first of each row has weight 1; CSR leaves the others out, dense gives them as 0."""
    rows = {"sparse_crow_indices": list(range(9)), "sparse_col_indices": [0] * 8} if is_sparse else {}
    targets: list[float] = list(ids[1:]) if is_sparse else [cell for token in ids[1:] for cell in (token, 0, 0)]
    weights: list[float] = [1.0] * 8 if is_sparse else [1.0, 0.0, 0.0] * 8
    inputs = {
        "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[8, 3], **rows),
        "weights": types.TensorData(data=weights, dtype="float32", shape=[8, 3], **rows),
    }
    return types.Datum(model_input=data.prompt(ids[:-1]), loss_fn_inputs=inputs)


def _session_of(trainer: tinker.TrainingClient) -> str:
    return str(trainer.get_info().model_id).partition(":")[0]


ITEMS: tuple[Item, ...] = (
    sessions,
    models,
    tokenizers,
    passes,
    sparse_targets,
    chunks,
    pipelines,
    clipping,
    decay,
    checkpoints,
    kept_states,
)

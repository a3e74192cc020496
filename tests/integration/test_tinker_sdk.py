"""The stock SDK against the gateway, with fake engines behind it."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.fakes.in_process import BASE, INFO, InProcessServer, serve
from tinsmith.gateway.tinker.futures import METADATA_BYTES

RESULT_S = 30

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    with serve(tmp_path_factory.mktemp("artifacts")) as running:
        yield running


@pytest.fixture
def service(server: InProcessServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    yield client
    client.close("success").result()


def trainer(service: tinker.ServiceClient, **options: object) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE, rank=8, **options).result(RESULT_S)


def datum(*tokens: int, weights: list[float] | None = None) -> types.Datum:
    inputs: dict[str, object] = {"target_tokens": np.array(tokens[1:])}
    if weights is not None:
        inputs["weights"] = np.array(weights, dtype=np.float32)
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


DATA = [datum(1, 2, 3, 4), datum(5, 6, 7)]


def test_capabilities(server: InProcessServer):
    client = tinker.RestClient(base_url=server.url, api_key="tml-test")
    capabilities = client.get_server_capabilities().result(RESULT_S)
    client.holder.close()  # the SDK would keep its connections for the life of the process
    (model,) = capabilities.supported_models
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == (BASE, 4096, True, True)


def test_create_and_describe_a_model(service: tinker.ServiceClient):
    client = trainer(service, seed=3)
    info = client.get_info()
    assert info.model_data.model_name == BASE
    assert info.lora_rank == 8
    assert info.model_id == client.model_id


@pytest.mark.parametrize("rank", [0, 4096])
def test_a_model_that_cannot_be_created_fails_its_future_and_the_service_goes_on(service: tinker.ServiceClient, rank):
    with pytest.raises(tinker.RequestFailedError, match="lora_config") as failed:
        service.create_lora_training_client(BASE, rank=rank).result(RESULT_S)
    assert failed.value.category == types.RequestErrorCategory.User
    assert trainer(service).forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"] > 0


def test_an_optimizer_that_is_not_known_fails_the_creation(service: tinker.ServiceClient):
    with pytest.raises(tinker.RequestFailedError, match="dimuon") as failed:
        trainer(service, optimizer=types.DimuonOptimizerConfig())
    assert failed.value.category == types.RequestErrorCategory.User
    path = trainer(service).save_state("for-another").result(RESULT_S).path
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        service.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()).result(RESULT_S)
    assert service.create_training_client_from_state(path).result(RESULT_S).get_info().lora_rank == 8


def test_forward_and_forward_backward_agree(service: tinker.ServiceClient):
    client = trainer(service)
    forward = client.forward(DATA, "cross_entropy").result(RESULT_S)
    backward = client.forward_backward(DATA, "cross_entropy").result(RESULT_S)
    assert [output["logprobs"].shape for output in backward.loss_fn_outputs] == [[3], [2]]
    for one, other in zip(forward.loss_fn_outputs, backward.loss_fn_outputs, strict=True):
        assert one["logprobs"].tolist() == other["logprobs"].tolist()
    assert forward.metrics["loss:sum"] == backward.metrics["loss:sum"] > 0
    assert all(name.count(":") == 1 for name in backward.metrics)


def test_training_lowers_the_loss(service: tinker.ServiceClient):
    client = trainer(service)
    losses = []
    for _ in range(5):
        step = client.forward_backward(DATA, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.1))
        losses.append(step.result(RESULT_S).metrics["loss:sum"])
    assert losses[-1] < losses[0]


def test_chunks_that_arrive_out_of_order_keep_the_order_of_their_outputs(service: tinker.ServiceClient):
    client = trainer(service)
    data = [datum(*range(index % 7, index % 7 + 2 + index % 3)) for index in range(2500)]
    result = client.forward_backward(data, "cross_entropy").result(RESULT_S)
    assert [output["logprobs"].shape[0] for output in result.loss_fn_outputs] == [1 + index % 3 for index in range(2500)]
    whole = sum(float(np.sum(output["logprobs"].to_numpy())) for output in result.loss_fn_outputs)
    assert result.metrics["loss:sum"] == pytest.approx(-whole, rel=1e-5)


def test_steps_sent_back_to_back_run_in_order(service: tinker.ServiceClient):
    client = trainer(service)
    futures = []
    for _ in range(20):
        futures += [client.forward_backward(DATA, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=0.05))]
    losses = [future.result(RESULT_S).metrics["loss:sum"] for future in futures[::2]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.proves("R28")
@pytest.mark.parametrize(
    ("data", "loss", "names"),
    [
        (DATA, "no_such_loss", "loss_fn"),
        (DATA, "importance_sampling", "logprobs"),
        ([datum(1, 2, 3, weights=[1.0])], "cross_entropy", "weights"),
        ([datum(1, 2, 3), datum(*range(5000))], "cross_entropy", "context"),
        ([datum(1, 60_000, 3)], "cross_entropy", "token"),
    ],
)
def test_bad_input_fails_its_future_and_the_client_goes_on(service: tinker.ServiceClient, data, loss, names):
    client = trainer(service)
    with pytest.raises(tinker.RequestFailedError, match=names) as failed:
        client.forward_backward(data, loss).result(RESULT_S)
    assert failed.value.category == types.RequestErrorCategory.User
    assert client.forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"] > 0
    client.optim_step(types.AdamParams()).result(RESULT_S)


def test_a_negative_learning_rate_fails_its_step_alone(service: tinker.ServiceClient):
    client = trainer(service)
    bad = client.optim_step(types.AdamParams(learning_rate=-1))
    good = client.optim_step(types.AdamParams(learning_rate=0.1))
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        bad.result(RESULT_S)
    good.result(RESULT_S)


def test_save_load_and_resume(service: tinker.ServiceClient):
    client = trainer(service)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.1))
    path = client.save_state("step-1", overwrite=True).result(RESULT_S).path
    assert path == f"tinker://{client.model_id}/weights/step-1"
    saved = client.forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"]
    resumed = service.create_training_client_from_state_with_optimizer(path).result(RESULT_S)
    assert resumed.get_info().lora_rank == 8
    assert resumed.forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"] == saved
    for each in (client, resumed):
        each.forward_backward(DATA, "cross_entropy")
        each.optim_step(types.AdamParams(learning_rate=0.1))
    after = [each.forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"] for each in (client, resumed)]
    assert after[0] == after[1] != saved
    with pytest.warns(FutureWarning, match="load_state"):
        client.load_state(path).result(RESULT_S)
    assert client.forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"] == saved


def test_a_checkpoint_that_is_not_there(service: tinker.ServiceClient):
    client = trainer(service)
    with pytest.warns(FutureWarning, match="load_state"):
        load = client.load_state("tinker://nobody/weights/nothing")
    with pytest.raises(tinker.RequestFailedError, match="unknown"):
        load.result(RESULT_S)
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state("tinker://nobody/weights/nothing").result(RESULT_S)
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path="tinker://nobody/sampler_weights/nothing").result(RESULT_S)


def test_names_of_checkpoints_are_checked(service: tinker.ServiceClient):
    client = trainer(service)
    with pytest.raises(tinker.RequestFailedError, match="path"):
        client.save_state("../escape").result(RESULT_S)
    client.save_state("good").result(RESULT_S)


PROMPT = types.ModelInput.from_ints([1, 2, 3])


def sample(client: tinker.SamplingClient, num_samples: int = 1, **params: object) -> types.SampleResponse:
    return client.sample(PROMPT, num_samples=num_samples, sampling_params=types.SamplingParams(**params)).result(RESULT_S)


def test_sample_from_the_base_model(service: tinker.ServiceClient):
    client = service.create_sampling_client(base_model=BASE).result(RESULT_S)
    answer = sample(client, num_samples=4, max_tokens=6, seed=1)
    assert [len(sequence.tokens) for sequence in answer.sequences] == [6] * 4
    assert [len(sequence.logprobs) for sequence in answer.sequences] == [6] * 4
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 4
    assert {sequence.stop_reason for sequence in answer.sequences} == {"length"}
    again = sample(client, num_samples=4, max_tokens=6, seed=1)
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in answer.sequences]


def test_sampled_logprobs_are_those_of_the_prompt(service: tinker.ServiceClient):
    client = service.create_sampling_client(base_model=BASE).result(RESULT_S)
    (sequence,) = sample(client, max_tokens=4, seed=2).sequences
    logprobs = client.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, *sequence.tokens])).result(RESULT_S)
    assert logprobs[0] is None
    assert logprobs[3:] == pytest.approx(sequence.logprobs, rel=1e-4)


@pytest.mark.proves("R45")
def test_a_prompt_may_fill_the_context_and_no_more(service: tinker.ServiceClient):
    client = service.create_sampling_client(base_model=BASE).result(RESULT_S)
    full = client.compute_logprobs(types.ModelInput.from_ints([1] * INFO.max_context)).result(RESULT_S)
    assert len(full) == INFO.max_context
    with pytest.raises(tinker.UnprocessableEntityError, match="context"):
        client.compute_logprobs(types.ModelInput.from_ints([1] * (INFO.max_context + 1))).result(RESULT_S)


def test_a_sample_ends_where_the_context_does(service: tinker.ServiceClient):
    client = service.create_sampling_client(base_model=BASE).result(RESULT_S)
    prompt = types.ModelInput.from_ints([1] * (INFO.max_context - 6))
    answer = client.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=100)).result(RESULT_S)
    assert [(len(sequence.tokens), sequence.stop_reason) for sequence in answer.sequences] == [(6, "length")]


def test_a_large_result_is_fetched_in_two_turns(service: tinker.ServiceClient):
    tokens = [1] * INFO.max_context
    whole = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": np.array(tokens)})
    result = trainer(service).forward([whole] * 70, "cross_entropy").result(RESULT_S)
    assert sum(output["logprobs"].to_numpy().nbytes for output in result.loss_fn_outputs) > METADATA_BYTES


def test_a_snapshot_stays_as_it_was_while_training_goes_on(service: tinker.ServiceClient):
    client = trainer(service)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.5))
    ephemeral = client.save_weights_and_get_sampling_client().result(RESULT_S)
    path = client.save_weights_for_sampler("named").result(RESULT_S).path
    assert path == f"tinker://{client.model_id}/sampler_weights/named"
    named = service.create_sampling_client(model_path=path).result(RESULT_S)
    before = ephemeral.compute_logprobs(PROMPT).result(RESULT_S)
    assert named.compute_logprobs(PROMPT).result(RESULT_S) == before
    base = service.create_sampling_client(base_model=BASE).result(RESULT_S)
    assert base.compute_logprobs(PROMPT).result(RESULT_S) != before
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.5)).result(RESULT_S)
    assert ephemeral.compute_logprobs(PROMPT).result(RESULT_S) == before


@pytest.mark.proves("R67")
def test_a_closed_client_ends_its_session(server: InProcessServer):
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    model_id = trainer(client).model_id
    session_id = model_id.partition(":")[0]
    client.close("success").result()
    record = server.call(server.services.catalog.session("local", session_id))
    assert record.end_reason == "success"
    assert server.call(server.services.catalog.model("local", model_id)).ended_ms is not None

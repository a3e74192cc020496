"""Everything that the stock SDK can ask of a sample, answered through its own decoder and its own checks."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.fakes.in_process import BASE, InProcessServer, serve
from tinsmith.engines.prefixes import PREFILL_CHUNK

RESULT_S = 30
TOKENS = [3, 1, 4, 1, 5, 9]
PROMPT = types.ModelInput.from_ints(TOKENS)

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Sparse CSR tensor support is in beta:UserWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    with serve(tmp_path_factory.mktemp("artifacts")) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: InProcessServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE).result(RESULT_S)


def sample(client: tinker.SamplingClient, prompt: types.ModelInput = PROMPT, num_samples: int = 1, **asked: object) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=3, seed=1)
    return client.sample(prompt, num_samples=num_samples, sampling_params=params, **asked).result(RESULT_S)  # type: ignore[arg-type]


def test_the_best_of_each_sampled_token(sampler: tinker.SamplingClient):
    for sequence in sample(sampler, num_samples=2, topk_sample_logprobs=4).sequences:
        assert sequence.topk_logprobs_np.token_ids.shape == (3, 4)
        for token, logprob, best in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert dict(best).get(token, logprob) == logprob


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_targets_come_back_in_the_layout_that_they_were_sent_in(sampler: tinker.SamplingClient, layout: str):
    ids = torch.full((5, 8), -1)  # wide enough for the SDK to send it sparse
    for row, column, token in ((1, 0, 4), (2, 0, 1), (2, 5, 7), (4, 7, 9)):
        ids[row, column] = token
    sent = types.TensorData.from_torch(ids) if layout == "dense" else types.TensorData.from_torch_sparse(ids, pad_value=-1)
    assert (sent.sparse_crow_indices is not None) is (layout == "sparse")
    answer = sample(sampler, include_prompt_logprobs=True, target_prompt_logprobs=sent)
    scored = answer.target_prompt_logprobs
    assert (scored.sparse_crow_indices, scored.sparse_col_indices) == (sent.sparse_crow_indices, sent.sparse_col_indices)
    dense = np.zeros((5, 8), dtype=np.float32)
    if layout == "dense":
        dense[:] = scored.to_numpy()
    else:
        dense[np.repeat(range(5), np.diff(scored.sparse_crow_indices)), scored.sparse_col_indices] = scored.data
    assert (dense != 0).tolist() == (ids != -1).tolist()
    of_prompt = answer.prompt_logprobs
    assert [dense[1, 0], dense[2, 0], dense[4, 7]] == pytest.approx([of_prompt[2], of_prompt[3], of_prompt[5]])


def test_alternatives_of_the_prompt(sampler: tinker.SamplingClient):
    drawn = sample(sampler, prompt_alt_tokens_k=3).prompt_alt_tokens
    assert (drawn.tokens.shape, drawn.tokens.dtype) == ([5, 3], "int64")
    assert (drawn.logprobs.shape, drawn.logprobs.dtype) == ([5, 3], "float32")
    assert drawn.tokens.tolist() == sample(sampler, prompt_alt_tokens_k=3).prompt_alt_tokens.tokens.tolist()


def test_the_last_n(sampler: tinker.SamplingClient):
    full = sampler.compute_logprobs(PROMPT).result(RESULT_S)
    assert sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result(RESULT_S) == [None] * 4 + full[4:]
    with pytest.raises(tinker.UnprocessableEntityError, match="prompt_logprobs_last_n"):
        sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=len(TOKENS)).result(RESULT_S)


def test_hits_of_the_prompt_cache_are_told(sampler: tinker.SamplingClient):
    prompt = types.ModelInput.from_ints(list(range(PREFILL_CHUNK + 2)))
    assert [sample(sampler, prompt).prompt_cache_hit_tokens for _ in range(2)] == [0, PREFILL_CHUNK]


def test_image_chunks_are_refused_by_their_place(sampler: tinker.SamplingClient, service: tinker.ServiceClient):
    image = types.ImageChunk(data=b"no image", format="png", expected_tokens=2)
    mixed = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), image])
    with pytest.raises(tinker.UnprocessableEntityError, match=r"prompt\.chunks\[1\]: image chunks need"):
        sample(sampler, mixed)
    trainer = service.create_lora_training_client(BASE, rank=8).result(RESULT_S)
    datum = types.Datum(model_input=mixed, loss_fn_inputs={"target_tokens": np.array([1, 2, 3])})
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\]\.model_input\.chunks\[1\]: image chunks need") as failed:
        trainer.forward_backward([datum], "cross_entropy").result(RESULT_S)
    assert failed.value.category == types.RequestErrorCategory.User

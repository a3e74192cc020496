"""An adapter that was trained over HTTP is a plain PEFT folder: PEFT gives the log-probs that the server gives."""

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import Stack
from tests.e2e.lessons import create, logprobs_of, pipelined_losses, sdk_datum, tokens_of
from tinsmith.protocol.sessions import BaseModelInfo

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),  # the served head is an adapter of its own
]


def test_a_named_sampler_checkpoint_loads_in_peft(stack: Stack, smollm2: BaseModelInfo, tmp_path: Path) -> None:
    service = tinker.ServiceClient(base_url=stack.server.url, api_key="tml-local")
    client = create(service)
    pipelined_losses(client, 3)
    path = client.save_weights_for_sampler("export").result().path
    trained = logprobs_of(client.forward([sdk_datum(0)], "cross_entropy").result())[0]
    sampler = client.create_sampling_client(path)
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(tokens_of(0))).result()[1:]

    files = stack.files(path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(files[name])
    base = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    tokens = torch.tensor([tokens_of(0)])
    with torch.no_grad():
        logits_TV = model(input_ids=tokens[:, :-1]).logits[0]
    reloaded = torch.log_softmax(logits_TV.double(), -1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(trained, reloaded, atol=1e-3)
    np.testing.assert_allclose(np.array(sampled, dtype=float), reloaded, atol=1e-3)
    with model.disable_adapter(), torch.no_grad():
        plain = torch.log_softmax(model(input_ids=tokens[:, :-1]).logits[0].double(), -1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    assert np.abs(plain - reloaded).max() > 1e-2, "the adapter must have learnt something, else this proves nothing"
    service.close("success").result()

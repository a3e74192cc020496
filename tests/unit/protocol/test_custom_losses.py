"""The schema of custom losses: what is accepted, each bound once, and every way round the allow-list."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError

from tests.unit.engines.datums import datum, ints, tensor
from tests.unit.engines.traced import call, graph_of, loss_of, ref, sent, traced
from tinsmith.protocol import wire
from tinsmith.protocol.custom_losses import (
    MAX_ARGUMENTS,
    MAX_INPUTS,
    MAX_LOSS_BYTES,
    MAX_NODES,
    CpuDevice,
    CustomLoss,
    DTypeName,
    Ref,
    check_custom_loss,
    decode_argument,
    output_of,
)
from tinsmith.protocol.errors import PayloadTooLarge, ValidationFailed
from tinsmith.protocol.loss_checks import Limits, check_compute
from tinsmith.protocol.tensors import Tensor
from tinsmith.protocol.training import Compute

LOG = ref("logprobs")
SUM = call("call_method", "total", "sum", LOG)


def neg_ll(logprobs, weights):
    loss = -(logprobs * weights.to(torch.float32))[..., 1:].sum()
    return loss, {"custom/neg_ll:sum": loss}


def refusal(loss: CustomLoss, kind: type[Exception] = ValidationFailed) -> str:
    with pytest.raises(kind) as refused:
        check_custom_loss(loss)
    return str(refused.value)


def test_what_the_sdk_traces_is_accepted_and_survives_the_store():
    loss = traced(neg_ll)
    check_custom_loss(loss)
    total, metrics = output_of(loss)
    assert metrics == {"custom/neg_ll:sum": total}
    command = Compute((), "custom", {}, backward=True, custom_loss=loss)
    body = wire.encode_command(command)
    assert wire.decode_command(command.kind, body) == command
    assert wire.digest(command) != wire.digest(replace(command, custom_loss=loss_of(SUM)))
    assert wire.encode_command(command) == body


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ({"ref": "a"}, Ref("a")),
        ({"tuple": [1, None, {"slice": [None, {"ref": "n"}, 2]}]}, (1, None, slice(None, Ref("n"), 2))),
        ([1.5, True], [1.5, True]),
        ({"ellipsis": True}, ...),
        ({"float": "-inf"}, float("-inf")),
        ({"dtype": "int64"}, DTypeName("int64")),
        ({"device": "cpu"}, CpuDevice()),
        ({"dict": {"custom/a:sum": {"ref": "a"}}}, {"custom/a:sum": Ref("a")}),
    ],
)
def test_arguments(value, meant):
    assert decode_argument(value, "args[0]") == meant


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"ref": "a", "tuple": []},
        {"ref": 1},
        {"float": "1e999"},
        {"ellipsis": False},
        {"slice": [1, 2]},
        {"dtype": "complex64"},
        {"device": "cuda:0"},
        {"layout": "strided"},
        {"memory_format": "contiguous_format"},
        {"code": "import os"},
        2**63,
        float("nan"),
        float("inf"),
        [[[[[[1]]]]]],
        {"tuple": [{"tuple": [{"tuple": [{"tuple": [{"tuple": [1]}]}]}]}]},
    ],
)
def test_arguments_that_are_none(value):
    with pytest.raises(ValidationFailed, match=r"args\[0\]"):
        decode_argument(value, "args[0]")


FUNCTIONS = """
    os.system builtins.eval eval exec torch.load torch.save torch.hub.load torch.rand torch.randn torch.bernoulli torch.empty
    torch.empty_like torch.as_strided torch.from_file torch.set_default_dtype torch.manual_seed torch.nonzero torch.masked_select
    torch.ops.load_library torch.utils.data.DataLoader torch.jit.script torch.compile torch.nn.functional.dropout torch.exp_
    torch.exp.__call__ operator.setitem operator.iadd operator.attrgetter operator.methodcaller operator.lshift operator.concat
    setattr builtins.getattr torch.cdist torch.matmul torch.numel.x torch torch. .exp math.factorial math.comb torch.Tensor.item
"""
METHODS = """
    item tolist numpy backward data __class__ __reduce__ __getattribute__ add_ exp_ copy_ set_ resize_ as_strided map_ apply_
    register_hook share_memory_ storage untyped_storage data_ptr requires_grad_ random_ normal_ uniform_ bernoulli masked_select
    nonzero unique cuda cpu type __dlpack__ retain_grad new_empty unfold split
"""


@pytest.mark.parametrize("target", FUNCTIONS.split())
def test_functions_that_are_not_offered(target):
    message = refusal(loss_of(call("call_function", "x", target, LOG), SUM))
    assert message.startswith("graph.nodes[1].target: the function")
    assert "run the loss in the client" in message


@pytest.mark.parametrize("target", METHODS.split())
def test_methods_that_are_not_offered(target):
    assert refusal(loss_of(call("call_method", "x", target, LOG), SUM)).startswith("graph.nodes[1].target: the method")


@pytest.mark.parametrize(
    "args",
    [
        [LOG, "__class__"],
        [LOG, "grad_fn"],
        [LOG, "data"],
        [LOG, "shape.__class__"],
        [LOG, "shape", None],
        ["text", "shape"],
        [{"dtype": "float32"}, "shape"],
        [LOG, LOG],
        [LOG],
        [],
    ],
)
def test_attributes_are_a_short_list_and_read_of_nodes_alone(args):
    assert "must be one of T, device" in refusal(loss_of(call("call_function", "x", "getattr", *args), SUM))


def test_an_attribute_has_no_default():
    assert "must be one of" in refusal(loss_of(call("call_function", "x", "getattr", LOG, "shape", default=1), SUM))


@pytest.mark.parametrize("keyword", ["out", "generator", "requires_grad", "pin_memory", "layout", "memory_format", "self", "__class__"])
def test_keywords_that_are_not_offered(keyword):
    assert refusal(loss_of(call("call_function", "x", "torch.exp", LOG, **{keyword: LOG}), SUM)).startswith("graph.nodes[1].kwargs")


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (call("call_function", "x", "torch.div", LOG, 2, rounding_mode="sideways"), "rounding_mode"),
        (call("call_function", "x", "torch.exp", LOG, dim="sum"), "dim"),
        (call("call_function", "x", "torch.exp", "logprobs"), "texts"),
        (call("call_function", "x", "torch.exp", {"dict": {}}), "texts and dicts"),
        (call("call_function", "x", "torch.cat", [LOG, {"dict": {"a": LOG}}]), "texts and dicts"),
        (call("call_function", "x", "torch.exp", ref("total")), "no earlier node"),
        (call("call_function", "x", "torch.exp", ref("x")), "no earlier node"),
        (call("call_method", "x", "exp"), "a method is called on"),
        (call("call_method", "x", "exp", 1.0), "a method is called on"),
        (call("call_function", "logprobs", "torch.exp", LOG), "taken"),
        (call("call_function", "x y", "torch.exp", LOG), "no name"),
        (call("call_function", "x", "torch.cat", [LOG] * (MAX_ARGUMENTS + 1)), "arguments"),
    ],
)
def test_calls_that_are_refused(node, names):
    assert names in refusal(loss_of(node, SUM))


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (call("output", "output", "output", LOG), "return (loss, metrics)"),
        (call("output", "output", "output", {"tuple": [LOG, {"dict": {}}]}, extra=1), "return (loss, metrics)"),
        (call("output", "output", "output", {"tuple": [0.0, {"dict": {}}]}), "return (loss, metrics)"),
        (call("output", "output", "output", {"tuple": [ref("later"), {"dict": {}}]}), "no earlier node"),
        (call("output", "output", "output", {"tuple": [LOG, {"dict": {"custom/a:max": LOG}}]}), "custom/a:max"),
        (call("output", "output", "output", {"tuple": [LOG, {"dict": {"loss:sum": LOG}}]}), "custom/<name>:sum"),
        (call("output", "output", "output", {"tuple": [LOG, {"dict": {"custom/a:sum:sum": LOG}}]}), "custom/<name>:sum"),
        (call("output", "output", "output", {"tuple": [LOG, {"dict": {f"custom/{'a' * 65}:sum": LOG}}]}), "custom/<name>:sum"),
        (call("output", "output", "output", {"tuple": [LOG, {"dict": {"custom/a:sum": 1.0}}]}), "return tensors"),
        (call("call_function", "output", "torch.exp", LOG), "must be output"),
    ],
)
def test_outputs_that_are_refused(output, names):
    graph = {"format": 1, "nodes": [call("placeholder", "logprobs", "logprobs"), output]}
    assert names in refusal(sent("by_hand", [{"name": "logprobs", "rank": 1}], graph))


def led_by(placeholder: dict[str, object]) -> dict[str, object]:
    """A graph whose first node is another."""
    _, *rest = graph_of(SUM)["nodes"]  # type: ignore[misc]
    return {"nodes": [placeholder, *rest]}


def inputs_of(*pairs: tuple[str, int]) -> CustomLoss:
    names = tuple(name for name, _ in pairs)
    return sent("by_hand", [{"name": name, "rank": rank} for name, rank in pairs], graph_of(SUM, inputs=names))


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (inputs_of(("logprobs", 0)), "rank 1 or 2"),
        (inputs_of(("advantages", 1), ("logprobs", 1)), "must be logprobs"),
        (inputs_of(("logprobs", 1), ("Advantages", 1)), "inputs[1].name"),
        (inputs_of(("logprobs", 1), ("a" * 65, 1)), "inputs[1].name"),
        (inputs_of(("logprobs", 1), ("__class__", 1), ("a", 1), ("a", 1)), "inputs[3].name"),
        (sent("x", [{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 1}], graph_of(SUM)), "must be placeholder"),
        (sent("x", [{"name": "logprobs", "rank": 1}], graph_of(SUM, inputs=("logprobs", "a"))), "call_function or call_method"),
        (sent("x", [{"name": "logprobs", "rank": 1}], led_by(call("placeholder", "logprobs", "a"))), "placeholder of input"),
        (sent("x", [{"name": "logprobs", "rank": 1}], led_by(call("placeholder", "logprobs", "logprobs", 1.0))), "default"),
    ],
)
def test_inputs_that_are_refused(loss, names):
    assert names in refusal(loss)


def many(count: int) -> CustomLoss:
    return loss_of(*(call("call_function", f"n{index}", "torch.exp", LOG) for index in range(count)), SUM)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (partial(many, MAX_NODES - 2), "nodes"),
        (lambda: inputs_of(*(("logprobs" if index == 0 else f"a{index}", 1) for index in range(MAX_INPUTS + 1))), "inputs"),
        (lambda: inputs_of(("logprobs", 3)), "rank"),
        (lambda: loss_of(call("get_attr", "x", "weight"), SUM), "op"),
        (lambda: loss_of(call("call_module", "x", "linear", LOG), SUM), "op"),
        (lambda: loss_of(call("call_function", "x" * 129, "torch.exp", LOG), SUM), "name"),
        (lambda: loss_of(call("call_function", "x", "t" * 129, LOG), SUM), "target"),
        (lambda: loss_of({**SUM, "code": "1"}), "code"),
        (lambda: loss_of({**SUM, "name": 1}), "name"),
        (lambda: sent("x", [{"name": "logprobs", "rank": 1}], {**graph_of(SUM), "format": 2}), "format"),
        (lambda: sent("x", [], graph_of(SUM)), "inputs"),
    ],
)
def test_the_schema_is_closed_and_bounded(build: Callable[[], CustomLoss], names):
    with pytest.raises(ValidationError, match=names):
        build()


def test_the_largest_number_of_nodes_and_inputs_is_accepted():
    check_custom_loss(many(MAX_NODES - 3))
    check_custom_loss(inputs_of(*(("logprobs" if index == 0 else f"a{index}", 1) for index in range(MAX_INPUTS))))


def test_bytes_are_bounded():
    wide = [0.1234567890123] * 60
    nodes = [call("call_function", f"n{index}", "torch.reshape", LOG, wide) for index in range(200)]
    assert len(json.dumps(nodes)) > MAX_LOSS_BYTES
    assert str(MAX_LOSS_BYTES) in refusal(loss_of(*nodes, SUM), PayloadTooLarge)


LIMITS = Limits(vocab_size=50, max_context=16)
MASKED = loss_of(SUM, inputs=("logprobs", "mask"))
SCALED = sent("scaled", [{"name": "logprobs", "rank": 1}, {"name": "beta", "rank": 0}], graph_of(SUM, inputs=("logprobs", "beta")))


def checked(loss: CustomLoss, **inputs: Tensor) -> None:
    one = datum([1, 2, 3], **({"target_tokens": ints([1, 2, 3])} | inputs))
    check_compute(Compute((one,), "custom", {}, backward=True, custom_loss=loss), LIMITS)


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (MASKED, {"mask": tensor([1, 0, 1])}),
        (MASKED, {"mask": ints([1, 0, 1])}),
        (MASKED, {"mask": tensor([1, 0, 1]), "advantages": tensor([1, 2, 3])}),  # which the loss does not read
        (SCALED, {"beta": tensor(0.5)}),
        (SCALED, {"beta": tensor([0.5])}),  # as the binary wire sends a scalar
    ],
)
def test_datums_that_hold_what_the_loss_reads(loss, inputs):
    checked(loss, **inputs)


@pytest.mark.parametrize(
    ("loss", "inputs", "names"),
    [
        (MASKED, {}, "mask: missing"),
        (MASKED, {"mask": tensor([1, 0])}, "3 tokens"),
        (MASKED, {"mask": tensor([[1, 0, 1]])}, "rank 2"),
        (MASKED, {"mask": replace(tensor([1, 0, 1]), data=b"1234")}, "mask"),
        (MASKED, {"mask": tensor([1, 0, 1]), "target_tokens": ints([[1], [2], [3]])}, "declared rank 1"),
        (MASKED, {"mask": tensor([1, 0, 1]), "target_tokens": tensor([1, 2, 3])}, "int64"),
        (MASKED, {"mask": tensor([1, 0, 1]), "other": replace(tensor([1, 0, 1]), data=b"1234")}, "other"),
        (SCALED, {"beta": tensor([1, 2, 3])}, "declared a scalar"),
    ],
)
def test_datums_that_do_not(loss, inputs, names):
    with pytest.raises(ValidationFailed, match=r"data\[0\].loss_fn_inputs") as refused:
        checked(loss, **inputs)
    assert names in refused.value.message

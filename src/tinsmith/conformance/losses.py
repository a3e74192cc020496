"""Items 6 and 7: losses by name, refused ones, losses of the caller's own."""

import math
from typing import Any

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
    is_release,
    item,
    needs,
    needs_release,
)

POLICY = ("importance_sampling", "ppo", "cispo", "dro")


@item("6a", "policy losses at the sampled policy: loss:sum and values")
def policy_losses(target: Target) -> None:
    trainer = target.trainer(target.service())
    ids = data.tokens(9, target.vocab_size)
    now = data.logprobs(answer(trainer.forward([data.weighted(ids)], "cross_entropy")))
    advantages = [1.0, -0.5, 2.0, 0.0, 1.5, -1.0, 0.25, 3.0]
    datums = [data.datum(ids, logprobs=now, advantages=advantages)]
    wanted = {"importance_sampling": -sum(advantages), "ppo": -sum(advantages)}
    surrogate = -sum(logprob * advantage for logprob, advantage in zip(now, advantages, strict=True))
    wanted |= {"cispo": surrogate, "dro": surrogate}
    name: Any  # the types of a release list the losses of its time
    for name in POLICY:
        output = answer(trainer.forward_backward(datums, name))
        expect(data.is_close(data.loss(output), wanted[name], 1e-3), f"{name}: loss:sum: expected {wanted[name]}, got {data.loss(output)}")
        expect(data.are_close(data.logprobs(output), now), f"{name}: logprobs are not those of the policy")


@item("6c", "gspo: one ratio a sequence, of the tokens that its mask names")
def sequence_loss(target: Target) -> None:
    needs_release(0, 38)
    trainer = target.trainer(target.service())
    ids = data.tokens(9, target.vocab_size)
    now = data.logprobs(answer(trainer.forward([data.weighted(ids)], "cross_entropy")))
    advantages = [1.0, -0.5, 2.0, 0.0, 1.5, -1.0, 0.25, 3.0]
    mask = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    # Under the mask every token is exp(0.1) as likely as when it was sampled, which is within the bounds of 0.8 and 1.2.
    sampled = [logprob - 0.1 if kept else 0.0 for logprob, kept in zip(now, mask, strict=True)]
    wanted = -math.exp(0.1) * sum(advantages)
    output = answer(trainer.forward_backward([data.datum(ids, logprobs=sampled, advantages=advantages, sequence_ratio_mask=mask)], "gspo"))
    expect(data.is_close(data.loss(output), wanted, 1e-3), f"loss:sum: expected {wanted}, got {data.loss(output)}")
    expect(data.are_close(data.logprobs(output), now), "logprobs are not those of the policy")


@item("6d", "a custom loss that the server runs")
def uploaded_losses(target: Target) -> None:
    try:
        import torch
    except ImportError as error:
        raise NotRun("needs PyTorch in the SDK's environment") from error
    service = target.service()
    needs(service, "create_custom_loss")
    trainer = target.trainer(service)
    if not service.holder.get_client_config().custom_loss_server_side:
        raise NotRun("the server has custom_loss_server_side off")

    def weighed(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(logprobs * weights).sum(), {}

    handle = client(service.create_custom_loss(weighed, {"logprobs": 1, "weights": 1}))
    weights = [1.0, 0.0, 2.0, -0.5, 1.0, 0.25, 3.0, 1.0]
    datums = [data.datum(data.tokens(9, target.vocab_size), weights=weights)]
    custom, native = answer(trainer.forward_backward_custom(datums, handle)), answer(trainer.forward(datums, "cross_entropy"))
    expect(data.is_close(data.loss(custom), data.loss(native)), f"loss:sum: {data.loss(native)} by name, {data.loss(custom)} uploaded")


@item("6b", "a bad loss name and a missing input fail as the user's, and the client goes on")
def refused_losses(target: Target) -> None:
    trainer = target.trainer(target.service())
    good = [data.weighted(data.tokens(9, target.vocab_size))]
    expect_equal(category(failure(trainer.forward_backward(good, "ppo"))), "user", "category of a missing input")
    if is_release(0, 22):  # older ones know the names themselves, and a client that was given another is of no use any more
        unknown: Any = "no_such_loss"
        expect_equal(category(failure(trainer.forward_backward(good, unknown))), "user", "category of an unknown loss")
    answer(trainer.forward_backward(good, "cross_entropy"))
    answer(trainer.optim_step(types.AdamParams(learning_rate=1e-3)))


@item("7", "forward_backward_custom of -sum(w * l) equals cross_entropy")
def custom_losses(target: Target) -> None:
    try:
        import torch
    except ImportError as error:
        raise NotRun("needs PyTorch in the SDK's environment") from error
    if not hasattr(torch, "autograd"):
        raise NotRun("needs PyTorch in the SDK's environment")
    service = target.service()
    weights = [1.0, 0.0, 2.0, -0.5, 1.0, 0.25, 3.0, 1.0]
    datums = [data.datum(data.tokens(9, target.vocab_size), weights=weights)]

    def weighed(_: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -(logprobs[0] * torch.tensor(weights)).sum(), {"custom_metric": 1.0}

    plain, custom = target.trainer(service), target.trainer(service)
    native = answer(plain.forward_backward(datums, "cross_entropy"))
    traced = answer(custom.forward_backward_custom(datums, weighed))
    expect(data.is_close(data.loss(native), data.loss(traced)), f"loss:sum: {data.loss(native)} against {data.loss(traced)}")
    adam = types.AdamParams(learning_rate=1e-2)
    for trainer in (plain, custom):
        answer(trainer.optim_step(adam))
    after = [data.logprobs(answer(trainer.forward(datums, "cross_entropy"))) for trainer in (plain, custom)]
    expect(data.are_close(after[0], after[1]), "the step after it is not that of cross_entropy")


ITEMS: tuple[Item, ...] = (policy_losses, refused_losses, sequence_loss, uploaded_losses, custom_losses)

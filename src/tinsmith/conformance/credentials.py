"""Item 22: tokens that are refused, keys that were revoked, keys of another service."""

import time

import tinker
from tinker import types

from tinsmith.conformance.items import Item, Mismatch, NotRun, Target, answer, expect, expect_equal, faulty, item

AT_ONCE_S = 20.0  # a client that tried again would take longer


@item("22a", "401 with invalid_token: the key is exchanged for another token and the request sent again")
def exchanged_tokens(target: Target) -> None:
    with faulty(target) as (proxy, through):
        service = through.service()
        trainer = through.trainer(service)
        if not service.holder.get_client_config().pjwt_auth_enabled:
            raise NotRun("the server exchanges no keys for tokens (pjwt_auth_enabled)")
        num_before = len(proxy.seen("auth/token"))
        proxy.answer("optim_step", 401, WWW_Authenticate='Bearer error="invalid_token"')
        answer(trainer.optim_step(types.AdamParams()))
        expect(len(proxy.seen("auth/token")) > num_before, "no token was asked for")
        posts = proxy.seen("optim_step")
        expect_equal([post.status for post in posts], [401, 200], "statuses of optim_step")
        expect_equal(len({post.sent()["seq_id"] for post in posts}), 1, "number of different seq_ids")


@item("22b", "a revoked key is refused at once")
def revoked_keys(target: Target) -> None:
    if target.revoked_key is None:
        raise NotRun("needs a revoked key")
    started = time.monotonic()
    try:
        service = tinker.ServiceClient(base_url=target.base_url, api_key=target.revoked_key)
        service.create_lora_training_client(target.model, rank=8).result()
    except tinker.AuthenticationError:
        expect(time.monotonic() - started < AT_ONCE_S, f"the refusal took over {AT_ONCE_S:.0f} s")
    else:
        raise Mismatch("a revoked key was accepted")


@item("22c", "a key with another prefix never leaves the client")
def foreign_keys(target: Target) -> None:
    with faulty(target) as (proxy, through):
        try:
            service = tinker.ServiceClient(base_url=through.base_url, api_key="sk-of-another-service")
            service.create_lora_training_client(target.model, rank=8).result()
        except tinker.TinkerError:
            expect_equal(len(proxy.seen("config")), 0, "requests with it")
        else:
            raise Mismatch("a key with another prefix was accepted")


ITEMS: tuple[Item, ...] = (exchanged_tokens, revoked_keys, foreign_keys)

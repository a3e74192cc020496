"""The tree of errors."""

import copy

import pytest

from tinsmith.protocol.errors import LEAVES, Category, ReasonCode, ServerError, TinsmithError, UserError, error_of


@pytest.mark.proves("R17")
def test_every_reason_has_one_leaf():
    assert {leaf.reason for leaf in LEAVES} == set(ReasonCode)
    assert len(LEAVES) == len(ReasonCode)


@pytest.mark.proves("R14")
def test_categories_are_lower_case_words():
    assert {category.value for category in Category} == {"user", "server", "unknown"}


@pytest.mark.proves("R16")
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_states_who_can_act_and_which_status(leaf):
    assert issubclass(leaf, UserError) != issubclass(leaf, ServerError)
    assert 400 <= leaf.status <= 599
    assert (leaf.status < 500) == (leaf.category is Category.USER) or leaf.reason is ReasonCode.ENDPOINT_UNAVAILABLE
    assert isinstance(error_of(leaf.reason, "m"), leaf)


@pytest.mark.parametrize("leaf", LEAVES)
def test_errors_survive_the_reduction_that_carries_them_between_processes(leaf):
    error: TinsmithError = copy.copy(leaf("the message"))
    assert type(error) is leaf
    assert error.message == str(error) == "the message"

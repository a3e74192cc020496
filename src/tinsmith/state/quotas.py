"""The names and terms of the quotas that more than one process renews.

A quota is a leased counter in the store (`Store.reserve`). A gateway reserves a unit when it admits a model, and the janitor renews it for
as long as the model lives; both must speak of the same name and the same lease. Knows no limits: those are the operator's configuration.
"""

MODEL_LEASE_MS = 10 * 60 * 1000  # of a model's unit after its last renewal: without a janitor it is free again in the end


def model_quota(tenant: str) -> str:
    """The quota of the models that `tenant` has loaded."""
    return f"models:{tenant}"

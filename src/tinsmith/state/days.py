"""Hours and days as the records of a tenant's books are filed: whole numbers, counted from 1970 UTC by the store's clock."""

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DAY_HOURS = 24


def hour_of(at_ms: int) -> int:
    return at_ms // HOUR_MS


def day_of(at_ms: int) -> int:
    return at_ms // DAY_MS


def day_table(table: str, day: int) -> str:
    """Where the records of one day lie."""
    return f"{table}/{day}"

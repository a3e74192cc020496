"""The beginning of a session: its record, and the line of it in the tenant's audit log. The same on each face."""

from tinsmith.gateway.deps import Services
from tinsmith.protocol.sessions import SessionRecord
from tinsmith.state.audit import AuditEntry, AuditEvent, note


async def open_session(services: Services, record: SessionRecord) -> None:
    """Raises StateContention."""
    await services.catalog.add_session(record)
    await note(
        services.store,
        AuditEntry(tenant=record.tenant, at_ms=record.created_ms, event=AuditEvent.SESSION_CREATE, subject=record.session_id),
    )

-- A refusal that took its seq: a record born failed and an entry that is never run.
-- ARGV: lane, tenant, session, seq, kind, flags, rid, digest, failure. Answers {"ok", state, fresh} or {"unknown" | "closed" | "digest"}.
local lane, tenant, session, seq, kind = arg(), arg(), arg(), num(), arg()
local flags, rid, digest, failure = arg(), arg(), arg(), arg()
local record = call('HMGET', 'fut:' .. rid, 'digest', 'state')
if record[1] then
  if record[1] ~= digest then return {'digest'} end
  return {'ok', record[2], 0}
end
local fields = read('lane:' .. lane)
if not fields or fields.tenant ~= tenant then return {'unknown'} end
if fields.state ~= 'open' then return {'closed'} end
call('HSET', 'fut:' .. rid, 'rid', rid, 'tenant', tenant, 'session', session, 'lane', lane, 'seq', seq, 'kind', kind,
  'digest', digest, 'state', 'failed', 'submitted_ms', now, 'ended_ms', now, 'failure', failure)
call('ZADD', requests_of_session(tenant, session), now, rid)
call('ZADD', 'settled', now, rid)
emit('settled', rid)
if seq >= tonumber(fields.passed) and not entry_at(lane, seq) then
  put_entry(lane, seq, {rid = rid, kind = kind, flags = flags, digest = digest, size = 0, tokens = 0, state = 'void', attempts = 0, held = 0})
  arrive(lane, fields, seq, flags)
  wake(lane, fields, now) -- it may have closed the hole that the owner waits for
end
return {'ok', 'failed', 1}

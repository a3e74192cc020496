-- Append a command to a model lane, once. Its body lies at body:{rid}:{digest} with an expiry, which is lifted here.
-- ARGV: lane, tenant, session, base, seq, kind, flags (b barrier, r replayed, s save), rid, digest, size, tokens, max_pending,
--       max_tenant_bytes, failure of a turn that was given up, trace, writes.
-- Answers {"ok", state, fresh} or the refusal: {"unknown" | "closed" | "digest" | "pending" | "bytes" | "body"}.
local lane, tenant, session, base = arg(), arg(), arg(), arg()
local seq, kind, flags, rid, digest = num(), arg(), arg(), arg(), arg()
local size, tokens, max_pending, max_tenant_bytes, given_up, trace = num(), num(), num(), num(), arg(), arg()
local body = 'body:' .. rid .. ':' .. digest
local fields = read('lane:' .. lane)

local function refuse(tag)
  call('DEL', body)
  return {tag}
end

local function write_record(state, extra)
  call('HSET', 'fut:' .. rid, 'rid', rid, 'tenant', tenant, 'session', session, 'lane', lane, 'seq', seq, 'kind', kind,
    'digest', digest, 'state', state, 'submitted_ms', now, unpack(extra))
  call('ZADD', requests_of_session(tenant, session), now, rid)
end

local record = call('HMGET', 'fut:' .. rid, 'digest', 'state')
local entry = fields and entry_at(lane, seq)
if record[1] then
  if record[1] ~= digest then return refuse('digest') end
  if not (entry and entry.held == 1) then call('DEL', body) end
  return {'ok', record[2], 0}
end
if fields and fields.tenant ~= tenant or not fields and seq ~= 0 then return refuse('unknown') end
if fields and fields.state ~= 'open' then return refuse('closed') end
if fields and (seq < tonumber(fields.passed) or entry) then
  call('DEL', body)
  write_record('failed', {'ended_ms', now, 'failure', given_up})
  call('ZADD', 'settled', now, rid)
  emit('settled', rid)
  return {'ok', 'failed', 1}
end
if fields and tonumber(fields.pending) >= max_pending then return refuse('pending') end
if tonumber(call('HGET', 'bytes', tenant) or 0) + size > max_tenant_bytes then return refuse('bytes') end
if call('EXISTS', body) == 0 then return {'body'} end

if not fields then
  fields = {state = 'open', tenant = tenant, session = session, base = base, owner = '', passed = '0', high = '-1',
    barrier = '-1', durable = '-1', pending = '0'}
  call('SADD', 'bases', base)
  call('HSET', 'lane:' .. lane, 'state', 'open', 'tenant', tenant, 'session', session, 'base', base, 'owner', '', 'token', 0,
    'passed', 0, 'high', -1, 'barrier', -1, 'durable', -1, 'snapshot', '', 'former', '', 'pending', 0, 'running', 0, 'held_bytes', 0)
end
call('PERSIST', body)
write_record('pending', {})
put_entry(lane, seq, {rid = rid, kind = kind, flags = flags, digest = digest, size = size, tokens = tokens, state = 'pending',
  attempts = 0, held = 1, trace = trace ~= '' and trace or nil})
call('ZADD', 'unsettled:' .. lane, seq, seq)
call('HINCRBY', 'bytes', tenant, size)
call('HINCRBY', 'lane:' .. lane, 'held_bytes', size)
arrive(lane, fields, seq, flags)
if call('HINCRBY', 'lane:' .. lane, 'pending', 1) == 1 then call('ZADD', 'moved:' .. base, now, lane) end
apply_writes(true)
wake(lane, fields, now)
return {'ok', 'pending', 1}

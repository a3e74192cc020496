-- Append a sample to the pool lane of its tenant, once; the body lies ready as in submit.
-- ARGV: base, tenant, session, lane, key, kind, rid, digest, size, tokens, max_pending, max_tenant_bytes, trace, reply_to, feed.
-- Answers {"ok", state, fresh} or {"digest" | "ended" | "pending" | "bytes" | "body"}.
local base, tenant, session, lane, natural_key, kind = arg(), arg(), arg(), arg(), arg(), arg()
local rid, digest, size, tokens, max_pending, max_tenant_bytes = arg(), arg(), num(), num(), num(), num()
local trace, reply_to, feed = arg(), arg(), arg()
local body = 'body:' .. rid .. ':' .. digest
local queue = queue_key(tenant, base)
local record = call('HMGET', 'fut:' .. rid, 'digest', 'state')
if record[1] then
  if record[1] ~= digest then
    call('DEL', body)
    return {'digest'}
  end
  if is_terminal(record[2]) then call('DEL', body) end
  return {'ok', record[2], 0}
end
if call('EXISTS', ended_key(tenant, session)) == 1 then
  call('DEL', body)
  return {'ended'}
end
if call('ZCARD', queue) >= max_pending then
  call('DEL', body)
  return {'pending'}
end
if tonumber(call('HGET', 'bytes', tenant) or 0) + size > max_tenant_bytes then
  call('DEL', body)
  return {'bytes'}
end
if call('EXISTS', body) == 0 then return {'body'} end
call('PERSIST', body)
local arrival = call('INCR', 'pool:arrivals')
call('HSET', 'fut:' .. rid, 'rid', rid, 'tenant', tenant, 'session', session, 'lane', lane, 'seq', natural_key, 'kind', kind,
  'digest', digest, 'state', 'pending', 'submitted_ms', now, 'base', base, 'size', size, 'tokens', tokens, 'attempts', 0, 'token', 0,
  'replica', '', 'arrival', arrival)
call('ZADD', requests_of_session(tenant, session), now, rid)
if trace ~= '' then call('HSET', 'fut:' .. rid, 'trace', trace) end
if reply_to ~= '' then call('HSET', 'fut:' .. rid, 'reply_to', reply_to) end
if feed ~= '' then call('HSET', 'fut:' .. rid, 'feed', feed) end
call('HINCRBY', 'bytes', tenant, size)
call('ZADD', queue, arrival, rid)
call('ZADD', samples_key(tenant, session), arrival, rid)
call('SADD', 'bases', base)
join_ring(tenant, base)
emit('work:' .. base, lane)
return {'ok', 'pending', 1}

-- End a lane, and free a slice of what it holds. Its hash stays as a mark until its records go. What is left for another call is listed
-- in `closing`, so that a sweep frees it where the caller is gone.
-- ARGV: tenant, lane, failure, record_kept_ms, max things a call, "1" if the lane's snapshot must be the next argument, that snapshot,
--       writes. Answers {"ok", 1 if nothing is left} or {"seen"} where the snapshot is another: nothing was changed.
local tenant, lane, failure, kept_ms, max, has_seen, seen = arg(), arg(), arg(), arg(), num(), arg() == '1', arg()
local key = 'lane:' .. lane
local fields = read(key)
if not fields or fields.tenant ~= tenant then return {'ok', 1} end
if fields.state == 'open' then
  if has_seen and fields.snapshot ~= seen then return {'seen'} end
  call('HSET', key, 'state', 'closed', 'owner', '', 'closed_ms', now, 'running', 0, 'failure', failure)
  call('HINCRBY', key, 'token', 1)
  call('PEXPIRE', key, kept_ms)
  call('SADD', 'closing', lane)
  has_no_work(lane, fields.base)
  apply_writes(true)
  if fields.owner ~= '' then
    call('SREM', 'owned:' .. fields.owner, lane)
    emit('bell:' .. fields.owner, lane)
  end
elseif call('SISMEMBER', 'closing', lane) == 0 then
  return {'ok', 1}
end
return {'ok', drain_closed(lane, max) and 1 or 0}

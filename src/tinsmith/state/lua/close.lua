-- End a lane. Its hash stays as a mark until its records go. ARGV: tenant, lane, failure, record_kept_ms, writes. Answers {"ok"}.
local tenant, lane, failure, kept_ms = arg(), arg(), arg(), arg()
local key = 'lane:' .. lane
local fields = read(key)
if not fields or fields.tenant ~= tenant or fields.state ~= 'open' then return {'ok'} end
-- Thousands may wait, while everybody else waits for this script: only what must be written one by one is.
local entries, ended, num_bytes = read_log(lane), {}, 0
for _, seq in ipairs(arrived(lane)) do
  local entry = entries[seq]
  if entry.held == 1 then
    call('UNLINK', 'body:' .. entry.rid .. ':' .. entry.digest)
    num_bytes = num_bytes + entry.size
  end
  if not is_terminal(entry.state) then
    call('HSET', 'fut:' .. entry.rid, 'state', 'failed', 'ended_ms', now, 'failure', failure)
    call('ZADD', 'settled', now, entry.rid)
    ended[#ended + 1] = entry.rid
  end
end
emit_all('settled', ended)
call('HINCRBY', 'bytes', tenant, -num_bytes)
for _, rid in ipairs(call('SMEMBERS', 'results:' .. lane)) do free_result(rid) end
call('DEL', 'log:' .. lane, 'results:' .. lane)
call('ZREM', 'unowned:' .. fields.base, lane)
call('ZREM', 'moved', lane)
call('HSET', key, 'state', 'closed', 'owner', '', 'closed_ms', now, 'pending', 0, 'running', 0, 'held_bytes', 0)
call('HINCRBY', key, 'token', 1)
call('PEXPIRE', key, kept_ms)
apply_writes(true)
if fields.owner ~= '' then
  call('SREM', 'owned:' .. fields.owner, lane)
  emit('bell:' .. fields.owner, lane)
end
return {'ok'}

-- Fail a session's samples and refuse those that come after. ARGV: tenant, session, failure, record_kept_ms. Answers {"ok"}.
local tenant, session, failure, kept_ms = arg(), arg(), arg(), arg()
local CHUNK = 1000 -- arguments a call
call('SET', ended_key(tenant, session), 1, 'PX', kept_ms)

-- Thousands may wait, while everybody else waits for this script: only what must be written one by one is.
local ended, num_bytes = {}, 0
local function end_if_own(rid)
  local record = call('HMGET', 'fut:' .. rid, 'session', 'tenant', 'digest', 'size')
  if record[1] ~= session or record[2] ~= tenant then return false end
  call('UNLINK', 'body:' .. rid .. ':' .. record[3])
  num_bytes = num_bytes + tonumber(record[4])
  call('HSET', 'fut:' .. rid, 'state', 'failed', 'ended_ms', now, 'failure', failure)
  call('ZADD', 'settled', now, rid)
  ended[#ended + 1] = rid
  return true
end

local function end_waiting(base)
  local queue, others, num_ended = queue_key(tenant, base), {}, #ended
  for _, rid in ipairs(call('LRANGE', queue, 0, -1)) do
    if not end_if_own(rid) then others[#others + 1] = rid end
  end
  if #ended == num_ended then return end
  call('DEL', queue) -- and written anew: taking them out one by one would walk the list for each
  for i = 1, #others, CHUNK do call('RPUSH', queue, unpack(others, i, math.min(i + CHUNK - 1, #others))) end
  leave_ring_if_empty(tenant, base)
end

local function end_running(base)
  for _, taker in ipairs(call('SMEMBERS', 'pool:takers:' .. base)) do
    local held = 'pool:held:' .. taker .. '|' .. base
    for _, rid in ipairs(call('SMEMBERS', held)) do
      if end_if_own(rid) then call('SREM', held, rid) end
    end
  end
end

for _, base in ipairs(call('SMEMBERS', 'bases')) do
  end_waiting(base)
  end_running(base)
end
call('HINCRBY', 'bytes', tenant, -num_bytes)
if #ended > 0 then emit_all('settled', ended) end
return {'ok'}

-- Hand out samples under this replica's lease. The tenant that was served the fewest tokens comes next: deficit round robin with the
-- deficit counted upwards, and a quantum of one sample.
-- ARGV: base, replica, max_entries, max_tokens, call id, max_attempts, failure of a command that wore its workers out.
-- Answers {"ok", rows} or {"expired"}; a repeat under the same call id answers the same samples.
local base, replica, max_entries, max_tokens = arg(), arg(), num(), num()
local call_id, max_attempts, worn_out = arg(), num(), arg()
if not alive(replica) then return {'expired'} end
local mine = replica .. '|' .. base

local function sample_row(record)
  return {record.rid, record.tenant, record.digest, tonumber(record.size), tonumber(record.tokens), tonumber(record.token),
    tonumber(record.attempts), record.trace or '', record.reply_to or '', record.session}
end

local function answer_again(rids)
  local rows = {}
  for _, rid in ipairs(rids) do
    local record = read('fut:' .. rid)
    if record and record.state == 'running' and record.replica == replica then rows[#rows + 1] = sample_row(record) end
  end
  return {'ok', rows}
end

local last = call('GET', 'pool:last:' .. mine)
last = last and cjson.decode(last)
if last and last.id == call_id then return answer_again(last.rids) end
reclaim_pool(base, max_attempts, worn_out)

local function hand_out(record, tenant, tag)
  call('ZREM', queue_key(tenant, base), record.rid)
  count_running(tenant, base, 1)
  record.token = call('HINCRBY', 'fut:' .. record.rid, 'token', 1)
  call('HSET', 'fut:' .. record.rid, 'state', 'running', 'replica', replica)
  call('HSETNX', 'fut:' .. record.rid, 'started_ms', now)
  call('SADD', 'pool:held:' .. mine, record.rid)
  call('SET', 'pool:clock:' .. base, string.format('%.0f', tag))
  call('ZADD', 'pool:ring:' .. base, tag + math.max(1, tonumber(record.tokens)), tenant)
  leave_ring_if_empty(tenant, base)
end

local rows, rids, num_tokens = {}, {}, 0
while #rows < max_entries do
  local head = call('ZRANGE', 'pool:ring:' .. base, 0, 0, 'WITHSCORES')
  if #head == 0 then break end
  local tenant, tag = head[1], tonumber(head[2])
  local record = read('fut:' .. call('ZRANGE', queue_key(tenant, base), 0, 0)[1])
  local attempts = tonumber(record.attempts)
  if #rows > 0 and (attempts > 0 or num_tokens + tonumber(record.tokens) > max_tokens) then break end
  hand_out(record, tenant, tag)
  num_tokens = num_tokens + tonumber(record.tokens)
  rows[#rows + 1] = sample_row(record)
  rids[#rids + 1] = record.rid
  if attempts > 0 then break end
end
if #rows > 0 then
  call('SADD', 'pool:takers:' .. base, replica)
  call('SET', 'pool:last:' .. mine, cjson.encode({id = call_id, rids = rids}))
end
return {'ok', rows}

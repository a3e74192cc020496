-- Free what is past its retention and fail what does not move, at most `batch` results and as many records a run.
-- ARGV: batch, result_kept_ms, record_kept_ms, peer_kept_ms, stuck_ms, failure of stuck work, max_attempts, failure of a command that
--       wore its workers out. Answers {results, records, stuck, 1 if nothing is left to do}.
local batch, result_kept_ms, record_kept_ms, peer_kept_ms = num(), num(), num(), num()
local stuck_ms, stuck, max_attempts, worn_out = num(), arg(), num(), arg()
local num_results, num_records, num_stuck, is_done = 0, 0, 0, 1

local function batch_of(rids)
  if #rids == batch then is_done = 0 end
  return rids
end

local function older_than(key, kept_ms, ...) return call('ZRANGEBYSCORE', key, '-inf', string.format('%.0f', now - kept_ms), ...) end

for _, rid in ipairs(batch_of(older_than('fetched', result_kept_ms, 'LIMIT', 0, batch))) do
  if free_result(rid) then num_results = num_results + 1 else call('ZREM', 'fetched', rid) end
end

for _, rid in ipairs(batch_of(older_than('settled', record_kept_ms, 'LIMIT', 0, batch))) do
  if free_result(rid) then num_results = num_results + 1 end
  local lane = call('HMGET', 'lane:' .. (call('HGET', 'fut:' .. rid, 'lane') or ''), 'state', 'closed_ms')
  local counts_from = lane[1] == 'open' and now or tonumber(lane[2] or 0)
  if counts_from > now - record_kept_ms then
    call('ZADD', 'settled', counts_from, rid) -- its claim to its seq lives as long as the model; after it, retention begins
  else
    call('DEL', 'fut:' .. rid)
    call('ZREM', 'settled', rid)
    call('ZREM', 'fetched', rid)
    num_records = num_records + 1
  end
end

-- A lane with a living owner and nothing running that has not moved: its first command fails, and the lane goes on.
local function fail_first(lane)
  local fields = read('lane:' .. lane)
  if fields.owner == '' or not alive(fields.owner) or tonumber(fields.running) > 0 then return end
  for _, seq in ipairs(arrived(lane)) do
    local entry = entry_at(lane, seq)
    if entry.state == 'pending' then
      if tonumber(call('HGET', 'fut:' .. entry.rid, 'submitted_ms')) > now - stuck_ms then return end
      end_entry(lane, fields, seq, entry, 'failed', stuck)
      emit('bell:' .. fields.owner, lane)
      num_stuck = num_stuck + 1
      return
    end
  end
end

-- Samples count from their submit, and the head of each line is its oldest.
local function fail_old_samples(base, tenant)
  local queue = queue_key(tenant, base)
  local rid = call('LINDEX', queue, 0)
  while rid do
    local record = read('fut:' .. rid)
    if tonumber(record.submitted_ms) > now - stuck_ms then break end
    call('LPOP', queue)
    end_sample(record, 'failed', stuck)
    num_stuck = num_stuck + 1
    rid = call('LINDEX', queue, 0)
  end
  leave_ring_if_empty(tenant, base)
end

local function forget_peer(base, peer)
  if alive(peer) or call('EXISTS', 'owned:' .. peer) == 1 then return end
  call('ZREM', 'peers:' .. base, peer)
  call('DEL', 'topic:bell:' .. peer)
  call('HDEL', 'topics', 'bell:' .. peer)
end

for _, lane in ipairs(older_than('moved', stuck_ms)) do fail_first(lane) end
for _, base in ipairs(call('SMEMBERS', 'bases')) do
  reclaim_pool(base, max_attempts, worn_out)
  for _, tenant in ipairs(call('ZRANGE', 'pool:ring:' .. base, 0, -1)) do fail_old_samples(base, tenant) end
  for _, peer in ipairs(older_than('peers:' .. base, peer_kept_ms)) do forget_peer(base, peer) end
end
return {num_results, num_records, num_stuck, is_done}

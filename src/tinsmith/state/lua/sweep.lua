-- Free what is past its retention, finish what a close left, and fail what does not move or waits for nobody; at most `batch` results, as
-- many records, and as many commands a run.
-- ARGV: batch, result_kept_ms, record_kept_ms, peer_kept_ms, inbox_kept_ms, stuck_ms, failure of stuck work, orphan_ms, failure of what
--       waits for a trainer, and for a sampler, max_attempts, failure of a command that wore its workers out.
-- Answers {results, records, stuck, orphaned, 1 if nothing is left to do}.
local batch, result_kept_ms, record_kept_ms, peer_kept_ms, inbox_kept_ms = num(), num(), num(), num(), num()
local stuck_ms, stuck, orphan_ms, no_trainer, no_sampler = num(), arg(), num(), arg(), arg()
local max_attempts, worn_out = num(), arg()
local num_results, num_records, num_stuck, num_orphaned, is_done = 0, 0, 0, 0, 1
local budget = batch -- of commands to fail

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
  local record = call('HMGET', 'fut:' .. rid, 'lane', 'tenant', 'feed')
  local lane = call('HMGET', 'lane:' .. (record[1] or ''), 'state', 'closed_ms')
  local counts_from = lane[1] == 'open' and now or tonumber(lane[2] or 0)
  if counts_from > now - record_kept_ms then
    call('ZADD', 'settled', counts_from, rid) -- its claim to its seq lives as long as the model; after it, retention begins
  else
    local owner = call('HMGET', 'fut:' .. rid, 'tenant', 'session')
    if owner[1] then call('ZREM', requests_of_session(owner[1], owner[2]), rid) end
    if record[3] then call('ZREM', feed_key(record[2], record[3]), rid) end
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
  local seq = tonumber(call('ZRANGE', 'unsettled:' .. lane, 0, 0)[1])
  local entry = entry_at(lane, seq)
  if tonumber(call('HGET', 'fut:' .. entry.rid, 'submitted_ms')) > now - stuck_ms then return end
  end_entry(lane, fields, seq, entry, 'failed', stuck)
  emit('bell:' .. fields.owner, lane)
  num_stuck = num_stuck + 1
end

-- Samples count from their submit, and the head of each line is its oldest. Answers how many failed.
local function fail_old_samples(base, tenant, kept_ms, failure)
  local num_failed = 0
  while budget > 0 do
    local rid = call('ZRANGE', queue_key(tenant, base), 0, 0)[1]
    local record = rid and read('fut:' .. rid)
    if not record or tonumber(record.submitted_ms) > now - kept_ms then return num_failed end
    withdraw_sample(record, failure)
    num_failed = num_failed + 1
    budget = budget - 1
  end
  is_done = 0
  return num_failed
end

local function is_orphaned(base, role) return tonumber(call('HGET', 'lived:' .. base, role) or 0) <= now - orphan_ms end

-- A lane that no trainer has served for so long: all of it fails. A last owner that should wake up is fenced first, since what it has run
-- meanwhile counts no more.
local function fail_orphan(lane)
  local fields = read('lane:' .. lane)
  if fields.owner ~= '' then
    call('SREM', 'owned:' .. fields.owner, lane)
    call('HSET', 'lane:' .. lane, 'owner', '', 'running', 0)
    call('HINCRBY', 'lane:' .. lane, 'token', 1)
  end
  local num_failed = fail_unsettled(lane, fields.tenant, no_trainer, budget, true)
  num_orphaned = num_orphaned + num_failed
  budget = budget - num_failed
  if call('EXISTS', 'unsettled:' .. lane) == 0 then has_no_work(lane, fields.base) else is_done = 0 end
end

local function forget_peer(base, peer)
  if alive(peer) or call('EXISTS', 'owned:' .. peer) == 1 then return end
  call('ZREM', 'peers:' .. base, peer)
  call('DEL', 'topic:bell:' .. peer)
  call('HDEL', 'topics', 'bell:' .. peer, 'inbox:' .. peer)
end

-- The numbers of a living reader's inbox go on, or it would take new messages for old ones.
local function forget_inbox(topic)
  call('ZREM', 'inboxes', topic)
  if not alive(string.sub(topic, #'inbox:' + 1)) then call('HDEL', 'topics', topic) end
end

for _, lane in ipairs(call('SRANDMEMBER', 'closing', 1)) do
  if not drain_closed(lane, batch) or call('EXISTS', 'closing') == 1 then is_done = 0 end
end
for _, base in ipairs(call('SMEMBERS', 'bases')) do
  reclaim_pool(base, max_attempts, worn_out)
  for _, lane in ipairs(is_orphaned(base, 'trainer') and older_than('moved:' .. base, orphan_ms) or {}) do fail_orphan(lane) end
  for _, lane in ipairs(older_than('moved:' .. base, stuck_ms)) do fail_first(lane) end
  local has_no_sampler = is_orphaned(base, 'sampler')
  for _, tenant in ipairs(call('ZRANGE', 'pool:ring:' .. base, 0, -1)) do
    if has_no_sampler then num_orphaned = num_orphaned + fail_old_samples(base, tenant, orphan_ms, no_sampler) end
    num_stuck = num_stuck + fail_old_samples(base, tenant, stuck_ms, stuck)
  end
  for _, peer in ipairs(older_than('peers:' .. base, peer_kept_ms)) do forget_peer(base, peer) end
end
for _, topic in ipairs(older_than('inboxes', inbox_kept_ms)) do forget_inbox(topic) end
return {num_results, num_records, num_stuck, num_orphaned, is_done}

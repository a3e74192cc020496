-- Shared by all scripts, put in front of each. ARGV[1] is the epoch that the caller knows; the script's own arguments follow.
--
-- Keys (times in ms of this server's clock):
--   identity            "<epoch>:<secret>:<schema>"
--   table:{table}       hash id -> "<version>:<value>"
--   replica:{id}        its description; exists = alive            peers:{base}     zset replica id -> last renewed
--   lane:{m}            hash of the lane; log:{m} hash seq -> entry; unsettled:{m} zset of the seqs that are pending or running;
--                       results:{m} set of rids whose result is held (of samples: results:{tenant}|{session})
--   fut:{rid}           hash of the record (and, of a sample, its place in the pool)
--   requests:{tenant}|{session}  zset rid -> when it was submitted, of every record of the session
--   body:{rid}:{digest} command; res:{rid} result; res:new:... result on its way to a settle (expires)
--   unowned:{base}      zset lane -> last_ms: work and no living owner    owned:{replica}  set of lanes
--                       (of a lane's hash, `passed`: every seq below it was handed out or given up; one without an entry never comes)
--   moved:{base}        zset lane -> when it last settled, was acquired or got its first work; open lanes with work only
--   closing             set of closed lanes of which something is left to free
--   lived:{base}        hash role -> end of the latest lease of a replica of that role
--   settled, fetched    zset rid -> ms, for retention
--   bytes               hash tenant -> bytes of bodies and results
--   topics              hash topic -> number of its last event;    topic:{topic}    stream of ids "<number>-<epoch>"
--   inboxes             zset inbox topic -> when something was last posted to it
--   bases               set of base models         ended:{tenant}:{session}    exists = its samples are refused
--   pool:ring:{base}    zset tenant -> tokens served, of tenants with waiting samples;
--                       pool:tags:{base} hash of the same for the others; pool:clock:{base}; pool:queue:{tenant}:{base} zset rid ->
--                       arrival; pool:running:{base} hash tenant -> samples under way; pool:takers:{base} set of replicas;
--                       pool:held:{replica}|{base} set of rids; pool:last:{replica}|{base} last answer
--   samples:{tenant}|{session}  zset rid -> arrival, of its samples that are pending or running
--   feed:{tenant}|{feed}        zset rid -> number of the feed's event, of samples that have ended
--   quota:{name}        zset holder -> end of its lease        budget:{name}    hash of a token bucket: level, at_ms
local call = redis.call
local epoch = string.sub(call('GET', 'identity') or '', 1, 8)
if epoch ~= ARGV[1] then return {'epoch'} end

local TOPIC_LENGTH = 65536
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local arg_index = 1
local function arg()
  arg_index = arg_index + 1
  return ARGV[arg_index]
end
local function num() return tonumber(arg()) end

local function read(key)
  local flat = call('HGETALL', key)
  if #flat == 0 then return nil end
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

local function alive(replica) return call('EXISTS', 'replica:' .. replica) == 1 end

-- Events ---------------------------------------------------------------------------------------------------------------------------

-- Answers the number of the last.
local function emit_all(topic, payloads)
  local last = call('HINCRBY', 'topics', topic, #payloads)
  for i, payload in ipairs(payloads) do
    local id = string.format('%.0f-%.0f', last - #payloads + i, tonumber(epoch, 16))
    call('XADD', 'topic:' .. topic, 'MAXLEN', '~', TOPIC_LENGTH, id, 'p', payload)
  end
  return last
end

local function emit(topic, payload) return emit_all(topic, {payload}) end

-- Appends to a process's inbox, which goes by itself when nobody posts to it any more.
local function post(topic, kept_ms, messages)
  emit_all(topic, messages)
  call('PEXPIRE', 'topic:' .. topic, kept_ms)
  call('ZADD', 'inboxes', now, topic)
end

-- Catalog records ------------------------------------------------------------------------------------------------------------------

local function version_of(held) return held and tonumber(string.match(held, '^(%d+):')) or 0 end

local function put_record(key, id, value)
  local version = version_of(call('HGET', key, id)) + 1
  call('HSET', key, id, string.format('%.0f:', version) .. value)
  return version
end

-- Adds to the sum of this hour; the table lists the days of which it has sums.
local function add_to_sum(key, id, amount)
  local day = string.format('%.0f', math.floor(now / 86400000))
  local field = string.format('%.0f/', math.floor(now / 3600000)) .. id
  local held = call('HGET', key .. '/' .. day, field)
  local sum = held and tonumber(string.match(held, '^%d+:(.*)$')) or 0
  put_record(key .. '/' .. day, field, string.format('%.0f', sum + amount))
  if call('HEXISTS', key, day) == 0 then put_record(key, day, '') end
end

-- Reads the writes among the arguments (table, id, what: "1" a record, "" its deletion, "+" a sum, then value or amount), and applies
-- them if asked to.
local function apply_writes(wanted)
  for _ = 1, num() do
    local key = 'table:' .. arg()
    local id, what, value = arg(), arg(), arg()
    if wanted and what == '1' then put_record(key, id, value) end
    if wanted and what == '' then call('HDEL', key, id) end
    if wanted and what == '+' then add_to_sum(key, id, tonumber(value)) end
  end
end

-- Records of commands --------------------------------------------------------------------------------------------------------------

local function requests_of_session(tenant, session) return 'requests:' .. tenant .. '|' .. session end

local function is_terminal(state) return state ~= 'pending' and state ~= 'running' end

local function settle_record(rid, state, failure, result_size)
  call('HSET', 'fut:' .. rid, 'state', state, 'ended_ms', now)
  if failure ~= '' then call('HSET', 'fut:' .. rid, 'failure', failure) end
  if result_size >= 0 then call('HSET', 'fut:' .. rid, 'result_size', result_size) end
  call('ZADD', 'settled', now, rid)
  emit('settled', rid)
end

-- Moves a result from where it was written before the script to its place; false if it is not there.
local function place_result(staged, rid, tenant, size)
  if call('EXISTS', staged) == 0 then return false end
  call('RENAME', staged, 'res:' .. rid)
  call('PERSIST', 'res:' .. rid)
  call('HINCRBY', 'bytes', tenant, size)
  return true
end

local function results_of_session(tenant, session) return 'results:' .. tenant .. '|' .. session end

local function free_result(rid)
  if call('DEL', 'res:' .. rid) == 0 then return false end
  local record = call('HMGET', 'fut:' .. rid, 'tenant', 'result_size', 'lane', 'session', 'base')
  call('HINCRBY', 'bytes', record[1], -tonumber(record[2]))
  call('SREM', record[5] and results_of_session(record[1], record[4]) or 'results:' .. record[3], rid)
  call('ZREM', 'fetched', rid)
  return true
end

-- Lanes ----------------------------------------------------------------------------------------------------------------------------

local function entry_at(lane, seq)
  local held = call('HGET', 'log:' .. lane, seq)
  return held and cjson.decode(held) or nil
end

local function put_entry(lane, seq, entry) call('HSET', 'log:' .. lane, seq, cjson.encode(entry)) end

local function has(entry, flag) return string.find(entry.flags, flag, 1, true) ~= nil end

local function row(seq, entry)
  return {entry.rid, seq, entry.kind, entry.digest, entry.size, entry.tokens, entry.state, entry.attempts, entry.artifact or '',
    entry.trace or ''}
end

local function drop_body(lane, tenant, entry)
  if entry.held ~= 1 then return end
  call('DEL', 'body:' .. entry.rid .. ':' .. entry.digest)
  call('HINCRBY', 'bytes', tenant, -entry.size)
  call('HINCRBY', 'lane:' .. lane, 'held_bytes', -entry.size)
  entry.held = 0
end

-- Lists a lane that has work and no living owner, and tells the replicas of its base model.
local function offer(lane, base, last_ms)
  call('ZADD', 'unowned:' .. base, last_ms, lane)
  emit('work:' .. base, lane)
end

-- Rings the living owner's bell, or calls for an owner.
local function wake(lane, fields, last_ms)
  if fields.owner ~= '' and alive(fields.owner) then
    emit('bell:' .. fields.owner, lane)
  elseif tonumber(call('HGET', 'lane:' .. lane, 'pending')) > 0 then
    offer(lane, fields.base, last_ms)
  end
end

-- Something came in at `seq`, be it a command or the news that there is none.
local function arrive(lane, fields, seq, flags)
  call('HSET', 'lane:' .. lane, 'last_ms', now, 'high', math.max(seq, tonumber(fields.high)))
  if string.find(flags, 'b', 1, true) then call('HSET', 'lane:' .. lane, 'barrier', math.max(seq, tonumber(fields.barrier))) end
end

-- A lane without work is neither watched nor offered.
local function has_no_work(lane, base)
  call('ZREM', 'moved:' .. base, lane)
  call('ZREM', 'unowned:' .. base, lane)
end

-- The lane has one command less to run.
local function count_ended(lane, fields, seq, was_running)
  call('ZREM', 'unsettled:' .. lane, seq)
  if was_running then call('HINCRBY', 'lane:' .. lane, 'running', -1) end
  if call('HINCRBY', 'lane:' .. lane, 'pending', -1) == 0 then
    has_no_work(lane, fields.base)
  elseif fields.state == 'open' then
    call('ZADD', 'moved:' .. fields.base, now, lane)
  end
end

-- Ends a pending or running entry without a result.
local function end_entry(lane, fields, seq, entry, state, failure)
  local was_running = entry.state == 'running'
  entry.state = state
  drop_body(lane, fields.tenant, entry)
  put_entry(lane, seq, entry)
  settle_record(entry.rid, state, failure, -1)
  count_ended(lane, fields, seq, was_running)
end

-- Fails the first `max` entries that are not terminal, and keeps them in the log or not; answers how many there were. The lane has no
-- owner. Thousands may wait, while everybody else waits for this script: what can be is written at once.
local function fail_unsettled(lane, tenant, failure, max, keeps_log)
  if max < 1 then return 0 end
  local seqs = call('ZRANGE', 'unsettled:' .. lane, 0, max - 1)
  local ended, num_bytes = {}, 0
  for _, seq in ipairs(seqs) do
    local entry = entry_at(lane, seq)
    if entry.held == 1 then
      call('UNLINK', 'body:' .. entry.rid .. ':' .. entry.digest)
      num_bytes = num_bytes + entry.size
    end
    entry.state, entry.held = 'failed', 0
    if keeps_log then put_entry(lane, seq, entry) else call('HDEL', 'log:' .. lane, seq) end
    call('HSET', 'fut:' .. entry.rid, 'state', 'failed', 'ended_ms', now, 'failure', failure)
    call('ZADD', 'settled', now, entry.rid)
    ended[#ended + 1] = entry.rid
  end
  if #ended == 0 then return 0 end
  call('ZREMRANGEBYRANK', 'unsettled:' .. lane, 0, #ended - 1)
  call('HINCRBY', 'lane:' .. lane, 'pending', -#ended)
  call('HINCRBY', 'lane:' .. lane, 'held_bytes', -num_bytes)
  call('HINCRBY', 'bytes', tenant, -num_bytes)
  emit_all('settled', ended)
  return #ended
end

-- Frees a slice of what a closed lane still holds, `max` things at most; true if nothing is left.
local function drain_closed(lane, max)
  local key, log, results = 'lane:' .. lane, 'log:' .. lane, 'results:' .. lane
  local fields = call('HMGET', key, 'tenant', 'failure')
  local rest = max - fail_unsettled(lane, fields[1], fields[2], max, false)
  local num_bytes = 0
  for i, seq in ipairs(rest > 0 and call('HKEYS', log) or {}) do
    if i > rest then break end
    local entry = entry_at(lane, seq)
    if entry.held == 1 then
      call('UNLINK', 'body:' .. entry.rid .. ':' .. entry.digest)
      num_bytes = num_bytes + entry.size
    end
    call('HDEL', log, seq)
  end
  call('HINCRBY', key, 'held_bytes', -num_bytes)
  call('HINCRBY', 'bytes', fields[1], -num_bytes)
  if call('EXISTS', log) == 0 then
    for _, rid in ipairs(call('SRANDMEMBER', results, max)) do
      if not free_result(rid) then call('SREM', results, rid) end
    end
  end
  if call('EXISTS', log, results) > 0 then return false end
  call('SREM', 'closing', lane)
  return true
end

-- nil if `replica` may write under `token`, else what to answer.
local function refusal(fields, replica, token)
  if not fields or fields.state ~= 'open' or fields.owner ~= replica or fields.token ~= token then return {'fenced'} end
  if not alive(replica) then return {'expired'} end
  return nil
end

-- The entries below a seq, and their seqs in order. What lies above what was handed out may be thousands.
local function read_log(lane, below)
  local entries, seqs = {}, {}
  for _, held in ipairs(call('HKEYS', 'log:' .. lane)) do
    local seq = tonumber(held)
    if seq < below then seqs[#seqs + 1] = seq end
  end
  table.sort(seqs)
  for _, seq in ipairs(seqs) do entries[seq] = entry_at(lane, seq) end
  return entries, seqs
end

-- The seqs at which something came in, in order.
local function arrived(lane)
  local seqs = call('HKEYS', 'log:' .. lane)
  for i, seq in ipairs(seqs) do seqs[i] = tonumber(seq) end
  table.sort(seqs)
  return seqs
end

-- Where a new owner goes on after its replay: the lowest seq above the last completed one that waits or may still come. `entries` are
-- those below `passed`.
local function cursor_of(lane, fields, entries, last_completed)
  local cursor = math.max(last_completed + 1, tonumber(fields.passed))
  local entry = entry_at(lane, cursor)
  while entry and is_terminal(entry.state) do
    cursor = cursor + 1
    entry = entry_at(lane, cursor)
  end
  for seq, entry in pairs(entries) do
    if seq > last_completed and seq < cursor and not is_terminal(entry.state) then cursor = seq end
  end
  return cursor
end

local function last_completed_of(fields, entries)
  local last = tonumber(fields.durable)
  for seq, entry in pairs(entries) do
    if entry.state == 'completed' and seq > last then last = seq end
  end
  return last
end

-- Pools ----------------------------------------------------------------------------------------------------------------------------

local function queue_key(tenant, base) return 'pool:queue:' .. tenant .. ':' .. base end

local function ended_key(tenant, session) return 'ended:' .. tenant .. ':' .. session end

local function samples_key(tenant, session) return 'samples:' .. tenant .. '|' .. session end

-- A tenant whose queue is not empty any more takes its turn no earlier than those that were waiting.
local function join_ring(tenant, base)
  local served = tonumber(call('HGET', 'pool:tags:' .. base, tenant) or 0)
  local turn = math.max(served, tonumber(call('GET', 'pool:clock:' .. base) or 0))
  call('ZADD', 'pool:ring:' .. base, 'NX', turn, tenant)
end

local function leave_ring_if_empty(tenant, base)
  if call('EXISTS', queue_key(tenant, base)) == 1 then return end
  local tag = call('ZSCORE', 'pool:ring:' .. base, tenant)
  if tag then call('HSET', 'pool:tags:' .. base, tenant, tag) end
  call('ZREM', 'pool:ring:' .. base, tenant)
end

local function feed_key(tenant, feed) return 'feed:' .. tenant .. '|' .. feed end

-- Every end of a sample is written here, and told to who follows its feed.
local function settle_sample(record, state, failure, result_size)
  settle_record(record.rid, state, failure, result_size)
  if record.feed then
    call('ZADD', feed_key(record.tenant, record.feed), string.format('%.0f', emit('settled', record.feed)), record.rid)
  end
end

local function count_running(tenant, base, change)
  if call('HINCRBY', 'pool:running:' .. base, tenant, change) == 0 then call('HDEL', 'pool:running:' .. base, tenant) end
end

local function drop_sample_body(record)
  call('UNLINK', 'body:' .. record.rid .. ':' .. record.digest)
  call('HINCRBY', 'bytes', record.tenant, -tonumber(record.size))
  call('ZREM', samples_key(record.tenant, record.session), record.rid)
end

local function end_sample(record, state, failure)
  drop_sample_body(record)
  settle_sample(record, state, failure, -1)
end

-- Fails a sample, wherever it stands: in its queue, or with a replica.
local function withdraw_sample(record, failure)
  if record.state == 'running' then
    call('SREM', 'pool:held:' .. record.replica .. '|' .. record.base, record.rid)
    count_running(record.tenant, record.base, -1)
  else
    call('ZREM', queue_key(record.tenant, record.base), record.rid)
    leave_ring_if_empty(record.tenant, record.base)
  end
  end_sample(record, 'failed', failure)
end

-- Takes back one sample from a replica that is gone.
local function reclaim_sample(record, base, max_attempts, worn_out)
  local attempts = call('HINCRBY', 'fut:' .. record.rid, 'attempts', 1)
  count_running(record.tenant, base, -1)
  if attempts >= max_attempts then return end_sample(record, 'failed', worn_out) end
  call('HSET', 'fut:' .. record.rid, 'state', 'pending', 'replica', '')
  call('ZADD', queue_key(record.tenant, base), record.arrival, record.rid)
  join_ring(record.tenant, base)
  emit('work:' .. base, record.lane)
end

-- Takes back what replicas that are gone hold; it keeps the order of its arrival.
local function reclaim_pool(base, max_attempts, worn_out)
  for _, taker in ipairs(call('SMEMBERS', 'pool:takers:' .. base)) do
    if not alive(taker) then
      local held_key = 'pool:held:' .. taker .. '|' .. base
      local records = {}
      for _, rid in ipairs(call('SMEMBERS', held_key)) do
        local record = read('fut:' .. rid)
        if record and record.state == 'running' and record.replica == taker then records[#records + 1] = record end
      end
      for _, record in ipairs(records) do reclaim_sample(record, base, max_attempts, worn_out) end
      call('DEL', held_key, 'pool:last:' .. taker .. '|' .. base)
      call('SREM', 'pool:takers:' .. base, taker)
    end
  end
end

-- Replicas -------------------------------------------------------------------------------------------------------------------------

-- Offers the lanes of a replica that is gone. It stays their owner until one is acquired, and goes on if it comes back before.
local function pass_on(peer, base)
  for _, lane in ipairs(call('SMEMBERS', 'owned:' .. peer)) do
    local fields = call('HMGET', 'lane:' .. lane, 'state', 'owner', 'pending', 'last_ms')
    if fields[1] ~= 'open' or fields[2] ~= peer then
      call('SREM', 'owned:' .. peer, lane)
    elseif tonumber(fields[3]) > 0 and not call('ZSCORE', 'unowned:' .. base, lane) then
      offer(lane, base, fields[4])
    end
  end
end

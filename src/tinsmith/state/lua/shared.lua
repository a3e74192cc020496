-- Shared by all scripts, put in front of each. ARGV[1] is the epoch that the caller knows; the script's own arguments follow.
--
-- Keys (times in ms of this server's clock):
--   identity            "<epoch>:<secret>:<schema>"
--   table:{table}       hash id -> "<version>:<value>"
--   replica:{id}        its description; exists = alive            peers:{base}     zset replica id -> last renewed
--   lane:{m}            hash of the lane; log:{m} hash seq -> entry; results:{m} set of rids whose result is held
--   fut:{rid}           hash of the record (and, of a sample, its place in the pool)
--   body:{rid}:{digest} command; res:{rid} result; res:new:... result on its way to a settle (expires)
--   unowned:{base}      zset lane -> last_ms: work and no living owner    owned:{replica}  set of lanes
--                       (of a lane's hash, `passed`: every seq below it was handed out or given up; one without an entry never comes)
--   moved               zset lane -> when it last settled, was acquired or got its first work; lanes with work only
--   settled, fetched    zset rid -> ms, for retention
--   bytes               hash tenant -> bytes of bodies and results
--   topics              hash topic -> number of its last event;    topic:{topic}    stream of ids "<number>-<epoch>"
--   bases               set of base models         ended:{tenant}:{session}    exists = its samples are refused
--   pool:ring:{base}    zset tenant -> tokens served, of tenants with waiting samples;
--                       pool:tags:{base} hash of the same for the others; pool:clock:{base}; pool:queue:{tenant}:{base} list of rids;
--                       pool:takers:{base} set of replicas; pool:held:{replica}|{base} set of rids; pool:last:{replica}|{base} last answer
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

local function emit_all(topic, payloads)
  local last = call('HINCRBY', 'topics', topic, #payloads)
  for i, payload in ipairs(payloads) do
    local id = string.format('%.0f-%.0f', last - #payloads + i, tonumber(epoch, 16))
    call('XADD', 'topic:' .. topic, 'MAXLEN', '~', TOPIC_LENGTH, id, 'p', payload)
  end
end

local function emit(topic, payload) emit_all(topic, {payload}) end

-- Catalog records ------------------------------------------------------------------------------------------------------------------

local function version_of(held) return held and tonumber(string.match(held, '^(%d+):')) or 0 end

local function put_record(key, id, value)
  local version = version_of(call('HGET', key, id)) + 1
  call('HSET', key, id, string.format('%.0f:', version) .. value)
  return version
end

-- Reads the writes among the arguments (table, id, "1" or "" for a deletion, value), and applies them if asked to.
local function apply_writes(wanted)
  for _ = 1, num() do
    local key = 'table:' .. arg()
    local id = arg()
    local is_put = arg() == '1'
    local value = arg()
    if wanted and is_put then put_record(key, id, value) end
    if wanted and not is_put then call('HDEL', key, id) end
  end
end

-- Records of commands --------------------------------------------------------------------------------------------------------------

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

local function free_result(rid)
  if call('DEL', 'res:' .. rid) == 0 then return false end
  local record = call('HMGET', 'fut:' .. rid, 'tenant', 'result_size', 'lane')
  call('HINCRBY', 'bytes', record[1], -tonumber(record[2]))
  call('SREM', 'results:' .. record[3], rid)
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
  return {entry.rid, seq, entry.kind, entry.digest, entry.size, entry.tokens, entry.state, entry.attempts, entry.artifact or ''}
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

-- The lane has one command less to run.
local function count_ended(lane, fields, was_running)
  if was_running then call('HINCRBY', 'lane:' .. lane, 'running', -1) end
  if call('HINCRBY', 'lane:' .. lane, 'pending', -1) > 0 then
    call('ZADD', 'moved', now, lane)
  else
    call('ZREM', 'moved', lane)
    call('ZREM', 'unowned:' .. fields.base, lane)
  end
end

-- Ends a pending or running entry without a result.
local function end_entry(lane, fields, seq, entry, state, failure)
  local was_running = entry.state == 'running'
  entry.state = state
  drop_body(lane, fields.tenant, entry)
  put_entry(lane, seq, entry)
  settle_record(entry.rid, state, failure, -1)
  count_ended(lane, fields, was_running)
end

-- nil if `replica` may write under `token`, else what to answer.
local function refusal(fields, replica, token)
  if not fields or fields.state ~= 'open' or fields.owner ~= replica or fields.token ~= token then return {'fenced'} end
  if not alive(replica) then return {'expired'} end
  return nil
end

local function read_log(lane)
  local flat = call('HGETALL', 'log:' .. lane)
  local entries = {}
  for i = 1, #flat, 2 do entries[tonumber(flat[i])] = cjson.decode(flat[i + 1]) end
  return entries
end

-- The seqs at which something came in, in order.
local function arrived(lane)
  local seqs = call('HKEYS', 'log:' .. lane)
  for i, seq in ipairs(seqs) do seqs[i] = tonumber(seq) end
  table.sort(seqs)
  return seqs
end

-- Where a new owner goes on after its replay: the lowest seq above the last completed one that waits or may still come.
local function cursor_of(fields, entries, last_completed)
  local cursor = math.max(last_completed + 1, tonumber(fields.passed))
  while entries[cursor] and is_terminal(entries[cursor].state) do cursor = cursor + 1 end
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

-- A tenant whose queue is not empty any more takes its turn no earlier than those that were waiting.
local function join_ring(tenant, base)
  local served = tonumber(call('HGET', 'pool:tags:' .. base, tenant) or 0)
  local turn = math.max(served, tonumber(call('GET', 'pool:clock:' .. base) or 0))
  call('ZADD', 'pool:ring:' .. base, 'NX', turn, tenant)
end

local function leave_ring_if_empty(tenant, base)
  if call('LLEN', queue_key(tenant, base)) > 0 then return end
  local tag = call('ZSCORE', 'pool:ring:' .. base, tenant)
  if tag then call('HSET', 'pool:tags:' .. base, tenant, tag) end
  call('ZREM', 'pool:ring:' .. base, tenant)
end

local function drop_sample_body(record)
  call('DEL', 'body:' .. record.rid .. ':' .. record.digest)
  call('HINCRBY', 'bytes', record.tenant, -tonumber(record.size))
end

local function end_sample(record, state, failure)
  drop_sample_body(record)
  settle_record(record.rid, state, failure, -1)
end

-- Takes back one sample from a replica that is gone.
local function reclaim_sample(record, base, max_attempts, worn_out)
  local attempts = call('HINCRBY', 'fut:' .. record.rid, 'attempts', 1)
  if attempts >= max_attempts then return end_sample(record, 'failed', worn_out) end
  call('HSET', 'fut:' .. record.rid, 'state', 'pending', 'replica', '')
  call('LPUSH', queue_key(record.tenant, base), record.rid)
  join_ring(record.tenant, base)
  emit('work:' .. base, record.lane)
end

-- Takes back what replicas that are gone hold; they keep their order, in front of what has not run yet.
local function reclaim_pool(base, max_attempts, worn_out)
  for _, taker in ipairs(call('SMEMBERS', 'pool:takers:' .. base)) do
    if not alive(taker) then
      local held_key = 'pool:held:' .. taker .. '|' .. base
      local records = {}
      for _, rid in ipairs(call('SMEMBERS', held_key)) do
        local record = read('fut:' .. rid)
        if record and record.state == 'running' and record.replica == taker then records[#records + 1] = record end
      end
      table.sort(records, function(a, b) return tonumber(a.arrival) > tonumber(b.arrival) end)
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

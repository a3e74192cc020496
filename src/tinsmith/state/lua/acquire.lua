-- Become or remain a lane's owner. ARGV: lane, replica, "1" if it may depose an owner that is gone, max_attempts, failure of a command that wore its workers out.
-- Answers {"ok", cursor, replay rows, fields of the lane}, {"none"} or {"expired"}.
local lane, replica, may_depose, max_attempts, worn_out = arg(), arg(), arg() == '1', num(), arg()
local key = 'lane:' .. lane
local fields = read(key)
if not alive(replica) then return {'expired'} end
if not fields or fields.state ~= 'open' then return {'none'} end
local is_new = fields.owner ~= replica
if is_new and fields.owner ~= '' and (alive(fields.owner) or not may_depose) then return {'none'} end

local entries, seqs = read_log(lane, tonumber(fields.passed))
local last_completed = last_completed_of(fields, entries)
local num_running = 0

-- A new owner's token: what was running died with the old owner, except that saves before the last completed command are published anew.
local function take_over(seq, entry)
  if entry.state == 'running' then
    entry.attempts = entry.attempts + 1
    if entry.attempts >= max_attempts then return end_entry(lane, fields, seq, entry, 'failed', worn_out) end
  end
  local is_published = has(entry, 's') and seq < last_completed
  if is_published then num_running = num_running + 1 end
  if entry.state == 'pending' and not is_published then return end
  entry.state = is_published and 'running' or 'pending'
  put_entry(lane, seq, entry)
  call('HSET', 'fut:' .. entry.rid, 'state', entry.state)
end

if is_new then
  if fields.owner ~= '' then call('SREM', 'owned:' .. fields.owner, lane) end
  call('SADD', 'owned:' .. replica, lane)
  call('HSET', key, 'owner', replica)
  call('HINCRBY', key, 'token', 1)
  for _, seq in ipairs(seqs) do
    if not is_terminal(entries[seq].state) then take_over(seq, entries[seq]) end
  end
  call('HSET', key, 'running', num_running)
end
call('ZREM', 'unowned:' .. fields.base, lane)
local cursor = cursor_of(lane, fields, entries, last_completed)
if is_new and tonumber(call('HGET', key, 'pending')) > 0 then call('ZADD', 'moved:' .. fields.base, now, lane) end

local replay = {}
for _, seq in ipairs(seqs) do
  local entry = entries[seq]
  local is_unsettled_save = has(entry, 's') and not is_terminal(entry.state) and seq < last_completed
  if entry.state == 'completed' or is_unsettled_save then replay[#replay + 1] = row(seq, entry) end
end
return {'ok', cursor, replay, call('HGETALL', key)}

-- Hand out the next entries. ARGV: lane, replica, token, from_seq, max_commands, max_tokens, hole_grace_ms.
-- Answers {"ok", cursor, wait_ms or -1, held_bytes, rows}, {"fenced"} or {"expired"}.
local lane, replica, token = arg(), arg(), arg()
local from_seq, max_commands, max_tokens, grace_ms = num(), num(), num(), num()
local key = 'lane:' .. lane
local fields = read(key)
local refused = refusal(fields, replica, token)
if refused then return refused end

local high, barrier = tonumber(fields.high), tonumber(fields.barrier)
local rest_ms = tonumber(fields.last_ms) + grace_ms - now
local passed = tonumber(fields.passed)
local seq = math.min(from_seq, passed) -- what was never handed out is not skipped
local rows, num_tokens, num_started, wait_ms = {}, 0, 0, -1

local function fits(entry)
  if #rows == 0 then return true end
  return #rows < max_commands and num_tokens + entry.tokens <= max_tokens and entry.attempts == 0
end

local function hand_out(entry)
  if entry.state == 'pending' then
    entry.state = 'running'
    num_started = num_started + 1
    put_entry(lane, seq, entry)
    call('HSET', 'fut:' .. entry.rid, 'state', 'running')
    call('HSETNX', 'fut:' .. entry.rid, 'started_ms', now)
  end
  rows[#rows + 1] = row(seq, entry)
  num_tokens = num_tokens + entry.tokens
  return has(entry, 'b') or entry.attempts > 0 -- nothing more goes with it
end

-- Past a seq that never comes, in one step: callers choose how wide a hole is.
local function step_over()
  local floor = seq < passed and passed or high + 1
  for _, held in ipairs(arrived(lane)) do
    if held > seq then return math.min(held, floor) end
  end
  return floor
end

while seq <= high do
  local entry = entry_at(lane, seq)
  if not entry then
    if seq >= passed and barrier < seq and rest_ms > 0 then
      wait_ms = rest_ms
      break
    end
    seq = step_over()
  elseif is_terminal(entry.state) then
    seq = seq + 1
  else
    if not fits(entry) then break end
    local is_last = hand_out(entry)
    seq = seq + 1
    if is_last then break end
  end
end
if num_started > 0 then call('HINCRBY', key, 'running', num_started) end
if seq > passed then call('HSET', key, 'passed', seq) end
return {'ok', seq, wait_ms, tonumber(fields.held_bytes), rows}

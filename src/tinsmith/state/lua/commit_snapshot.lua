-- Raise a lane's floor and trim its log up to it. ARGV: lane, replica, token, seq, artifact.
-- Answers {"ok", former snapshot or ""}, {"fenced"}, {"expired"} or {"early"} where an entry up to it is not terminal.
local lane, replica, token, seq, artifact = arg(), arg(), arg(), num(), arg()
local key = 'lane:' .. lane
local fields = read(key)
local refused = refusal(fields, replica, token)
if refused then return refused end
local durable = tonumber(fields.durable)
if seq == durable and artifact == fields.snapshot then return {'ok', fields.former} end
local passed = tonumber(fields.passed)
if seq < durable then return {'early'} end
if seq >= passed then -- what was never handed out may have ended all the same
  local entries = read_log(lane, passed)
  if seq >= cursor_of(lane, fields, entries, last_completed_of(fields, entries)) then return {'early'} end
end

local trimmed = {}
for _, at in ipairs(arrived(lane)) do
  if at > seq then break end
  local entry = entry_at(lane, at)
  if not is_terminal(entry.state) then return {'early'} end
  trimmed[at] = entry
end
for at, entry in pairs(trimmed) do
  drop_body(lane, fields.tenant, entry)
  call('HDEL', 'log:' .. lane, at)
end
call('HSET', key, 'passed', math.max(passed, seq + 1), 'durable', seq, 'snapshot', artifact, 'former', fields.snapshot)
return {'ok', fields.snapshot}

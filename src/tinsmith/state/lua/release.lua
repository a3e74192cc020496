-- Give a lane up. ARGV: lane, replica, token. Answers {"ok"} or {"fenced"}.
local lane, replica, token = arg(), arg(), arg()
local key = 'lane:' .. lane
local fields = read(key)
if not fields or fields.state ~= 'open' or fields.token ~= token then return {'fenced'} end
if fields.owner == '' then return {'ok'} end
if fields.owner ~= replica then return {'fenced'} end
for _, seq in ipairs(call('ZRANGEBYSCORE', 'unsettled:' .. lane, '-inf', '(' .. fields.passed)) do
  local entry = entry_at(lane, seq)
  if entry.state == 'running' then
    entry.state = 'pending'
    put_entry(lane, seq, entry)
    call('HSET', 'fut:' .. entry.rid, 'state', 'pending')
  end
end
call('SREM', 'owned:' .. replica, lane)
call('HSET', key, 'owner', '', 'running', 0)
if tonumber(fields.pending) > 0 then offer(lane, fields.base, fields.last_ms) end
return {'ok'}

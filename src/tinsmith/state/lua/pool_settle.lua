-- Write outcomes of samples. A result lies at res:new:{rid}|{token} with an expiry, and is moved to its place here.
-- ARGV: replica, count, then for each: rid, token, state, result size or -1, failure, writes.
-- Answers {"ok", rids whose outcome was not taken} or {"result"} where a result is not there (any more).
local replica, count = arg(), num()

local items, is_missing = {}, false
for i = 1, count do
  local item = {rid = arg(), token = arg(), state = arg(), size = num(), failure = arg(), writes_at = arg_index}
  apply_writes(false)
  items[i] = item
  item.staged = 'res:new:' .. item.rid .. '|' .. item.token
  local record = read('fut:' .. item.rid)
  item.record = record
  item.is_fresh = record and record.state == 'running' and record.replica == replica and record.token == item.token
  if not item.is_fresh then call('DEL', item.staged) end
  if item.is_fresh and item.size >= 0 and call('EXISTS', item.staged) == 0 then is_missing = true end
end
if is_missing then return {'result'} end

local refused = {}
for _, item in ipairs(items) do
  local record = item.record
  if item.is_fresh then
    drop_sample_body(record)
    if item.size >= 0 then
      place_result(item.staged, item.rid, record.tenant, item.size)
      call('SADD', results_of_session(record.tenant, record.session), item.rid)
    end
    call('SREM', 'pool:held:' .. replica .. '|' .. record.base, item.rid)
    count_running(record.tenant, record.base, -1)
    settle_sample(record, item.state, item.failure, item.size)
    arg_index = item.writes_at
    apply_writes(true)
  else
    refused[#refused + 1] = item.rid
  end
end
return {'ok', refused}

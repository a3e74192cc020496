-- What ended in a feed after a cursor, and trim what came up to it. A cursor that was never given out is one of an emptied store: all
-- that is kept comes again.
-- ARGV: tenant, feed, after, max. Answers {cursor as text, rows of {rid, size of the result that is held or -1}}.
local tenant, feed, after, max = arg(), arg(), num(), num()
local key = feed_key(tenant, feed)
if after > tonumber(call('HGET', 'topics', 'settled') or 0) then after = 0 end
if after > 0 then call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', after)) end
local cursor, rows = string.format('%.0f', after), {}
local told = call('ZRANGE', key, 0, max - 1, 'WITHSCORES')
for i = 1, #told, 2 do
  local rid = told[i]
  local size = call('EXISTS', 'res:' .. rid) == 1 and tonumber(call('HGET', 'fut:' .. rid, 'result_size')) or -1
  rows[#rows + 1] = {rid, size}
  cursor = string.format('%.0f', tonumber(told[i + 1]))
end
return {cursor, rows}

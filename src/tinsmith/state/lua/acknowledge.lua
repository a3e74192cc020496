-- Free results of a feed that their caller has. ARGV: tenant, feed, rids. Answers 1.
local tenant, feed = arg(), arg()
local key = feed_key(tenant, feed)
for rid in arg do
  local record = call('HMGET', 'fut:' .. rid, 'tenant', 'feed', 'state')
  if record[1] == tenant and record[2] == feed and is_terminal(record[3]) then
    free_result(rid)
    call('ZREM', key, rid)
  end
end
return 1

-- Take a unit of a quota, or extend the own one. ARGV: quota, holder, limit, ttl in ms. Answers 1, or 0 where all are held.
local key, holder, limit, ttl_ms = 'quota:' .. arg(), arg(), num(), num()
call('ZREMRANGEBYSCORE', key, '-inf', now)
if not call('ZSCORE', key, holder) and call('ZCARD', key) >= limit then return 0 end
call('ZADD', key, now + ttl_ms, holder)
call('PEXPIREAT', key, string.format('%.0f', call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]))
return 1

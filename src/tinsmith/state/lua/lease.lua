-- Take or extend a named lease. ARGV: name, holder, ttl in ms. Answers 1, or 0 while another holds it.
local key, holder, ttl_ms = 'lease:' .. arg(), arg(), arg()
local held = call('GET', key)
if held and held ~= holder then return 0 end
call('SET', key, holder, 'PX', ttl_ms)
return 1

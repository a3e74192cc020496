-- May `tenant` read the result, and start its retention clock. ARGV: tenant, rid. Answers 1 or 0.
local tenant, rid = arg(), arg()
local record = call('HMGET', 'fut:' .. rid, 'tenant', 'state')
if record[1] ~= tenant or record[2] ~= 'completed' or call('EXISTS', 'res:' .. rid) == 0 then return 0 end
if call('HSETNX', 'fut:' .. rid, 'fetched_ms', now) == 1 then call('ZADD', 'fetched', now, rid) end
return 1

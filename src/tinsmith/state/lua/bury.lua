-- Drop the key of a replica whose process is gone, and pass on what it holds.
-- ARGV: replica, max_attempts, failure of a command that wore its workers out. Answers 1, or 0 where it had no key.
local replica, max_attempts, worn_out = arg(), num(), arg()
local description = call('GET', 'replica:' .. replica)
if not description then return 0 end
local base = cjson.decode(description).base
call('DEL', 'replica:' .. replica)
pass_on(replica, base)
reclaim_pool(base, max_attempts, worn_out)
return 1

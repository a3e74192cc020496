-- Give a named lease back. ARGV: name, holder.
local key, holder = 'lease:' .. arg(), arg()
if call('GET', key) == holder then call('DEL', key) end
return 1

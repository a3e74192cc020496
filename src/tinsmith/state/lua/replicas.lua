-- Descriptions of a base model's replicas whose lease runs. ARGV: base.
local descriptions = {}
for _, peer in ipairs(call('ZRANGE', 'peers:' .. arg(), 0, -1)) do
  local description = call('GET', 'replica:' .. peer)
  if description then descriptions[#descriptions + 1] = description end
end
return descriptions

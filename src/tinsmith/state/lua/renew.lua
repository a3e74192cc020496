-- Extend a replica's lease and pass on what its peers that are gone hold.
-- ARGV: replica, base, role, description, lease_ms, max_attempts, failure of a command that wore its workers out.
-- Answers the base model's lanes that have work and no living owner, oldest first.
local replica, base, role, description, lease_ms, max_attempts, worn_out = arg(), arg(), arg(), arg(), num(), num(), arg()
call('SADD', 'bases', base)
call('SET', 'replica:' .. replica, description, 'PX', lease_ms)
call('ZADD', 'peers:' .. base, now, replica)
call('HSET', 'lived:' .. base, role, string.format('%.0f', now + lease_ms))
for _, peer in ipairs(call('ZRANGE', 'peers:' .. base, 0, -1)) do
  if not alive(peer) then pass_on(peer, base) end
end
reclaim_pool(base, max_attempts, worn_out)
local lanes = {}
for _, lane in ipairs(call('ZRANGE', 'unowned:' .. base, 0, -1)) do
  local owner = call('HGET', 'lane:' .. lane, 'owner')
  if owner and (owner == '' or not alive(owner)) then
    lanes[#lanes + 1] = lane
  else
    call('ZREM', 'unowned:' .. base, lane) -- its owner has come back
  end
end
return lanes

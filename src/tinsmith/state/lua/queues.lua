-- A base model's lanes that have work. ARGV: base.
-- Answers {rows of model lanes: lane, tenant, living owner or "", pending, submitted_ms of the head or -1}, {rows of pools: tenant,
-- pending, submitted_ms of the head or -1}.
local base = arg()

local function submitted_ms(rid) return tonumber(call('HGET', 'fut:' .. rid, 'submitted_ms')) end

-- Those that run stand before it, and they are few.
local function head_ms(lane, pending, running)
  if pending == running then return -1 end
  for _, seq in ipairs(call('ZRANGE', 'unsettled:' .. lane, 0, running)) do
    local entry = entry_at(lane, seq)
    if entry.state == 'pending' then return submitted_ms(entry.rid) end
  end
  return -1
end

local lanes, pools, waiting = {}, {}, {}
for _, lane in ipairs(call('ZRANGE', 'moved:' .. base, 0, -1)) do
  local fields = call('HMGET', 'lane:' .. lane, 'tenant', 'owner', 'pending', 'running')
  local owner = fields[2] ~= '' and alive(fields[2]) and fields[2] or ''
  local pending = tonumber(fields[3])
  lanes[#lanes + 1] = {lane, fields[1], owner, pending, head_ms(lane, pending, tonumber(fields[4]))}
end
local running = read('pool:running:' .. base) or {}
for _, tenant in ipairs(call('ZRANGE', 'pool:ring:' .. base, 0, -1)) do
  local queue = queue_key(tenant, base)
  pools[#pools + 1] = {tenant, call('ZCARD', queue) + (running[tenant] or 0), submitted_ms(call('ZRANGE', queue, 0, 0)[1])}
  waiting[tenant] = true
end
for tenant, num_running in pairs(running) do
  if not waiting[tenant] then pools[#pools + 1] = {tenant, tonumber(num_running), -1} end
end
return {lanes, pools}

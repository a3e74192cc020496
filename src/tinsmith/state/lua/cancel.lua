-- Drop a command that has not started. ARGV: tenant, rid, failure. Answers {state} or {""} for an unknown or foreign id.
local tenant, rid, failure = arg(), arg(), arg()
local record = read('fut:' .. rid)
if not record or record.tenant ~= tenant then return {''} end
if record.state ~= 'pending' then return {record.state} end
if record.base then
  call('ZREM', queue_key(tenant, record.base), rid)
  leave_ring_if_empty(tenant, record.base)
  end_sample(record, 'cancelled', failure)
else
  local seq = tonumber(record.seq)
  end_entry(record.lane, read('lane:' .. record.lane), seq, entry_at(record.lane, seq), 'cancelled', failure)
end
return {'cancelled'}

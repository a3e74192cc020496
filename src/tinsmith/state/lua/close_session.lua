-- Fail a session's samples and refuse those that come after; a slice a call. Whoever runs one is told to let go of it.
-- ARGV: tenant, session, failure, record_kept_ms, max samples and results a call, inbox_kept_ms, message that lets go of a sample, with
--       %s for its rid.
-- Answers {"ok", 1 if nothing is left}.
local tenant, session, failure, kept_ms, max, inbox_kept_ms, abort = arg(), arg(), arg(), arg(), num(), arg(), arg()
local samples, results = samples_key(tenant, session), results_of_session(tenant, session)
call('SET', ended_key(tenant, session), 1, 'PX', kept_ms)
for _, rid in ipairs(call('ZRANGE', samples, 0, max - 1)) do
  local record = read('fut:' .. rid)
  withdraw_sample(record, failure)
  if record.state == 'running' then post('inbox:' .. record.replica, inbox_kept_ms, {string.format(abort, rid)}) end
end
for _, rid in ipairs(call('SRANDMEMBER', results, max)) do
  if not free_result(rid) then call('SREM', results, rid) end
end
return {'ok', call('EXISTS', samples, results) == 0 and 1 or 0}

-- Write outcomes of one engine call. A result lies at res:new:{lane}|{token}|{seq} with an expiry, and is moved to its place here.
-- ARGV: lane, replica, token, count, then for each: seq, state, result size or -1, failure, artifact, writes.
-- Answers {"ok", seqs that were not running any more}, {"fenced"}, {"expired"} or {"result"} where a result is not there (any more).
local lane, replica, token, count = arg(), arg(), arg(), num()
local key = 'lane:' .. lane
local fields = read(key)

local function staged(seq) return string.format('res:new:%s|%s|%.0f', lane, token, seq) end

local function settle_entry(seq, entry, state, size, failure, artifact)
  entry.state = state
  entry.artifact = artifact ~= '' and artifact or nil
  if state ~= 'completed' or not (has(entry, 'r') or has(entry, 's')) then drop_body(lane, fields.tenant, entry) end
  put_entry(lane, seq, entry)
  if size >= 0 then
    place_result(staged(seq), entry.rid, fields.tenant, size)
    call('SADD', 'results:' .. lane, entry.rid)
  end
  settle_record(entry.rid, state, failure, size)
  count_ended(lane, fields, seq, true)
end

local refused = refusal(fields, replica, token)
local items = {}
for i = 1, count do
  local item = {seq = num(), state = arg(), size = num(), failure = arg(), artifact = arg(), writes_at = arg_index}
  apply_writes(false)
  items[i] = item
  item.entry = fields and entry_at(lane, item.seq)
  item.is_fresh = item.entry and item.entry.state == 'running'
  if refused or not item.is_fresh then call('DEL', staged(item.seq)) end
  if not refused and item.is_fresh and item.size >= 0 and call('EXISTS', staged(item.seq)) == 0 then refused = {'result'} end
end
if refused then return refused end

local before = {}
for _, item in ipairs(items) do
  if item.is_fresh then
    settle_entry(item.seq, item.entry, item.state, item.size, item.failure, item.artifact)
    arg_index = item.writes_at
    apply_writes(true)
  else
    before[#before + 1] = item.seq
  end
end
return {'ok', before}

-- Write a record. ARGV: table, id, value, expected version or "".
-- Answers {version}, or {-1} where another version is held. A repeat after a lost reply finds its own value and answers the same.
local key, id, value, expected = 'table:' .. arg(), arg(), arg(), arg()
if expected ~= '' then
  local held = call('HGET', key, id)
  local version = version_of(held)
  if version == tonumber(expected) + 1 and held == string.format('%.0f:', version) .. value then return version end
  if version ~= tonumber(expected) then return -1 end
end
return put_record(key, id, value)

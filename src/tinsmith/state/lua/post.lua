-- Append to a process's inbox. ARGV: topic, kept_ms, count, messages. Answers 1.
local topic, kept_ms, messages = arg(), arg(), {}
for i = 1, num() do messages[i] = arg() end
post(topic, kept_ms, messages)
return 1

-- Take an amount out of a token bucket. ARGV: budget, amount, tokens a second, burst.
-- Answers 0, or the ms after which the amount would be there.
local key, amount, per_s, burst = 'budget:' .. arg(), num(), num(), num()
local ROUNDING = 1e-9 -- who has waited as long as the answer said is served
local held = call('HMGET', key, 'level', 'at_ms')
local level = burst
if held[1] then level = math.min(burst, tonumber(held[1]) + (now - tonumber(held[2])) * per_s / 1000) end
amount = math.min(amount, burst)
if level + ROUNDING < amount then return math.max(1, math.ceil((amount - level) / per_s * 1000)) end
call('HSET', key, 'level', string.format('%.17g', math.max(0, level - amount)), 'at_ms', string.format('%.0f', now))
call('PEXPIRE', key, math.ceil(burst / per_s * 1000) + 1000) -- it is full then, as one that was never used
return 0

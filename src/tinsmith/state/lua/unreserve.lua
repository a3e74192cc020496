-- Give a unit of a quota back. ARGV: quota, holder.
call('ZREM', 'quota:' .. arg(), arg())
return 1
